"""Launches of the Triton kernel on CUDA, in float32, bfloat16 and float16."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import block, tile_count
from flacompose.ops._launch.row_split import Segments
from flacompose.ops._launch.sequences import Sequences
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.elementwise.scan.inputs import Inputs
from flacompose.ops._recurrences.elementwise.scan.kernels import scan_kernel

# (tokens of a tile, a divisor of `UNIT`; pipeline stages): of a scan, of a scan for segments' ends, and by
# token.
SCAN_CONFIG, END_CONFIG, TOKEN_CONFIG = (8, 4), (16, 1), (1, 1)


def chunk(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D])``."""
    return _Launches(inputs).forward(inputs)


def recurrent(inputs: Inputs, count: int | None = None, stride: int | None = None) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D])``, or ``[N, count, D]`` states with `count` and `stride`."""
    return _Launches(inputs, by_token=True).forward(inputs, count, stride)


steps = recurrent


def ends(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(end [N, D], sum_g [N, D])``."""
    scan = _Launches(inputs)
    return scan.row.map(partial(scan.pass_states, inputs.x.contiguous(), inputs.g.contiguous()))


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    x, g, initial_state, _ = call.inputs
    scan = _Launches(call.inputs)
    dx = scan.per_token(scan.D, dtype=x.dtype) if call.wants("x") else None
    start = call.wanted_input("initial_state")
    d_initial_state = None if start is None else scan.per_sequence(scan.D, dtype=start.dtype)
    dg = decayed = None
    g = g.contiguous()
    if call.wants("g"):
        dg = scan.per_token(scan.D, dtype=g.dtype)
        # `dg` holds the decayed states until the gradients overwrite them, unless it is float16, whose range
        # is too small for strongly decayed states.
        decayed = dg if g.dtype != torch.float16 else scan.per_token(scan.D, dtype=torch.float32)
        pass_states = partial(scan.pass_states, x.contiguous(), g)
        pass_states(initial=scan.row.starts(pass_states, initial_state), out=decayed, DECAYED=True)
    decayed = None if decayed is dg else decayed
    pass_states = partial(scan.pass_states, call.do.contiguous(), g, REVERSE=True)
    initial = scan.row.starts(pass_states, call.arriving.final_state)
    pass_states(initial=initial, decayed_h=decayed, out=dx, dg=dg, final=d_initial_state)
    dx, dg = (None if y is None else scan.batched(y) for y in (dx, dg))
    return call.made(x=dx, g=dg, initial_state=d_initial_state)


class _Launches(Sequences):
    """The launches of one call."""

    def __init__(self, inputs: Inputs, by_token: bool = False) -> None:
        super().__init__(inputs.x, inputs.cu_seqlens)
        self.D = inputs.x.shape[2]
        self.by_token = by_token
        self.BD = block(self.D, 256 if by_token else 64)
        self.tiles = tile_count(self.D, self.BD)
        # In units of 32 tokens a segment has at least 64 * 32 = 2,048.
        self.row = Segments(self, 0 if by_token else self.T // 32, self.tiles, (self.D,), {"gv": "sum_g"})

    def forward(
        self, inputs: Inputs, count: int | None = None, stride: int | None = None
    ) -> tuple[Tensor, Tensor]:
        x, g, initial_state, _ = inputs
        o = self.per_token(self.D, dtype=x.dtype)
        final_state = self.per_sequence(*([] if count is None else [count]), self.D)
        pass_states = partial(self.pass_states, x.contiguous(), g.contiguous(), count=count, stride=stride)
        pass_states(initial=self.row.starts(pass_states, initial_state), out=o, final=final_state)
        return self.batched(o), final_state

    def pass_states(
        self,
        x: Tensor,
        g: Tensor,
        DECAYED: bool = False,
        REVERSE: bool = False,
        count: int | None = None,
        stride: int | None = None,
        **tensors: Tensor | None,
    ) -> None:
        """Launch `scan_kernel`, which fills the given results. By token, `final` may be `count` states."""
        C, stages = END_CONFIG if "ends" in tensors else TOKEN_CONFIG if self.by_token else SCAN_CONFIG
        given: dict[str, Tensor | None] = dict.fromkeys(
            ("initial", "decayed_h", "out", "dg", "ends", "sum_g", "final")
        )
        given |= tensors
        launch(
            scan_kernel,
            (self.N * self.tiles * self.row.count,),
            x=x,
            g=g,
            **given,
            **self.arguments,
            count=count,
            stride=stride,
            SEGMENTS=self.row.count,
            D=self.D,
            C=C,
            BD=self.BD,
            STAGES=stages,
            DECAYED=DECAYED,
            REVERSE=REVERSE,
            num_warps=1,
        )
