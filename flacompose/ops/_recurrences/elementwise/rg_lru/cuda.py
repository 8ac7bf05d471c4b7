"""Launches of the Triton kernels on CUDA, in float32, bfloat16 and float16."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import block, tile_count
from flacompose.ops._launch.row_split import Segments
from flacompose.ops._launch.sequences import Sequences
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.elementwise.rg_lru.inputs import Inputs
from flacompose.ops._recurrences.elementwise.rg_lru.kernels import rg_lru_gradient_kernel, rg_lru_scan_kernel

# (tokens of a chunk, most channels of a tile). In chunks, before which the state is kept for the backward, a
# thread has one channel; and by token.
CHUNK_CONFIG, TOKEN_CONFIG = (16, 32), (1, 256)


def chunk(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D])``."""
    return _Launches(inputs).forward()


def recurrent(inputs: Inputs, count: int | None = None, stride: int | None = None) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D])``, or ``[N, count, D]`` states with `count` and `stride`."""
    return _Launches(inputs, by_token=True).forward(count, stride)


steps = recurrent


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    wants, run = call.wants, _Launches(call.inputs)
    do, row, before = call.do.contiguous(), run.row, None
    if wants("r", "a_param"):
        before = run.per_chunk(run.D)
        run.forwards(before=before)
    of_tokens = {}
    for name in ("x", "r", "i"):
        y = call.wanted_input(name)
        of_tokens[name] = None if y is None else run.per_token(run.D, dtype=y.dtype)
    start = call.wanted_input("initial_state")
    d_initial = None if start is None else run.per_sequence(run.D, dtype=start.dtype)
    d_a_param = run.per_segment(row.count, run.D) if wants("a_param") else None
    launch(
        rg_lru_gradient_kernel,
        (run.N * run.tiles * row.count,),
        **run.arguments,
        do=do,
        before=before,
        d_final=row.starts(partial(run.pass_states, do, True), call.arriving.final_state),
        **{f"d{name}": y for name, y in of_tokens.items()},
        d_a_param=d_a_param,
        d_initial=d_initial,
        SEGMENTS=row.count,
        num_warps=1,
    )
    return call.made(
        **{name: None if y is None else run.batched(y) for name, y in of_tokens.items()},
        a_param=None if d_a_param is None else d_a_param[: row.count].sum((0, 1)),
        initial_state=d_initial,
    )


class _Launches(Sequences):
    """The launches of one call."""

    def __init__(self, inputs: Inputs, by_token: bool = False) -> None:
        C, channels = TOKEN_CONFIG if by_token else CHUNK_CONFIG
        super().__init__(inputs.x, inputs.cu_seqlens, C)
        self.inputs, self.D = inputs, inputs.x.shape[2]
        BD = block(self.D, channels)
        self.tiles = tile_count(self.D, BD)
        # Kernels read gates in any dtype.
        names = "x", "r", "i", "a_param", "reset"
        given = {name: getattr(inputs, name) for name in names}
        self.arguments |= {name: None if y is None else y.contiguous() for name, y in given.items()}
        self.arguments |= {"D": self.D, "H": 1 if inputs.reset is None else inputs.reset.shape[2]}
        self.arguments |= {"C": C, "BD": BD}
        # In units of 32 tokens a segment has at least 64 * 32 = 2,048. Programs of one warp are small, so
        # twice as many run.
        units, programs = 0 if by_token else self.T // 32, tile_count(self.tiles, 2)
        self.row = Segments(self, units, programs, (self.D,), {"gv": "sum_g"})

    def forward(self, count: int | None = None, stride: int | None = None) -> tuple[Tensor, Tensor]:
        o = self.per_token(self.D, dtype=self.inputs.x.dtype)
        final_state = self.per_sequence(*([] if count is None else [count]), self.D)
        self.forwards(o=o, final=final_state, count=count, stride=stride)
        return self.batched(o), final_state

    def forwards(self, **results: Tensor | int | None) -> None:
        """Fill `o`, `before` and `final`, if given."""
        pass_states = partial(self.pass_states, self.arguments["x"], False)
        pass_states(initial=self.row.starts(pass_states, self.inputs.initial_state), **results)

    def pass_states(self, x: Tensor, reverse: bool, **tensors: Tensor | int | None) -> None:
        """Launch `rg_lru_scan_kernel`, which fills the given results. By token, `final` may be `count` states."""
        absent = dict.fromkeys(("initial", "o", "before", "ends", "sum_g", "final", "count", "stride"))
        given = {
            **absent,
            **tensors,
            **self.arguments,
            "x": x,
            "SEGMENTS": self.row.count,
            "REVERSE": reverse,
        }
        launch(rg_lru_scan_kernel, (self.N * self.tiles * self.row.count,), **given, num_warps=1)
