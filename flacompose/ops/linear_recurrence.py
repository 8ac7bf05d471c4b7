"""The linear recurrence with a matrix state: all recurrences of this kind, by their arguments."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flacompose._errors import ValueError
from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check, run
from flacompose.ops._operators.checked import check_values, checking
from flacompose.ops._parallel.ranks import sharing
from flacompose.ops._recurrences.matrix.channel_decay import op as channel_decay
from flacompose.ops._recurrences.matrix.delta_rule import op as delta_rule
from flacompose.ops._recurrences.matrix.head_decay import op as head_decay
from flacompose.ops._recurrences.matrix.low_rank import op as low_rank
from flacompose.ops._tensors.dtype import autocast_dtype, upcast
from flacompose.ops._tensors.packed import without_tail
from flacompose.ops._tensors.sizes import always_true
from flacompose.ops.comba import reads_before


def linear_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    erase: str = "after",
    u: Tensor | None = None,
    read: str = "after",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | Any]:
    r"""The linear recurrence with a matrix state that the arguments describe, by the cheapest kernels that compute it.

    $$S'_t = e^{g_t} \operatorname{diag}(e^{gk_t})\, S_{t-1} \operatorname{diag}(e^{gv_t}) \qquad
    S_t = S'_t + b_t ({S^*_t}^\top a_t)^\top + k_t v_t^\top \qquad o_t = \text{scale} \cdot S_t^\top q_t$$

    Without gates nothing decays, and without `a` and `b` nothing is erased. With `beta` the write is the delta rule's,
    ``beta_t k_t (v_t - S*_t^T a_t)^T``, where ``a`` is the key unless it is given. ``S*`` is the state after its decay,
    ``S'``, or with ``erase="before"`` the state before it, ``S_{t-1}``. With ``read="before"`` the query reads that as
    well, and the token's own write by the weights `u`: ``o_t = scale (S_{t-1} + diag(u) k_t v_t^T)^T q_t``.

    One call is one call of a registered operator, with all derivatives; for one token, as in decoding, that is one
    kernel. Preparations of its arguments, such as the sum of `g` and `gk`, are plain PyTorch. Its page has a table
    of the published recurrences as choices of its arguments.

    Args:
        q: Queries, ``[B, T, H, K]``, in float32, bfloat16, float16 or float64.
        k: Keys, ``[B, T, H, K]``, in the dtype of `q`.
        v: Values, ``[B, T, HV, V]``, in the dtype of `q`; ``HV`` is ``H`` or a multiple of it, and head ``h`` of them
            goes with head ``h // (HV / H)`` of queries and keys.
        g: Decay of the whole state, ``[B, T, HV]``, per token, as natural logarithms from 0 to -inf; any float dtype.
            Default: none, as of the next two, which may be given beside it and beside each other.
        gk: Decay of the key axis, ``[B, T, HV, K]``, likewise.
        gv: Decay of the value axis, ``[B, T, HV, V]``, likewise; without `beta`, `a` and `b`.
        beta: How much of a value is replaced, ``[B, T, HV]``, mostly from 0 to 1 or to 2; any float dtype.
        a: What reads that which is erased, ``[B, T, H, K]``, in the dtype of `q`; with `b` or with `beta`.
        b: What is written back of it, ``[B, T, H, K]``, in the dtype of `q`; with `a`, and without `beta`.
        erase: Whether the erased value is read "after" the decay or "before" it. Default: "after".
        u: Weights of the token's own write, ``[H, K]``; any float dtype; with ``read="before"`` alone. Default: 0.
        read: Whether the query reads the state "after" the token's decay and write, or "before" both; the latter
            without `beta`, `a` and `b`. Default: "after".
        scale: Factor of the output. Default: ``K ** -0.5``.
        initial_state: State before the first token, ``[N, HV, K, V]``, in any float dtype. Default: zeros.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, HV, V]`` in the dtype of `v`, or under autocast in its dtype;
            `final_state` is ``[N, HV, K, V]`` in float32 (float64 for float64 inputs), a new tensor, or None unless
            `output_final_state`.

    Raises:
        ValueError: If a shape or a device is wrong, ``K`` or ``V`` is above 512, `scale` is not finite, `erase` or
            `read` is neither "after" nor "before", an argument lacks the one that it belongs to, or two are given which
            no family has together.
        TypeError: If an argument has the wrong type or dtype.
    """
    scale = require.scale(scale, q)
    inputs = head_decay.Inputs(q, k, v, g, None, beta, initial_state, cu_seqlens, scale)
    check(head_decay, inputs, output_final_state=output_final_state)
    (B, T, HV, V), (H, K) = v.shape, q.shape[2:]
    require.optional(q, "gk", gk, (B, T, HV, K))
    require.optional(q, "gv", gv, (B, T, HV, V))
    for name, x in (("a", a), ("b", b)):
        if x is not None:
            require.like(q, name, x, q.shape)
            require.same_dtype(q, name, x)
    require.optional(q, "u", u, (H, K))
    if checking():
        check_values({"q": q, "gk": gk, "gv": gv, "a": a, "b": b, "u": u}, cu_seqlens, gates=("gk", "gv"))
    before = reads_before(erase)
    _check_combination(gv, beta, a, b, erase, u, read)

    options = initial_state, cu_seqlens, scale
    groups = HV // H
    if beta is None and a is None:
        if gk is None and gv is None and read == "after":
            return run(_form(head_decay, T), inputs, output_final_state)
        if gv is not None and gk is None and g is not None:
            gv = _with(g, gv)
        else:
            gk = _with(g, gk, K)
        q, k = _for_each_value(groups, q, k)
        if read == "before":
            u = q.new_zeros(HV, K) if u is None else _for_each_value(groups, u, axis=0)[0]
        return run(
            _form(channel_decay, T), channel_decay.Inputs(q, k, v, gk, gv, u, *options), output_final_state
        )
    if beta is not None:
        rule = delta_rule.Inputs(q, k, v, beta, g, gk, a, *options, read_before=before)
        if before and gk is not None:  # the delta rule's kernels have no read before gates of channels
            return run(_form(low_rank, T), _as_low_rank(rule), output_final_state)
        return run(_form(delta_rule, T), rule, output_final_state)
    assert a is not None and b is not None
    q, k, a, b = _for_each_value(groups, q, k, a, b)
    writes = low_rank.Inputs(q, k, v, a, b, _with(g, gk, K), *options, read_before=before)
    return run(_form(low_rank, T), writes, output_final_state)


def _as_low_rank(rule: delta_rule.Inputs) -> low_rank.Inputs:
    """The low-rank inputs of a delta rule with gates of channels that reads before the decay.

    They have as many heads of queries, keys and ``a`` as of values.
    """
    q, k, v, beta, g, gk, a, initial_state, cu_seqlens, scale, read_before = rule
    a = k if a is None else a
    dtype = autocast_dtype(q.device)
    if dtype is not None and q.dtype != torch.float64:
        q, k, v, a = (x.to(dtype) for x in (q, k, v, a))
    q, k, a = _for_each_value(v.shape[2] // q.shape[2], q, k, a)
    # Tokens in no sequence would add to the gradient of `beta`, and need not be finite.
    k, beta = without_tail(cu_seqlens, k, beta)
    written = (upcast(k, beta) * beta.unsqueeze(-1)).to(k.dtype)
    gates = _with(g, gk)
    return low_rank.Inputs(q, written, v, a, -written, gates, initial_state, cu_seqlens, scale, read_before)


def _check_combination(
    gv: Tensor | None,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    erase: str,
    u: Tensor | None,
    read: Any,
) -> None:
    """Check that no argument lacks its companion, and that one recurrence has all that are given."""
    if not require.is_one_of(read, "after", "before"):
        raise ValueError(f'read must be "after" or "before", got {require.shown(read)}')
    if a is None and b is not None:
        raise ValueError("a must be given with b, which writes back what a reads, got None")
    if a is not None and b is None and beta is None:
        raise ValueError("b or beta must be given with a, which reads what they erase, got neither")
    if u is not None and read == "after":
        raise ValueError(
            'u must not be given with read="after", where a query reads the whole of its own write'
        )
    if beta is not None and b is not None:
        raise ValueError("beta and b must not be given together: no family has both ways of erasing")
    erasing_by = "beta" if beta is not None else "a" if a is not None else None
    if erasing_by is None:
        if erase == "before":
            raise ValueError('beta or a must be given with erase="before", got neither')
        return
    if gv is not None:
        raise ValueError(
            f"gv and {erasing_by} must not be given together: no family decays values and erases"
        )
    if read == "before":
        raise ValueError(
            f'read="before" and {erasing_by} must not be given together: no family reads before it erases'
        )


def _form(op: ModuleType, T: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """The fastest form of a recurrence: for one token, one kernel."""
    return op.recurrent if always_true(T == 1) and sharing() is None else op.chunk


def _with(g: Tensor | None, of_channels: Tensor | None, size: int | None = None) -> Tensor | None:
    """The sum of the decays of heads and of channels, for `size` channels."""
    if g is None:
        return of_channels
    if of_channels is None:
        assert size is not None
        return g.unsqueeze(-1).expand(*g.shape, size)
    dtype = torch.promote_types(torch.promote_types(g.dtype, of_channels.dtype), torch.float32)
    return g.to(dtype).unsqueeze(-1) + of_channels


def _for_each_value(groups: int, *tensors: Tensor, axis: int = 2) -> list[Tensor]:
    """Heads of queries or keys, repeated for each head of values that shares them."""
    return [x.repeat_interleave(groups, axis) if groups > 1 else x for x in tensors]
