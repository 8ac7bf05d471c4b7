"""A pass of Inductor: kernels write a state where they read it, if the graph ends by copying it there."""

from __future__ import annotations

import hashlib
import operator
from pathlib import Path
from typing import Any

import torch
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor.custom_graph_pass import CustomGraphPass


class StatesInPlace(CustomGraphPass):
    """Gives kernels of one token the memory of the old state for the new one, which saves a copy of the state.

    Operators return states as new tensors. A graph that then copies them over the old ones reads and writes every
    state once more. Each program of these kernels reads its part of a state before it writes that part, and no other.
    """

    # The names of the kernels, and of their arguments for the old state and the new one.
    KERNELS = {"recurrent_kernel": ("initial", "final")}

    def __call__(self, graph: torch.fx.Graph) -> None:
        for copy in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            old, new = copy.args[:2]
            if new.op != "call_function" or new.target is not operator.getitem:
                continue
            launch, name = new.args
            if launch.target is not triton_kernel_wrapper_functional:
                continue
            arguments = launch.kwargs["kwargs"]
            if self._replaces(_name(launch.kwargs["kernel_idx"]), name, arguments, old):
                # Inductor then sees a kernel that writes to an argument, and the copy that ends in the same argument.
                launch.update_kwarg("kwargs", {**arguments, name: old})

    def _replaces(self, kernel: str, name: str, arguments: dict[str, Any], old: torch.fx.Node) -> bool:
        if self.KERNELS.get(kernel, ("", ""))[1] != name or arguments.get(self.KERNELS[kernel][0]) is not old:
            return False
        x, y = (node.meta["val"] for node in (old, arguments[name]))
        return (
            old.op == "placeholder" and x.shape == y.shape and x.dtype == y.dtype and x.stride() == y.stride()
        )

    def uuid(self) -> str:
        """What Inductor's cache knows this pass by."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _name(kernel: int) -> str:
    """Of the kernel that Inductor has under this number."""
    function: Any = kernel_side_table.get_kernel(kernel)
    while not hasattr(function, "__name__"):  # the function within an autotuner
        function = function.fn
    return function.__name__
