"""The rotary embedding in PyTorch, for every device without a Triton kernel.

    q_turned_t = rotate(q_t + q_bias)        k_before_t = rotate(k_{t-1} + k_bias)        v_before_t = v_{t-1}

Queries and keys are computed for each value head, in float32, and rounded once. Rotating both by the same
angle changes neither the inner product of a query and a key nor the cross product of a vector and its
gradient, and this cross product is the gradient of the angle.
"""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.fused.rotary.inputs import Inputs
from flacompose.ops._tensors.dtensor import flatten, unflatten, with_dense_gradient
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops._tensors.packed import bounds, last_token, shifted, without_tail
from flacompose.ops._tensors.sizes import always_true


def forward(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(q_turned, k_before [B, T, R, HV, S], v_before [B, T, HV, P], products [B, T, HV, R, R], last_k, last_v)``."""
    q, k, v, q_bias, k_bias, angle, initial_k, initial_v, cu_seqlens, halves = inputs
    q, k, v, angle = without_tail(cu_seqlens, q, k, v, angle)
    q_turned, k_rotated = (
        rotated(biased(x, bias), angle, halves).to(x.dtype) for x, bias in ((q, q_bias), (k, k_bias))
    )
    k_before, v_before = _before(k_rotated, initial_k, cu_seqlens), _before(v, initial_v, cu_seqlens)
    of_tokens = q_turned, k_before, v_before, products(q, k, q_bias, k_bias)
    last = last_token(k_rotated, initial_k, cu_seqlens), last_token(v, initial_v, cu_seqlens)
    return *without_tail(cu_seqlens, *of_tokens), *last


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The requested gradients."""
    q, k, v, q_bias, k_bias, angle, initial_k, initial_v, cu_seqlens, halves = call.inputs
    q, k, angle, d_products = without_tail(cu_seqlens, q, k, angle, _arriving(call, "products"))
    dq, dk, dv = without_tail(
        cu_seqlens, *(upcast(_arriving(call, name)) for name in ("q_turned", "k_before", "v_before"))
    )
    dk, d_initial_k = _shifted_back(dk, upcast(_arriving(call, "last_k")), cu_seqlens)
    dv, d_initial_v = _shifted_back(dv, upcast(_arriving(call, "last_v")), cu_seqlens)
    # Rotate the gradients back, which gives the gradients of the vectors before rotation.
    dq, dk = (rotated(x, -angle, halves) for x in without_tail(cu_seqlens, dq, dk))
    q_, k_ = biased(q, q_bias), biased(k, k_bias)
    A = angle.shape[-1]
    dangle = pi * (_cross(q_, dq, A, halves) + _cross(k_, dk, A, halves))
    weights = d_products.permute(0, 1, 3, 2, 4)  # [B, T, R, HV, R]
    dq = dq + (weights.unsqueeze(-1) * k_.transpose(2, 3).unsqueeze(2)).sum(4)
    weights = d_products.permute(0, 1, 4, 2, 3)
    dk = dk + (weights.unsqueeze(-1) * q_.transpose(2, 3).unsqueeze(2)).sum(4)
    dq, dk, dv = without_tail(cu_seqlens, dq, dk, dv)
    H = q.shape[3]
    return call.select(
        q=lambda: dq.unflatten(3, (H, -1)).sum(4),
        k=lambda: dk.unflatten(3, (H, -1)).sum(4),
        v=dv,
        q_bias=lambda: dq.sum((0, 1)).transpose(0, 1),
        k_bias=lambda: dk.sum((0, 1)).transpose(0, 1),
        angle=dangle,
        initial_k=d_initial_k,
        initial_v=d_initial_v,
    )


def biased(x: Tensor, bias: Tensor) -> Tensor:
    """Queries or keys ``[B, T, R, H, S]`` with the bias of each head, ``[B, T, R, HV, S]``, in float32."""
    H, HV = x.shape[3], bias.shape[0]
    bias = unflatten(upcast(bias, x).transpose(0, 1).to(upcast(x).dtype), 1, (H, HV // H))
    return flatten(x.unsqueeze(4) + bias, 3, 4)


def rotated(x: Tensor, angle: Tensor, halves: bool) -> Tensor:
    """``x [B, T, R, HV, S]``, with its first ``A`` pairs of numbers rotated by ``angle [B, T, HV, A]``."""
    axis, A = -2 if halves else -1, angle.shape[-1]
    angle = pi * angle.unsqueeze(2)
    cos, sin = angle.cos(), angle.sin()
    (a, still_a), (b, still_b) = (y.split([A, y.shape[-1] - A], -1) for y in _pairs(x, halves))
    parts = (a * cos - b * sin, still_a), (a * sin + b * cos, still_b)
    return torch.stack([torch.cat(y, -1) for y in parts], axis).flatten(-2)


def products(q: Tensor, k: Tensor, q_bias: Tensor, k_bias: Tensor) -> Tensor:
    """The products of all queries and keys of a token, with their biases, ``[B, T, HV, R, R]``.

    The products of sums are multiplied out. So no tensor has ``S`` numbers for each value head and token.
    """
    q, k, R, H = upcast(q), upcast(k), q.shape[2], q.shape[3]
    biases = [unflatten(bias.to(q.dtype), 0, (H, len(bias) // H)) for bias in (q_bias, k_bias)]
    of_groups = []
    for i in range(H):  # DTensor can select on a sharded axis, but not unbind it
        q_, k_ = (bias.select(0, i) for bias in biases)  # [HV / H, R, S]
        of_q, of_k = q.select(3, i), k.select(3, i)
        shared = (of_q.unsqueeze(3) * of_k.unsqueeze(2)).sum(-1).unsqueeze(2)  # [B, T, 1, R, R]
        by_k = with_dense_gradient((of_q @ k_.flatten(0, 1).mT).unflatten(-1, (-1, R))).transpose(2, 3)
        by_q = with_dense_gradient((of_k @ q_.flatten(0, 1).mT).unflatten(-1, (-1, R))).movedim(2, 4)
        of_groups.append(shared + by_k + by_q + (q_.unsqueeze(2) * k_.unsqueeze(1)).sum(-1))
    return torch.cat(of_groups, 2)


def _pairs(x: Tensor, halves: bool) -> tuple[Tensor, ...]:
    """The first and the second number of each pair, ``[..., S / 2]``."""
    return x.unflatten(-1, (2, -1) if halves else (-1, 2)).unbind(-2 if halves else -1)


def _before(x: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The token before each token of ``x [B, T, ...]``. For a single token it is a copy of `initial`."""
    if cu_seqlens is None and initial is not None and always_true(x.shape[1] == 1):
        return initial.unsqueeze(1).to(x.dtype, copy=True)
    return shifted(x, initial, cu_seqlens)


def _cross(x: Tensor, dx: Tensor, A: int, halves: bool) -> Tensor:
    """``[B, T, HV, A]``, the gradient of the angle, in radians, by which ``x [B, T, R, HV, S]`` is rotated."""
    (a, b), (da, db) = _pairs(x, halves), _pairs(dx, halves)
    return (a * db - b * da)[..., :A].sum(2)


def _arriving(call: BackwardCall[Inputs], name: str) -> Tensor:
    """The gradient of the result `name`, or zeros."""
    found = getattr(call.arriving, name)
    if found is not None:
        return found
    names = call.signature.outputs._fields
    return torch.zeros_like(call.signature.fake(*call.inputs)[names.index(name)])


def _shifted_back(d: Tensor, d_last: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The backward of `_before` and of `last_token`: the gradients of ``x [B, T, ...]`` and of ``initial [N, ...]``.

    ``d [B, T, ...]`` is the gradient of the output of `_before`, ``d_last [N, ...]`` of the last tokens.
    """
    if cu_seqlens is None:
        return torch.cat([d[:, 1:], d_last.unsqueeze(1)], 1), d[:, 0].clone()
    T, cu = d.shape[1], bounds(cu_seqlens, d.shape[1])
    filled = cu.diff() > 0
    # Place T, which is cut off below, takes the gradients of sequences without tokens.
    place = torch.where(filled, cu[1:] - 1, T)
    padded = torch.cat([d[:, 1:], torch.zeros_like(d[:, :1]), torch.zeros_like(d[:, :1])], 1)
    filled = filled.view(-1, *[1] * (d.ndim - 2))
    d_initial = torch.where(filled, d[0, cu[:-1].clamp(max=T - 1)], d_last)
    return padded.index_copy(1, place, d_last.unsqueeze(0))[:, :T], d_initial
