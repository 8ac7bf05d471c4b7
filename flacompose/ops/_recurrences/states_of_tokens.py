"""Intermediate states: the states after some of the last tokens, from calls of a recurrence's recurrent form.

The tokens are cut after each token whose state is wanted. The parts are computed one after the other, each
from the state of the part before. So the results are those of shorter calls, and so are all derivatives.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import torch
from torch import Tensor

from flacompose._torch import OpOverload
from flacompose.ops._operators.signature import Signature


class Steps:
    """The states of calls with `count` and `stride`: after the last token, and every `stride` before.

    Args:
        of_forms: the signature of the recurrence. Every tensor that has an axis ``T`` has it second.
        recurrent: the operator of the form. The graph of a derivative calls it once for each part.
    """

    def __init__(self, of_forms: Signature[Any], recurrent: OpOverload) -> None:
        self.recurrent = recurrent
        self.of_tokens = {name for name, axes in of_forms.axes.items() if "T" in axes.split()}
        o, *_ = get_type_hints(of_forms.outputs, include_extras=True).values()
        _, *final = of_forms.outputs._fields
        # A state is one tensor or several, named `initial_x` before the tokens and `final_x` after them.
        self.initial = [x.replace("final", "initial") for x in final]
        states = {
            x.replace("final_state", "states"): of_forms.axes[x].replace("N", "N count", 1) for x in final
        }
        self.signature = of_forms.with_results("count", "stride", o=o, **states)

    def forward(self, inputs: Any, count: int, stride: int) -> tuple[Tensor, ...]:
        """``(o [B, T, ...], states [N, count, ...])`` of sequences in rows, with all states of the form."""
        T = inputs[0].shape[1]
        ends = [T - stride * i for i in reversed(range(count))]
        outputs, states = [], []
        state = [getattr(inputs, x) for x in self.initial]
        for start, end in zip([0, *ends], ends):
            of_tokens = [x for x in inputs._fields if x in self.of_tokens and getattr(inputs, x) is not None]
            part = {x: getattr(inputs, x)[:, start:end] for x in of_tokens}
            o, *state = self.recurrent(*inputs._replace(**part, **dict(zip(self.initial, state))))
            outputs.append(o)
            states.append(state)
        return torch.cat(outputs, 1), *(torch.stack(parts, 1) for parts in zip(*states, strict=True))
