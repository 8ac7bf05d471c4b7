"""The states after some of the last tokens, and their gradient, from a family's forms in PyTorch.

The tokens are cut behind each token whose state is wanted. The parts are computed one after the other, each from the
state of the one before. So the results are those of shorter calls, and are differentiable to any order as these are.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flacompose.ops.families._signature import BackwardCall, Gradients, Signature


class Steps:
    """One call: the tokens of `inputs`, with the states after the last of them and after those ``stride`` before it.

    Args:
        eager: the family's `forward` and `backward` in PyTorch.
        signature: of the family. In the axes of a tensor ``T`` is the second wherever there is one.
        inputs: its arguments, of sequences in rows.
        count: how many states are wanted.
        stride: how many tokens lie between two of them.
    """

    def __init__(
        self, eager: ModuleType, signature: Signature[Any], inputs: Any, count: int, stride: int
    ) -> None:
        self.eager, self.signature, self.inputs = eager, signature, inputs
        self.of_tokens = {name for name, axes in signature.axes.items() if "T" in axes.split()}
        T = inputs[0].shape[1]
        ends = [T - stride * i for i in reversed(range(count))]
        self.windows = [slice(start, end) for start, end in zip([0, *ends], ends)]

    def forward(self) -> tuple[Tensor, Tensor]:
        """``(o [B, T, ...], states [N, count, ...])``."""
        outputs, states = [], []
        state = self.inputs.initial_state
        for window in self.windows:
            o, state = self.eager.forward(self._part(window, state))
            outputs.append(o)
            states.append(state)
        return torch.cat(outputs, 1), torch.stack(states, 1)

    def backward(self, call: BackwardCall[Any]) -> Gradients:
        """The gradients of the inputs, as the family's `backward` returns them, where `call` is of this call."""
        do, d_states = call.arriving
        starts = [self.inputs.initial_state]
        for window in self.windows[:-1]:
            starts.append(self.eager.forward(self._part(window, starts[-1]))[1])
        made: list[Gradients] = []
        d_state: Tensor | None = None
        for i, (window, start) in reversed([*enumerate(zip(self.windows, starts))]):
            if d_states is not None:
                d_state = d_states[:, i] if d_state is None else d_states[:, i] + d_state
            arriving = self.signature.outputs(None if do is None else do[:, window], d_state)
            # The gradient of a state between two parts is always needed.
            wanted = call.wanted | ({"initial_state"} if i > 0 else set())
            part = BackwardCall(self.signature, self._part(window, start), arriving, wanted)
            made.append(self.eager.backward(part))
            d_state = made[-1].pop("initial_state", None)
        found = {name: self._combined(name, [part[name] for part in reversed(made)]) for name in made[0]}
        return found if d_state is None else found | {"initial_state": d_state}

    def _combined(self, name: str, parts: list[Tensor]) -> Tensor:
        """The gradient of an input from those of all parts: joined along the tokens, or added up if it has none."""
        return torch.cat(parts, 1) if name in self.of_tokens else torch.stack(parts).sum(0)

    def _part(self, window: slice, state: Tensor | None) -> Any:
        tokens = {
            name: x[:, window]
            for name, x in self.inputs._asdict().items()
            if name in self.of_tokens and x is not None
        }
        return self.inputs._replace(**tokens, initial_state=state)
