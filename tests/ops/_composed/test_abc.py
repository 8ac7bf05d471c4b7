"""Attention with bounded memory: its running logsumexp, alone and as a state, with logits of any size."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch._dynamo
from contract.accuracy import assert_close, assert_equal, error
from contract.cases import NAMED
from contract.problems import draw, evaluate
from helpers.ranks import check_sharded, on_two_ranks
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.distributed.device_mesh import DeviceMesh
from torch.export import Dim, export
from torch.func import grad, jvp, vmap

from flacompose.ops import chunk_abc, chunk_gsa, fused_recurrent_gsa
from flacompose.ops._composed import logsumexp
from flacompose.ops._composed.logsumexp import running_logsumexp
from flacompose.ops._recurrences.fused.slot_attention.reference import slot_attention

FORMS = [chunk_abc, fused_recurrent_gsa]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
CASE = NAMED["chunk_abc"]
INF = torch.inf


def inputs(device: torch.device, **options) -> dict[str, Tensor]:
    return draw(CASE, device, state=False, **options).tensors


def naive(s: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """``z_t = logaddexp(z_{t-1}, s_t)``, token by token: gates, weights and the last z."""
    z = torch.full_like(s[:, 0], -INF) if z is None else z
    gates, weights = [], []
    for t in range(s.shape[1]):
        new = torch.logaddexp(z, s[:, t])
        nothing = new == -INF
        gates.append(torch.where(nothing, 0, z - new))
        weights.append(torch.where(nothing, 0, (s[:, t] - new).exp()))
        z = new
    return torch.stack(gates, 1), torch.stack(weights, 1), z


@pytest.mark.parametrize("T", [1, 2, 7, 8, 9, 64, 65, 513])
@pytest.mark.parametrize("strength", [1.0, 1e4])
@pytest.mark.parametrize("given", [False, True], ids=["from nothing", "from z"])
def test_running_logsumexp(T: int, strength: float, given: bool, device: torch.device) -> None:
    s = torch.randn(2, T, 3, 4, dtype=torch.float64, device=device) * strength
    s[torch.rand_like(s) < 0.3] = -INF
    s[0, :, 0] = -INF  # a slot that is never written
    z = torch.randn(2, 3, 4, dtype=torch.float64, device=device) * strength if given else None
    for x, y in zip(running_logsumexp(s, z), naive(s, z), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_running_logsumexp_keeps_what_float32_would_lose(device: torch.device) -> None:
    """Gates of many tokens are small differences of large numbers."""
    s = torch.randn(1, 20000, 2, device=device) + 1e4
    gates, weights, z = running_logsumexp(s)
    exact = s.double().logcumsumexp(1)
    assert {x.dtype for x in (gates, weights, z)} == {torch.float32}
    assert error(weights, (s.double() - exact).exp()) <= 1e-6
    assert error(gates[:, 1:], exact[:, :-1] - exact[:, 1:]) <= 1e-6
    torch.testing.assert_close(z.double(), exact[:, -1], rtol=1e-7, atol=0)


BOUNDS = [[0, 4, 4, 9], [0, 0, 1, 11], [0, 0, 0], [0, 11], [2, 5, 9]]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["from nothing", "from z"])
def test_packed_running_logsumexp(bounds: list[int], given: bool, device: torch.device) -> None:
    """Each sequence for itself, whatever its neighbours hold, NaN too."""
    N = len(bounds) - 1
    s = torch.randn(1, 11, 3, dtype=torch.float64, device=device)
    z = torch.randn(N, 3, dtype=torch.float64, device=device) if given else None
    cu = torch.tensor(bounds, device=device)
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        poisoned = s.clone()
        poisoned[:, :start] = poisoned[:, end:] = torch.nan
        gates, weights, last = running_logsumexp(poisoned, z, cu)
        own = torch.full((1, 3), -INF, device=device).double() if z is None else z[n : n + 1]
        if start == end:
            assert torch.equal(last[n : n + 1], own)
            continue
        expected = naive(s[:, start:end], own)
        for x, y in zip((gates[:, start:end], weights[:, start:end], last[n : n + 1]), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def finite(s: Tensor, z: Tensor | None, cu: Tensor | None = None) -> tuple[Tensor, ...]:
    """The results as finite numbers, which have derivatives: exponentials of gates, and 0 where z is -inf."""
    gates, weights, z = running_logsumexp(s, z, cu)
    return gates.exp(), weights, torch.where(z == -INF, 0, z)


@pytest.mark.parametrize("bounds", [None, *BOUNDS[:3]], ids=str)
@pytest.mark.parametrize("holes", [False, True])
def test_derivatives_of_the_running_logsumexp(bounds, holes: bool, device: torch.device) -> None:
    """Of first and second order, backwards and forwards, equal logits and slots of -inf included."""
    N = 1 if bounds is None else len(bounds) - 1
    s = torch.randn(1, 11, 2, dtype=torch.float64, device=device)
    s[:, 2:4] = 0.5
    z = torch.randn(N, 2, dtype=torch.float64, device=device).requires_grad_()
    cu = None if bounds is None else torch.tensor(bounds, device=device)
    mask = torch.rand(11, 2, device=device) < 0.4 if holes else torch.zeros(11, 2, device=device).bool()

    def function(s: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return finite(s.masked_fill(mask, -INF), z, cu)

    s.requires_grad_()
    assert gradcheck(function, (s, z), check_forward_ad=True)
    assert gradgradcheck(function, (s, z))


@pytest.mark.parametrize("strength", [0.0, 1.0, 1e4, 1e30])
def test_no_nan_in_derivatives(strength: float, device: torch.device) -> None:
    """Without a state, for logits of any size and slots without tokens: first and second derivatives are finite."""
    s = torch.randn(1, 20, 3, dtype=torch.float64, device=device) * strength
    s[:, :3], s[:, 10, 0], s[..., 1] = -INF, -INF, -INF

    def loss(s: Tensor) -> Tensor:
        return sum((x * x).sin().sum() for x in finite(s, None))

    for derivative in (grad(loss)(s), grad(lambda s: grad(loss)(s).sin().sum())(s)):
        assert derivative.isfinite().all() and not derivative[s == -INF].any()
    for x in jvp(grad(loss), (s,), (torch.ones_like(s),)):
        assert x.isfinite().all()
    many = torch.stack([s, s / 2])
    torch.testing.assert_close(vmap(grad(loss))(many), torch.stack([grad(loss)(x) for x in many]))


@pytest.fixture
def few_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are traced for at most 16 tokens, so that their compilation is short: each level is the same code."""
    monkeypatch.setattr(logsumexp, "LEVELS", 4)


