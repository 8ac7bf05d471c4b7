"""DeltaNet, https://arxiv.org/abs/2406.06484."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.feature_map import elu_plus_one
from flacompose.layers.heads import heads_of
from flacompose.layers.layout import Layout
from flacompose.layers.norm import GatedRMSNorm, RMSNorm
from flacompose.layers.recurrent import RecurrentLayer, factory_of, linears
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops import chunk_delta_rule, fused_recurrent_delta_rule
from flacompose.ops._tensors.dtype import upcast


class DeltaNet(RecurrentLayer):
    r"""A layer of the delta rule, of $x$, per head:

    $$q = \frac{\phi(\operatorname{conv}(x W_q))}{\lVert \cdot \rVert} \quad
    k = \frac{\phi(\operatorname{conv}(x W_k))}{\lVert \cdot \rVert} \quad
    v = \operatorname{silu}(\operatorname{conv}(x W_v)) \quad \beta = \operatorname{sigmoid}(x W_\beta)$$
    $$S_t = S_{t-1} + \beta_t\, k_t (v_t - S_{t-1}^\top k_t)^\top \qquad o_t = K^{-1/2}\, S_t^\top q_t \qquad
    y = \operatorname{rmsnorm}(o)\, W_o$$

    From "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
    (<https://arxiv.org/abs/2406.06484>). Arguments, defaults and parameter names are as in flash-linear-attention
    0.6, whose checkpoints load.

    Args:
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
            "fused_chunk" is refused, as in flash-linear-attention, where it raises an error.
        d_model: Another name of `hidden_size`. If given, it replaces `hidden_size`.
        hidden_size: Size of the input and of the output.
        expand_k: Size of the keys of all heads: ``hidden_size * expand_k``.
        expand_v: Size of the values of all heads: ``hidden_size * expand_v``.
        num_heads: Number of heads ``H``.
        use_beta: Whether $\beta$ is computed. Otherwise it is 1.
        use_gate: Whether the normed output is multiplied by $\operatorname{silu}(x W_g)$.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution`.
        conv_size: Width ``W`` of the convolutions.
        conv_bias: Whether the convolutions have a bias.
        allow_neg_eigval: Whether $\beta$ is doubled, so that a token may reverse the state along its key
            (<https://arxiv.org/abs/2411.12537>).
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        qk_activation: $\phi$ of queries and keys: "silu", "relu", "elu" ($\operatorname{elu}(x) + 1$) or "identity".
        qk_norm: Norm that queries and keys are divided by: "l2", the root of the sum of squares, or "sum", the sum of
            absolute values.
        norm_eps: Added to the mean square in the norm of the output.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default; float32 for a norm without a gate.

    Raises:
        ValueError: If an argument has a wrong value, the heads do not divide the sizes, or a head has over 512 keys.
        TypeError: If an argument has the wrong type.
    """

    chunk_modes = ("fused_chunk",)
    fusible = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj")

    def __init__(
        self,
        mode: str = "chunk",
        d_model: int | None = None,
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_beta: bool = True,
        use_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        layer_idx: int | None = None,
        qk_activation: str = "silu",
        qk_norm: str = "l2",
        norm_eps: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if d_model is not None:
            _check.count("d_model", d_model)
            hidden_size = d_model
        super().__init__(mode, hidden_size, norm_eps, layer_idx, conv_size)
        self._keep_flags(use_beta=use_beta, use_gate=use_gate, allow_neg_eigval=allow_neg_eigval)
        H, _, K, V = heads_of(hidden_size, num_heads, None, expand_k, expand_v)
        _check.one_of("qk_activation", qk_activation, ("silu", "relu", "elu", "identity"))
        _check.one_of("qk_norm", qk_norm, ("l2", "sum"))
        self.num_heads = H
        self.key_dim, self.value_dim, self.head_k_dim, self.head_v_dim = H * K, H * V, K, V
        self.qk_activation = qk_activation
        self.qk_norm = qk_norm

        factory = factory_of(device, dtype)
        self.q_proj, self.k_proj, self.v_proj = linears(hidden_size, (H * K, H * K, H * V), factory)
        if use_beta:
            self.b_proj = nn.Linear(hidden_size, H, bias=False, **factory)
        options = use_short_conv, conv_size, conv_bias, factory
        act = "silu" if qk_activation == "silu" else None
        conv = self._add_convolutions("q k", *options, act)
        conv += self._add_convolutions("v", *options)
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, H * V, bias=False, **factory)
            self.o_norm: RMSNorm = GatedRMSNorm(V, True, norm_eps, **factory)
        else:
            self.o_norm = RMSNorm(V, True, norm_eps, device, dtype or torch.float32)
        self.o_proj = nn.Linear(H * V, hidden_size, bias=False, **factory)
        self.state_shapes = StateShapes(((H, K, V),), conv)

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        q, k, v, gate, beta = self._projections(x)
        (q, k, v), conv = self._convolved((q, k, v), past, tokens)
        if not self.use_short_conv:
            v = F.silu(v)
            if self.qk_activation == "silu":
                q, k = F.silu(q), F.silu(k)
        if self.qk_activation == "relu":
            q, k = F.relu(q), F.relu(k)
        elif self.qk_activation == "elu":
            q, k = elu_plus_one(q), elu_plus_one(k)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in (q, k, v))
        if self.qk_norm == "sum":
            q, k = _over_its_sum(q), _over_its_sum(k)
        beta = torch.ones_like(k[..., 0]) if beta is None else upcast(beta).sigmoid()  # [B, T, H]
        if self.allow_neg_eigval:
            beta = 2 * beta

        delta_rule = self._wide_op(chunk_delta_rule, fused_recurrent_delta_rule, x, past.recurrent, tokens)
        # A token whose beta is 0 writes nothing.
        o, recurrent = delta_rule(q, k, v, tokens.masked(beta), use_qk_l2norm_in_kernel=self.qk_norm == "l2")
        o = self.o_norm(o) if gate is None else self.o_norm(o, gate.unflatten(-1, (self.num_heads, -1)))
        return self.o_proj(o.flatten(2)), RecurrentState(recurrent, conv)


def _over_its_sum(x: Tensor) -> Tensor:
    """``x [B, T, H, K]``, each head divided by the sum of its absolute values."""
    h = upcast(x)
    return (h / h.abs().sum(-1, keepdim=True).clamp(min=1e-6)).to(x.dtype)
