"""The transition of each sequence, from a recurrence's forms: the state reached from zero, and the map.

This is the PyTorch implementation of ``<name>_ends`` and ``<name>_matrix_ends``, and on every device their
backward, which calls the backward of the forms.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flacompose._torch import OpOverload
from flacompose.ops._operators.signature import BackwardCall, Gradients, Signature
from flacompose.ops._tensors.dtype import state_dtype
from flacompose.ops._tensors.packed import of_tokens, sequence_count, summed


class DecayEnds:
    """The transition of a recurrence whose states decay: `end`, and a ``sum_x`` for each gate `x`.

    Args:
        of_forms: the signature of the recurrence.
        eager: its `forward` and `backward` in PyTorch.
        backward_of_forms: the operator of the forms' backward.
        gates: the names of the gates.
    """

    def __init__(
        self,
        of_forms: Signature[Any],
        eager: ModuleType,
        backward_of_forms: OpOverload,
        gates: tuple[str, ...],
    ) -> None:
        self.eager, self.backward_of_forms, self.gates = eager, backward_of_forms, gates
        end, maps = of_forms.axes["final_state"], self.axes_of_maps(of_forms.axes)
        self.signature = of_forms.with_results(end=end, **maps)

    def axes_of_maps(self, axes: dict[str, str]) -> dict[str, str]:
        return {f"sum_{x}": axes[x].replace("B T", "N") for x in self.gates}

    def forward(self, inputs: Any) -> tuple[Tensor, ...]:
        _, end = self.eager.forward(inputs._replace(initial_state=None))
        _, *zeros = map(torch.zeros_like, self.signature.fake(*inputs))
        given = (getattr(inputs, name) for name in self.gates)
        sums = (x if g is None else summed(g.to(x.dtype), inputs.cu_seqlens) for g, x in zip(given, zeros))
        return end, *sums

    def backward(self, call: BackwardCall[Any]) -> Gradients:
        d_end, *d_sums = call.arriving
        made = self.through_state(call, call.inputs._replace(initial_state=None), d_end)
        for name, d_sum in zip(self.gates, d_sums):
            if name in call.wanted and d_sum is not None:
                made[name] = made[name] + of_tokens(d_sum, made[name].shape[1], call.inputs.cu_seqlens)
        return call.select(**made)

    def through_state(self, call: BackwardCall[Any], inputs: Any, d_state: Tensor | None) -> Gradients:
        """The gradients that `call` wants, from the gradient of the final state of a form with these `inputs`."""
        names = self.signature.differentiable
        wanted = [x in call.wanted and x != "initial_state" for x in names]
        made = {x: torch.zeros_like(getattr(call.inputs, x)) for x in call.wanted}
        if d_state is not None:
            found = self.backward_of_forms(*inputs, None, d_state, wanted)
            made |= {x: dx for x, dx, want in zip(names, found, wanted) if want}
        return made


class MatrixEnds(DecayEnds):
    """The transition of a recurrence whose states are multiplied by a matrix: `end` and `matrix`.

    The matrix is the final state of a form that starts at the identity matrix, with values of zero. It is
    computed as further columns of the same call.
    """

    def axes_of_maps(self, axes: dict[str, str]) -> dict[str, str]:
        return {"matrix": axes["final_state"].removesuffix("V") + "K"}

    def forward(self, inputs: Any) -> tuple[Tensor, ...]:
        _, state = self.eager.forward(_with_identity(inputs))
        V, K = inputs.v.shape[-1], inputs.q.shape[-1]
        end, matrix = state.split([V, K], -1)
        return end.clone(), matrix

    def backward(self, call: BackwardCall[Any]) -> Gradients:
        ends = self.signature.fake(*call.inputs)
        d_ends = [torch.zeros_like(x) if d is None else d for x, d in zip(ends, call.arriving)]
        made = self.through_state(call, _with_identity(call.inputs), torch.cat(d_ends, -1))
        if "v" in made:
            made["v"] = made["v"][..., : call.inputs.v.shape[-1]]
        return call.select(**made)


def _with_identity(inputs: Any) -> Any:
    """`inputs` that start at zero with the identity matrix as further columns, whose values are zero."""
    v, K = inputs.v, inputs.q.shape[-1]
    N, (H, V) = sequence_count(v, inputs.cu_seqlens), v.shape[2:]
    eye = torch.eye(K, dtype=state_dtype(v.dtype), device=v.device).expand(N, H, K, K)
    return inputs._replace(v=F.pad(v, (0, K)), initial_state=F.pad(eye, (V, 0)))
