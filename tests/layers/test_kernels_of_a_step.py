"""What a layer launches for one token of a compiled step: the table in docs/how-to/compile.md."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from flacompose import layers

pytest.importorskip("triton")

DOCS = Path(__file__).parents[2] / "docs/how-to/compile.md"
ROW = re.compile(r"^\| \[`(\w+)`\]\(\S+\) \| (kernel|operator) \| (\d+) \|$", re.MULTILINE)
TABLE = {name: (recurrence, int(products)) for name, recurrence, products in ROW.findall(DOCS.read_text())}
LAYERS = {
    name: layer
    for name, layer in vars(layers).items()
    if name in layers.__all__ and hasattr(layer, "init_state")
}
REQUIRED = {
    "LightningAttention": {"layer_idx": 1, "num_layers": 3},
    "RodimusAttention": {"hidden_size": 256},
    "BasedLinearAttention": {"hidden_size": 1024},
    "ReBasedLinearAttention": {"hidden_size": 1024},
}
KERNEL, PRODUCTS = "triton_kernel_wrapper_functional", ("mm", "addmm", "bmm", "baddbmm")
CUDA = torch.device("cuda", 0)


def new_tensor(x: Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """`Tensor.contiguous`, which in PyTorch without CUDA asks for the device of fake tensors, too."""
    return x if x.is_contiguous() else torch.ops.aten.clone.default(x, memory_format=memory_format)


class Step(nn.Module):
    def __init__(self, layer: nn.Module, spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.layer, self.spec = layer, spec

    def forward(self, x: Tensor, *state: Tensor) -> list[Any]:
        # A layer of RWKV7 other than the first takes that one's values.
        given = {"v_first": x} if isinstance(self.layer, layers.RWKV7Attention) else {}
        return pytree.tree_leaves(self.layer(x, pytree.tree_unflatten(state, self.spec), **given))


class Traced(nn.Module):
    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *args: Tensor) -> Any:
        return self.graph(*args)


def nodes_on_cuda(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many nodes of each kind Inductor gets of one token on a GPU.

    The layer is traced on the CPU, as indexing asks for a GPU that may not be there, and its graph once more on CUDA.
    """
    from torch._functorch.aot_autograd import aot_export_module
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    state, spec = pytree.tree_flatten(layer.init_state(2))
    x = torch.zeros(2, 1, layer.hidden_size)
    with torch.no_grad():
        first, _ = aot_export_module(Step(layer, spec), (x, *state), trace_joint=False)
    for node in first.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CUDA}
    first.recompile()
    inputs = [node.meta["val"] for node in first.graph.find_nodes(op="placeholder")]
    with FakeTensorMode() as mode, V.set_fake_mode(mode), torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(Tensor, "contiguous", new_tensor)
        args = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA) for x in inputs]
        decompositions = select_decomp_table()
        graph, _ = aot_export_module(Traced(first), args, trace_joint=False, decompositions=decompositions)
    return Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")


def test_every_layer_has_a_row() -> None:
    assert TABLE.keys() == LAYERS.keys()


OPTIONS = [
    (
        name,
        REQUIRED.get(name, {})
        | ({"use_short_conv": True} if "use_short_conv" in inspect.signature(layer).parameters else {}),
    )
    for name, layer in LAYERS.items()
]
# Without a convolution the numbers are the same, whatever the layer.
OPTIONS += [
    (name, {"use_short_conv": False}) for name in ("ABCAttention", "GatedDeltaNet", "GatedDeltaProduct")
]


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=[f"{name}-{options}" for name, options in OPTIONS])
def test_kernels_of_a_step(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the recurrence, and one for each product of matrices. Convolutions add no node of theirs."""
    nodes = nodes_on_cuda(LAYERS[name](**options).eval(), monkeypatch)
    recurrence, products = TABLE[name]
    ours = {x: n for x, n in nodes.items() if x == KERNEL or x.startswith("flacompose")}
    assert list(ours.values()) == [1]
    assert (KERNEL in ours) == (recurrence != "operator")
    assert sum(nodes[f"aten.{product}.default"] for product in PRODUCTS) == products
    assert not [x for x in nodes if "conv" in x and "convert" not in x]


# Queries, keys and values that come from the fused projection, or its convolution, as they are.
JOINED = [(name, {}) for name in ("GatedLinearAttention", "HGRN2Attention", "LightNetAttention")]
JOINED += [(name, {}) for name in ("MultiScaleRetention", "Mamba2", "Mamba3")]
JOINED += [("SimpleGatedLinearAttention", {"use_short_conv": False})]


@pytest.mark.parametrize(("name", "options"), JOINED, ids=[name for name, _ in JOINED])
def test_parts_of_a_joined_projection_are_not_copied(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LAYERS[name](**options).eval()
    layers.join_projections(layer)
    nodes = nodes_on_cuda(layer, monkeypatch)
    assert nodes[KERNEL] == 1
    assert nodes["aten.clone.default"] == 0
