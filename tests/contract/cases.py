"""The ops under contract, one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

from flacompose.ops import (
    chunk_abc,
    chunk_gla,
    chunk_gsa,
    chunk_hgrn,
    chunk_linear_attn,
    chunk_retention,
    chunk_rwkv6,
    chunk_simple_gla,
    fused_recurrent_gla,
    fused_recurrent_gsa,
    fused_recurrent_hgrn,
    fused_recurrent_lightning_attn,
    fused_recurrent_rwkv6,
    fused_recurrent_simple_gla,
)
from flacompose.ops.families.scalar_decay.reference import scalar_decay
from flacompose.ops.families.scan.reference import scan
from flacompose.ops.families.vector_decay import op
from flacompose.ops.families.vector_decay.reference import vector_decay

Q = K = ("B", "T", "H", "K")
V = ("B", "T", "H", "V")
X = ("B", "T", "D")
G, GAMMA = ("B", "T", "HV"), ("HV",)
QKV = {"q": Q, "k": K, "v": V}
# Heads of values may be `groups` times those of queries and keys.
QKV_GROUPED = {"q": Q, "k": K, "v": ("B", "T", "HV", "V")}


@dataclass(frozen=True)
class OpCase:
    """What the suite has to know about one op.

    `call` takes the inputs by name, with `initial_state`, `output_final_state`, `cu_seqlens` and, if `scaled`, `scale`;
    `reference` takes one batch of whole sequences, the scale as a number, and returns ``(o, final_state)``.
    """

    name: str
    call: Callable[..., tuple[Tensor, Tensor | None]]
    reference: Callable[..., tuple[Tensor, Tensor]]
    family: str
    form: str  # of the family: "chunk" or "recurrent"
    gates: dict[str, tuple[str, ...]] = field(default_factory=dict)  # axes by argument
    inputs: dict[str, tuple[str, ...]] = field(default_factory=lambda: dict(QKV))
    output: str = "v"  # the input that has its axes, unless
    output_axes: tuple[str, ...] = ()
    state: tuple[str, ...] = ("N", "H", "K", "V")
    start: Callable[[Tensor], Tensor] = torch.zeros_like  # the state of nothing
    scaled: bool = True
    flops: int = 4  # of a token, for each element of the state
    groups: int = 1  # heads of one kind for each of the other, as `inputs` says
    positive: tuple[str, ...] = ()  # arguments that have to be
    nodes: int = 1  # calls of the registered op
    # PyTorch's ops between inputs, those and results, in a graph; None: many
    around: tuple[str, ...] | None = ()
    term: Callable[..., tuple[Tensor, Tensor]] | None = (
        None  # a reference whose gradients are one of two that cancel
    )
    public: bool = True  # it checks its arguments
    inductor: bool = False  # it stands for its family where each test costs a C++ compilation

    @property
    def forward(self) -> str:
        """The registered op that a call is made of."""
        return f"{self.family}_{self.form}"

    @property
    def backward(self) -> str:
        return f"{self.family}_backward"

    @property
    def first(self) -> str:
        """The input that the others are compared with."""
        return next(iter(self.inputs))

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {**self.inputs, **self.gates, "initial_state": self.state}

    def at(self, window: slice, tensors: dict[str, Tensor], *axes: str) -> dict[str, Tensor]:
        """The window of each tensor along those of these axes that it has."""
        return {
            name: x[tuple(window if axis in axes else slice(None) for axis in self.axes[name])]
            for name, x in tensors.items()
        }


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
    """Straight on the family's op, which takes gates on both axes, a bonus beside any of them, and logits as `q`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, state = getattr(op, form)(q, k, v, gk, gv, u, initial_state, cu_seqlens, scale, softmax, False)
    return o, state if output_final_state else None


def rwkv6(q: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, *, form: Callable, **options):
    """Its receptances as queries."""
    return form(q, k, v, w, u, **options)


