"""Launches of the Triton kernel: what CUDA runs, in float32, bfloat16 and float16."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._define import compile_together, launch
from flacompose.ops._varlen import bounds
from flacompose.ops.families._launch import block, segment_count, tile_count
from flacompose.ops.families._op import rows
from flacompose.ops.families.scan.kernels import scan_kernel

# Tokens of a tile, a divisor of `UNIT`, and pipeline stages: of a scan, of one that finds segments' ends, and by token.
SCAN_CONFIG, END_CONFIG, TOKEN_CONFIG = (8, 4), (16, 1), (1, 1)


@compile_together
def chunk(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D])``."""
    return _forward(_Scan(x, cu_seqlens), x, g, initial_state)


def recurrent(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D])``."""
    return _forward(_Scan(x, cu_seqlens, by_token=True), x, g, initial_state)


@compile_together
def backward(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    do: Tensor | None,
    d_final_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, dg, d_initial_state)``, the last empty if the state is absent."""
    scan = _Scan(x, cu_seqlens)
    dx, dg = scan.per_token(x), scan.per_token(g)
    # float16 does not reach down to what strong gates leave.
    left = dg if g.dtype != torch.float16 else scan.per_token(g, torch.float32)
    d_initial_state = None if initial_state is None else scan.state(initial_state.dtype)
    do = torch.zeros_like(x) if do is None else do
    g = g.contiguous()

    scan(x.contiguous(), g, initial_state, out=left, only_left=True)
    scan(
        do.contiguous(),
        g,
        d_final_state,
        left=None if left is dg else left,
        out=dx,
        dg=dg,
        final=d_initial_state,
        reverse=True,
    )
    d_initial_state = x.new_empty(0) if d_initial_state is None else d_initial_state
    return scan.batched(dx), scan.batched(dg), d_initial_state


def _forward(scan: _Scan, x: Tensor, g: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    o, final_state = scan.per_token(x), scan.state(torch.float32)
    scan(x.contiguous(), g.contiguous(), initial_state, out=o, final=final_state)
    return scan.batched(o), final_state


class _Scan:
    """The launches of one call, and the memory that they fill."""

    def __init__(self, x: Tensor, cu_seqlens: Tensor | None, by_token: bool = False) -> None:
        _, self.T, self.D = x.shape
        self.by_token = by_token
        self.device = x.device
        self.cu_seqlens = None if cu_seqlens is None else bounds(cu_seqlens, self.T)
        self.N = rows(x, cu_seqlens)

    def per_token(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for an output like `x`, without the batch axis; tokens in no sequence are written by nobody."""
        new = x.new_empty if self.cu_seqlens is None else x.new_zeros
        # A batch axis of 1 stops Inductor in PyTorch 2.11, where it clones such memory.
        return new(x.shape[0] * x.shape[1], self.D, dtype=dtype)

    def batched(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self.T))

    def state(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.N, self.D, dtype=dtype, device=self.device)

    def __call__(
        self,
        x: Tensor,
        g: Tensor,
        initial: Tensor | None,
        left: Tensor | None = None,
        out: Tensor | None = None,
        dg: Tensor | None = None,
        final: Tensor | None = None,
        only_left: bool = False,
        reverse: bool = False,
    ) -> None:
        """Fill `out` and `final` from the state `initial`, and `dg` backwards in time, where `x` is the gradient of h.

        `only_left`: with what is left of the state before each token, instead of h.
        """
        BD = block(self.D, 256 if self.by_token else 64)
        tiles = tile_count(self.D, BD)
        programs = tiles if self.cu_seqlens is None else tiles * self.N
        # Of fewer tokens than those of other families: a tile is a few instructions.
        segments = 1 if self.by_token else segment_count(tile_count(self.T, 32), programs)
        split = not (isinstance(segments, int) and segments == 1)
        initial = None if initial is None else initial.contiguous()

        def sweep(C: int, stages: int, *tensors: Tensor | None) -> None:
            launch(
                scan_kernel,
                (self.N * tiles * segments,),
                x,
                g,
                *tensors,
                self.cu_seqlens,
                self.T,
                self.N,
                segments,
                D=self.D,
                C=C,
                BD=BD,
                STAGES=stages,
                SPLIT=split,
                LEFT=only_left,
                REVERSE=reverse,
                num_warps=1,
            )

        ends: tuple[Tensor | None, ...] = None, None
        if split:
            # Longer by one than is used: a leading dimension that may be 1 is a guard on a symbolic length.
            shape = (segments + 1, self.N, self.D)
            ends = tuple(torch.empty(shape, dtype=torch.float32, device=self.device) for _ in range(2))
            sweep(*END_CONFIG, None, initial, *ends, None, None, None)
        sweep(*(TOKEN_CONFIG if self.by_token else SCAN_CONFIG), left, initial, *ends, out, dg, final)
