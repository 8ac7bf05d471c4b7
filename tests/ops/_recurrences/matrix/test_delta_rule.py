"""The delta rule: keys that are hard to invert, what is computed in front of the op, and several steps a token."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from contract.accuracy import error
from contract.recurrences import by_steps, delta_product
from torch import Tensor
from torch.testing import assert_close

from flacompose.ops import (
    chunk_delta_rule,
    chunk_gated_delta_product,
    chunk_gated_delta_rule,
    chunk_gdn2,
    chunk_kda,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_product,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn2,
    fused_recurrent_kda,
)
from flacompose.ops._recurrences import chunks
from flacompose.ops._recurrences.matrix import op
from flacompose.ops._recurrences.matrix.reference import matrix_recurrence
from flacompose.ops.gated_delta_rule import log_decay

B, T, H, HV, K, V = 2, 70, 2, 4, 16, 12
gated_forms = pytest.mark.parametrize(
    "form", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule], ids=lambda form: form.__name__
)
product_forms = pytest.mark.parametrize(
    "form", [chunk_gated_delta_product, fused_recurrent_gated_delta_product], ids=lambda form: form.__name__
)
kda_forms = pytest.mark.parametrize("form", [chunk_kda, fused_recurrent_kda], ids=lambda form: form.__name__)


def inputs(device: torch.device, dtype: torch.dtype = torch.float64, **sizes: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V} | sizes

    def normal(axes: str) -> Tensor:
        return torch.randn([size[axis] for axis in axes.split()], generator=generator, dtype=torch.float64)

    made = {
        "q": normal("B T H K"),
        "k": F.normalize(normal("B T H K"), dim=-1),
        "v": normal("B T HV V"),
        "beta": normal("B T HV").sigmoid(),
    }
    return {name: x.to(device, dtype) for name, x in made.items()}


def results(function, tensors: dict[str, Tensor], **options) -> list[Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    o, state = function(**leaves, output_final_state=True, **options)
    return [o, state, *torch.autograd.grad(o.sin().sum() + state.cos().sum(), list(leaves.values()))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", ["one", "nearly one", "opposite", "long"])
@pytest.mark.parametrize("gate", [0.0, -0.05])
@pytest.mark.parametrize("beta", [1.9, 2.0])
def test_keys_that_are_alike(
    keys: str, gate: float, beta: float, dtype: torch.dtype, device: torch.device
) -> None:
    """Accurate where a power series would lose all digits.

    Where `beta` is near 2 and nothing decays, every token reverses what the others have written, and no error fades:
    the bounds are those that docs/ops/delta_rule.md gives.
    """
    x = inputs(device, torch.float64, T=200)
    one = x["k"][:, :1]
    if keys == "long":  # of norm 4, where 1 - beta |k|^2 is between -1 and 1
        x |= {"k": 4 * x["k"], "beta": beta / 2 * x["beta"] / 8}
    else:
        noise = 1e-3 * torch.randn_like(x["k"]) if keys == "nearly one" else 0
        sign = (
            1 - 2 * (torch.arange(200, device=device) % 2)
            if keys == "opposite"
            else torch.ones(200, device=device)
        )
        alike = F.normalize(one * sign[None, :, None, None] + noise, dim=-1)
        x |= {"k": alike, "beta": torch.full_like(x["beta"], beta)}
    x["g"] = torch.full_like(x["beta"], gate)
    x = {name: y.to(dtype) for name, y in x.items()}
    # A linear loss: states are so large here that the gradient of another one would differ by its own error.
    do, d_state = torch.randn_like(x["v"]), torch.randn(B, HV, K, V, device=device)

    def evaluate(function, tensors: dict[str, Tensor], **options) -> list[Tensor]:
        leaves = {name: y.requires_grad_() for name, y in tensors.items()}
        o, state = function(**leaves, **options)
        loss = (o * do.to(o)).sum(dtype=state.dtype) + (state * d_state).sum()
        return [o, state, *torch.autograd.grad(loss, list(leaves.values()))]

    exact = evaluate(
        partial(matrix_recurrence, delta_rule=True),
        {name: y.double() for name, y in x.items()},
        scale=K**-0.5,
    )
    actual = evaluate(chunk_gated_delta_rule, x, output_final_state=True)
    of_values = (5e-5 if beta == 2 and gate == 0 else 2e-5) if dtype == torch.float32 else 3 * 2**-9
    of_gradients = 1e-4 if dtype == torch.float32 else 4 * 2**-9
    if device.type == "cuda" and keys != "long":
        equal = keys in ("one", "opposite")
        if dtype == torch.bfloat16:
            of_gradients = 0.065 if gate == 0 else 0.025
            if gate == 0:
                of_values = 0.045 if equal else 0.03
            elif beta == 2:
                of_values = 0.01
        elif gate == 0 and equal:
            of_values, of_gradients = 5e-5, 1.5e-4
    for i, (y, truth) in enumerate(zip(actual, exact, strict=True)):
        assert error(y.detach(), truth.detach()) <= (of_values if i < 2 else of_gradients), i


@pytest.mark.parametrize("read_before", [False, True], ids=["after", "before"])
def test_both_gates(read_before: bool, device: torch.device) -> None:
    x = inputs(device)
    g, gk = -torch.rand_like(x["beta"]), -torch.rand(B, T, HV, K, dtype=torch.float64, device=device)
    leaves = [*x.values(), g, gk]
    for y in leaves:
        y.requires_grad_()

    def evaluate(function) -> list[Tensor]:
        o, state = function({**x, "g": g, "gk": gk, "scale": 0.3, "read_before": read_before})
        return [o, state, *torch.autograd.grad(o.sin().sum() + state.cos().sum(), leaves)]

    expected = evaluate(lambda given: matrix_recurrence(**given, delta_rule=True))
    for form in (op.chunk, op.recurrent):
        actual = evaluate(lambda given, form=form: form(*op.Inputs(**given, delta_rule=True)))
        assert_close(actual, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_segments_of_chunks(
    packed: bool, channels: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the sequence is cut into segments, one computed after the other, changes nothing."""
    x = inputs(device, B=1 if packed else B, T=300)
    cu_seqlens = torch.tensor([0, 0, 70, 71, 290], device=device) if packed else None
    x["g"] = -torch.rand_like(x["k"] if channels else x["beta"])
    if channels:
        x["g"] = x["g"].repeat_interleave(HV // H, 2)
    x["initial_state"] = torch.randn(4 if packed else B, HV, K, V, dtype=torch.float64, device=device)
    form = chunk_kda if channels else chunk_gated_delta_rule
    whole = results(form, x, cu_seqlens=cu_seqlens)
    monkeypatch.setattr(chunks, "CACHE_BLOCK", 2 * 64 * 64 * HV)  # 1 chunk of two rows, or 2 of packed ones
    assert_close(results(form, x, cu_seqlens=cu_seqlens), whole, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    "form", [chunk_delta_rule, fused_recurrent_delta_rule], ids=lambda form: form.__name__
)
def test_norms(form, device: torch.device) -> None:
    x = inputs(device)
    x["k"] = x["k"] * 3

    def by_hand(q: Tensor, k: Tensor, **rest):
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        return form(q, k, **rest)

    assert_close(results(form, x, use_qk_l2norm_in_kernel=True), results(by_hand, x))


@gated_forms
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("neg_eigval", [False, True])
def test_gates_and_betas_of_heads(form, bias: bool, neg_eigval: bool, device: torch.device) -> None:
    x = inputs(device)
    x |= {"beta": x["beta"].logit(), "g": torch.randn_like(x["beta"])}
    x["A_log"] = torch.rand(HV, dtype=torch.float64, device=device)
    if bias:
        x["dt_bias"] = torch.randn(HV, dtype=torch.float64, device=device)

    def by_hand(g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor | float = 0.0, **rest):
        g = -A_log.exp() * F.softplus(g + dt_bias)
        return form(g=g, beta=beta.sigmoid() * (2 if neg_eigval else 1), **rest)

    options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": neg_eigval}
    assert_close(results(form, x, **options), results(by_hand, x))


@kda_forms
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("given", ["A_log", "A_log dt_bias", "dt_bias", "flat"])
def test_gates_of_channels(form, given: str, lower_bound: float | None, device: torch.device) -> None:
    if given == "dt_bias" and lower_bound is None:
        pytest.skip("without a lower bound A_log is required")
    x = inputs(device)
    x["g"] = torch.randn(B, T, HV, K, dtype=torch.float64, device=device)
    if "A_log" in given:
        x["A_log"] = torch.rand(HV, dtype=torch.float64, device=device)
    if "dt_bias" in given:
        x["dt_bias"] = torch.randn(HV, K, dtype=torch.float64, device=device)
    if given == "flat":
        x["A_log"] = torch.rand(HV, dtype=torch.float64, device=device)
        x["dt_bias"] = torch.randn(HV * K, dtype=torch.float64, device=device)

    def by_hand(g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, **rest):
        g = g if dt_bias is None else g + dt_bias.view(HV, K)
        rate = torch.ones(HV, 1, dtype=g.dtype, device=device) if A_log is None else A_log.exp()[:, None]
        g = -rate * F.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)
        return form(g=g, **rest)

    options = {"use_gate_in_kernel": True, "lower_bound": lower_bound}
    assert_close(results(form, x, **options), results(by_hand, x))


