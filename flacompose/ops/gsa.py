"""Gated slot attention (GSA), https://arxiv.org/abs/2409.07146; without gates, ABC, 2110.02488."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flacompose._errors import TypeError, ValueError
from flacompose.ops._arguments import require
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._arguments.large_heads import by_keys, by_values, fits
from flacompose.ops._composed.logsumexp import running_logsumexp
from flacompose.ops._operators.bounds import verified
from flacompose.ops._operators.checked import check_values, checking
from flacompose.ops._recurrences.fused.slot_attention import op as slot_attention
from flacompose.ops._recurrences.matrix import op
from flacompose.ops._tensors.dtensor import flatten, unflatten
from flacompose.ops._tensors.dtype import autocast_dtype, state_dtype
from flacompose.ops._tensors.grouped_queries import by_head, interleave_zeros, queries_as_tokens
from flacompose.ops._tensors.packed import scaled_bounds
from flacompose.ops._tensors.sizes import always_true


def chunk_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: tuple[Tensor, ...] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...] | Any]:
    r"""Gated slot attention, computed in chunks: the form for training and for prompts.

    $$H^k_t = H^k_{t-1} \operatorname{diag}(e^{g_t}) + k_t s_t^\top \qquad
    p_t = \operatorname{softmax}(\text{scale} \cdot {H^k_t}^\top q_t)$$
    $$H^v_t = \operatorname{diag}(e^{g_t})\, H^v_{t-1} + s_t v_t^\top \qquad o_t = {H^v_t}^\top p_t$$

    From "Gated Slot Attention for Efficient Linear-Time Sequence Modeling" (<https://arxiv.org/abs/2409.07146>).
    Without `g` it is [chunk_abc][flacompose.ops.chunk_abc], attention with bounded memory: `s` are logits, and

    $$z_t = \operatorname{logaddexp}(z_{t-1}, s_t) \qquad g_t = z_{t-1} - z_t \qquad s_t \leftarrow e^{s_t - z_t}$$

    Args:
        q: Queries, ``[B, T, HQ, K]``, in float32, bfloat16, float16 or float64. ``HQ`` is a multiple of ``H``, and
            query head ``h`` uses head ``h // (HQ / H)`` of keys and values.
        k: Keys, ``[B, T, H, K]``, in the dtype of `q`.
        v: Values, ``[B, T, H, V]``, in the dtype of `q`.
        s: Weights of the write to each of ``M`` slots, ``[B, T, H, M]``, in any float dtype. Without `g`, the natural
            logarithms of the weights, finite or -inf.
        g: Decay of the slots, ``[B, T, H, M]``, per token, as natural logarithms from 0 to -inf; any float dtype.
            Default: computed from `s`.
        scale: Factor of the logits. Default: ``K ** -0.5``.
        initial_state: State before the first token, the tuple ``(Hk, Hv)``, ``[N, H, K, M]`` and ``[N, H, M, V]``, in
            any float dtype. Without `g` it is ``(Hk, Hv, z)``, ``z`` being ``[N, H, M]``. Default: zeros, and ``z``
            of -inf.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, HQ, V]`` in the dtype of `v`, or of autocast where it is on;
            `final_state` is ``(Hk, Hv)``, or ``(Hk, Hv, z)`` without `g`, new tensors in float32 (float64 for float64
            inputs), or None unless `output_final_state`.

    Raises:
        ValueError: If a shape or a device is wrong, ``M`` is above 512, or `scale` is not finite.
        TypeError: If an argument has the wrong type or dtype.
    """
    return run(op.chunk, q, k, v, s, g, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: tuple[Tensor, ...] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
) -> tuple[Tensor, tuple[Tensor, ...] | Any]:
    """[chunk_gsa][flacompose.ops.chunk_gsa], token by token: the form for decoding.

    It is the same function of the same arguments, derivatives included, for one or a few tokens at a time.

    Args:
        output_states: Number ``n`` of states to return instead of the final one, as in
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla]: a tuple of ``[N, n, H, K, M]``,
            ``[N, n, H, M, V]`` and, without `g`, ``[N, n, H, M]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, q, output_final_state, cu_seqlens, output_states)
    return run(form, q, k, v, s, g, scale, initial_state, wanted, cu_seqlens, output_states, by_tokens=True)


