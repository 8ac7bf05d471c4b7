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
    rwkv4_gradient_kernel,
    rwkv4_join_gradient_kernel,
    rwkv4_join_kernel,
    rwkv4_scan_kernel,
)

# Tokens of a chunk (the state before it is kept for the backward), and channels of a program.
CHUNK, CHANNELS = 8, 64
Results = tuple[Tensor, Tensor, Tensor, Tensor]
# Two or three arguments of kernels, whose names end in a, b and m.
Named = dict[str, Any]


def chunk(inputs: Inputs) -> Results:
    """``(o [B, T, D], final_a [N, D], final_b [N, D], final_m [N, D])``."""
    return _Launches(inputs).forward()


def recurrent(inputs: Inputs, count: int | None = None, stride: int | None = None) -> Results:
    """The same token by token, in one kernel; with `count` and `stride`, the states are ``[N, count, D]`` each."""
    return _Launches(inputs, by_token=True).forward(count, stride)


steps = recurrent


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    run, wanted, arriving = _Launches(call.inputs), call.wanted_input, call.arriving
    do, before = call.do.contiguous(), run.per_chunk(3, run.D)
    d_final = [None if x is None else x.contiguous() for x in arriving[1:]]
    d_ends = run.d_ends(do, before, *d_final[:2])
    v, k, w, u, *initial = map(wanted, call.signature.differentiable)
    dv, dk = (None if x is None else run.per_token(run.D, dtype=x.dtype) for x in (v, k))
    dw, du = (None if x is None else run.per_segment(run.count, run.D) for x in (w, u))
    da, db, dm = (None if x is None else run.per_sequence(run.D, dtype=x.dtype) for x in initial)
    launch(
        rwkv4_gradient_kernel, (run.programs,), **run.tensors, do=do, before=before, **d_ends, d_final_m=d_final[2],
        dv=dv, dk=dk, dw=dw, du=du, **_named("d_initial", da, db, dm), **run.arguments,
    )  # fmt: skip
    dv, dk = (None if x is None else run.batched(x) for x in (dv, dk))
    dw, du = (None if x is None else x[: run.count].sum((0, 1)) for x in (dw, du))
    return call.made(v=dv, k=dk, w=dw, u=du, initial_a=da, initial_b=db, initial_m=dm)


class _Launches(Sequences):
    """The launches of one call."""

    def __init__(self, inputs: Inputs, by_token: bool = False) -> None:
        v, k, w, u, *initial, cu_seqlens = inputs
        super().__init__(v, cu_seqlens, 1 if by_token else CHUNK)
        self.D, self.dtype = v.shape[2], v.dtype
        self.tensors = {"v": v.contiguous(), "k": k.contiguous(), "w": w.contiguous(), "u": u.contiguous()}
        self.initial = _named("initial", *(None if x is None else x.contiguous() for x in initial))
        BD = block(self.D, CHANNELS)
        self.tiles = tile_count(self.D, BD)
        # In units of 2 tokens a segment has at least 64 * 2 = 128. Programs of one warp are small, so four
        # times as many run.
        self.count, self.split = self.segments(0 if by_token else self.T // 2, tile_count(self.tiles, 4))
        self.programs = self.N * self.tiles * self.count
        self.arguments |= {"SEGMENTS": self.count, "D": self.D, "C": self.C, "BD": BD, "num_warps": 1}

    def forward(self, count: int | None = None, stride: int | None = None) -> Results:
        o = self.per_token(self.D, dtype=self.dtype)
        a, b, m = (self.per_sequence(*([] if count is None else [count]), self.D) for _ in range(3))
        self.sweep(**self.starts(), o=o, **_named("end", a, b, m), count=count, stride=stride)
        return self.batched(o), a, b, m

    def starts(self) -> Named:
        """The state before each segment."""
        if not self.split:
            return self.initial
        states = [self.per_segment(self.count, self.D) for _ in range(3)]
        self.sweep(**_named("end", *states), ENDS=True)
        a, b, m = states
        self.join(rwkv4_join_kernel, a=a, b=b, m=m, **self.initial)
        return _named("initial", *states)

    def d_ends(self, do: Tensor, before: Tensor, da: Tensor | None, db: Tensor | None) -> Named:
        """The gradients of a and b after each segment, from those after each sequence. Fills `before`."""
        starts = self.starts()
        if not self.split:
            self.sweep(**starts, do=do, before=before)
            return _named("d_end", da, db)
        of_a, of_b, end_m = (self.per_segment(self.count, self.D) for _ in range(3))
        self.sweep(**starts, do=do, before=before, **_named("d_start", of_a, of_b), end_m=end_m)
        given = {"da": of_a, "db": of_b, "start_m": starts["initial_m"], "end_m": end_m}
        self.join(rwkv4_join_gradient_kernel, **given, **_named("d_final", da, db))
        return _named("d_end", of_a, of_b)

    def join(self, kernel: Any, **tensors: Tensor | None) -> None:
        """Launch a kernel that goes from segment to segment."""
        launch(kernel, (self.N * self.tiles,), **tensors, w=self.tensors["w"], **self.arguments)

    def sweep(
        self,
        count: int | None = None,
        stride: int | None = None,
        ENDS: bool = False,
        **tensors: Tensor | None,
    ) -> None:
        """Launch `rwkv4_scan_kernel`, which fills the given results."""
        given = _named("initial", None, None, None) | _named("end", None, None, None)
        given |= _named("d_start", None, None) | dict.fromkeys(("o", "do", "before")) | tensors
        states = {"count": count, "stride": stride, "ENDS": ENDS}
        launch(rwkv4_scan_kernel, (self.programs,), **self.tensors, **given, **states, **self.arguments)


def _named(name: str, *tensors: Tensor | None) -> Named:
    return {f"{name}_{x}": y for x, y in zip("abm", tensors)}
