"""Multi-scale retention, https://arxiv.org/abs/2307.08621."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.activation import activation
from flacompose.layers.gated_output import GatedOutputLayer
from flacompose.layers.heads import heads_of, in_heads, repeat_heads
from flacompose.layers.layout import Layout
from flacompose.layers.recurrent import factory_of, linears
from flacompose.layers.rotary import positions, rotary
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops import chunk_simple_gla, fused_recurrent_simple_gla
from flacompose.ops.retention import log_decay


class MultiScaleRetention(GatedOutputLayer):
    r"""A layer of retention, of $x$, per head $h = 0, 1, \dots$:

    $$q_t = R_t\, \phi(\operatorname{conv}(x W_q))_t \quad k_t = R_t\, \phi(\operatorname{conv}(x W_k))_t \quad
    v = \operatorname{conv}(x W_v)$$
    $$S_t = (1 - 2^{-5-h})\, S_{t-1} + k_t v_t^\top \qquad o_t = K^{-1/2}\, S_t^\top q_t \qquad
    y = \bigl(\operatorname{rmsnorm}(o) \odot \operatorname{gate}(x W_g)\bigr) W_o$$

    $R_t$ is the rotary embedding of position $t$ (<https://arxiv.org/abs/2104.09864>), whose pairs are a number of the
    first half of a head and one of the second half. Positions continue across calls, by the state. From "Retentive
    Network: A Successor to Transformer for Large Language Models" (<https://arxiv.org/abs/2307.08621>). Arguments,
    defaults and parameter names are as in flash-linear-attention 0.6, whose checkpoints load.

    Args:
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
            "fused_chunk" and "parallel" are refused, since "chunk" computes the same function.
        hidden_size: Size of the input and of the output.
        expand_k: Size of the keys of all heads: ``hidden_size * expand_k``, an even number per head.
        expand_v: Size of the values of all heads: ``hidden_size * expand_v``.
        num_heads: Number of heads ``H``.
        num_kv_heads: Number of heads of keys and values. ``H / num_kv_heads`` neighbouring heads of queries share each.
            Default: ``H``.
        feature_map: Activation $\phi$ of queries and keys: "relu", "sigmoid", "logsigmoid", "silu" or "swish",
            "sqrelu", "gelu" (its tanh form). Default: none.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution` with silu.
        conv_size: Width ``W`` of the convolutions.
        conv_bias: Whether the convolutions have a bias.
        use_output_gate: Whether the normed output is gated.
        gate_fn: Activation of the output gate, with the same choices as `feature_map`.
        elementwise_affine: Whether the norm has a weight; None stands for False.
        norm_eps: Added to the mean square in the norm.
        fuse_norm: Whether a "swish" output gate is fused with the norm, as one module ``g_norm_swish_gate`` that rounds
            once. Otherwise the norm is a module ``g_norm`` that rounds its output.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default; float32 for a norm that is not fused with its gate.

    Raises:
        ValueError: If an argument has a wrong value, the heads do not divide the sizes, or a head has over 512 keys
            or an odd number of them.
        TypeError: If an argument has the wrong type.
    """

    chunk_modes = ("fused_chunk", "parallel")
    fusible = ("q_proj", "k_proj", "v_proj", "g_proj")

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
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx, conv_size)
        self._keep_flags(use_output_gate=use_output_gate)
        _check.flags(fuse_norm=fuse_norm)
        H, HKV, K, V = heads_of(hidden_size, num_heads, num_kv_heads, expand_k, expand_v, rotary=True)
        self.num_heads, self.num_kv_heads, self.num_kv_groups = H, HKV, H // HKV
        self.key_dim, self.value_dim, self.head_k_dim, self.head_v_dim = H * K, H * V, K, V
        self.feature_map_fn = None if feature_map is None else activation("feature_map", feature_map)

        factory = factory_of(device, dtype)
        self.q_proj, self.k_proj, self.v_proj = linears(hidden_size, (H * K, HKV * K, HKV * V), factory)
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, H * V, bias=False, **factory)
        conv = self._add_convolutions("q k v", use_short_conv, conv_size, conv_bias, factory)
        self.o_proj = nn.Linear(H * V, hidden_size, bias=False, **factory)
        self._add_output_norm(
            V, elementwise_affine, norm_eps, gate_fn, fuse_norm and use_output_gate, factory
        )
        self.state_shapes = StateShapes(((H, K, V),), conv, position=True)

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        q, k, v, gate = self._projections(x)
        (q, k, v), conv = self._convolved((q, k, v), past, tokens)
        q = q.unflatten(-1, (self.num_heads, -1))
        k, v = in_heads(k, self.num_kv_heads), in_heads(v, self.num_kv_heads)
        if self.feature_map_fn is not None:
            q, k = self.feature_map_fn(q), self.feature_map_fn(k)
        position, next_position = positions(x, past.position, tokens)
        q, k = rotary(q, k, position, 10000.0)
        k, v = repeat_heads(tokens.masked(k), self.num_kv_groups), repeat_heads(v, self.num_kv_groups)

        decay = log_decay(self.num_heads, q)
        # With pads, gates per token replace the constant decay, which would decay at pads too.
        g = None if tokens.lengths is None else tokens.masked(decay.expand(q.shape[:3]))
        simple_gla = self._wide_op(chunk_simple_gla, fused_recurrent_simple_gla, x, past.recurrent, tokens)
        o, recurrent = simple_gla(q, k, v, g, decay if g is None else None)
        return self._output(o, gate), RecurrentState(recurrent, conv, position=next_position)
