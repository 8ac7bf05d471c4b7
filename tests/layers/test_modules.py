"""Layers among PyTorch's tools: whatever stands for a projection, where parameters are, traces, shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import on_two_ranks
from helpers.truth import (
    EVERY,
    OF_EACH_KIND,
    assert_close,
    assert_states_close,
    build,
    made,
    random_state,
    tensors,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

STEPS = 15  # of a quantised weight on each side of 0; integers up to it are exact in float8 too

each_layer = pytest.mark.parametrize("config", EVERY.values(), ids=EVERY)


class Quantised(nn.Module):
    """A linear layer by eight bits, in a parameter called ``weight``, or, as in GPTQ, in a buffer of another name."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, as_weight: bool = True) -> None:
        super().__init__()
        self.scale = nn.Buffer(linear.weight.detach().abs().max() / STEPS)
        rounded = (linear.weight.detach() / self.scale).round().to(dtype)
        self.bias = linear.bias
        self.as_weight = as_weight
        if as_weight:
            self.weight = nn.Parameter(rounded, requires_grad=False)
        else:
            self.qweight = nn.Buffer(rounded)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.as_weight else self.qweight
        return F.linear(x, weight.to(x.dtype) * self.scale, self.bias)


class Offloaded(nn.Module):
    """A module whose parameters are on the meta device but while it computes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.kept = {name: p.detach() for name, p in module.named_parameters()}
        self.module = module.to("meta")

    def forward(self, *args: Any, **options: Any) -> Any:
        return torch.func.functional_call(self.module, self.kept, args, options)


def offload(module: nn.Module) -> None:
    """Replace all modules in it that have parameters of their own."""
    for name, child in list(module.named_children()):
        if any(True for _ in child.parameters(recurse=False)):
            setattr(module, name, Offloaded(child))
        else:
            offload(child)


class Adapted(nn.Module):
    """A frozen linear layer beside a low-rank one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, linear.in_features))
        self.up = nn.Parameter(torch.randn(linear.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.down.T @ self.up.T


def replace_linears(module: nn.Module, by: Callable[[nn.Linear], nn.Module]) -> None:
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, by(child))
        else:
            replace_linears(child, by)


KINDS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "int8": lambda linear: Quantised(linear, torch.int8),
    "float8": lambda linear: Quantised(linear, torch.float8_e4m3fn),
    "without a weight": lambda linear: Quantised(linear, torch.int8, as_weight=False),
    "Sequential": nn.Sequential,
    "offloaded": Offloaded,
}


@pytest.mark.parametrize("kind", KINDS)
@each_layer
def test_replaced_projections(config, kind):
    """A layer calls its projections and asks them nothing."""
    layer = build(config)
    x, state = torch.randn(2, 5, 24), random_state(layer, 2)
    with torch.no_grad():
        for linear in (m for m in layer.modules() if isinstance(m, nn.Linear)):
            scale = linear.weight.abs().max() / STEPS
            linear.weight.copy_((linear.weight / scale).round() * scale)
    expected, last = layer(x, state)
    replace_linears(layer, KINDS[kind])
    y, new = layer(x, state)
    assert_close(y, expected, 1e-5)
    assert_states_close(new, last, 1e-5)
    start = layer.init_state(2, device="cpu" if kind == "offloaded" else None)
    assert [t.dtype for t in tensors(start)] == [t.dtype for t in tensors(state)]
    assert_close(layer(x, start)[0], layer(x)[0], 1e-6)


