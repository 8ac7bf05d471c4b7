"""LightNet, https://arxiv.org/abs/2405.21022."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.attention import AttentionLayer, expanded_heads
from flacompose.layers.norm import GatedRMSNorm
from flacompose.layers.state import RecurrentState
from flacompose.ops import chunk_gla, fused_recurrent_gla
from flacompose.ops._dtype import wide
from flacompose.ops._logsumexp import running_logsumexp


class LightNetAttention(AttentionLayer):
    r"""A layer of LightNet, of $x$, per head:

    $$q = \operatorname{silu}(\operatorname{conv}(x W_q)) \quad \kappa = \operatorname{conv}(x W_k) \quad
    v = \operatorname{conv}(x W_v) \quad z_t = \operatorname{logaddexp}(z_{t-1}, \kappa_t)$$
    $$S_t = \operatorname{diag}(e^{z_{t-1} - z_t})\, S_{t-1} + e^{\kappa_t - z_t} v_t^\top \qquad
    o_t = K^{-1/2}\, S_t^\top q_t \qquad
    y = \bigl(\operatorname{rmsnorm}(o) \odot \operatorname{silu}(x W_1 W_2)\bigr) W_o$$

    The norm is over all heads together. From "You Only Scan Once: Efficient Multi-dimension Sequential Modeling with
    LightNet" (<https://arxiv.org/abs/2405.21022>), its layer of one dimension. Arguments, defaults and parameter names
    are those of flash-linear-attention 0.6, whose checkpoints load.

    Args:
        mode: "chunk" or "fused_recurrent", two ways to the same numbers; calls of one token always take the second.
        hidden_size: Size of the input and of the output.
        num_heads: Number of heads ``H``. Default: ``hidden_size // expand_ratio``.
        expand_ratio: Keys of each head, ``K``. None for ``hidden_size // num_heads``.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution`, without activation.
        conv_size: Its width ``W``.
        conv_bias: Whether it has a bias.
        gate_low_rank_dim: Rank of the output gate's projection.
        elementwise_affine: Whether the norm has a weight.
        norm_eps: Added to the mean square in the norm.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.

    Raises:
        ValueError: If neither `num_heads` nor `expand_ratio` is given, the heads do not divide `hidden_size`, or one
            takes over 256 keys or values.
        TypeError: If an argument has the wrong type.
    """

    chunk_modes = ()

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
    ) -> None:
        H, K = expanded_heads(hidden_size, num_heads, expand_ratio)
        super().__init__(mode, hidden_size, H * K / hidden_size, 1.0, H, None, norm_eps, layer_idx)
        _check.count("gate_low_rank_dim", gate_low_rank_dim)
        self.expand_ratio = K
        self.gate_low_rank_dim = gate_low_rank_dim
        self.state_shapes = self.state_shapes._replace(normalizer=(H, K), log_normalizer=True)

        self._add_projections()
        self._add_convolutions(use_short_conv, conv_size, conv_bias, activation=None)
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, gate_low_rank_dim, bias=False),
            nn.Linear(gate_low_rank_dim, hidden_size, bias=False),
        )
        self.g_norm = GatedRMSNorm(hidden_size, elementwise_affine, norm_eps)
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
        logits = wide(tokens.silence(k, -torch.inf))
        g, k, z = running_logsumexp(logits, None if state is None else state.normalizer, cu_seqlens)

        gla = fused_recurrent_gla if self._recurrent(x) else chunk_gla
        o, recurrent = gla(
            F.silu(q), k.to(v.dtype), v, g,
            initial_state=None if state is None else state.recurrent,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        o = self.g_norm(rearrange(o, "b t h v -> b t (h v)"), self.g_proj(x))
        return self._leave(o.unflatten(2, (self.num_heads, -1)), tokens), RecurrentState(recurrent, conv, z)