def run(
    form: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: tuple[Tensor, ...] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    output_states: int | None = None,
    by_tokens: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """Check the arguments; call channel decay twice or, for a single token `by_tokens`, the op of slot attention."""
    require.flags(output_final_state=output_final_state)
    names = ("Hk", "Hv") if g is not None else ("Hk", "Hv", "z")
    groups = _check_tokens(q, k, v, s, g)
    B, T, H, K = k.shape
    N, M, V = require.sequences(q, cu_seqlens), s.shape[3], v.shape[3]
    Hk = Hv = z = None
    if initial_state is not None:
        if not isinstance(initial_state, (tuple, list)) or len(initial_state) != len(names):
            with_g, got = "with" if g is not None else "without", require.kind(initial_state)
            raise TypeError(f"initial_state must be a tuple ({', '.join(names)}) {with_g} g, got {got}")
        shapes = ((N, H, K, M), (N, H, M, V), (N, H, M))
        for i, (x, shape) in enumerate(zip(initial_state, shapes, strict=False)):
            require.like(q, f"initial_state[{i}]", x, shape)
        Hk, Hv, z = initial_state if g is None else (*initial_state, None)
    scale = require.scale(scale, q)
    if checking():
        given = {"q": q, "k": k, "v": v, "s": s, "g": g}
        given |= {f"initial_state[{i}]": x for i, x in enumerate((Hk, Hv, z))}
        check_values(given, cu_seqlens, gates=("g",), lowest=("s", "initial_state[2]"))

    dtype = autocast_dtype(q.device)
    if dtype is not None and q.dtype != torch.float64:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        s = s if g is None else s.to(dtype)
    with nullcontext() if dtype is None else torch.autocast(q.device.type, enabled=False):
        if s.dtype != q.dtype:
            s = s.to(state_dtype(q.dtype))
        if g is None:
            g, s, z = running_logsumexp(s, z, cu_seqlens, output_states)
        # A symbolic length is taken for several tokens, so that a graph gets no guard on it.
        if by_tokens and cu_seqlens is None and always_true(T == 1) and fits(k, v):
            o, Hk, Hv = slot_attention.token(
                *slot_attention.Inputs(unflatten(q, 2, (H, groups)), k, v, s, g, Hk, Hv, scale)
            )
            o = flatten(o, 2, 3)
            if output_states is not None:
                Hk, Hv = Hk.unsqueeze(1), Hv.unsqueeze(1)
        else:
            if groups > 1:
                q = queries_as_tokens(unflatten(q, 2, (H, groups)))
                k, v, s, g = (interleave_zeros(x, groups) for x in (k, v, s, g))
                cu_seqlens = scaled_bounds(verified(cu_seqlens, T, in_graphs=False), groups)
                if output_states is not None:
                    form = partial(form, stride=groups)
            read = partial(_read, form, cu_seqlens)
            # Logits are not rounded, since the softmax makes an absolute error a relative one.
            logits, Hk = by_keys(read, Hk, q, k, s, gv=g, scale=scale, full_precision=True)
            o, Hv = by_values(read, Hv, logits, s, v, gk=g, scale=1.0, softmax=True)
            if groups > 1:
                o = flatten(by_head(o, T, groups), 2, 3)
    if not output_final_state:
        return o, None
    return o, (Hk, Hv) if z is None else (Hk, Hv, z)


def _read(
    form: Callable[..., tuple[Tensor, Tensor]],
    cu_seqlens: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """One of the two passes of channel decay."""
    return form(*op.Inputs(q, k, v, cu_seqlens=cu_seqlens, **others))


def _check_tokens(q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor | None) -> int:
    """Check the inputs of tokens, and return the number of query heads per key head."""
    for name, x, axes in (
        ("q", q, ("HQ", "K")),
        ("k", k, ("H", "K")),
        ("v", v, ("H", "V")),
        ("s", s, ("H", "M")),
    ):
        require.axes(name, x, ("B", "T", *axes))
    B, T, HQ, K = q.shape
    H, M = k.shape[2], s.shape[3]
    for name, x, D in (("k", k, K), ("v", v, v.shape[3]), ("s", s, M)):
        require.like(q, name, x, (B, T, H, D))
    if H != 0 and HQ % H != 0:
        raise ValueError(f"q must have a multiple of the {H} heads of k, got {HQ}")
    require.optional(q, "g", g, s.shape)
    require.same_dtype(q, "k", k)
    require.same_dtype(q, "v", v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        require.not_empty(name, x)
    require.head_size("s", s)
    return HQ // H
