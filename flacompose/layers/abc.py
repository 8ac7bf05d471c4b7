"""Attention with bounded memory (ABC), https://arxiv.org/abs/2110.02488."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.attention import AttentionLayer
from flacompose.layers.norm import GatedRMSNorm, RMSNorm
from flacompose.layers.rotary import positions, rotary
from flacompose.layers.state import RecurrentState
from flacompose.ops import chunk_abc, fused_recurrent_gsa


class ABCAttention(AttentionLayer):
    r"""A layer of attention with bounded memory, of $x$, per head of ``M`` slots:

    $$q = \operatorname{rotary}(\operatorname{conv}(x W_q)) \quad k = \operatorname{rotary}(\operatorname{conv}(x W_k))
    \quad v = \operatorname{conv}(x W_v) \quad s = \operatorname{clamp}(x W_s)$$
    $$\tilde{k}_t = \sum_{i \le t} \operatorname{softmax}(s_{\le t})_i\, k_i \qquad
    \tilde{v}_t = \sum_{i \le t} \operatorname{softmax}(s_{\le t})_i\, v_i$$
    $$o_t = \sum_m \operatorname{softmax}_m(K^{-1/2}\, \tilde{k}_{t, m}^\top q_t)\, \tilde{v}_{t, m} \qquad
    y = \bigl(\operatorname{rmsnorm}(o) \odot \operatorname{silu}(x W_g)\bigr) W_o$$

    From "ABC: Attention with Bounded-memory Control" (<https://arxiv.org/abs/2110.02488>). Arguments, defaults and
    parameter names are those of flash-linear-attention 0.6, whose checkpoints load.

    Args:
        hidden_size: Size of the input and of the output.
        expand_k: The keys of all heads take ``hidden_size * expand_k``.
        expand_v: The values of all heads take ``hidden_size * expand_v``.
        num_heads: Number of heads ``H``.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution` with silu.
        conv_size: Its width ``W``.
        conv_bias: Whether it has a bias.
        num_slots: Number of slots ``M`` of a head, at most 256. Default: as many as a head has keys, ``K``.
        elementwise_affine: Whether the norm has a weight.
        norm_eps: Added to the mean square in the norm.
        gate_low_rank_dim: Kept as an attribute and not used, as in the peer.
        gate_logit_normalizer: Kept as an attribute and not used, as in the peer.
        use_rope: Whether queries and keys are turned by their positions; a head then has an even number of keys.
        use_input_gate: Whether queries, keys and values pass silu.
        use_output_gate: Whether the output is gated.
        use_norm: Whether the output is normed.
        clamp_min: Least logit of a slot. None for no bound.
        clamp_max: Greatest logit of a slot. None for no bound.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.

    Raises:
        ValueError: If an argument is none of these, the heads do not divide the sizes, or one takes over 256 keys or
            values.
        TypeError: If an argument has the wrong type.
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        num_slots: int | None = None,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_low_rank_dim: int = 16,
        gate_logit_normalizer: float = 16,
        use_rope: bool = True,
        use_input_gate: bool = False,
        use_output_gate: bool = True,
        use_norm: bool = True,
        clamp_min: float | None = -32,
        clamp_max: float | None = 32,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__("chunk", hidden_size, expand_k, expand_v, num_heads, None, norm_eps, layer_idx)
        K, V = self.head_k_dim, self.head_v_dim
        num_slots = K if num_slots is None else num_slots
        _check.head_size("num_slots", num_slots)
        if use_rope and K % 2 != 0:
            raise ValueError(
                f"hidden_size * expand_k / num_heads must be even, for rotary positions, got {K}"
            )
        for name, bound, none in (("clamp_min", clamp_min, -math.inf), ("clamp_max", clamp_max, math.inf)):
            if bound is not None:
                _check.number(name, bound)
                if not (math.isfinite(bound) or bound == none):
                    raise ValueError(f"{name} must be finite or {none}, got {bound}")
        if clamp_min is not None and clamp_max is not None and clamp_min > clamp_max:
            raise ValueError(f"clamp_min must be at most clamp_max = {clamp_max}, got {clamp_min}")
        self.num_slots = num_slots
        self.gate_low_rank_dim = gate_low_rank_dim
        self.gate_logit_normalizer = gate_logit_normalizer
        self.use_rope = use_rope
        self.use_input_gate = use_input_gate
        self.use_norm = use_norm
        self.clamp_min = clamp_min
        self.clamp_max = clamp_max
        self.state_shapes = self.state_shapes._replace(
            recurrent=((num_heads, K, num_slots), (num_heads, num_slots, V)),
            normalizer=(num_heads, num_slots),
            log_normalizer=True,
            position=use_rope,
        )

        self._add_projections(use_output_gate)
        self.s_proj = nn.Linear(hidden_size, num_heads * num_slots, bias=False)
        self._add_output_projection()
        self._add_convolutions(use_short_conv, conv_size, conv_bias)
        if use_norm:
            self.g_norm = (
                GatedRMSNorm(V, elementwise_affine, norm_eps)
                if use_output_gate
                else RMSNorm(V, elementwise_affine, norm_eps, dtype=torch.float32)
            )

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
        if self.use_input_gate:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        position: Tensor | tuple[()] = ()
        if self.use_rope:
            start = () if state is None else state.position
            place, position = positions(x, start, tokens.lengths, cu_seqlens)
            q, k = rotary(q, place), rotary(k, place)
        s = rearrange(self.s_proj(x), "b t (h m) -> b t h m", m=self.num_slots)
        if self.clamp_min is not None or self.clamp_max is not None:
            s = s.clamp(self.clamp_min, self.clamp_max)
        s = tokens.silence(s, -torch.inf)

        abc = fused_recurrent_gsa if self._recurrent(x) else chunk_abc
        o, final_state = abc(
            q, k, v, s,
            initial_state=None if state is None else (*state.recurrent, state.normalizer),
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        assert final_state is not None  # asked for
        Hk, Hv, z = final_state
        return self._leave(self._gated(o, x), tokens), RecurrentState((Hk, Hv), conv, z, position)

    def _gated(self, o: Tensor, x: Tensor) -> Tensor:
        """``o [B, T, H, V]`` normed and gated, where the layer is to."""
        if not self.use_output_gate:
            return self.g_norm(o) if self.use_norm else o
        g = rearrange(self.g_proj(x), "b t (h v) -> b t h v", h=self.num_heads)
        return self.g_norm(o, g) if self.use_norm else F.silu(g) * o