class Model(torch.nn.Module):
    def forward(self, tensors: dict[str, Tensor]):
        return chunk_abc(**tensors, output_final_state=True)


@pytest.mark.usefixtures("few_levels")
def test_one_graph_for_every_length_through_inductor(device: torch.device) -> None:
    compiled = torch.compile(Model(), fullgraph=True, dynamic=True)
    for i, T in enumerate((9, 2, 3, 16)):
        tensors = inputs(device, B=1, T=T)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            results = []
            for model in (compiled, Model()):
                leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
                o, state = model(leaves)
                loss = o.sin().sum() + sum(x.cos().sum() for x in state)
                gradients = torch.autograd.grad(loss, list(leaves.values()))
                results.append({str(j): x for j, x in enumerate((o.detach(), *gradients))})
        assert_close(*results, 1e-4)


@pytest.mark.parametrize(("T", "levels"), [(1, 0), (2, 20), (64, 20)])
def test_levels_of_a_static_length(T: int, levels: int, device: torch.device) -> None:
    """A traced graph has the levels of the longest sequence, but none for one token: decoding stays a small graph."""
    graphs = []

    def backend(module: torch.fx.GraphModule, _) -> torch.fx.GraphModule:
        graphs.append(module.graph)
        return module

    tensors = inputs(device, B=1, T=T)
    torch._dynamo.reset()
    o, _ = torch.compile(fused_recurrent_gsa, fullgraph=True, dynamic=False, backend=backend)(**tensors)
    assert torch.equal(o, fused_recurrent_gsa(**tensors)[0])
    (graph,) = graphs
    nodes = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    assert sum("logsumexp" in str(node.target) for node in nodes) == 1 + levels
    assert len(nodes) <= 50 + 10 * levels


@pytest.mark.usefixtures("aoti_packages_load", "few_levels")
def test_aotinductor(device: torch.device, tmp_path, few_levels: None) -> None:
    T = Dim("T", min=2, max=16)
    tensors = inputs(device, T=7)
    with torch.no_grad():
        program = export(Model(), (tensors,), dynamic_shapes=({name: {1: T} for name in tensors},))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "abc.pt2"))
        package = torch._inductor.aoti_load_package(path)
        for length in (2, 9, 16):
            tensors = inputs(device, T=length)
            (o, state), (expected, after) = package(tensors), Model()(tensors)
            assert error(o, expected) <= 1e-5
            for x, y in zip(state, after, strict=True):
                assert error(x, y) <= 1e-5


def test_slots_without_gates(device: torch.device) -> None:
    """`chunk_gsa` without gates is `chunk_abc`, to the bit."""
    problem = draw(CASE, device, T=70)
    other = replace(problem, case=replace(CASE, function=chunk_gsa))
    assert_equal(evaluate(other), evaluate(problem))


@each_form
def test_means_of_keys_and_values(form, device: torch.device) -> None:
    """What the paper writes: each slot a mean of keys and of values, the output a mean of slots."""
    q, k, v, s = inputs(device, T=70, dtype=torch.float64).values()
    o, (Hk, Hv, z) = form(q, k, v, s, output_final_state=True)
    weight = s.softmax(1)
    torch.testing.assert_close(Hk, torch.einsum("bthk,bthm->bhkm", k, weight))
    torch.testing.assert_close(Hv, torch.einsum("bthm,bthv->bhmv", weight, v))
    torch.testing.assert_close(z, s.logsumexp(1))
    p = (torch.einsum("bhk,bhkm->bhm", q[:, -1], Hk) / 4).softmax(-1)
    torch.testing.assert_close(o[:, -1], torch.einsum("bhm,bhmv->bhv", p, Hv))
    assert error(form(q, k, torch.full_like(v, 3.0), s)[0], torch.full_like(v, 3.0)) <= 1e-12


