r"""Mamba-3's recurrence as head decay: trapezoidal rule, rotary embedding, several writes per token.

A token decays the state by ``a``, writes the previous token with weight ``b``, and itself with weight ``c``:

    S_t = a_t S_{t-1} + b_t w_{t-1} + c_t w_t        w_t = k_t v_t^T

Without the token's own write, the state ``Z_t = S_t - c_t w_t`` has one write per token, of the previous token:

    Z_t = a_t Z_{t-1} + (a_t c_{t-1} + b_t) w_{t-1}        S_t q_t = Z_t q_t + c_t (k_t . q_t) v_t

So head decay computes ``Z`` from keys and values shifted by one token, without a subtraction. Before the first
token ``Z`` is the initial state, which already contains the whole write of the previous token: its ``c`` is 0.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from math import pi
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flacompose.ops._parallel.exchange import sums
from flacompose.ops._parallel.ranks import sharing
from flacompose.ops._parallel.token_shift import last_of, token_shift
from flacompose.ops._recurrences.elementwise.cumulative_angle import op as cumulative_angle
from flacompose.ops._recurrences.fused.gated_skip.op import gated_skip
from flacompose.ops._recurrences.fused.mamba3 import op as token
from flacompose.ops._recurrences.fused.rotary import op as rotary
from flacompose.ops._recurrences.fused.rotary.eager import biased, products, rotated
from flacompose.ops._recurrences.matrix import op
from flacompose.ops._tensors.dtype import autocast_dtype, state_dtype, upcast
from flacompose.ops._tensors.gate_formulas import clamped
from flacompose.ops._tensors.grouped_queries import interleave_zeros
from flacompose.ops._tensors.packed import of_tokens, scaled_bounds, summed
from flacompose.ops._tensors.sizes import always_true


class States(NamedTuple):
    """The states of ``N`` sequences between two tokens. None stands for zeros."""

    angle: Any = None  # [N, H, A], the cumulative angle, in radians
    state: Any = None  # [N, H, S, P] or, with `values_first`, [N, H, P, S]
    k: Any = None  # [N, R, H, S], the rotated keys of the last token
    v: Any = None  # [N, H, P], the values of the last token


class Scanned(NamedTuple):
    """The arguments of the recurrence. A head has ``R`` queries and keys, and ``H`` is a multiple of ``G``."""

    Q: Tensor  # [B, T, R, G, S]
    K: Tensor  # [B, T, R, G, S]
    V: Tensor  # [B, T, H, P]
    ADT: Tensor  # [B, T, H]
    DT: Tensor  # [B, T, H]
    Trap: Tensor  # [B, T, H]
    Q_bias: Tensor  # [H, R, S]
    K_bias: Tensor  # [H, R, S]
    Angles: Tensor  # [B, T, H, A] or [B, T, 1, A]
    D: Tensor | None  # [H]
    up: Tensor | None  # [H, R, P], factors of the values for each key; None for R = 1 and ones
    Z: Tensor | None = None  # [B, T, H, P], the gates of the outputs before silu; without `up`


def scan(
    inputs: Scanned,
    past: States,
    cu_seqlens: Tensor | None = None,  # [N + 1]; in tokens of no sequence, only Z may be infinite or NaN
    halves: bool = False,
    num_states: int | None = None,
    # [B], the number of tokens of each row before its padding. Padding must have time steps of 0.
    lengths: Tensor | None = None,
    final: bool = True,
    values_first: bool = False,
) -> tuple[Tensor, States]:
    """The outputs of each query, ``[B, T, R, H, P]``, in float32 (float64 for float64), and the new states.

    Without `up` there is one query, its output has the dtype of the values and is 0 for tokens in no sequence, and
    a call of a single token is one operator.

    With `halves`, numbers ``i`` and ``i + S / 2`` of a key are rotated together, otherwise neighbours. With
    `num_states` the states have a second axis, for the last ``n`` tokens. Without `final` they may be None.
    """
    device, dtype = inputs.V.device, autocast_dtype(inputs.V.device)
    if dtype is not None and inputs.V.dtype != torch.float64:
        inputs = inputs._replace(Q=inputs.Q.to(dtype), K=inputs.K.to(dtype), V=inputs.V.to(dtype))
    with nullcontext() if dtype is None else torch.autocast(device.type, enabled=False):
        # A symbolic length is taken for several tokens, so that a graph gets no guard on it.
        one = always_true(inputs.V.shape[1] == 1) and sharing() is None
        if one and not halves and inputs.up is cu_seqlens is lengths is num_states is None:
            return _token(inputs, past, values_first)
        if values_first and past.state is not None:
            past = past._replace(state=past.state.mT)
        y, new = _scan(inputs, past, cu_seqlens, halves, num_states, lengths, final)
        return y, new._replace(state=new.state.mT.contiguous()) if values_first and final else new


def _token(inputs: Scanned, past: States, values_first: bool) -> tuple[Tensor, States]:
    Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, _, Z = inputs
    (B, _, H, P), S = V.shape, Q.shape[-1]
    of_state = (P, S) if values_first else (S, P)
    shapes = States((H, Angles.shape[-1]), (H, *of_state), (1, H, S), (H, P))
    angle, state, k, v = (V.new_zeros(B, *of) if x is None else x for x, of in zip(past, shapes, strict=True))
    y, angle, state, k, v = token.token(
        *token.Inputs(
            Q.squeeze(2), K.squeeze(2), V, ADT, DT, Trap, Q_bias.squeeze(1), K_bias.squeeze(1), Angles,
            angle, state, k.squeeze(1), v, D, Z, values_first,
        )
    )  # fmt: skip
    return y.unsqueeze(2), States(angle, state, k.unsqueeze(1), v)


def _scan(
    inputs: Scanned,
    past: States,
    cu_seqlens: Tensor | None,
    halves: bool,
    num_states: int | None,
    lengths: Tensor | None,
    final: bool,
) -> tuple[Tensor, States]:
    Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, up, gate = inputs
    R = Q.shape[2]
    # The dtype of states follows from the values, not from the gates.
    g, trap, dt = (x.to(state_dtype(V.dtype)) for x in (clamped(upcast(ADT, V)), Trap, DT))
    c = trap.sigmoid() * dt
    angle, last_angle = _angles(Angles, dt, past.angle, cu_seqlens)  # [B, T, H, A] and [N, H, A]
    if sharing() is None and lengths is None and num_states is None:
        q, k_before, v_before, dots, last_k, last_v = rotary.forward(
            *rotary.Inputs(Q, K, V, Q_bias, K_bias, angle, past.k, past.v, cu_seqlens, halves)
        )
    else:  # the op does not handle padding, other ranks or intermediate states
        q, k = (rotated(biased(x, b), angle, halves).to(V.dtype) for x, b in ((Q, Q_bias), (K, K_bias)))
        (k_before, last_k), (v_before, last_v) = (
            token_shift(x, before, lengths, cu_seqlens, num_states)
            for x, before in ((k, past.k), (V, past.v))
        )
        dots = products(Q, K, Q_bias, K_bias)
        if sharing() is None:
            last_angle = last_of(pi * angle, past.angle, lengths, cu_seqlens, num_states)
    # `lengths` is not passed here. The first place of padding writes the last token, and padding has `c = 0`. So
    # `last_c` of the last place is right: after padding it is 0.
    c_before, last_c = token_shift(c, None, None, cu_seqlens, num_states)
    written = g.exp() * (c_before + (dt - c))  # [B, T, H], the weight of the previous token
    # A token becomes R tokens of head decay. The first decays the state, and each has one key and one query.
    values = [_of_keys(x, up) for x in (V, v_before)]
    form: Any = op.recurrent if always_true(V.shape[1] == 1) and sharing() is None else op.chunk
    if num_states is not None:
        form = partial(op.steps, count=num_states, stride=R)
    y, Z = form(
        *op.Inputs(
            q.flatten(1, 2), k_before.flatten(1, 2), values[1].flatten(1, 2),
            interleave_zeros(g, R), beta=written.unsqueeze(2).expand(-1, -1, R, -1).flatten(1, 2),
            initial_state=past.state, cu_seqlens=scaled_bounds(cu_seqlens, R), scale=1.0,
        )
    )  # fmt: skip
    if up is None:
        own = None if D is None else D.unsqueeze(-1)
        y = gated_skip(y, V, own, c * dots.squeeze(-1).squeeze(-1), gate, cu_seqlens).unsqueeze(2)
    else:
        y = _with(upcast(y.unflatten(1, (-1, R))), c, dots, values[0])
        if R > 1:  # so far, a query has not read the later of the R writes
            of_later = [(upcast(q) * k_before[:, :, r, None]).sum(-1) for r in range(R)]  # [B, T, R, H] each
            y = _with(y, written, torch.stack(of_later, -1).transpose(2, 3).triu(1), values[1])
        if D is not None:
            y = y + upcast(D, V).unsqueeze(-1) * values[0]

    if not final:
        return y, States()
    # Add the last token's own write, which `Z` lacks.
    written_v = _of_keys(last_v * last_c.unsqueeze(-1), up)
    for r in range(R):
        Z = torch.addcmul(Z, last_k[..., r, :, :, None], written_v[..., r, :, None, :])
    return y, States(last_angle, Z, last_k, last_v)


def _angles(
    Angles: Tensor, dt: Tensor, start: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The cumulative angles ``[B, T, H, A]``, in units of pi from -1 to 1, and the last, ``[N, H, A]``, in radians.

    They are the sums of ``tanh(Angles) * dt`` from `start`, which is in radians.
    """
    Angles, ranks = Angles.to(dt.dtype) if dt.dtype == torch.float64 else Angles, sharing()
    if ranks is None:
        angle, last = cumulative_angle.forward(Angles, dt, start, cu_seqlens)
        return angle.to(dt.dtype), last.to(dt.dtype)
    own = summed((upcast(Angles).tanh() * dt.unsqueeze(-1)).double(), cu_seqlens) * pi
    totals = sums(ranks, own, torch.zeros_like(own) if start is None else start.double())
    start, last = ((x + pi).remainder(2 * pi) - pi for x in totals)
    if always_true(dt.shape[1] == 0):
        angle = of_tokens(start, 0, cu_seqlens)
    else:
        angle, _ = cumulative_angle.forward(Angles, dt, start, cu_seqlens)
    return angle.to(dt.dtype), last.to(dt.dtype)


def _of_keys(v: Tensor, up: Tensor | None) -> Tensor:
    """The values of each key, ``[..., R, H, P]``, of the values of each head, ``[..., H, P]``."""
    v = v.unsqueeze(-3)
    return v if up is None else (v * up.transpose(0, 1)).to(v.dtype)


def _with(y: Tensor, weights: Tensor, products: Tensor, values: Tensor) -> Tensor:
    """``y [B, T, R, H, P]`` plus the reads of the token's own writes.

    The writes have ``values [B, T, R, H, P]``, and ``products [B, T, H, R, R]`` are of queries and keys.
    """
    shares = (weights[..., None, None] * products).transpose(2, 3)  # [B, T, R, H, R]
    for r in range(shares.shape[-1]):
        y = torch.addcmul(y, shares[..., r, None], upcast(values[:, :, r, None], y))
    return y
