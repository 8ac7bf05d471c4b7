"""Looking at what an op becomes: the registered ops called, and the nodes of a captured graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Calls = list[tuple[torch._ops.OpOverload, tuple[Any, ...], tuple[torch.Tensor, ...]]]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "flacompose":
            assert not kwargs
            self.calls.append((func, args, out))
        return out


@contextmanager
def recorded() -> Iterator[Calls]:
    """The calls of this library's ops, below autograd: overload, arguments, outputs."""
    with _Recorder() as recorder:
        yield recorder.calls


def op_nodes(module: GraphModule) -> list[str]:
    """This library's ops in a captured graph."""
    return [node.target.name() for node in calls(module.graph) if node.target.namespace == "flacompose"]


def around(module: GraphModule) -> list[str]:
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


def calls(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def listing(module: GraphModule) -> str:
    """``%n = overload(arguments) : dtype[shape]``, symbols renamed as they appear: the same in every release."""
    names: dict[str, str] = {}

    def symbol(size: int | torch.SymInt) -> str:
        if isinstance(size, int):
            return str(size)
        return names.setdefault(str(size), f"s{len(names)}")

    def value(x: Any) -> str:
        if isinstance(x, torch.Tensor):
            return f"{str(x.dtype).removeprefix('torch.')}[{', '.join(symbol(n) for n in x.shape)}]"
        if isinstance(x, (int, torch.SymInt)):
            return symbol(x)
        return f"({', '.join(value(y) for y in x)})"

    number: dict[Node, str] = {}

    def argument(x: Any) -> str:
        if isinstance(x, Node):
            return number[x]
        if isinstance(x, (list, tuple)):
            return f"[{', '.join(map(argument, x))}]"
        return str(x)

    lines = []
    for node in module.graph.nodes:
        if node.op == "output":
            returned = [argument(x) for x in tree_leaves(node.args) if isinstance(x, Node)]
            lines.append(f"return {', '.join(returned)}")
            continue
        if node.op == "call_function" and node.meta.get("val") is None:
            continue  # the exporter's own assertion
        number[node] = f"%{len(number)}"
        name = str(getattr(node.target, "__name__", node.target))
        if isinstance(node.target, torch._ops.OpOverload):
            name = str(node.target)
        arguments = [argument(x) for x in node.args] + [f"{n}={argument(x)}" for n, x in node.kwargs.items()]
        called = node.op if node.op == "placeholder" else f"{name}({', '.join(arguments)})"
        lines.append(f"{number[node]} = {called} : {value(node.meta['val'])}")
    return "\n".join(lines)
