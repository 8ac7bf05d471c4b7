"""Launches of the Triton kernel: what CUDA runs, in float32, bfloat16 and float16."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._define import compile_together, launch
from flacompose.ops._varlen import bounds
from flacompose.ops.families._launch import block, segment_count, tile_count
from flacompose.ops.families._op import rows
from flacompose.ops.families.scan.kernels import scan_kernel


@compile_together
def chunk(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D])``."""
    return _forward(_Scan(x, cu_seqlens, *scan_config(x.shape[2])), x, g, initial_state)


def recurrent(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D])``."""
    return _forward(_Scan(x, cu_seqlens, *token_config(x.shape[2])), x, g, initial_state)


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
    scan = _Scan(x, cu_seqlens, *scan_config(x.shape[2]))
    dx, dg, states = scan.per_token(x), scan.per_token(g), scan.before_chunks()
    d_initial_state = None if initial_state is None else scan.state(initial_state.dtype)
    do = torch.zeros_like(x) if do is None else do
    x, g, do = x.contiguous(), g.contiguous(), do.contiguous()

    scan.sweep(x, g, initial_state, states=states)
    scan.sweep(x, g, d_final_state, do=do, out=dx, dg=dg, states=states, final=d_initial_state)
    d_initial_state = x.new_empty(0) if d_initial_state is None else d_initial_state
    return scan.batched(dx), scan.batched(dg), d_initial_state


def _forward(scan: _Scan, x: Tensor, g: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    o, final_state = scan.per_token(x), scan.state(torch.float32)
    scan.sweep(x.contiguous(), g.contiguous(), initial_state, out=o, final=final_state)
    return scan.batched(o), final_state


class _Scan:
    """The launches of one call, and the memory that they fill."""

    def __init__(
        self, x: Tensor, cu_seqlens: Tensor | None, C: int, BD: int, warps: int, stages: int, cut: bool
    ) -> None:
        _, self.T, self.D = x.shape
        self.C, self.BD, self.warps, self.stages = C, BD, warps, stages
        self.device = x.device
        self.cu_seqlens = None if cu_seqlens is None else bounds(cu_seqlens, self.T)
        self.N = rows(x, cu_seqlens)
        self.NT = (self.T + C - 1) // C
        self.tiles = tile_count(self.D, BD)
        programs = self.tiles if cu_seqlens is None else self.tiles * self.N
        self.segments = segment_count(self.NT, programs) if cut else 1
        self.split = not (isinstance(self.segments, int) and self.segments == 1)

    def per_token(self, x: Tensor) -> Tensor:
        """Memory for an output like `x`, without the batch axis; tokens in no sequence are written by nobody."""
        new = x.new_empty if self.cu_seqlens is None else x.new_zeros
        # A batch axis of 1 stops Inductor in PyTorch 2.11, where it clones such memory.
        return new(x.shape[0] * x.shape[1], self.D)

    def batched(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self.T))

    def state(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.N, self.D, dtype=dtype, device=self.device)

    def before_chunks(self) -> Tensor:
        """Memory for the state before each chunk."""
        chunks = self.N * self.NT if self.cu_seqlens is None else self.NT + self.N
        # Longer by one than is used: a leading dimension that may be 1 is a guard on the length when it is symbolic.
        return torch.empty(chunks + 1, self.D, dtype=torch.float32, device=self.device)

    def sweep(
        self,
        x: Tensor,
        g: Tensor,
        initial: Tensor | None,
        do: Tensor | None = None,
        out: Tensor | None = None,
        dg: Tensor | None = None,
        states: Tensor | None = None,
        final: Tensor | None = None,
    ) -> None:
        """Fill `out` or `states` from the state `initial`; with `do`, backwards in time."""
        initial = None if initial is None else initial.contiguous()
        segment_state = segment_gate = None
        if self.split:
            segment_state, segment_gate = (
                torch.empty(self.segments + 1, self.N, self.D, dtype=torch.float32, device=self.device)
                for _ in range(2)
            )
            self._launch(x, g, do, initial, segment_state, segment_gate, None, None, None, None)
        self._launch(x, g, do, initial, segment_state, segment_gate, out, dg, states, final)

    def _launch(self, x: Tensor, g: Tensor, do: Tensor | None, *others: Tensor | None) -> None:
        launch(
            scan_kernel,
            (self.N * self.tiles * self.segments,),
            x,
            g,
            do,
            *others,
            self.cu_seqlens,
            self.T,
            self.N,
            self.segments,
            self.D,
            C=self.C,
            BD=self.BD,
            SPLIT=self.split,
            REVERSE=do is not None,
            num_warps=self.warps,
            num_stages=self.stages,
        )


def scan_config(D: int) -> tuple[int, int, int, int, bool]:
    """Tokens of a chunk, channels of a program, warps, pipeline stages, and whether long rows are cut."""
    return 64, block(D, 32), 1, 3, True


def token_config(D: int) -> tuple[int, int, int, int, bool]:
    """Likewise, token by token."""
    return 1, block(D, 128), 1, 3, False
