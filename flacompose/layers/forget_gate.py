"""The forget gates of HGRN and HGRN2, https://arxiv.org/abs/2311.04823, section 3.2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from flacompose._peer import explained
from flacompose.layers import _check
from flacompose.layers.activation import log_sigmoid
from flacompose.layers.layout import distributed_like
from flacompose.layers.recurrent import RecurrentLayer
from flacompose.layers.state import RecurrentState, RecurrentStates
from flacompose.ops._tensors.dtype import upcast


class ForgetGateLayer(RecurrentLayer):
    """A layer whose forget gates may have a lower bound, which is an argument of each call."""

    gate_channels: int  # the number of forget gates of a token

    if TYPE_CHECKING:  # nn.Module says nothing of the types of a call

        @overload
        def __call__(
            self,
            hidden_states: Tensor,
            state: RecurrentState | None = None,
            *,
            attention_mask: Tensor | None = None,
            cu_seqlens: Tensor | None = None,
            lower_bound: Tensor | None = None,
            num_states: None = None,
        ) -> tuple[Tensor, RecurrentState]: ...

        @overload
        def __call__(
            self,
            hidden_states: Tensor,
            state: RecurrentState | None = None,
            *,
            attention_mask: Tensor | None = None,
            cu_seqlens: Tensor | None = None,
            lower_bound: Tensor | None = None,
            num_states: int,
        ) -> tuple[Tensor, RecurrentStates]: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @explained
    def forward(
        self,
        hidden_states: Tensor,
        state: RecurrentState | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_states: int | None = None,
        lower_bound: Tensor | None = None,
    ) -> tuple[Tensor, RecurrentState | RecurrentStates]:
        r"""Go through ``T`` tokens from `state`.

        Other arguments, results and errors are as in
        [GatedLinearAttention][flacompose.layers.GatedLinearAttention.forward]. `state.conv` holds the inputs of the
        convolutions of $i$ and $f$ in HGRN, and of $q$, $f$ and $i$ in HGRN2.

        Args:
            lower_bound: Lower bound $\beta$ of the forget gates, ``[D]`` in HGRN and ``[H * K]`` in HGRN2, from 0 to 1,
                in any float dtype. In the papers it is a cumulative softmax over the layers of a model, 0 in the first.
                Not used if `layer_idx` is 0. Default: 0.
        """
        return self._call(hidden_states, state, attention_mask, cu_seqlens, num_states, lower_bound)

    def _bound(self, x: Tensor, lower_bound: Tensor | None) -> Tensor | None:
        """Check `lower_bound`; return it, or None if this layer does not use it."""
        if lower_bound is not None:
            _check.like(x, "lower_bound", lower_bound, (self.gate_channels,))
        return None if lower_bound is None or self.is_first else distributed_like(x, lower_bound)


def forget_gate(
    logits: Tensor,  # [B, T, ...]
    lower_bound: Tensor | None,  # of the same channels, from 0 to 1
) -> tuple[Tensor, Tensor]:
    r"""$1 - f$ and $\log f$ of the gate $f = \beta + (1 - \beta) \operatorname{sigmoid}(\text{logits})$.

    The results are float32 (float64 for float64). Values and derivatives are precise for gates near 0 and near 1.
    """
    logits = upcast(logits)
    sigmoid = torch.sigmoid(logits)
    # PyTorch rounds the derivative of a sigmoid near 1 to 0.
    forgotten = torch.where(logits > 0, torch.sigmoid(-logits), 1 - sigmoid)
    log_of_sigmoid = log_sigmoid(logits)
    if lower_bound is None:
        return forgotten, log_of_sigmoid
    bound = lower_bound.to(logits.dtype).reshape(logits.shape[2:])
    forgotten = (1 - bound) * forgotten
    # Near 1 the sum of the formula rounds to 1, and near 0 the subtraction from 1 cancels: so use one for each.
    near_1 = torch.log1p(-forgotten.clamp(max=0.5))
    f = bound + (1 - bound) * sigmoid
    # The reciprocal of a gate below the least normal number, a factor of the gradient, would overflow.
    least = torch.finfo(f.dtype).tiny
    near_0 = torch.where(f > least, f.clamp(min=least).log(), log_of_sigmoid)
    return forgotten, torch.where(forgotten < 0.5, near_1, near_0)