@each_layer
def test_no_parameter_of_a_module_is_read(config):
    """Norms, convolutions and gates are called too, so that whatever wraps them knows of it."""
    layer = build(config)
    x, state = torch.randn(2, 5, 24), random_state(layer, 2)
    expected, _ = layer(x, state)
    offload(layer)
    assert_close(layer(x, state)[0], expected, 1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
@each_layer
def test_dynamic_quantisation(config):
    """It takes every projection: it looks for `nn.Linear` itself, and passes subclasses over."""
    layer = torch.ao.quantization.quantize_dynamic(build(config).eval(), {nn.Linear}, dtype=torch.qint8)
    assert not any(isinstance(m, nn.Linear) for m in layer.modules())
    x = torch.randn(2, 5, 24)
    y, state = layer(x)
    assert y.isfinite().all()
    assert_close(layer(x, layer.init_state(2))[0], y, 1e-6)
    assert [t.dtype for t in tensors(layer.init_state(2))] == [t.dtype for t in tensors(state)]


@each_layer
def test_every_adapter_trains(config):
    layer = build(config)
    replace_linears(layer, Adapted)
    y, state = layer(torch.randn(2, 9, 24))
    sum(t.square().sum() for t in (y, *tensors(state)) if t.is_floating_point()).backward()
    adapters = {name: p for name, p in layer.named_parameters() if name.endswith(("down", "up"))}
    assert adapters
    assert all(p.grad is not None and p.grad.any() for p in adapters.values())


@each_layer
def test_device_and_dtype(config):
    """Of every parameter; without a dtype, the first values and the dtypes do not depend on a device."""
    half = made(config, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half(torch.randn(1, 3, 24, dtype=torch.bfloat16))[0].dtype == torch.bfloat16
    assert {p.dtype for p in made(config, dtype=torch.float64).parameters()} == {torch.float64}
    torch.set_default_dtype(torch.bfloat16)
    try:
        expected, meta = (made(config, device=device) for device in (None, "meta"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(p.is_meta for p in meta.parameters())
    assert [p.dtype for p in meta.parameters()] == [p.dtype for p in expected.parameters()]


@each_layer
def test_init_state_elsewhere(config):
    layer = build(config)
    state = layer.init_state(3, device="meta", dtype=torch.bfloat16)
    expected = layer.bfloat16().init_state(3)
    assert all(t.is_meta for t in tensors(state))
    assert [(t.shape, t.dtype) for t in tensors(state)] == [(t.shape, t.dtype) for t in tensors(expected)]
    with pytest.raises(TypeError, match="dtype must be float32, bfloat16, float16 or float64, got int8"):
        layer.init_state(3, dtype=torch.int8)


@each_layer
def test_init_state_where_dtypes_are_mixed(config):
    """A layer in bfloat16 whose norms, biases and other parameters of its own are float32, as trainers keep them."""
    layer = build(config).bfloat16()
    own = dict(layer.named_parameters(recurse=False))
    for name, p in layer.named_parameters():
        if p.ndim == 1 and not name.endswith("bias") or name in own:
            p.data = p.data.float()
    _, state = layer(torch.randn(2, 3, 24, dtype=torch.bfloat16))
    assert [t.dtype for t in tensors(layer.init_state(2))] == [t.dtype for t in tensors(state)]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("config", OF_EACH_KIND.values(), ids=OF_EACH_KIND)
def test_jit_trace(config):
    """A trace is exact at lengths and batch sizes that were not traced."""
    layer = build(config)
    state = random_state(layer, 2)
    leaves, structure = pytree.tree_flatten(state)

    class WithLeaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
            y, new = self.layer(x, pytree.tree_unflatten(list(leaves), structure))
            return y, *tensors(new)

    traced = torch.jit.trace(layer, (torch.randn(2, 9, 24),))
    with_leaves = torch.jit.trace(WithLeaves(), (torch.randn(2, 9, 24), *leaves))
    for T in (9, 70, 2, 1):
        x = torch.randn(2, T, 24)
        assert_close(traced(x[:1])[0], layer(x[:1])[0], 1e-5)
        expected, last = layer(x, state)
        for a, b in zip(with_leaves(x, *leaves), (expected, *tensors(last)), strict=True):
            assert_close(a, b, 1e-5)


def sharded(mesh: DeviceMesh, by: str, names: list[str]) -> None:
    """A layer gives the outputs and gradients of one rank on two, of half the rows or half the projections each."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    for name in names:
        torch.manual_seed(0)
        even = (
            {"expand_ratio": 6} if "expand_ratio" in EVERY[name] else {}
        )  # heads of which each rank has half
        even |= {"n_groups": 2} if name == "mamba2" else {}
        layer = build(EVERY[name] | even, dtype=torch.float64)
        x = torch.randn(2, 6, 24, dtype=torch.float64)
        mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0]]) if by == "rows" else None
        first, plain = layer(x, attention_mask=mask)
        second = layer(x, plain)[0] if by == "rows" else first
        (first + second).sin().sum().backward()
        expected = {name: p.grad for name, p in layer.named_parameters()}
        layer.zero_grad()
        if by == "columns":
            outputs = ("o_proj", "out_proj")
            linears = [n for n, m in layer.named_modules() if isinstance(m, nn.Linear) and n not in outputs]
            parallelize_module(layer, mesh, {n: ColwiseParallel(use_local_output=False) for n in linears})
        distribute_module(layer, mesh)
        x = distribute_tensor(x, mesh, [Shard(0) if by == "rows" else Replicate()])
        y, state = layer(x, attention_mask=mask)
        again = layer(x, state)[0] if by == "rows" else y
        (y + again).sin().sum().backward()
        results = [(y, first), (again, second), *((p.grad, expected[n]) for n, p in layer.named_parameters())]
        # Plain tensors beside them are taken to be the same on every rank.
        bound = {"lower_bound": torch.zeros(layer.f_proj.out_features)} if name in ("hgrn", "hgrn2") else {}
        results.append((layer(x, layer.init_state(2), attention_mask=mask, **bound)[0], first))
        if by == "rows":
            results += zip(tensors(state.select([1, 0])), tensors(plain.select([1, 0])), strict=True)
        with pytest.raises(TypeError, match="cu_seqlens must not be given where hidden_states are a DTensor"):
            layer(x[:1], cu_seqlens=torch.tensor([0, 2, 6]))
        for a, b in results:
            torch.testing.assert_close(a.full_tensor(), b, msg=lambda text, name=name: f"{name}: {text}")
        if by == "rows":
            assert y.placements == (Shard(0),), name


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch 2.11: docs/layers.md says what fails")
@pytest.mark.parametrize("by", ["rows", "columns"])
def test_sharded(by):
    on_two_ranks(sharded, by, list(EVERY))
