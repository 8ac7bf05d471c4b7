"""The feed-forward networks of blocks. The networks of RWKV6 and RWKV7 also read the previous token."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flacompose.layers.activation import activation
from flacompose.layers.fused_projections import FusesProjections
from flacompose.layers.initialization import orthogonal_, with_initializers
from flacompose.layers.layout import Layout, rows_of, tokens_of
from flacompose.layers.recurrent import StatefulLayer, factory_of, linears
from flacompose.layers.rwkv6 import LerpLinear
from flacompose.layers.rwkv7 import first_mix_, place_of
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.layers.token_shift import as_projected, token_shift


class SwiGLU(FusesProjections):
    r"""$y = \bigl(\operatorname{silu}(x W_{gate}) \odot x W_{up}\bigr) W_{down}$, https://arxiv.org/abs/2002.05202."""

    fusible = ("gate_proj", "up_proj")

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = factory_of(device, dtype)
        self.gate_proj, self.up_proj = linears(hidden_size, (intermediate_size,) * 2, factory)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        y, up = self._projections(x)
        y = F.silu(y)  # reuse the name, so that the old tensor is freed
        y = y * up
        return self.down_proj(y)


class RWKV6FeedForward(StatefulLayer):
    r"""The channel mixing of RWKV6, of $x$, with $\delta_t = x_{t-1} - x_t$ (https://arxiv.org/abs/2404.05892):

    $$r = (x + \delta \odot \mu^r) W_r \qquad k = (x + \delta \odot \mu^k) W_k \qquad
    y = \sigma(r) \odot \operatorname{act}(k) W_v$$

    It is called like a layer. Its state is the last token of each sequence.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        act: str = "sqrelu",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size)
        factory = factory_of(device, dtype)
        self.key = LerpLinear(hidden_size, intermediate_size, **factory)
        self.value = nn.Linear(intermediate_size, hidden_size, bias=False, **factory)
        self.receptance = LerpLinear(hidden_size, hidden_size, **factory)
        self.act_fn = activation("feed_forward_act", act)
        self.state_shapes = StateShapes((), shift=(hidden_size,))

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        x = as_projected(x)
        before, shift = token_shift(x, past.shift, tokens.lengths, tokens.cu_seqlens, tokens.num_states)
        rows, delta = rows_of(x), rows_of(before - x)
        y = self.receptance(rows, delta).sigmoid() * self.value(self.act_fn(self.key(rows, delta)))
        return tokens_of(y, x), RecurrentState((), shift=shift)


class RWKV7FeedForward(StatefulLayer):
    r"""The channel mixing of RWKV7, of $x$, with $\delta_t = x_{t-1} - x_t$ (https://arxiv.org/abs/2503.14456):

    $$y = \operatorname{act}\bigl((x + \delta \odot \mu) W_k\bigr) W_v$$

    It is called like a layer. Its state is the last token of each sequence. Its initialization, as in
    flash-linear-attention 0.6, depends on `layer_idx` and `num_hidden_layers`. Without one of these, it is initialized
    as in a model of one layer.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        act: str = "sqrelu",
        layer_idx: int | None = None,
        num_hidden_layers: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size)
        factory = factory_of(device, dtype)
        index, layers = place_of(layer_idx, num_hidden_layers)
        self.first_power = (1 - index / layers) ** 4
        self.x_k = nn.Parameter(torch.empty(hidden_size, **factory))
        self.key = with_initializers(
            nn.Linear(hidden_size, intermediate_size, bias=False, **factory),
            weight=partial(orthogonal_, gain=1.0),
        )
        self.value = with_initializers(
            nn.Linear(intermediate_size, hidden_size, bias=False, **factory), weight=nn.init.zeros_
        )
        self.act_fn = activation("feed_forward_act", act)
        self.state_shapes = StateShapes((), shift=(hidden_size,))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameter of the layer itself."""
        first_mix_(self.x_k, self.first_power)

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        x = as_projected(x)
        before, shift = token_shift(x, past.shift, tokens.lengths, tokens.cu_seqlens, tokens.num_states)
        mixed = (rows_of(x) + rows_of(before - x) * self.x_k).to(x.dtype)
        return tokens_of(self.value(self.act_fn(self.key(mixed))), x), RecurrentState((), shift=shift)
