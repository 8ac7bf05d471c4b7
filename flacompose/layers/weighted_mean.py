"""The base of Based and ReBased: linear attention with many features. Its outputs are weighted means of values."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flacompose._errors import ValueError
from flacompose.layers import _check
from flacompose.layers.layout import Layout
from flacompose.layers.recurrent import Factory, RecurrentLayer, linears
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops import chunk_linear_attn, fused_recurrent_linear_attn
from flacompose.ops._arguments.large_heads import Op, by_keys, by_values
from flacompose.ops._tensors.dtype import autocast_on, upcast


class WeightedMeanLayer(RecurrentLayer):
    """A layer that divides the output of linear attention by the sum of its weights and `eps`.

    The sum is the output of one more value, which is 1 for every token. So it needs no second recurrence.
    """

    chunk_modes = ("parallel", "fused_chunk")
    fusible = ("q_proj", "k_proj", "v_proj")
    feature_map: nn.Module

    def _add_heads(
        self, num_heads: int, num_key_value_heads: int, feature_dim: int, features: int, factory: Factory
    ) -> None:
        """Check these arguments, and make the projections. Keys of a head are mapped to `features`."""
        _check.count("num_heads", num_heads)
        _check.integer("num_key_value_heads", num_key_value_heads)
        if num_key_value_heads != num_heads:
            raise ValueError(
                f"num_key_value_heads must be num_heads = {num_heads}, got {num_key_value_heads}"
            )
        H, K, V = num_heads, feature_dim, self.hidden_size // num_heads
        if V < 1:
            raise ValueError(f"hidden_size must be at least num_heads = {H}, got {self.hidden_size}")
        self.num_heads, self.feature_dim, self.head_k_dim, self.head_v_dim = H, K, K, V
        sizes = H * K, H * K, H * V
        self.q_proj, self.k_proj, self.v_proj = linears(self.hidden_size, sizes, factory)
        self.o_proj = nn.Linear(H * V, self.hidden_size, bias=False, **factory)
        self.state_shapes = StateShapes(((H, features, V + 1),))

    def _check_mean(self, feature_dim: int, causal: bool, eps: float) -> None:
        _check.count("feature_dim", feature_dim)
        _check.flags(causal=causal)
        if not causal:
            raise ValueError("causal must be True: a recurrence sees no later token, got False")
        _check.positive("eps", eps)  # at pads before the first token, all weights are 0
        self.eps = eps

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in self._projections(x))
        # Masked after the map, since it may not map 0 to 0.
        q, k = self.feature_map(q), tokens.masked(self.feature_map(k))
        values = torch.cat([upcast(v), torch.ones_like(upcast(v[..., :1]))], -1)
        op = self._op(chunk_linear_attn, fused_recurrent_linear_attn, x, None, tokens)
        # Without autocast, nothing is rounded before the division.
        with torch.autocast(x.device.type, enabled=False) if autocast_on(x.device) else nullcontext():
            o, recurrent = by_values(partial(_by_keys, op), past.recurrent, q, k, values)
        y = (o[..., :-1] / (o[..., -1:] + self.eps)).to(v.dtype)
        return self.o_proj(y.flatten(2)), RecurrentState(recurrent)


def _by_keys(op: Op, q: Tensor, k: Tensor, v: Tensor, *, initial_state: Any) -> tuple[Tensor, Tensor]:
    return by_keys(op, initial_state, q, k, v, scale=1.0)
