"""Tokens shared out among ranks beside whatever else shares out a model, compiled, and what the ranks tell each other.

The truth is the model of one process, in float64. That each function and layer has its values and gradients is tested
in `test_context_parallel.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.ranks import on_ranks
from helpers.truth import EVERY, build, floats, random_state, tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from flacompose import ops
from flacompose.distributed import context_parallel, tensor_parallel_plan
from flacompose.models import RecurrentConfig, RecurrentLM
from flacompose.ops._composed import logsumexp

from .test_tensor_parallel import LAYERS, ODD, SHARED, needs_2_13

VOCABULARY = 32
MODEL = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16}
MODELS = {
    "delta": {"layer": "GatedDeltaNet", "layer_options": {"num_heads": 2, "head_dim": 8}},
    "rwkv7": {"layer": "RWKV7Attention", "layer_options": {"head_dim": 8}, "feed_forward": "rwkv7", "norm": "layer"},
}  # fmt: skip


def build_model(name: str, dtype: torch.dtype = torch.float64) -> RecurrentLM:
    """The same on every rank, with no parameter at 0, where a gradient might not be seen."""
    torch.manual_seed(0)
    model = RecurrentLM(RecurrentConfig(**MODEL | MODELS[name]), dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


def cut(x: Tensor, cuts: tuple[int, ...], rank: int) -> Tensor:
    return x[:, cuts[rank] : cuts[rank + 1]]


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    logits, _ = model(ids, cu_seqlens=cu_seqlens)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def full(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def assert_same(found: list[Any], expected: list[Any], *where: Any) -> None:
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10, msg=lambda text, i=i: f"{where} {i}: {text}")


def of_rows(model: RecurrentLM, mesh: DeviceMesh) -> RecurrentLM:
    """A copy that shares tokens, whose blocks are computed again in the backward."""
    copied = copy.deepcopy(model)
    copied.config = dataclasses.replace(copied.config, gradient_checkpointing=True)
    return context_parallel(copied, mesh)


def fully_sharded(model: RecurrentLM, tokens: DeviceMesh, parameters: DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    shared = of_rows(model, tokens)
    for block in shared.layers:
        fully_shard(block, mesh=parameters)
    return fully_shard(shared, mesh=parameters)


def data_parallel(world: DeviceMesh) -> None:
    """Packed rows over one dimension of the mesh, the tokens of each over the other; blocks are checkpointed."""
    from torch.nn.parallel import DistributedDataParallel

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp, row, rank = grid["cp"], grid.get_local_rank("dp"), grid.get_local_rank("cp")
    # A sequence ends where the first rank's tokens do, or goes on; one is empty, and a tail is in none.
    bounds = [torch.tensor([0, 4, 9, 9, 15]), torch.tensor([0, 12, 14])]
    cuts = ((0, 9, 17), (0, 3, 17))
    torch.manual_seed(1)
    ids, labels = torch.randint(VOCABULARY, (2, 2, 1, 17))
    labels[0, :, 15:] = labels[1, :, 14:] = -100
    for name in "delta", "rwkv7":
        model = build_model(name)
        for i in range(2):
            loss_of(model, ids[i], labels[i], bounds[i]).backward()
        expected = gradients(model)
        model.zero_grad()
        mine = [cut(x[row], cuts[row], rank) for x in (ids, labels)]

        shared = fully_sharded(
            model, cp, grid["dp"]
        )  # which takes means over rows; the sum over tokens is left to be taken
        loss_of(shared, *mine, bounds[row]).backward()
        for p in shared.parameters():
            dist.all_reduce(p.grad.to_local(), group=cp.get_group())
        assert_same([2 * full(p.grad) for p in shared.parameters()], expected, name, "dp")

        for mesh in world, grid:  # over all ranks, or over rows alike
            shared = fully_sharded(model, cp, mesh)
            for _ in range(2):  # accumulated
                loss_of(shared, *mine, bounds[row]).backward()
            assert_same([2 * full(p.grad) for p in shared.parameters()], expected, name, mesh.ndim)

        replica = DistributedDataParallel(of_rows(model, cp))
        with replica.no_sync():
            loss_of(replica, *mine, bounds[row]).backward()
        loss_of(replica, *mine, bounds[row]).backward()
        assert_same([2 * p.grad for p in replica.parameters()], expected, name, "ddp")


def heads_and_tokens(mesh: DeviceMesh, names: list[str]) -> None:
    """Each rank has half of the heads and a part of the tokens: without pads, and then with some."""
    from torch.distributed.tensor.parallel import parallelize_module

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    rank, group, cuts = grid.get_local_rank("cp"), grid.get_group("cp"), (0, 4, 11)
    for name in names:
        torch.manual_seed(0)
        layer = build((LAYERS | SHARED | ODD)[name], dtype=torch.float64)
        x, mask = torch.randn(2, 11, 24, dtype=torch.float64), torch.rand(2, 11) > 0.3
        state = random_state(layer, 2)
        shared = copy.deepcopy(layer)
        parallelize_module(shared, grid["tp"], tensor_parallel_plan(shared))
        context_parallel(shared, grid["cp"])
        results = []
        # Each rank adds the gradient of the final state to its own.
        for module, of_rank, share in (layer, lambda x: x, 1.0), (shared, lambda x: cut(x, cuts, rank), 0.5):
            leaf = x.clone().requires_grad_()
            y, first, *_ = module(of_rank(leaf), state)
            z, second, *_ = module(of_rank(leaf), first, attention_mask=of_rank(mask))
            (
                y.sin().sum() + z.sin().sum() + share * sum(full(t).sin().sum() for t in floats(second))
            ).backward()
            states = [full(t) for t in (*tensors(first), *tensors(second))]
            results.append(([y, z, of_rank(leaf.grad)], states))
        (outputs, states), (found, found_states) = results
        assert_same(found, [*(cut(y, cuts, rank) for y in outputs[:2]), cut(outputs[2], cuts, rank)], name)
        assert_same(found_states, states, name, "state")
        for (path, p), q in zip(shared.named_parameters(), layer.parameters(), strict=True):
            grad = full(p.grad).clone()
            dist.all_reduce(grad, group=group)
            assert_same([grad], [q.grad], name, path)


# One of each kind of what goes from rank to rank, and of each way in which heads and channels are shared out.
HEADS_AND_TOKENS = [
    "abc", "retention", "mamba3 mimo", "rwkv6", "hgrn, 27 channels", "gated_deltanet, one head of keys",
]  # fmt: skip


class Sent(TorchDispatchMode):
    """Records what this rank sends, in numbers, and sees that nothing is read on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name != "_local_scalar_dense"
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            self.sizes.append((name, args[0].numel()))
        return func(*args, **(kwargs or {}))


