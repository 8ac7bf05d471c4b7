"""Simple GLA: that its two forms are one function, with every choice of gates, and the graphs they are captured as."""

# ruff: noqa: E501  the graphs

from __future__ import annotations

import pytest
import torch
from contract.accuracy import FIXED, VALUES, error
from contract.cases import CASES
from contract.graphs import listing
from contract.problems import draw, evaluate
from ranks import check_sharded, on_two_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.export import Dim, export
from torch.func import vmap

from flacompose.ops import chunk_simple_gla, fused_recurrent_simple_gla

FORMS = [chunk_simple_gla, fused_recurrent_simple_gla]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
BOTH = next(c for c in CASES if c.name == "fused_recurrent_simple_gla-g-g_gamma")
GATES = pytest.mark.parametrize("gates", [(), ("g",), ("g_gamma",), ("g", "g_gamma")], ids="-".join)


def with_gates(gates: tuple[str, ...], device: torch.device, **options) -> dict[str, Tensor]:
    tensors = draw(BOTH, device, **options).tensors
    return {name: x for name, x in tensors.items() if name not in ("g", "g_gamma") or name in gates}


def gradients(function, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    o, state = function(**leaves, output_final_state=True)
    results = torch.autograd.grad(o.sin().sum() + state.cos().sum(), list(leaves.values()))
    return {"o": o.detach(), "final_state": state.detach(), **dict(zip(leaves, results, strict=True))}


@GATES
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_both_forms_are_one_function(gates: tuple[str, ...], compiled: bool, device: torch.device) -> None:
    """A gate that is None is a gate of 0, and has no gradient."""
    tensors = with_gates(gates, device, T=70)
    B, T, HV = tensors["v"].shape[:3]
    none = {"g": torch.zeros(B, T, HV, device=device), "g_gamma": torch.zeros(HV, device=device)}
    expected = gradients(chunk_simple_gla, {**none, **tensors})
    for form in FORMS:
        function = torch.compile(form, fullgraph=True, backend="aot_eager") if compiled else form
        results = gradients(function, tensors)
        assert set(results) == {"o", "final_state", *tensors}
        for name, x in results.items():
            assert error(x, expected[name]) <= 2 * FIXED[torch.float32][name not in VALUES], name


@pytest.mark.parametrize("lengths", [None, [70, 0, 1, 59]], ids=["dense", "packed"])
def test_both_forms_on_gates_of_any_strength(lengths: list[int] | None, device: torch.device) -> None:
    problem = draw(BOTH, device, T=130, lengths=lengths, gates="rare")
    options = {"output_final_state": True, "cu_seqlens": problem.cu_seqlens}

    def results(form):
        return evaluate(problem, function=lambda _, **tensors: form(**tensors, **options))

    chunk, recurrent = map(results, FORMS)
    for name, x in chunk.items():
        assert error(x, recurrent[name]) <= 2 * FIXED[torch.float32][name not in VALUES], name


@each_form
def test_gates_add(form, device: torch.device) -> None:
    """In float32 at least, whatever they come in."""
    tensors = with_gates(("g", "g_gamma"), device, dtype=torch.bfloat16)
    o, state = form(**tensors, output_final_state=True)
    g = tensors.pop("g").float() + tensors.pop("g_gamma").float()
    expected, final = form(**tensors, g=g, output_final_state=True)
    assert torch.equal(o, expected) and torch.equal(state, final)


@each_form
def test_heads_of_values_share_one_of_queries(form, device: torch.device) -> None:
    """Neighbours do."""
    tensors = with_gates(("g",), device, H=2)
    o, _ = form(**tensors)
    repeated = {name: tensors.pop(name).repeat_interleave(2, 2) for name in ("q", "k")}
    assert error(o, form(**repeated, **tensors)[0]) <= 2e-5


@each_form
@pytest.mark.parametrize("mapped", ["g", "g_gamma", "v"])
def test_vmap_over_one_argument(form, mapped: str, device: torch.device) -> None:
    tensors = with_gates(("g", "g_gamma"), device, T=5, dtype=torch.float64)
    x = tensors.pop(mapped)
    many = torch.stack([x, x / 2, x / 3])

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return form(**tensors, **{mapped: x}, output_final_state=True)

    expected = tuple(torch.stack(y) for y in zip(*map(function, many), strict=True))
    torch.testing.assert_close(vmap(function)(many), expected)


def test_prompt_then_tokens(device: torch.device) -> None:
    """A prompt in chunks, then tokens one by one from its state: the whole sequence in chunks."""
    tensors = with_gates(("g", "g_gamma"), device, T=70, state=False)
    whole, final = chunk_simple_gla(**tensors, output_final_state=True)
    prompt = BOTH.at(slice(66), tensors, "T")
    _, state = chunk_simple_gla(**prompt, output_final_state=True)
    for t in range(66, 70):
        token = BOTH.at(slice(t, t + 1), tensors, "T")
        o, state = fused_recurrent_simple_gla(**token, initial_state=state, output_final_state=True)
        assert error(o, whole[:, t : t + 1]) <= 2e-5
    assert error(state, final) <= 2e-5


def sharded(mesh: DeviceMesh) -> None:
    """All inputs sharded by heads on two ranks: the results of one, and still sharded where groups stay whole."""
    from torch.distributed.tensor import Replicate, Shard

    torch.manual_seed(0)
    names = ("q", "k", "v", "g")

    def run(*x: Tensor) -> tuple[Tensor, ...]:
        return chunk_simple_gla(**dict(zip(names, x, strict=True)))[:1]

    for H, HV, placement in ((2, 4, Shard(2)), (3, 3, Shard(2)), (3, 6, Replicate()), (1, 4, Replicate())):
        size = {"B": 2, "T": 5, "H": H, "HV": HV, "K": 4, "V": 3}
        inputs = [torch.randn([size[axis] for axis in BOTH.axes[name]]) for name in names]
        assert check_sharded(mesh, run, inputs, [Shard(2)] * 4) == [placement], (H, HV)


def test_dtensor_never_parts_a_group() -> None:
    on_two_ranks(sharded)


class Layer(nn.Module):
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return chunk_simple_gla(q, k, v, -x.exp(), initial_state=state, output_final_state=True)


class Packed(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor) -> Tensor:
        return fused_recurrent_simple_gla(q, k, v, g, scale=1.0, cu_seqlens=cu_seqlens)[0]


def snapshot(module: nn.Module, arguments: list[Tensor], lengths: int) -> str:
    """The exported graph, decomposed; the first `lengths` arguments have a dynamic T."""
    dims = tuple({1: Dim("T", min=2, max=2**20)} if i < lengths else None for i in range(len(arguments)))
    return listing(export(module, tuple(arguments), dynamic_shapes=dims).run_decompositions().graph_module)


def test_graph_of_chunk_simple_gla() -> None:
    expecttest = pytest.importorskip("expecttest")
    arguments = list(with_gates(("g",), torch.device("cpu"), T=37, K=4, V=8).values())
    expecttest.assert_expected_inline(
        snapshot(Layer(), arguments, 4),
        """\
%0 = placeholder : float32[2, s0, 2, 4]
%1 = placeholder : float32[2, s0, 2, 4]
%2 = placeholder : float32[2, s0, 4, 8]
%3 = placeholder : float32[2, s0, 4]
%4 = placeholder : float32[2, 4, 4, 8]
%5 = aten.exp.default(%3) : float32[2, s0, 4]
%6 = aten.neg.default(%5) : float32[2, s0, 4]
%7 = flacompose.scalar_decay_chunk.default(%0, %1, %2, %6, %4, None, 0.5, 1) : (float32[2, s0, 4, 8], float32[2, 4, 4, 8])
%8 = getitem(%7, 0) : float32[2, s0, 4, 8]
%9 = getitem(%7, 1) : float32[2, 4, 4, 8]
return %8, %9""",
    )


def test_graph_of_fused_recurrent_simple_gla_packed() -> None:
    expecttest = pytest.importorskip("expecttest")
    problem = draw(BOTH, torch.device("cpu"), lengths=[37, 0, 3], K=8, V=8, state=False)
    arguments = [problem.tensors[name] for name in ("q", "k", "v", "g")]
    expecttest.assert_expected_inline(
        snapshot(Packed(), [*arguments, problem.cu_seqlens], 4),
        """\
%0 = placeholder : float32[1, s0, 2, 8]
%1 = placeholder : float32[1, s0, 2, 8]
%2 = placeholder : float32[1, s0, 4, 8]
%3 = placeholder : float32[1, s0, 4]
%4 = placeholder : int32[4]
%5 = flacompose.scalar_decay_recurrent.default(%0, %1, %2, %3, None, %4, 1.0, 1) : (float32[1, s0, 4, 8], float32[3, 4, 8, 8])
%6 = getitem(%5, 0) : float32[1, s0, 4, 8]
return %6""",
    )
