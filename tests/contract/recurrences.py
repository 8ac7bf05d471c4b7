"""The recurrences, one entry each: what the contract tests have to know about one and its signature does not say."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from flacompose import ops
from flacompose.ops._arguments.call import check
from flacompose.ops._recurrences.elementwise.rwkv4.reference import rwkv4
from flacompose.ops._recurrences.elementwise.selective_scan.reference import selective_scan
from flacompose.ops._recurrences.fused.slot_attention.reference import slot_attention
from flacompose.ops._recurrences.matrix import op
from flacompose.ops._recurrences.matrix.reference import matrix_recurrence
from flacompose.ops._recurrences.short_conv.reference import short_conv

from .opcase import Function, OpCase, State, entry, without_overwriting

delta_rule = partial(matrix_recurrence, delta_rule=True)

# References and functions whose arguments differ from those of an operator. Their own have the names of operands.


def gla_by_tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options) -> tuple[Tensor, State | None]:
    """The form for decoding, which knows `g` as `gk`."""
    return ops.fused_recurrent_gla(q, k, v, gk=g, **options)


def direct(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    u: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    form: str,
    softmax: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The operator of channel decay itself, which takes gates on both axes, a bonus beside any of them, and logits."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    given = {"gk": gk, "gv": gv, "u": u, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    inputs = op.Inputs(q, k, v, **given, scale=scale, softmax=softmax)
    # A graph learns from the check that there are as many states as sequences. Logits may be wider than keys.
    check(op, inputs._replace(q=q.to(k.dtype)), shared_heads=False)
    o, state = getattr(op, form)(*inputs)
    return o, state if output_final_state else None


def retention(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    h = torch.arange(v.shape[2], dtype=torch.float64, device=v.device)
    return matrix_recurrence(q, k, v, g_gamma=(1 - 2 ** (-5 - h)).log().to(v.dtype), **options)


def lightning(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Lightning attention, for layer 1 of 4."""
    H = v.shape[2]
    h = torch.arange(H, dtype=torch.float64, device=v.device)
    return matrix_recurrence(q, k, v, g_gamma=(-8 * h / H * (1 - 1 / 4)).to(v.dtype), **options)


