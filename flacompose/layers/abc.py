"""Attention with bounded memory (ABC), https://arxiv.org/abs/2110.02488."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flacompose._errors import ValueError
from flacompose.layers import _check
from flacompose.layers.heads import heads_of
from flacompose.layers.layout import Layout
from flacompose.layers.norm import GatedRMSNorm, RMSNorm
from flacompose.layers.number import number
from flacompose.layers.recurrent import RecurrentLayer, factory_of, linears
from flacompose.layers.rotary import positions, rotary
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops import chunk_abc, fused_recurrent_gsa


class ABCAttention(RecurrentLayer):
    r"""A layer of attention with bounded memory, of $x$, per head of ``M`` slots:

    $$q = \operatorname{rotary}(\operatorname{conv}(x W_q)) \quad k = \operatorname{rotary}(\operatorname{conv}(x W_k))
    \quad v = \operatorname{conv}(x W_v) \quad s = \operatorname{clamp}(x W_s)$$
    $$\tilde{k}_t = \sum_{i \le t} \operatorname{softmax}(s_{\le t})_i\, k_i \qquad
    \tilde{v}_t = \sum_{i \le t} \operatorname{softmax}(s_{\le t})_i\, v_i$$
    $$o_t = \sum_m \operatorname{softmax}_m(K^{-1/2}\, \tilde{k}_{t, m}^\top q_t)\, \tilde{v}_{t, m} \qquad
    y = \bigl(\operatorname{rmsnorm}(o) \odot \operatorname{silu}(x W_g)\bigr) W_o$$

    From "ABC: Attention with Bounded-memory Control" (<https://arxiv.org/abs/2110.02488>). Arguments, defaults and
    parameter names are as in flash-linear-attention 0.6, whose checkpoints load.

    Args:
        hidden_size: Size of the input and of the output.
        expand_k: Size of the keys of all heads: ``hidden_size * expand_k``.
        expand_v: Size of the values of all heads: ``hidden_size * expand_v``.
        num_heads: Number of heads ``H``.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution` with silu.
        conv_size: Width ``W`` of the convolutions.
        conv_bias: Whether the convolutions have a bias.
        num_slots: Number of slots ``M`` of a head, at most 512. Default: as many as a head has keys, ``K``.
        elementwise_affine: Whether the norm has a weight; None stands for False.
        norm_eps: Added to the mean square in the norm.
        gate_low_rank_dim: Kept as an attribute and not used, as in flash-linear-attention.
        gate_logit_normalizer: Kept as an attribute and not used, as in flash-linear-attention.
        use_rope: Whether queries and keys get a rotary embedding. A head then has an even number of keys.
        use_input_gate: Whether queries, keys and values pass silu.
        use_output_gate: Whether the output is gated.
        use_norm: Whether the output is normed.
        clamp_min: Lower bound of the logits of slots, or None.
        clamp_max: Upper bound of the logits of slots, or None.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default; float32 for a norm without a gate.

    Raises:
        ValueError: If an argument has a wrong value, the heads do not divide the sizes, or a head has over 512 slots.
        TypeError: If an argument has the wrong type.
    """

    fusible = ("q_proj", "k_proj", "v_proj", "g_proj", "s_proj")
    clamp_min = number("clamp_min")
    clamp_max = number("clamp_max")

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
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__("chunk", hidden_size, norm_eps, layer_idx, conv_size)
        self._keep_flags(use_rope=use_rope, use_input_gate=use_input_gate)
        self._keep_flags(use_output_gate=use_output_gate, use_norm=use_norm)
        affine = _check.optional_flag("elementwise_affine", elementwise_affine)
        H, _, K, V = heads_of(hidden_size, num_heads, None, expand_k, expand_v, use_rope, wide_keys=True)
        M = K if num_slots is None else num_slots
        _check.head_size("num_slots", M)
        for name, bound, none in (("clamp_min", clamp_min, -math.inf), ("clamp_max", clamp_max, math.inf)):
            if bound is not None:
                _check.number(name, bound)
                if not (math.isfinite(bound) or bound == none):
                    raise ValueError(f"{name} must be finite or {none}, got {bound}")
        if clamp_min is not None and clamp_max is not None and clamp_min > clamp_max:
            raise ValueError(f"clamp_min must be at most clamp_max = {clamp_max}, got {clamp_min}")
        self.num_heads = H
        self.key_dim, self.value_dim, self.head_k_dim, self.head_v_dim = H * K, H * V, K, V
        self.num_slots = M
        self.gate_low_rank_dim = gate_low_rank_dim
        self.gate_logit_normalizer = gate_logit_normalizer
        self.clamp_min = clamp_min
        self.clamp_max = clamp_max

        factory = factory_of(device, dtype)
        self.q_proj, self.k_proj, self.v_proj = linears(hidden_size, (H * K, H * K, H * V), factory)
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, H * V, bias=False, **factory)
        self.s_proj = nn.Linear(hidden_size, H * M, bias=False, **factory)
        self.o_proj = nn.Linear(H * V, hidden_size, bias=False, **factory)
        conv = self._add_convolutions("q k v", use_short_conv, conv_size, conv_bias, factory)
        if use_norm and use_output_gate:
            self.g_norm: RMSNorm = GatedRMSNorm(V, affine, norm_eps, **factory)
        elif use_norm:
            self.g_norm = RMSNorm(V, affine, norm_eps, device, dtype or torch.float32)
        self.state_shapes = StateShapes(((H, K, M), (H, M, V)), conv, (H, M), use_rope, log_normalizer=True)

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        q, k, v, gate, s = self._projections(x)
        (q, k, v), conv = self._convolved((q, k, v), past, tokens)
        if self.use_input_gate:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        q, k, v, s = (y.unflatten(-1, (self.num_heads, -1)) for y in (q, k, v, s))
        next_position: Tensor | tuple[()] = ()
        if self.use_rope:
            position, next_position = positions(x, past.position, tokens)
            q, k = rotary(q, k, position, 10000.0)
        if self.clamp_min is not None or self.clamp_max is not None:
            s = s.clamp(self.clamp_min, self.clamp_max)

        initial_state = None if past.recurrent is None else (*past.recurrent, past.normalizer)
        abc = self._op(chunk_abc, fused_recurrent_gsa, x, initial_state, tokens)
        o, (Hk, Hv, z) = abc(q, k, v, tokens.masked(s, -torch.inf))
        if gate is not None:
            gate = gate.unflatten(-1, (self.num_heads, -1))
            o = self.g_norm(o, gate) if self.use_norm else F.silu(gate) * o
        elif self.use_norm:
            o = self.g_norm(o)
        return self.o_proj(o.flatten(2)), RecurrentState((Hk, Hv), conv, z, next_position)
