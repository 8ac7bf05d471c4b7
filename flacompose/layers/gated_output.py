"""The output of GLA and similar layers: a norm of each head, then a gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flacompose.layers.activation import activation
from flacompose.layers.layout import rows_of, tokens_of
from flacompose.layers.norm import GatedRMSNorm, RMSNorm
from flacompose.layers.recurrent import Factory, RecurrentLayer


class GatedOutputLayer(RecurrentLayer):
    """A layer that norms and gates its heads, by one module or by two, which round twice.

    The names of the parameters differ between one module and two.
    """

    num_heads: int
    o_proj: nn.Module

    def _add_output_norm(
        self,
        V: int,
        elementwise_affine: bool | None,
        norm_eps: float,
        gate_fn: str,
        fuse_norm: bool,
        factory: Factory,
    ) -> None:
        """Make the norm of heads of ``V`` values. `fuse_norm` fuses it with a "swish" gate."""
        self.gate_fn = activation("gate_fn", gate_fn)
        self.fuse_norm_and_gate = fuse_norm and gate_fn == "swish"
        if self.fuse_norm_and_gate:
            self.g_norm_swish_gate = GatedRMSNorm(V, elementwise_affine, norm_eps, **factory)
        else:
            device, dtype = factory["device"], factory["dtype"] or torch.float32
            self.g_norm = RMSNorm(V, elementwise_affine, norm_eps, device, dtype)

    def _output(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """``o [B, T, H, V]``, normed, gated and projected to ``[B, T, hidden_size]``.

        The gate may be rows, as `rows_of` makes them.
        """
        like, o = o, rows_of(o)
        if gate is not None:
            gate = rows_of(gate).unflatten(-1, (self.num_heads, -1))
        if self.fuse_norm_and_gate:
            o = self.g_norm_swish_gate(o, gate)
        else:
            o = self.g_norm(o) if gate is None else self.g_norm(o) * self.gate_fn(gate)
        return tokens_of(self.o_proj(o.flatten(-2)), like)
