"""RWKV6: its bonus, states of every shape, tokens in no sequence, its errors, and the graph it is captured as."""

# ruff: noqa: E501  the graph

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from contract.accuracy import FIXED, VALUES, assert_accurate, error
from contract.cases import CASES
from contract.graphs import listing, recorded
from contract.problems import draw, evaluate
from ranks import check_sharded, on_two_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.export import Dim, export
from torch.func import vmap

from flacompose.ops import chunk_rwkv6, fused_recurrent_rwkv6

FORMS = {form.__name__: form for form in (chunk_rwkv6, fused_recurrent_rwkv6)}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
CASE = {case.name: case for case in CASES if case.name in FORMS}
each_case = pytest.mark.parametrize("case", CASE.values(), ids=CASE)


def inputs(device: torch.device, **options) -> dict[str, Tensor]:
    tensors = draw(CASE["chunk_rwkv6"], device, **options).tensors
    return {"r": tensors.pop("q"), **tensors}


def at(window: slice, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The window of tokens; the bonus is that of every token."""
    tensors = {name: x for name, x in tensors.items() if name != "initial_state"}
    return {name: x if name == "u" else x[:, window] for name, x in tensors.items()}


@each_case
@pytest.mark.parametrize(("K", "V"), [(16, 64), (64, 16)])
@pytest.mark.parametrize("gates", ["mild", "mixed"])
@pytest.mark.parametrize("lengths", [None, [70, 0, 60]], ids=["dense", "packed"])
def test_states_of_every_shape(case, lengths, gates, K: int, V: int, device: torch.device) -> None:
    problem = draw(case, device, T=130, K=K, V=V, gates=gates, lengths=lengths)
    for loss in ("o", "state", "both"):
        assert_accurate(problem, evaluate(problem, loss), loss)


@pytest.mark.parametrize("lengths", [None, [70, 0, 1, 59]], ids=["dense", "packed"])
def test_both_forms_are_one_function(lengths: list[int] | None, device: torch.device) -> None:
    chunk, recurrent = (
        evaluate(draw(case, device, T=130, lengths=lengths, gates="rare")) for case in CASE.values()
    )
    for name, x in chunk.items():
        assert error(x, recurrent[name]) <= 2 * FIXED[torch.float32][name not in VALUES], name


@each_form
def test_the_first_token_sees_itself_alone(form, device: torch.device) -> None:
    """By the bonus, whatever it decays."""
    tensors = inputs(device, T=1, state=False, dtype=torch.float64)
    o, state = form(**tensors, scale=0.5, output_final_state=True)
    r, k, v, u = (tensors[name] for name in "rkvu")
    torch.testing.assert_close(o, 0.5 * (r * u * k).sum(-1, keepdim=True) * v)
    torch.testing.assert_close(state, k[:, 0, :, :, None] * v[:, 0, :, None])


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_bonus_of_another_dtype(form, dtype: torch.dtype, device: torch.device) -> None:
    """It is computed with in float32, and gets its gradient in its own."""
    tensors = inputs(device, dtype=torch.bfloat16)
    u = tensors.pop("u")
    leaves = [u.to(x, copy=True).requires_grad_() for x in (dtype, torch.float32)]
    (o, _), (expected, _) = (form(**tensors, u=x) for x in leaves)
    assert o.dtype == torch.bfloat16 and torch.equal(o, expected)
    o.float().sin().sum().backward()
    expected.float().sin().sum().backward()
    assert leaves[0].grad.dtype == dtype
    assert torch.equal(leaves[0].grad, leaves[1].grad.to(dtype))


@each_form
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_bonus_is_not_rounded(form, autocast: bool, device: torch.device) -> None:
    """To the dtype of what it is multiplied with, in which 1 and -1 - 2^-9 cancel."""
    tensors = inputs(device, T=1, K=2, state=False, dtype=torch.bfloat16)
    tensors = {name: torch.ones_like(x) for name, x in tensors.items()}
    if autocast:
        tensors = {name: x.float() for name, x in tensors.items()}
    tensors["u"] = torch.tensor([[1.0, -1 - 2**-9]] * 2, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        o, _ = form(**tensors, scale=1.0)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, torch.full_like(o, -(2**-9)))


@each_form
def test_no_bonus_is_read_before_the_write(form, device: torch.device) -> None:
    """So that a sequence reads at its end what the one before it wrote."""
    tensors = inputs(device, T=70, dtype=torch.float64)
    tensors["u"] = torch.zeros_like(tensors["u"])
    o, _ = form(**tensors, scale=1.0)
    _, state = form(**at(slice(69), tensors), initial_state=tensors["initial_state"], output_final_state=True)
    torch.testing.assert_close(o[:, 69], torch.einsum("bhk,bhkv->bhv", tensors["r"][:, 69], state))


@each_case
@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_a_tail_has_no_gradient_whatever_it_holds(case, garbage: float, device: torch.device) -> None:
    problem = draw(case, device, lengths=[40, 3], tail=5)
    expected = evaluate(problem)
    tensors = {name: x.clone() for name, x in problem.tensors.items()}
    for name in "qkvw":
        tensors[name][:, 43:] = garbage if name != "w" else -abs(garbage)
    do = problem.do.clone()
    do[:, 43:] = garbage
    for arriving in (problem.do, do):
        results = evaluate(replace(problem.with_tensors(**tensors), do=arriving))
        assert not results["o"][:, 43:].any()
        for name in "qkvw":
            assert not results[f"d{name}"][:, 43:].any(), name
        for name, x in results.items():
            assert torch.equal(x, expected[name]), name


def test_prompt_then_tokens(device: torch.device) -> None:
    """A prompt in chunks, then tokens one by one from its state: the whole sequence in chunks."""
    tensors = inputs(device, T=70, state=False)
    whole, final = chunk_rwkv6(**tensors, output_final_state=True)
    _, state = chunk_rwkv6(**at(slice(66), tensors), output_final_state=True)
    for t in range(66, 70):
        token = at(slice(t, t + 1), tensors)
        o, state = fused_recurrent_rwkv6(**token, initial_state=state, output_final_state=True)
        assert error(o, whole[:, t : t + 1]) <= 2e-5
    assert error(state, final) <= 2e-5


@each_form
@pytest.mark.parametrize("mapped", ["w", "u", "v"])
def test_vmap_over_one_argument(form, mapped: str, device: torch.device) -> None:
    tensors = inputs(device, T=5, dtype=torch.float64)
    x = tensors.pop(mapped)
    many = torch.stack([x, x / 2, x / 3])

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return form(**tensors, **{mapped: x}, output_final_state=True)

    expected = tuple(torch.stack(y) for y in zip(*map(function, many), strict=True))
    torch.testing.assert_close(vmap(function)(many), expected)


def sharded(mesh: DeviceMesh, compiled: bool) -> None:
    """By heads and by rows on two ranks: the results and gradients of one, sharded as the inputs."""
    from torch.distributed.tensor import Replicate, Shard

    tensors = inputs(torch.device("cpu"), T=5)
    form = torch.compile(chunk_rwkv6, fullgraph=True, backend="aot_eager") if compiled else chunk_rwkv6

    def run(*x: Tensor, form=form) -> tuple[Tensor, ...]:
        return form(**dict(zip(tensors, x, strict=True)))[:1]

    for tokens, state, bonus in ((Shard(2), Shard(1), Shard(0)), (Shard(0), Shard(0), Replicate())):
        placements = [{"initial_state": state, "u": bonus}.get(name, tokens) for name in tensors]
        whole = partial(run, form=chunk_rwkv6)
        assert check_sharded(mesh, run, list(tensors.values()), placements, whole) == [tokens]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_dtensor(compiled: bool) -> None:
    on_two_ranks(sharded, compiled)


X = torch.zeros(2, 5, 3, 4)
ARGUMENTS = {
    "r": X,
    "k": X,
    "v": torch.zeros(2, 5, 3, 6),
    "w": X,
    "u": X[0, 0],
    "initial_state": torch.zeros(2, 3, 4, 6),
}
FLOATS = "float32, bfloat16, float16 or float64"


@each_form
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"r": X[0]}, ValueError, "r must have shape [B, T, H, K], got (5, 3, 4)"),
        ({"r": None}, TypeError, "r must be a tensor, got NoneType"),
        ({"r": X.int()}, TypeError, f"r must be {FLOATS}, got int32"),
        ({"r": X[:, :0], "k": X[:, :0], "v": X[:, :0]}, ValueError, "r must have no empty dimension, got (2, 0, 3, 4)"),
        ({"k": X[:, :4]}, ValueError, "k must have shape (2, 5, 3, 4), got (2, 4, 3, 4)"),
        ({"k": X.double()}, TypeError, "k must have the dtype of r, float32, got float64"),
        ({"k": X.to("meta")}, ValueError, "k must be on the device of r, cpu, got meta"),
        ({"v": X[..., 0]}, ValueError, "v must have shape [B, T, H, V], got (2, 5, 3)"),
        ({"v": X[:, :, :2]}, ValueError, "v must have shape (2, 5, 3, 4), got (2, 5, 2, 4)"),
        ({"v": X.bfloat16()}, TypeError, "v must have the dtype of r, float32, got bfloat16"),
        ({"v": X.to("meta")}, ValueError, "v must be on the device of r, cpu, got meta"),
        ({"w": X[..., 0]}, ValueError, "w must have shape (2, 5, 3, 4), got (2, 5, 3)"),
        ({"w": X.long()}, TypeError, f"w must be {FLOATS}, got int64"),
        ({"w": X.to("meta")}, ValueError, "w must be on the device of r, cpu, got meta"),
        ({"u": X[0, 0, 0]}, ValueError, "u must have shape (3, 4), got (4,)"),
        ({"u": X[0]}, ValueError, "u must have shape (3, 4), got (5, 3, 4)"),
        ({"u": X[0, 0].T}, ValueError, "u must have shape (3, 4), got (4, 3)"),
        ({"u": None}, TypeError, "u must be a tensor, got NoneType"),
        ({"u": X[0, 0].long()}, TypeError, f"u must be {FLOATS}, got int64"),
        ({"u": X[0, 0].to("meta")}, ValueError, "u must be on the device of r, cpu, got meta"),
        (
            {"initial_state": torch.zeros(2, 3, 6, 4)},
            ValueError,
            "initial_state must have shape (2, 3, 4, 6), got (2, 3, 6, 4)",
        ),
        ({"scale": "1"}, TypeError, "scale must be a number, got str"),
        (
            {"cu_seqlens": torch.tensor([0, 5])},
            ValueError,
            "r must have batch size 1 when cu_seqlens is given, got 2",
        ),
        (
            {"r": X[:1], "k": X[:1], "v": X[:1], "w": X[:1], "cu_seqlens": torch.tensor([0, 5], device="meta")},
            ValueError,
            "cu_seqlens must be on the device of r, cpu, got meta",
        ),
    ],
)  # fmt: skip
def test_errors(form, wrong: dict, error: type[Exception], message: str) -> None:
    with recorded() as calls, pytest.raises(error, match=f"^{re.escape(message)}$"):
        form(**ARGUMENTS | wrong)
    assert not calls


@each_form
def test_head_size(form) -> None:
    x, y = torch.zeros(1, 1, 1, 257), torch.zeros(1, 1, 1, 256)
    with pytest.raises(ValueError, match="^r must have a head size of at most 256, got 257$"):
        form(x, x, y, x, x[0, 0])
    with pytest.raises(ValueError, match="^v must have a head size of at most 256, got 257$"):
        form(y, y, x, y, y[0, 0])


class Layer(nn.Module):
    def forward(
        self, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return chunk_rwkv6(r, k, v, -w.exp(), u, initial_state=state, output_final_state=True)


def test_graph_of_chunk_rwkv6() -> None:
    expecttest = pytest.importorskip("expecttest")
    tensors = inputs(torch.device("cpu"), T=37, K=4, V=8)
    arguments = tuple(tensors[name] for name in ("r", "k", "v", "w", "u", "initial_state"))
    time = {1: Dim("T", min=2, max=2**20)}
    program = export(Layer(), arguments, dynamic_shapes=(time, time, time, time, None, None))
    expecttest.assert_expected_inline(
        listing(program.run_decompositions().graph_module),
        """\
%0 = placeholder : float32[2, s0, 2, 4]
%1 = placeholder : float32[2, s0, 2, 4]
%2 = placeholder : float32[2, s0, 2, 8]
%3 = placeholder : float32[2, s0, 2, 4]
%4 = placeholder : float32[2, 4]
%5 = placeholder : float32[2, 2, 4, 8]
%6 = aten.exp.default(%3) : float32[2, s0, 2, 4]
%7 = aten.neg.default(%6) : float32[2, s0, 2, 4]
%8 = flacompose.vector_decay_chunk.default(%0, %1, %2, %7, None, %4, %5, None, 0.5, False, False) : (float32[2, s0, 2, 8], float32[2, 2, 4, 8])
%9 = getitem(%8, 0) : float32[2, s0, 2, 8]
%10 = getitem(%8, 1) : float32[2, 2, 4, 8]
return %9, %10""",
    )
