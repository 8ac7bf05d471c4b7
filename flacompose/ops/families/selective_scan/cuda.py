"""Launches of the Triton kernels: what CUDA runs, in float32, bfloat16 and float16.

Backwards, a sweep forwards in time stores the states before chunks, the time steps, and the gradient of the output
before its skip and its gate. The kernels after it take these as those of the scan alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launching import launch
from flacompose.ops.families._launch import by_token, tile_count
from flacompose.ops.families._segments import Segments
from flacompose.ops.families._sequences import Sequences
from flacompose.ops.families._signature import BackwardCall, Gradients
from flacompose.ops.families.selective_scan.inputs import STATES, Inputs
from flacompose.ops.families.selective_scan.kernels import gradient_kernel, sweep_kernel

# Tokens of a chunk, before which the backward keeps the state: S / 16 float32 numbers for each input.
CHUNK = 16
# Tokens of a tile, a divisor of `CHUNK`, and its channels at most.
SWEEP, GRADIENT = (16, 32), (8, 16)


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D, S])``."""
    x, scan = inputs.x, _Launches(inputs)
    y = scan.per_channel(x.dtype)
    final_state = scan.per_sequence(scan.D, scan.S)
    scan.forwards(x.contiguous(), inputs.initial_state, y=y, final=final_state, **scan.around)
    return scan.summed(y, x.dtype), final_state


