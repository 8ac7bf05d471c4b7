"""Gated DeltaNet-2, https://arxiv.org/abs/2605.22791."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flacompose.layers.delta_layer import DeltaLayer
from flacompose.layers.heads import in_heads, repeat_heads
from flacompose.layers.initialization import init_decays_
from flacompose.layers.layout import Layout
from flacompose.layers.recurrent import factory_of, linears, low_rank
from flacompose.layers.state import RecurrentState
from flacompose.ops import chunk_gdn2, fused_recurrent_gdn2
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops.gated_delta_rule import log_decay


class GatedDeltaNet2(DeltaLayer):
    r"""A layer of the delta rule that erases by channels of the key and writes by channels of the value, of $x$:

    $$q = \frac{\operatorname{silu}(\operatorname{conv}(x W_q))}{\lVert \cdot \rVert} \quad
    k = \frac{\operatorname{silu}(\operatorname{conv}(x W_k))}{\lVert \cdot \rVert} \quad
    v = \operatorname{silu}(\operatorname{conv}(x W_v)) \quad b = \operatorname{sigmoid}(x W_b) \quad
    w = \operatorname{sigmoid}(x W_w)$$
    $$g = -e^{A\_log} \operatorname{softplus}(x W_1 W_2 + dt\_bias) \qquad
    S'_t = \operatorname{diag}(e^{g_t})\, S_{t-1} \qquad
    S_t = S'_t + k_t (w_t \odot v_t - {S'_t}^\top (b_t \odot k_t))^\top$$
    $$o_t = K^{-1/2}\, S_t^\top q_t \qquad
    y = \bigl(\operatorname{rmsnorm}(o) \odot \operatorname{sigmoid}(x W_3 W_4 + b')\bigr) W_o$$

    per head. From "Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention"
    (<https://arxiv.org/abs/2605.22791>). Arguments, defaults and parameter names are as in flash-linear-attention
    0.6, whose checkpoints load.

    Heads of more than 512 values are kept in the state as ``P`` heads of equal parts of their values: the recurrent
    state is ``[N, HV * P, K, V / P]``.

    Args:
        hidden_size: Size of the input and of the output.
        expand_v: Number of values of a head: ``V = head_dim * expand_v``, which is also the rank of $W_1 W_2$ and of
            $W_3 W_4$.
        head_dim: Keys of a head, ``K``.
        num_heads: Number of heads ``H`` of queries, keys, decays and $b$.
        num_v_heads: Number of heads ``HV`` of values and $w$, a multiple of ``H``; neighbouring heads share queries,
            keys, decays and $b$. Default: ``H``.
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution`.
        allow_neg_eigval: Whether $b$ is doubled, so that a token may reverse the state along its key
            (<https://arxiv.org/abs/2411.12537>).
        conv_size: Width ``W`` of the convolutions.
        conv_bias: Whether the convolutions have a bias.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        norm_eps: Added to the mean square in the norm of the output.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default; float32 for `A_log` and `dt_bias`.

    Raises:
        ValueError: If an argument has a wrong value, a size is not an integer, or a head has over 512 keys or values
            that have no equal parts of at most 512.
        TypeError: If an argument has the wrong type.
    """

    fusible = ("q_proj", "k_proj", "v_proj", "b_proj", "w_proj", "f_proj.0", "g_proj.0")

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1.0,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx, conv_size)
        self._keep_flags(allow_neg_eigval=allow_neg_eigval)
        H, HV, K, V = self._set_heads(num_heads, num_v_heads, head_dim, expand_v)

        factory = factory_of(device, dtype)
        self.q_proj, self.k_proj, self.v_proj = linears(hidden_size, (H * K, H * K, HV * V), factory)
        conv = self._add_convolutions("q k v", use_short_conv, conv_size, conv_bias, factory)
        self.f_proj = low_rank(hidden_size, V, H * K, False, factory)
        self.b_proj, self.w_proj = linears(hidden_size, (H * K, HV * V), factory)
        self.A_log = nn.Parameter(torch.empty(H, device=device, dtype=dtype or torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(H * K, device=device, dtype=dtype or torch.float32))
        self._add_output(low_rank(hidden_size, V, HV * V, True, factory), "sigmoid", norm_eps, conv, factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters of the layer itself."""
        init_decays_(self.A_log, self.dt_bias, low=1)

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        q, k, v, b, w, a, gate = self._projections(x)
        (q, k, v), conv = self._activated(q, k, v, past, tokens)
        a, A_log, bias = (in_heads(y, self.num_heads) for y in (a, self.A_log, self.dt_bias))
        g = log_decay(upcast(a), A_log, bias)  # [B, T, H, K]
        # A token whose decay and key are 0 does not change the state.
        v, q, k, b, g = self._in_heads(v, q, tokens.masked(k), self._gate_of_keys(b), tokens.masked(g))
        g, w = repeat_heads(g, v.shape[2] // g.shape[2]), upcast(w).sigmoid().unflatten(-1, (v.shape[2], -1))

        gdn2 = self._op(chunk_gdn2, fused_recurrent_gdn2, x, past.recurrent, tokens)
        o, recurrent = gdn2(q, k, v, g, b, w, use_qk_l2norm_in_kernel=True)
        return self._output(o, gate), RecurrentState(recurrent, conv)
