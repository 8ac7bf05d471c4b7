"""A pass of Inductor: kernels write the new state of a step where they read the old one."""

from __future__ import annotations

import hashlib
import operator
from pathlib import Path
from typing import Any, cast

import torch
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node


class StatesInPlace(CustomGraphPass):
    """Gives the kernel of a recurrence the memory of the old state, an input of the graph, for the new one, an output.

    So a decoder need not copy new states to where the next step reads them, which would read and write all of them once
    more. The caller of such a graph finds its input changed: this is for callers that never look at an old state again.
    Each program of the kernel reads its part of a state before it writes that part, and no other.
    """

    def __call__(self, graph: Graph) -> None:
        output = graph.output_node()
        results: list[Any] = list(cast(Any, output.args[0]))
        for i, new in enumerate(results):
            old = self._read_by(new)
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

    def _read_by(self, new: Any) -> Node | None:
        """The old state that the kernel reads whose result is `new`, if it can be written there; else None."""
        if not isinstance(new, Node) or new.target is not operator.getitem:
            return None
        launch, name = cast(Any, new.args)
        if launch.target is not triton_kernel_wrapper_functional:
            return None
        arguments = launch.kwargs["kwargs"]
        old = arguments.get("initial")
        if name != "final" or not isinstance(old, Node) or old.op != "placeholder":
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
        """What Inductor's cache knows this pass by."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _is_recurrent(kernel: Any) -> bool:
    from flacompose.ops.families._kernels import recurrent_kernel  # which imports Triton

    return kernel is recurrent_kernel
