"""A pass of Inductor: kernels write the new state of a step where they read the old one."""

from __future__ import annotations

import hashlib
import operator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from flacompose._inductor import CustomGraphPass, kernel_side_table, triton_kernel_wrapper_functional


@torch.library.custom_op("flacompose::replaceable", mutates_args=())
def replaceable(state: Tensor) -> Tensor:
    """`state`, in memory that may be overwritten after it is read. `StatesInPlace` takes this out of the graph again.

    It tells the state that a graph is given from its other inputs: parameters, buffers, variables from an outer scope,
    and the operands of a graph within the graph.
    """
    return state.clone()


@replaceable.register_fake
def _(state: Tensor) -> Tensor:
    return torch.empty_like(state)


class StatesInPlace(CustomGraphPass):
    """Gives the kernel of a recurrence the memory of a `replaceable` old state for the new one, an output of the graph.

    So a decoder need not copy new states to where the next step reads them, which would read and write all of them once
    more. The caller of such a graph finds its input changed: this is for callers that never look at an old state again.
    Each program of the kernel reads its part of a state before it writes that part, and no other.
    """

    def __call__(self, graph: Graph) -> None:
        states = set()
        for marked in graph.find_nodes(op="call_function", target=torch.ops.flacompose.replaceable.default):
            (state,) = cast(Any, marked.args)
            if len(state.users) == 1:
                states.add(state)
            marked.replace_all_uses_with(state)
            graph.erase_node(marked)
        output = graph.output_node()
        results: list[Any] = list(cast(Any, output.args[0]))
        for i, new in enumerate(results):
            old = self._read_by(new, states)
            if old is None:
                continue
            launch, name = results[i].args
            # Inductor knows this form, a kernel that writes to an argument and a copy to the same argument at the end,
            # as a change of the argument in place, and leaves the copy out.
            launch.update_kwarg("kwargs", {**launch.kwargs["kwargs"], name: old})
            with graph.inserting_before(output):
                graph.call_function(torch.ops.aten.copy_.default, (old, new))
            results[i] = old
        output.args = (tuple(results),)

    def _read_by(self, new: Any, states: set[Node]) -> Node | None:
        """The state in `states` that the kernel with the result `new` reads, if `new` may overwrite it; else None."""
        if not isinstance(new, Node) or new.target is not operator.getitem:
            return None
        launch, name = cast(Any, new.args)
        if launch.target is not triton_kernel_wrapper_functional:
            return None
        arguments = launch.kwargs["kwargs"]
        old = arguments.get("initial")
        if name != "final" or not isinstance(old, Node) or old not in states:
            return None
        if not _is_recurrent(kernel_side_table.get_kernel(launch.kwargs["kernel_idx"])):
            return None
        # Whoever else reads the old state could meet the new one.
        reads = sum(x is old for x in arguments.values())
        if reads > 1 or len(old.users) > 1 or len(new.users) > 1:
            return None
        x, y = (node.meta["val"] for node in (old, arguments[name]))
        return old if (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype) else None

    def uuid(self) -> str:
        """The key of this pass in Inductor's cache."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _is_recurrent(kernel: Any) -> bool:
    from flacompose.ops._tiles.blocks import matrix_token_kernel  # which imports Triton

    return kernel is matrix_token_kernel
