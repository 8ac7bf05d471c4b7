"""Tokens shared out among ranks: every function and every layer gives what one process gives, gradients included."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contract.problems import Problem, Results, draw, evaluate
from contract.recurrences import CASES
from helpers.ranks import on_ranks
from helpers.truth import EVERY, build, tensors
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flacompose import ops
from flacompose.distributed import context_parallel
from flacompose.distributed.context_parallel import FUNCTIONS
from flacompose.layers import ShortConvolution
from flacompose.models import RecurrentConfig, RecurrentLM
from flacompose.ops._parallel.ranks import Ranks, bounds_of_rank, shared

# Where the tokens are cut, on so many ranks, as parts of the whole: some ranks have one token, and some have none.
CUTS = {2: (0, 31, 70), 3: (0, 0, 69, 70), 4: (0, 30, 31, 31, 70)}


def tokens_of_rank(mesh: DeviceMesh, T: int) -> slice:
    """This rank's part of ``T`` tokens."""
    rank, cuts = mesh.get_local_rank(), [cut * T // 70 for cut in CUTS[mesh.size()]]
    return slice(cuts[rank], cuts[rank + 1])


def summed(x: Tensor) -> Tensor:
    """The sum of the ranks' parts of a gradient."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def assert_same(found: Tensor, expected: Tensor, *at: object) -> None:
    """Equal but for rounding in float64: sums over the ranks are in another order."""
    assert found.shape == expected.shape, at
    assert (found - expected).norm() <= 1e-10 * (1 + expected.norm()), (*at, (found - expected).norm())


def is_of_tokens(problem: Problem, name: str) -> bool:
    return name != "initial_state" and "T" in problem.case.axes[name]


def of_a_rank(problem: Problem, mesh: DeviceMesh) -> Results:
    """What a rank finds. Of the gradient of the final state it gets its share."""
    case, T, n = problem.case, problem.first.shape[1], mesh.size()
    own = tokens_of_rank(mesh, T)
    parts = case.at(own, problem.tensors, "T")
    given = {
        name: (parts if is_of_tokens(problem, name) else problem.tensors)[name] for name in problem.tensors
    }
    given = {name: x.contiguous() for name, x in given.items()}
    piece = replace(problem, tensors=given, do=problem.do[:, own], d_final_state=problem.d_final_state / n)
    if case.function in FUNCTIONS:
        return evaluate(replace(piece, case=replace(case, function=context_parallel(case.function, mesh))))
    # The tests call this one through a function of their own, which is not known.
    ranks = Ranks(mesh.get_group().group_name, mesh.get_local_rank(), n, "cpu")
    with shared(ranks):
        cu = problem.cu_seqlens
        return evaluate(
            replace(piece, cu_seqlens=None if cu is None else bounds_of_rank(ranks, cu, own.stop - own.start))
        )


def functions(mesh: DeviceMesh, cases: Sequence[Any]) -> None:
    """Rows, and packed sequences of which some are empty, some end where ranks do, and gates are at times -inf."""
    for case in cases:
        for lengths, tail, gates in ((None, 0, "weak"), ([0, 20, 11, 0, 36], 3, "rare")):
            sizes = {"K": 4, "V": 6, "M": 5}
            problem = draw(
                case, torch.device("cpu"), torch.float64, lengths=lengths, tail=tail, gates=gates, **sizes
            )
            whole, found = evaluate(problem), of_a_rank(problem, mesh)
            own = tokens_of_rank(mesh, problem.first.shape[1])
            for name, expected in whole.items():
                x, leaf = found[name], name[1:]
                if name == "o":
                    expected = expected[:, own]
                elif leaf in problem.tensors and is_of_tokens(problem, leaf):
                    expected = case.at(own, {leaf: expected}, "T")[leaf]
                elif name != "final_state":
                    x = summed(x)
                assert_same(x, expected, case.name, lengths, name)


def by_themselves(T: int) -> list[tuple[Callable[..., Any], dict[str, Tensor], str, str]]:
    """Public functions that are no entry of the contract's table: with inputs, and the names of the states."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    q, k, v, g = normal(1, T, 2, 4), normal(1, T, 2, 4), normal(1, T, 2, 5), -normal(1, T, 2).exp()
    dt, A = normal(1, T, 2).exp(), -normal(2).exp()
    gates = {"ADT": A * dt, "DT": dt, "Trap": normal(1, T, 2)}
    gates |= {"Q_bias": normal(2, 4), "K_bias": normal(2, 4), "Angles": normal(1, T, 2, 2)}
    rwkv4 = {"w": -normal(6).exp(), "u": normal(6), "k": normal(1, T, 6), "v": normal(1, T, 6)}
    ssd = {"x": v, "dt": dt, "A": A, "B": k, "C": q, "chunk_size": 64}
    of_result = "initial_state", "output_final_state"
    return [
        (ops.linear_recurrence, {"q": q, "k": k, "v": v, "g": g}, *of_result),
        (ops.chunk_rwkv4, rwkv4, *of_result),
        (ops.mamba_chunk_scan_combined, ssd, "initial_states", "return_final_states"),
        (ops.mamba3_siso_combined, {"Q": q, "K": k, "V": v} | gates, "Input_States", "return_final_states"),
    ]


def positive(state: Any) -> Any:
    """Numbers that a state may have: the sums of weights of RWKV-4 are above 0."""
    parts = [torch.rand_like(x) + 0.1 for x in tensors(state)]
    return parts[0] if isinstance(state, Tensor) else tuple(parts)


def more_functions(mesh: DeviceMesh) -> None:
    T, n = 70, mesh.size()
    cu, own = torch.tensor([0, 20, 20, 31, 31, 67]), tokens_of_rank(mesh, 70)
    torch.manual_seed(0)
    for function, inputs, of_start, of_end in by_themselves(T):
        name = function.__name__

        def results(
            of: Callable[..., Any], part: slice, share: float, initial: Any, name: str = name,
            inputs: dict[str, Any] = inputs, options: tuple[str, str] = (of_start, of_end),
        ) -> tuple[list[Tensor], dict[str, Tensor]]:  # fmt: skip
            """Outputs and states, and gradients of a loss on all of them."""
            leaves = {key: x.clone().requires_grad_() for key, x in inputs.items() if isinstance(x, Tensor)}
            given = {key: x[:, part] if x.shape[:2] == (1, T) else x for key, x in leaves.items()}
            states = [x.clone().requires_grad_() for x in tensors(initial)]
            start = states[0] if isinstance(initial, Tensor) else tuple(states)
            o, *end = of(**inputs | given, **{options[0]: start, options[1]: True}, cu_seqlens=cu)
            ends = [x for y in end for x in tensors(y)]
            # The stabiliser of RWKV-4 is a constant.
            loss = o.sin().sum() + share * sum(x.sin().sum() for x in ends[: 2 if "rwkv4" in name else None])
            loss.backward()
            leaves |= {f"state {i}": x for i, x in enumerate(states)}
            return [o, *ends], {
                key: torch.zeros_like(x) if x.grad is None else x.grad for key, x in leaves.items()
            }

        options = {of_end: True, "cu_seqlens": cu}
        _, *end = function(**inputs, **options)
        initial = positive(end[0] if len(end) == 1 else tuple(end))
        (o, *ends), gradients = results(function, slice(0, T), 1, initial)
        found, of_rank = results(context_parallel(function, mesh), own, 1 / n, initial)
        for x, expected in zip(found, [o[:, own], *ends], strict=True):
            assert_same(x, expected, name)
        for key, expected in gradients.items():
            assert_same(summed(of_rank[key]), expected, name, key)


def layers(mesh: DeviceMesh, configs: Mapping[str, Any]) -> None:
    """In rows, packed, and with pads anywhere, from any state."""
    T, n = 14, mesh.size()
    own = tokens_of_rank(mesh, T)
    for name, config in configs.items():
        torch.manual_seed(0)
        layer = build(config, dtype=torch.float64)
        shared_layer = context_parallel(build(config, dtype=torch.float64), mesh)
        shared_layer.load_state_dict(layer.state_dict())
        options: dict[str, dict[str, Any]] = {
            "rows": {},
            "packed": {"cu_seqlens": torch.tensor([0, 3, 3, 10, 13])},
            "mask": {"attention_mask": torch.rand(2, T) > 0.3},
        }
        for kind, given in options.items():
            rows, N = (1, 4) if kind == "packed" else (2, 2)
            x = torch.randn(rows, T, 24, dtype=torch.float64)
            state = layer.init_state(N).map(
                lambda t: torch.randn(t.shape, dtype=t.dtype) if t.is_floating_point() else t + 5
            )
            part = {key: y[:, own] if key == "attention_mask" else y for key, y in given.items()}
            weights, results = torch.randn(rows, T, 24, dtype=torch.float64), []
            for module, piece, share, kept in (
                (layer, slice(0, T), 1, given),
                (shared_layer, own, 1 / n, part),
            ):
                module.zero_grad()
                leaf = x.clone().requires_grad_()
                y, end, *_ = module(leaf[:, piece], state, **kept)
                ends = tensors(end)
                of_ends = sum(e.sin().sum() for e in ends if e.is_floating_point())
                ((y * weights[:, piece]).sum() + share * of_ends).backward()
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
                results.append((y, ends, [leaf.grad, *grads]))
            (y, ends, expected), (y_own, ends_own, found) = results
            assert_same(y_own, y[:, own], name, kind)
            for a, b in zip(ends_own, ends, strict=True):
                assert_same(a.double(), b.double(), name, kind)
            for i, (a, b) in enumerate(zip(found, expected, strict=True)):
                assert_same(summed(a), b, name, kind, i)


def hybrid(mesh: DeviceMesh) -> None:
    """A model with softmax attention in all its forms; its logits after the last token are those of every rank."""
    attention = [
        {"layers": [1], "num_heads": 2},
        {"layers": [2], "num_heads": 4, "num_kv_heads": 2, "window_size": 5},
    ]
    config = RecurrentConfig(
        layer="GatedLinearAttention", vocab_size=32, hidden_size=24, num_hidden_layers=4, intermediate_size=16,
        layer_options={"num_heads": 2}, attn=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    model, rank, n = RecurrentLM(config, dtype=torch.float64), mesh.get_local_rank(), mesh.size()
    of_rank = context_parallel(RecurrentLM(config, dtype=torch.float64), mesh)
    of_rank.load_state_dict(model.state_dict())
    ids, own = torch.randint(32, (2, 6 * n)), slice(6 * rank, 6 * rank + 6)
    state: Any = None
    for _ in range(2):  # then with keys and values of the past
        model.zero_grad()
        of_rank.zero_grad()
        y, new = model(ids, state)
        y_own, new_own = of_rank(ids[:, own], state)
        assert_same(y_own, y[:, own])
        y.sin().sum().backward()
        y_own.sin().sum().backward()
        for (path, a), b in zip(of_rank.named_parameters(), model.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            assert_same(summed(a.grad), b.grad, path)
        for a, b in zip(tensors(new_own), tensors(new), strict=True):
            assert_same(a.double(), b.double())
        state = tuple(layer.map(lambda t: t.detach()) for layer in new)
    assert_same(of_rank(ids[:, own], last_only=True)[0], model(ids, last_only=True)[0])

    model.zero_grad()
    of_rank.zero_grad()
    bounds = torch.tensor([0, 4, 4, 9, 6 * n - 1])  # with a tail on the last rank
    y, new = model(ids[:1], cu_seqlens=bounds)
    y_own, new_own = of_rank(ids[:1, own], cu_seqlens=bounds)
    is_token = torch.arange(6 * n) < bounds[-1]
    assert_same(y_own[:, is_token[own]], y[:, own][:, is_token[own]])
    y[:, is_token].sin().sum().backward()
    y_own[:, is_token[own]].sin().sum().backward()
    for (path, a), b in zip(of_rank.named_parameters(), model.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert_same(summed(a.grad), b.grad, path)
    for a, b in zip(tensors(new_own), tensors(new), strict=True):
        assert_same(a.double(), b.double())
    mask = torch.ones(2, 6, dtype=torch.bool)
    with pytest.raises(
        ValueError, match="attention_mask must not be given across ranks to a model with softmax"
    ):
        of_rank(ids[:, own], attention_mask=mask)
    if n > 2:
        return
    with pytest.raises(RuntimeError, match="takes pieces of one length"):
        of_rank(ids[:, : 5 + rank])


def halves(mesh: DeviceMesh, *inputs: Tensor) -> list[Tensor]:
    """This rank's half of the tokens of each."""
    return [x.chunk(2, 1)[mesh.get_local_rank()].clone() for x in inputs]


def rounded_states(mesh: DeviceMesh) -> None:
    """States may have any float dtype; they are then numbers of float32, as on one rank."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 10, 2, 4)
    g, beta = -torch.rand(1, 10, 2), torch.rand(1, 10, 2)
    C = torch.randn(1, 2, 4, 4).bfloat16()
    of_mlstm = C.half(), torch.randn(1, 2, 4).half(), torch.randn(1, 2).half()
    calls: list[tuple[Any, list[Tensor], Any]] = [
        (ops.chunk_gla, [q, k, v, -k.abs()], C), (ops.chunk_gated_delta_rule, [q, k, v, g, beta], C),
        (ops.chunk_mlstm, [q, k, v, beta, g], of_mlstm),
    ]  # fmt: skip
    for function, inputs, state in calls:
        leaves = [x.clone().requires_grad_() for x in inputs]
        o, final = function(*leaves, initial_state=state, output_final_state=True)
        o.sin().sum().backward()
        own = [x.requires_grad_() for x in halves(mesh, *inputs)]
        mine, same = context_parallel(function, mesh)(*own, initial_state=state, output_final_state=True)
        mine.sin().sum().backward()
        # Of float32, whose sums are in another order.
        bounds = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(mine, *halves(mesh, o), **bounds)
        for x, y in zip(tensors(same), tensors(final), strict=True):
            torch.testing.assert_close(x, y, **bounds)
        for x, y in zip(own, leaves, strict=True):
            torch.testing.assert_close(x.grad, *halves(mesh, y.grad), **bounds)


def convolution(mesh: DeviceMesh) -> None:
    """By itself, wider than bfloat16 counts, packed, and as autocast casts its input."""
    torch.manual_seed(0)
    conv, cu = ShortConvolution(3, 301).double(), torch.tensor([0, 7, 530, 542])
    own = context_parallel(copy.deepcopy(conv), mesh)
    x = torch.randn(1, 542, 3, dtype=torch.float64)
    y, state = conv(x, cu_seqlens=cu)
    mine, same = own(*halves(mesh, x), cu_seqlens=cu)
    assert_same(mine, *halves(mesh, y))
    assert_same(same, state)
    rounded = x.bfloat16()
    assert torch.equal(own.bfloat16()(*halves(mesh, rounded))[1], conv.bfloat16()(rounded)[1])

    weight = torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = ops.causal_conv1d(x.float(), weight, output_final_state=True)
        mine, same = context_parallel(ops.causal_conv1d, mesh)(
            *halves(mesh, x.float()), weight, output_final_state=True
        )
    assert torch.equal(same, state)
    torch.testing.assert_close(mine, *halves(mesh, y))


def kept_in_memory(mesh: DeviceMesh) -> None:
    """A backward keeps the maps of all ranks, and neither the states that came with them nor what they came in."""
    kept: list[Tensor] = []
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 5, 2, 8).unbind())
    g = -torch.rand(1, 5, 2)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        context_parallel(ops.chunk_simple_gla, mesh)(q, k, v, g)
    given = sum(x.numel() for x in (q, k, v, g))
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() // 4 for x in kept}
    start, maps = 2 * 8 * 8, 2 * 2
    assert sum(sizes.values()) <= given + start + maps + 2 * 5 * 2 * 8, (
        sizes
    )  # queries, keys and values are one


def states_in_one_loss(mesh: DeviceMesh) -> None:
    """The losses of some ranks alone may have final states: the others take part in the backward nevertheless."""
    for name in ("gla", "mamba3", "rwkv7", "abc"):
        torch.manual_seed(0)
        layer = context_parallel(build(EVERY[name], dtype=torch.float64), mesh)
        y, state, *_ = layer(torch.randn(2, 6, 24, dtype=torch.float64))
        ends = [x.sin().sum() for x in tensors(state) if x.is_floating_point()]
        (y.sum() + (sum(ends) if mesh.get_local_rank() == 0 else 0)).backward()


def chained_without_tokens(mesh: DeviceMesh) -> None:
    """The graph of a rank without tokens has as many collectives as that of the others, none of which are joined."""
    torch.manual_seed(0)
    shared_gla = context_parallel(ops.chunk_gla, mesh)
    shared_conv = context_parallel(ops.causal_conv1d, mesh)
    weight = torch.randn(4, 3, dtype=torch.float64)

    def chain(gla: Callable[..., Any], conv: Callable[..., Any], x: Tensor) -> Tensor:
        for _ in range(2):
            x, _ = gla(x, x + 1, x, -x.abs())
            x = conv(x.flatten(2), weight)[0].unsqueeze(2)
        return x

    compiled = torch.compile(
        lambda x: chain(shared_gla, shared_conv, x), fullgraph=True, backend="aot_eager_decomp_partition"
    )
    x = torch.randn(1, 7, 1, 4, dtype=torch.float64)
    own = x[:, :0] if mesh.get_local_rank() == 0 else x
    whole, mine = x.clone().requires_grad_(), own.clone().requires_grad_()
    chain(ops.chunk_gla, ops.causal_conv1d, whole).sin().sum().backward()
    compiled(mine).sin().sum().backward()
    assert mine.grad is not None and whole.grad is not None
    assert_same(mine.grad, whole.grad[:, : own.shape[1]])


def second_derivatives(mesh: DeviceMesh) -> None:
    x = torch.randn(1, 4, 2, 3, requires_grad=True)
    for y in (
        context_parallel(ops.chunk_linear_attn, mesh)(x, x, x)[0],
        context_parallel(ops.causal_conv1d, mesh)(x.flatten(2), torch.randn(6, 3))[0],
    ):
        with pytest.raises(RuntimeError, match="has no second derivative: create_graph must be False"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


def one_token_a_rank(mesh: DeviceMesh) -> None:
    """The operator of a single token is not for a row of which other ranks have tokens, too."""
    torch.manual_seed(0)
    layer = build(EVERY["mamba3"], dtype=torch.float64)
    x = torch.randn(1, mesh.size(), 24, dtype=torch.float64)
    own = slice(mesh.get_local_rank(), mesh.get_local_rank() + 1)
    expected = layer(x)[0][:, own]
    assert_same(context_parallel(layer, mesh)(x[:, own])[0], expected)


def edges(mesh: DeviceMesh) -> None:
    one_token_a_rank(mesh)
    chained_without_tokens(mesh)
    second_derivatives(mesh)
    states_in_one_loss(mesh)
    rounded_states(mesh)
    convolution(mesh)
    kept_in_memory(mesh)


def test_edges() -> None:
    on_ranks(2, edges)


CHUNKED = [case for case in CASES if case.form != "recurrent"]
# One of each recurrence, whose maps of states and kinds of gathers differ.
SOME = {"chunk_rwkv6", "chunk_simple_gla-g-beta", "chunk_mlstm", "chunk_hgrn", "selective_scan_fn", "chunk_kda",
        "chunk_rwkv7", "chunk_gsa", "causal_conv1d"}  # fmt: skip
SOME_LAYERS = {"gla", "mamba3", "rwkv7", "kda", "abc"}


def everything(mesh: DeviceMesh, every: bool) -> None:
    functions(mesh, [case for case in CHUNKED if every or case.name in SOME])
    more_functions(mesh)
    layers(mesh, {name: config for name, config in EVERY.items() if every or name in SOME_LAYERS})
    hybrid(mesh)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks(ranks: int) -> None:
    """On three ranks everything, and on two and four one of each kind."""
    on_ranks(ranks, everything, ranks == 3)