def test_z_is_float32_from_nothing(device: torch.device) -> None:
    """An empty sequence has seen nothing."""
    tensors = inputs(device, dtype=torch.bfloat16, lengths=[3, 0, 4], tail=2)
    cu_seqlens = torch.tensor([0, 3, 3, 7], device=device)
    o, (Hk, Hv, z) = chunk_abc(**tensors, cu_seqlens=cu_seqlens, output_final_state=True)
    assert z.dtype == Hk.dtype == Hv.dtype == torch.float32
    assert (z[1] == -INF).all() and z[[0, 2]].isfinite().all()
    assert not Hk[1].any() and not Hv[1].any() and not o[:, 7:].any()
    again, state = chunk_abc(
        **tensors, initial_state=(Hk * 0, Hv * 0, torch.full_like(z, -INF)), cu_seqlens=cu_seqlens
    )
    assert torch.equal(again, o) and state is None


@each_form
@pytest.mark.parametrize("strength", [10.0, 1e4])
def test_logits_of_any_size(form, strength: float, device: torch.device) -> None:
    """Of float32, against float64: outputs and every gradient, slots that nothing is written to among them."""
    tensors = inputs(device, T=70)
    tensors["s"] = torch.randn_like(tensors["s"]) * strength
    tensors["s"][:, :9] = tensors["s"][..., 3] = -INF

    def results(function, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        o = function(**leaves)[0]
        gradients = torch.autograd.grad(o.sin().sum(), list(leaves.values()))
        return {"o": o.detach(), **dict(zip(leaves, gradients, strict=True))}

    actual = results(form, tensors)
    assert not actual["o"][:, :9].any()
    exact = results(
        lambda **x: slot_attention(**x, scale=0.25), {name: x.double() for name, x in tensors.items()}
    )
    for name, x in actual.items():
        assert x.isfinite().all(), name
        assert error(x, exact[name]) <= 1e-4, name


@each_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_nan_logit_is_seen(form, dtype: torch.dtype, device: torch.device) -> None:
    """In its sequence and head, from its token on, and at most from its chunk."""
    tensors = inputs(device, dtype=dtype, B=2, T=70, H=2)
    before = form(**tensors)[0]
    tensors["s"][1, 65, 0, 1] = torch.nan
    after, (_, _, z) = form(**tensors, output_final_state=True)
    assert after[1, 65:, 0].isnan().all()
    after[1, 64:, 0] = before[1, 64:, 0]
    torch.testing.assert_close(after, before)
    assert z.isnan().nonzero().tolist() == [[1, 0, 1]]


def test_groups_of_queries(device: torch.device) -> None:
    q, k, v, s = inputs(device, T=20, H=2).values()
    q = torch.cat([q, -q], 2)[:, :, [0, 2, 1, 3]]
    o, state = chunk_abc(q, k, v, s, output_final_state=True)
    repeated, after = chunk_abc(q, *(x.repeat_interleave(2, 2) for x in (k, v, s)), output_final_state=True)
    assert error(o, repeated) <= 1e-6
    for x, y in zip(state, after, strict=True):
        assert error(x, y[:, ::2]) <= 1e-6


def logsumexp_by_shard(mesh: DeviceMesh, compiled: bool) -> None:
    """However logits and z are laid out, also in unlike parts: the results and gradients of one rank."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    s, z = torch.randn(3, 9, 4, 5), torch.randn(3, 4, 5)
    layouts = [(Shard(2), Shard(1)), (Shard(0), Shard(0))]
    if compiled:
        logsumexp.LEVELS = 4  # in this process, which ends with the test
        run = torch.compile(running_logsumexp, fullgraph=True, backend="aot_eager")
        for layout in layouts:
            check_sharded(mesh, run, [s, z], layout, unsharded=running_logsumexp)
        return
    for layout in (*layouts, (Shard(1), Shard(0)), (Shard(3), Replicate()), (Replicate(), Shard(1))):
        check_sharded(mesh, running_logsumexp, [s, z], layout)
    cu_seqlens = torch.tensor([0, 2, 2, 9])
    everywhere = distribute_tensor(cu_seqlens, mesh, [Replicate()])
    for layout in layouts:
        packed = partial(running_logsumexp, cu_seqlens=everywhere)
        check_sharded(
            mesh, packed, [s[:1], z], layout, unsharded=partial(running_logsumexp, cu_seqlens=cu_seqlens)
        )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_logsumexp_by_shard(compiled: bool) -> None:
    on_two_ranks(logsumexp_by_shard, compiled)
