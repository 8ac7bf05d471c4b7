"""Launches of the Triton kernel: what CUDA runs, in float32, bfloat16 and float16."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._define import launch
from flacompose.ops._varlen import bounds
from flacompose.ops.families._compile import compile_ahead
from flacompose.ops.families._launch import batched, block, per_token, segment_count, tile_count
from flacompose.ops.families._op import rows
from flacompose.ops.families.scan.kernels import scan_kernel

# Tokens of a tile, a divisor of `UNIT`, and pipeline stages: of a scan, of one that finds segments' ends, and by token.
SCAN_CONFIG, END_CONFIG, TOKEN_CONFIG = (8, 4), (16, 1), (1, 1)


@compile_ahead
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


@compile_ahead
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
    return batched(dx, scan.T), batched(dg, scan.T), d_initial_state


chunk.backward = backward


def _forward(scan: _Scan, x: Tensor, g: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    o, final_state = scan.per_token(x), scan.state(torch.float32)
    scan(x.contiguous(), g.contiguous(), initial_state, out=o, final=final_state)
    return batched(o, scan.T), final_state


class _Scan:
    """The launches of one call, and the memory that they fill."""

    def __init__(self, x: Tensor, cu_seqlens: Tensor | None, by_token: bool = False) -> None:
        _, self.T, self.D = x.shape
        self.by_token = by_token
        self.device = x.device
        self.cu_seqlens = None if cu_seqlens is None else bounds(cu_seqlens, self.T)
        self.N = rows(x, cu_seqlens)

    def per_token(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return per_token(x, self.D, packed=self.cu_seqlens is not None, dtype=dtype)

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
        # A segment has 2,048 tokens at least, and so 64 times 32.
        segments = 1 if self.by_token else segment_count(self.T // 32, programs)
        split = not (isinstance(segments, int) and segments == 1)
        initial = None if initial is None else initial.contiguous()
        ends: tuple[Tensor | None, Tensor | None] = None, None
        if split:
            # Longer by one than is used: a leading dimension that may be 1 is a guard on a symbolic length.
            shape = segments + 1, self.N, self.D
            state, gate = (torch.empty(shape, dtype=torch.float32, device=self.device) for _ in range(2))
            ends = state, gate

        def sweep(
            config: tuple[int, int],
            left: Tensor | None,
            out: Tensor | None,
            dg: Tensor | None,
            final: Tensor | None,
        ) -> None:
            C, stages = config
            launch(
                scan_kernel,
                (self.N * tiles * segments,),
                x,
                g,
                left,
                initial,
                *ends,
                out,
                dg,
                final,
                self.cu_seqlens,
                self.T,
                self.N,
                segments,
                D=self.D,
                C=C,
                BD=BD,
                STAGES=stages,
                SPLIT=split,
                LEFT=only_left and out is not None,
                REVERSE=reverse,
                num_warps=1,
            )

        if split:
            sweep(END_CONFIG, left=None, out=None, dg=None, final=None)
        sweep(TOKEN_CONFIG if self.by_token else SCAN_CONFIG, left, out, dg, final)
