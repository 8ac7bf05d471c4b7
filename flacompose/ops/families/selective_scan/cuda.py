"""Launches of the Triton kernels: what CUDA runs, in float32, bfloat16 and float16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.ops._define import launch
from flacompose.ops.families._compile import compile_ahead
from flacompose.ops.families._launch import none_as_empty, tile_count
from flacompose.ops.families._sequences import Sequences
from flacompose.ops.families.selective_scan.inputs import Inputs
from flacompose.ops.families.selective_scan.kernels import gradient_kernel, sweep_kernel

# Tokens of a chunk, before which the backward keeps the state: S / 16 float32 numbers for each input.
CHUNK = 16
# The tokens of a tile, a divisor of `CHUNK`, its channels at most, and how many elements of it a thread has.
SWEEP, GRADIENT = (8, 32, 32), (8, 32, 32)
STATES = (
    16  # numbers of a state in a tile at most; the sums of several tiles are added up outside the kernels
)
STAGES = 3


@compile_ahead
def forward(*args: Any) -> tuple[Tensor, Tensor]:
    """``(y [B, T, D], final_state [N, D, S])``."""
    x, dt, A, B, C, initial_state, cu_seqlens = Inputs(*args)
    scan = _Launches(x, dt, A, B, cu_seqlens)
    y = scan.per_channel(x.dtype)
    final_state = scan.per_sequence(scan.D, scan.S)
    initial = None if initial_state is None else initial_state.contiguous()
    scan.sweep(x.contiguous(), B=B.contiguous(), C=C.contiguous(), initial=initial, y=y, final=final_state)
    return scan.summed(y, x.dtype), final_state


@compile_ahead
def backward(*args: Any) -> tuple[Tensor, ...]:
    """``(dx, ddt, dA, dB, dC, d_initial_state)``, empty where `output_mask` does not want them."""
    inputs, (dy, d_final_state, output_mask) = Inputs(*args[:-3]), args[-3:]
    x, dt, A, B, C, initial_state, cu_seqlens = inputs
    wants_x, wants_dt, wants_A, wants_B, wants_C, wants_state = output_mask
    scan = _Launches(x, dt, A, B, cu_seqlens)
    D, S = scan.D, scan.S
    dy = (torch.zeros_like(x) if dy is None else dy).contiguous()
    x, B, C = x.contiguous(), B.contiguous(), C.contiguous()
    before = None
    if wants_dt or wants_A or wants_C:
        before = scan.per_chunk(D, S)
        initial = None if initial_state is None else initial_state.contiguous()
        scan.sweep(x, B=B, initial=initial, before=before)
    dx, ddt = (scan.per_channel(y.dtype) if want else None for y, want in ((x, wants_x), (dt, wants_dt)))
    dB, dC = (scan.per_group() if want else None for want in (wants_B, wants_C))
    d_initial = None
    if initial_state is not None and wants_state:
        d_initial = scan.per_sequence(D, S, dtype=initial_state.dtype)
    outputs = {"dx": dx, "ddt": ddt, "dB": dB, "dC": dC, "d_initial": d_initial}
    dA = scan.gradients(x, B, C, dy, d_final_state, wants_A, before=before, **outputs)
    return none_as_empty(
        x,
        None if dx is None else scan.summed(dx, x.dtype),
        None if ddt is None else scan.summed(ddt, dt.dtype),
        None if dA is None else dA.to(A.dtype),
        None if dB is None else scan.batched(dB).sum(2).to(B.dtype),
        None if dC is None else scan.batched(dC).sum(2).to(C.dtype),
        d_initial,
    )


forward.backward = backward


class _Launches(Sequences):
    """The launches of one call."""

    def __init__(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, cu_seqlens: Tensor | None) -> None:
        super().__init__(x, cu_seqlens, CHUNK)
        self.D, self.S = A.shape
        self.G = B.shape[2]
        self.dt, self.A = dt.contiguous(), A.contiguous()
        self.BS = min(1 << (self.S - 1).bit_length(), STATES)
        self.state_tiles = tile_count(self.S, self.BS)
        self.arguments |= {"dt": self.dt, "A": self.A, "D": self.D, "S": self.S, "G": self.G}
        self.arguments |= {"CHUNK": CHUNK, "BS": self.BS}

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

    def tiles(self, config: tuple[int, int, int]) -> tuple[int, int]:
        """The channels of a tile, and how many tiles a group has."""
        P = self.D // self.G
        BD = min(1 << (P - 1).bit_length(), config[1])
        return BD, tile_count(P, BD)

    def sweep(self, x: Tensor, **tensors: Tensor | None) -> None:
        """Fill what is given of `y`, `before` and `final`, forwards in time."""
        SEGMENTS, split = self._segments(SWEEP)
        if split:
            tensors |= self._ends(SEGMENTS, x, B=tensors["B"])
        self._sweep(SEGMENTS, x, tensors)

    def gradients(
        self,
        x: Tensor,
        B: Tensor,
        C: Tensor,
        dy: Tensor,
        d_final: Tensor | None,
        wants_A: bool,
        **tensors: Any,
    ) -> Tensor | None:
        """Fill what is given of the gradients, return that of A."""
        SEGMENTS, split = self._segments(GRADIENT)
        ends = self._ends(SEGMENTS, dy, C=C) if split else dict.fromkeys(("segment_state", "segment_dt"))
        dA = None
        if wants_A:
            dA = self.per_segment(SEGMENTS, self.D, self.S) if split else self.per_sequence(self.D, self.S)
        programs, sizes = self._sizes(GRADIENT)
        launch(
            gradient_kernel,
            (self.N * programs * SEGMENTS,),
            x=x,
            B=B,
            C=C,
            dy=dy,
            d_final=None if d_final is None else d_final.contiguous(),
            dA=dA,
            **ends,
            **tensors,
            **self.arguments,
            SEGMENTS=SEGMENTS,
            **sizes,
        )
        if dA is None:
            return None
        return dA[:SEGMENTS].sum((0, 1)) if split else dA.sum(0)

    def _ends(self, SEGMENTS: int, x: Tensor, **of_states: Tensor | None) -> dict[str, Tensor | None]:
        """What each segment of a sweep leaves, begun at 0, and its time steps: with B forwards, with C backwards."""
        ends: dict[str, Tensor | None] = {
            "segment_state": self.per_segment(SEGMENTS, self.D, self.S),
            "segment_dt": self.per_segment(SEGMENTS, self.D),
        }
        self._sweep(SEGMENTS, x, {**ends, **of_states}, ends=True)
        return ends

    def _sweep(self, SEGMENTS: int, x: Tensor, tensors: dict[str, Tensor | None], ends: bool = False) -> None:
        programs, sizes = self._sizes(SWEEP)
        absent = dict.fromkeys(("B", "C", "initial", "segment_state", "segment_dt", "y", "before", "final"))
        launch(
            sweep_kernel,
            (self.N * programs * SEGMENTS,),
            x=x,
            **(absent | tensors),
            **self.arguments,
            SEGMENTS=SEGMENTS,
            **sizes,
            STAGES=STAGES,
            ENDS=ends,
            REVERSE=tensors.get("B") is None,
        )

    def _sizes(self, config: tuple[int, int, int]) -> tuple[int, dict[str, int]]:
        """How many programs sweep a segment, and the sizes of their tiles."""
        tokens, _, elements = config
        BD, tiles = self.tiles(config)
        warps = max(1, tokens * self.BS * BD // (32 * elements))
        return self.state_tiles * self.G * tiles, {"TOKENS": tokens, "BD": BD, "num_warps": warps}

    def _segments(self, config: tuple[int, int, int]) -> tuple[int, bool]:
        # A segment has 2,048 tokens at least, and so 64 times 32.
        return self.segments(self.T // 32, self._sizes(config)[0])