@pytest.mark.parametrize("form", [chunk_gated_delta_rule, chunk_kda], ids=lambda form: form.__name__)
def test_parameters_of_gates_in_any_shape(form, device: torch.device) -> None:
    """As checkpoints have them, with the gradients in the same shape."""
    x = inputs(device, T=5)
    of_a_gate = (HV, K) if form is chunk_kda else (HV,)
    x["g"] = torch.randn(B, 5, *of_a_gate, dtype=torch.float64, device=device)
    A_log, bias = (torch.rand(shape, dtype=torch.float64, device=device) for shape in ((HV,), of_a_gate))
    expected = results(form, x | {"A_log": A_log, "dt_bias": bias}, use_gate_in_kernel=True)
    A_log, bias = A_log.view(1, 1, HV, 1), bias.flatten()[None]
    actual = results(form, x | {"A_log": A_log, "dt_bias": bias}, use_gate_in_kernel=True)
    assert_close(actual, [*expected[:-2], expected[-2].view_as(A_log), expected[-1].view_as(bias)])
    with pytest.raises(
        ValueError, match=r"A_log must have the 4 elements of shape \(4,\), got shape \(1, 3\)"
    ):
        form(**x, A_log=A_log.flatten()[None, :3], use_gate_in_kernel=True)


@pytest.mark.parametrize(
    ("form", "lower_bound"),
    [(chunk_gated_delta_rule, None), (chunk_kda, None), (chunk_kda, -5.0)],
    ids=["gated_delta_rule", "kda", "kda bounded"],
)
@pytest.mark.parametrize("largest", [89.0, 100.0, 700.0])
def test_rates_that_overflow(form, lower_bound: float | None, largest: float, device: torch.device) -> None:
    """In float32, as in float64, where they do not: beside them softplus underflows, so that some decays are weak."""
    x = inputs(device, torch.float32, T=20)
    generator = torch.Generator().manual_seed(0)
    of_a_gate = (HV, K) if form is chunk_kda else (HV,)
    g = 3 * torch.randn(B, 20, *of_a_gate, generator=generator)
    g -= largest * (torch.rand(g.shape, generator=generator) < 0.7)
    # Their sums have no rounding errors, which the exponential would make larger.
    g, bias = ((16 * y).round().to(device) / 16 for y in (g, torch.randn(of_a_gate, generator=generator)))
    g += (g == -bias) / 16  # where a steep sigmoid has no gradient that float32 holds
    x |= {"g": g, "dt_bias": bias, "A_log": torch.tensor([1.0, largest, largest, 2.0], device=device)}

    def by_hand(g: Tensor, A_log: Tensor, dt_bias: Tensor, **rest):
        rate = A_log.exp().view(-1, *[1] * (g.dim() - 3))
        g = g + dt_bias
        g = -rate * F.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)
        return form(g=g, **rest)

    truth = results(by_hand, {name: y.double() for name, y in x.items()})
    options = {"use_gate_in_kernel": True} | ({} if lower_bound is None else {"lower_bound": lower_bound})
    for i, (y, exact) in enumerate(zip(results(form, x, **options), truth, strict=True)):
        assert error(y.detach(), exact.detach()) <= (2e-5 if i < 2 else 1e-4), i
    for y in results(form, x | {"g": -bias.expand_as(g)}, **options):
        assert y.isfinite().all()