def sent_by(module: Callable[..., Any], *leaves: Tensor, **options: Any) -> tuple[list[tuple[str, int]], ...]:
    """What a call sends, and then its backward."""
    leaves = tuple(x.detach().requires_grad_() for x in leaves)
    with Sent() as forwards:
        y, *states = module(*leaves, **options)
    parts = [t for t in (y, *tensors(states)) if t is not None and t.is_floating_point()]
    with Sent() as backwards:
        sum(t.sin().sum() for t in parts).backward()
    return forwards.sizes, backwards.sizes


def what_is_sent(mesh: DeviceMesh) -> None:
    N, H, K, V, W = 3, 2, 4, 6, 4
    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    bounds, state, window = (gather, 1), N * H * K * V, N * (V * W + 1)
    for T in 9, 30:
        cu = torch.tensor([0, 5, 5, T + 2])
        q, k = torch.randn(2, 1, T, H, K)
        v, x = torch.randn(1, T, H, V), torch.randn(1, T, V)
        g, beta, weight = -torch.rand(1, T, H), torch.rand(1, T, H), torch.randn(V, W)
        scan = x, x.abs(), torch.randn(V, K), x[..., :K], x[..., :K]
        for function, inputs, map_and_end, back in (
            (ops.chunk_linear_attn, (q, k, v), state, 2 * state),
            (ops.chunk_simple_gla, (q, k, v, g), N * H + state, 2 * state),
            (ops.chunk_gla, (q, k, v, -k.abs()), N * H * K + state, 2 * state),
            (ops.chunk_gated_delta_rule, (q, k, v, g, beta), N * H * K * K + state, 2 * state),
            (ops.chunk_dplr_delta_rule, (q, k, v, -k, k, -k.abs()), N * H * K * K + state, 2 * state),
            (ops.chunk_hgrn, (x, -x.abs()), 2 * N * V, 2 * N * V),
            (ops.selective_scan_fn, scan, 2 * N * V * K, 2 * N * V * K),
        ):
            found = sent_by(context_parallel(function, mesh), *inputs, cu_seqlens=cu)
            assert found == ([bounds, (gather, map_and_end)], [(gather, back)]), (function, T, found)
        found = sent_by(context_parallel(ops.causal_conv1d, mesh), x, weight, cu_seqlens=cu)
        assert found == ([bounds, (gather, window)], [(scatter, 2 * window)]), (T, found)
    for name in "gla", "retention", "mamba2", "mamba3 mimo", "rwkv6", "rwkv7", "mlstm", "abc":
        mode = {"mode": "fused_recurrent"} if name == "gla" else {}  # which computes chunks here
        layer = context_parallel(build(EVERY[name] | mode), mesh)
        few, many = (sent_by(layer, torch.randn(2, T, 24)) for T in (9, 30))
        assert few == many and few[0] and few[1], (name, few, many)


