"""One product in place of those of the same input: the results of the layer, and what else can be done with it."""

from __future__ import annotations

import copy
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.truth import (
    BOUNDED,
    EVERY,
    GLA,
    assert_close,
    assert_states_close,
    build,
    described,
    floats,
    random_state,
    tensors,
    with_floats,
)
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations

from flacompose.layers import GatedLinearAttention, join_projections
from flacompose.models import RecurrentConfig, RecurrentLM
from flacompose.models.feed_forward import SwiGLU
from flacompose.models.softmax_attention import SoftmaxAttention

from .test_modules import KINDS, replace_linears

ATTENTION = {"layer": SoftmaxAttention, "hidden_size": 24, "num_heads": 4, "num_kv_heads": 2}
# The matrix products of each layer, and how many of them are made one.
PRODUCTS = {
    "gla": (7, 5),
    "simple_gla": (6, 5),
    "linear_attn": (4, 3),
    "retention": (5, 4),
    "lightning_attn": (3, 2),
    "mamba": (4, 1),
    "mamba2": (2, 1),
    "mamba3": (2, 1),
    "mamba3 mimo": (2, 1),
    "rwkv6": (9, 1),
    "rwkv7": (12, 1),
    "mlstm": (7, 6),
    "griffin": (3, 2),
    "hgrn": (4, 3),
    "hgrn2": (4, 3),
    "lightnet": (6, 4),
    "gsa": (5, 4),
    "abc": (6, 5),
    "delta_net": (6, 5),
    "gated_deltanet": (7, 6),
    "gated_deltaproduct": (7, 6),
    "kda": (9, 6),
    "gdn2": (10, 7),
    "comba": (7, 6),
    "rodimus": (9, 2),
    "based": (4, 3),
    "rebased": (4, 3),
    "attention": (4, 3),
}
LAYERS = EVERY | {"attention": ATTENTION}
NONE_TO_JOIN = {"mamba", "mamba2", "mamba3", "mamba3 mimo", "rwkv6", "rwkv7"}
# Projections that are absent, and biases of all.
OTHERS = [
    *BOUNDED.values(),
    ATTENTION | {"qkv_bias": True, "window_size": 3},
    GLA | {"use_output_gate": False},
    GLA | {"fuse_norm": False},
    EVERY["simple_gla"] | {"fuse_norm": False},
    EVERY["retention"] | {"use_output_gate": False},
    EVERY["abc"] | {"use_output_gate": False},
    EVERY["delta_net"] | {"use_gate": False, "use_beta": False, "use_short_conv": False},
    EVERY["gated_deltanet"] | {"use_gate": False, "use_short_conv": False},
    EVERY["gated_deltaproduct"] | {"use_output_gate": False, "use_forget_gate": False},
]
# In norm. A matrix product of another size may sum in another order, and recurrences pass the difference on.
RELATIVE = {torch.float32: 2e-5, torch.float64: 1e-12}

each_layer = pytest.mark.parametrize("name", LAYERS)
each_joined = pytest.mark.parametrize("name", [name for name in LAYERS if name not in NONE_TO_JOIN])


def joined(module: nn.Module) -> nn.Module:
    module = copy.deepcopy(module)
    join_projections(module)
    return module


def model_of(**changes: Any) -> RecurrentLM:
    """Two blocks, the second of which has softmax attention."""
    options = {
        "vocab_size": 11,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 20,
        "layer": "GatedLinearAttention",
        "layer_options": {"num_heads": 2},
        "attn": [{"layers": [1], "num_heads": 2}],
    }
    return RecurrentLM(RecurrentConfig(**options | changes))


