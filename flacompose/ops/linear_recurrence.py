"""The linear recurrence with a matrix state, which the arguments specialise to a published recurrence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose._errors import ValueError
from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check, run
from flacompose.ops._parallel.ranks import sharing
from flacompose.ops._recurrences.matrix import op
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
    r"""The linear recurrence with a matrix state. The arguments choose the recurrence, and so the cheapest kernels.

    $$S'_t = e^{g_t} \operatorname{diag}(e^{gk_t})\, S_{t-1} \operatorname{diag}(e^{gv_t}) \qquad
    S_t = S'_t + b_t ({S^*_t}^\top a_t)^\top + k_t v_t^\top \qquad o_t = \text{scale} \cdot S_t^\top q_t$$

    Without gates nothing decays, and without `a` and `b` nothing is erased. With `beta` the write is the delta rule's,
    ``beta_t k_t (v_t - S*_t^T a_t)^T``, where ``a`` is the key unless it is given. ``S*`` is the state after its decay,
    ``S'``, or with ``erase="before"`` the state before its decay, ``S_{t-1}``. With ``read="before"`` the query reads
    ``S_{t-1}`` and, by the weights `u`, the token's own write: ``o_t = scale (S_{t-1} + diag(u) k_t v_t^T)^T q_t``.

    One call is one call of a registered operator with all derivatives, and for one token one kernel. Preparations of
    the arguments, such as the sum of `g` and `gk`, are plain PyTorch. The documentation lists the arguments that give
    each published recurrence.

    Args:
        q: Queries, ``[B, T, H, K]``, in float32, bfloat16, float16 or float64.
        k: Keys, ``[B, T, H, K]``, in the dtype of `q`.
        v: Values, ``[B, T, HV, V]``, in the dtype of `q`. ``HV`` is a multiple of ``H``, and value head ``h`` uses
            head ``h // (HV / H)`` of queries and keys.
        g: Decay of the whole state, ``[B, T, HV]``, per token, as natural logarithms from 0 to -inf; any float dtype.
            Default: none. `gk` and `gv` may be given too; the decays are multiplied.
        gk: Decay of the key axis, ``[B, T, HV, K]``, likewise.
        gv: Decay of the value axis, ``[B, T, HV, V]``, likewise; without `beta`, `a` and `b`.
        beta: Share of the stored value that is replaced, ``[B, T, HV]``, usually from 0 to 1 or to 2; any float dtype.
        a: Vectors that read the erased value, ``[B, T, H, K]``, in the dtype of `q`; with `b` or with `beta`.
        b: Vectors that write the erased value back, ``[B, T, H, K]``, in the dtype of `q`; with `a`, and without
            `beta`.
        erase: Whether the erased value is read "after" the decay or "before" it. Default: "after".
        u: Weights of the token's own write in its output, ``[H, K]``; any float dtype; with ``read="before"`` alone.
            Default: 0.
        read: Whether the query reads the state "after" the token's decay and write, or "before" both. "before" is
            without `beta`, `a` and `b`. Default: "after".
        scale: Factor of the output. Default: ``K ** -0.5``.
        initial_state: State before the first token, ``[N, HV, K, V]``, in any float dtype. Default: zeros.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, HV, V]`` in the dtype of `v`, or of autocast where it is on;
            `final_state` is ``[N, HV, K, V]`` in float32 (float64 for float64 inputs), a new tensor, or None unless
            `output_final_state`.

    Raises:
        ValueError: If a shape or a device is wrong, ``K`` or ``V`` is above 512, `scale` is not finite, `erase` or
            `read` is neither "after" nor "before", an argument comes without one that it needs, or no recurrence has
            all given arguments.
        TypeError: If an argument has the wrong type or dtype.
    """
    scale = require.scale(scale, q)
    inputs = op.Inputs(
        q, k, v, g, None, gk, gv, u, beta, a, b, initial_state, cu_seqlens, scale,
        delta_rule=beta is not None, read_before=reads_before(erase),
    )  # fmt: skip
    check(op, inputs, output_final_state=output_final_state)
    _check_combination(gv, beta, a, b, erase, u, read)
    if read == "before" and u is None:
        inputs = inputs._replace(u=q.new_zeros(q.shape[2:]))
    form = op.recurrent if always_true(q.shape[1] == 1) and sharing() is None else op.chunk
    return run(form, _of_scheme(inputs), output_final_state)


def _of_scheme(inputs: op.Inputs) -> op.Inputs:
    """The `inputs` of the cheapest scheme. Decays are added; heads are repeated if the scheme cannot share them."""
    g, gk, gv, q, u, K = inputs.g, inputs.gk, inputs.gv, inputs.q, inputs.u, inputs.q.shape[-1]
    # The delta rule with gates of channels cannot read before the decay; low rank can.
    if inputs.delta_rule:
        return _as_low_rank(inputs) if inputs.read_before and gk is not None else inputs
    if inputs.b is None and gk is None and gv is None and u is None:
        return inputs
    if gv is not None and gk is None and g is not None:
        gv = _with(g, gv)
    else:
        gk = _with(g, gk, K)
    groups = inputs.v.shape[2] // q.shape[2]
    heads = {x: y for x in ("q", "k", "a", "b") if (y := getattr(inputs, x)) is not None}
    heads = {x: _for_each_value(y, groups) for x, y in heads.items()}
    u = None if u is None else _for_each_value(u, groups, axis=0)
    return inputs._replace(**heads, g=None, gk=gk, gv=gv, u=u)


def _as_low_rank(rule: op.Inputs) -> op.Inputs:
    """The low-rank inputs of a delta rule with gates of channels that reads before the decay, with ``HV`` heads."""
    q, k, v, beta = rule.q, rule.k, rule.v, rule.beta
    assert beta is not None
    a = k if rule.a is None else rule.a
    dtype = autocast_dtype(q.device)
    if dtype is not None and q.dtype != torch.float64:
        q, k, v, a = (x.to(dtype) for x in (q, k, v, a))
    q, k, a = (_for_each_value(x, v.shape[2] // x.shape[2]) for x in (q, k, a))
    # Tokens in no sequence may be NaN, and would add to the gradient of `beta`.
    k, beta = without_tail(rule.cu_seqlens, k, beta)
    written = (upcast(k, beta) * beta.unsqueeze(-1)).to(k.dtype)
    return rule._replace(
        q=q, k=written, v=v, g=None, gk=_with(rule.g, rule.gk), beta=None, a=a, b=-written, delta_rule=False
    )


def _check_combination(
    gv: Tensor | None,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    erase: str,
    u: Tensor | None,
    read: Any,
) -> None:
    """Check that one recurrence has all given arguments, and that none of the arguments it needs is missing."""
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
        raise ValueError("beta and b must not be given together: no recurrence has both ways of erasing")
    erasing_by = "beta" if beta is not None else "a" if a is not None else None
    if erasing_by is None:
        if erase == "before":
            raise ValueError('beta or a must be given with erase="before", got neither')
        return
    if gv is not None:
        raise ValueError(
            f"gv and {erasing_by} must not be given together: no recurrence decays values and erases"
        )
    if read == "before":
        raise ValueError(
            f'read="before" and {erasing_by} must not be given together: no recurrence reads before it erases'
        )


def _with(g: Tensor | None, of_channels: Tensor | None, size: int | None = None) -> Tensor | None:
    """The sum of the decays of heads and of channels, for `size` channels. Either may be None."""
    if g is None:
        return of_channels
    if of_channels is None:
        assert size is not None
        return g.unsqueeze(-1).expand(*g.shape, size)
    dtype = torch.promote_types(torch.promote_types(g.dtype, of_channels.dtype), torch.float32)
    return g.to(dtype).unsqueeze(-1) + of_channels


def _for_each_value(x: Tensor, groups: int, axis: int = 2) -> Tensor:
    """Heads of queries or keys, repeated for each value head that shares them."""
    return x.repeat_interleave(groups, axis) if groups > 1 else x
