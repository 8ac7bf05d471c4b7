"""Gated slot attention, https://arxiv.org/abs/2409.07146."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.attention import AttentionLayer
from flacompose.layers.feature_map import T2RFeatureMap
from flacompose.layers.norm import RMSNorm
from flacompose.layers.state import RecurrentState
from flacompose.ops import chunk_gsa, fused_recurrent_gsa
from flacompose.ops._dtype import wide


class GatedSlotAttention(AttentionLayer):
    r"""A layer of gated slot attention, of $x$, per head of ``M`` slots:

    $$q = \phi(\operatorname{conv}(x W_q)) \quad k = \phi(\operatorname{conv}(x W_k)) \quad
    v = \operatorname{silu}(\operatorname{conv}(x W_v)) \quad
    g = \operatorname{logsigmoid}(x W_f) / \tau \quad s = 1 - e^g$$
    $$H^k_t = H^k_{t-1} \operatorname{diag}(e^{g_t}) + k_t s_t^\top \qquad
    H^v_t = \operatorname{diag}(e^{g_t})\, H^v_{t-1} + s_t v_t^\top$$
    $$o_t = {H^v_t}^\top \operatorname{softmax}(\text{scale} \cdot {H^k_t}^\top q_t) \qquad
    y = \operatorname{rmsnorm}(\operatorname{silu}(o))\, W_o$$

    The norm is over all heads together. From "Gated Slot Attention for Efficient Linear-Time Sequence Modeling"
    (<https://arxiv.org/abs/2409.07146>). Arguments, defaults and parameter names are those of flash-linear-attention
    0.6, whose checkpoints load.

    Args:
        mode: "chunk" or "fused_recurrent", two ways to the same numbers; calls of one token always take the second.
        hidden_size: Size of the input and of the output.
        expand_k: The keys of all heads take ``hidden_size * expand_k``.
        expand_v: The values of all heads take ``hidden_size * expand_v``, which the norm wants to be `hidden_size`.
        num_heads: Number of heads of queries.
        num_kv_heads: Number of heads ``H`` that keys, values and slots have, each shared by ``num_heads / H``
            neighbouring heads of queries. Default: `num_heads`.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution` with silu.
        conv_size: Its width ``W``.
        conv_bias: Whether it has a bias.
        num_slots: Number of slots ``M`` of a head, at most 256. Default: as many as a head has keys, ``K``.
        elementwise_affine: Whether the norm has a weight.
        norm_eps: Added to the mean square in the norm.
        gate_logit_normalizer: Divisor $\tau$ of the log-decay, above 0.
        feature_map: Map $\phi$ of each head of queries and keys: "swish", "relu" or "t2r", a linear map and relu,
            one for both.
        use_output_gate: Kept as an attribute and not used: there is no output gate, as there is none in the peer.
        use_norm: Kept as an attribute and not used, likewise: there is always a norm.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        scale: Factor of the logits of slots. None means ``K ** -0.5``.

    Raises:
        ValueError: If an argument is none of these, the heads do not divide the sizes, or one takes over 256 keys or
            values.
        TypeError: If an argument has the wrong type.
    """

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
    ) -> None:
        super().__init__(mode, hidden_size, expand_k, expand_v, num_heads, num_kv_heads, norm_eps, layer_idx)
        if self.value_dim != hidden_size:
            raise ValueError(
                f"hidden_size * expand_v must be hidden_size, as the norm is, got {self.value_dim}"
            )
        num_slots = self.head_k_dim if num_slots is None else num_slots
        _check.head_size("num_slots", num_slots)
        _check.positive("gate_logit_normalizer", gate_logit_normalizer)
        if scale is not None:
            _check.finite("scale", scale)
        if feature_map not in ("swish", "relu", "t2r"):
            raise ValueError(f"feature_map must be 'swish', 'relu' or 't2r', got {feature_map!r}")
        H, K, V = self.num_kv_heads, self.head_k_dim, self.head_v_dim
        self.num_slots = num_slots
        self.gate_logit_normalizer = gate_logit_normalizer
        self.use_output_gate = use_output_gate
        self.use_norm = use_norm
        self.scale = scale
        self.state_shapes = self.state_shapes._replace(recurrent=((H, K, num_slots), (H, num_slots, V)))

        self.feature_map: nn.Module = {"swish": nn.SiLU, "relu": nn.ReLU}.get(
            feature_map, lambda: T2RFeatureMap(K)
        )()
        self._add_projections()
        self.f_proj = nn.Linear(hidden_size, H * num_slots, bias=False)
        self._add_convolutions(use_short_conv, conv_size, conv_bias)
        self.g_norm = RMSNorm(hidden_size, elementwise_affine, norm_eps, dtype=torch.float32)
        self._add_output_projection()

    def forward(
        self,
        hidden_states: Tensor,
        state: RecurrentState | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, RecurrentState]:
        """Go through ``T`` tokens from `state`.

        Arguments, results and errors are those of
        [GatedLinearAttention][flacompose.layers.GatedLinearAttention.forward].
        """
        tokens, x = self._enter(hidden_states, state, attention_mask, cu_seqlens)
        q, k, v, conv = self._project(x, tokens, state, cu_seqlens)
        q, k, v = self.feature_map(q), self.feature_map(k), F.silu(v)
        g = F.logsigmoid(wide(self.f_proj(x))) / self.gate_logit_normalizer
        g = tokens.silence(rearrange(g, "b t (h m) -> b t h m", h=self.num_kv_heads))
        s = -g.expm1()  # 0 where g is

        gsa = fused_recurrent_gsa if self._recurrent(x) else chunk_gsa
        o, recurrent = gsa(
            q, k, v, s, g,
            scale=self.scale,
            initial_state=None if state is None else state.recurrent,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return self._leave(self._normed(F.silu(o)), tokens), RecurrentState(recurrent, conv)
