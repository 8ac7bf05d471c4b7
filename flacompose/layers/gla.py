"""Gated linear attention, https://arxiv.org/abs/2312.06635, section 4.4."""

from __future__ import annotations

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.activation import activation
from flacompose.layers.attention import AttentionLayer
from flacompose.layers.state import RecurrentState
from flacompose.ops import chunk_gla, fused_recurrent_gla
from flacompose.ops._dtype import wide


class GatedLinearAttention(AttentionLayer):
    r"""A layer of gated linear attention, of $x$, per head:

    $$q = \phi(\operatorname{conv}(x W_q)) \quad k = \phi(\operatorname{conv}(x W_k)) \quad
    v = \operatorname{conv}(x W_v) \quad g = \operatorname{logsigmoid}(x W_1 W_2 + b) / \tau$$
    $$S_t = \operatorname{diag}(e^{g_t})\, S_{t-1} + k_t v_t^\top \qquad o_t = K^{-1/2}\, S_t^\top q_t \qquad
    y = \bigl(\operatorname{rmsnorm}(o) \odot \operatorname{gate}(x W_g)\bigr) W_o$$

    From "Gated Linear Attention Transformers with Hardware-Efficient Training" (<https://arxiv.org/abs/2312.06635>).
    Arguments, defaults and parameter names are those of flash-linear-attention 0.6, whose checkpoints load.

    Args:
        mode: "chunk" or "fused_recurrent", two ways to the same numbers; calls of one token always take the second.
            "fused_chunk" is refused: there is no such op, and the peer's only raises.
        hidden_size: Size of the input and of the output.
        expand_k: The keys of all heads take ``hidden_size * expand_k``.
        expand_v: The values of all heads take ``hidden_size * expand_v``.
        num_heads: Number of heads ``H``.
        num_kv_heads: Number of heads that keys, decays and values have, each shared by ``H / num_kv_heads``
            neighbouring heads of queries. Default: ``H``.
        feature_map: Activation $\phi$ of queries and keys: "relu", "sigmoid", "logsigmoid", "silu" or "swish",
            "sqrelu", "gelu" (its tanh form). Default: none.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution` with silu.
        conv_size: Its width ``W``.
        conv_bias: Whether it has a bias.
        use_output_gate: Whether the normed output is gated.
        gate_fn: Activation of the output gate, one of those that `feature_map` takes.
        elementwise_affine: Whether the norm has a weight.
        norm_eps: Added to the mean square in the norm.
        gate_logit_normalizer: Divisor $\tau$ of the log-decay, above 0.
        gate_low_rank_dim: Rank of the decay's projection.
        clamp_min: Least log-decay. Default: none.
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
    ) -> None:
        super().__init__(mode, hidden_size, expand_k, expand_v, num_heads, num_kv_heads, norm_eps, layer_idx)
        _check.positive("gate_logit_normalizer", gate_logit_normalizer)
        if clamp_min is not None:
            _check.number("clamp_min", clamp_min)
            if not clamp_min <= 0:
                raise ValueError(f"clamp_min must be at most 0, as log-decays are, got {clamp_min}")
        _check.count("gate_low_rank_dim", gate_low_rank_dim)
        self.gate_logit_normalizer = gate_logit_normalizer
        self.clamp_min = clamp_min
        self.feature_map_fn = None if feature_map is None else activation("feature_map", feature_map)

        self._add_projections(use_output_gate)
        self._add_convolutions(use_short_conv, conv_size, conv_bias)
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, gate_low_rank_dim, bias=False),
            nn.Linear(gate_low_rank_dim, self.k_proj.out_features, bias=True),
        )
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
        """Go through ``T`` tokens from `state`.

        A sequence given in pieces, each with the state that the piece before returned, gives what the whole gives.

        Args:
            hidden_states: ``[B, T, hidden_size]``.
            state: What `init_state` or a call returned, with ``N`` rows, ``B`` or the number of packed sequences.
                It is not written to. Default: zeros.
            attention_mask: ``[B, T]``, bool or integers, 0 for pads, wherever they are in a row, anything else
                for tokens. A pad changes no state, is seen by no token and gives zeros. It is the mask of these ``T``
                tokens; of a longer one, the mask of a whole history, the last ``T`` columns count. Default: no pads.
            cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B``
                is then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: a sequence a row.

        Returns:
            ``(output, state)``: `output` is ``[B, T, hidden_size]``; `state` is new, that after the last tokens.

        Raises:
            ValueError: If a shape is wrong, or a device not that of `hidden_states`, or `attention_mask` comes with
                `cu_seqlens`.
            RuntimeError: From PyTorch, if the weights are on another device.
            TypeError: If `state` is no `RecurrentState`, another argument no tensor, or a dtype wrong: without
                autocast, `hidden_states` has that of the weights.
        """
        tokens, x = self._enter(hidden_states, state, attention_mask, cu_seqlens)
        q, k, v, conv = self._project(x, tokens, state, cu_seqlens)
        gk = F.logsigmoid(wide(self.gk_proj(x))) / self.gate_logit_normalizer
        if self.clamp_min is not None:
            gk = gk.clamp(min=self.clamp_min)
        gk = rearrange(gk, "b t (h k) -> b t h k", h=self.num_kv_heads)
        if self.feature_map_fn is not None:
            q, k = self.feature_map_fn(q), self.feature_map_fn(k)
        k, gk = tokens.silence(k), tokens.silence(gk)

        gla = fused_recurrent_gla if self._recurrent(x) else chunk_gla
        o, recurrent = gla(
            q, self._share(k), self._share(v), self._share(gk),
            initial_state=None if state is None else state.recurrent,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        assert recurrent is not None  # asked for
        return self._leave(self._norm_and_gate(o, x), tokens), RecurrentState(recurrent, conv)
