"""Launches of the Triton kernels on CUDA, in float32, bfloat16 and float16."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import tile_count
from flacompose.ops._launch.row_split import Segments
from flacompose.ops._launch.sequences import Sequences
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.elementwise.selective_scan.inputs import Inputs
from flacompose.ops._recurrences.elementwise.selective_scan.kernels import (
    selective_scan_gradient_kernel,
    selective_scan_kernel,
)

# Tokens of a chunk. The state before each chunk is kept for the backward: S / 16 float32 numbers per input.
CHUNK = 16
# The most numbers of a state in a tile. Sums of several tiles are added up outside the kernels.
STATES = 16
# (tokens of a tile, a divisor of `CHUNK`; its most channels).
SWEEP, GRADIENT = (16, 32), (8, 16)


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(y [B, T, D], final_state [N, D, S])``."""
    x, scan = inputs.x, _Launches(inputs)
    y = scan.per_channel(x.dtype)
    final_state = scan.per_sequence(scan.D, scan.S)
    scan.forwards(x.contiguous(), inputs.initial_state, y=y, final=final_state)
    return scan.summed(y, x.dtype), final_state


def ends(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(end [N, D, S], sum_dt [N, D])``."""
    scan = _Launches(inputs)
    row = scan.row(SWEEP)
    return row.map(partial(scan.sweep, row.count, inputs.x.contiguous()))


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    wants = call.wants
    x, dt, *_, initial_state, _ = call.inputs
    scan = _Launches(call.inputs)
    D, S = scan.D, scan.S
    dy = call.do.contiguous()
    x = x.contiguous()
    before = None
    if wants("dt", "A", "C"):
        before = scan.per_chunk(D, S)
        scan.forwards(x, initial_state, before=before)
    dx, ddt = (scan.per_channel(y.dtype) if wants(name) else None for name, y in (("x", x), ("dt", dt)))
    dB, dC = (scan.per_group() if wants(name) else None for name in ("B", "C"))
    start = call.wanted_input("initial_state")
    d_initial = None if start is None else scan.per_sequence(D, S, dtype=start.dtype)
    outputs = {"dx": dx, "ddt": ddt, "dB": dB, "dC": dC, "d_initial": d_initial}
    dA = scan.gradients(x, dy, call.arriving.final_state, wants("A"), before=before, **outputs)
    return call.made(
        x=None if dx is None else scan.summed(dx, x.dtype),
        dt=None if ddt is None else scan.summed(ddt, dt.dtype),
        A=dA,
        B=None if dB is None else scan.batched(dB).sum(2),
        C=None if dC is None else scan.batched(dC).sum(2),
        initial_state=d_initial,
    )


class _Launches(Sequences):
    """The launches of one call."""

    def __init__(self, inputs: Inputs) -> None:
        x, dt, A, B, C, _, cu_seqlens = inputs
        super().__init__(x, cu_seqlens, CHUNK)
        self.D, self.S = A.shape
        self.G = B.shape[2]
        # All channels read B and C, so they are converted once, not by each channel. `contiguous`, because
        # stack keeps the layout of images if tokens are last in memory.
        BC = torch.stack((B, C), 3).float().contiguous()
        self.BS = min(1 << (self.S - 1).bit_length(), STATES)
        self.state_tiles = tile_count(self.S, self.BS)
        self.arguments |= {"dt": dt.contiguous(), "A": A.contiguous(), "BC": BC}
        self.arguments |= {"D": self.D, "S": self.S, "G": self.G}
        self.arguments |= {"CHUNK": CHUNK, "BS": self.BS}

    def per_channel(self, dtype: torch.dtype) -> Tensor:
        """Memory for a sum over the states: for each of several tiles, in float32."""
        if self.state_tiles == 1:
            return self.per_token(self.D, dtype=dtype)
        return self.per_token(self.state_tiles, self.D, dtype=torch.float32)

    def summed(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``[B, T, D]``, the sum over the tiles of memory from `per_channel`."""
        x = self.batched(x)
        return x if self.state_tiles == 1 else x.sum(2).to(dtype)

    def per_group(self) -> Tensor:
        """Memory for a sum over the channels of a group: each tile of channels has its own."""
        return self.per_token(self.tiles(GRADIENT)[1], self.G, self.S, dtype=torch.float32)

    def tiles(self, config: tuple[int, int]) -> tuple[int, int]:
        """The number of channels of a tile, and of tiles of a group."""
        P = self.D // self.G
        BD = min(1 << (P - 1).bit_length(), config[1])
        return BD, tile_count(P, BD)

    def forwards(self, x: Tensor, initial: Tensor | None, **tensors: Tensor | None) -> None:
        """Fill `y`, `before` and `final`, if given."""
        row = self.row(SWEEP)
        sweep = partial(self.sweep, row.count, x, False)
        sweep(initial=row.starts(sweep, initial), **tensors)

    def gradients(
        self,
        x: Tensor,
        dy: Tensor,
        d_final: Tensor | None,
        wants_A: bool,
        **tensors: Any,
    ) -> Tensor | None:
        """Fill the given gradients, and return that of A."""
        row, (programs, sizes) = self.row(GRADIENT), self._sizes(GRADIENT)
        dA = None
        if wants_A:
            shape = self.D, self.S
            dA = self.per_segment(row.count, *shape) if row.split else self.per_sequence(*shape)
        d_final = row.starts(partial(self.sweep, row.count, dy, True), d_final)
        given = {"x": x, "dy": dy, "d_final": d_final, "dA": dA, **tensors, **self.arguments}
        launch(
            selective_scan_gradient_kernel,
            (self.N * programs * row.count,),
            **given,
            SEGMENTS=row.count,
            **sizes,
        )
        if dA is None:
            return None
        return dA[: row.count].sum((0, 1)) if row.split else dA.sum(0)

    def sweep(self, SEGMENTS: int, x: Tensor, reverse: bool = False, **tensors: Tensor | None) -> None:
        """Launch `selective_scan_kernel`, which fills the given results."""
        programs, sizes = self._sizes(SWEEP)
        absent = dict.fromkeys(("initial", "y", "before", "ends", "sum_dt", "final"))
        given = {**absent, **tensors, **self.arguments, "x": x, "SEGMENTS": SEGMENTS, "REVERSE": reverse}
        launch(selective_scan_kernel, (self.N * programs * SEGMENTS,), **given, **sizes)

    def _sizes(self, config: tuple[int, int]) -> tuple[int, dict[str, int]]:
        """The number of programs of a segment, and the sizes of their tiles."""
        BD, tiles = self.tiles(config)
        return self.state_tiles * self.G * tiles, {"TOKENS": config[0], "BD": BD, "num_warps": 1}

    def row(self, config: tuple[int, int]) -> Segments:
        """The segments of a row, for the tiles of `config`."""
        # In units of 32 tokens a segment has at least 64 * 32 = 2,048. Programs of one warp are small, so
        # twice as many run.
        programs, state = tile_count(self._sizes(config)[0], 2), (self.D, self.S)
        return Segments(self, self.T // 32, programs, state, {"gk": "sum_dt"}, self.arguments["A"])