def assert_raises(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    """`pytest.raises`, whose failure would end a process without a word."""
    try:
        call()
    except kind as error:
        assert re.search(message, str(error)), f"expected {message!r}, got {error}"
    else:
        raise AssertionError(f"nothing was raised, expected {message!r}")


def misuse(mesh: DeviceMesh) -> None:
    grid = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    for target, of, error, message in (
        (
            ops.chunk_gla,
            "cp",
            TypeError,
            r"mesh must be a torch\.distributed\.device_mesh\.DeviceMesh, got str",
        ),
        (ops.chunk_gla, grid, ValueError, r"mesh must have one dimension, such as mesh\['cp'\] .*, got 2"),
        (
            ops.fused_recurrent_gla,
            mesh,
            TypeError,
            "target must be a module, or one of .*chunk_gla.*, got fused",
        ),
        (F.silu, mesh, TypeError, "target must be a module, or one of .*, got silu"),
        ("gla", mesh, TypeError, "target must be a module, or one of .*, got str"),
        (nn.Linear(2, 2), mesh, ValueError, "target must contain a recurrent layer, got Linear"),
    ):
        assert_raises(lambda target=target, of=of: context_parallel(target, of), error, message)
    gla, conv = context_parallel(ops.chunk_gla, grid["cp"]), context_parallel(ops.causal_conv1d, mesh)
    layer, model = context_parallel(build(EVERY["gla"]), mesh), context_parallel(build_model("rwkv7"), mesh)
    alone = build(EVERY["gla"])
    q = torch.randn(2, 5, 2, 4)
    one, x, ids, cu = (
        q[:1],
        torch.randn(1, 5, 24),
        torch.zeros(1, 5, dtype=torch.long),
        torch.tensor([0, 3, 9]),
    )
    wrong_bounds = "cu_seqlens must be int32 or int64, got float32"
    meta, two, states = x.to("meta"), torch.randn(2, 2, 4, 4), alone.init_state(3)
    for call, error, message in (
        (lambda: gla(q.to("meta"), q, q, q), ValueError, "q must be on the device of the mesh, cpu, got meta"),
        (lambda: gla(q, q, q, q, initial_state=two.to("meta")), ValueError, "initial_state must be on .*, got meta"),
        (lambda: gla(one, one, one, one, cu_seqlens=cu.float()), TypeError, wrong_bounds),
        (lambda: gla(one, one, one, one, cu_seqlens=cu[None]), ValueError, r"cu_seqlens must have .*got \(1, 3\)"),
        (lambda: gla(q, q, q, q, cu_seqlens=cu), ValueError, "q must have batch size 1 .*, got 2"),
        (lambda: gla(one, one, one, one, initial_state=two[:1], cu_seqlens=cu), ValueError,
         r"initial_state must have 2 states, one a sequence, got shape \(1, 2, 4, 4\)"),
        (lambda: gla(one, one, one, one, initial_state=torch.tensor(1.0), cu_seqlens=cu), ValueError,
         r"initial_state must have 2 states, one a sequence, got shape \(\)"),
        (lambda: context_parallel(gla, mesh), TypeError, "got chunk_gla, wrapped by something else"),
        (lambda: gla(q, q, q, q, initial_state=two[:1]), ValueError, r"initial_state must .* \(2, 2, 4, 4\), got \(1,"),
        (lambda: gla(q, q, q, q, q=q), TypeError, "multiple values"),
        (lambda: gla(q, q, q, q, head_first=True), TypeError, "head_first"),
        (lambda: gla(q, q[..., :2], q, q), ValueError, r"k must have shape \(2, 5, 2, 4\), got \(2, 5, 2, 2\)"),
        (lambda: conv(x, torch.ones(24, 4), output_states=1), ValueError,
         "output_states must not be given across ranks, .* got 1"),
        (lambda: layer(meta), ValueError, "hidden_states must be on the device of the mesh, cpu, got meta"),
        (lambda: layer(x, num_states=1), ValueError, "num_states must not be given across ranks, .* got 1"),
        (lambda: layer(x, states), ValueError, r"state\.recurrent.* must have shape \(1, .*got \(3,"),
        (lambda: layer(x, states, cu_seqlens=cu), ValueError, r"state\.recurrent.* must have shape \(2, .*got \(3,"),
        (lambda: layer(x, attention_mask=x), TypeError, "attention_mask must .*float32"),
        (lambda: layer(x, cu_seqlens=cu.float()), TypeError, wrong_bounds),
        (lambda: layer(x, attention_mask=torch.ones(1, 9, dtype=torch.bool)), ValueError,
         r"attention_mask must cover this rank's 5 tokens, \(1, 5\), got \(1, 9\)"),
        (lambda: model(ids.to("meta")), ValueError, "input_ids must be on the device of the mesh, cpu, got meta"),
        (lambda: model(ids, num_states=1), ValueError, "num_states must not be given across ranks"),
        (lambda: model(ids, cu_seqlens=cu.float()), TypeError, wrong_bounds),
        (lambda: model.generate(ids, 2), ValueError, "generate must be called on a model of one process, got"),
    ):  # fmt: skip
        with Sent() as sent:
            assert_raises(call, error, message)
        assert not sent.sizes, message
    of_q = torch.func.grad(lambda q: gla(q, q, q, -q.abs())[0].sum())
    assert_raises(lambda: of_q(q), RuntimeError, "autograd.Function")
    # A call that has failed leaves the calls of one process alone.
    with Sent() as sent:
        ops.fused_recurrent_gla(q, q, q, q)
    assert not sent.sizes


def one_dimension(mesh: DeviceMesh) -> None:
    """Without gradients, rounded by autocast, repeated."""
    rank, cuts, cu = mesh.get_local_rank(), (0, 6, 19), torch.tensor([0, 4, 9, 17])
    for name in "gla", "mamba", "rwkv6", "delta_net":
        torch.manual_seed(0)
        layer = build(EVERY[name])
        exact = copy.deepcopy(layer).double()
        x = torch.randn(1, 19, 24)
        shared = context_parallel(copy.deepcopy(layer), mesh)
        part = cut(x, cuts, rank)

        def results(module: nn.Module, x: Tensor, rounded: bool = False) -> list[Tensor]:
            module.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
                leaf = x.clone().requires_grad_()
                y, state = module(leaf, cu_seqlens=cu)
            y.float().sin().sum().backward()
            return [y, *tensors(state), leaf.grad, *gradients(module)]

        first = results(shared, part)
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(results(shared, part), first, strict=True)), name
        with torch.no_grad():
            y, state = shared(part, cu_seqlens=cu)
        # Without gradients other operators of PyTorch may be taken, and rounded otherwise.
        torch.testing.assert_close([y, *tensors(state)], first[: 1 + len(tensors(state))], msg=name)

        true, alone, found = results(exact, x.double()), results(layer, x, True), results(shared, part, True)
        n = len(tensors(state))
        for i, (a, b, t) in enumerate(zip(found, alone, true, strict=True)):
            assert a.dtype == b.dtype, (name, i)
            if i in (0, n + 1):  # of tokens
                b, t = cut(b, cuts, rank), cut(t, cuts, rank)
            elif i > n:
                a = a.clone()
                dist.all_reduce(a)
            # Sums over fewer tokens may round less, or more: the states are float32 between the ranks.
            off, allowed = (a - t).norm(), (b - t).norm()
            assert off <= 1.5 * allowed + 1e-6 * t.norm(), (name, i, off, allowed)


