"""Launches of the Triton kernels on CUDA, in float32, bfloat16 and float16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch, launches_into_graph
from flacompose.ops._launch.operands import block, tile_count
from flacompose.ops._launch.sequences import Sequences
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.short_conv import eager
from flacompose.ops._recurrences.short_conv.inputs import MAX_WIDTH, Inputs
from flacompose.ops._recurrences.short_conv.kernels import short_conv_gradient_kernel, short_conv_kernel
from flacompose.ops._tensors.sizes import always_true

# (tokens of a chunk, tokens loaded together, most columns of the weight in a thread, over all its channels). A
# thread has 16 bytes of channels, or fewer for wide convolutions.
FORWARD, TOKEN, BACKWARD = (64, 4, 32), (1, 1, 32), (128, 4, 16)


def forward(inputs: Inputs, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """``(y [B, T, D], final_state [N, D, W])``.

    With `in_place` and one token, the kernel writes the final state over a copy of the initial state. A program
    is a single warp, which loads everything before it stores. The dtype of the state must represent the inputs
    exactly, so that the final state is the same in a graph and outside.
    """
    x, weight, bias, initial_state, cu_seqlens, silu = inputs
    one_token = always_true(x.shape[1] == 1)
    # In a graph, Inductor fuses the few products of one token with its neighbours, but makes three kernels if
    # the state is overwritten in place.
    state = initial_state if in_place and one_token and _holds(initial_state, x) else None
    apart = one_token and cu_seqlens is None and launches_into_graph() and state is None
    if apart or _has_no_kernel(x, weight):
        return eager.forward(inputs)
    walk = _Launches(x, weight, cu_seqlens, silu, *(TOKEN if one_token else FORWARD))
    y = walk.per_token(walk.D, dtype=x.dtype, every=True)
    if state is None:
        final_state = walk.per_sequence(walk.D, walk.W)
    else:
        initial_state = final_state = state.clone(memory_format=torch.contiguous_format)
    walk(short_conv_kernel, x, weight, bias, initial_state, y=y, final=final_state)
    return walk.batched(y), final_state.to(torch.float32)


def update(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """`forward` that overwrites the old state in a graph."""
    return forward(inputs, in_place=launches_into_graph())


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The requested gradients."""
    x, weight, bias, initial_state, cu_seqlens, silu = call.inputs
    if _has_no_kernel(x, weight):
        return eager.backward(call)
    wants, d_final_state = call.wants, call.arriving.final_state
    steps, together, columns = BACKWARD
    # The loop continues to the tokens after a chunk that read its last inputs.
    walk = _Launches(x, weight, cu_seqlens, silu, steps - weight.shape[1] + 1, together, columns)
    D, W = walk.D, walk.W
    dx = walk.per_token(D, dtype=x.dtype, every=True) if wants("x") else None
    d_weight = walk.per_chunk(W, D) if wants("weight") else None
    d_bias = walk.per_chunk(D) if wants("bias") else None
    start = call.wanted_input("initial_state")
    d_initial_state = None if start is None else walk.per_sequence(D, W, dtype=start.dtype)
    dy = _with_unit_stride(call.do)
    given = {"dy": dy, "d_final": None if d_final_state is None else d_final_state.contiguous()}
    given |= {"dx": dx, "d_weight": d_weight, "d_bias": d_bias, "d_initial": d_initial_state}
    strides = {"dy_row": dy.stride(0), "dy_token": dy.stride(1)}
    walk(short_conv_gradient_kernel, x, weight, bias, initial_state, **given, **strides)
    if d_weight is not None:
        d_weight = d_weight.sum(0).mT.to(weight.dtype, copy=True, memory_format=torch.contiguous_format)
    return call.select(
        x=None if dx is None else walk.batched(dx),
        weight=d_weight,
        bias=None if d_bias is None else d_bias.sum(0),
        initial_state=d_initial_state,
    )


class _Launches(Sequences):
    """The launches of one call, in chunks of `C` tokens. `together` tokens are loaded at a time."""

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
        sizes = {"D": self.D, "W": self.W, "C": C, "U": together, "BD": BD}
        # One warp: of several, one might overwrite a state that another has not read yet.
        self.arguments |= {**sizes, "SILU": silu, "num_warps": 1}

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
            # Tokens in no sequence have chunks of their own, so there is one more than `chunks` counts.
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


def _has_no_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether the weight has too many columns, or there are no tokens and so no chunk that stores a state."""
    return weight.shape[1] > MAX_WIDTH or always_true(x.shape[1] == 0)


def _holds(state: Tensor | None, x: Tensor) -> bool:
    """Whether the dtype of the state represents all numbers of the dtype of `x`."""
    return state is not None and torch.promote_types(state.dtype, x.dtype) == state.dtype


def _with_unit_stride(x: Tensor) -> Tensor:
    """``x [B, T, D]`` with contiguous channels, and any strides of rows and tokens."""
    return x if always_true(x.stride(2) == 1) else x.contiguous()
