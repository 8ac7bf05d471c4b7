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
from flacompose.ops._recurrences.elementwise.selective_scan import eager
from flacompose.ops._recurrences.elementwise.selective_scan.inputs import Inputs
from flacompose.ops._recurrences.elementwise.selective_scan.kernels import (
    Found,
    Given,
    Results,
    selective_scan_gradient_kernel,
    selective_scan_kernel,
)

# Tokens of a chunk. The state before each chunk is kept for the backward: S / 16 float32 numbers per input.
CHUNK = 16
# The most numbers of a state in a tile: of kernels that sum over them, and sums of several tiles are added up outside;
# of those that do not, so that more programs run.
STATES, STATES_ALONE = 16, 8
# (tokens of a tile, a divisor of `CHUNK`; its most channels).
SWEEP, GRADIENT = (8, 32), (8, 16)


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D, S])``."""
    run = _Launches(inputs)
    y, final_state = run.per_channel(inputs.x.dtype), run.per_sequence(run.D, run.S)
    run.forwards(run.around, y=y, final=final_state)
    o = run.summed(y)
    # A sum over several tiles is not gated by the kernel.
    return o if run.state_tiles == 1 else eager.gated(inputs, o), final_state


def ends(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(end [N, D, S], sum_dt [N, D])``."""
    run = _Launches(inputs)
    return run.row.map(run.pass_states)


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    wants, inputs, run = call.wants, call.inputs, _Launches(call.inputs)
    state, do, dz, around = (run.D, run.S), call.do.contiguous(), None, run.around
    in_kernel = wants("dt", "dt_bias", "A", "C") or (wants("z") and run.state_tiles == 1)
    before = run.per_chunk(*state) if in_kernel else None
    if inputs.z is not None and run.state_tiles > 1:
        y = run.per_channel(inputs.x.dtype) if wants("z") else None
        if y is not None:
            run.forwards(y=y)
        do, dz = eager.of_gate(inputs, inputs.z, None if y is None else run.summed(y), do)
    elif inputs.z is not None and wants("z"):
        dz = run.per_token(run.D, dtype=inputs.z.dtype)
    if before is not None:
        run.forwards(before=before)
    # The gradient of a state does not depend on the skip.
    pass_states = partial(run.pass_states, x=do, given=around._replace(skip=None), REVERSE=True)
    d_final = run.row.starts(pass_states, call.arriving.final_state)

    sizes, count = run.sizes(*GRADIENT, STATES), run.row.count
    programs, BD = run.programs(sizes), sizes["BD"]
    per_group = tile_count(run.P, BD), run.G, run.S
    start = call.wanted_input("initial_state")
    found = Found(
        dx=run.per_channel(inputs.x.dtype) if wants("x") else None,
        ddt=run.per_channel(inputs.dt.dtype) if wants("dt") else None,
        dA=run.per_segment(count, *state) if wants("A") else None,
        # A sum over the channels of a group; each tile of channels has its own.
        dB=run.per_token(*per_group, dtype=torch.float32) if wants("B") else None,
        dC=run.per_token(*per_group, dtype=torch.float32) if wants("C") else None,
        dz=dz if run.state_tiles == 1 else None,
        d_skip=run.per_segment(count, run.D) if wants("D") else None,
        d_bias=run.per_segment(count, run.state_tiles, run.D) if wants("dt_bias") else None,
        d_initial=None if start is None else run.per_sequence(*state, dtype=start.dtype),
    )
    launch(
        selective_scan_gradient_kernel,
        (programs,),
        **run.operands,
        **run.arguments,
        **sizes,
        given=around._replace(skip=run.skip),
        do=do,
        before=before,
        d_final=d_final,
        gradients=found,
        scratch=torch.empty(programs * 3 * CHUNK * BD, dtype=torch.float32, device=run.device),
        SOFTPLUS=inputs.softplus,
    )
    return call.select(
        x=lambda: run.summed(found.dx),
        dt=lambda: run.summed(found.ddt),
        A=lambda: found.dA[:count].sum((0, 1)),
        B=lambda: run.batched(found.dB).sum(2),
        C=lambda: run.batched(found.dC).sum(2),
        D=lambda: found.d_skip[:count].sum((0, 1)),
        z=dz if dz is None or run.state_tiles > 1 else run.batched(dz),
        dt_bias=lambda: found.d_bias[:count].sum((0, 1, 2)),
        initial_state=found.d_initial,
    )


