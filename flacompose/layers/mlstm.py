"""The layer of xLSTM with a matrix memory, https://arxiv.org/abs/2405.04517 and 2503.13427, section 3."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.initialization import copy_, with_initializers
from flacompose.layers.layout import Layout
from flacompose.layers.norm import GroupNorm
from flacompose.layers.number import number
from flacompose.layers.recurrent import RecurrentLayer, factory_of
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops import chunk_mlstm, fused_recurrent_mlstm
from flacompose.ops._tensors.dtype import upcast


class MLSTM(RecurrentLayer):
    r"""The mLSTM layer of xLSTM-7B, of $x$, per head:

    $$q = x W_q \quad k = x W_k \quad v = x W_v \quad
    i = c \tanh((x W_i + b_i) / c) \quad f = c \tanh((x W_f + b_f) / c)$$
    $$o = \operatorname{mlstm}(q, k, v, i, f) \qquad
    y = \bigl(\sigma(x W_o) \odot \operatorname{layernorm}(o)\bigr) W_{\text{out}}$$

    From "xLSTM: Extended Long Short-Term Memory" (<https://arxiv.org/abs/2405.04517>), in the
    version of "xLSTM 7B" (<https://arxiv.org/abs/2503.13427>). The recurrence is
    [chunk_mlstm][flacompose.ops.chunk_mlstm]. Parameter names are as in the package xlstm and of transformers.
    Layers of their models with ``weight_mode="single"`` load. The state has ``(C, n, m)`` in `recurrent`.

    Args:
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
        hidden_size: Size of the input and of the output.
        num_heads: Number of heads ``H``, each with its two gates.
        qk_dim_factor: Size of the keys of all heads: ``hidden_size * qk_dim_factor``.
        v_dim_factor: Size of the values of all heads: ``hidden_size * v_dim_factor``.
        gate_soft_cap: Bound $c$ of both gates before the exponential and the sigmoid, above 0. None for no bound.
        use_bias: Whether the norm and the projections, except for the gates, have a bias.
        norm_eps: Added to the variance in the norm.
        eps: Added to the denominator of the recurrence.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default.

    Raises:
        ValueError: If an argument has a wrong value, the heads do not divide the sizes, or a head has over 512 keys or
            values.
        TypeError: If an argument has the wrong type.

    Before training, input gates are nearly closed, at -10, and forget gates are between 3 and 6, for every input.
    """

    fusible = ("q", "k", "v", "ogate_preact", "igate_preact", "fgate_preact")
    eps = number("eps")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        num_heads: int = 4,
        qk_dim_factor: float = 0.5,
        v_dim_factor: float = 1.0,
        gate_soft_cap: float | None = 15.0,
        use_bias: bool = False,
        norm_eps: float = 1e-6,
        eps: float = 1e-6,
        layer_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx)
        H, K, V = num_heads, *self._head_sizes(num_heads, qk_dim_factor, v_dim_factor)
        if gate_soft_cap is not None:
            _check.positive("gate_soft_cap", gate_soft_cap)
        _check.not_negative("eps", eps)
        self._keep_flags(use_bias=use_bias)
        self.num_heads, self.gate_soft_cap, self.eps = H, gate_soft_cap, eps

        factory = factory_of(device, dtype)
        self.q, self.k, self.v, self.ogate_preact = (
            nn.Linear(hidden_size, H * D, use_bias, **factory) for D in (K, K, V, V)
        )
        self.igate_preact, self.fgate_preact = (
            with_initializers(
                nn.Linear(hidden_size, H, **factory),
                weight=nn.init.zeros_,
                bias=partial(_evenly_, first=a, last=b),
            )
            for a, b in ((-10, -10), (3, 6))
        )
        self.multihead_norm = GroupNorm(H, H * V, norm_eps, **factory)
        if not use_bias:
            self.multihead_norm.register_parameter("bias", None)
        self.out_proj = nn.Linear(H * V, hidden_size, use_bias, **factory)
        self.state_shapes = StateShapes(((H, K, V), (H, K), (H,)))

    def _head_sizes(self, num_heads: int, qk_dim_factor: float, v_dim_factor: float) -> tuple[int, int]:
        _check.count("num_heads", num_heads)
        sizes = []
        for name, factor in (("qk_dim_factor", qk_dim_factor), ("v_dim_factor", v_dim_factor)):
            _check.number(name, factor)
            size = _check.positive_int(
                f"hidden_size * {name}", self.hidden_size * factor, "num_heads", num_heads
            )
            _check.head_size(f"hidden_size * {name} / num_heads", size // num_heads)
            sizes.append(size // num_heads)
        return sizes[0], sizes[1]

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        q, k, v, gate, *gates = self._projections(x)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in (q, k, v))
        i, f = (upcast(y) for y in gates)
        if self.gate_soft_cap is not None:
            i, f = (self.gate_soft_cap * torch.tanh(y / self.gate_soft_cap) for y in (i, f))
        # A pad does not change the state.
        i, f = tokens.masked(i, -torch.inf), tokens.masked(f, torch.inf)
        mlstm = self._op(chunk_mlstm, fused_recurrent_mlstm, x, past.recurrent, tokens)
        o, recurrent = mlstm(q, k, v, i, f, eps=self.eps)
        o = self.multihead_norm(o).flatten(2) * gate.sigmoid()
        return self.out_proj(o), RecurrentState(recurrent)


@torch.no_grad()
def _evenly_(bias: Tensor, first: float, last: float) -> None:
    """Fill `bias` with evenly spaced numbers from `first` to `last`."""
    copy_(bias, torch.linspace(first, last, len(bias)))