def test_gates_that_leave_nothing_have_no_gradient(device: torch.device) -> None:
    """Although kernels give them one, of their rounding errors, here 1: a large rate would make much of it."""
    x = torch.tensor([-100.0, 0.0, 10.0, -10.0], device=device).view(1, 1, 4).requires_grad_()
    A_log = torch.tensor([100.0, 100.0, 3.0, 3.0], device=device, requires_grad=True)
    for gradient in torch.autograd.grad(log_decay(x, A_log, None).sum(), [x, A_log]):
        assert (gradient.flatten() != 0).tolist() == [True, False, False, True]


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_a_rate_of_0(lower_bound: float | None, device: torch.device) -> None:
    """An `A_log` of -inf, as the logarithm of a first rate of 0 is."""
    x = torch.tensor([-20.0, 0.0, 20.0], device=device).view(1, 3, 1).requires_grad_()
    A_log = torch.tensor([-torch.inf], device=device, requires_grad=True)
    g = log_decay(x, A_log, None, lower_bound)
    assert (g == (0 if lower_bound is None else lower_bound / 2)).all()
    for gradient in torch.autograd.grad(g.sum(), [x, A_log]):
        assert not gradient.any()


def test_options_that_lack_another(device: torch.device) -> None:
    x = inputs(device, T=3)
    head, channel = x["beta"], torch.zeros(B, 3, HV, K, dtype=torch.float64, device=device)
    A_log = torch.zeros(HV, dtype=torch.float64, device=device)
    for form in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
        with pytest.raises(ValueError, match="A_log must be given with use_gate_in_kernel, got None"):
            form(**x, g=head, use_gate_in_kernel=True)
        with pytest.raises(ValueError, match="A_log must not be given without use_gate_in_kernel"):
            form(**x, g=head, A_log=A_log)
        with pytest.raises(ValueError, match="dt_bias must have the 4 elements of shape"):
            form(**x, g=head, A_log=A_log, dt_bias=channel, use_gate_in_kernel=True)
        with pytest.raises(ValueError, match="allow_neg_eigval must not be True without"):
            form(**x, g=head, allow_neg_eigval=True)
    for form in (chunk_kda, fused_recurrent_kda):
        with pytest.raises(
            ValueError, match="lower_bound must not be given without use_gate_in_kernel, got -5"
        ):
            form(**x, g=channel, lower_bound=-5.0)
        with pytest.raises(ValueError, match="lower_bound must be below 0, got 1.0"):
            form(**x, g=channel, use_gate_in_kernel=True, lower_bound=1.0)
        with pytest.raises(TypeError, match="dt_bias must be a tensor, got float"):
            form(**x, g=channel, use_gate_in_kernel=True, A_log=A_log, dt_bias=1.0)
        with pytest.raises(ValueError, match="lower_bound must be finite"):
            form(**x, g=channel, use_gate_in_kernel=True, lower_bound=float("-inf"))


