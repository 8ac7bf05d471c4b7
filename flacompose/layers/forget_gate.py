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

    gate_channels: int  # how many forget gates a token has

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

        Other arguments, results and errors are those of
        [GatedLinearAttention][flacompose.layers.GatedLinearAttention.forward]; `state.conv` holds the inputs of the
        convolutions, in HGRN those of $i$ and of $f$, in HGRN2 those of $q$, $f$ and $i$.

        Args:
            lower_bound: Least value $\beta$ of the forget gates, in HGRN ``[D]``, in HGRN2 ``[H * K]``, from 0 to 1, in
                any float dtype. In the papers they are a cumulative softmax over the layers of a model, 0 in the first.
                Not used if `layer_idx` is 0. Default: 0.
        """
        return self._call(hidden_states, state, attention_mask, cu_seqlens, num_states, lower_bound)

    def _bound(self, x: Tensor, lower_bound: Tensor | None) -> Tensor | None:
        """Check `lower_bound`, and return it, or None if this layer does not use it."""
        if lower_bound is not None:
            _check.like(x, "lower_bound", lower_bound, (self.gate_channels,))
        return None if lower_bound is None or self.is_first else distributed_like(x, lower_bound)


def forget_gate(
    logits: Tensor,  # [B, T, ...]
    lower_bound: Tensor | None,  # of as many channels, from 0 to 1
) -> tuple[Tensor, Tensor]:
    r"""$1 - f$ and $\log f$ of the gate $f = \beta + (1 - \beta) \operatorname{sigmoid}(\text{logits})$.

    In float32 (float64 for float64). Values and derivatives keep all their digits where a gate is near 0 or near 1.
    """
    logits = upcast(logits)
    sigmoid = torch.sigmoid(logits)
    # PyTorch takes the derivative of a sigmoid near 1 for 0.
    forgotten = torch.where(logits > 0, torch.sigmoid(-logits), 1 - sigmoid)
    log_of_sigmoid = log_sigmoid(logits)
    if lower_bound is None:
        return forgotten, log_of_sigmoid
    bound = lower_bound.to(logits.dtype).reshape(logits.shape[2:])
    forgotten = (1 - bound) * forgotten
    # Near 1 a gate is not the sum below, which rounds to 1; near 0 it is not 1 minus a number, which cancels.
    near_1 = torch.log1p(-forgotten.clamp(max=0.5))
    f = bound + (1 - bound) * sigmoid
    # A gate below the least normal number has a bound of 0, and its reciprocal, a factor of the gradient, overflows.
    least = torch.finfo(f.dtype).tiny
    near_0 = torch.where(f > least, f.clamp(min=least).log(), log_of_sigmoid)
    return forgotten, torch.where(forgotten < 0.5, near_1, near_0)
