"""Multi-scale retention, https://arxiv.org/abs/2307.08621."""

from __future__ import annotations

from torch import Tensor

from flacompose.layers.activation import activation
from flacompose.layers.attention import AttentionLayer
from flacompose.layers.rotary import positions, rotary
from flacompose.layers.state import RecurrentState
from flacompose.ops import (
    chunk_retention,
    chunk_simple_gla,
    fused_recurrent_retention,
    fused_recurrent_simple_gla,
)
from flacompose.ops.retention import log_decay


class MultiScaleRetention(AttentionLayer):
    r"""A layer of retention, of $x$, per head $h = 0, 1, \dots$:

    $$q_t = R_t\, \phi(\operatorname{conv}(x W_q))_t \quad k_t = R_t\, \phi(\operatorname{conv}(x W_k))_t \quad
    v = \operatorname{conv}(x W_v)$$
    $$S_t = (1 - 2^{-5-h})\, S_{t-1} + k_t v_t^\top \qquad o_t = K^{-1/2}\, S_t^\top q_t \qquad
    y = \bigl(\operatorname{rmsnorm}(o) \odot \operatorname{gate}(x W_g)\bigr) W_o$$

    $R_t$ is the rotary embedding of position $t$ (<https://arxiv.org/abs/2104.09864>), which turns the first half of
    a head against the second. Positions count the tokens of a sequence on from the state. From "Retentive Network: A
    Successor to Transformer for Large Language Models" (<https://arxiv.org/abs/2307.08621>). Arguments, defaults and
    parameter names are those of flash-linear-attention 0.6, whose checkpoints load.

    Args:
        mode: "chunk" or "fused_recurrent", two ways to the same numbers; calls of one token always take the second.
            "fused_chunk" and "parallel" are refused: there are no such ops, and "chunk" is the same function.
        hidden_size: Size of the input and of the output.
        expand_k: The keys of all heads take ``hidden_size * expand_k``, an even number each.
        expand_v: The values of all heads take ``hidden_size * expand_v``.
        num_heads: Number of heads ``H``.
        num_kv_heads: Number of heads that keys and values have, each shared by ``H / num_kv_heads`` neighbouring heads
            of queries. Default: ``H``.
        feature_map: Activation $\phi$ of queries and keys: "relu", "sigmoid", "logsigmoid", "silu" or "swish",
            "sqrelu", "gelu" (its tanh form). Default: none.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution` with silu.
        conv_size: Its width ``W``.
        conv_bias: Whether it has a bias.
        use_output_gate: Whether the normed output is gated.
        gate_fn: Activation of the output gate, one of those that `feature_map` takes.
        elementwise_affine: Whether the norm has a weight.
        norm_eps: Added to the mean square in the norm.
        fuse_norm: With a "swish" output gate: round once, after norm and gate, and name the norm ``g_norm_swish_gate``.
            Otherwise it is named ``g_norm``, and its output is rounded too.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.

    Raises:
        ValueError: If an argument is none of these, the heads do not divide the sizes, or one takes over 256 keys or
            values, or an odd number of keys.
        TypeError: If an argument has the wrong type.
    """

    chunk_modes = ("fused_chunk", "parallel")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 2.0,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, expand_k, expand_v, num_heads, num_kv_heads, norm_eps, layer_idx)
        if self.head_k_dim % 2 != 0:
            raise ValueError(
                f"hidden_size * expand_k / num_heads must be even, for rotary positions, got {self.head_k_dim}"
            )
        self.feature_map_fn = None if feature_map is None else activation("feature_map", feature_map)
        self.state_shapes = self.state_shapes._replace(position=True)

        self._add_projections(use_output_gate)
        self._add_convolutions(use_short_conv, conv_size, conv_bias)
        self._add_output_projection()
        self._add_output_norm(gate_fn, fuse_norm, elementwise_affine)

    def forward(
        self,
        hidden_states: Tensor,
        state: RecurrentState | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, RecurrentState]:
        """Go through ``T`` tokens from `state`, at the positions after those that it has seen; pads have none.

        Arguments, results and errors are those of
        [GatedLinearAttention][flacompose.layers.GatedLinearAttention.forward].
        """
        tokens, x = self._enter(hidden_states, state, attention_mask, cu_seqlens)
        q, k, v, conv = self._project(x, tokens, state, cu_seqlens)
        if self.feature_map_fn is not None:
            q, k = self.feature_map_fn(q), self.feature_map_fn(k)
        position, next_position = positions(
            x, () if state is None else state.position, tokens.lengths, cu_seqlens
        )
        q, k = rotary(q, position), rotary(k, position)
        k, v = self._share(tokens.silence(k)), self._share(v)

        initial_state = None if state is None else state.recurrent
        if tokens.lengths is None:
            retention = fused_recurrent_retention if self._recurrent(x) else chunk_retention
            o, recurrent = retention(
                q, k, v, initial_state=initial_state, output_final_state=True, cu_seqlens=cu_seqlens
            )
        else:  # retention decays at every token, pads too
            g = tokens.silence(log_decay(self.num_heads, q).expand(q.shape[:3]))
            simple_gla = fused_recurrent_simple_gla if self._recurrent(x) else chunk_simple_gla
            o, recurrent = simple_gla(q, k, v, g, initial_state=initial_state, output_final_state=True)
        assert recurrent is not None  # asked for
        return self._leave(self._norm_and_gate(o, x), tokens), RecurrentState(
            recurrent, conv, position=next_position
        )