def rwkv6_reference(q: Tensor, k: Tensor, v: Tensor, w: Tensor, **options) -> tuple[Tensor, Tensor]:
    return vector_decay(q, k, v, gk=w, **options)


def softmax_reference(q: Tensor, *args: Tensor, **options) -> tuple[Tensor, Tensor]:
    return vector_decay(q.softmax(-1), *args, **options)


def gla_reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options) -> tuple[Tensor, Tensor]:
    return vector_decay(q, k, v, gk=g, **options)


def retention_reference(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    h = torch.arange(v.shape[2], dtype=torch.float64, device=v.device)
    return scalar_decay(q, k, v, g_gamma=(1 - 2 ** (-5 - h)).log().to(v.dtype), **options)


def lightning_reference(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Of layer 1 of 4."""
    H = v.shape[2]
    h = torch.arange(H, dtype=torch.float64, device=v.device)
    return scalar_decay(q, k, v, g_gamma=(-8 * h / H * (1 - 1 / 4)).to(v.dtype), **options)


def linear_attn_normalized(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Its state as one tensor, z beside S as one column more."""
    Sz = None if initial_state is None else (initial_state[..., :-1], initial_state[..., -1])
    o, Sz = chunk_linear_attn(q, k, v, scale, Sz, output_final_state, normalize=True, cu_seqlens=cu_seqlens)
    return o, None if Sz is None else torch.cat([Sz[0], Sz[1].unsqueeze(-1)], -1)


def linear_attn_normalized_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None = None,
    scale: float = 1.0,
    constant_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    """``z_t = z_{t-1} + k_t``; ``o_t = scale * S_t^T q_t / (scale * z_t^T q_t + 1e-10)``."""
    S, z = None, k.cumsum(1)
    if initial_state is not None:
        S, z = initial_state[..., :-1], initial_state[:, None, ..., -1] + z
    o, S = scalar_decay(q, k, v, initial_state=S, scale=scale)
    weight = scale * (z * q).sum(-1, keepdim=True)
    o = o / ((weight.detach() if constant_weight else weight) + 1e-10)
    return o, torch.cat([S, z[:, -1].unsqueeze(-1)], -1)


def slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    call: Callable,
) -> tuple[Tensor, Tensor | None]:
    """Gated slot attention, or without g that of ABC, its state as one tensor: for each slot Hk, Hv and z."""
    state, options = None, {} if g is None else {"g": g}
    if initial_state is not None:
        Hk, Hv, z = initial_state.split([q.shape[-1], v.shape[-1], 1 if g is None else 0], -1)
        state = (Hk.mT, Hv) if g is not None else (Hk.mT, Hv, z.squeeze(-1))
    o, state = call(
        q, k, v, s, **options, scale=scale, initial_state=state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if state is None:
        return o, None
    Hk, Hv, *z = state
    return o, torch.cat([Hk.mT, Hv, *(x.unsqueeze(-1) for x in z)], -1)


def slots_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float = 1.0,
    constant_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    """``Hk_t = Hk_{t-1} diag(exp g_t) + k_t s_t^T``; ``p_t = softmax(scale * Hk_t^T q_t)``; ``Hv_t`` likewise.

    Without g, by ``z_t = logaddexp(z_{t-1}, s_t)``: ``g_t = z_{t-1} - z_t``, and ``exp(s_t - z_t)`` in place of s.
    """
    B, T, H, M = s.shape
    K, V, groups = q.shape[-1], v.shape[-1], q.shape[2] // H
    state = s.new_zeros(B, H, M, K + V) if initial_state is None else initial_state[..., : K + V]
    Hk, Hv = state.split([K, V], -1)  # [B, H, M, K] and [B, H, M, V]
    z = s.new_full((B, H, M), -torch.inf)
    if g is None and initial_state is not None:
        z = initial_state[..., -1]
    o = []
    for t in range(T):
        if g is not None:
            decay, weight = g[:, t].exp(), s[:, t]
        else:
            # Where nothing has come yet, 0 stands for -inf, whose derivatives are NaN.
            empty, none = z == -torch.inf, s[:, t] == -torch.inf
            new = torch.logaddexp(torch.where(empty, 0, z), torch.where(none, 0, s[:, t]))
            new = torch.where(empty, torch.where(none, 0, s[:, t]), torch.where(none, z, new))
            decay = torch.where(empty, torch.where(none, 1, 0), torch.where(none, 1, (z - new).exp()))
            weight = torch.where(none, 0, (s[:, t] - new).exp())
            z = torch.where(empty & none, z, new)
        Hk = decay.unsqueeze(-1) * Hk + weight.unsqueeze(-1) * k[:, t].unsqueeze(2)
        Hv = decay.unsqueeze(-1) * Hv + weight.unsqueeze(-1) * v[:, t].unsqueeze(2)
        logits = scale * torch.einsum("bhnk,bhmk->bhnm", q[:, t].unflatten(1, (H, groups)), Hk)
        total = logits.logsumexp(-1, keepdim=True)
        p = (logits - (total.detach() if constant_weight else total)).exp()
        o.append(torch.einsum("bhnm,bhmv->bhnv", p, Hv).flatten(1, 2))
    z = () if g is not None else (z.unsqueeze(-1),)
    return torch.stack(o, 1), torch.cat([Hk, Hv, *z], -1)


def nothing(state: Tensor) -> Tensor:
    """Whose logsumexp, the last column, is -inf."""
    return torch.cat([torch.zeros_like(state[..., :-1]), torch.full_like(state[..., -1:], -torch.inf)], -1)


def vector(name: str, call: Callable, reference: Callable, form: str, *gates, **fields) -> OpCase:
    return OpCase(name, call, reference, "vector_decay", form, *gates, **fields)


def scalar(name: str, call: Callable, reference: Callable, form: str, *gates, **fields) -> OpCase:
    fields = {"inputs": QKV_GROUPED, "state": ("N", "HV", "K", "V"), **fields}
    return OpCase(name, call, reference, "scalar_decay", form, *gates, **fields)


def elementwise(name: str, call: Callable, form: str, **fields) -> OpCase:
    fields = {"inputs": {"x": X}, "output": "x", "state": ("N", "D"), "scaled": False, "flops": 2, **fields}
    return OpCase(name, call, scan, "scan", form, {"g": X}, **fields)


chunk, token = "chunk", "recurrent"
gla, simple, simple_token = fused_recurrent_gla, chunk_simple_gla, fused_recurrent_simple_gla
rwkv6_chunk, rwkv6_token = (partial(rwkv6, form=form) for form in (chunk_rwkv6, fused_recurrent_rwkv6))
with_u = {"inputs": QKV | {"u": ("H", "K")}, "public": False}  # rwkv6 knows `q` as `r`
lightning = partial(fused_recurrent_lightning_attn, layer_idx=1, num_layers=4)
normalized = {
    "state": ("N", "HV", "K", "V+1"),
    "positive": ("q", "k", "initial_state"),
    "nodes": 2,
    "around": ("view", "add", "unsqueeze", "div", "view", "squeeze", "unsqueeze", "cat"),
    # Outputs are means, so what q does to the numerator the denominator undoes, but for the difference of values.
    "term": partial(linear_attn_normalized_reference, constant_weight=True),
    "public": False,
}
S = ("B", "T", "H", "M")
slotted = {
    "inputs": {**QKV, "s": S},
    "state": ("N", "H", "M", "K+V"),
    "nodes": 2,
    "around": ("permute", "cat"),
    "public": False,
}
grouped = {
    "inputs": {**slotted["inputs"], "q": ("B", "T", "HV", "K")},
    "output_axes": ("B", "T", "HV", "V"),
    "groups": 3,
    "around": None,  # grouped queries take turns
}
bounded = {
    **slotted,
    "inputs": QKV,
    "state": ("N", "H", "M", "K+V+1"),
    "start": nothing,
    "flops": 3,  # 4 for each element but those of z
    "around": None,  # the running logsumexp
    # Slots that hold the same are read as one, however they are weighed.
    "term": partial(slots_reference, constant_weight=True),
}
# fmt: off
CASES = [
    vector("chunk_gla", chunk_gla, gla_reference, chunk, {"g": K}, inductor=True),
    vector("fused_recurrent_gla-gk-gv", gla, vector_decay, token, {"gk": K, "gv": V}, inductor=True),
    vector("fused_recurrent_gla-gk", gla, vector_decay, token, {"gk": K}),
    vector("fused_recurrent_gla-gv", gla, vector_decay, token, {"gv": V}),
    vector("fused_recurrent_gla", gla, vector_decay, token),
    vector("bonus-chunk-gk-gv", partial(direct, form=chunk), vector_decay, chunk, {"gk": K, "gv": V}, **with_u),
    vector("bonus-recurrent", partial(direct, form=token), vector_decay, token, **with_u),
    vector("chunk_rwkv6", rwkv6_chunk, rwkv6_reference, chunk, {"w": K}, **with_u),
    vector("fused_recurrent_rwkv6", rwkv6_token, rwkv6_reference, token, {"w": K}, **with_u),
    scalar("chunk_simple_gla-g", simple, scalar_decay, chunk, {"g": G}, groups=2, inductor=True),
    scalar("chunk_simple_gla-g_gamma", simple, scalar_decay, chunk, {"g_gamma": GAMMA}, around=("expand",)),
    scalar("fused_recurrent_simple_gla-g-g_gamma", simple_token, scalar_decay, token,
           {"g": G, "g_gamma": GAMMA}, groups=2, around=("add",), inductor=True),
    scalar("fused_recurrent_simple_gla", simple_token, scalar_decay, token),
    scalar("chunk_retention", chunk_retention, retention_reference, chunk),
    scalar("fused_recurrent_lightning_attn", lightning, lightning_reference, token),
    scalar("chunk_linear_attn", chunk_linear_attn, scalar_decay, chunk),
    scalar("chunk_linear_attn-normalize", linear_attn_normalized, linear_attn_normalized_reference, chunk,
           **normalized),
    elementwise("chunk_hgrn", chunk_hgrn, chunk, inductor=True),
    elementwise("fused_recurrent_hgrn", fused_recurrent_hgrn, token, inductor=True),
    vector("chunk_gsa", partial(slots, call=chunk_gsa), slots_reference, chunk, {"g": S}, **slotted),
    vector("fused_recurrent_gsa-grouped", partial(slots, call=fused_recurrent_gsa), slots_reference, token, {"g": S},
           **{**slotted, **grouped}),
    vector("chunk_abc", partial(slots, call=chunk_abc), slots_reference, chunk, {"s": S}, **bounded),
]
# Not under contract: what the op does that no public function asks of it alone.
GATES_ON_BOTH_AXES = vector("chunk-gk-gv", partial(direct, form=chunk), vector_decay, chunk, {"gk": K, "gv": V})
SOFTMAX = [
    vector("softmax-chunk", partial(direct, form=chunk, softmax=True), softmax_reference, chunk, {"gk": K}),
    vector("softmax-recurrent", partial(direct, form=token, softmax=True), softmax_reference, token, {"gk": K}),
]
# fmt: on


def every(cases: list[OpCase] = CASES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


each_op = every()
each_gated_op = every([case for case in CASES if case.gates])
each_scaled_op = every([case for case in CASES if case.scaled])
each_public_op = every([case for case in CASES if case.public])
each_softmax = every(SOFTMAX)
one_op_a_form = every([case for case in CASES if case.inductor])
