"""Looking at what an op becomes: the registered ops called, and the nodes of a captured graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

Calls = list[tuple[torch._ops.OpOverload, tuple[Any, ...], tuple[torch.Tensor, ...]]]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "flacompose":
            names = [argument.name for argument in func._schema.arguments]
            given = {**dict(zip(names, args)), **(kwargs or {})}
            self.calls.append((func, tuple(given[name] for name in names), out))
        return out


@contextmanager
def recorded() -> Iterator[Calls]:
    """The calls of this library's ops, below autograd: overload, arguments, outputs."""
    with _Recorder() as recorder:
        yield recorder.calls


def op_nodes(module: GraphModule) -> list[str]:
    """This library's ops in a captured graph."""
    return [node.target.name() for node in calls(module.graph) if node.target.namespace == "flacompose"]


def other_ops(module: GraphModule) -> list[str]:
    """PyTorch's ops between inputs and results in a captured graph; what is made of constants and sizes is not."""
    from_inputs, names = set(module.graph.find_nodes(op="placeholder")), []
    for node in module.graph.nodes:
        if node.op != "call_function" or not from_inputs.intersection(node.all_input_nodes):
            continue
        if not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            continue
        from_inputs.add(node)
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "flacompose":
            names.append(node.target.overloadpacket.__name__)
    return names


def op_arguments(module: GraphModule) -> tuple[Node, dict[str, Any]]:
    """The only op of this library in an exported graph, and its arguments by name: of tensors the inputs they are
    made of."""
    made_of: dict[Any, set[str]] = {}
    for node in module.graph.nodes:
        made_of[node] = set().union(*(made_of[x] for x in node.all_input_nodes))
        if isinstance(node.meta.get("val"), torch.SymInt):  # a size
            made_of[node] = set()
        if node.op == "placeholder":
            made_of[node] = {node.name.removeprefix("tensors_")}
    (node,) = (node for node in calls(module.graph) if node.target.namespace == "flacompose")
    names = [argument.name for argument in node.target._schema.arguments]
    arguments = {**dict(zip(names, node.args)), **node.kwargs}
    return node, {name: made_of[x] if isinstance(x, Node) else x for name, x in arguments.items()}


def calls(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
