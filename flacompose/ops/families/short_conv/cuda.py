"""Launches of the Triton kernels: what CUDA runs, in float32, bfloat16 and float16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.ops._define import always_true, launch
from flacompose.ops.families._compile import compile_ahead
from flacompose.ops.families._launch import block, none_as_empty, tile_count
from flacompose.ops.families._sequences import Sequences
from flacompose.ops.families.short_conv.inputs import Inputs
from flacompose.ops.families.short_conv.kernels import backward_kernel, forward_kernel

# Of each walk: its steps in a chunk, how many of them are loaded together, and the columns that a thread's registers
# hold beside the sums: one thread has as many channels as 16 bytes hold or, of a wide convolution, fewer.
FORWARD, BACKWARD = (64, 8, 32), (128, 4, 16)


@compile_ahead
def forward(*args: Any) -> tuple[Tensor, Tensor]:
    """``(y [B, T, D], final_state [N, D, W])``."""
    x, weight, bias, initial_state, cu_seqlens, silu = Inputs(*args)
    # A single token has no others to be loaded with.
    walk = _Launches(x, weight, cu_seqlens, silu, *((1, 1, 32) if always_true(x.shape[1] == 1) else FORWARD))
    y = x.new_empty(x.shape)
    final_state = walk.per_sequence(walk.D, walk.W)
    walk(forward_kernel, x, weight, bias, initial_state, y=y, final=final_state)
    return y, final_state


@compile_ahead
def backward(*args: Any) -> tuple[Tensor, ...]:
    """``(dx, dweight, dbias, d_initial_state)``, empty where `output_mask` does not want them."""
    inputs, (dy, d_final_state, output_mask) = Inputs(*args[:-3]), args[-3:]
    x, weight, bias, initial_state, cu_seqlens, silu = inputs
    wants_x, wants_weight, wants_bias, wants_state = output_mask
    steps, together, columns = BACKWARD
    # A chunk is so long that a whole number of loads also covers the tokens after it that read its last inputs.
    walk = _Launches(x, weight, cu_seqlens, silu, max(steps - weight.shape[1] + 1, 16), together, columns)
    D, W = walk.D, walk.W
    dx = x.new_empty(x.shape) if wants_x else None
    d_weight = walk.per_chunk(W, D) if wants_weight else None
    d_bias = walk.per_chunk(D) if bias is not None and wants_bias else None
    d_initial_state = None
    if initial_state is not None and wants_state:
        d_initial_state = walk.per_sequence(D, W, dtype=initial_state.dtype)
    dy = _with_unit_stride(torch.zeros_like(x) if dy is None else dy)
    walk(
        backward_kernel,
        x,
        weight,
        bias,
        initial_state,
        dy=dy,
        d_final=None if d_final_state is None else d_final_state.contiguous(),
        dx=dx,
        d_weight=d_weight,
        d_bias=d_bias,
        d_initial=d_initial_state,
        dy_row=dy.stride(0),
        dy_token=dy.stride(1),
    )
    if d_weight is not None:
        d_weight = d_weight.sum(0).mT.to(weight.dtype, copy=True, memory_format=torch.contiguous_format)
    if d_bias is not None and bias is not None:
        d_bias = d_bias.sum(0).to(bias.dtype)
    return none_as_empty(x, dx, d_weight, d_bias, d_initial_state)


forward.backward = backward


class _Launches(Sequences):
    """The launches of one call, in chunks of `C` tokens, of which `together` are loaded at a time."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        cu_seqlens: Tensor | None,
        silu: bool,
        C: int,
        together: int,
        columns: int,
    ) -> None:
        super().__init__(x, cu_seqlens, C)
        self.D, self.W = weight.shape
        channels = max(1, min(16 // x.element_size(), columns >> (self.W - 1).bit_length()))
        BD = block(self.D, 32 * channels)
        self.tiles = tile_count(self.D, BD)
        # As many steps as are written out together are fewer where each has many columns.
        U = max(1, min(together, 64 >> (self.W - 1).bit_length()))
        self.arguments |= {"D": self.D, "W": self.W, "C": C, "U": U, "BD": BD, "SILU": silu, "num_warps": 1}

    def __call__(
        self,
        kernel: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        initial: Tensor | None,
        **others: Any,
    ) -> None:
        x = _with_unit_stride(x)
        launch(
            kernel,
            # Tokens in no sequence have chunks of their own, one more than are counted.
            ((self.chunks + 1) * self.tiles,),
            x=x,
            weight=weight.contiguous(),
            bias=None if bias is None else bias.contiguous(),
            initial=None if initial is None else initial.contiguous(),
            **others,
            **self.arguments,
            x_row=x.stride(0),
            x_token=x.stride(1),
        )


def _with_unit_stride(x: Tensor) -> Tensor:
    """``x [B, T, D]``, its rows and tokens of any strides, as of a part of a wider projection, and channels of 1."""
    return x if always_true(x.stride(2) == 1) else x.contiguous()
