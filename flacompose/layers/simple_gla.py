"""Gated linear attention with one decay per head, https://arxiv.org/abs/2312.06635 and 2405.21060."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.activation import activation
from flacompose.layers.attention import AttentionLayer
from flacompose.layers.state import RecurrentState
from flacompose.ops import chunk_simple_gla, fused_recurrent_simple_gla
from flacompose.ops._dtype import wide


class SimpleGatedLinearAttention(AttentionLayer):
    r"""A layer of gated linear attention with one decay per head and token, of $x$, per head:

    $$q = \phi(\operatorname{conv}(x W_q)) \quad k = \phi(\operatorname{conv}(x W_k)) \quad
    v = \operatorname{conv}(x W_v) \quad g = \operatorname{logsigmoid}(x W + b) / \tau$$
    $$S_t = e^{g_t}\, S_{t-1} + k_t v_t^\top \qquad o_t = K^{-1/2}\, S_t^\top q_t \qquad
    y = \bigl(\operatorname{rmsnorm}(o) \odot \operatorname{gate}(x W_g)\bigr) W_o$$

    The layer of "Gated Linear Attention Transformers with Hardware-Efficient Training"
    (<https://arxiv.org/abs/2312.06635>) with the recurrence of Mamba-2, "Transformers are SSMs"
    (<https://arxiv.org/abs/2405.21060>). Arguments, defaults and parameter names are those of flash-linear-attention
    0.6, whose checkpoints load.

    Args:
        mode: "chunk" or "fused_recurrent", two ways to the same numbers; calls of one token always take the second.
        hidden_size: Size of the input and of the output.
        expand_k: The keys of all heads take ``hidden_size * expand_k``.
        expand_v: The values of all heads take ``hidden_size * expand_v``.
        num_heads: Number of heads ``H``, each with its decay.
        num_kv_heads: Number of heads that keys and values have, each shared by ``H / num_kv_heads`` neighbouring heads
            of queries. Default: ``H``.
        feature_map: Activation $\phi$ of queries and keys: "relu", "sigmoid", "logsigmoid", "silu" or "swish",
            "sqrelu", "gelu" (its tanh form). Default: none.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution` with silu.
        conv_size: Its width ``W``.
        conv_bias: Whether it has a bias.
        gate_fn: Activation of the output gate, one of those that `feature_map` takes.
        elementwise_affine: Whether the norm has a weight.
        norm_eps: Added to the mean square in the norm.
        gate_logit_normalizer: Divisor $\tau$ of the log-decay, above 0.
        fuse_norm: With a "swish" output gate: round once, after norm and gate, and name the norm ``g_norm_swish_gate``.
            Otherwise it is named ``g_norm``, and its output is rounded too.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.

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
        feature_map: str | None = None,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        gate_fn: str = "swish",
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: float = 16,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, expand_k, expand_v, num_heads, num_kv_heads, norm_eps, layer_idx)
        _check.positive("gate_logit_normalizer", gate_logit_normalizer)
        self.gate_logit_normalizer = gate_logit_normalizer
        self.feature_map_fn = None if feature_map is None else activation("feature_map", feature_map)

        self._add_projections(output_gate=True)
        self._add_convolutions(use_short_conv, conv_size, conv_bias)
        self.gk_proj = nn.Linear(hidden_size, num_heads)
        self._add_output_norm(gate_fn, fuse_norm, elementwise_affine)
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
        g = F.logsigmoid(wide(self.gk_proj(x))) / self.gate_logit_normalizer  # [B, T, H]
        if self.feature_map_fn is not None:
            q, k = self.feature_map_fn(q), self.feature_map_fn(k)
        k, g = tokens.silence(k), tokens.silence(g)

        simple_gla = fused_recurrent_simple_gla if self._recurrent(x) else chunk_simple_gla
        o, recurrent = simple_gla(
            q, self._share(k), self._share(v), g,
            initial_state=None if state is None else state.recurrent,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        assert recurrent is not None  # asked for
        return self._leave(self._norm_and_gate(o, x), tokens), RecurrentState(recurrent, conv)