@pytest.mark.parametrize("config", [*LAYERS.values(), *OTHERS], ids=described)
@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@torch.no_grad()
def test_same_results(config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Of many tokens and of one, from any state, padded and packed."""
    if device.type == "cuda" and dtype == torch.float64:
        pytest.skip("float64 is tested on the CPU")
    layer = build(config, device=device, dtype=dtype)
    one = joined(layer)

    def compare(x: Tensor, state: Any, **given: Any) -> Any:
        (expected, last), (y, new) = layer(x, state, **given), one(x, state, **given)
        assert_close(y, expected, RELATIVE[dtype])
        assert_states_close(new, last, RELATIVE[dtype])
        # As a state that no product is joined for: it keeps nothing else in memory, and compiles to the same graph.
        assert [t.stride() for t in tensors(new)] == [t.stride() for t in tensors(last)]
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors(new))
        return last

    x = torch.randn(3, 70, 24, dtype=dtype, device=device)
    mask = torch.rand(3, 70, device=device) < 0.7
    state = compare(x, None)
    state = compare(x[:, :1], state)
    compare(x[:, :5], state, num_states=4)
    compare(x, state, attention_mask=mask)
    if not isinstance(layer, SoftmaxAttention):
        compare(x, random_state(layer, 3))
        bounds = torch.tensor([0, 20, 20, 61], device=device)
        compare(x[:1], random_state(layer, 3), cu_seqlens=bounds)


def products(module: nn.Module, x: Tensor) -> int:
    graph = make_fx(lambda x: module(x))(x).graph
    return sum(n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) for n in graph.nodes)


@each_layer
@torch.no_grad()
def test_one_product(name: str) -> None:
    """All projections of the same input are one product, and what remains is of other inputs."""
    layer, (separate, together) = build(LAYERS[name]), PRODUCTS[name]
    x = torch.randn(2, 1, 24)
    assert products(layer, x) == separate
    assert products(joined(layer), x) == separate - together + 1
    if name not in NONE_TO_JOIN:
        # Any projection that still reads the input would be another one of these, unless it is of a low-rank pair.
        rest = [m for m in joined(layer).modules() if isinstance(m, nn.Linear)]
        assert len(rest) == separate - together + 1


@torch.no_grad()
def test_feed_forward() -> None:
    network, x = SwiGLU(24, 20), torch.randn(2, 5, 24)
    one = joined(network)
    assert (products(network, x), products(one, x)) == (3, 2)
    assert one.joint_sizes == (20, 20)
    assert_close(one(x), network(x), 1e-6)


@each_layer
def test_separate_products_are_untouched(name: str) -> None:
    """A layer that is not joined calls each of its projections with the very tensor that it is given."""
    layer, x, read = build(LAYERS[name]), torch.randn(1, 3, 24), []
    for path in layer.fusible:
        layer.get_submodule(path).register_forward_pre_hook(lambda m, args: read.append(args[0]))
    layer(x)
    assert len(read) == len(layer.fusible)
    assert all(given is x for given in read)


@torch.no_grad()
def test_weights() -> None:
    """Rows of each, a bias only where there is one, and zeros that make the number of outputs a multiple of 8."""
    layer = build(EVERY["simple_gla"]).requires_grad_(False).eval()
    before, random = copy.deepcopy(layer), torch.get_rng_state()
    old = [weakref.ref(p) for name in layer.fusible for p in getattr(layer, name).parameters()]
    join_projections(layer)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(ref() is None for ref in old)  # freed
    joint = layer.joint_proj
    assert type(joint) is nn.Linear
    assert not joint.training
    assert not any(p.requires_grad for p in joint.parameters())
    assert joint.weight.shape == (80, 24)
    assert joint.out_features == 80
    assert layer.joint_sizes == (24, 12, 12, 24, 4, 4)
    parts = zip(layer.fusible, joint.weight.split(layer.joint_sizes), joint.bias.split(layer.joint_sizes))
    for name, weight, bias in parts:
        separate = getattr(before, name)
        assert torch.equal(weight, separate.weight)
        assert torch.equal(bias, torch.zeros(len(bias)) if separate.bias is None else separate.bias)
    assert not joint.weight[76:].any()
    assert not joint.bias[76:].any()
    assert joined(build(GLA)).joint_proj.bias is None

    again = dict(layer.named_parameters())
    join_projections(layer)
    assert {name: id(p) for name, p in layer.named_parameters()} == {name: id(p) for name, p in again.items()}


@each_joined
def test_gradients(name: str) -> None:
    layer = build(LAYERS[name], dtype=torch.float64)
    one = joined(layer)
    x, state = torch.randn(2, 9, 24, dtype=torch.float64), None
    if name != "attention":
        state = random_state(layer, 2)
    inputs = []
    for module in (layer, one):
        leaves = [t.detach().clone().requires_grad_() for t in (x, *(floats(state) if state else ()))]
        y, new = module(leaves[0], with_floats(state, leaves[1:]) if state else None)
        sum(t.sin().sum() for t in (y, *floats(new))).backward()
        inputs.append([leaf.grad for leaf in leaves])
    for a, b in zip(*inputs):
        assert_close(b, a, 1e-10)
    expected = {path: layer.get_submodule(path) for path in layer.fusible}
    rows = one.joint_proj.weight.grad.split(one.joint_sizes)
    for (path, m), grad in zip(expected.items(), rows):
        assert_close(grad, m.weight.grad, 1e-10)
        if m.bias is not None:
            start = sum(one.joint_sizes[: list(expected).index(path)])
            assert_close(one.joint_proj.bias.grad[start : start + len(m.bias)], m.bias.grad, 1e-10)
    separate = dict(layer.named_parameters())
    for path, p in one.named_parameters():
        if not path.startswith("joint_proj"):
            assert_close(p.grad, separate[path].grad, 1e-10)


def test_compiled(device: torch.device) -> None:
    """One graph for all lengths and one for tokens, also where a layer is joined after it has been compiled."""
    layer = build(EVERY["lightning_attn"], device=device)
    one = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    state, separate = layer.init_state(2), copy.deepcopy(layer)
    with torch.no_grad():
        one(torch.randn(2, 7, 24, device=device), state)
        join_projections(one)
        for i, T in enumerate((70, 1, 5, 1)):
            x = torch.randn(2, T, 24, device=device)
            with torch._dynamo.config.patch(error_on_recompile=i > 1):
                y, new = one(x, state)
            expected, last = separate(x, state)
            assert_close(y, expected, 2e-5)
            assert_states_close(new, last, 2e-5)
            state = last
    x = torch.randn(2, 9, 24, device=device)
    one(x)[0].square().sum().backward()
    separate(x)[0].square().sum().backward()
    rows = layer.joint_proj.weight.grad.split(layer.joint_sizes)
    for path, grad in zip(layer.fusible, rows):
        assert_close(grad, separate.get_submodule(path).weight.grad, 1e-4)


@pytest.mark.parametrize("name", ["gla", "gated_deltanet"])
@torch.no_grad()
def test_exported(name: str, tmp_path: Any) -> None:
    layer = joined(build(EVERY[name], dtype=torch.float64))
    T, x = Dim("T", min=2, max=2**20), torch.randn(2, 37, 24, dtype=torch.float64)
    shapes = {
        "hidden_states": {1: T},
        "state": None,
        "attention_mask": None,
        "cu_seqlens": None,
        "num_states": None,
    }
    given = {"state": None, "attention_mask": None, "cu_seqlens": None, "num_states": None}
    program = torch.export.export(layer, (x,), given, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for T in (2, 64, 165):
        x = torch.randn(2, T, 24, dtype=torch.float64)
        assert_close(loaded(x, **given)[0], layer(x)[0], 1e-10)


@torch.no_grad()
def test_model() -> None:
    """Joined as a whole; its state dict holds fused weights, and loads into another model once that is joined."""
    model = model_of().eval()
    one, ids = joined(model), torch.randint(11, (2, 9))
    torch.testing.assert_close(one(ids)[0], model(ids)[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(one.generate(ids, 5), model.generate(ids, 5))
    names = {name for name in one.state_dict() if "proj" in name}
    assert names == {
        *(
            "layers.0.attn.joint_proj.weight",
            "layers.0.attn.gk_proj.1.weight",
            "layers.0.attn.gk_proj.1.bias",
        ),
        "layers.1.attn.joint_proj.weight",
        *(f"layers.{i}.attn.o_proj.weight" for i in range(2)),
        *(f"layers.{i}.mlp.{name}.weight" for i in range(2) for name in ("joint_proj", "down_proj")),
    }
    assert {name: p.device for name, p in one.named_parameters()}.keys() == one.state_dict().keys()

    other = model_of()
    with pytest.raises(RuntimeError, match="joint_proj"):
        other.load_state_dict(one.state_dict())
    join_projections(other)
    with pytest.raises(RuntimeError, match="q_proj"):
        other.load_state_dict(model.state_dict())
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(ids)[0], one(ids)[0])
    for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert torch.equal(copied(ids)[0], one(ids)[0])
    half = copy.deepcopy(one).bfloat16()
    assert half(ids)[0].dtype == torch.bfloat16
    with torch.device("meta"):
        meta = model_of()
    join_projections(meta)
    meta.load_state_dict(one.state_dict(), assign=True)
    assert torch.equal(meta(ids)[0], one(ids)[0])


@torch.no_grad()
def test_layer_in_two_places() -> None:
    """A layer that a model calls twice is joined once, and is still one layer."""
    layer = build(GLA)
    both, x = nn.ModuleList([layer, layer]), torch.randn(1, 5, 24)
    expected = layer(x)[0]
    join_projections(both)
    assert both[0] is both[1]
    assert_close(both[1](x)[0], expected, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@each_joined
@torch.no_grad()
def test_replaced_joint_projection(name: str, kind: str) -> None:
    """Whatever stands in its place is called and asked nothing, as with other projections."""
    layer = joined(build(LAYERS[name]))
    x = torch.randn(2, 5, 24)
    weight = layer.joint_proj.weight
    scale = weight.abs().max() / 15
    weight.copy_((weight / scale).round() * scale)
    expected, last = layer(x)
    layer.joint_proj = nn.ModuleDict({"m": layer.joint_proj})
    replace_linears(layer.joint_proj, KINDS[kind])
    layer.joint_proj = layer.joint_proj["m"]
    y, new = layer(x)
    assert_close(y, expected, 1e-5)
    assert_states_close(new, last, 1e-5)


@torch.no_grad()
def test_torchao() -> None:
    torchao = pytest.importorskip("torchao")
    quantize_, config = torchao.quantization.quantize_, torchao.quantization.Int8WeightOnlyConfig()
    model, ids = model_of(), torch.randint(11, (2, 9))
    nn.init.normal_(model.embeddings.weight)
    expected, _ = model(ids)
    one = joined(model)
    quantize_(one, config)
    logits, _ = one(ids)
    # A weight is off by at most 1/254 of the largest in its row, and these errors are independent.
    assert 0 < (logits - expected).norm() < 0.02 * expected.norm()
    quantize_(model, config)
    with pytest.raises(
        TypeError, match=r"q_proj.weight must be a plain parameter to be joined, got a torchao.*Int8"
    ):
        join_projections(model)


def test_peft() -> None:
    peft = pytest.importorskip("peft")
    model, ids = model_of(), torch.randint(11, (2, 9))
    expected, _ = model(ids)
    adapted = peft.get_peft_model(joined(model), peft.LoraConfig(r=4, target_modules=["joint_proj"]))
    logits, _ = adapted(ids)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    logits.square().sum().backward()
    assert sum(p.grad is not None for p in adapted.parameters()) == 2 * 4  # two matrices for each
    separate = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["k_proj"]))
    with pytest.raises(
        TypeError, match=r"k_proj must be a plain nn.Linear to be joined, got a peft.tuners.lora"
    ):
        join_projections(separate)


class Subclass(Tensor):
    """A parameter that is no plain one, as those of torchao and of DTensor."""


def shared_weight(layer: nn.Module) -> None:
    layer.k_proj = nn.Linear(24, 12, bias=False)
    layer.q_proj.weight = layer.k_proj.weight


def frozen(layer: nn.Module) -> None:
    layer.gk_proj[0].requires_grad_(False)


def pair(layer: nn.Module) -> None:
    layer.gk_proj = nn.Linear(24, 12)


def pair_hook(layer: nn.Module) -> None:
    layer.gk_proj.register_forward_hook(print)


def offloaded(layer: nn.Module) -> None:
    layer.v_proj.forward = lambda x: x


WRONG: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "another module": (
        lambda layer: setattr(layer, "q_proj", nn.Sequential(layer.q_proj)),
        TypeError,
        r"1.q_proj must be a plain nn.Linear to be joined, got a torch.nn.modules.container.Sequential",
    ),
    "parametrised": (lambda layer: parametrizations.weight_norm(layer.q_proj), TypeError,
                     "1.q_proj must be a plain nn.Linear to be joined, got .*ParametrizedLinear"),
    "no pair": (pair, TypeError, "1.gk_proj must be a plain nn.Sequential to be joined, got .*Linear"),
    "tensor subclass": (lambda layer: setattr(layer.g_proj, "weight",
                        nn.Parameter(Subclass(layer.g_proj.weight.data))), TypeError,
                        "1.g_proj.weight must be a plain parameter to be joined, got .*Subclass"),
    "hook": (lambda layer: layer.v_proj.register_forward_hook(print), ValueError,
             "1.v_proj must have no hooks, and no forward of its own, to be joined, got some"),
    "backward hook": (lambda layer: layer.v_proj.register_full_backward_hook(print), ValueError,
                      "1.v_proj must have no hooks"),
    "hook of a parameter": (lambda layer: layer.v_proj.weight.register_hook(print), ValueError,
                            "1.v_proj.weight must have no hooks to be joined, got some"),
    "hook after the gradient": (lambda layer: layer.v_proj.weight.register_post_accumulate_grad_hook(print),
                                ValueError, "1.v_proj.weight must have no hooks to be joined, got some"),
    "shared memory": (lambda layer: setattr(layer.q_proj.weight, "data", layer.k_proj.weight.data), ValueError,
                      "1.q_proj.weight must be in one place to be joined, got 2"),
    "hook of a pair": (pair_hook, ValueError, "1.gk_proj must have no hooks"),
    "forward": (offloaded, ValueError, "1.v_proj must have no hooks, and no forward of its own"),
    "shared weight": (shared_weight, ValueError, "1.q_proj.weight must be in one place to be joined, got 2"),
    "shared module": (lambda layer: setattr(layer, "k_proj", layer.q_proj), ValueError,
                      "1.q_proj must be in one place to be joined, got 2"),
    "dtype": (lambda layer: layer.v_proj.double(), ValueError,
              "1.v_proj must have the dtype of 1.q_proj, torch.float32, to be joined with it, got torch.float64"),
    "device": (lambda layer: layer.v_proj.to("meta"), ValueError,
               "1.v_proj must have the device of 1.q_proj, cpu, to be joined with it, got meta"),
    "inputs": (lambda layer: setattr(layer, "v_proj", nn.Linear(8, 24, bias=False)), ValueError,
               "1.v_proj must have the number of inputs of 1.q_proj, 24, to be joined with it, got 8"),
    "frozen": (frozen, ValueError,
               "1.gk_proj.0 must have the requires_grad of 1.q_proj, True, to be joined with it, got False"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_errors(kind: str) -> None:
    """They are raised before any layer is changed."""
    spoil, error, message = WRONG[kind]
    layers = nn.ModuleList([build(GLA), build(GLA)])
    spoil(layers[1])
    before = {name: id(p) for name, p in layers.named_parameters()}
    with pytest.raises(error, match=message):
        join_projections(layers)
    assert {name: id(p) for name, p in layers.named_parameters()} == before
    assert not layers[0].joint_sizes
    layers[0](torch.randn(1, 3, 24))


def test_wrong_modules() -> None:
    with pytest.raises(TypeError, match=re.escape("module must be a torch.nn.Module, got int")):
        join_projections(3)
    with pytest.raises(
        ValueError, match=re.escape("module must contain a layer whose projections can be joined, got Linear")
    ):
        join_projections(nn.Linear(3, 3))
    layer = GatedLinearAttention(hidden_size=24, num_heads=4)
    join_projections(layer)
    with pytest.raises(TypeError, match="must be called with the parts of the fused product, got a tensor"):
        layer.q_proj(torch.randn(1, 3, 24))
