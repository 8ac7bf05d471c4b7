"""Gated slot attention, https://arxiv.org/abs/2409.07146."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flacompose._errors import ValueError
from flacompose.layers import _check
from flacompose.layers.activation import log_sigmoid
from flacompose.layers.feature_map import T2RFeatureMap
from flacompose.layers.heads import heads_of, rows_in_heads
from flacompose.layers.layout import Layout, rows_of, tokens_of
from flacompose.layers.norm import RMSNorm
from flacompose.layers.number import number
from flacompose.layers.recurrent import RecurrentLayer, factory_of, linears
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops import chunk_gsa, fused_recurrent_gsa
from flacompose.ops._tensors.dtype import upcast


class GatedSlotAttention(RecurrentLayer):
    r"""A layer of gated slot attention, of $x$, per head of ``M`` slots:

    $$q = \phi(\operatorname{conv}(x W_q)) \quad k = \phi(\operatorname{conv}(x W_k)) \quad
    v = \operatorname{silu}(\operatorname{conv}(x W_v)) \quad
    g = \operatorname{logsigmoid}(x W_f) / \tau \quad s = 1 - e^g$$
    $$H^k_t = H^k_{t-1} \operatorname{diag}(e^{g_t}) + k_t s_t^\top \qquad
    H^v_t = \operatorname{diag}(e^{g_t})\, H^v_{t-1} + s_t v_t^\top$$
    $$o_t = {H^v_t}^\top \operatorname{softmax}(\text{scale} \cdot {H^k_t}^\top q_t) \qquad
    y = \operatorname{rmsnorm}(\operatorname{silu}(o))\, W_o$$

    The norm is over all heads together. From "Gated Slot Attention for Efficient Linear-Time Sequence Modeling"
    (<https://arxiv.org/abs/2409.07146>). Arguments, defaults and parameter names are as in flash-linear-attention
    0.6, whose checkpoints load.

    Args:
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
        hidden_size: Size of the input and of the output.
        expand_k: Size of the keys of all heads: ``hidden_size * expand_k``.
        expand_v: Must be 1: the values of all heads together have `hidden_size` channels.
        num_heads: Number of heads of queries.
        num_kv_heads: Number of heads ``H`` of keys, values and slots. ``num_heads / H`` neighbouring heads of queries
            share each. Default: `num_heads`.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution` with silu.
        conv_size: Width ``W`` of the convolutions.
        conv_bias: Whether the convolutions have a bias.
        num_slots: Number of slots ``M`` of a head, at most 512. Default: as many as a head has keys, ``K``.
        elementwise_affine: Whether the norm has a weight; None stands for False.
        norm_eps: Added to the mean square in the norm.
        gate_logit_normalizer: Divisor $\tau$ of the log-decay, above 0.
        feature_map: Map $\phi$ of each head of queries and keys: "swish", "relu" or "t2r", a linear map and relu that
            queries and keys share.
        use_output_gate: Kept as an attribute and not used, as in flash-linear-attention: there is no output gate.
        use_norm: Kept as an attribute and not used, as in flash-linear-attention: there is always a norm.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        scale: Factor of the logits of slots. None means ``K ** -0.5``.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default; float32 for the norm.

    Raises:
        ValueError: If an argument has a wrong value, the heads do not divide the sizes, or a head has over 512 slots.
        TypeError: If an argument has the wrong type.
    """

    chunk_modes = ("fused_chunk",)
    fusible = ("q_proj", "k_proj", "v_proj", "f_proj")
    scale = number("scale")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        num_slots: int | None = None,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: float = 8,
        feature_map: str = "swish",
        use_output_gate: bool = False,
        use_norm: bool = True,
        layer_idx: int | None = None,
        scale: float | None = 1.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx, conv_size)
        self._keep_flags(use_output_gate=use_output_gate, use_norm=use_norm)
        H, HKV, K, V = heads_of(hidden_size, num_heads, num_kv_heads, expand_k, expand_v, wide_keys=True)
        if H * V != hidden_size:
            raise ValueError(f"expand_v must be 1, since the norm has hidden_size channels, got {expand_v}")
        M = K if num_slots is None else num_slots
        _check.head_size("num_slots", M)
        _check.positive("gate_logit_normalizer", gate_logit_normalizer)
        if scale is not None:
            _check.finite("scale", scale)
        if feature_map not in ("swish", "relu", "t2r"):
            raise ValueError(f"feature_map must be 'swish', 'relu' or 't2r', got {feature_map!r}")
        self.num_heads, self.num_kv_heads, self.num_kv_groups = H, HKV, H // HKV
        self.key_dim, self.value_dim, self.head_k_dim, self.head_v_dim = H * K, H * V, K, V
        self.num_slots = M
        self.gate_logit_normalizer = gate_logit_normalizer
        self.scale = scale

        factory = factory_of(device, dtype)
        self.feature_map: nn.Module = nn.SiLU() if feature_map == "swish" else nn.ReLU()
        if feature_map == "t2r":
            self.feature_map = T2RFeatureMap(K, **factory)
        self.q_proj, self.k_proj, self.v_proj = linears(hidden_size, (H * K, HKV * K, HKV * V), factory)
        self.f_proj = nn.Linear(hidden_size, HKV * M, bias=False, **factory)
        conv = self._add_convolutions("q k v", use_short_conv, conv_size, conv_bias, factory)
        self.g_norm = RMSNorm(hidden_size, elementwise_affine, norm_eps, device, dtype or torch.float32)
        self.o_proj = nn.Linear(H * V, hidden_size, bias=False, **factory)
        self.state_shapes = StateShapes(((HKV, K, M), (HKV, M, V)), conv)

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        q, k, v, g = self._projections(rows_of(x))
        if self.use_short_conv:
            q, k, v = (tokens_of(y, x) for y in (q, k, v))
        (q, k, v), conv = self._convolved((q, k, v), past, tokens)
        g = log_sigmoid(upcast(g)) / self.gate_logit_normalizer
        q = rows_in_heads(q, x, self.num_heads)
        k, v, g = (rows_in_heads(y, x, self.num_kv_heads) for y in (k, v, g))
        q, k, v, g = self.feature_map(q), self.feature_map(k), F.silu(v), tokens.masked(g)
        s = -g.expm1()  # 0 where g is 0

        gsa = self._op(chunk_gsa, fused_recurrent_gsa, x, past.recurrent, tokens)
        o, recurrent = gsa(q, k, v, s, g, scale=self.scale)
        y = self.o_proj(self.g_norm(F.silu(rows_of(o)).flatten(-2)))
        return tokens_of(y, x), RecurrentState(recurrent, conv)
