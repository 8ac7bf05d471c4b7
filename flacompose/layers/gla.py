"""Gated linear attention, https://arxiv.org/abs/2312.06635, section 4.4."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flacompose._errors import ValueError
from flacompose.layers import _check
from flacompose.layers.activation import activation, log_sigmoid
from flacompose.layers.gated_output import GatedOutputLayer
from flacompose.layers.heads import heads_of, repeat_heads, rows_in_heads
from flacompose.layers.layout import Layout, rows_of, tokens_of
from flacompose.layers.number import number
from flacompose.layers.recurrent import factory_of, linears, low_rank
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops import chunk_gla, fused_recurrent_gla
from flacompose.ops._tensors.dtype import upcast


class GatedLinearAttention(GatedOutputLayer):
    r"""A layer of gated linear attention, of $x$, per head:

    $$q = \phi(\operatorname{conv}(x W_q)) \quad k = \phi(\operatorname{conv}(x W_k)) \quad
    v = \operatorname{conv}(x W_v) \quad g = \operatorname{logsigmoid}(x W_1 W_2 + b) / \tau$$
    $$S_t = \operatorname{diag}(e^{g_t})\, S_{t-1} + k_t v_t^\top \qquad o_t = K^{-1/2}\, S_t^\top q_t \qquad
    y = \bigl(\operatorname{rmsnorm}(o) \odot \operatorname{gate}(x W_g)\bigr) W_o$$

    From "Gated Linear Attention Transformers with Hardware-Efficient Training" (<https://arxiv.org/abs/2312.06635>).
    Arguments, defaults and parameter names are as in flash-linear-attention 0.6, whose checkpoints load.

    Args:
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
            "fused_chunk" is refused, as in flash-linear-attention, where it raises an error.
        hidden_size: Size of the input and of the output.
        expand_k: Size of the keys of all heads: ``hidden_size * expand_k``.
        expand_v: Size of the values of all heads: ``hidden_size * expand_v``.
        num_heads: Number of heads ``H``.
        num_kv_heads: Number of heads of keys, decays and values. ``H / num_kv_heads`` neighbouring heads of queries
            share each. Default: ``H``.
        feature_map: Activation $\phi$ of queries and keys: "relu", "sigmoid", "logsigmoid", "silu" or "swish",
            "sqrelu", "gelu" (its tanh form). Default: none.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution` with silu.
        conv_size: Width ``W`` of the convolutions.
        conv_bias: Whether the convolutions have a bias.
        use_output_gate: Whether the normed output is gated.
        gate_fn: Activation of the output gate, with the same choices as `feature_map`.
        elementwise_affine: Whether the norm has a weight; None stands for False.
        norm_eps: Added to the mean square in the norm.
        gate_logit_normalizer: Divisor $\tau$ of the log-decay, above 0.
        gate_low_rank_dim: Rank of the decay's projection.
        clamp_min: Least log-decay. Default: none.
        fuse_norm: Whether a "swish" output gate is fused with the norm, as one module ``g_norm_swish_gate`` that rounds
            once. Otherwise the norm is a module ``g_norm`` that rounds its output.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default; float32 for a norm that is not fused with its gate.

    Raises:
        ValueError: If an argument has a wrong value, the heads do not divide the sizes, or a head has over 512 keys.
        TypeError: If an argument has the wrong type.
    """

    chunk_modes = ("fused_chunk",)
    fusible = ("q_proj", "k_proj", "v_proj", "g_proj", "gk_proj.0")
    clamp_min = number("clamp_min")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: float = 16,
        gate_low_rank_dim: int = 16,
        clamp_min: float | None = None,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx, conv_size)
        self._keep_flags(use_output_gate=use_output_gate)
        _check.flags(fuse_norm=fuse_norm)
        H, HKV, K, V = heads_of(hidden_size, num_heads, num_kv_heads, expand_k, expand_v)
        _check.positive("gate_logit_normalizer", gate_logit_normalizer)
        if clamp_min is not None:
            _check.number("clamp_min", clamp_min)
            if not clamp_min <= 0:
                raise ValueError(f"clamp_min must be at most 0, as log-decays are, got {clamp_min}")
        _check.count("gate_low_rank_dim", gate_low_rank_dim)
        self.num_heads, self.num_kv_heads, self.num_kv_groups = H, HKV, H // HKV
        self.key_dim, self.value_dim, self.head_k_dim, self.head_v_dim = H * K, H * V, K, V
        self.gate_logit_normalizer = gate_logit_normalizer
        self.clamp_min = clamp_min
        self.feature_map_fn = None if feature_map is None else activation("feature_map", feature_map)

        factory = factory_of(device, dtype)
        self.q_proj, self.k_proj, self.v_proj = linears(hidden_size, (H * K, HKV * K, HKV * V), factory)
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, H * V, bias=False, **factory)
        conv = self._add_convolutions("q k v", use_short_conv, conv_size, conv_bias, factory)
        self.gk_proj = low_rank(hidden_size, gate_low_rank_dim, HKV * K, True, factory)
        self.o_proj = nn.Linear(H * V, hidden_size, bias=False, **factory)
        self._add_output_norm(
            V, elementwise_affine, norm_eps, gate_fn, fuse_norm and use_output_gate, factory
        )
        self.state_shapes = StateShapes(((H, K, V),), conv)

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        q, k, v, gate, gk = self._projections(rows_of(x))
        if self.use_short_conv:
            q, k, v = (tokens_of(y, x) for y in (q, k, v))
        (q, k, v), conv = self._convolved((q, k, v), past, tokens)
        gk = log_sigmoid(upcast(gk)) / self.gate_logit_normalizer
        if self.clamp_min is not None:
            gk = gk.clamp(min=self.clamp_min)
        q = rows_in_heads(q, x, self.num_heads)
        k, v, gk = (rows_in_heads(y, x, self.num_kv_heads) for y in (k, v, gk))
        if self.feature_map_fn is not None:
            q, k = self.feature_map_fn(q), self.feature_map_fn(k)
        k, v, gk = (repeat_heads(y, self.num_kv_groups) for y in (tokens.masked(k), v, tokens.masked(gk)))

        gla = self._wide_op(chunk_gla, fused_recurrent_gla, x, past.recurrent, tokens)
        o, recurrent = gla(q, k, v, gk)
        return self._output(o, gate), RecurrentState(recurrent, conv)
