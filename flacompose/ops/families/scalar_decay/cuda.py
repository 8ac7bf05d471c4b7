"""Launches of the Triton kernels: what CUDA runs, in float32, bfloat16 and float16."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flacompose.ops._define import launch
from flacompose.ops._varlen import bounds
from flacompose.ops.families import _launch
from flacompose.ops.families._compile import compile_ahead
from flacompose.ops.families._launch import (
    batched,
    block,
    given,
    operand,
    per_token,
    segment_count,
    tile_count,
)
from flacompose.ops.families.scalar_decay.eager import FIXED, SUMMED
from flacompose.ops.families.scalar_decay.kernels import gate_gradient_kernel, gate_kernel, sweep_kernel


@compile_ahead
def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    gate_kind: int,
) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    sweep = _Sweep(q, v, g is not None, None, cu_seqlens, scale)
    o, final_state = sweep.per_token(v, *v.shape[2:]), sweep.state()
    q, k, v = operand(q), operand(k), operand(v)
    gates, initial_state = sweep.gates(g, gate_kind == FIXED), given(initial_state)
    ends = sweep.segment_ends(k, v, gates, initial_state)
    sweep(q, k, v, gates, initial_state, ends, o, final=final_state)
    return batched(o, sweep.T), final_state


@compile_ahead
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    gate_kind: int,
    do: Tensor | None,
    d_final_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(dq, dk, dv, dg, d_initial_state)``, empty for inputs that are absent; `dg` is 0 for `FIXED` gates."""
    gradient_of = None if g is None or gate_kind == FIXED else gate_kind
    sweep = _Sweep(q, v, g is not None, gradient_of, cu_seqlens, scale)
    q_dtype, state_dtype = q.dtype, None if initial_state is None else initial_state.dtype
    # One gradient for each head of values; those that share one of queries and keys are summed at the end.
    shared = v.shape[2] // q.shape[2]
    dtype = q_dtype if shared == 1 else torch.float32
    dq, dk = (sweep.per_token(q, sweep.HV, sweep.K, dtype=dtype) for _ in range(2))
    dv, d_initial_state = sweep.per_token(v, *v.shape[2:]), sweep.state()
    do = torch.zeros_like(v) if do is None else do
    q, k, v, do = operand(q), operand(k), operand(v), operand(do)
    initial_state, d_final_state = given(initial_state), given(d_final_state)

    gates = sweep.gates(g, gate_kind == FIXED)
    gradient = sweep.gradient_parts() if sweep.with_gate_gradient else None
    ends = sweep.segment_ends(k, v, gates, initial_state)
    sweep(do, v, k, gates, initial_state, ends, dq, gradient=gradient, y=q, transpose=True)
    ends = sweep.segment_ends(q, do, gates, d_final_state, reverse=True)
    sweep(k, q, do, gates, d_final_state, ends, dv, final=d_initial_state, reverse=True)
    sweep(v, do, q, gates, d_final_state, ends, dk, gradient=gradient, y=k, transpose=True, reverse=True)

    if g is None:
        dg = q.new_empty(0, dtype=q_dtype)
    elif gradient is None:
        dg = g.new_zeros(g.shape)
    else:
        dg = sweep.per_token(g, sweep.HV)
        sweep.gate_gradient(gradient, gates, dg)
        dg = batched(dg, sweep.T)
    dq, dk, dv = (batched(x, sweep.T) for x in (dq, dk, dv))
    if shared > 1:
        dq, dk = (x.unflatten(2, (-1, shared)).sum(3).to(q_dtype) for x in (dq, dk))
    if state_dtype is None:
        return dq, dk, dv, dg, q.new_empty(0, dtype=q_dtype)
    return dq, dk, dv, dg, d_initial_state.to(state_dtype)


chunk.backward = backward


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    gate_kind: int,
) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    if g is not None and gate_kind == FIXED:
        g = g[0, 0]
    return _launch.recurrent(q, k, v, g, None, None, initial_state, cu_seqlens, scale)


