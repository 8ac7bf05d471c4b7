"""Launches of the Triton kernels on CUDA, in float32, bfloat16 and float16.

One kernel computes time steps and gates, in place of head decay's kernel of gates. The scan then applies skip
and gate to its outputs before it stores them. In the backward, the scan that stores the states also recomputes
the output, for the gradient of the gate, and computes the gradient of its own output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import by_token, operand, operand_dtype, tile_count
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.fused.ssd.inputs import Inputs
from flacompose.ops._recurrences.fused.ssd.kernels import ssd_time_step_gradient_kernel, ssd_time_step_kernel
from flacompose.ops._recurrences.matrix.head_decay.cuda import BH, Launches, running_sums
from flacompose.ops._recurrences.matrix.head_decay.kernels import Around
from flacompose.ops._recurrences.matrix.inputs import Inputs as Scan


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    scan = _Launches(inputs)
    scan.prepare_gates(inputs.dt, None)
    o, final_state = scan.per_token(scan.H, scan.V, dtype=inputs.x.dtype), scan.state(torch.float32)
    q, k, v = map(operand, scan.operands)
    initial = scan.starts(k, v, operand(inputs.initial_state))
    scan(q, k, v, initial=initial, out=o, final=final_state, around=Around(**scan.skip, **scan.gate))
    return scan.batched(o), final_state


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The requested gradients."""
    inputs, wanted = call.inputs, call.wanted_input
    scan = _Launches(inputs, gradients=True)
    scan.prepare_gates(inputs.dt, None)
    q, k, v = map(operand, scan.operands)
    dq, dk = (None if wanted(name) is None else scan.output_of_keys(q) for name in ("C", "B"))
    z, start, D = (wanted(name) for name in ("z", "initial_state", "D"))
    dx, dz = (None if u is None else scan.per_token(scan.H, scan.V, dtype=u.dtype) for u in (wanted("x"), z))
    d_initial = None if start is None else scan.state(start.dtype)
    d_skip = None if D is None else scan.per_segment(scan.row.count, scan.H, scan.V)
    S, dS = scan.per_chunk_state(), scan.per_chunk_state()

    do = call.do.contiguous()
    # Without a gate, dy is do.
    dy = operand(do) if inputs.z is None else scan.per_token(scan.H, scan.V, dtype=operand_dtype(do))
    given = do if inputs.z is not None or d_skip is not None else None
    around = Around(**scan.skip, **scan.gate, do=given, dy=dy, dz=dz, d_skip=d_skip)
    initial = scan.starts(k, v, operand(inputs.initial_state))
    scan(None if dz is None else q, k, v, initial=initial, states=S, around=around)
    initial = scan.starts(q, dy, operand(call.arriving.final_state), reverse=True)
    around = Around(**scan.skip)
    scan(k, q, dy, False, True, dx, around, initial=initial, states=dS, final=d_initial)
    dg, d_delta = scan.gradients(q, k, v, dy, S, dS, dq, dk, torch.float32, scan.beta)
    assert d_delta is not None
    del S, dS
    made = scan.of_time_steps(dg, d_delta, wanted("dt"), wanted("A"), wanted("dt_bias"))
    return call.made(
        x=None if dx is None else scan.batched(dx),
        B=scan.summed_of_keys(dk, inputs.B),
        C=scan.summed_of_keys(dq, inputs.C),
        D=None if d_skip is None or D is None else d_skip[: scan.row.count].sum((0, 1)).sum_to_size(D.shape),
        z=None if dz is None else scan.batched(dz),
        initial_state=d_initial,
        **made,
    )


class _Launches(Launches):
    """The launches of one call: head decay of queries ``C``, keys ``B`` and values ``x``."""

    def __init__(self, inputs: Inputs, gradients: bool = False) -> None:
        x, dt, self.A, B, C, D, z, self.dt_bias, initial_state, cu_seqlens, *numbers = inputs
        self.dt, self.A = dt.contiguous(), self.A.contiguous()
        self.dt_bias = None if self.dt_bias is None else self.dt_bias.contiguous()
        self.limits = dict(zip(("SOFTPLUS", "least", "most"), numbers, strict=True))
        self.operands = C, B, x
        D = None if D is None else D.contiguous()
        self.skip: dict[str, Any] = (
            {} if D is None else {"skip": D, "E": D.shape[1], "step": int(D.shape[1] > 1)}
        )
        self.gate: dict[str, Any] = {} if z is None else dict(zip(("z", "z_token"), by_token(z), strict=True))
        # `dt` stands for the gates, which `sum_gates` computes: the base class asks only whether there are any.
        super().__init__(Scan(C, B, x, dt, initial_state=initial_state, cu_seqlens=cu_seqlens), gradients)
        assert self.tiles(transpose=False)[0] == 1, (
            "the gate needs the whole output of a token, so one program must read all keys"
        )

    def sum_gates(self, g: Tensor | None, gamma: Tensor | None) -> tuple[Tensor, Tensor | None]:
        sums, rest = running_sums(self)
        self.beta = self.per_token(self.H, dtype=torch.float32)
        tensors = self.dt, self.A, self.dt_bias, self.beta, sums, rest
        self._of_gates(ssd_time_step_kernel, *tensors)
        return sums, rest

    def of_time_steps(
        self, dg: Tensor, d_delta: Tensor, dt: Tensor | None, A: Tensor | None, dt_bias: Tensor | None
    ) -> dict[str, Tensor | None]:
        """The gradients of `dt`, `A` and `dt_bias`, if given."""
        ddt = None if dt is None else self.per_token(self.H, dtype=dt.dtype)
        sums = [None if x is None else self.per_chunk(self.H) for x in (A, dt_bias)]
        self._of_gates(ssd_time_step_gradient_kernel, self.dt, self.A, self.dt_bias, dg, d_delta, ddt, *sums)
        dA, d_bias = (None if x is None else x[: self.chunks].sum(0) for x in sums)
        return {"dt": None if ddt is None else self.batched(ddt), "A": dA, "dt_bias": d_bias}

    def _of_gates(self, kernel: object, *tensors: Tensor | None) -> None:
        sizes = {"H": self.H, "C": self.C, "BH": BH, **self.limits}
        launch(kernel, (self.chunks, tile_count(self.H, BH)), *tensors, **self.positions, **sizes)
