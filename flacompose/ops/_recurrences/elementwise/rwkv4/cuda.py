"""Launches of the Triton kernels on CUDA, in float32, bfloat16 and float16."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import block, tile_count
from flacompose.ops._launch.sequences import Sequences
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.elementwise.rwkv4.inputs import Inputs
from flacompose.ops._recurrences.elementwise.rwkv4.kernels import (
    State,
    rwkv4_gradient_kernel,
    rwkv4_join_gradient_kernel,
    rwkv4_join_kernel,
    rwkv4_scan_kernel,
)

# Tokens of a chunk (the state before it is kept for the backward), and channels of a program.
CHUNK, CHANNELS = 8, 64
Results = tuple[Tensor, Tensor, Tensor, Tensor]


def chunk(inputs: Inputs) -> Results:
    """``(o [B, T, D], final_a [N, D], final_b [N, D], final_m [N, D])``."""
    return _Launches(inputs).forward()


def recurrent(inputs: Inputs, count: int | None = None, stride: int | None = None) -> Results:
    """The same token by token, in one kernel; with `count` and `stride`, the states are ``[N, count, D]`` each."""
    return _Launches(inputs, by_token=True).forward(count, stride)


steps = recurrent


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    run, wanted = _Launches(call.inputs), call.wanted_input
    do, before = call.do.contiguous(), run.per_chunk(3, run.D)
    d_final = State(*(None if x is None else x.contiguous() for x in call.arriving[1:]))
    d_end = run.d_ends(do, before, d_final)
    v, k, w, u, *initial = map(wanted, call.signature.differentiable)
    dv, dk = (None if x is None else run.per_token(run.D, dtype=x.dtype) for x in (v, k))
    dw, du = (None if x is None else run.per_segment(run.count, run.D) for x in (w, u))
    d_initial = State(*(None if x is None else run.per_sequence(run.D, dtype=x.dtype) for x in initial))
    launch(
        rwkv4_gradient_kernel, (run.programs,), **run.tensors, do=do, before=before, d_end=d_end, d_final_m=d_final.m,
        dv=dv, dk=dk, dw=dw, du=du, d_initial=d_initial, **run.arguments,
    )  # fmt: skip
    dv, dk = (None if x is None else run.batched(x) for x in (dv, dk))
    dw, du = (None if x is None else x[: run.count].sum((0, 1)) for x in (dw, du))
    da, db, dm = d_initial
    return call.select(v=dv, k=dk, w=dw, u=du, initial_a=da, initial_b=db, initial_m=dm)


class _Launches(Sequences):
    """The launches of one call."""

    def __init__(self, inputs: Inputs, by_token: bool = False) -> None:
        v, k, w, u, *initial, cu_seqlens = inputs
        super().__init__(v, cu_seqlens, 1 if by_token else CHUNK)
        self.D, self.dtype = v.shape[2], v.dtype
        self.tensors = {"v": v.contiguous(), "k": k.contiguous(), "w": w.contiguous(), "u": u.contiguous()}
        self.initial = State(*(None if x is None else x.contiguous() for x in initial))
        BD = block(self.D, CHANNELS)
        self.tiles = tile_count(self.D, BD)
        # In units of 2 tokens a segment has at least 64 * 2 = 128. Programs of one warp are small, so four
        # times as many run.
        self.count, self.split = self.segments(0 if by_token else self.T // 2, tile_count(self.tiles, 4))
        self.programs = self.N * self.tiles * self.count
        self.arguments |= {"SEGMENTS": self.count, "D": self.D, "C": self.C, "BD": BD, "num_warps": 1}

    def forward(self, count: int | None = None, stride: int | None = None) -> Results:
        o = self.per_token(self.D, dtype=self.dtype)
        end = State(*(self.per_sequence(*([] if count is None else [count]), self.D) for _ in range(3)))
        self.pass_states(self.starts(), end, o=o, count=count, stride=stride)
        return self.batched(o), *end

    def starts(self) -> State:
        """The state before each segment."""
        if not self.split:
            return self.initial
        states = State(*(self.per_segment(self.count, self.D) for _ in range(3)))
        self.pass_states(State(), states, ENDS=True)
        self.join(rwkv4_join_kernel, states=states, initial=self.initial)
        return states

    def d_ends(self, do: Tensor, before: Tensor, d_final: State) -> State:
        """The gradients of a and b after each segment, from those after each sequence. Fills `before`."""
        starts, d_final = self.starts(), d_final._replace(m=None)
        if not self.split:
            self.pass_states(starts, State(), do=do, before=before)
            return d_final
        da, db, end_m = (self.per_segment(self.count, self.D) for _ in range(3))
        d_states = State(da, db)
        self.pass_states(starts, State(m=end_m), do=do, before=before, d_start=d_states)
        given = {"d_states": d_states, "start_m": starts.m, "end_m": end_m, "d_final": d_final}
        self.join(rwkv4_join_gradient_kernel, **given)
        return d_states

    def join(self, kernel: Any, **given: Any) -> None:
        """Launch a kernel that goes from segment to segment."""
        launch(kernel, (self.N * self.tiles,), **given, w=self.tensors["w"], **self.arguments)

    def pass_states(self, initial: State, end: State, ENDS: bool = False, **given: Any) -> None:
        """Launch `rwkv4_scan_kernel`, which fills the given results."""
        absent: dict[str, Any] = dict.fromkeys(("o", "do", "before", "count", "stride"))
        states = {"initial": initial, "end": end, "d_start": State(), "ENDS": ENDS}
        arguments = {**absent, **states, **given, **self.tensors, **self.arguments}
        launch(rwkv4_scan_kernel, (self.programs,), **arguments)