class _Launches(Sequences):
    """The launches of one call."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs.x, inputs.cu_seqlens, CHUNK)
        (self.D, self.S), self.G = inputs.A.shape, inputs.B.shape[2]
        self.P, self.initial = self.D // self.G, inputs.initial_state
        x, dt, A, D, z, bias = (
            None if y is None else y.contiguous()
            for y in (inputs.x, inputs.dt, inputs.A, inputs.D, inputs.z, inputs.dt_bias)
        )
        # All channels read B and C, so they are converted once, not by each channel. `contiguous`, because
        # stack keeps the layout of images if tokens are last in memory.
        BC = torch.stack((inputs.B, inputs.C), 3).float().contiguous()
        self.state_tiles, self.softplus = tile_count(self.S, STATES), inputs.softplus
        self.operands = {"x": x, "A": A, "BC": BC}
        self.alone, self.skip = Given(dt, bias, None, None), D
        self.around = Given(dt, bias, D, z) if self.state_tiles == 1 else self.alone
        self.arguments |= {"D": self.D, "S": self.S, "G": self.G, "CHUNK": CHUNK}
        # In units of 32 tokens a segment has at least 64 * 32 = 2,048. Programs of one warp are small, so
        # twice as many run.
        channel_tiles = tile_count(self.P, SWEEP[1])
        programs = tile_count(self.state_tiles * self.G * channel_tiles, 2)
        self.row = Segments(self, self.T // 32, programs, (self.D, self.S), {"gk": "sum_dt"}, A)
        self.arguments["SEGMENTS"] = self.row.count

    def per_channel(self, dtype: torch.dtype) -> Tensor:
        """Memory for a sum over the states: for each of several tiles, in float32."""
        if self.state_tiles == 1:
            return self.per_token(self.D, dtype=dtype)
        return self.per_token(self.state_tiles, self.D, dtype=torch.float32)

    def summed(self, x: Tensor) -> Tensor:
        """``[B, T, D]``, the sum over the tiles of memory from `per_channel`."""
        x = self.batched(x)
        return x if self.state_tiles == 1 else x.sum(2)

    def sizes(self, TOKENS: int, channels: int, states: int) -> dict[str, int]:
        """The sizes of tiles of at most so many channels and numbers of a state."""
        sizes = (self.P, channels), (self.S, states)
        BD, BS = (min(1 << (size - 1).bit_length(), most) for size, most in sizes)
        return {"TOKENS": TOKENS, "BD": BD, "BS": BS, "num_warps": 1}

    def programs(self, sizes: dict[str, int]) -> int:
        tiles = tile_count(self.S, sizes["BS"]) * self.G * tile_count(self.P, sizes["BD"])
        return self.N * self.row.count * tiles

    def forwards(self, given: Given | None = None, **results: Any) -> None:
        """Fill those of `Results` that are given."""
        initial = self.row.starts(self.pass_states, self.initial)
        self.pass_states(initial=initial, given=given, **results)

    def pass_states(
        self,
        initial: Tensor | None = None,
        given: Given | None = None,
        REVERSE: bool = False,
        x: Tensor | None = None,
        **results: Any,
    ) -> None:
        """Launch `selective_scan_kernel`, which fills the given results; backwards, `x` is the output's gradient."""
        sizes = self.sizes(*SWEEP, STATES if "y" in results else STATES_ALONE)
        launch(
            selective_scan_kernel,
            (self.programs(sizes),),
            **(self.operands if x is None else self.operands | {"x": x}),
            **self.arguments,
            **sizes,
            SOFTPLUS=self.softplus,
            given=given or self.alone,
            initial=initial,
            results=Results(**dict.fromkeys(Results._fields) | results),
            REVERSE=REVERSE,
        )
