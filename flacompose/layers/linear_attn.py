"""Linear attention, https://arxiv.org/abs/2006.16236."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.attention import AttentionLayer
from flacompose.layers.feature_map import FEATURE_MAPS
from flacompose.layers.norm import RMSNorm
from flacompose.layers.state import RecurrentState
from flacompose.ops import chunk_linear_attn, fused_recurrent_linear_attn
from flacompose.ops._check import MAX_HEAD_SIZE
from flacompose.ops._dtype import wide


class LinearAttention(AttentionLayer):
    r"""A layer of linear attention, of $x$, per head:

    $$q = \phi_q(x W_q) \quad k = \phi_k(x W_k) \quad v = x W_v$$
    $$S_t = S_{t-1} + k_t v_t^\top \qquad o_t = K^{-1/2}\, S_t^\top q_t \qquad y = \operatorname{rmsnorm}(o)\, W_o$$

    and with `do_feature_map_norm`, $z_t = z_{t-1} + k_t$ and $o_t = S_t^\top q_t / z_t^\top q_t$. From "Transformers
    are RNNs: Fast Autoregressive Transformers with Linear Attention" (<https://arxiv.org/abs/2006.16236>). Arguments,
    defaults and parameter names are those of flash-linear-attention 0.6, whose checkpoints load.

    Args:
        mode: "chunk" or "fused_recurrent", two ways to the same numbers; calls of one token always take the second.
            "fused_chunk" is refused: there is no such op, and "chunk" is the same function.
        hidden_size: Size of the input and of the output.
        expand_k: The keys of all heads take ``hidden_size * expand_k``, before the feature map.
        expand_v: The values of all heads take ``hidden_size * expand_v``.
        num_heads: Number of heads ``H``.
        num_kv_heads: Number of heads that keys and values have, each shared by ``H / num_kv_heads`` neighbouring heads
            of queries. Default: ``H``.
        feature_map: Map $\phi$ of each head of queries and keys: "hedgehog", to twice the size ``K`` that it takes;
            "t2r"; "elementwise_product", of two linear maps; "dpfp", to eight times the size; "elu", plus 1; "relu";
            "identity".
        tie_feature_map_qk: Whether queries and keys share the parameters of their map.
        output_norm: "rmsnorm" or "identity".
        norm_q: Whether each query is divided by its sum.
        norm_k: Whether each key is divided by its sum.
        do_feature_map_norm: Whether the output is divided by the sum of its weights. The weights are positive, and the
            output a mean, under a positive map: "hedgehog", "t2r", "dpfp", "elu" or "relu".
        elementwise_affine: Whether the norm has a weight.
        norm_eps: Added to the mean square in the norm.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.

    Raises:
        ValueError: If an argument is none of these, the heads do not divide the sizes, or one takes over 256 values,
            or keys after the feature map.
        TypeError: If an argument has the wrong type.
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        feature_map: str = "elementwise_product",
        tie_feature_map_qk: bool = False,
        output_norm: str = "rmsnorm",
        norm_q: bool = False,
        norm_k: bool = False,
        do_feature_map_norm: bool = False,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, expand_k, expand_v, num_heads, num_kv_heads, norm_eps, layer_idx)
        _check.one_of("feature_map", feature_map, FEATURE_MAPS)
        make_map, expansion = FEATURE_MAPS[feature_map]
        H, K = num_heads, expansion * self.head_k_dim
        if K > MAX_HEAD_SIZE:
            raise ValueError(
                f"feature_map {feature_map!r} must map {self.head_k_dim} keys of a head to at most "
                f"{MAX_HEAD_SIZE}, got {K}"
            )
        if output_norm not in ("rmsnorm", "identity"):
            raise ValueError(f"output_norm must be 'rmsnorm' or 'identity', got {output_norm!r}")
        self.norm_q = norm_q
        self.norm_k = norm_k
        self.do_feature_map_norm = do_feature_map_norm
        self.state_shapes = self.state_shapes._replace(
            recurrent=((H, K, self.head_v_dim),), normalizer=(H, K) if do_feature_map_norm else None
        )

        self.feature_map_q = make_map(self.head_k_dim)
        self.feature_map_k = self.feature_map_q if tie_feature_map_qk else make_map(self.head_k_dim)
        self._add_projections()
        self.norm = (
            RMSNorm(self.head_v_dim, elementwise_affine, norm_eps, dtype=torch.float32)
            if output_norm == "rmsnorm"
            else nn.Identity()
        )
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
        q, k, v, _ = self._project(x, tokens, state, cu_seqlens)
        q, k = self.feature_map_q(q), self.feature_map_k(k)
        if self.norm_q:
            q = _over_its_sum(q)
        if self.norm_k:
            k = _over_its_sum(k)
        k = tokens.silence(k)  # at last: maps of 0 are not 0

        initial_state: Tensor | tuple[Tensor, Tensor] | None = None
        if state is not None:
            S, z = state.recurrent, state.normalizer
            initial_state = (S, z) if isinstance(z, Tensor) else S
        linear_attn = fused_recurrent_linear_attn if self._recurrent(x) else chunk_linear_attn
        o, final_state = linear_attn(
            q, self._share(k), self._share(v),
            initial_state=initial_state,
            output_final_state=True,
            normalize=self.do_feature_map_norm,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        assert final_state is not None  # asked for
        recurrent, normalizer = final_state if isinstance(final_state, tuple) else (final_state, ())
        return self._leave(self.norm(o), tokens), RecurrentState(recurrent, normalizer=normalizer)


def _over_its_sum(x: Tensor) -> Tensor:
    """``x [B, T, H, K]``, each head divided by its sum over ``K``."""
    h = wide(x)
    return (h / (h.sum(-1, keepdim=True) + 1e-4)).to(x.dtype)
