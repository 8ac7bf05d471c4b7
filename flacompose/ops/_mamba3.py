r"""Mamba-3's recurrence as one call of scalar decay: the trapezoidal rule, keys that turn, and several writes a token.

A token decays the state by ``a``, writes the token before it with the weight ``b`` and itself with the weight ``c``:

    S_t = a_t S_{t-1} + b_t w_{t-1} + c_t w_t        w_t = k_t v_t^T

Without its own write, ``Z_t = S_t - c_t w_t``, a state has one write for each token, of the token before it:

    Z_t = a_t Z_{t-1} + (a_t c_{t-1} + b_t) w_{t-1}        S_t q_t = Z_t q_t + c_t (k_t . q_t) v_t

So scalar decay computes ``Z`` of keys and values one token late, and nothing is ever subtracted. Before the first
token ``Z`` is the state that is given. It holds all of the write of the token before, whose ``c`` is therefore 0.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from math import pi
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flacompose.ops._carry import sums
from flacompose.ops._dtensor import flatten, unflatten, with_dense_gradient
from flacompose.ops._dtype import autocast_dtype, state_dtype, upcast
from flacompose.ops._gates import bounded
from flacompose.ops._groups import spread
from flacompose.ops._ranks import shared, sharing
from flacompose.ops._sizes import always_true, is_known
from flacompose.ops._token_shift import last_of, token_shift
from flacompose.ops._varlen import bounds, of_tokens, stretched, summed
from flacompose.ops.families.gated_skip.op import gated_skip
from flacompose.ops.families.scalar_decay import op
from flacompose.ops.families.scan import op as scan_op


class States(NamedTuple):
    """What goes on from token to token, of ``N`` sequences; any of it may be None, for zeros."""

    angle: Any = None  # [N, H, A], the angles by which keys and queries are turned, in radians
    state: Any = None  # [N, H, S, P]
    k: Any = None  # [N, R, H, S], the turned keys of the last token
    v: Any = None  # [N, H, P], its values


class Scanned(NamedTuple):
    """The arguments of the recurrence. There are ``R`` queries and keys to a head, and ``H`` is a multiple of ``G``."""

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
    up: Tensor | None  # [H, R, P], by which values become those of each key; None for one key, and ones
    Z: Tensor | None = None  # [B, T, H, P], gates what is read, before their silu; without `up`


def scan(
    inputs: Scanned,
    past: States,
    cu_seqlens: Tensor | None = None,  # [N + 1]; past the last sequence only Z may be infinite or NaN
    halves: bool = False,
    num_states: int | None = None,
    lengths: Tensor
    | None = None,  # [B], how many tokens of each row count; the time steps of the others must be 0
) -> tuple[Tensor, States]:
    """What each query reads, ``[B, T, R, H, P]``, in float32 (float64 for float64), and the new states.

    Without `up`, what the one query reads has the dtype of the values, and is 0 for tokens in no sequence.

    With `halves`, number ``i`` of a key turns together with ``i + S / 2``, else with its neighbour. With `num_states`
    the states are those after each of the last ``n`` tokens, with an axis for these behind the first.
    """
    device, dtype = inputs.V.device, autocast_dtype(inputs.V.device)
    if dtype is not None and inputs.V.dtype != torch.float64:
        inputs = inputs._replace(Q=inputs.Q.to(dtype), K=inputs.K.to(dtype), V=inputs.V.to(dtype))
    with nullcontext() if dtype is None else torch.autocast(device.type, enabled=False):
        return _scan(inputs, past, cu_seqlens, halves, num_states, lengths)


def _scan(
    inputs: Scanned,
    past: States,
    cu_seqlens: Tensor | None,
    halves: bool,
    num_states: int | None,
    lengths: Tensor | None,
) -> tuple[Tensor, States]:
    Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, up, gate = inputs
    R = Q.shape[2]
    # States have this dtype, whatever that of the gates is.
    g, trap, dt = (x.to(state_dtype(V.dtype)) for x in (bounded(upcast(ADT, V)), Trap, DT))
    c = trap.sigmoid() * dt
    angle = _angles(Angles, dt, past.angle, cu_seqlens)  # [B, T, H, A]
    cos, sin = angle.cos().unsqueeze(2), angle.sin().unsqueeze(2)
    q, k = (_turned(_biased(x, b, V), cos, sin, halves, V.dtype) for x, b in ((Q, Q_bias), (K, K_bias)))

    (k_before, last_k), (v_before, last_v) = (
        token_shift(x, before, lengths, cu_seqlens, num_states) for x, before in ((k, past.k), (V, past.v))
    )
    # Not of the last token that counts: a place behind it has written that, and there is nothing of its own to write.
    c_before, last_c = token_shift(c, None, None, cu_seqlens, num_states)
    written = g.exp() * (c_before + (-trap).sigmoid() * dt)  # [B, T, H], the weight of the token before
    # A token is R tokens of scalar decay: the first decays, and each writes one key and reads one query.
    values = [_of_keys(x, up) for x in (V, v_before)]
    form: Any = op.recurrent if always_true(V.shape[1] == 1) and sharing() is None else op.chunk
    if num_states is not None:
        form = partial(op.steps, count=num_states, stride=R)
    y, Z = form(
        *op.Inputs(
            q.flatten(1, 2), k_before.flatten(1, 2), values[1].flatten(1, 2),
            spread(g, R), None,
            written.unsqueeze(2).expand(-1, -1, R, -1).flatten(1, 2), past.state,
            stretched(cu_seqlens, R), scale=1.0,
        )
    )  # fmt: skip
    products = _products(Q, K, Q_bias, K_bias)  # [B, T, H, R, R]
    if up is None:
        y = gated_skip(
            y, V, None if D is None else D.unsqueeze(-1), c * products[..., 0, 0], gate, cu_seqlens
        )
        y = y.unsqueeze(2)
    else:
        y = _with(upcast(y.unflatten(1, (-1, R))), c, products, values[0])
        if R > 1:  # a query still lacks the writes that come after it
            of_later = [(upcast(q) * k_before[:, :, r, None]).sum(-1) for r in range(R)]  # [B, T, R, H] each
            y = _with(y, written, torch.stack(of_later, -1).transpose(2, 3).triu(1), values[1])
        if D is not None:
            y = y + upcast(D, V).unsqueeze(-1) * values[0]

    # What is still to be written of the last token.
    written_k, written_v = upcast(last_k), _of_keys(upcast(last_v) * last_c.unsqueeze(-1), up)
    for r in range(R):
        Z = torch.addcmul(Z, written_k[..., r, :, :, None], written_v[..., r, :, None, :])
    last_angle = last_of(angle, past.angle, lengths, cu_seqlens, num_states)
    return y, States(last_angle, Z, last_k, last_v)


def _angles(Angles: Tensor, dt: Tensor, start: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The sums of ``tanh(Angles) * pi * dt`` of each sequence, modulo 2 pi, from -pi to pi, ``[B, T, H, A]``.

    They are taken in half turns and in float64, since a turn is a small part of the sum of a long sequence.
    """
    step = upcast(Angles, dt).tanh() * dt.unsqueeze(-1)
    start = None if start is None else upcast(start, dt) / pi
    ranks = sharing()
    if ranks is not None:
        own = summed(step.double(), cu_seqlens)
        start, _ = sums(ranks, own, torch.zeros_like(own) if start is None else start.double())
    if cu_seqlens is not None:
        total = _packed_sums(step, start, cu_seqlens)
    else:
        total = _sums(step)
        total = total if start is None else total + start.unsqueeze(1)
    return ((total + 1).remainder(2) - 1).to(dt.dtype) * pi


