"""Launches of the Triton kernels on CUDA, in float32, bfloat16 and float16."""

from __future__ import annotations

from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import block, by_token, operand, tile_count
from flacompose.ops._launch.row_split import Segments
from flacompose.ops._launch.sequences import Sequences
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.fused.normalizer.inputs import Inputs
from flacompose.ops._recurrences.fused.normalizer.kernels import (
    normalizer_division_kernel,
    normalizer_gradient_kernel,
    normalizer_state_passing_kernel,
    normalizer_token_kernel,
)

C = 64  # tokens of a chunk
STATE_CONFIG = {"BK": 64, "STAGES": 3, "num_warps": 4}  # keys of a tile, pipeline stages, warps


def chunk(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K])``."""
    run = _Launches(inputs)
    o, final_state = run.per_token(run.HV, run.V, dtype=inputs.x.dtype), run.per_sequence(run.HV, run.K)
    run.divide(run.states(run.k, run.beta, operand(inputs.initial_state), final_state), o=o)
    return run.batched(o), final_state


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The requested gradients."""
    inputs, wanted = call.inputs, call.wanted_input
    run = _Launches(inputs)
    q, k, x, g, beta, floor, start = map(wanted, call.signature.differentiable)
    heads = run.HV, run.K
    dx = None if x is None else run.per_token(run.HV, run.V, dtype=x.dtype)
    dg, dbeta, d_floor = (
        None if y is None else run.per_token(run.HV, dtype=y.dtype) for y in (g, beta, floor)
    )
    dq, dk = (None if y is None else run.per_token(*heads, dtype=run.dtype_of_keys) for y in (q, k))
    d_initial = None if start is None else run.per_sequence(*heads, dtype=start.dtype)

    states = run.states(run.k, run.beta, operand(inputs.initial_state))
    dz = run.per_token(run.HV, dtype=torch.float32)
    run.divide(states, do=operand(call.do), dx=dx, dz=dz, d_floor=d_floor)
    if call.wants("q", "k", "g", "beta", "initial_state"):
        d_states = run.states(run.q, dz, operand(call.arriving.final_state), d_initial, reverse=True)
    if call.wants("q", "k", "g", "beta"):
        tensors = run.q, run.k, run.g, run.beta, dz, states, d_states, dq, dk, dg, dbeta
        config = gradient_config(run.bfloat16, run.K)
        launch(normalizer_gradient_kernel, (run.chunks * run.HV,), *tensors, **run.arguments, **config)
    dx, dg, dbeta, d_floor = (None if y is None else run.batched(y) for y in (dx, dg, dbeta, d_floor))
    return call.select(
        q=run.summed_of_keys(dq),
        k=run.summed_of_keys(dk),
        x=dx,
        g=dg,
        beta=dbeta,
        floor=d_floor,
        initial_state=d_initial,
    )


def recurrent(inputs: Inputs, count: int | None = None, stride: int | None = None) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K])``, or ``[N, count, HV, K]`` states with `count` and `stride`."""
    q, k, x, *others, cu_seqlens, scale, eps = inputs
    rows, (HV, V), K = Sequences(q, cu_seqlens), x.shape[2:], q.shape[3]
    o = rows.per_token(HV, V, dtype=x.dtype)
    final_state = rows.per_sequence(*([] if count is None else [count]), HV, K)
    (q, q_token), (k, k_token), (x, x_token) = map(by_token, (q, k, x))
    tensors = q, k, x, *map(operand, others), o, final_state
    launch(
        normalizer_token_kernel, (rows.N * HV,), *tensors, **rows.arguments, scale=scale, eps=eps,
        H=q.shape[2], HV=HV, K=K, V=V, q_token=q_token, k_token=k_token, x_token=x_token, count=count, stride=stride,
        BK=block(K, 512), BV=block(V, 512),
    )  # fmt: skip
    return rows.batched(o), final_state


steps = recurrent


class _Launches(Sequences):
    """The launches of the chunked form and of the backward, for one call."""

    def __init__(self, inputs: Inputs) -> None:
        q, _, x, *_, cu_seqlens, self.scale, self.eps = inputs
        super().__init__(q, cu_seqlens, C)
        (self.H, self.K), (self.HV, self.V) = q.shape[2:], x.shape[2:]
        self.q, self.k, self.x, self.g, self.beta, self.floor = map(operand, inputs[:6])
        self.bfloat16 = q.dtype == torch.bfloat16
        self.sizes = {"H": self.H, "HV": self.HV, "K": self.K, "C": C}
        self.arguments |= self.sizes | {"DOT": tl.bfloat16 if self.bfloat16 else tl.float32}
        # The gradients of queries and keys are computed for each head of `x`, in this dtype, then summed.
        self.dtype_of_keys = q.dtype if self.H == self.HV else torch.float32
        self.tiles = tile_count(self.K, STATE_CONFIG["BK"])
        # A segment has at least 64 units; with 32 tokens a unit, that is 2,048 tokens.
        self.row = Segments(self, self.T // 32, self.HV * self.tiles, (self.HV, self.K), {"gk": "sum_g"})

    def states(
        self,
        x: Tensor,
        strength: Tensor,
        initial: Tensor | None,
        final: Tensor | None = None,
        reverse: bool = False,
    ) -> Tensor:
        """The state before (with `reverse`, after) each chunk, ``[chunks, HV, K]``. Fills `final`."""
        states = self.per_chunk(self.HV, self.K)
        pass_states = partial(self._pass_states, x, strength, reverse)
        pass_states(initial=self.row.starts(pass_states, initial), states=states, final=final)
        return states

    def _pass_states(self, x: Tensor, strength: Tensor, reverse: bool, **tensors: Tensor | None) -> None:
        given = dict.fromkeys(("initial", "states", "ends", "sum_g", "final")) | tensors
        grid = (self.tiles * self.row.count * self.N * self.HV,)
        sizes = self.positions | self.sizes | {"SEGMENTS": self.row.count, "REVERSE": reverse} | STATE_CONFIG
        launch(normalizer_state_passing_kernel, grid, x, strength, self.g, **given, **sizes)

    def divide(self, states: Tensor, **tensors: Tensor | None) -> None:
        """Fill `o` or, if `do` is given, `dx`, `dz` and `d_floor`."""
        given = dict.fromkeys(("do", "o", "dx", "dz", "d_floor")) | tensors
        inputs = self.q, self.k, self.x, self.g, self.beta, self.floor, states
        sizes = self.arguments | {"V": self.V, "scale": self.scale, "eps": self.eps}
        config = division_config(self.bfloat16, self.K, self.V)
        launch(normalizer_division_kernel, (self.chunks * self.HV,), *inputs, **given, **sizes, **config)

    def summed_of_keys(self, dx: Tensor | None) -> Tensor | None:
        """``dx [B * T, HV, K]`` summed over the heads that share a query head, ``[B, T, H, K]``."""
        if dx is None or self.H == self.HV:
            return None if dx is None else self.batched(dx)
        return self.batched(dx).unflatten(2, (self.H, -1)).sum(3)


def division_config(bfloat16: bool, K: int, V: int) -> dict[str, int]:
    """Block sizes of the key and value axes, warps, pipeline stages."""
    return {"BK": block(K, 128 if bfloat16 else 32), "BV": block(V, 64), "num_warps": 4, "num_stages": 2}


def gradient_config(bfloat16: bool, K: int) -> dict[str, int]:
    """Block size of the key axis, warps, pipeline stages."""
    return {"BK": block(K, 128 if bfloat16 else 32), "num_warps": 4, "num_stages": 2}
