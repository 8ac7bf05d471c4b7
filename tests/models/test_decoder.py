"""A decoder's steps are those of the model, however long it runs."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from contract.accuracy import error
from torch import Tensor
from torch._functorch.aot_autograd import aot_export_module
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from flacompose import layers
from flacompose.layers import GatedLinearAttention, join_projections
from flacompose.models import Decoder, RecurrentConfig, RecurrentLM
from flacompose.ops import fused_recurrent_gated_delta_rule, fused_recurrent_gla, fused_recurrent_simple_gla

# PyTorch does what Inductor, as in the tests without it, would generate code for.
LITE = torch._inductor.list_mode_options("lite")
LAYERS: dict[str, dict[str, Any]] = {
    "GatedLinearAttention": {"num_heads": 2, "use_short_conv": True},
    "GatedDeltaNet": {"num_heads": 2, "head_dim": 8},
    "RWKV6Attention": {"num_heads": 2, "proj_low_rank_dim": 4, "gate_low_rank_dim": 4},
    "RWKV7Attention": {"head_dim": 16},
    "ABCAttention": {"num_heads": 2, "num_slots": 8},
    "MultiScaleRetention": {"num_heads": 2},
}


def model_of(
    layer: str,
    device: torch.device,
    dtype: torch.dtype = torch.float64,
    hidden_size: int = 32,
    **options: Any,
) -> RecurrentLM:
    torch.manual_seed(0)
    feed_forward = {"RWKV6Attention": "rwkv6", "RWKV7Attention": "rwkv7"}.get(layer, "swiglu")
    config = RecurrentConfig(
        vocab_size=20,
        hidden_size=hidden_size,
        num_hidden_layers=2,
        intermediate_size=32,
        layer=layer,
        layer_options=EVERY_LAYER[layer],
        feed_forward=feed_forward,
        **options,
    )
    model = RecurrentLM(config, device=device, dtype=dtype).requires_grad_(False)
    for p in model.parameters():
        if not p.any():  # as the last projection of each layer of RWKV7, which then has no effect
            p.normal_(std=0.1)
    return model


def started(model: RecurrentLM, device: torch.device, B: int = 2) -> tuple[Tensor, Any]:
    """The tokens after a prompt, and the state after it."""
    ids = torch.randint(20, (B, 7), device=device)
    logits, state = model(ids, last_only=True)
    return logits.argmax(-1, keepdim=True), state


# Token shifts of two blocks, where the first layer's values go to the second one, and two recurrences with positions;
# `test_generate` has convolutions.
@pytest.mark.parametrize("layer", ["RWKV7Attention", "ABCAttention"])
def test_steps_are_those_of_the_model(layer: str, device: torch.device) -> None:
    model = model_of(layer, device)
    tokens, state = started(model, device)
    before = pytree.tree_map(torch.clone, state)
    decoder = Decoder(model, tokens, state, options=LITE)
    for _ in range(10):
        logits = decoder(tokens)
        expected, state = model(tokens, state)
        torch.testing.assert_close(logits, expected, atol=1e-9, rtol=1e-9)
        tokens = expected[:, -1].argmax(-1, keepdim=True)
    torch.testing.assert_close(decoder.state, state, atol=1e-9, rtol=1e-9)
    # From a state that it is given it goes on as from any other.
    decoder.load(before)
    for x, y in zip(pytree.tree_leaves(decoder.state), pytree.tree_leaves(before), strict=True):
        assert torch.equal(x, y)


def test_generate(device: torch.device) -> None:
    """One decoder makes the steps of several calls, and draws and ends as the model does."""
    model = model_of("GatedDeltaNet", device)
    ids = torch.randint(20, (2, 7), device=device)
    decoder = Decoder(model, ids[:, :1], model.init_state(2))
    for options in ({}, {"temperature": 0.7, "top_k": 5}, {"attention_mask": torch.ones_like(ids).triu(1)}):
        for end in (None, int(model.generate(ids, 3)[0, 2])):
            both = []
            for by in (None, decoder):
                generator = torch.Generator(device).manual_seed(1)
                both.append(
                    model.generate(ids, 9, eos_token_id=end, decoder=by, generator=generator, **options)
                )
            assert torch.equal(*both)
    other = model_of("GatedDeltaNet", device)
    for changes, kind, message in (
        ({"decoder": model}, TypeError, "decoder must be a Decoder, got RecurrentLM"),
        ({"decoder": Decoder(other, ids[:, :1], other.init_state(2))}, ValueError, "made of another model"),
        ({"decoder": decoder, "assistant": other}, ValueError, "must not be given with an assistant"),
    ):
        with pytest.raises(kind, match=message):
            model.generate(ids, 3, **changes)
    with pytest.raises(
        ValueError, match=r"made for tokens of shape \(1, 1\) in .*, but was made for \(2, 1\)"
    ):
        model.generate(ids[:1], 3, decoder=decoder)


def test_fused_projections(device: torch.device) -> None:
    model = model_of("GatedDeltaNet", device)
    tokens, state = started(model, device)
    expected, _ = model(tokens, state)
    join_projections(model)
    decoder = Decoder(model, tokens, state, options=LITE)
    torch.testing.assert_close(decoder(tokens), expected, atol=1e-9, rtol=1e-9)


def test_a_thousand_tokens(device: torch.device) -> None:
    """The last token's logits, and the state, are those of one call with all tokens."""
    model = model_of("GatedLinearAttention", device)
    tokens, state = started(model, device)
    decoder = Decoder(model, tokens, state)
    read = torch.randint(20, (2, 1000), device=device)
    for t in range(1000):
        logits = decoder(read[:, t : t + 1])
    expected, state = model(read, state)
    torch.testing.assert_close(logits[:, -1], expected[:, -1], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(decoder.state, state, atol=1e-9, rtol=1e-9)


def test_what_was_returned_stays(device: torch.device) -> None:
    model = model_of("GatedLinearAttention", device)
    tokens, state = started(model, device)
    decoder = Decoder(model, tokens, state)
    logits, held = decoder(tokens), decoder.state
    copies = pytree.tree_map(torch.clone, (logits, held))
    decoder(tokens)
    for x, y in zip(pytree.tree_leaves((logits, held)), pytree.tree_leaves(copies), strict=True):
        assert torch.equal(x, y)
    decoder.load(held)  # also a copy: a call does not change it
    decoder(tokens)
    assert all(
        torch.equal(x, y)
        for x, y in zip(pytree.tree_leaves(held), pytree.tree_leaves(copies[1]), strict=True)
    )


def test_a_layer_a_choice_of_tokens_and_new_weights(device: torch.device) -> None:
    """It takes any function, whose outputs may be a pytree, and sees values that are written into parameters."""
    layer = GatedLinearAttention(hidden_size=16, num_heads=2, device=device, dtype=torch.float64)
    layer.requires_grad_(False)
    x = torch.randn(3, 1, 16, device=device, dtype=torch.float64)

    def step(x: Tensor, state: Any) -> tuple[Any, Any]:
        y, state = layer(x, state)
        return {"y": y, "chosen": y.argmax(-1)}, state

    state = layer.init_state(3)
    decoder = Decoder(step, x, state)
    for scale in (1.0, 2.0):
        layer.o_proj.weight.mul_(scale)
        y, state = layer(x, state)
        out = decoder(x)
        torch.testing.assert_close(out["y"], y, atol=1e-9, rtol=1e-9)
        assert torch.equal(out["chosen"], y.argmax(-1))


def test_states_that_share_memory(device: torch.device) -> None:
    """A new state may be made of the old one: parts change places, or are passed on."""

    def step(x: Tensor, state: Any) -> tuple[Any, Any]:
        a, b, c, d = state
        return (x, a.clone(), b), (b, a, c, d[:1].expand(2))

    def filled(*values: float) -> list[Tensor]:
        return [torch.full((3,), value, device=device) for value in values]

    tokens, state = filled(0)[0], (*filled(1, 2, 3), torch.tensor([4.0, 5.0], device=device))
    decoder = Decoder(step, tokens, state)
    outputs = [decoder(*filled(i)) for i in range(3)]
    assert [[x[0].item() for x in o] for o in outputs] == [[0, 1, 2], [1, 2, 1], [2, 1, 2]]
    assert [x.tolist() for x in decoder.state] == [[2] * 3, [1] * 3, [3] * 3, [4, 4]]


def test_as_many_decoders_as_wanted(device: torch.device) -> None:
    """The compilations of one do not count for another."""

    def step(n: int, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return x + state, state + n

    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for n in (1, 2, 3):
            zeros = torch.zeros(n, device=device)
            decoder = Decoder(partial(step, n), zeros, zeros)
            decoder(zeros)
            assert decoder(zeros).tolist() == [n] * n


def add(x: Tensor, state: Any) -> tuple[Any, Any]:
    return x, (state[0] + x,)


X = torch.zeros(2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, X, (X,)), TypeError, "model must be a module or a function, got int"),
        ((add, [1], (X,)), TypeError, "tokens must be a plain tensor, got list of 1"),
        ((add, X, (X, 1)), TypeError, r"state\[1\] must be a plain tensor, got int"),
        ((add, X, None), TypeError, "state must be a plain tensor, got NoneType"),
        ((add, X, (X.to("meta"),)), ValueError, r"state\[0\] must be on cpu, got meta"),
        ((lambda x, s: x, X, (X,)), TypeError, r"model must return \(outputs, state\), got Tensor"),
        ((lambda x, s: (x, s, 1), X, (X,)), TypeError, r"model must return \(outputs, state\), got tuple of 3"),
        ((lambda x, s: (None, s), X, (X,)), TypeError, "outputs of model must be a plain tensor, got NoneType"),
        ((lambda x, s: ({"n": 3}, s), X, (X,)), TypeError, r"outputs of model\['n'\] must be .*, got int"),
        ((lambda x, s: (x, (3,)), X, (X,)), TypeError, r"state\[0\], as model returns it, must be .*, got int"),
        ((lambda x, s: (x, s[0]), X, (X,)), ValueError,
         r"model must return as state what the decoder was made with, a pytree of state\[0\], got Tensor: state"),
        ((lambda x, s: (x, (torch.cat([s[0], x]),)), X, (X,)), ValueError,
         r"state\[0\] must be \(2,\), torch.float32 on cpu, got \(4,\), .*; the state of softmax attention grows"),
        ((lambda x, s: (x, (s[0].double(),)), X, (X,)), ValueError, r"got \(2,\), torch.float64 on cpu$"),
    ],
)  # fmt: skip
def test_errors_of_models(arguments: tuple[Any, Any, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Decoder(*arguments)


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the decoder, and no padding, for which parts of a wide product would be copied; then the caller's."""
    compile, asked = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda f, **kw: asked.append(kw["options"]) or compile(f, **kw))
    Decoder(add, X, (X,))
    Decoder(add, X, (X,), options={"comprehensive_padding": True})
    ours, theirs = asked
    assert (ours["comprehensive_padding"], theirs["comprehensive_padding"]) == (False, True)
    assert ours["coordinate_descent_tuning"] and theirs["coordinate_descent_tuning"]


def test_a_pass_of_the_user(device: torch.device) -> None:
    """It is kept, and states are not marked for the pass that it takes the place of."""
    targets: set[object] = set()

    def look(graph: torch.fx.Graph) -> None:
        targets.update(node.target for node in graph.nodes)

    x = torch.ones(2, device=device)
    with torch._inductor.config.patch(post_grad_custom_pre_pass=look):
        Decoder(add, x, (x,))(x)
    assert torch.ops.aten.add.Tensor in targets and torch.ops.flacompose.replaceable.default not in targets


def test_errors(device: torch.device) -> None:
    x = torch.zeros(2, device=device)
    with pytest.raises(TypeError, match="options must be a mapping, got int"):
        Decoder(add, x, (x,), options=3)
    decoder = Decoder(add, x, (x,))
    with pytest.raises(
        ValueError, match=r"tokens must have shape \(2,\), as the decoder was made with, got \(3,\)"
    ):
        decoder(torch.zeros(3, device=device))
    with pytest.raises(
        TypeError, match="tokens must be torch.float32, as the decoder was made with, got torch.int64"
    ):
        decoder(torch.zeros(2, dtype=torch.int64, device=device))
    with pytest.raises(TypeError, match="tokens must be a plain tensor, got int"):
        decoder(1)
    with pytest.raises(ValueError, match="tokens must be on"):
        decoder(torch.zeros(2, device="meta"))
    with pytest.raises(
        ValueError, match=r"state must be what the decoder was made with, .*state\[0\], got Tensor"
    ):
        decoder.load(x)
    by_name = Decoder(lambda x, s: (x, s), x, {"a": x, "b": x})
    with pytest.raises(
        ValueError, match=r"got dict: state\['b'\], state\['a'\]; the order of their keys counts"
    ):
        by_name.load({"b": x, "a": x})
    with pytest.raises(ValueError, match=r"state\[0\] must have shape \(2,\)"):
        decoder.load((torch.zeros(1, device=device),))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a Decoder cannot be copied or pickled"):
            copied(decoder)
    assert decoder.state[0].tolist() == [0, 0]


def test_nothing_is_kept_alive(device: torch.device) -> None:
    """A decoder that is deleted frees its memory and lets go of the model at once, without a garbage collection."""
    model = torch.nn.Linear(2, 2, device=device)
    decoder = Decoder(
        lambda x, s: (model(x), (s[0] + x,)), torch.zeros(2, device=device), (torch.zeros(2, device=device),)
    )
    decoder(torch.zeros(2, device=device))
    torch._dynamo.reset()
    held = weakref.ref(decoder), weakref.ref(decoder._state[0])
    gc.disable()
    try:
        del decoder
        assert [x() for x in held] == [None, None]
    finally:
        gc.enable()


def test_random_numbers_and_inference_mode(device: torch.device) -> None:
    """Making a decoder draws no numbers that later calls would have drawn, and may be done in inference mode."""
    x = torch.zeros(4, device=device)
    torch.manual_seed(0)
    expected = torch.rand(4, device=device)
    torch.manual_seed(0)
    with torch.inference_mode():
        decoder = Decoder(lambda x, s: (x + torch.rand_like(x), (s[0] + x,)), x, (x,))
    assert torch.equal(torch.rand(4, device=device), expected)
    decoder(x)
    with torch.inference_mode():
        assert decoder(x).shape == (4,)


def test_buffers_of_the_model_are_not_given_out(device: torch.device) -> None:
    buffer = torch.ones(2, device=device)
    decoder = Decoder(
        lambda x, s: (buffer, (s[0] + x,)), torch.zeros(2, device=device), (torch.zeros(2, device=device),)
    )
    decoder(torch.zeros(2, device=device)).zero_()
    assert buffer.tolist() == [1, 1]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")
EVERY_LAYER = {
    **{name: {} for name in layers.__all__ if hasattr(getattr(layers, name), "init_state")},
    **LAYERS,
    "LightningAttention": {"num_heads": 2, "num_layers": 2},
    "GatedSlotAttention": {"num_heads": 2, "num_slots": 16},
    "GriffinRecurrentBlock": {"num_heads": 2},
}


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", EVERY_LAYER)
def test_graphs_of_kernels(layer: str, dtype: torch.dtype, device: torch.device) -> None:
    """Recorded steps are those of the same compiled step without a graph, to the bit, and near the model's."""
    model = model_of(layer, device, dtype, hidden_size=128)
    tokens, state = started(model, device)
    decoder = Decoder(model, tokens, state)
    logits = torch.cat([decoder(tokens) for _ in range(20)])
    final = decoder.state
    decoder.load(state)
    decoder._tokens.copy_(tokens)
    with (
        torch.no_grad()
    ):  # as the step is recorded: with gradients it would be compiled once more, into other kernels
        assert torch.equal(logits, torch.cat([decoder._step().clone() for _ in range(20)]))
    assert all(map(torch.equal, pytree.tree_leaves(final), pytree.tree_leaves(decoder.state)))
    expected = []
    for _ in range(20):
        y, state = model(tokens, state)
        expected.append(y)
    assert error(logits, torch.cat(expected)) <= (1e-5 if dtype == torch.float32 else 2e-2)
    assert error(pytree.tree_leaves(final)[0], pytree.tree_leaves(state)[0]) <= (
        1e-5 if dtype == torch.float32 else 2e-2
    )


@needs_gpu
def test_kernels_replace_states_in_place(device: torch.device) -> None:
    model = model_of("GatedLinearAttention", device, torch.float32)
    decoder = Decoder(model, *started(model, device))
    _, new = decoder._compiled(decoder._tokens, decoder._state)
    in_place = [x.is_set_to(old) for x, old in zip(new, decoder._state, strict=True)]
    assert in_place == [
        old.dim() == 4 for old in decoder._state
    ]  # the recurrent states, not those of convolutions


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_two_gpus() -> None:
    for index in range(2):
        device = torch.device("cuda", index)
        model = model_of("GatedLinearAttention", device, torch.float32)
        tokens, state = started(model, device)
        decoder = Decoder(model, tokens, state)
        for _ in range(3):
            expected, state = model(tokens, state)
            torch.testing.assert_close(decoder(tokens), expected, atol=1e-4, rtol=1e-4)


def test_softmax_attention_is_refused(device: torch.device) -> None:
    model = model_of("GatedLinearAttention", device, attn=[{"layers": [1], "num_heads": 2}])
    with pytest.raises(ValueError, match="the state of softmax attention grows with every token"):
        Decoder(model, *started(model, device))


RECURRENT = [fused_recurrent_gla, fused_recurrent_simple_gla, fused_recurrent_gated_delta_rule]
# What a step does with the old state, the state itself, and whether the new one may take its place.
USES: dict[str, tuple[tuple[int, ...], bool]] = {
    "read once": ((2, 2, 16, 16), True),
    "read elsewhere": ((2, 2, 16, 16), False),
    "returned": ((2, 2, 16, 16), False),
    "reshaped": ((2, 2, 256), False),
    "of several states": ((2, 2, 16, 16), False),
    "of the model": ((2, 2, 16, 16), False),
}


@pytest.mark.parametrize("op", RECURRENT)
@pytest.mark.parametrize("use", USES)
def test_kernels_write_states_where_they_read_them(
    op: Callable[..., Any], use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Inductor's graph a kernel gets the old state's memory for the new one, if nothing else reads that."""
    triton = pytest.importorskip("triton")
    from flacompose.models.states_in_place import StatesInPlace, replaceable

    # PyTorch asks for the chip when it looks for the arguments that a kernel writes to.
    chip = SimpleNamespace(get_current_target=lambda: triton.backends.compiler.GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(type(triton.runtime.driver), "active", chip)

    class Step(torch.nn.Module):
        def forward(self, state: Tensor, *args: Tensor) -> Any:
            if (
                use != "of the model"
            ):  # a parameter, a buffer or a closure, which is an input of the graph too
                state = replaceable(state)
            initial = state.view(2, 2, 16, 16) if use == "reshaped" else state
            o, new = op(
                *args,
                initial_state=initial,
                output_final_state=True,
                output_states=1 if use == "of several states" else None,
            )
            others = {"read elsewhere": state.sum(), "returned": state.clone()}
            return o, new, *([others[use]] if use in others else [])

    shape, in_place = USES[use]
    gates = {"gla": [(2, 1, 2, 16)], "simple_gla": [(2, 1, 2)], "gated_delta_rule": [(2, 1, 2)] * 2}
    sizes = [shape] + [(2, 1, 2, 16)] * 3 + gates[op.__name__.removeprefix("fused_recurrent_")]
    with FakeTensorMode() as mode, V.set_fake_mode(mode), torch.no_grad():
        args = [torch.empty(size, device="cuda") for size in sizes]
        graph = aot_export_module(Step(), args, trace_joint=False)[0].graph
        for node in graph.find_nodes(
            op="call_function", target=torch.ops.aten._assert_tensor_metadata.default
        ):
            graph.erase_node(node)  # exports alone have it
        StatesInPlace()(graph)
        graph.eliminate_dead_code()
        reinplace_inplaceable_ops_core(graph)
    graph.lint()
    state = next(node for node in graph.nodes if node.op == "placeholder")
    launches = graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    assert not graph.find_nodes(op="call_function", target=torch.ops.flacompose.replaceable.default)
    (launch,) = launches
    assert (launch.kwargs["kwargs"]["states_final"] is state) == in_place
    assert launch.kwargs["kwargs"]["o"] is not state
    assert (graph.output_node().args[0][1] is state) == in_place
    # In both cases Inductor needs no copy.
    assert launch.kwargs["tensors_to_clone"] == []
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
