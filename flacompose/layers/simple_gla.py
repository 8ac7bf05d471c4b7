"""Gated linear attention with one decay per head, https://arxiv.org/abs/2312.06635 and 2405.21060."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.activation import activation, log_sigmoid
from flacompose.layers.gated_output import GatedOutputLayer
from flacompose.layers.heads import heads_of, in_heads, repeat_heads
from flacompose.layers.layout import Layout
from flacompose.layers.recurrent import factory_of, linears
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops import chunk_simple_gla, fused_recurrent_simple_gla
from flacompose.ops._tensors.dtype import upcast


class SimpleGatedLinearAttention(GatedOutputLayer):
    r"""A layer of gated linear attention with one decay per head and token, of $x$, per head:

    $$q = \phi(\operatorname{conv}(x W_q)) \quad k = \phi(\operatorname{conv}(x W_k)) \quad
    v = \operatorname{conv}(x W_v) \quad g = \operatorname{logsigmoid}(x W + b) / \tau$$
    $$S_t = e^{g_t}\, S_{t-1} + k_t v_t^\top \qquad o_t = K^{-1/2}\, S_t^\top q_t \qquad
    y = \bigl(\operatorname{rmsnorm}(o) \odot \operatorname{gate}(x W_g)\bigr) W_o$$

    The layer of "Gated Linear Attention Transformers with Hardware-Efficient Training"
    (<https://arxiv.org/abs/2312.06635>) with the recurrence of Mamba-2, "Transformers are SSMs"
    (<https://arxiv.org/abs/2405.21060>). Arguments, defaults and parameter names are as in flash-linear-attention
    0.6, whose checkpoints load.

    Args:
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
        hidden_size: Size of the input and of the output.
        expand_k: Size of the keys of all heads: ``hidden_size * expand_k``.
        expand_v: Size of the values of all heads: ``hidden_size * expand_v``.
        num_heads: Number of heads ``H``, each with its decay.
        num_kv_heads: Number of heads of keys and values. ``H / num_kv_heads`` neighbouring heads of queries share each.
            Default: ``H``.
        feature_map: Activation $\phi$ of queries and keys: "relu", "sigmoid", "logsigmoid", "silu" or "swish",
            "sqrelu", "gelu" (its tanh form). Default: none.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution` with silu.
        conv_size: Width ``W`` of the convolutions.
        conv_bias: Whether the convolutions have a bias.
        gate_fn: Activation of the output gate, with the same choices as `feature_map`.
        elementwise_affine: Whether the norm has a weight; None stands for False.
        norm_eps: Added to the mean square in the norm.
        gate_logit_normalizer: Divisor $\tau$ of the log-decay, above 0.
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
    fusible = ("q_proj", "k_proj", "v_proj", "g_proj", "gk_proj")

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
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx, conv_size)
        _check.flags(fuse_norm=fuse_norm)
        H, HKV, K, V = heads_of(hidden_size, num_heads, num_kv_heads, expand_k, expand_v)
        _check.positive("gate_logit_normalizer", gate_logit_normalizer)
        self.num_heads, self.num_kv_heads, self.num_kv_groups = H, HKV, H // HKV
        self.key_dim, self.value_dim, self.head_k_dim, self.head_v_dim = H * K, H * V, K, V
        self.gate_logit_normalizer = gate_logit_normalizer
        self.feature_map_fn = None if feature_map is None else activation("feature_map", feature_map)

        factory = factory_of(device, dtype)
        self.q_proj, self.k_proj, self.v_proj = linears(hidden_size, (H * K, HKV * K, HKV * V), factory)
        self.g_proj = nn.Linear(hidden_size, H * V, bias=False, **factory)
        conv = self._add_convolutions("q k v", use_short_conv, conv_size, conv_bias, factory)
        self.gk_proj = nn.Linear(hidden_size, H, **factory)
        self._add_output_norm(V, elementwise_affine, norm_eps, gate_fn, fuse_norm, factory)
        self.o_proj = nn.Linear(H * V, hidden_size, bias=False, **factory)
        self.state_shapes = StateShapes(((H, K, V),), conv)

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        q, k, v, gate, g = self._projections(x)
        (q, k, v), conv = self._convolved((q, k, v), past, tokens)
        g = log_sigmoid(upcast(g)) / self.gate_logit_normalizer  # [B, T, H]
        q = q.unflatten(-1, (self.num_heads, -1))
        k, v = in_heads(k, self.num_kv_heads), in_heads(v, self.num_kv_heads)
        if self.feature_map_fn is not None:
            q, k = self.feature_map_fn(q), self.feature_map_fn(k)
        k, v = repeat_heads(tokens.masked(k), self.num_kv_groups), repeat_heads(v, self.num_kv_groups)

        simple_gla = self._wide_op(chunk_simple_gla, fused_recurrent_simple_gla, x, past.recurrent, tokens)
        o, recurrent = simple_gla(q, k, v, tokens.masked(g))
        return self._output(o, gate), RecurrentState(recurrent, conv)
