"""The recurrences, one entry each: what the tests and the benchmark have to know about one.

An entry names the public function, its inputs with their axes, its reference, and how its inputs are drawn. The tests
derive values and gradients, errors, graphs, placements of distributed tensors and packed batches from it; the benchmark
derives its inputs, states and reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flacompose.ops import (
    _check,
    causal_conv1d,
    chunk_abc,
    chunk_comba,
    chunk_delta_rule,
    chunk_dplr_delta_rule,
    chunk_gated_delta_product,
    chunk_gated_delta_rule,
    chunk_gdn2,
    chunk_gla,
    chunk_gsa,
    chunk_hgrn,
    chunk_iplr_delta_rule,
    chunk_kda,
    chunk_lightning_attn,
    chunk_linear_attn,
    chunk_retention,
    chunk_rwkv6,
    chunk_rwkv7,
    chunk_simple_gla,
    fused_recurrent_comba,
    fused_recurrent_delta_rule,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_gated_delta_product,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn2,
    fused_recurrent_gla,
    fused_recurrent_gsa,
    fused_recurrent_hgrn,
    fused_recurrent_iplr_delta_rule,
    fused_recurrent_kda,
    fused_recurrent_lightning_attn,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
    fused_recurrent_rwkv6,
    fused_recurrent_rwkv7,
    fused_recurrent_simple_gla,
    mamba_chunk_scan_combined,
    selective_scan_fn,
)
from flacompose.ops.families.delta_rule.reference import delta_rule
from flacompose.ops.families.low_rank.reference import low_rank
from flacompose.ops.families.scalar_decay.reference import scalar_decay
from flacompose.ops.families.scan.reference import scan
from flacompose.ops.families.selective_scan.reference import selective_scan
from flacompose.ops.families.short_conv.reference import short_conv
from flacompose.ops.families.vector_decay import op
from flacompose.ops.families.vector_decay.reference import vector_decay

Axes = tuple[str, ...]
State = Tensor | tuple[Tensor, ...]
Call = Callable[..., tuple[Tensor, Tensor]]

# Every dimension along which the batch, or the heads, may be split. N counts sequences, which are rows of the
# batch unless they are packed. HV and HQ are the heads that come in groups, D are channels without heads.
BATCH, HEADS = ("B", "N"), ("H", "HV", "HQ", "D")


@dataclass(frozen=True)
class OpCase:
    """One recurrence in one form.

    `function` takes the inputs by name, with `initial_state`, `output_final_state`, `cu_seqlens` and, if `scaled`,
    `scale`. `reference` takes one batch of whole sequences, `initial_state` and, if `scaled`, the scale as a number,
    and returns ``(o, final_state)``.
    """

    name: str
    function: Callable[..., tuple[Tensor, State | None]]
    reference: Callable[..., tuple[Tensor, State]]
    family: str
    form: str  # of the family's op: "chunk" or "recurrent", or "forward" where there is one form
    gates: Mapping[str, Axes]  # the axes of the log decays, by argument
    inputs: Mapping[
        str, Axes
    ]  # the axes of all other inputs but the state; the first is compared with the others
    states: Mapping[str, Axes]  # one tensor or a tuple of several, by the names that errors have for them
    other: Callable[..., tuple[Tensor, State | None]] | None = None  # the same function in the other form
    output: str = "v"  # the input that has the axes of the output, unless these are given:
    output_axes: Axes = ()
    empty: Mapping[str, float] = field(
        default_factory=dict
    )  # the state before any token, where it is not zeros
    groups: int = 1  # how many HV, or HQ, share one of H
    scaled: bool = True
    flops: int = 4  # per token and element of the state
    draws: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)  # of normal numbers
    any_dtype: Axes = ()  # inputs that need not have the dtype of the first
    optional: Axes = ()  # inputs that may be absent
    not_cast: Axes = ()  # inputs of tokens that autocast leaves as they are
    operands: Mapping[str, str] = field(default_factory=dict)  # names that the registered op has for inputs
    nodes: int = 1  # calls of the registered op
    prepared: bool = False  # whether arguments of the op are products of inputs
    # PyTorch's operations that a graph of the call has besides the registered op, with and without a state. None: many.
    other_ops: Axes | None = ()
    # A reference in which a gradient is only the first of two large terms that cancel in the true gradient. Errors of
    # that gradient are measured against it.
    uncancelled: Callable[..., tuple[Tensor, State]] | None = None
    inductor: bool = False  # stands for its family in tests that compile C++

    @property
    def forward(self) -> str:
        """The registered op that a call is made of."""
        return f"{self.family}_{self.form}"

    @property
    def backward(self) -> str:
        """The registered op of the gradient."""
        return f"{self.family}_backward"

    @property
    def first(self) -> str:
        """The input that the others are compared with."""
        return next(iter(self.inputs))

    @property
    def state(self) -> Axes:
        """The axes of the state as `call` has it: one tensor, the parts of a tuple being joined."""
        axes = next(iter(self.states.values()))
        return axes if len(self.states) == 1 else (*axes[:2], "joined")

    @property
    def axes(self) -> dict[str, Axes]:
        return {**self.inputs, **self.gates, "initial_state": self.state}

    def call(
        self, initial_state: Tensor | None = None, output_final_state: bool = False, **inputs
    ) -> tuple[Tensor, Tensor | None]:
        """The function, its state as one tensor."""
        given = None if initial_state is None else self.split(initial_state, inputs)
        o, state = self.function(**inputs, initial_state=given, output_final_state=output_final_state)
        return o, None if state is None else self.join(state)

    def joint_reference(
        self, initial_state: Tensor | None = None, *, uncancelled: bool = False, **inputs
    ) -> tuple[Tensor, Tensor]:
        """The reference, its state as one tensor."""
        given = None if initial_state is None else self.split(initial_state, inputs)
        reference = self.uncancelled if uncancelled else self.reference
        assert reference is not None
        o, state = reference(**inputs, initial_state=given)
        return o, self.join(state)

    def join(self, state: State) -> Tensor:
        """A tuple of states ``[N, H, ...]`` as one tensor ``[N, H, joined]``."""
        return state if isinstance(state, Tensor) else torch.cat([x.flatten(2) for x in state], -1)

    def split(self, state: Tensor, inputs: Mapping[str, Tensor]) -> State:
        """The opposite of `join`; the sizes are those of the inputs."""
        if len(self.states) == 1:
            return state
        sizes: dict[str, int] = {}
        for name, axes in {**self.inputs, **self.gates}.items():
            sizes.update(zip(axes, inputs[name].shape))
        shapes = [[sizes[axis] for axis in axes[2:]] for axes in self.states.values()]
        parts = state.split([prod(shape) for shape in shapes], -1)
        return tuple(x.unflatten(-1, shape) for x, shape in zip(parts, shapes))

    def at(self, window: slice, tensors: Mapping[str, Tensor], *axes: str) -> dict[str, Tensor]:
        """The window of each tensor along those of these axes that it has."""
        return {
            name: x[tuple(window if axis in axes else slice(None) for axis in self.axes[name])]
            for name, x in tensors.items()
        }


# References and functions whose arguments differ from those of a family's


def gla_by_tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options) -> tuple[Tensor, State | None]:
    """The form for decoding, which knows `g` as `gk`."""
    return fused_recurrent_gla(q, k, v, gk=g, **options)


def gla_reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options) -> tuple[Tensor, Tensor]:
    return vector_decay(q, k, v, gk=g, **options)


def kda_reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, **options
) -> tuple[Tensor, Tensor]:
    return delta_rule(q, k, v, beta, gk=g, **options)


def gdn2_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, **options
) -> tuple[Tensor, Tensor]:
    return delta_rule(q, k, w * v, torch.ones_like(v[..., 0]), gk=g, a=b * k, **options)


def comba_reference(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, beta: Tensor, g: Tensor, *, before: bool = False, **options
) -> tuple[Tensor, Tensor]:
    if not before:
        return delta_rule(q, k, v, beta, g, a=p, **options)
    q, k, p = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k, p))
    k = beta[..., None] * k
    return low_rank(q, k, v, p, -k, g[..., None].expand(q.shape), **options)


def rwkv7_reference(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **options
) -> tuple[Tensor, Tensor]:
    return low_rank(r, k, v, a, b, w, **options)


def by_steps(
    form: Callable[..., tuple[Tensor, Tensor | None]],
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A form of the delta product whose steps have an axis of their own: of `k`, `v` and `beta`, after the tokens."""

    def function(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        k, v, b = (x.flatten(1, 2) for x in (k, v, beta))
        return form(q, k, v, g, b, num_householder=beta.shape[2], **options)

    return function


def delta_product_reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, every_step: bool = False, **options: Any
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
    o, state = delta_rule(q, k, v, beta, g, **options)
    return o[:, n - 1 :: n], state


def without_overwriting(
    reference: Callable[..., tuple[Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`reference`, whose initial state gets the gradient that it has where no key replaces what the state holds.

    What a key replaces is subtracted from what was there, in chunks and token by token.
    """

    def uncancelled(
        q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None = None, **options
    ) -> tuple[Tensor, Tensor]:
        if initial_state is None:
            return reference(q, k, v, **options)
        results = reference(q, k, v, initial_state=initial_state.detach(), **options)
        fixed = {name: x.detach() if isinstance(x, Tensor) else x for name, x in options.items()}
        kept = reference(q.detach(), k.detach() * 0, v.detach(), initial_state=initial_state, **fixed)
        o, S = (x + y - y.detach() for x, y in zip(results, kept))
        return o, S

    return uncancelled


def unit_vectors(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def up_to_two(x: Tensor) -> Tensor:
    return 2 * x.sigmoid()


def rwkv6_reference(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, **options
) -> tuple[Tensor, Tensor]:
    return vector_decay(r, k, v, gk=w, u=u, **options)


def retention_reference(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    h = torch.arange(v.shape[2], dtype=torch.float64, device=v.device)
    return scalar_decay(q, k, v, g_gamma=(1 - 2 ** (-5 - h)).log().to(v.dtype), **options)


def lightning_reference(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    """The reference of lightning attention, for layer 1 of 4."""
    H = v.shape[2]
    h = torch.arange(H, dtype=torch.float64, device=v.device)
    return scalar_decay(q, k, v, g_gamma=(-8 * h / H * (1 - 1 / 4)).to(v.dtype), **options)


def linear_attn_normalized_reference(
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
    o, S = scalar_decay(q, k, v, initial_state=S, scale=scale)
    weight = scale * (z * q).sum(-1, keepdim=True)
    o = o / ((weight.detach() if constant_weight else weight) + 1e-10)
    return o, (S, z[:, -1])


def slots_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    initial_state: tuple[Tensor, ...] | None = None,
    scale: float = 1.0,
    constant_weight: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """``Hk_t = Hk_{t-1} diag(exp g_t) + k_t s_t^T``; ``p_t = softmax(scale * Hk_t^T q_t)``; ``Hv_t`` likewise.

    Without g, by ``z_t = logaddexp(z_{t-1}, s_t)``: ``g_t = z_{t-1} - z_t``, and ``exp(s_t - z_t)`` in place of s.
    """
    B, T, H, M = s.shape
    groups = q.shape[2] // H
    z = s.new_full((B, H, M), -torch.inf)
    if initial_state is None:
        Hk, Hv = s.new_zeros(B, H, k.shape[-1], M), s.new_zeros(B, H, M, v.shape[-1])
    elif g is None:
        Hk, Hv, z = initial_state
    else:
        Hk, Hv = initial_state
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
        Hk = decay.unsqueeze(-2) * Hk + k[:, t].unsqueeze(-1) * weight.unsqueeze(-2)
        Hv = decay.unsqueeze(-1) * Hv + weight.unsqueeze(-1) * v[:, t].unsqueeze(-2)
        logits = scale * torch.einsum("bhnk,bhkm->bhnm", q[:, t].unflatten(1, (H, groups)), Hk)
        total = logits.logsumexp(-1, keepdim=True)
        p = (logits - (total.detach() if constant_weight else total)).exp()
        o.append(torch.einsum("bhnm,bhmv->bhnv", p, Hv).flatten(1, 2))
    return torch.stack(o, 1), (Hk, Hv) if g is not None else (Hk, Hv, z)


def ssd(
    x: Tensor,
    initial_state=None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    scan=mamba_chunk_scan_combined,
    **inputs,
):
    """Mamba-2's scan with all of its options, its two keywords for states as the other functions have them."""
    results = scan(
        x,
        **inputs,
        chunk_size=chunk_size,
        dt_softplus=True,
        initial_states=initial_state,
        return_final_states=output_final_state,
    )
    return results if output_final_state else (results, None)


def ssd_reference(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T``; ``y_t = (h_t C_t + D x_t) silu(z_t)``."""
    dt = F.softplus(dt if dt_bias is None else dt + dt_bias)
    h = None if initial_state is None else initial_state.mT
    y, h = scalar_decay(C, B, dt.unsqueeze(-1) * x, dt * A, initial_state=h)
    if D is not None:
        y = y + D.unsqueeze(-1) * x
    return y if z is None else y * F.silu(z), h.mT


def mamba(u: Tensor, initial_state=None, output_final_state: bool = False, **inputs):
    """Mamba's scan, its two keywords for states as the other functions have them."""
    results = selective_scan_fn(
        u, **inputs, initial_states=initial_state, return_last_state=output_final_state
    )
    return results if output_final_state else (results, None)


def mamba_reference(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return selective_scan(u, delta, A, B.unsqueeze(2), C.unsqueeze(2), initial_state)


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
    """The family's op itself, which takes gates on both axes, a bonus beside any of them, and logits as `q`."""
    if initial_state is not None:
        N, (H, K), V = _check.sequences(q, cu_seqlens), q.shape[2:], v.shape[3]
        _check.like(q, "initial_state", initial_state, (N, H, K, V))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    inputs = op.Inputs(q, k, v, gk, gv, u, initial_state, cu_seqlens, scale, softmax)
    o, state = getattr(op, form)(*inputs)
    return o, state if output_final_state else None


def softmax_reference(q: Tensor, k: Tensor, v: Tensor, gk: Tensor, **options) -> tuple[Tensor, Tensor]:
    return vector_decay(q.softmax(-1), k, v, gk, **options)


# The table

Q = K = ("B", "T", "H", "K")
V, VG = ("B", "T", "H", "V"), ("B", "T", "HV", "V")
S, G, X = ("B", "T", "H", "M"), ("B", "T", "HV"), ("B", "T", "D")
QKV, QKV_GROUPED, RKVU = (
    {"q": Q, "k": K, "v": V},
    {"q": Q, "k": K, "v": VG},
    {"r": Q, "k": K, "v": V, "u": ("H", "K")},
)
QKV_OF_SLOTS = {**QKV, "q": ("B", "T", "HQ", "K")}
MATRIX, MATRIX_GROUPED = {"initial_state": ("N", "H", "K", "V")}, {"initial_state": ("N", "HV", "K", "V")}
SLOTS = {"initial_state[0]": ("N", "H", "K", "M"), "initial_state[1]": ("N", "H", "M", "V")}


def _case(family: str, inputs: Mapping[str, Axes], states: Mapping[str, Axes]) -> Callable[..., OpCase]:
    def case(name: str, form: str, function, other, reference, gates=None, **fields) -> OpCase:
        fields = {"family": family, "inputs": inputs, "states": states, **fields}
        return OpCase(name, function, reference, form=form, gates=gates or {}, other=other, **fields)

    return case


vector = _case("vector_decay", QKV, MATRIX)
scalar = _case("scalar_decay", QKV_GROUPED, MATRIX_GROUPED)
with_strength = partial(
    _case("scalar_decay", {**QKV_GROUPED, "beta": G}, MATRIX_GROUPED),
    any_dtype=("beta",),
    not_cast=("beta",),
    optional=("beta",),
)
channels = partial(_case("scan", {"x": X}, {"initial_state": ("N", "D")}), output="x", scaled=False, flops=2)
convolution = partial(
    _case("short_conv", {"x": X, "weight": ("D", "W"), "bias": ("D",)}, {"initial_state": ("N", "D", "W")}),
    output="x",
    scaled=False,
    flops=2,
    any_dtype=("weight", "bias"),
    optional=("bias",),
)
selective = partial(
    _case(
        "selective_scan",
        {"u": X, "delta": X, "A": ("D", "S"), "B": ("B", "T", "S"), "C": ("B", "T", "S")},
        {"initial_states": ("N", "D", "S")},
    ),
    output="u",
    scaled=False,
    flops=7,
    draws={"delta": lambda x: F.softplus(x - 1), "A": lambda x: -x.exp()},
    any_dtype=("delta", "A"),
    not_cast=("delta",),
    operands={"u": "x", "delta": "dt"},
    other_ops=("unsqueeze", "unsqueeze"),
)
slots = partial(
    vector,
    inputs={**QKV_OF_SLOTS, "s": S},
    output_axes=("B", "T", "HQ", "V"),
    states=SLOTS,
    any_dtype=("s",),
    nodes=2,
    other_ops=("view", "view", "cat"),
)
rwkv6 = partial(vector, inputs=RKVU, any_dtype=("u",), operands={"r": "q", "w": "gk"})
bonus = partial(vector, inputs={**QKV, "u": ("H", "K")}, any_dtype=("u",))

delta = partial(
    _case("delta_rule", {**QKV_GROUPED, "beta": G}, MATRIX_GROUPED),
    any_dtype=("beta",),
    not_cast=("beta",),
    flops=6,
    uncancelled=without_overwriting(delta_rule),
    draws={"k": unit_vectors, "beta": up_to_two},
)
kda = partial(delta, operands={"g": "gk"}, uncancelled=without_overwriting(kda_reference))
gdn2 = partial(
    delta,
    inputs={**QKV_GROUPED, "b": K, "w": VG},
    any_dtype=("b", "w"),
    not_cast=("b", "w"),
    operands={"g": "gk"},
    uncancelled=without_overwriting(gdn2_reference),
    draws={"k": unit_vectors, "b": torch.sigmoid, "w": torch.sigmoid},
    other_ops=None,
    prepared=True,
)
comba = partial(
    delta,
    inputs={**QKV_GROUPED, "p": K, "beta": G},
    operands={"p": "a", "g": "gk"},
    uncancelled=without_overwriting(comba_reference),
    draws={"k": unit_vectors, "p": unit_vectors, "beta": torch.sigmoid},
    other_ops=None,
    prepared=True,
)
low_rank_case = partial(
    _case("low_rank", {**QKV, "a": K, "b": K}, MATRIX),
    flops=8,
    draws={"a": unit_vectors, "b": lambda x: unit_vectors(x) / 8},
)
rwkv7 = partial(
    low_rank_case, inputs={"r": Q, "k": K, "v": V, "a": K, "b": K}, operands={"r": "q", "w": "gk"}
)
product = partial(
    delta,
    inputs={
        "q": Q,
        "k": ("B", "T", "R", "H", "K"),
        "v": ("B", "T", "R", "HV", "V"),
        "beta": ("B", "T", "R", "HV"),
    },
    output_axes=VG,
    # A strong gate is computed with those of the steps that do not decay, whose gradients are far larger.
    uncancelled=without_overwriting(partial(delta_product_reference, every_step=True)),
    flops=12,
    other_ops=None,
)

chunk, token = "chunk", "recurrent"
lightning = [
    partial(form, layer_idx=1, num_layers=4)
    for form in (chunk_lightning_attn, fused_recurrent_lightning_attn)
]
normalized = [partial(form, normalize=True) for form in (chunk_linear_attn, fused_recurrent_linear_attn)]
# fmt: off
CASES = [
    vector("chunk_gla", chunk, chunk_gla, gla_by_tokens, gla_reference, {"g": K}, operands={"g": "gk"},
           inductor=True),
    vector("fused_recurrent_gla-gk-gv", token, fused_recurrent_gla, None, vector_decay, {"gk": K, "gv": V},
           inductor=True),
    vector("fused_recurrent_gla-gk", token, fused_recurrent_gla, None, vector_decay, {"gk": K}),
    vector("fused_recurrent_gla-gv", token, fused_recurrent_gla, None, vector_decay, {"gv": V}),
    vector("fused_recurrent_gla", token, fused_recurrent_gla, None, vector_decay),
    bonus("bonus-chunk-gk-gv", chunk, partial(direct, form=chunk), partial(direct, form=token), vector_decay,
          {"gk": K, "gv": V}),
    bonus("bonus-recurrent", token, partial(direct, form=token), None, vector_decay),
    rwkv6("chunk_rwkv6", chunk, chunk_rwkv6, fused_recurrent_rwkv6, rwkv6_reference, {"w": K}),
    rwkv6("fused_recurrent_rwkv6", token, fused_recurrent_rwkv6, chunk_rwkv6, rwkv6_reference, {"w": K}),
    scalar("chunk_simple_gla-g", chunk, chunk_simple_gla, fused_recurrent_simple_gla, scalar_decay, {"g": G},
           groups=2, inductor=True),
    with_strength("chunk_simple_gla-g-beta", chunk, chunk_simple_gla, fused_recurrent_simple_gla, scalar_decay,
                  {"g": G}, groups=2),
    with_strength("chunk_simple_gla-beta", chunk, chunk_simple_gla, fused_recurrent_simple_gla, scalar_decay, {}),
    with_strength("fused_recurrent_simple_gla-g-beta", token, fused_recurrent_simple_gla, chunk_simple_gla,
                  scalar_decay, {"g": G}),
    scalar("chunk_simple_gla-g_gamma", chunk, chunk_simple_gla, fused_recurrent_simple_gla, scalar_decay,
           {"g_gamma": ("HV",)}),
    scalar("fused_recurrent_simple_gla-g-g_gamma", token, fused_recurrent_simple_gla, chunk_simple_gla,
           scalar_decay, {"g": G, "g_gamma": ("HV",)}, groups=2, inductor=True),
    scalar("fused_recurrent_simple_gla", token, fused_recurrent_simple_gla, chunk_simple_gla, scalar_decay),
    scalar("chunk_retention", chunk, chunk_retention, fused_recurrent_retention, retention_reference, groups=2),
    scalar("fused_recurrent_lightning_attn", token, *reversed(lightning), lightning_reference, groups=2),
    scalar("chunk_linear_attn", chunk, chunk_linear_attn, fused_recurrent_linear_attn, scalar_decay),
    scalar("chunk_linear_attn-normalize", chunk, *normalized, linear_attn_normalized_reference,
           # Values share a z where they share a head of keys; here each has its own.
           states={"initial_state[0]": ("N", "HV", "K", "V"), "initial_state[1]": ("N", "H", "K")},
           draws=dict.fromkeys(("q", "k", "initial_state[0]"), F.softplus), nodes=2, other_ops=None,
           # Outputs are means, so what q does to the numerator the denominator undoes, but for differences of values.
           uncancelled=partial(linear_attn_normalized_reference, constant_weight=True)),
    channels("chunk_hgrn", chunk, chunk_hgrn, fused_recurrent_hgrn, scan, {"g": X}, inductor=True),
    channels("fused_recurrent_hgrn", token, fused_recurrent_hgrn, chunk_hgrn, scan, {"g": X}, inductor=True),
    convolution("causal_conv1d-silu", "forward", partial(causal_conv1d, activation="silu"), None,
                partial(short_conv, silu=True), inductor=True),
    convolution("causal_conv1d", "forward", causal_conv1d, None, short_conv,
                inputs={"x": X, "weight": ("D", "W")}),
    selective("selective_scan_fn", "forward", mamba, None, mamba_reference, inductor=True),
    delta("chunk_delta_rule", chunk, chunk_delta_rule, fused_recurrent_delta_rule, delta_rule),
    delta("chunk_gated_delta_rule", chunk, chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, delta_rule,
          {"g": G}, groups=2, inductor=True),
    delta("fused_recurrent_gated_delta_rule", token, fused_recurrent_gated_delta_rule, chunk_gated_delta_rule,
          delta_rule, {"g": G}, inductor=True),
    kda("chunk_kda", chunk, chunk_kda, fused_recurrent_kda, kda_reference, {"g": ("B", "T", "HV", "K")},
        groups=2, inductor=True),
    kda("fused_recurrent_kda", token, fused_recurrent_kda, chunk_kda, kda_reference, {"g": ("B", "T", "HV", "K")}),
    gdn2("chunk_gdn2", chunk, chunk_gdn2, fused_recurrent_gdn2, gdn2_reference, {"g": ("B", "T", "HV", "K")},
         groups=2),
    gdn2("fused_recurrent_gdn2", token, fused_recurrent_gdn2, chunk_gdn2, gdn2_reference,
         {"g": ("B", "T", "HV", "K")}),
    comba("chunk_comba", chunk, chunk_comba, fused_recurrent_comba, comba_reference, {"g": G}, groups=2),
    comba("chunk_comba-before", chunk, partial(chunk_comba, erase="before"),
          partial(fused_recurrent_comba, erase="before"), partial(comba_reference, before=True), {"g": G},
          family="low_rank", groups=2, flops=8),
    low_rank_case("chunk_dplr_delta_rule", chunk, chunk_dplr_delta_rule, fused_recurrent_dplr_delta_rule, low_rank,
                  {"gk": K}, inductor=True),
    low_rank_case("fused_recurrent_dplr_delta_rule", token, fused_recurrent_dplr_delta_rule, chunk_dplr_delta_rule,
                  low_rank, {"gk": K}, inductor=True),
    low_rank_case("chunk_iplr_delta_rule", chunk, chunk_iplr_delta_rule, fused_recurrent_iplr_delta_rule, low_rank),
    # With the scale of the others, whose default is not 1.
    rwkv7("chunk_rwkv7", chunk, partial(chunk_rwkv7, scale=None), partial(fused_recurrent_rwkv7, scale=None),
          rwkv7_reference, {"w": K}),
    product("steps-chunk_gated_delta_product", chunk, by_steps(chunk_gated_delta_product),
            by_steps(fused_recurrent_gated_delta_product), delta_product_reference, {"g": G}, groups=2),
    product("steps-fused_recurrent_gated_delta_product", token, by_steps(fused_recurrent_gated_delta_product),
            by_steps(chunk_gated_delta_product), delta_product_reference, {"g": G}),
    slots("chunk_gsa", chunk, chunk_gsa, fused_recurrent_gsa, slots_reference, {"g": S}),
    slots("fused_recurrent_gsa-grouped", token, fused_recurrent_gsa, chunk_gsa, slots_reference, {"g": S},
          groups=3, other_ops=None),
    slots("chunk_abc", chunk, chunk_abc, fused_recurrent_gsa, slots_reference, {"s": S},
          inputs=QKV_OF_SLOTS, states={**SLOTS, "initial_state[2]": ("N", "H", "M")},
          empty={"initial_state[2]": -torch.inf}, other_ops=None,
          flops=3,  # 4 for each element but those of z
          # Slots that hold the same are read as one, however they are weighed.
          uncancelled=partial(slots_reference, constant_weight=True)),
]
# Three that are not under the whole contract. No public function asks for gates on both axes alone, nor for a softmax;
# Mamba-2's scan is more than its op.
GATES_ON_BOTH_AXES = vector("chunk-gk-gv", chunk, partial(direct, form=chunk), partial(direct, form=token),
                            vector_decay, {"gk": K, "gv": V})
SOFTMAX = [
    vector(f"softmax-{form}", form, partial(direct, form=form, softmax=True), None, softmax_reference, {"gk": K})
    for form in (chunk, token)
]
SSD = scalar("mamba_chunk_scan_combined", chunk, ssd, None, ssd_reference, scaled=False, output="x", groups=2,
             inputs={"x": VG, "dt": G, "A": ("HV",), "B": K, "C": Q, "D": ("HV",), "z": VG, "dt_bias": ("HV",)},
             states={"initial_states": ("N", "HV", "V", "K")}, draws={"A": lambda x: -x.exp()}, other_ops=None)
# fmt: on