def normalized(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: tuple[Tensor, Tensor] | None = None,
    scale: float = 1.0,
    constant_weight: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """``z_t = z_{t-1} + k_t``; ``o_t = scale * S_t^T q_t / (scale * z_t^T q_t + 1e-10)``."""
    S, z = None, k.cumsum(1)
    if initial_state is not None:
        S, z = initial_state[0], initial_state[1][:, None] + z
    o, S = matrix_recurrence(q, k, v, initial_state=S, scale=scale)
    weight = scale * (z * q).sum(-1, keepdim=True)
    o = o / ((weight.detach() if constant_weight else weight) + 1e-10)
    return o, (S, z[:, -1])


def mlstm(
    q: Tensor, k: Tensor, x: Tensor, beta: Tensor, g: Tensor, initial_state: tuple[Tensor, ...] | None = None,
    scale: float = 1.0, eps: float = 1e-6, constant_weight: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """As the paper has it, its stabiliser ``m`` a constant in derivatives; `x`, `beta` and `g` are v, i and f."""
    B, T, HV, V = x.shape
    q, k = (y.repeat_interleave(HV // y.shape[2], 2) for y in (q, k))
    zeros = (x.new_zeros(B, HV, *shape) for shape in ((q.shape[-1], V), q.shape[3:], ()))
    C, n, m = zeros if initial_state is None else initial_state
    o, m = [], m.detach()
    for t in range(T):
        before, decay = m, F.logsigmoid(g[:, t])
        m = torch.maximum(decay + m, beta[:, t]).clamp(min=-1e38).detach()  # which stands for -inf
        # The difference of maxima comes first, since nothing is lost in it, however large they are.
        kept, written = (decay + (before - m)).exp()[..., None], (beta[:, t] - m).exp()[..., None] * k[:, t]
        C, n = kept[..., None] * C + written[..., None] * x[:, t, :, None], kept * n + written
        weight = torch.maximum((scale * n * q[:, t]).sum(-1).abs(), (-m).exp()) + eps
        weight = weight.detach() if constant_weight else weight
        o.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], C) / weight[..., None])
    return torch.stack(o, 1), (C, n, m)


def before_sigmoid(g: Tensor) -> Tensor:
    """The number whose sigmoid has this logarithm."""
    return g - (-g.expm1()).log()


def gdn2(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor, b: Tensor, w: Tensor, **options
) -> tuple[Tensor, Tensor]:
    return delta_rule(q, k, w * v, beta=torch.ones_like(v[..., 0]), gk=gk, a=b * k, **options)


def by_steps(form: Function) -> Function:
    """A form of the delta product whose steps have an axis of their own: of `k`, `v` and `beta`, after the tokens."""

    def function(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, **options):
        k, v, b = (x.flatten(1, 2) for x in (k, v, beta))
        return form(q, k, v, g, b, num_householder=beta.shape[2], **options)

    return function


def delta_product(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, every_step: bool = False, **options
) -> tuple[Tensor, Tensor]:
    """The delta rule of one step after the other, of which the first decays and the last is read.

    With `every_step` the gate of a token gets the gradients of the gates of all of its steps, the others being 0.
    """
    n = beta.shape[2]
    other = g - g.detach() if every_step else torch.zeros_like(g)
    other = torch.where(g.isinf(), 0, other)
    gates = torch.stack([g, *[other] * (n - 1)], 2)
    queries = q.unsqueeze(2).expand(-1, -1, n, -1, -1)
    q, k, v, beta, g = (x.flatten(1, 2) for x in (queries, k, v, beta, gates))
    o, state = delta_rule(q, k, v, g, beta=beta, **options)
    return o[:, n - 1 :: n], state


def constant_weight(logits: Tensor) -> Tensor:
    """The softmax with the gradient that it has where its denominator is a constant."""
    return (logits - logits.logsumexp(-1, keepdim=True).detach()).exp()


def wkv(
    initial_state: tuple[Tensor, ...] | None = None, **inputs: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """RWKV-4 with its state in one tuple."""
    o, *state = rwkv4(**inputs, **dict(zip(("initial_a", "initial_b", "initial_m"), initial_state or ())))
    return o, tuple(state)


def mamba(function: Callable[..., object], returned: str, **fixed: object) -> Function:
    """A scan of Mamba, its two keywords for states as the other functions have them."""

    def scan(initial_state: Tensor | None = None, output_final_state: bool = False, **inputs):
        options = {**fixed, "initial_states": initial_state, returned: output_final_state}
        results = function(**inputs, **options)
        return results if output_final_state else (results, None)

    return scan


def time_steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias
    return F.softplus(dt) if softplus else dt


def gated_output(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    y = y if D is None else y + D * x
    return y if z is None else y * F.silu(z)


def mamba1(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    delta_bias: Tensor | None = None, initial_state: Tensor | None = None, softplus: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """With what Mamba's scan has around the recurrence; B and C may be those of groups of channels."""
    B, C = (y if y.dim() == 4 else y.unsqueeze(2) for y in (B, C))
    y, h = selective_scan(x, time_steps(dt, delta_bias, softplus), A, B, C, initial_state)
    return gated_output(y, x, D, z), h


def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_state: Tensor | None = None, softplus: bool = True,
    limit: tuple[float, float] = (0.0, torch.inf),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T``; ``y_t = (h_t C_t + D x_t) silu(z_t)``."""
    dt = time_steps(dt, dt_bias, softplus)
    # Not `clamp`, which has a gradient at its bounds in some versions of PyTorch.
    dt = torch.where((dt < limit[0]) | (dt > limit[1]), dt.detach().clamp(*limit), dt)
    endless = A == -torch.inf  # leaves nothing after a time step above 0
    g = (dt * A.masked_fill(endless, 0)).masked_fill(endless & (dt > 0), -torch.inf)
    h = None if initial_state is None else initial_state.mT
    y, h = matrix_recurrence(C, B, dt.unsqueeze(-1) * x, g, initial_state=h)
    return gated_output(y, x, D if D is None or D.dim() == 2 else D.unsqueeze(-1), z), h.mT


def mamba3_siso(
    initial_state: tuple[Tensor, ...] | None = None, output_final_state: bool = False, **inputs
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """Mamba-3's scan, with the states as the other functions have them."""
    states = {"Input_States": initial_state, "return_final_states": output_final_state}
    results = ops.mamba3_siso_combined(**inputs, **states)
    return (results[0], results[1:]) if output_final_state else (results, None)


def turned(x: Tensor, angle: Tensor, halves: bool) -> Tensor:
    """``x [..., S]``, of whose pairs the first turn by the angles ``[..., A]``; as complex numbers."""
    a, b = x.unflatten(-1, (2, -1) if halves else (-1, 2)).unbind(-2 if halves else -1)
    angle = F.pad(angle, (0, a.shape[-1] - angle.shape[-1]))
    y = torch.complex(a, b) * torch.complex(angle.cos(), angle.sin())
    return torch.cat([y.real, y.imag], -1) if halves else torch.view_as_real(y).flatten(-2)


def mamba3_mimo(
    Q: Tensor, K: Tensor, V: Tensor, ADT: Tensor, DT: Tensor, Trap: Tensor, Q_bias: Tensor, K_bias: Tensor,
    Angles: Tensor, D: Tensor, Z: Tensor, MIMO_V: Tensor, MIMO_Z: Tensor, MIMO_Out: Tensor | None,
    initial_state: tuple[Tensor, ...] | None = None, halves: bool = True, eps: float | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """``S_t = a_t S_{t-1} + a_t (1 - l_t) dt_t w_{t-1} + l_t dt_t w_t``, ``w_t`` the sum of the keys' writes."""
    (B, T, H, P), (R, G, S), A = V.shape, Q.shape[2:], Angles.shape[-1]
    Q, K = (x.repeat_interleave(H // G, 3) + b.mT.movedim(-1, 0) for x, b in ((Q, Q_bias), (K, K_bias)))
    empty = V.new_zeros(B, H, A), V.new_zeros(B, H, P, S), V.new_zeros(B, R, H, S), V.new_zeros(B, H, P)
    angle, state, k, v = initial_state or empty
    o = []
    for t in range(T):
        written = torch.einsum("brhs,bhp,hrp->bhps", k, v, MIMO_V)
        angle = angle + math.pi * Angles[:, t].tanh() * DT[:, t, :, None]
        q, k = (turned(x[:, t], angle[:, None], halves) for x in (Q, K))
        v, share = V[:, t], Trap[:, t].sigmoid()
        before, now = (x[..., None, None] for x in ((1 - share) * DT[:, t], share * DT[:, t]))
        state = ADT[:, t].exp()[..., None, None] * (state + before * written)
        state = state + now * torch.einsum("brhs,bhp,hrp->bhps", k, v, MIMO_V)
        y = torch.einsum("bhps,brhs->brhp", state, q) + (D[:, None, None] * MIMO_V).movedim(1, 0) * v[:, None]
        if eps is not None:
            y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
        o.append(y * F.silu(MIMO_Z.movedim(1, 0) * Z[:, t, None]))
    y = torch.stack(o, 1)
    y = y if MIMO_Out is None else (y * MIMO_Out.movedim(1, 0)).sum(2)
    return y, ((angle + math.pi).remainder(2 * math.pi) - math.pi, state, k, v)


def mamba3(
    Q: Tensor, K: Tensor, Q_bias: Tensor, K_bias: Tensor, initial_state: tuple[Tensor, ...] | None = None,
    **inputs: Tensor,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """The same with one key and one query, pairs of which are neighbours."""
    Q, K, Q_bias, K_bias = Q.unsqueeze(2), K.unsqueeze(2), Q_bias.unsqueeze(1), K_bias.unsqueeze(1)
    one = torch.ones_like(inputs["V"][0, 0]).unsqueeze(1)
    if initial_state is not None:
        angle, state, k, v = initial_state
        initial_state = angle, state, k.unsqueeze(1), v
    given = dict(MIMO_V=one, MIMO_Z=one, MIMO_Out=one, initial_state=initial_state, halves=False)
    o, (angle, state, k, v) = mamba3_mimo(Q, K, Q_bias=Q_bias, K_bias=K_bias, **inputs, **given)
    return o, (angle, state, k.squeeze(1), v)


def softmax_of_q(q: Tensor, k: Tensor, v: Tensor, gk: Tensor, **options) -> tuple[Tensor, Tensor]:
    return matrix_recurrence(q.softmax(-1), k, v, gk=gk, **options)


# The table

chunk, recurrent = partial(direct, form="chunk"), partial(direct, form="recurrent")
OF_SLOTS = {"q": "B T HQ K", "s": "B T H M", "g": "B T H M"}
SLOTS = {"initial_state[0]": "N H K M", "initial_state[1]": "N H M V"}
slots = partial(
    entry,
    recurrence="channel_decay",
    axes=OF_SLOTS,
    output_axes="B T HQ V",
    reference=slot_attention,
    nodes=2,
)
OF_STEPS = {"k": "B T R H K", "v": "B T R HV V", "beta": "B T R HV"}
exponential = partial(
    entry, recurrence="normalizer", arguments="q k v=x i=beta f=g", reference=mlstm, groups=2,
    draws={"f": before_sigmoid}, other_ops=None,
    flops=3,  # 4 for each element but those of m
    states={"initial_state[0]": "N HV K V", "initial_state[1]": "N HV K", "initial_state[2]": "N HV"},
    # What q does to the numerator the denominator partly undoes.
    uncancelled=partial(mlstm, constant_weight=True),
)  # fmt: skip
product = partial(
    entry, recurrence="delta_rule", arguments="q k v beta g", axes=OF_STEPS, reference=delta_product,
    # A strong gate is computed with those of the steps that do not decay, whose gradients are far larger.
    uncancelled=without_overwriting(partial(delta_product, every_step=True)), flops=12, other_ops=None,
)  # fmt: skip
two_keys = partial(
    entry, recurrence="delta_rule", arguments="q k v b w g=gk", axes={"b": "B T H K", "w": "B T HV V"},
    draws={"b": torch.sigmoid, "w": torch.sigmoid}, any_dtype=("b", "w"), not_cast=("b", "w"),
    reference=gdn2, other_ops=None, prepared=True,
)  # fmt: skip
comba = partial(
    entry,
    recurrence="delta_rule",
    arguments="q k v p=a beta g",
    groups=2,
    draws={"beta": torch.sigmoid},
    reference=partial(delta_rule, read_before=True),
)
mean = partial(
    entry, recurrence="rwkv4", arguments="v k u w", gates=("w",), reference=wkv,
    states={"initial_state[0]": "N D", "initial_state[1]": "N D", "initial_state[2]": "N D"},
    draws={"initial_state": lambda x: x.abs() + 0.1},  # sums of weights are above 0
    empty={"initial_state[2]": -1e38}, flops=3, other_ops=None,
)  # fmt: skip

# fmt: off
CASES = [
    entry("chunk_gla", ops.chunk_gla, gla_by_tokens, "channel_decay", "q k v g=gk", inductor=True),
    entry("fused_recurrent_gla-gk-gv", ops.fused_recurrent_gla, None, "channel_decay", "q k v gk gv", inductor=True),
    entry("fused_recurrent_gla-gk", ops.fused_recurrent_gla, None, "channel_decay", "q k v gk"),
    entry("fused_recurrent_gla-gv", ops.fused_recurrent_gla, None, "channel_decay", "q k v gv"),
    entry("fused_recurrent_gla", ops.fused_recurrent_gla, None, "channel_decay", "q k v"),
    entry("bonus-chunk-gk-gv", chunk, recurrent, "channel_decay", "q k v u gk gv"),
    entry("bonus-recurrent", recurrent, None, "channel_decay", "q k v u"),
    entry("chunk_rwkv6", ops.chunk_rwkv6, ops.fused_recurrent_rwkv6, "channel_decay", "r=q k v u w=gk"),
    entry("fused_recurrent_rwkv6", ops.fused_recurrent_rwkv6, ops.chunk_rwkv6, "channel_decay", "r=q k v u w=gk"),
    entry("chunk_simple_gla-g", ops.chunk_simple_gla, ops.fused_recurrent_simple_gla, "head_decay", "q k v g",
          groups=2, inductor=True),
    entry("chunk_simple_gla-g-beta", ops.chunk_simple_gla, ops.fused_recurrent_simple_gla, "head_decay",
          "q k v beta g", groups=2),
    entry("chunk_simple_gla-beta", ops.chunk_simple_gla, ops.fused_recurrent_simple_gla, "head_decay",
          "q k v beta"),
    entry("fused_recurrent_simple_gla-g-beta", ops.fused_recurrent_simple_gla, ops.chunk_simple_gla, "head_decay",
          "q k v beta g"),
    entry("chunk_simple_gla-g_gamma", ops.chunk_simple_gla, ops.fused_recurrent_simple_gla, "head_decay",
          "q k v g_gamma"),
    entry("fused_recurrent_simple_gla-g-g_gamma", ops.fused_recurrent_simple_gla, ops.chunk_simple_gla,
          "head_decay", "q k v g g_gamma", groups=2, inductor=True),
    entry("fused_recurrent_simple_gla", ops.fused_recurrent_simple_gla, ops.chunk_simple_gla, "head_decay", "q k v"),
    entry("chunk_retention", ops.chunk_retention, ops.fused_recurrent_retention, "head_decay", "q k v", groups=2,
          reference=retention),
    entry("fused_recurrent_lightning_attn", partial(ops.fused_recurrent_lightning_attn, layer_idx=1, num_layers=4),
          partial(ops.chunk_lightning_attn, layer_idx=1, num_layers=4), "head_decay", "q k v", groups=2,
          reference=lightning),
    entry("chunk_linear_attn", ops.chunk_linear_attn, ops.fused_recurrent_linear_attn, "head_decay", "q k v"),
    entry("chunk_linear_attn-normalize", partial(ops.chunk_linear_attn, normalize=True),
          partial(ops.fused_recurrent_linear_attn, normalize=True), "head_decay", "q k v", reference=normalized,
          # Values share a z where they share a head of keys; here each has its own.
          states={"initial_state[0]": "N HV K V", "initial_state[1]": "N H K"},
          draws={"q": F.softplus, "k": F.softplus}, nodes=2, other_ops=None,
          # Outputs are means, so what q does to the numerator the denominator undoes, but for differences of values.
          uncancelled=partial(normalized, constant_weight=True)),
    exponential("chunk_mlstm", ops.chunk_mlstm, ops.fused_recurrent_mlstm,
                before=("stabilizer_forward", "matrix_recurrence_chunk")),
    exponential("fused_recurrent_mlstm", ops.fused_recurrent_mlstm, ops.chunk_mlstm,
                before=("stabilizer_forward", "matrix_recurrence_recurrent")),
    entry("chunk_hgrn", ops.chunk_hgrn, ops.fused_recurrent_hgrn, "scan", "x g", inductor=True),
    entry("fused_recurrent_hgrn", ops.fused_recurrent_hgrn, ops.chunk_hgrn, "scan", "x g", inductor=True),
    mean("chunk_rwkv4", ops.chunk_rwkv4, ops.fused_recurrent_rwkv4, inductor=True),
    mean("fused_recurrent_rwkv4", ops.fused_recurrent_rwkv4, ops.chunk_rwkv4),
    entry("chunk_rg_lru", ops.chunk_rg_lru, ops.fused_recurrent_rg_lru, "rg_lru", "x r i a_param",
          draws={"a_param": lambda x: x - 4}, inductor=True),
    entry("fused_recurrent_rg_lru", ops.fused_recurrent_rg_lru, ops.chunk_rg_lru, "rg_lru", "x r i a_param",
          draws={"a_param": lambda x: x - 4}),
    entry("causal_conv1d-silu", partial(ops.causal_conv1d, activation="silu"), None, "short_conv", "x weight bias",
          reference=partial(short_conv, silu=True), inductor=True),
    entry("causal_conv1d", ops.causal_conv1d, None, "short_conv", "x weight"),
    entry("selective_scan_fn", mamba(ops.selective_scan_fn, "return_last_state"), None, "selective_scan",
          "u=x delta=dt A B C", axes={"B": "B T S", "C": "B T S"}, states={"initial_states": "N D S"},
          reference=mamba1, other_ops=("unsqueeze", "unsqueeze"), inductor=True),
    entry("chunk_delta_rule", ops.chunk_delta_rule, ops.fused_recurrent_delta_rule, "delta_rule", "q k v beta"),
    entry("chunk_gated_delta_rule", ops.chunk_gated_delta_rule, ops.fused_recurrent_gated_delta_rule, "delta_rule",
          "q k v beta g", groups=2, inductor=True),
    entry("fused_recurrent_gated_delta_rule", ops.fused_recurrent_gated_delta_rule, ops.chunk_gated_delta_rule,
          "delta_rule", "q k v beta g", inductor=True),
    entry("chunk_kda", ops.chunk_kda, ops.fused_recurrent_kda, "delta_rule", "q k v beta g=gk", groups=2,
          inductor=True),
    entry("fused_recurrent_kda", ops.fused_recurrent_kda, ops.chunk_kda, "delta_rule", "q k v beta g=gk"),
    two_keys("chunk_gdn2", ops.chunk_gdn2, ops.fused_recurrent_gdn2, groups=2),
    two_keys("fused_recurrent_gdn2", ops.fused_recurrent_gdn2, ops.chunk_gdn2),
    comba("chunk_comba", ops.chunk_comba, ops.fused_recurrent_comba),
    comba("fused_recurrent_comba", ops.fused_recurrent_comba, ops.chunk_comba),
    comba("chunk_comba-after", partial(ops.chunk_comba, erase="after"),
          partial(ops.fused_recurrent_comba, erase="after"), reference=delta_rule),
    entry("chunk_dplr_delta_rule", ops.chunk_dplr_delta_rule, ops.fused_recurrent_dplr_delta_rule, "low_rank",
          "q k v a b gk", inductor=True),
    entry("fused_recurrent_dplr_delta_rule", ops.fused_recurrent_dplr_delta_rule, ops.chunk_dplr_delta_rule,
          "low_rank", "q k v a b gk", inductor=True),
    entry("chunk_iplr_delta_rule", ops.chunk_iplr_delta_rule, ops.fused_recurrent_iplr_delta_rule, "low_rank",
          "q k v a b"),
    # Called with the default scale of all other recurrences; that of these two is 1.
    entry("chunk_rwkv7", partial(ops.chunk_rwkv7, scale=None), partial(ops.fused_recurrent_rwkv7, scale=None),
          "low_rank", "r=q k v a b w=gk"),
    product("steps-chunk_gated_delta_product", by_steps(ops.chunk_gated_delta_product),
            by_steps(ops.fused_recurrent_gated_delta_product), groups=2),
    product("steps-fused_recurrent_gated_delta_product", by_steps(ops.fused_recurrent_gated_delta_product),
            by_steps(ops.chunk_gated_delta_product)),
    slots("chunk_gsa", ops.chunk_gsa, ops.fused_recurrent_gsa, arguments="q k v s g", not_cast=(), states=SLOTS,
          other_ops=("view", "view", "cat")),
    slots("fused_recurrent_gsa-grouped", ops.fused_recurrent_gsa, ops.chunk_gsa, arguments="q k v s g", not_cast=(),
          states=SLOTS, groups=3, other_ops=None),
    slots("chunk_abc", ops.chunk_abc, ops.fused_recurrent_gsa, arguments="q k v s", gates=("s",),
          states={**SLOTS, "initial_state[2]": "N H M"}, empty={"initial_state[2]": -torch.inf},
          flops=3,  # 4 for each element but those of z
          # Slots that hold the same are read as one, however they are weighed.
          uncancelled=partial(slot_attention, weights=constant_weight), other_ops=None),
]
# These are not under the whole contract. The first three are the operator with arguments that public functions
# reach only together with others, or through `linear_recurrence`; the scans of Mamba-2
# and Mamba-3 are more than their operator.
GATES_ON_BOTH_AXES = entry("chunk-gk-gv", chunk, recurrent, "channel_decay", "q k v gk gv")
KEY_READS_BEFORE = entry("chunk-erase-before", partial(ops.linear_recurrence, erase="before"), None, "delta_rule",
                         "q k v beta g", groups=2, reference=partial(delta_rule, read_before=True))
SOFTMAX = [
    entry(f"softmax-{form}", partial(direct, form=form, softmax=True), None, "channel_decay", "q k v gk",
          reference=softmax_of_q)
    for form in ("chunk", "recurrent")
]
SSD = entry("mamba_chunk_scan_combined",
            mamba(ops.mamba_chunk_scan_combined, "return_final_states", chunk_size=64, dt_softplus=True), None,
            "head_decay", "x dt A B C D z dt_bias", groups=2, scaled=False, reference=ssd,
            axes={"x": "B T HV V", "dt": "B T HV", "A": "HV", "B": "B T H K", "C": "B T H K", "D": "HV",
                  "z": "B T HV V", "dt_bias": "HV"},
            states={"initial_states": "N HV V K"}, output="x", draws={"A": lambda x: -x.exp()}, other_ops=None)
MAMBA3 = entry("mamba3_siso_combined", mamba3_siso, None, "head_decay",
               "V Q K DT Trap Q_bias K_bias Angles D Z ADT", groups=2, scaled=False, reference=mamba3, gates=("ADT",),
               axes={"V": "B T HV V", **dict.fromkeys("QK", "B T H K"), "ADT": "B T HV", "DT": "B T HV",
                     "Trap": "B T HV", "Q_bias": "HV K", "K_bias": "HV K", "Angles": "B T HV A", "D": "HV",
                     "Z": "B T HV V"},
               states={"Input_States[0]": "N HV A", "Input_States[1]": "N HV V K", "Input_States[2]": "N HV K",
                       "Input_States[3]": "N HV V"},
               output="V", draws={"DT": F.softplus}, before=("cumulative_angle_forward", "rotary_forward"),
               other_ops=None)
# fmt: on

OF_RANKS = {"Q": "B T R H K", "K": "B T R H K", "Q_bias": "HV R K", "K_bias": "HV R K"}
WEIGHTS = dict.fromkeys(("MIMO_V", "MIMO_Z", "MIMO_Out"), "HV R V")


def mimo(initial_state=None, output_final_state: bool = False, normed: bool = False, **inputs):
    """With the states as the contract has them: the heads of keys before their ranks."""
    if initial_state is not None:
        angle, state, k, v = initial_state
        initial_state = angle, state, k.transpose(1, 2), v
    norm = {"fuse_pregate_headwise_rms_norm": normed, "outproj_norm_eps": 0.1}
    divisor = inputs["Q"].shape[-1] // inputs["Angles"].shape[-1]
    o, angle, state, k, v = ops.mamba3_mimo_combined(
        **inputs, **norm, rotary_dim_divisor=divisor, return_state=True, Input_States=initial_state
    )
    return o, (angle, state, k.transpose(1, 2), v) if output_final_state else None


def mimo_reference(initial_state=None, **inputs):
    if initial_state is not None:
        angle, state, k, v = initial_state
        initial_state = angle, state, k.transpose(1, 2), v
    o, (angle, state, k, v) = mamba3_mimo(**inputs, initial_state=initial_state)
    return o, (angle, state, k.transpose(1, 2), v)


def mimo_case(normed: bool = False) -> OpCase:
    """Mamba-3 with several keys and queries a token."""
    axes = (
        {name: " ".join(axes) for name, axes in (MAMBA3.inputs | MAMBA3.gates).items()} | OF_RANKS | WEIGHTS
    )
    states = {name: " ".join(axes) for name, axes in MAMBA3.states.items()} | {"Input_States[2]": "N HV R K"}
    function, given = partial(mimo, normed=normed), partial(mimo_reference, eps=0.1 if normed else None)
    return entry(
        "mamba3_mimo_combined", function, None, "head_decay", " ".join([*MAMBA3.inputs, *WEIGHTS, "ADT"]), axes=axes,
        groups=2, scaled=False, reference=given, gates=("ADT",), states=states, output="V",
        draws={"DT": F.softplus}, other_ops=None,
    )  # fmt: skip


MAMBA3_MIMO = mimo_case()