def _packed_sums(step: Tensor, start: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """``[1, T, H, A]``, the sums of each sequence's steps so far, and of what is before its first.

    A difference of sums over all sequences has the value. But it would mix the gradients of the sequences, and pass on
    what is not finite in one of them, so these go through a scan of zeros.
    """
    T, known = step.shape[1], step.detach()
    if always_true(T == 0):  # of a rank without tokens
        return step if start is None else of_tokens(start, T, cu_seqlens)
    sums = _sums(known.where(known.isfinite(), 0))
    before = (sums - known)[0, bounds(cu_seqlens, T)[:-1].clamp(max=T - 1)]
    zeros = (step - known).flatten(2)
    start = None if start is None else start.flatten(1)
    with shared(None):
        carried, _ = scan_op.chunk(*scan_op.Inputs(zeros, torch.zeros_like(zeros), start, cu_seqlens))
    return sums - of_tokens(before, T, cu_seqlens) + carried.view_as(step)


def _sums(x: Tensor) -> Tensor:
    """The sums of ``x [B, T, ...]`` up to each token, in float64: within 32 tokens, and of what is before these.

    One sum over a long row takes milliseconds on a GPU, and the compiler of PyTorch 2.11 fails where it splits one, as
    in https://github.com/pytorch/pytorch/issues/180221. A graph that leaves ``T`` open has one sum nevertheless.
    """
    T, first = x.shape[1], torch.zeros_like(x[:, :1])
    if always_true(T == 1):
        return x.double()
    if not is_known(T) or T <= 32:
        # The gradient of a sum of T numbers asks whether T is 1, which only the data may know. Of T + 1 it is known.
        return torch.cat([first, x], 1).cumsum(1, dtype=torch.float64)[:, 1:]
    padded = F.pad(x, (*[0, 0] * (x.ndim - 2), 0, -T % 32))
    within = padded.unflatten(1, (-1, 32)).cumsum(2, dtype=torch.float64)
    before = torch.cat([first.double(), _sums(within[:, :, -1])[:, :-1]], 1)
    return (within + before.unsqueeze(2)).flatten(1, 2)[:, :T]


def _biased(x: Tensor, bias: Tensor, V: Tensor) -> Tensor:
    """Queries or keys ``[B, T, R, G, S]`` with the bias of each head, ``[B, T, R, H, S]``."""
    G, H = x.shape[3], bias.shape[0]
    bias = unflatten(upcast(bias, V).transpose(0, 1), 1, (G, H // G))
    return flatten(x.unsqueeze(4) + bias, 3, 4)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, halves: bool, dtype: torch.dtype) -> Tensor:
    """``x [B, T, R, H, S]``, of whose pairs of numbers the first ``A`` turn by the angles."""
    axis, A = -2 if halves else -1, cos.shape[-1]
    a, b = x.unflatten(-1, (2, -1) if halves else (-1, 2)).unbind(axis)
    a_, b_ = a[..., :A], b[..., :A]
    parts = ((a_ * cos - b_ * sin, a), (a_ * sin + b_ * cos, b))
    return torch.stack([torch.cat([y.to(dtype), z[..., A:].to(dtype)], -1) for y, z in parts], axis).flatten(
        -2
    )


def _of_keys(v: Tensor, up: Tensor | None) -> Tensor:
    """The values of each key, ``[..., R, H, P]``, of those of each head, ``[..., H, P]``."""
    v = v.unsqueeze(-3)
    return v if up is None else (v * up.transpose(0, 1)).to(v.dtype)


def _with(y: Tensor, weights: Tensor, products: Tensor, values: Tensor) -> Tensor:
    """``y [B, T, R, H, P]`` and the writes of all keys of a token, ``values [B, T, R, H, P]``, that queries read by the
    ``products [B, T, H, R, R]`` of a query and a key."""
    shares = (weights[..., None, None] * products).transpose(2, 3)  # [B, T, R, H, R]
    for r in range(shares.shape[-1]):
        y = torch.addcmul(y, shares[..., r, None], upcast(values[:, :, r, None], y))
    return y


def _products(Q: Tensor, K: Tensor, Q_bias: Tensor, K_bias: Tensor) -> Tensor:
    """Those of all queries and keys of a token, with their biases, ``[B, T, H, R, R]``. Turning changes none.

    Multiplied out, so that nothing of every head and token is as wide as a key.
    """
    Q, K, R, G = upcast(Q), upcast(K), Q.shape[2], Q.shape[3]
    q, k = (
        unflatten(bias.to(Q.dtype), 0, (G, len(bias) // G)) for bias in (Q_bias, K_bias)
    )  # [G, H / G, R, S]
    of_groups = []
    for i in range(G):
        Q_, K_, q_, k_ = Q[:, :, :, i], K[:, :, :, i], q[i], k[i]
        shared = (Q_.unsqueeze(3) * K_.unsqueeze(2)).sum(-1).unsqueeze(2)  # [B, T, 1, R, R]
        by_k = with_dense_gradient((Q_ @ k_.flatten(0, 1).mT).unflatten(-1, (-1, R))).transpose(2, 3)
        by_q = with_dense_gradient((K_ @ q_.flatten(0, 1).mT).unflatten(-1, (-1, R))).movedim(2, 4)
        of_groups.append(shared + by_k + by_q + (q_.unsqueeze(2) * k_.unsqueeze(1)).sum(-1))
    return torch.cat(of_groups, 2)
