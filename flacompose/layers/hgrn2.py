"""HGRN2, https://arxiv.org/abs/2404.07904."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.forget_gate import ForgetGateLayer, forget_gate
from flacompose.layers.heads import expanded_heads
from flacompose.layers.layout import Layout
from flacompose.layers.norm import RMSNorm
from flacompose.layers.recurrent import factory_of, linears
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops import chunk_gla, fused_recurrent_gla


class HGRN2Attention(ForgetGateLayer):
    r"""A layer of HGRN2, of $x$, per head, with forget gates $f$ above the lower bound $\beta$:

    $$q = \operatorname{silu}(\operatorname{conv}(x W_q)) \qquad
    f = \beta + (1 - \beta)\, \sigma(\operatorname{conv}(x W_f)) \qquad i = \operatorname{conv}(x W_i)$$
    $$S_t = \operatorname{diag}(f_t)\, S_{t-1} + (1 - f_t)\, i_t^\top \qquad o_t = K^{-1/2}\, S_t^\top q_t \qquad
    y = \operatorname{rmsnorm}(o)\, W_o$$

    The norm is over all heads together. From "HGRN2: Gated Linear RNNs with State Expansion"
    (<https://arxiv.org/abs/2404.07904>). Arguments, defaults and parameter names are as in flash-linear-attention
    0.6, whose checkpoints load.

    Args:
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
            "fused_chunk" is refused, since "chunk" computes the same function.
        hidden_size: Size of the input and of the output.
        num_heads: Number of heads ``H``. Default: ``hidden_size // expand_ratio``, the only value allowed where
            `expand_ratio` is given.
        expand_ratio: Number ``K`` of forget gates, and so of keys, of each head. None for ``hidden_size // num_heads``.
        use_short_conv: Whether queries, forget gates and inputs pass a `ShortConvolution`, without activation.
        conv_size: Width ``W`` of the convolutions.
        conv_bias: Whether the convolutions have a bias.
        elementwise_affine: Whether the norm has a weight; None stands for False.
        norm_eps: Added to the mean square in the norm.
        layer_idx: Index of the layer in the model. Layer 0 ignores the lower bound.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default; float32 for the norm.

    Raises:
        ValueError: If neither `num_heads` nor `expand_ratio` is given, they contradict each other, the heads do not
            divide `hidden_size`, or a head has over 512 keys.
        TypeError: If an argument has the wrong type.
    """

    chunk_modes = ("fused_chunk",)
    fusible = ("q_proj", "f_proj", "i_proj")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        num_heads: int | None = None,
        expand_ratio: int | None = 128,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx, conv_size)
        H, K, V = expanded_heads(hidden_size, num_heads, expand_ratio, agree=True)
        if layer_idx is not None:
            _check.integer("layer_idx", layer_idx)
        self.num_heads, self.expand_ratio = H, K
        self.key_dim, self.value_dim, self.head_k_dim, self.head_v_dim = H * K, H * V, K, V
        self.gate_channels = H * K

        factory = factory_of(device, dtype)
        self.q_proj, self.f_proj, self.i_proj = linears(hidden_size, (H * K, H * K, H * V), factory)
        conv = self._add_convolutions("q f i", use_short_conv, conv_size, conv_bias, factory, None)
        self.g_norm = RMSNorm(hidden_size, elementwise_affine, norm_eps, device, dtype or torch.float32)
        self.o_proj = nn.Linear(H * V, hidden_size, bias=False, **factory)
        self.state_shapes = StateShapes(((H, K, V),), conv)

    def _compute(
        self, x: Tensor, past: RecurrentState, tokens: Layout, lower_bound: Tensor | None
    ) -> tuple[Tensor, RecurrentState]:
        lower_bound = self._bound(x, lower_bound)
        q, f, i = self._projections(x)
        (q, f, i), conv = self._convolved((q, f, i), past, tokens)
        q, f, i = (y.unflatten(-1, (self.num_heads, -1)) for y in (q, f, i))
        k, g = forget_gate(f, lower_bound)
        k, g = tokens.masked(k), tokens.masked(g)

        gla = self._wide_op(chunk_gla, fused_recurrent_gla, x, past.recurrent, tokens)
        o, recurrent = gla(F.silu(q), k.to(i.dtype), i, g)
        return self.o_proj(self.g_norm(o.flatten(2))), RecurrentState(recurrent, conv)
