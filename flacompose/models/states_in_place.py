"""A pass of Inductor by which kernels overwrite the old state of a step with the new state."""

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
    """`state`, marked as memory that may be overwritten. `StatesInPlace` removes this operator from the graph.

    The mark distinguishes the state from other inputs of a graph: parameters, buffers, variables of an outer scope, and
    the operands of an inner graph.
    """
    return state.clone()


@replaceable.register_fake
def _(state: Tensor) -> Tensor:
    return torch.empty_like(state)


class StatesInPlace(CustomGraphPass):
    """Let the kernel of a recurrence write the new state, an output of the graph, over a `replaceable` old state.

    This saves a decoder the copy of all new states to the place where the next step reads them. It changes an input of
    the graph, so it is for callers that never use an old state again. It is safe since each program of the kernel reads
    only its own part of a state, before it writes this part.
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
            # A kernel that writes to an argument, and a final copy to the same argument: Inductor takes this form for a
            # change in place, and drops the copy.
            launch.update_kwarg("kwargs", {**launch.kwargs["kwargs"], name: old})
            with graph.inserting_before(output):
                graph.call_function(torch.ops.aten.copy_.default, (old, new))
            results[i] = old
        output.args = (tuple(results),)

    def _read_by(self, new: Any, states: set[Node]) -> Node | None:
        """The state in `states` that the kernel of `new` reads, if `new` may overwrite it; else None."""
        if not isinstance(new, Node) or new.target is not operator.getitem:
            return None
        launch, name = cast(Any, new.args)
        if launch.target is not triton_kernel_wrapper_functional:
            return None
        arguments = launch.kwargs["kwargs"]
        old = arguments.get("states_initial")
        if name != "states_final" or not isinstance(old, Node) or old not in states:
            return None
        if not _is_of_tokens(kernel_side_table.get_kernel(launch.kwargs["kernel_idx"])):
            return None
        # Any other reader of the old state might read the new state.
        reads = sum(x is old for x in arguments.values())
        if reads > 1 or len(old.users) > 1 or len(new.users) > 1:
            return None
        x, y = (node.meta["val"] for node in (old, arguments[name]))
        return old if (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype) else None

    def uuid(self) -> str:
        """The key of this pass in Inductor's cache."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _is_of_tokens(kernel: Any) -> bool:
    """Whether it is the copy, with a parameter for each field of its tuples, of the kernel of tokens."""
    from flacompose.ops._tiles.blocks import matrix_token_kernel  # which imports Triton

    return getattr(kernel, "copy_of", None) is matrix_token_kernel
