"""The heads and the gated norm of layers of the gated delta rule."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flacompose.layers.heads import in_heads, sharded_like_values, value_heads
from flacompose.layers.layout import Layout, rows_of, tokens_of
from flacompose.layers.norm import GatedRMSNorm, RMSNorm
from flacompose.layers.recurrent import Factory, RecurrentLayer
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops._tensors.dtype import upcast


class DeltaLayer(RecurrentLayer):
    """A layer with `num_v_heads` value heads. Neighbouring value heads share a head of queries and keys."""

    allow_neg_eigval = False

    def _set_heads(
        self, num_heads: int, num_v_heads: int | None, head_dim: int, expand_v: float
    ) -> tuple[int, int, int, int]:
        """Check these arguments, set the attributes of heads, and return ``H, HV, K, V``."""
        HV, V, parts = value_heads(num_heads, num_v_heads, head_dim, expand_v)
        H, K = num_heads, head_dim
        if H * K > 4 * self.hidden_size:
            warnings.warn(
                f"queries and keys of num_heads * head_dim = {H} * {K} channels are far wider than "
                f"hidden_size = {self.hidden_size}; a smaller head_dim may be meant, as "
                f"head_dim={max(self.hidden_size // H, 1)}",
                stacklevel=3,
            )
        self.num_heads, self.num_v_heads, self.head_dim, self.value_parts = H, HV, head_dim, parts
        self.key_dim, self.value_dim, self.head_k_dim, self.head_v_dim = H * K, HV * V, K, V
        return H, HV, K, V

    def _add_output(
        self,
        gate: nn.Module | None,
        activation: str,
        norm_eps: float,
        conv: tuple[tuple[int, int], ...],
        factory: Factory,
    ) -> None:
        """Make the norm of heads, gated by the projection `gate` of the input, and the shapes of the state."""
        HV, V, parts = self.num_v_heads, self.head_v_dim, self.value_parts
        if gate is not None:
            self.g_proj = gate
            self.o_norm: RMSNorm = GatedRMSNorm(V, True, norm_eps, **factory, activation=activation)
        else:
            self.o_norm = RMSNorm(V, True, norm_eps, factory["device"], factory["dtype"] or torch.float32)
        self.o_proj = nn.Linear(HV * V, self.hidden_size, bias=False, **factory)
        self.state_shapes = StateShapes(((HV * parts, self.head_k_dim, V // parts),), conv)

    def _activated(
        self, q: Tensor, k: Tensor, v: Tensor, past: RecurrentState, tokens: Layout
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Queries, keys and values after their convolutions and silu, and the new states of the convolutions."""
        outputs, conv = self._convolved((q, k, v), past, tokens)
        return (outputs if self.use_short_conv else tuple(F.silu(y) for y in outputs)), conv

    def _in_heads(self, v: Tensor, *of_keys: Tensor) -> list[Tensor]:
        """``v [B, T, HV * V]`` and `of_keys` in heads of values. Each part of a large head is a head.

        `of_keys` are ``[B, T, H * K]`` or ``[B, T, H, K]``.
        """
        heads = self.num_v_heads * self.value_parts
        keys = (y if y.ndim == 4 else in_heads(y, self.num_heads) for y in of_keys)
        return [v.unflatten(-1, (heads, -1)), *(sharded_like_values(y, v, heads) for y in keys)]

    def _gate_of_keys(self, b: Tensor) -> Tensor:
        """The share of the stored value that is replaced: at most 1, or 2 with `allow_neg_eigval`."""
        gate = upcast(b).sigmoid()
        return 2 * gate if self.allow_neg_eigval else gate

    def _output(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """``o [B, T, heads, V]`` normed, gated and projected to ``[B, T, hidden_size]``.

        The gate may be rows, as `rows_of` makes them.
        """
        like, o = o, rows_of(o)
        if self.value_parts > 1:
            o = o.flatten(-2).unflatten(-1, (self.num_v_heads, -1))
        gate = None if gate is None else rows_of(gate)
        o = self.o_norm(o) if gate is None else self.o_norm(o, gate.unflatten(-1, (self.num_v_heads, -1)))
        return tokens_of(self.o_proj(o.flatten(-2)), like)
