"""The language model: pieces, pads, packing, generation, gradients, compilation, export, errors."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import types
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from helpers.fla_weights import tokens
from helpers.goldens import GOLDENS, loaded
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from flacompose.layers import RecurrentState
from flacompose.models import RecurrentConfig, RecurrentLM, softmax_attention
from flacompose.models.sampling import next_token
from flacompose.models.softmax_attention import SoftmaxAttention
from flacompose.ops._parallel.ranks import Ranks

VOCAB = 11
# One of each model; hybrids with all keys and values, with a window, and with lower bounds of forget gates.
MODELS = [
    "gla",
    "retnet",
    "gsa varied",
    "rwkv6",
    "rwkv7 varied",
    "hgrn2",
    "delta_net",
    "gated_deltanet",
    "kda",
]
HYBRIDS = ["gla hybrid", "gated_deltanet hybrid", "hgrn2 hybrid"]
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "layer": "GatedLinearAttention",
    "layer_options": {"num_heads": 2},
}


def close(actual: Any, expected: Any) -> None:
    # Logits are of size 2; float32 is summed in another order.
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def small(**changes: Any) -> RecurrentLM:
    return RecurrentLM(RecurrentConfig(**SMALL | changes))


def test_layers_get_the_arguments_that_they_take() -> None:
    """Based has no eps of a norm, and no place among the layers; ReBased has a place, and Comba both."""
    based = {"num_heads": 2, "num_key_value_heads": 2, "feature_dim": 4}
    for layer, options, index, eps in (
        ("BasedLinearAttention", based, None, 1e-12),
        ("ReBasedLinearAttention", based, 1, 1e-5),
        ("Comba", {"num_heads": 2, "head_dim": 8}, 1, 0.25),
    ):
        model = small(layer=layer, layer_options=options, norm_eps=0.25)
        attn = model.layers[1].attn
        assert (
            attn.layer_idx == index
            and getattr(attn, "eps", attn.o_norm.eps if layer == "Comba" else 0) == eps
        )
        assert model(tokens(2, 5, VOCAB))[0].shape == (2, 5, VOCAB)


@pytest.mark.parametrize("name", [*MODELS, *HYBRIDS])
@torch.no_grad()
def test_pieces_are_the_whole(name: str, device: torch.device) -> None:
    model, ids = loaded(name).to(device), tokens(2, 23, VOCAB).to(device)
    whole, expected = model(ids)
    for state in (None, model.init_state(2)):
        pieces = []
        for piece in ids.split([9, 1, 12, 1], dim=1):
            before = None if state is None else tuple(s.clone() for s in state)
            logits, new = model(piece, state)
            if state is not None:
                torch.testing.assert_close(state, before, rtol=0, atol=0)  # not written to
            state = new
            pieces.append(logits)
        close(torch.cat(pieces, dim=1), whole)
        close(state, expected)


@pytest.mark.parametrize("name", [*MODELS, *HYBRIDS])
@torch.no_grad()
def test_pads_change_nothing(name: str, device: torch.device) -> None:
    """Before, between or after the tokens, in a first call and in a later one, where rows have had unlike numbers."""
    model = loaded(name).to(device)
    ids = tokens(3, 18, VOCAB).to(device)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask[1, 3:5], mask[1, 9], mask[1, -1] = 0, 0, 0
    first, state = model(ids[:, :9], attention_mask=mask[:, :9])
    second, state = model(ids[:, 9:], state, attention_mask=mask)  # of the whole history: the last nine count
    last, _ = model(
        ids[:, 9:], model(ids[:, :9], attention_mask=mask[:, :9])[1], attention_mask=mask, last_only=True
    )
    after, _ = model(ids[:, :2], state)
    logits = torch.cat([first, second], dim=1)
    for row, is_token in enumerate(mask.bool()):
        alone, state = model(ids[row : row + 1, is_token])
        close(logits[row, is_token], alone[0])
        close(last[row], alone[0, -1])
        close(after[row], model(ids[row : row + 1, :2], state)[0][0])


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_packed_sequences_are_rows(name: str, device: torch.device) -> None:
    model, ids = loaded(name).to(device), tokens(1, 30, VOCAB).to(device)
    cut = [0, 1, 12, 25]
    cu_seqlens = torch.tensor(cut, device=device)
    packed, state = model(ids, cu_seqlens=cu_seqlens)
    more, state = model(ids, state, cu_seqlens=cu_seqlens)
    last, _ = model(ids, cu_seqlens=cu_seqlens, last_only=True)
    for n, (begin, end) in enumerate(zip(cut, cut[1:], strict=False)):
        logits, alone = model(ids[:, begin:end])
        close(packed[:, begin:end], logits)
        close(last[n], logits[0, -1])
        logits, alone = model(ids[:, begin:end], alone)
        close(more[:, begin:end], logits)
        close(tuple(s.select([n]) for s in state), alone)


# All keys of a sequence, and a window of grouped heads; a recurrence before, between and after them.
ATTENTION = [
    {"layers": [1], "num_heads": 2},
    {"layers": [2], "num_heads": 4, "num_kv_heads": 2, "window_size": 4, "qkv_bias": True},
]


def hybrid(**changes: Any) -> RecurrentLM:
    torch.manual_seed(0)
    return RecurrentLM(RecurrentConfig(**SMALL | {"num_hidden_layers": 4, "attn": ATTENTION} | changes))


def inside(y: Tensor, cut: list[int]) -> Tensor:
    return y[:, cut[0] : cut[-1]]


@pytest.mark.parametrize("started", [False, True])
def test_packed_sequences_of_a_hybrid_are_rows(started: bool, device: torch.device) -> None:
    """Values and gradients in float64; the tail, and a sequence without tokens, change none of them."""
    model, ids = hybrid().to(device, torch.float64), tokens(1, 30, VOCAB).to(device)
    parameters, cut = list(model.parameters()), [0, 1, 12, 12, 25]
    cu_seqlens = torch.tensor(cut, device=device)
    packed, state = model(ids, model.init_state(4) if started else None, cu_seqlens=cu_seqlens)
    alone = [model(ids[:, a:b]) for a, b in zip(cut, cut[1:], strict=False) if a < b]
    rows = torch.cat([logits for logits, _ in alone], 1)
    exact = {"atol": 1e-10, "rtol": 1e-10}
    torch.testing.assert_close(inside(packed, cut), rows, **exact)
    losses = (inside(packed, cut).sin().sum(), rows.sin().sum())
    torch.testing.assert_close(*(torch.autograd.grad(loss, parameters) for loss in losses), **exact)
    last, _ = model(ids, cu_seqlens=cu_seqlens, last_only=True)
    torch.testing.assert_close(last[[0, 1, 3]], torch.cat([logits[:, -1] for logits, _ in alone]), **exact)
    for n, (_, expected) in zip((0, 1, 3), alone, strict=True):
        torch.testing.assert_close(state[0].select([n]), expected[0], **exact)
        assert torch.equal(state[1].position[n], expected[1].position[0])


def flash(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *, window_size: Any
) -> Tensor:
    """What `varlen_attn` does, which has no kernel for CPUs and writes no places but those of its sequences."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and (max_q, max_k) == (len(q), len(k))
    assert all(
        cu[0] == 0 and cu[-1] == len(x) and x.is_contiguous() for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k))
    )
    outputs, (left, right) = [], window_size
    for n in range(len(cu_q) - 1):
        query, *others = (x[cu[n] : cu[n + 1]].transpose(0, 1) for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)))
        Q, K = query.shape[1], others[0].shape[1]
        age = (torch.arange(Q) + K - Q)[:, None] - torch.arange(K)  # the last query is beside the last key
        visible = (age >= -right) & ((age <= left) | (left < 0))
        o = torch.nn.functional.scaled_dot_product_attention(query, *others, attn_mask=visible)
        outputs.append(o.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("options", ATTENTION, ids=["all", "window"])
def test_packed_attention_by_flash_attention(
    options: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that by a mask, of one process and of two ranks."""
    torch.manual_seed(0)
    options = {name: x for name, x in options.items() if name != "layers"}
    layer = SoftmaxAttention(64, **options).to(device, torch.bfloat16)
    T, bounds = 20, torch.tensor([0, 3, 3, 17, 33], device=device)  # one on both ranks, and a tail
    q = torch.randn(1, 2 * T, layer.num_heads, layer.head_dim, device=device, dtype=torch.bfloat16)
    k, v = q.new_empty(2, 1, 2 * T, layer.num_kv_heads, layer.head_dim).normal_()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    do = torch.randn_like(q)

    def run(o: Tensor) -> Any:
        o = inside(o, [0, 33])
        return o, *torch.autograd.grad(o, inputs, inside(do, [0, 33]))

    with monkeypatch.context() as patched:
        patched.setattr(softmax_attention, "_has_flash", lambda q: False)
        expected = run(layer._attend_packed(q, k, v, bounds))
    if device.type == "cpu":
        monkeypatch.setattr(softmax_attention, "_has_flash", lambda q: True)
        module: Any = types.SimpleNamespace(varlen_attn=flash)
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    assert softmax_attention._has_flash(q)
    alone = run(layer._attend_packed(q, k, v, bounds))

    own = [(bounds - rank * T).clamp(0, T) for rank in range(2)]
    monkeypatch.setattr(softmax_attention, "gathered", lambda ranks, x: torch.stack(own))
    pieces = []
    for rank in range(2):
        monkeypatch.setattr(softmax_attention, "sharing", lambda: Ranks("", rank, 2, device.type))  # noqa: B023
        pieces.append(layer._attend_packed(q[:, rank * T : (rank + 1) * T], k, v, own[rank]))
    for actual in (alone, run(torch.cat(pieces, 1))):
        for a, b in zip(actual, expected, strict=True):
            # Both round to bfloat16, 2 ** -8, in places of their own.
            assert (a - b).norm() < 0.02 * b.norm()


def test_packed_hybrid_compiled(device: torch.device) -> None:
    """One graph for every number of tokens and of sequences, whose backward computes each block again."""
    attn = [ATTENTION[1] | {"layers": [1]}]
    model = hybrid(num_hidden_layers=2, attn=attn, gradient_checkpointing=True).to(device)
    recomputed = []

    def backward(graph: torch.fx.GraphModule, _: Any) -> Any:
        recomputed.append(sum("_chunk" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
    )
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=compiler)
    parameters = list(model.parameters())
    for cut, stance in (([0, 1, 12, 12, 25], "default"), ([0, 20, 41], "fail_on_recompile")):
        ids = tokens(1, cut[-1] + 5, VOCAB).to(device)
        cu_seqlens = torch.tensor(cut, device=device)
        with torch.compiler.set_stance(stance):
            actual, _ = compiled(ids, cu_seqlens=cu_seqlens)
        expected, _ = model(ids, cu_seqlens=cu_seqlens)
        close(inside(actual, cut), inside(expected, cut))
        losses = (inside(y, cut).square().mean() for y in (actual, expected))
        close(*(torch.autograd.grad(loss, parameters) for loss in losses))
    assert recomputed == [1]


def test_packed_hybrid_exported(device: torch.device) -> None:
    """With gradients on, in which a program does not compute blocks again."""
    model, ids = hybrid(gradient_checkpointing=True).to(device), tokens(1, 16, VOCAB).to(device)
    sizes = {"input_ids": {1: Dim("T", min=2, max=8192)}, "cu_seqlens": {0: Dim("N1", min=3, max=1025)}}
    cu_seqlens = torch.tensor([0, 5, 9, 16], device=device)
    program = torch.export.export(
        model, (ids,), {"cu_seqlens": cu_seqlens}, dynamic_shapes=sizes, strict=True
    ).module()
    for cut in ([0, 1, 3], [0, 64, 64, 130, 199]):
        ids, cu_seqlens = tokens(1, cut[-1] + 1, VOCAB).to(device), torch.tensor(cut, device=device)
        actual, expected = (f(ids, cu_seqlens=cu_seqlens)[0] for f in (program, model))
        close(inside(actual, cut), inside(expected, cut))


@torch.no_grad()
def test_nothing_goes_on_from_packed_attention() -> None:
    model, ids, cu_seqlens = hybrid(), tokens(1, 8, VOCAB), torch.tensor([0, 3, 8])
    rows = ids.view(2, 4)
    state = model(ids, cu_seqlens=cu_seqlens)[1]
    for given, options in ((ids, {"cu_seqlens": cu_seqlens}), (rows, {})):
        with pytest.raises(
            ValueError, match=r"state\[1\].cache must hold 2 .* got 0, as after a call with cu_seqlens"
        ):
            model(given, state, **options)
    with pytest.raises(
        ValueError, match="keys and values of softmax attention .* cu_seqlens, got a cache of 4 pl"
    ):
        model(ids, model(rows)[1], cu_seqlens=cu_seqlens)


class Kept(TorchDispatchMode):
    """How many bytes what is computed within it takes as long as it is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(outputs):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return outputs

    def bytes(self) -> int:
        return sum(size for storage, size in self.storages.values() if not storage.expired())


@pytest.mark.parametrize(
    "changes",
    [
        {"attn": ATTENTION[:1]},
        {"layer": "RWKV7Attention", "layer_options": {"head_dim": 16}, "feed_forward": "rwkv7"},
        {"layer": "HGRN2Attention", "layer_options": {"expand_ratio": 8}, "use_lower_bound": True},
    ],
    ids=["hybrid", "rwkv7", "hgrn2"],
)
def test_gradient_checkpointing(changes: dict[str, Any]) -> None:
    """The same bits of all gradients, through a state too, of less than half the memory."""
    model, ids = small(num_hidden_layers=4, **changes), tokens(2, 40, VOCAB)
    parameters = list(model.parameters())
    with torch.no_grad():
        for p in parameters:  # what begins at 0 would hide others
            p.add_(torch.randn_like(p), alpha=0.1)
    calls = []
    model.layers[0].attn.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))

    def step(checkpointed: bool) -> tuple[Any, int]:
        model.config = dataclasses.replace(model.config, gradient_checkpointing=checkpointed)
        with Kept() as kept:
            first, state = model(ids[:, :20])
            second, _ = model(ids[:, 20:], state)
            size = kept.bytes()
        return torch.autograd.grad((first.sin() + second.sin()).sum(), parameters, allow_unused=True), size

    (expected, whole), (actual, less) = step(False), step(True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert less < 0.5 * whole
    assert len(calls) == 2 + 4
    with torch.no_grad():
        model(ids)
    assert calls[6:] == [False]


def test_random_numbers_are_drawn_again_in_a_checkpoint() -> None:
    """As of a dropout that a user adds to a block."""
    model, ids = small(), tokens(2, 12, VOCAB)
    model.layers[0].attn.register_forward_hook(lambda _, args, y: (torch.dropout(y[0], 0.5, True), y[1]))
    gradients = []
    for checkpointed in (False, True):
        model.config = dataclasses.replace(model.config, gradient_checkpointing=checkpointed)
        torch.manual_seed(0)
        loss = model(ids)[0].sin().sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("name", [*MODELS, *HYBRIDS])
@torch.no_grad()
def test_greedy_generation_is_recomputation(name: str, device: torch.device) -> None:
    model, ids = loaded(name).to(device), tokens(3, 7, VOCAB).to(device)
    text, steps = ids, 6
    for _ in range(steps):
        text = torch.cat([text, model(text)[0][:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(ids, steps), text[:, 7:])
    assert len(text[:, 7:].unique()) > 1  # no one token always


@pytest.mark.parametrize("name", ["rwkv6", "retnet", *HYBRIDS])
def test_generation_after_pads(name: str, device: torch.device) -> None:
    model, ids = loaded(name).to(device), tokens(2, 9, VOCAB).to(device)
    for pads in (slice(0, 4), slice(5, 9)):
        mask = torch.ones_like(ids)
        mask[0, pads] = 0
        alone = [model.generate(ids[row : row + 1, mask[row].bool()], 6) for row in (0, 1)]
        assert torch.equal(model.generate(ids, 6, attention_mask=mask), torch.cat(alone))


@pytest.mark.parametrize("name", GOLDENS)
def test_gradients_reach_every_parameter(name: str) -> None:
    model, ids = loaded(name), tokens(2, 12, VOCAB)
    logits, _ = model(ids[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    # The clamped decays of this model are all at their least, so that their projection does nothing.
    still = ".gk_proj." if name == "gla varied" else None
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
        assert parameter.grad.any() or (still is not None and still in key), key


# What follows Dynamo takes most of a minute for a model, and Inductor trains one in tests/test_example.py.
@pytest.mark.parametrize("name", ["gla hybrid", "rwkv6", "rwkv7 varied", "hgrn2"])
def test_compiled(name: str, device: torch.device) -> None:
    """One graph serves every length, forward and backward. What follows Dynamo sees blocks in the next test."""
    model = loaded(name).to(device)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    parameters = list(model.parameters())
    for length, stance in ((20, "default"), (33, "fail_on_recompile"), (70, "fail_on_recompile")):
        ids = tokens(2, length, VOCAB).to(device)
        with torch.compiler.set_stance(stance):
            actual = compiled(ids)
        expected = model(ids)
        close(actual, expected)
        grads = (torch.autograd.grad(out[0].square().mean(), parameters) for out in (actual, expected))
        close(*grads)


@pytest.mark.parametrize(
    ("graphs", "changes"),
    [
        (1, {}),
        (2, {"layer": "RWKV7Attention", "layer_options": {"head_dim": 16}, "feed_forward": "rwkv7"}),
        (2, {"layer": "HGRN2Attention", "layer_options": {"expand_ratio": 8}, "use_lower_bound": True}),
    ],
    ids=["gla", "rwkv7", "hgrn2"],
)
def test_compiled_blocks_share_a_graph(graphs: int, changes: dict[str, Any]) -> None:
    """All but the first, which differs from the others in RWKV7 and HGRN2, whatever their place in the model is."""
    model, ids = small(num_hidden_layers=4, **changes), tokens(2, 9, VOCAB)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(ids)[0].square().mean(), parameters, allow_unused=True)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers:
        block.compile(fullgraph=True, backend=counter)
    close(torch.autograd.grad(model(ids)[0].square().mean(), parameters, allow_unused=True), expected)
    assert counter.frame_count == graphs


def test_generates_compiled(device: torch.device) -> None:
    model, ids = loaded("gla hybrid").to(device), tokens(2, 7, VOCAB).to(device)
    expected = model.generate(ids, 6)
    model.compile(fullgraph=True, backend="eager")
    assert torch.equal(model.generate(ids, 6), expected)


@pytest.mark.parametrize("name", ["rwkv7 varied", "hgrn2", "gated_deltanet hybrid"])
@torch.no_grad()
def test_exported(name: str, device: torch.device) -> None:
    if "hybrid" in name and device.type == "cuda" and torch.__version__ < "2.12":
        pytest.skip("PyTorch 2.11 exports softmax attention on CUDA at lengths that 8 divides alone")
    model, ids = loaded(name).to(device), tokens(1, 16, VOCAB).to(device)
    T = Dim("T", min=2, max=8192)
    program = torch.export.export(model, (ids,), dynamic_shapes={"input_ids": {1: T}}).module()
    for length in (3, 64, 65, 200):
        ids = tokens(1, length, VOCAB).to(device)
        close(program(ids), model(ids))


@torch.no_grad()
def test_exported_with_its_state(device: torch.device) -> None:
    """Saved and loaded again, the state of the channel mixing among the inputs."""
    model, ids = loaded("rwkv6").to(device), tokens(2, 16, VOCAB).to(device)
    state = model(ids)[1]
    shapes = torch.export.ShapesCollection()
    shapes[ids] = {1: Dim("T", min=2, max=8192)}
    dynamic = shapes.dynamic_shapes(model, (ids, state))
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (ids, state), dynamic_shapes=dynamic), file)
    file.seek(0)
    ids = tokens(2, 70, VOCAB).to(device)
    close(torch.export.load(file).module()(ids, state), model(ids, state))


@pytest.mark.parametrize("name", GOLDENS)
def test_saved_and_loaded(name: str) -> None:
    model, ids = loaded(name), tokens(1, 5, VOCAB)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    config = RecurrentConfig(**json.loads(json.dumps(dataclasses.asdict(model.config))))
    again = RecurrentLM(config)
    again.load_state_dict(torch.load(file))
    torch.testing.assert_close(again(ids), model(ids), rtol=0, atol=0)


@torch.no_grad()
def test_state_of_a_beam(device: torch.device) -> None:
    """Sequences are chosen and copied as in every state; a softmax layer's cache among them."""
    model, ids = loaded("gla hybrid").to(device), tokens(3, 9, VOCAB).to(device)
    order = [2, 0, 0]
    _, state = model(ids)
    logits, _ = model(ids[:, :1], tuple(s.select(order) for s in state))
    close(logits, model(torch.cat([ids[order], ids[:, :1]], 1))[0][:, -1:])
    cast = [s.to(torch.bfloat16) for s in state]
    assert cast[1].cache[0].dtype == torch.bfloat16 and cast[1].position.dtype == torch.int64
    assert cast[0].recurrent.dtype == torch.float32
    # A cache in another dtype is read, here with the three digits of bfloat16.
    exact, rounded = (model(ids[:, :1], given)[0] for given in (state, cast))
    assert 0 < (rounded - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("name", ["rwkv6", "rwkv7", "gla hybrid"])
@torch.no_grad()
def test_dtypes_of_states(name: str, device: torch.device) -> None:
    """Those of a first call are those of `init_state`, in bfloat16 and under autocast: one graph for all calls."""
    ids = tokens(2, 9, VOCAB).to(device)
    model = loaded(name).to(device)
    exact, _ = model(ids)
    for autocast in (False, True):
        model = loaded(name).to(device) if autocast else loaded(name).to(device, torch.bfloat16)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            start = model.init_state(2)
            logits, state = model(ids)
        for first, later in zip(start, state, strict=True):
            dtypes = [[t.dtype for t in torch.utils._pytree.tree_leaves(s)] for s in (first, later)]
            assert dtypes[0] == dtypes[1]
        # bfloat16 has three digits; a layer that is wrong is off by the size of the logits.
        assert (logits.float() - exact).norm() < 0.1 * exact.norm()


@torch.no_grad()
def test_every_layer_makes_a_model() -> None:
    """Those too that no model of flash-linear-attention loads."""
    options: dict[str, dict[str, Any]] = {
        "Mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8},
        "HGRNAttention": {"expand_ratio": 2},
        "LightningAttention": {"num_heads": 2, "head_dim": 16, "num_layers": 2},
        "GriffinRecurrentBlock": {"num_heads": 2},
    }
    for layer, given in options.items():
        bounds = layer == "HGRNAttention"
        model = small(layer=layer, layer_options=given, use_lower_bound=bounds, tie_word_embeddings=True)
        logits, state = model(tokens(2, 5, VOCAB))
        assert logits.shape == (2, 5, VOCAB)
        if bounds:
            assert model.lower_bounds.shape == (2, 64)


@pytest.mark.parametrize("attention", [0, 1])
def test_rwkv7_beside_softmax_attention(attention: int, device: torch.device) -> None:
    """The first layer of RWKV7, which need not be the first of the model, gives its values to the other ones."""
    torch.manual_seed(0)
    attn = [{"layers": [attention], "num_heads": 2}]
    rwkv7: dict[str, Any] = {
        "layer": "RWKV7Attention",
        "layer_options": {"head_dim": 16},
        "feed_forward": "rwkv7",
        "num_hidden_layers": 4,
    }
    model = small(**rwkv7, attn=attn).to(device)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    first, *others = [block.attn for i, block in enumerate(model.layers) if i != attention]
    assert not hasattr(first, "v_lora") and all(hasattr(layer, "v_lora") for layer in others)
    made, given = [], []
    first.register_forward_hook(lambda _, args, results: made.append(results[2]))
    for layer in others:
        layer.register_forward_pre_hook(
            lambda _, args, options: given.append(options["v_first"]), with_kwargs=True
        )
    ids = tokens(2, 12, VOCAB).to(device)
    whole, _ = model(ids)
    assert len(made) == 1 and len(given) == 2 and all(v is made[0] for v in given)
    whole.square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    state, pieces = model.init_state(2), []
    for piece in ids.split([7, 1, 4], dim=1):
        logits, state = model(piece, state)
        pieces.append(logits)
    close(torch.cat(pieces, dim=1), whole)


def test_norm_eps_of_a_layer() -> None:
    assert small(norm_eps=0.5).layers[0].attn.g_norm_swish_gate.eps == 0.5
    assert (
        small(layer_options={"num_heads": 2, "norm_eps": 0.25}).layers[0].attn.g_norm_swish_gate.eps == 0.25
    )


class TestSampling:
    LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0]])

    def drawn(self, **options: Any) -> Tensor:
        """How often each of the tokens is drawn in 20,000 rows."""
        given = {"temperature": 1.0, "top_k": None, "top_p": None} | options
        generator = torch.Generator().manual_seed(0)
        drawn = next_token(self.LOGITS.expand(20_000, -1), generator=generator, **given)
        return torch.bincount(drawn, minlength=4) / 20_000

    def expect(self, drawn: Tensor, logits: Tensor) -> None:
        # The standard deviation of a mean of 20,000 draws is at most 0.5 / 20,000 ** 0.5 = 0.0036.
        torch.testing.assert_close(drawn, logits.softmax(-1), atol=0.018, rtol=0)
        assert torch.equal(drawn > 0, logits > -torch.inf)

    def test_temperature(self) -> None:
        self.expect(self.drawn(), self.LOGITS[0])
        self.expect(self.drawn(temperature=2.0), self.LOGITS[0] / 2)

    @pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-45, 5e-324])
    def test_smallest_temperatures(self, temperature: float) -> None:
        """They take the likeliest token, and among equals each; none of them makes a logit infinite."""
        self.expect(
            self.drawn(temperature=temperature), torch.tensor([-torch.inf, 0.0, -torch.inf, -torch.inf])
        )
        ties = torch.tensor([[3e38, -3e38, 3e38, 2e38]]).expand(2_000, -1)
        generator = torch.Generator().manual_seed(0)
        drawn = next_token(ties, temperature, None, None, generator)
        assert drawn.unique().tolist() == [0, 2]

    def test_top_k(self) -> None:
        kept = torch.tensor([-torch.inf, 3.0, -torch.inf, 2.0])
        self.expect(self.drawn(top_k=2), kept)
        self.expect(self.drawn(top_k=9), self.LOGITS[0])

    def test_top_p(self) -> None:
        """The softmax is 0.64, 0.24, 0.09 and 0.03."""
        kept = torch.tensor([-torch.inf, 3.0, -torch.inf, 2.0])
        self.expect(self.drawn(top_p=0.7), kept)
        self.expect(self.drawn(top_p=0.87), kept)
        self.expect(self.drawn(top_p=0.9), torch.tensor([-torch.inf, 3.0, 1.0, 2.0]))
        self.expect(self.drawn(top_p=1e-9), torch.tensor([-torch.inf, 3.0, -torch.inf, -torch.inf]))
        self.expect(self.drawn(top_p=1.0), self.LOGITS[0])

    def test_generate(self) -> None:
        model, ids = loaded("gla"), tokens(3, 5, VOCAB)
        greedy = model.generate(ids, 8)
        assert torch.equal(model.generate(ids, 8, temperature=1.0, top_k=1), greedy)
        assert torch.equal(model.generate(ids, 8, temperature=1.0, top_p=1e-6), greedy)

        def sampled(seed: int) -> Tensor:
            return model.generate(ids, 8, temperature=1.5, generator=torch.Generator().manual_seed(seed))

        assert torch.equal(sampled(1), sampled(1)) and not torch.equal(sampled(1), sampled(2))

    def test_ends(self) -> None:
        """A row that has ended is filled up; when all have, there are no more tokens."""
        model, ids = loaded("gla"), tokens(2, 5, VOCAB)
        endless = model.generate(ids, 12)
        end = int(endless[0, 2])
        ended = [row.tolist().index(end) if end in row else 12 for row in endless]
        assert ended[0] <= 2 and ended[0] != ended[1]
        actual = model.generate(ids, 12, eos_token_id=end)
        assert actual.shape[1] == min(12, max(ended) + 1)
        for row, stop, whole in zip(actual, ended, endless, strict=True):
            assert torch.equal(row[: stop + 1], whole[: stop + 1][: len(row)])
            assert (row[stop:] == end).all()
        both = model.generate(ids, 12, eos_token_id=[end, int(endless[1, 0])])
        assert torch.equal(both[1], torch.tensor([endless[1, 0], *[end] * (both.shape[1] - 1)]))


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"vocab_size": 0}, ValueError, "vocab_size must be"),
        ({"hidden_size": 3.0}, TypeError, "hidden_size must be an int"),
        ({"layer": "RMSNorm"}, ValueError, "layer must be one of .*ABCAttention, .* got 'RMSNorm'"),
        ({"layer_options": [2]}, TypeError, "layer_options must be a mapping, got list"),
        ({"layer_options": {"hidden_size": 2}}, ValueError, "layer_options must not hold hidden_size"),
        ({"feed_forward": "none"}, ValueError, "intermediate_size must be None where feed_forward is 'none', got"),
        ({"feed_forward": "relu"}, ValueError, "feed_forward must be one of swiglu, rwkv6, rwkv7, none, got 'relu'"),
        ({"layer": "RWKV7Attention", "layer_options": {"num_hidden_layers": 2}}, ValueError,
         "layer_options must not hold num_hidden_layers, which the model gives its layers"),
        ({"feed_forward_act": "tanh"}, ValueError, "feed_forward_act must be one of relu, .* got 'tanh'"),
        ({"norm": "batch"}, ValueError, "norm must be one of rms, layer, got 'batch'"),
        ({"norm_eps": -1}, ValueError, "norm_eps must be at least 0, got -1"),
        *(
            ({flag: "yes"}, TypeError, f"^{flag} must be a bool, got 'yes'$")
            for flag in (
                "norm_bias", "norm_embeddings", "use_lower_bound", "tie_word_embeddings", "gradient_checkpointing",
            )
        ),
        ({"use_lower_bound": True}, ValueError, "use_lower_bound must be False with GatedLinearAttention"),
        ({"attn": {"layers": [0]}}, TypeError, "attn must be a sequence of mappings, got dict"),
        ({"attn": [3]}, TypeError, r"attn\[0\] must be a mapping, got int"),
        ({"attn": [{"layers": 0, "num_heads": 2}]}, TypeError,
         r"attn\[0\]\['layers'\] must be a list of indices, got 0"),
        ({"attn": [{"layers": [1], "num_heads": 2}, {"layers": [0, 1], "num_heads": 2}]}, ValueError,
         r"attn\[1\]\['layers'\] must hold indices .* at most once in attn, got 1"),
        ({"attn": [{"layers": [1], "num_heads": 2, "num_kv_heads": 3}]}, ValueError,
         "num_kv_heads must divide num_heads"),
        ({"attn": [{"layers": [1], "num_heads": 2, "qkv_bias": "no"}]}, TypeError,
         "qkv_bias must be a bool, got 'no'"),
        ({"attn": [{"layers": [1], "num_heads": 2, "window_size": 0}]}, ValueError, "window_size must be"),
        ({"attn": [{"layers": [1], "num_heads": 2, "rope_theta": 0}]}, ValueError,
         "rope_theta must be positive, got 0"),
        ({"layer_options": {"num_head": 2}}, ValueError,
         "layer_options: a key must be one of mode, .* got 'num_head', of GatedLinearAttention"),
        ({"layer_options": {1: 2}}, ValueError, "layer_options: a key must be one of mode, .* got 1, of"),
        ({"layer": "LightningAttention"}, ValueError,
         r"layer_options must have the key 'num_layers', which LightningAttention .* got \['num_heads'\]"),
    ],
)  # fmt: skip
def test_errors_of_a_config(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        small(**changes)


def test_errors_of_a_call() -> None:
    model, ids = small(), tokens(2, 5, VOCAB)
    state, one = model.init_state(2), torch.tensor([0, 5])
    six = small(num_hidden_layers=6)  # as many as a RecurrentState has parts
    mask, wider = torch.ones_like(ids), small(layer_options={"num_heads": 2, "expand_k": 1.0})
    for call, error, message in [
        (lambda: RecurrentLM(SMALL), TypeError, "config must be a RecurrentConfig, got dict"),  # type: ignore[arg-type]
        (lambda: model(ids.float()), TypeError, "input_ids must be int32 or int64, got float32"),
        (lambda: model(ids.byte()), TypeError, "input_ids must be int32 or int64, got uint8"),
        (lambda: model(ids, last_only="no"), TypeError, "last_only must be a bool, got 'no'"),
        (lambda: RecurrentLM(model.config, dtype=torch.int32), TypeError, "dtype must be float32, .* got int32"),
        (lambda: model(ids[0]), ValueError, r"input_ids must have shape \[B, T\], none 0, got \(5,\)"),
        (lambda: model(ids[:, :0]), ValueError, r"input_ids must have shape .* got \(2, 0\)"),
        (lambda: model(ids, state[:1]), ValueError, "state must be a tuple of 2 RecurrentState, got 1"),
        (lambda: model(ids, state[0].recurrent), ValueError, "state must be a tuple of 2 .*, got Tensor"),
        (lambda: model(ids, mask), ValueError, "state must be a tuple of 2 RecurrentState, got Tensor"),
        (lambda: model(ids, state[0]), ValueError, "state must be a tuple of 2 .*, got a RecurrentState"),
        (lambda: six(ids, state[0]), ValueError, "state must be a tuple of 6 .*, got a RecurrentState"),
        (lambda: model(ids, model.init_state(3)), ValueError, r"state\[0\].recurrent must have shape"),
        (lambda: model(ids, (state[0], model.init_state(3)[1])), ValueError,
         r"state\[1\].recurrent must have shape \(2, 2, 8, 16\), got \(3, 2, 8, 16\)"),
        (lambda: model(ids[:1], (model.init_state(1)[0], state[1]), cu_seqlens=one), ValueError,
         r"state\[1\].recurrent must have shape \(1, 2, 8, 16\), got \(2, 2, 8, 16\)"),
        (lambda: model(ids, (state[0], state[1].map(lambda t: t.to("meta")))), ValueError,
         r"state\[1\].recurrent must be on cpu, got meta"),
        (lambda: model(ids, wider.init_state(2)), ValueError,
         r"state\[0\].recurrent must have shape \(2, 2, 8, 16\), got \(2, 2, 16, 16\)"),
        (lambda: model(ids, (state[0], RecurrentState(()))), TypeError,
         r"state\[1\].recurrent must be a tensor, got tuple"),
        (lambda: model(ids, (None, None)), TypeError, r"state\[0\] must be a RecurrentState, got NoneType"),
        (lambda: model(ids, attention_mask=mask[:1]), ValueError, "attention_mask must have shape"),
        (lambda: model(ids, cu_seqlens=one), ValueError, "cu_seqlens needs hidden_states of one row"),
        (lambda: model(ids[:1], attention_mask=mask[:1], cu_seqlens=one), ValueError, "exclude each other"),
        (lambda: model.generate(ids, 0), ValueError, "max_new_tokens must be"),
        (lambda: model.generate(ids, 1, temperature=-1), ValueError, "temperature must be at least 0, got -1"),
        (lambda: model.generate(ids, 1, top_k=2), ValueError, "top_k must not be given at temperature 0"),
        (lambda: model.generate(ids, 1, top_p=0.5), ValueError, "top_p must not be given at temperature 0"),
        (lambda: model.generate(ids, 1, temperature=1, top_k=0), ValueError, "top_k must be"),
        (lambda: model.generate(ids, 1, temperature=1, top_p=1.5), ValueError, "top_p must be at most 1, got 1.5"),
        (lambda: model.generate(ids, 1, eos_token_id=11), ValueError, "eos_token_id must be below vocab_size = 11"),
        (lambda: model.generate(ids, 1, eos_token_id="2"), TypeError, "eos_token_id must be an int"),
        (lambda: model.generate(ids, 1, eos_token_id=[]), ValueError, "eos_token_id must hold at least one"),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_errors_of_a_compiled_call(fullgraph: bool) -> None:
    """They name the entry of the state too, although Dynamo traces little of what exceptions can do."""
    model = small()
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    wrong = (model.init_state(2)[0], model.init_state(3)[1])
    error = torch._dynamo.exc.Unsupported if fullgraph else ValueError
    with pytest.raises(
        error, match=r"state\[1\].recurrent must have shape \(2, 2, 8, 16\), got \(3, 2, 8, 16\)"
    ):
        compiled(tokens(2, 5, VOCAB), wrong)


def test_errors_of_a_hybrid() -> None:
    model, ids = loaded("gla hybrid"), tokens(1, 5, VOCAB)
    recurrent, attention = model(ids)[1]
    keys, values = attention.cache
    for cache, error, message in [
        ((keys,), ValueError, "state.cache must hold 2 tensors, got 1"),
        ((keys, values[:, :3]), ValueError, r"state.cache\[1\] must have shape \(1, 5, 2, 8\), got \(1, 3, 2, 8\)"),
        ((keys[0], values[0]), ValueError, r"state.cache\[0\] must have shape \(1, 0, 2, 8\), got \(5, 2, 8\)"),
        ((), ValueError, "state.cache must hold 2 tensors, got 0"),
        (keys, TypeError, "state.cache must be a tuple of tensors, got Tensor"),
    ]:  # fmt: skip
        with pytest.raises(error, match=message.replace("state", r"^state\[1\]")):
            model(ids, (recurrent, attention._replace(cache=cache)))
    with pytest.raises(ValueError, match=r"^state\[1\].recurrent must hold 0 tensors, got 1"):
        model(ids, (recurrent, RecurrentState((keys,), position=attention.position, cache=attention.cache)))
    with pytest.raises(TypeError, match=r"^state\[0\].recurrent must be a tensor, got tuple"):
        model(ids, (attention, recurrent))