@product_forms
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_delta_product(form, n: int, gated: bool, device: torch.device) -> None:
    """Without gates, and with other numbers of steps than the two that the contract has."""
    x = inputs(device, T=n * 25)
    given = {name: y if name == "q" else y.unflatten(1, (25, n)) for name, y in x.items()}
    given["q"] = x["q"][:, :25]
    given["initial_state"] = torch.randn(B, HV, K, V, dtype=torch.float64, device=device)
    g = -torch.rand(B, 25, HV, dtype=torch.float64, device=device)
    function, g = (by_steps(form), g) if gated else (partial(by_steps(form), g=None), torch.zeros_like(g))

    def by_hand(output_final_state: bool, g: Tensor = g, **y: Tensor) -> tuple[Tensor, Tensor]:
        return delta_product(**y, g=g, scale=K**-0.5)

    given |= {"g": g} if gated else {}
    actual = results(function, given)
    assert_close(actual, results(by_hand, given), atol=1e-9, rtol=1e-9)
    assert actual[0].is_contiguous()


@product_forms
def test_wrong_delta_products(form, device: torch.device) -> None:
    x = inputs(device, T=6)
    with pytest.raises(ValueError, match=r"k must have shape \(2, 12, 2, 16\), got \(2, 6, 2, 16\)"):
        form(**x, g=None, num_householder=2)
    with pytest.raises(ValueError, match="num_householder must be at least 1, got 0"):
        form(**x, g=None, num_householder=0)
    with pytest.raises(ValueError, match=r"g must have shape \(2, 3, 4\), got \(2, 6, 4\)"):
        form(**x | {"q": x["q"][:, :3]}, g=x["beta"], num_householder=2)
    with pytest.raises(TypeError, match="use_qk_l2norm_in_kernel must be a bool, got 'False'"):
        form(**x | {"q": x["q"][:, :3]}, g=None, num_householder=2, use_qk_l2norm_in_kernel="False")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_beta_keeps_its_precision(dtype: torch.dtype, device: torch.device) -> None:
    """One token and a chunk of one are the same function of a `beta` in float32 beside inputs in half precision."""
    # From zeros, so that the update is all of the state. Rounding this `beta` costs 3.4e-3 or, in float16, 5e-4.
    x = inputs(device, dtype, B=1, T=1) | {"beta": torch.full((1, 1, HV), 0.5 + 7 * 2**-12, device=device)}
    one = torch.tensor([0, 1], device=device)
    exact = matrix_recurrence(delta_rule=True, **{name: y.double() for name, y in x.items()})[1]
    for form in (chunk_delta_rule, fused_recurrent_delta_rule):
        for bounds in (None, one):
            result = form(**x, output_final_state=True, cu_seqlens=bounds)[1]
            # Where a GPU multiplies chunks in bfloat16, ``beta * k`` is rounded, but not `beta` before it.
            rounded = device.type == "cuda" and dtype == torch.bfloat16 and form is chunk_delta_rule
            assert error(result, exact) <= (3e-3 if rounded else 1e-6)


