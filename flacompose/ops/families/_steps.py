"""The states after some of the last tokens, and their gradient, from a family's forms in PyTorch.

The tokens are cut behind each token whose state is wanted. The parts are computed one after the other, each from the
state of the one before. So the results are those of shorter calls, and are differentiable to any order as these are.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, get_type_hints

import torch
from torch import Tensor

from flacompose.ops.families._signature import BackwardCall, Gradients, Signature


class Steps:
    """The states of calls with `count` and `stride`: after the last token, and after those that lie `stride` before it.

    Args:
        of_forms: the signature of the family. In the axes of a tensor ``T`` is the second wherever there is one.
        eager: the family's `forward` and `backward` in PyTorch.
    """

    def __init__(self, of_forms: Signature[Any], eager: ModuleType) -> None:
        self.eager, self.of_forms = eager, of_forms
        self.of_tokens = {name for name, axes in of_forms.axes.items() if "T" in axes.split()}
        o, state = get_type_hints(of_forms.outputs, include_extras=True).values()
        states = of_forms.axes["final_state"].replace("N", "N count", 1)
        self.signature = of_forms.with_results("count", "stride", o=o, states=states)

    def forward(self, inputs: Any, count: int, stride: int) -> tuple[Tensor, Tensor]:
        """``(o [B, T, ...], states [N, count, ...])`` of sequences in rows."""
        outputs, states, state = [], [], inputs.initial_state
        for window in _windows(inputs, count, stride):
            o, state = self.eager.forward(self._part(inputs, window, state))
            outputs.append(o)
            states.append(state)
        return torch.cat(outputs, 1), torch.stack(states, 1)

    def backward(self, call: BackwardCall[Any]) -> Gradients:
        """The gradients of the inputs, as the family's `backward` returns them."""
        inputs, (do, d_states) = call.inputs, call.arriving
        windows, starts = _windows(inputs, *call.numbers), [inputs.initial_state]
        for window in windows[:-1]:
            starts.append(self.eager.forward(self._part(inputs, window, starts[-1]))[1])
        made: list[Gradients] = []
        d_state: Tensor | None = None
        for i, (window, start) in reversed([*enumerate(zip(windows, starts))]):
            if d_states is not None:
                d_state = d_states[:, i] if d_state is None else d_states[:, i] + d_state
            arriving = self.of_forms.outputs(None if do is None else do[:, window], d_state)
            # The gradient of a state between two parts is always needed.
            wanted = call.wanted | ({"initial_state"} if i > 0 else set())
            part = BackwardCall(self.of_forms, self._part(inputs, window, start), arriving, wanted)
            made.append(self.eager.backward(part))
            d_state = made[-1].pop("initial_state", None)
        found = {name: self._combined(name, [part[name] for part in reversed(made)]) for name in made[0]}
        return found if d_state is None else found | {"initial_state": d_state}

    def _combined(self, name: str, parts: list[Tensor]) -> Tensor:
        """The gradient of an input from those of all parts: joined along the tokens, or added up if it has none."""
        return torch.cat(parts, 1) if name in self.of_tokens else torch.stack(parts).sum(0)

    def _part(self, inputs: Any, window: slice, state: Tensor | None) -> Any:
        of_tokens = [x for x in inputs._fields if x in self.of_tokens and getattr(inputs, x) is not None]
        return inputs._replace(**{x: getattr(inputs, x)[:, window] for x in of_tokens}, initial_state=state)


def _windows(inputs: Any, count: int, stride: int) -> list[slice]:
    """The tokens up to each of those whose state is wanted."""
    T = inputs[0].shape[1]
    ends = [T - stride * i for i in reversed(range(count))]
    return [slice(start, end) for start, end in zip([0, *ends], ends)]
