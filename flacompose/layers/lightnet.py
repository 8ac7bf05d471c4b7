"""LightNet, https://arxiv.org/abs/2405.21022."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.heads import expanded_heads
from flacompose.layers.layout import Layout
from flacompose.layers.norm import GatedRMSNorm
from flacompose.layers.recurrent import RecurrentLayer, factory_of, linears, low_rank
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops import chunk_gla, fused_recurrent_gla
from flacompose.ops._composed.logsumexp import running_logsumexp
from flacompose.ops._tensors.dtype import upcast


class LightNetAttention(RecurrentLayer):
    r"""A layer of LightNet, of $x$, per head:

    $$q = \operatorname{silu}(\operatorname{conv}(x W_q)) \quad \kappa = \operatorname{conv}(x W_k) \quad
    v = \operatorname{conv}(x W_v) \quad z_t = \operatorname{logaddexp}(z_{t-1}, \kappa_t)$$
    $$S_t = \operatorname{diag}(e^{z_{t-1} - z_t})\, S_{t-1} + e^{\kappa_t - z_t} v_t^\top \qquad
    o_t = K^{-1/2}\, S_t^\top q_t \qquad
    y = \bigl(\operatorname{rmsnorm}(o) \odot \operatorname{silu}(x W_1 W_2)\bigr) W_o$$

    The norm is over all heads together. From "You Only Scan Once: Efficient Multi-dimension Sequential Modeling with
    LightNet" (<https://arxiv.org/abs/2405.21022>), its layer of one dimension. Arguments, defaults and parameter names
    are as in flash-linear-attention 0.6, whose checkpoints load.

    Args:
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
        hidden_size: Size of the input and of the output.
        num_heads: Number of heads ``H``. Default: ``hidden_size // expand_ratio``.
        expand_ratio: Keys of each head, ``K``. None for ``hidden_size // num_heads``.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution`, without activation.
        conv_size: Width ``W`` of the convolutions.
        conv_bias: Whether the convolutions have a bias.
        gate_low_rank_dim: Rank of the output gate's projection.
        elementwise_affine: Whether the norm has a weight; None stands for False.
        norm_eps: Added to the mean square in the norm.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default.

    Raises:
        ValueError: If neither `num_heads` nor `expand_ratio` is given, the heads do not divide `hidden_size`, or a
            head has over 512 keys.
        TypeError: If an argument has the wrong type.
    """

    fusible = ("q_proj", "k_proj", "v_proj", "g_proj.0")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        num_heads: int | None = None,
        expand_ratio: int | None = 128,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        gate_low_rank_dim: int = 128,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx, conv_size)
        H, K, V = expanded_heads(hidden_size, num_heads, expand_ratio)
        _check.count("gate_low_rank_dim", gate_low_rank_dim)
        self.num_heads, self.expand_ratio = H, K
        self.key_dim, self.value_dim, self.head_k_dim, self.head_v_dim = H * K, H * V, K, V
        self.gate_low_rank_dim = gate_low_rank_dim

        factory = factory_of(device, dtype)
        self.q_proj, self.k_proj, self.v_proj = linears(hidden_size, (H * K, H * K, H * V), factory)
        conv = self._add_convolutions("q k v", use_short_conv, conv_size, conv_bias, factory, None)
        self.g_proj = low_rank(hidden_size, gate_low_rank_dim, hidden_size, False, factory)
        self.g_norm = GatedRMSNorm(hidden_size, elementwise_affine, norm_eps, **factory)
        self.o_proj = nn.Linear(H * V, hidden_size, bias=False, **factory)
        self.state_shapes = StateShapes(((H, K, V),), conv, normalizer=(H, K), log_normalizer=True)

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        q, k, v, gate = self._projections(x)
        (q, k, v), conv = self._convolved((q, k, v), past, tokens)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in (q, k, v))
        logits = upcast(tokens.masked(k, -torch.inf))
        g, k, z = running_logsumexp(logits, past.normalizer, tokens.cu_seqlens, tokens.num_states)

        gla = self._wide_op(chunk_gla, fused_recurrent_gla, x, past.recurrent, tokens)
        o, recurrent = gla(F.silu(q), k.to(v.dtype), v, g)
        return self.o_proj(self.g_norm(o.flatten(2), gate)), RecurrentState(recurrent, conv, z)