def ends(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(end [N, D, S], sum_dt [N, D])``."""
    scan = _Launches(inputs)
    row = scan.row(SWEEP)
    return row.map(partial(scan.sweep, row.count, inputs.x.contiguous()))


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    inputs, wants, wanted = call.inputs, call.wants, call.wanted_input
    x, dt, z = inputs.x.contiguous(), inputs.dt, wanted("z")
    scan = _Launches(inputs)
    D, S = scan.D, scan.S
    do = dy = call.do.contiguous()
    before = dz = d_skip = None
    by_states = wants("dt", "A", "C", "dt_bias")
    if inputs.z is not None or scan.makes_steps or by_states or wants("D"):
        before = scan.per_chunk(D, S) if by_states else None
        given = scan.around | ({"do": do} if scan.around else {})
        if inputs.z is not None:
            dy = given["dy"] = scan.per_token(D, dtype=do.dtype)
        if z is not None:
            dz = given["dz"] = scan.per_token(D, dtype=z.dtype)
        if wants("D"):
            d_skip = given["d_skip"] = scan.sums(SWEEP, D)
        if scan.makes_steps:
            given["delta"] = scan.per_token(D, dtype=torch.float32)
        scan.forwards(x, inputs.initial_state, before=before, **given)
        if scan.makes_steps:
            scan.steps = {"dt": given["delta"], "dt_bias": None, "SOFTPLUS": False}
    dx, ddt = (scan.per_channel(y.dtype) if wants(name) else None for name, y in (("x", x), ("dt", dt)))
    dB, dC = (scan.per_group() if wants(name) else None for name in ("B", "C"))
    dA = scan.sums(GRADIENT, D, S) if wants("A") else None
    d_bias = scan.sums(GRADIENT, D) if wants("dt_bias") else None
    start = wanted("initial_state")
    d_initial = None if start is None else scan.per_sequence(D, S, dtype=start.dtype)
    outputs = {"dx": dx, "ddt": ddt, "dA": dA, "d_bias": d_bias, "dB": dB, "dC": dC, "d_initial": d_initial}
    if any(y is not None for y in outputs.values()):  # the sweep has those of D and z
        scan.gradients(x, dy, call.arriving.final_state, before=before, **outputs)
    return call.made(
        x=None if dx is None else scan.summed(dx, x.dtype),
        dt=None if ddt is None else scan.summed(ddt, dt.dtype),
        A=scan.of_segments(GRADIENT, dA),
        B=None if dB is None else scan.batched(dB).sum(2),
        C=None if dC is None else scan.batched(dC).sum(2),
        D=scan.of_segments(SWEEP, d_skip),
        z=None if dz is None else scan.batched(dz),
        dt_bias=scan.of_segments(GRADIENT, d_bias),
        initial_state=d_initial,
    )


class _Launches(Sequences):
    """The launches of one call."""

    def __init__(self, inputs: Inputs) -> None:
        x, dt, A, B, C, _, skip, z, dt_bias, cu_seqlens, self.softplus = inputs
        super().__init__(x, cu_seqlens, CHUNK)
        self.D, self.S = A.shape
        self.G = B.shape[2]
        # All channels read B and C, so they are converted once and not by each. Where tokens are last in memory, stack
        # takes that for the layout of images, which it keeps.
        BC = torch.stack((B, C), 3).float().contiguous()
        self.BS = min(1 << (self.S - 1).bit_length(), STATES)
        self.state_tiles = tile_count(self.S, self.BS)
        self.arguments |= {"A": A.contiguous(), "BC": BC}
        self.arguments |= {"D": self.D, "S": self.S, "G": self.G}
        self.arguments |= {"CHUNK": CHUNK, "BS": self.BS}
        # What makes the time steps, and what is done to the output of the scan.
        dt_bias = None if dt_bias is None else dt_bias.contiguous()
        self.steps: dict[str, Any] = {"dt": dt.contiguous(), "dt_bias": dt_bias, "SOFTPLUS": self.softplus}
        self.makes_steps = self.softplus or dt_bias is not None
        self.around: dict[str, Any] = {} if skip is None else {"skip": skip.contiguous()}
        if z is not None:
            z, token = by_token(z.unsqueeze(2))
            self.around |= {"z": z, "z_token": token}
        assert self.state_tiles == 1 or not (self.around or self.makes_steps), (
            "a program must have a whole state"
        )

    def per_channel(self, dtype: torch.dtype) -> Tensor:
        """Memory for what is a sum over the states: each tile of them has its own, in float32, if there are several."""
        if self.state_tiles == 1:
            return self.per_token(self.D, dtype=dtype)
        return self.per_token(self.state_tiles, self.D, dtype=torch.float32)

    def summed(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``[B, T, D]`` of what `per_channel` gave."""
        x = self.batched(x)
        return x if self.state_tiles == 1 else x.sum(2).to(dtype)

    def per_group(self) -> Tensor:
        """Memory for what is a sum over the channels of a group: each tile of them has its own."""
        return self.per_token(self.tiles(GRADIENT)[1], self.G, self.S, dtype=torch.float32)

    def tiles(self, config: tuple[int, int]) -> tuple[int, int]:
        """The channels of a tile, and how many tiles a group has."""
        P = self.D // self.G
        BD = min(1 << (P - 1).bit_length(), config[1])
        return BD, tile_count(P, BD)

    def forwards(self, x: Tensor, initial: Tensor | None, **tensors: Tensor | None) -> None:
        """Launch `sweep_kernel`, in segments of long rows, which fills what is given."""
        row = self.row(SWEEP)
        sweep = partial(self.sweep, row.count, x, False)
        sweep(initial=row.starts(sweep, initial), **tensors)

    def gradients(self, x: Tensor, dy: Tensor, d_final: Tensor | None, **tensors: Tensor | None) -> None:
        """Fill what is given of the gradients."""
        row, (programs, sizes) = self.row(GRADIENT), self._sizes(GRADIENT)
        d_final = row.starts(partial(self.sweep, row.count, dy, True), d_final)
        given = {"x": x, "dy": dy, "d_final": d_final, **tensors, **self.arguments, "dt": self.steps["dt"]}
        given |= {"skip": self.around.get("skip"), "SOFTPLUS": self.softplus}
        launch(gradient_kernel, (self.N * programs * row.count,), **given, SEGMENTS=row.count, **sizes)

    def sums(self, config: tuple[int, int], *shape: int) -> Tensor:
        """Memory for a sum over the tokens of each segment."""
        row = self.row(config)
        return self.per_segment(row.count, *shape) if row.split else self.per_sequence(*shape)

    def of_segments(self, config: tuple[int, int], x: Tensor | None) -> Tensor | None:
        """The sum of what `sums` gave."""
        row = self.row(config)
        if x is None:
            return None
        return x[: row.count].sum((0, 1)) if row.split else x.sum(0)

    def sweep(self, SEGMENTS: int, x: Tensor, reverse: bool = False, **tensors: Tensor | None) -> None:
        """Launch `sweep_kernel`, which fills what is given."""
        programs, sizes = self._sizes(SWEEP)
        absent = dict.fromkeys(("initial", "y", "before", "ends", "sum_dt", "final", "skip", "z", "z_token"))
        absent |= dict.fromkeys(("do", "delta", "dy", "dz", "d_skip"))
        given = {**absent, **tensors, **self.arguments, **self.steps, "x": x, "SEGMENTS": SEGMENTS}
        launch(sweep_kernel, (self.N * programs * SEGMENTS,), **given, **sizes, REVERSE=reverse)

    def _sizes(self, config: tuple[int, int]) -> tuple[int, dict[str, int]]:
        """How many programs sweep a segment, and the sizes of their tiles."""
        BD, tiles = self.tiles(config)
        return self.state_tiles * self.G * tiles, {"TOKENS": config[0], "BD": BD, "num_warps": 1}

    def row(self, config: tuple[int, int]) -> Segments:
        """The segments of a row, where tiles are those of `config`."""
        # A segment has 2,048 tokens at least, and so 64 times 32. Programs of one warp are small: twice as many.
        programs, state = tile_count(self._sizes(config)[0], 2), (self.D, self.S)
        return Segments(self, self.T // 32, programs, state, {"gk": "sum_dt"}, self.arguments["A"])