class _Gates(NamedTuple):
    """Gates that are those of every token, or what `gate_kernel` makes of others."""

    gamma: Tensor | None = None
    sums: Tensor | None = None
    rest: Tensor | None = None
    bounds: Tensor | None = None


class _GateGradient(NamedTuple):
    """What two sweeps leave for the gradient of gates, as `gate_gradient_kernel` takes it, and share."""

    states: Tensor | None = None
    read: Tensor | None = None
    write: Tensor | None = None
    met: Tensor | None = None
    through: Tensor | None = None


class _Sweep:
    """The launches of one call, and the memory that they fill."""

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        gated: bool,
        gradient_of: int | None,
        cu_seqlens: Tensor | None,
        scale: float,
    ) -> None:
        B, self.T, _, self.K = q.shape
        self.HV, self.V = v.shape[2:]
        self.scale = scale
        self.bfloat16 = q.dtype == torch.bfloat16
        self.gated, self.with_gate_gradient = gated, gradient_of is not None
        self.fine = gradient_of == SUMMED and self.bfloat16
        self.C = chunk_size(self.bfloat16, max(self.K, self.V), gated, self.with_gate_gradient)
        self.BH = block(self.HV, 16)
        self.device = q.device
        self.cu_seqlens = None if cu_seqlens is None else bounds(cu_seqlens, self.T)
        self.N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        NT = (self.T + self.C - 1) // self.C
        # Longer by one than is used: a leading dimension that may be 1 is a guard on the length when it is symbolic.
        self.rows = (B * NT if cu_seqlens is None else NT + self.N) + 1
        programs = self.HV * max(self.tiles(x) for x in (False, True))
        self.segments = segment_count(NT, programs if cu_seqlens is None else programs * self.N)
        self.split = not (isinstance(self.segments, int) and self.segments == 1)

    def config(self, transpose: bool) -> tuple[int, int, int, int]:
        D1, D2 = (self.V, self.K) if transpose else (self.K, self.V)
        return sweep_config(self.bfloat16, self.C, D1, D2, self.gated, self.with_gate_gradient and transpose)

    def tiles(self, transpose: bool) -> int:
        return tile_count(self.K if transpose else self.V, self.config(transpose)[1])

    def per_token(self, x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return per_token(x, *shape, packed=self.cu_seqlens is not None, dtype=dtype)

    def state(self) -> Tensor:
        return torch.empty(self.N, self.HV, self.K, self.V, dtype=torch.float32, device=self.device)

    def gates(self, g: Tensor | None, fixed: bool) -> _Gates:
        if g is None:
            return _Gates()
        if fixed:
            return _Gates(gamma=operand(g[0, 0]))
        shape = (self.rows, self.HV, self.C)
        sums, rest = (torch.empty(shape, dtype=torch.float32, device=self.device) for _ in range(2))
        bounds = torch.empty(self.rows, 2, dtype=torch.int64, device=self.device)
        # In two parts for float32 products.
        gates = _Gates(None, sums, None if self.bfloat16 else rest, bounds)
        # Steps of the search for a chunk's sequence.
        steps = self.N.bit_length() if isinstance(self.N, int) else 32
        sizes = self.T, self.N, self.HV, steps
        launch(
            gate_kernel, self._by_row(), operand(g), *gates[1:], self.cu_seqlens, *sizes, C=self.C, BH=self.BH
        )
        return gates

    def gradient_parts(self) -> _GateGradient:
        parts = self.rows, self.tiles(transpose=True), self.HV, self.C

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        return _GateGradient(
            new(
                self.rows,
                self.HV,
                self.V,
                self.K,
                dtype=torch.bfloat16 if self.bfloat16 and not self.fine else torch.float32,
            ),
            read=new(*parts),
            write=new(*parts),
            met=new(*parts),
            through=new(self.rows, self.HV, self.K),
        )

    def gate_gradient(self, gradient: _GateGradient, gates: _Gates, dg: Tensor) -> None:
        """Fill `dg` from what two sweeps have left."""
        launch(
            gate_gradient_kernel,
            self._by_row(),
            *gradient[1:],
            gates.bounds,
            dg,
            self.HV,
            self.scale,
            D=self.K,
            C=self.C,
            BH=self.BH,
            BD=block(self.K, 256),
            PARTS=self.tiles(transpose=True),
        )

    def _by_row(self) -> tuple[int, int]:
        """One program for each chunk and `BH` heads."""
        return self.rows - 1, tile_count(self.HV, self.BH)

    def segment_ends(
        self, b: Tensor, x: Tensor, gates: _Gates, initial: Tensor | None, reverse: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """What each segment leaves when it begins at zero, and its summed gates; nothing if there is but one."""
        if not self.split:
            return None, None
        N, HV, K, V = self.N, self.HV, self.K, self.V
        new = torch.empty(self.segments + 1, N, HV, K, V, dtype=torch.float32, device=self.device)
        ends = new, new.new_empty(self.segments + 1, N, HV) if self.gated else None
        self(None, b, x, gates, initial, ends, None, reverse=reverse)
        return ends

    def __call__(
        self,
        a: Tensor | None,
        b: Tensor,
        x: Tensor,
        gates: _Gates,
        initial: Tensor | None,
        ends: tuple[Tensor | None, Tensor | None],
        out: Tensor | None,
        gradient: _GateGradient | None = None,
        y: Tensor | None = None,
        final: Tensor | None = None,
        transpose: bool = False,
        reverse: bool = False,
    ) -> None:
        """``S <- e^g S + b_t x_t^T``, ``out_t = scale * S^T a_t``; `transpose` where `b` has the size of values."""
        BD1, BD2, warps, stages = self.config(transpose)
        D1, D2, strides = (self.V, self.K, (1, self.V)) if transpose else (self.K, self.V, (self.V, 1))
        launch(
            sweep_kernel,
            (self.N * self.HV * self.tiles(transpose) * self.segments,),
            a,
            b,
            x,
            None if gradient is None else y,
            *gates[:3],
            initial,
            *ends,
            out,
            *(gradient or _GateGradient()),
            final,
            self.cu_seqlens,
            self.scale,
            self.T,
            self.N,
            self.HV,
            b.shape[2],
            x.shape[2],
            self.segments,
            D1=D1,
            D2=D2,
            stride1=strides[0],
            stride2=strides[1],
            C=self.C,
            BD1=BD1,
            BD2=BD2,
            GATED=self.gated,
            SPLIT=self.split,
            REVERSE=reverse,
            FINE=self.fine and gradient is not None,
            DOT=tl.bfloat16 if self.bfloat16 else tl.float32,
            num_warps=warps,
            num_stages=stages,
        )


def chunk_size(bfloat16: bool, D: int, gated: bool, gate_gradient: bool) -> int:
    """Tokens of a chunk, `D` being the larger head size. The gradient of gates stores a state for each."""
    return 32 if not bfloat16 or (gated and not gate_gradient and D <= 128) else 64


def sweep_config(
    bfloat16: bool, C: int, D1: int, D2: int, gated: bool, gate_gradient: bool
) -> tuple[int, int, int, int]:
    """Block sizes of the contracted axis, which is one block, and of the other, warps and pipeline stages."""
    BD1 = block(D1, 256)
    if not bfloat16:
        return BD1, block(D2, 4096 // BD1), 4, 2
    if BD1 == 256 and D2 > 32 and gated and not gate_gradient:
        return BD1, 64, 8, 2
    narrow = BD1 == 256 or (BD1 == 128 and gate_gradient)
    return BD1, block(D2, 32 if narrow else 64), 4, 2 if BD1 >= 128 and gated and C == 64 else 3
