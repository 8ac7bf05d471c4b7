"""Linear attention, https://arxiv.org/abs/2006.16236."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flacompose._errors import ValueError
from flacompose.layers import _check
from flacompose.layers.feature_map import FEATURE_MAPS
from flacompose.layers.heads import heads_of, in_heads, repeat_heads
from flacompose.layers.layout import Layout
from flacompose.layers.norm import RMSNorm
from flacompose.layers.recurrent import RecurrentLayer, factory_of, linears
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops import chunk_linear_attn, fused_recurrent_linear_attn
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops._tensors.sizes import MAX_HEAD_SIZE


class LinearAttention(RecurrentLayer):
    r"""A layer of linear attention, of $x$, per head:

    $$q = \phi_q(x W_q) \quad k = \phi_k(x W_k) \quad v = x W_v$$
    $$S_t = S_{t-1} + k_t v_t^\top \qquad o_t = K^{-1/2}\, S_t^\top q_t \qquad y = \operatorname{rmsnorm}(o)\, W_o$$

    and with `do_feature_map_norm`, $z_t = z_{t-1} + k_t$ and $o_t = S_t^\top q_t / z_t^\top q_t$. From "Transformers
    are RNNs: Fast Autoregressive Transformers with Linear Attention" (<https://arxiv.org/abs/2006.16236>). Arguments,
    defaults and parameter names are as in flash-linear-attention 0.6, whose checkpoints load.

    Args:
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
            "fused_chunk" is refused, since "chunk" computes the same function.
        hidden_size: Size of the input and of the output.
        expand_k: Size of the keys of all heads: ``hidden_size * expand_k``, before the feature map.
        expand_v: Size of the values of all heads: ``hidden_size * expand_v``.
        num_heads: Number of heads ``H``.
        num_kv_heads: Number of heads of keys and values. ``H / num_kv_heads`` neighbouring heads of queries share each.
            Default: ``H``.
        feature_map: Map $\phi$ of each head of queries and keys: "hedgehog", which doubles the head size; "t2r";
            "elementwise_product" of two linear maps; "dpfp", which makes heads eight times as large; "elu", plus 1;
            "relu"; "identity".
        tie_feature_map_qk: Whether queries and keys share the parameters of their map.
        output_norm: "rmsnorm" or "identity".
        norm_q: Whether each query is divided by its sum.
        norm_k: Whether each key is divided by its sum.
        do_feature_map_norm: Whether the output is divided by the sum of its weights. The weights are positive, and the
            output a mean, under a positive map: "hedgehog", "t2r", "dpfp", "elu" or "relu".
        elementwise_affine: Whether the norm has a weight.
        norm_eps: Added to the mean square in the norm.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default; float32 for the norm.

    Raises:
        ValueError: If an argument has a wrong value, the heads do not divide the sizes, or a head has over 512 keys,
            before or after the feature map.
        TypeError: If an argument has the wrong type.
    """

    chunk_modes = ("fused_chunk",)
    fusible = ("q_proj", "k_proj", "v_proj")

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
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx)
        self._keep_flags(norm_q=norm_q, norm_k=norm_k, do_feature_map_norm=do_feature_map_norm)
        _check.flags(tie_feature_map_qk=tie_feature_map_qk, elementwise_affine=elementwise_affine)
        H, HKV, K, V = heads_of(hidden_size, num_heads, num_kv_heads, expand_k, expand_v)
        _check.one_of("feature_map", feature_map, FEATURE_MAPS)
        make_map, expansion = FEATURE_MAPS[feature_map]
        keys = expansion * K
        if keys > MAX_HEAD_SIZE:
            raise ValueError(
                f"feature_map {feature_map!r} must map {K} keys of a head to at most {MAX_HEAD_SIZE}, "
                f"got {keys}"
            )
        if output_norm not in ("rmsnorm", "identity"):
            raise ValueError(f"output_norm must be 'rmsnorm' or 'identity', got {output_norm!r}")
        self.num_heads, self.num_kv_heads, self.num_kv_groups = H, HKV, H // HKV
        self.key_dim, self.value_dim, self.head_k_dim, self.head_v_dim = H * K, H * V, K, V

        factory = factory_of(device, dtype)
        self.feature_map_q = make_map(K, **factory)
        self.feature_map_k = self.feature_map_q if tie_feature_map_qk else make_map(K, **factory)
        self.q_proj, self.k_proj, self.v_proj = linears(hidden_size, (H * K, HKV * K, HKV * V), factory)
        self.norm: nn.Module = nn.Identity()
        if output_norm == "rmsnorm":
            self.norm = RMSNorm(V, elementwise_affine, norm_eps, device, dtype or torch.float32)
        self.o_proj = nn.Linear(H * V, hidden_size, bias=False, **factory)
        self.state_shapes = StateShapes(
            ((H, keys, V),), normalizer=(H, keys) if do_feature_map_norm else None
        )

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        q, k, v = self._projections(x)
        q = self.feature_map_q(q.unflatten(-1, (self.num_heads, -1)))
        k = self.feature_map_k(in_heads(k, self.num_kv_heads))
        v = in_heads(v, self.num_kv_heads)
        if self.norm_q:
            q = _over_its_sum(q)
        if self.norm_k:
            k = _over_its_sum(k)
        # Masked after the map, since most maps do not map 0 to 0.
        k, v = repeat_heads(tokens.masked(k), self.num_kv_groups), repeat_heads(v, self.num_kv_groups)

        initial_state = past.recurrent
        if initial_state is not None and self.do_feature_map_norm:
            initial_state = initial_state, past.normalizer
        linear_attn = self._wide_op(chunk_linear_attn, fused_recurrent_linear_attn, x, initial_state, tokens)
        o, final_state = linear_attn(q, k, v, normalize=self.do_feature_map_norm)
        recurrent, normalizer = final_state if isinstance(final_state, tuple) else (final_state, ())
        return self.o_proj(self.norm(o).flatten(2)), RecurrentState(recurrent, normalizer=normalizer)


def _over_its_sum(x: Tensor) -> Tensor:
    """``x [B, T, H, K]``, each head divided by its sum over ``K``."""
    h = upcast(x)
    return (h / (h.sum(-1, keepdim=True) + 1e-4)).to(x.dtype)