@pytest.mark.parametrize("form", [chunk_gdn2, fused_recurrent_gdn2], ids=lambda form: form.__name__)
@pytest.mark.parametrize("channels", ["alike", "unlike"])
def test_how_far_erasing_enlarges_a_state(form, channels: str, device: torch.device) -> None:
    """Without values and gates, by no token if all channels are erased alike, else by ``1 + |k| |b k|`` at most."""
    x = inputs(device, HV=H)
    q, k, v = x["q"], x["k"], x["v"]
    b = 2 * torch.rand(*k.shape[:3], 1 if channels == "alike" else K, dtype=k.dtype, device=device).expand(
        k.shape
    )
    bound = 1.0 if channels == "alike" else (1 + (b * k).norm(dim=-1)).log().sum(1).exp()
    start = torch.randn(B, H, K, V, dtype=k.dtype, device=device)
    _, end = form(
        q, k, v, torch.zeros_like(k), b, torch.zeros_like(v), initial_state=start, output_final_state=True
    )
    assert (end.norm(dim=(-2, -1)) <= bound * start.norm(dim=(-2, -1)) * (1 + 1e-9)).all()


@pytest.mark.parametrize("rule", ["delta", "product", "gated", "kda", "gdn2"])
def test_what_a_tail_holds_reaches_no_gradient(rule: str, device: torch.device) -> None:
    """Also through norms, gates and sigmoids in front of the op: parameters get what they get without the tail."""
    n = 2 if rule == "product" else 1
    x = inputs(device, B=1, HV=H)
    tokens = {
        "q": x["q"],
        "k": x["k"].repeat(1, n, 1, 1),
        "v": x["v"].repeat(1, n, 1, 1),
        "beta": x["beta"].repeat(1, n, 1),
    }
    of_a_gate = (H,) if rule in ("product", "gated") else (H, K)
    if rule != "delta":
        tokens["g"] = -torch.rand(1, T, *of_a_gate, dtype=torch.float64, device=device)
    if rule == "gdn2":
        del tokens["beta"]
        tokens |= {"b": torch.rand_like(x["k"]), "w": torch.rand_like(x["v"])}
    parameters = {}
    if rule in ("gated", "kda", "gdn2"):
        parameters = {
            "A_log": torch.rand(H).to(tokens["g"]),
            "dt_bias": torch.rand(of_a_gate).to(tokens["g"]),
        }
    form = {
        "delta": chunk_delta_rule,
        "product": partial(chunk_gated_delta_product, num_householder=n),
        "gated": partial(chunk_gated_delta_rule, use_beta_sigmoid_in_kernel=True),
        "kda": partial(chunk_kda, use_beta_sigmoid_in_kernel=True),
        "gdn2": chunk_gdn2,
    }[rule]
    options = {"use_gate_in_kernel": True} if parameters else {}
    cu_seqlens = torch.tensor([0, 30, 61], device=device)

    def gradients(held: float) -> dict[str, Tensor]:
        given = {}
        for name, y in tokens.items():
            given[name] = y.clone()
            given[name][:, 61 * y.shape[1] // T :] = held
        leaves = {name: y.detach().requires_grad_() for name, y in (given | parameters).items()}
        o, _ = form(**leaves, **options, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)
        return dict(zip(leaves, torch.autograd.grad(o.sin().sum(), leaves.values()), strict=True))

    expected = gradients(0.0)
    for name, y in gradients(torch.nan).items():
        assert torch.equal(y, expected[name]), name


@pytest.mark.parametrize("gate", ["g", "gk"])
@pytest.mark.parametrize("normalize", [0, 1])
def test_update(normalize: int, gate: str, device: torch.device) -> None:
    """One token for a caller that overwrites its state: the recurrence, of keys of any norm, with all gradients."""
    tensors = inputs(device, T=1)
    tensors["k"] = 3 * tensors["k"]
    tensors[gate] = -torch.rand(B, 1, HV, *[K] * (gate == "gk"), dtype=torch.float64, device=device)
    tensors["initial_state"] = torch.randn(B, HV, K, V, dtype=torch.float64, device=device)

    def update(output_final_state: bool, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        return op.update(*op.Inputs(**tensors, scale=0.5, delta_rule=True), normalize)

    def reference(output_final_state: bool, q: Tensor, k: Tensor, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        if normalize:
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        return matrix_recurrence(q, k, **tensors, scale=0.5, delta_rule=True)

    assert_close(results(update, tensors), results(reference, tensors))
    torch.library.opcheck(op.update, (*op.Inputs(**tensors, scale=0.5, delta_rule=True), normalize))
