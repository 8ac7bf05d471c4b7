"""The states after some of the last tokens, and their gradient, from a family's forms in PyTorch.

The tokens are cut behind each token whose state is wanted. The parts are computed one after the other, each from the
state of the one before. So the results are those of shorter calls, and are differentiable to any order as these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class Steps:
    """One call: the tokens of `inputs`, with the states after the last of them and after those ``stride`` before it.

    Args:
        eager: the family's `forward` and `backward` in PyTorch.
        inputs: the named tuple of its arguments, of sequences in rows.
        axes: the names of the axes of each tensor, of which ``T`` is the second wherever there is one.
        count: how many states are wanted.
        stride: how many tokens lie between two of them.
    """

    def __init__(
        self, eager: ModuleType, inputs: Any, axes: Mapping[str, str], count: int, stride: int
    ) -> None:
        self.eager = eager
        self.inputs = inputs
        self.of_tokens = {name for name, names in axes.items() if "T" in names.split()}
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

    def backward(
        self, do: Tensor | None, d_states: Tensor | None, output_mask: Sequence[bool]
    ) -> tuple[Tensor, ...]:
        """The gradients of the inputs as the family's `backward` returns them, of which that of the state is last."""
        starts = [self.inputs.initial_state]
        for window in self.windows[:-1]:
            starts.append(self.eager.forward(self._part(window, starts[-1]))[1])
        made: list[tuple[Tensor, ...]] = []
        d_state: Tensor | None = None
        for i, (window, start) in reversed([*enumerate(zip(self.windows, starts))]):
            if d_states is not None:
                d_state = d_states[:, i] if d_state is None else d_states[:, i] + d_state
            part, d_part = self._part(window, start), None if do is None else do[:, window]
            # The gradient of a state between two parts is always needed.
            mask = [*output_mask[:-1], output_mask[-1] or i > 0]
            *gradients, d_state = self.eager.backward(part, d_part, d_state, mask)
            made.append(tuple(gradients))
        assert d_state is not None
        return *map(self._combined, self.inputs._fields, output_mask, zip(*reversed(made))), d_state

    def _part(self, window: slice, state: Tensor | None) -> Any:
        tokens = {
            name: x[:, window]
            for name, x in self.inputs._asdict().items()
            if name in self.of_tokens and x is not None
        }
        return self.inputs._replace(**tokens, initial_state=state)

    def _combined(self, name: str, wanted: bool, parts: tuple[Tensor, ...]) -> Tensor:
        """The gradient of an input from those of all parts: joined along the tokens, or added up if it has none."""
        if not wanted or getattr(self.inputs, name) is None:
            return parts[0]
        return torch.cat(parts, 1) if name in self.of_tokens else torch.stack(parts).sum(0)
