"""Launches of the Triton kernels on CUDA, in float32, bfloat16 and float16, of the scan and of the RG-LRU."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import block, tile_count
from flacompose.ops._launch.row_split import Segments
from flacompose.ops._launch.sequences import Sequences
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.elementwise.scan.kernels import UNIT, scan_gradient_kernel, scan_kernel

# (tokens of a tile, a divisor of `UNIT`; most channels of a tile): in chunks, before which the state is kept for the
# backward, and by token.
CHUNK_TILE, TOKEN_TILE = (16, 32), (1, 256)


def chunk(inputs: Any) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D])``."""
    return _Launches(inputs).forward()


def recurrent(inputs: Any, count: int | None = None, stride: int | None = None) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D])``, or ``[N, count, D]`` states with `count` and `stride`."""
    return _Launches(inputs, by_token=True).forward(count, stride)


steps = recurrent


def ends(inputs: Any) -> tuple[Tensor, ...]:
    """``(end [N, D], sum_g [N, D])``."""
    run = _Launches(inputs)
    return run.row.map(run.pass_states)


def backward(call: BackwardCall[Any]) -> Gradients:
    """The gradients that `call` wants."""
    run, before = _Launches(call.inputs), None
    if call.wants("g", "r", "a_param"):
        before = run.per_chunk(run.D)
        run.forwards(before=before)
    made: dict[str, Tensor | None] = {}
    for name in ("x", "g", "r", "i"):
        y = call.wanted_input(name) if name in call.wanted else None
        made[name] = None if y is None else run.per_token(run.D, dtype=y.dtype)
    start = call.wanted_input("initial_state")
    d_initial = None if start is None else run.per_sequence(run.D, dtype=start.dtype)
    d_a_param = run.per_segment(run.row.count, run.D) if call.wants("a_param") else None
    do = call.do.contiguous()
    pass_states = partial(run.pass_states, x=do, i=None, REVERSE=True)
    launch(
        scan_gradient_kernel,
        (run.programs,),
        **run.operands,
        **run.arguments,
        do=do,
        before=before,
        d_final=run.row.starts(pass_states, call.arriving.final_state),
        **{f"d{name}": y for name, y in made.items()},
        d_a_param=d_a_param,
        d_initial=d_initial,
        num_warps=1,
    )
    return call.select(
        **{name: None if y is None else run.batched(y) for name, y in made.items()},
        a_param=None if d_a_param is None else d_a_param[: run.row.count].sum((0, 1)),
        initial_state=d_initial,
    )


class _Launches(Sequences):
    """The launches of one call."""

    def __init__(self, inputs: Any, by_token: bool = False) -> None:
        C, channels = TOKEN_TILE if by_token else CHUNK_TILE
        super().__init__(inputs.x, inputs.cu_seqlens, C)
        self.D, self.initial = inputs.x.shape[2], inputs.initial_state
        # Kernels read gates in any dtype.
        given = {x: getattr(inputs, x, None) for x in ("x", "g", "r", "i", "a_param", "reset")}
        self.operands: dict[str, Any] = {
            name: None if y is None else y.contiguous() for name, y in given.items()
        }
        BD, reset = block(self.D, channels), given["reset"]
        tiles = tile_count(self.D, BD)
        # A segment has at least 64 units. Programs of one warp are small, so twice as many run.
        units = 0 if by_token else self.T // UNIT.value
        self.row = Segments(self, units, tile_count(tiles, 2), (self.D,), {"gv": "sum_g"})
        self.programs = self.N * tiles * self.row.count
        self.arguments |= {"SEGMENTS": self.row.count, "D": self.D, "C": C, "BD": BD}
        self.arguments["H"] = 1 if reset is None else reset.shape[2]

    def forward(self, count: int | None = None, stride: int | None = None) -> tuple[Tensor, Tensor]:
        x = self.operands["x"]
        o = self.per_token(self.D, dtype=x.dtype)
        final_state = self.per_sequence(*([] if count is None else [count]), self.D)
        self.forwards(o=o, final=final_state, count=count, stride=stride)
        return self.batched(o), final_state

    def forwards(self, **results: Any) -> None:
        """Fill `o`, `before` and `final`, if given."""
        self.pass_states(initial=self.row.starts(self.pass_states, self.initial), **results)

    def pass_states(self, REVERSE: bool = False, **given: Any) -> None:
        """Launch `scan_kernel`, which fills the given results. By token, `final` may be `count` states."""
        absent = dict.fromkeys(("initial", "o", "before", "ends", "sum_g", "final", "count", "stride"))
        arguments = {**absent, **self.operands, **self.arguments, **given}
        launch(scan_kernel, (self.programs,), **arguments, REVERSE=REVERSE, num_warps=1)