def compiled(mesh: DeviceMesh, slow: bool) -> None:
    """One graph on every rank, whatever the numbers of tokens, without a break and without a read on the host."""
    rank, cu = mesh.get_local_rank(), torch.tensor([0, 5, 5, 19, 22])
    logsumexp.LEVELS = 5  # in this process, which ends with the test: a graph has that many times its code
    graphs: list[list[str]] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        nodes = [
            str(x.target) for part in graph.modules() if hasattr(part, "graph") for x in part.graph.nodes
        ]
        graphs.append([name for name in nodes if "_c10d_functional" in name])
        return graph.forward

    def results(module: Callable[..., Any], leaves: list[Tensor], **options: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in leaves]
        y, *states = module(*leaves, **options)
        parts = [y, *(t for t in tensors(states) if t is not None and t.is_floating_point())]
        sum(t.sin().sum() for t in parts).backward()
        return [*parts, *(x.grad for x in leaves)]

    def check(module: Callable[..., Any], inputs: list[Tensor], backend: Any, **options: Any) -> None:
        torch._dynamo.reset()
        graphs.clear()
        fast = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
        for cuts in (0, 10, 24), (0, 13, 24):
            leaves = [cut(x, cuts, rank) for x in inputs]
            for a, b in zip(
                results(fast, leaves, **options), results(module, leaves, **options), strict=True
            ):
                torch.testing.assert_close(a, b)

    q, k, v = torch.randn(3, 1, 24, 2, 4, dtype=torch.float64)
    g, x = -torch.rand(1, 24, 2, dtype=torch.float64), torch.randn(1, 24, 24, dtype=torch.float64)
    if slow:
        layer = context_parallel(build(EVERY["gla"], dtype=torch.float64), mesh)
        check(layer, [x], "inductor", cu_seqlens=cu)
        return
    packed = {"output_final_state": True, "cu_seqlens": cu}
    for function, inputs in (
        (ops.chunk_gated_delta_rule, [q, k, v, g, g.exp()]),
        (ops.chunk_abc, [q, k, v, q]),
        (ops.chunk_mlstm, [q, k, v, g, g]),
    ):
        check(context_parallel(function, mesh), inputs, record, **packed)
        assert len(graphs) == 1, function
        of_ranks: list[Any] = [None] * mesh.size()
        dist.all_gather_object(of_ranks, graphs[0])
        assert len(of_ranks[0]) > 2 and of_ranks[0] == of_ranks[1], function  # they wait for each other
    # With its backward: windows and states that go both ways between the ranks, of one tensor for q, k and v.
    convolve, decay = (context_parallel(f, mesh) for f in (ops.causal_conv1d, ops.chunk_simple_gla))
    weight = torch.randn(8, 3, dtype=torch.float64)

    def convolved(v: Tensor, g: Tensor, **options: Any) -> Any:
        v, window = convolve(v, weight, **options)
        y, state = decay(*[v.unflatten(-1, (2, 4))] * 3, g, **options)
        return y, state, window

    check(convolved, [torch.randn(1, 24, 8, dtype=torch.float64), g], "aot_eager", output_final_state=True)


@needs_2_13
def test_data_parallel() -> None:
    on_ranks(4, data_parallel)


@needs_2_13
def test_heads_and_tokens() -> None:
    on_ranks(4, heads_and_tokens, HEADS_AND_TOKENS)


def test_what_is_sent() -> None:
    on_ranks(2, what_is_sent)


def test_misuse() -> None:
    on_ranks(1, misuse)


def test_one_dimension() -> None:
    on_ranks(2, one_dimension)


def test_compiled() -> None:
    on_ranks(2, compiled, False)


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    """Three convolutions side by side, whose gradients go to the rank before."""
    on_ranks(2, compiled, True)
