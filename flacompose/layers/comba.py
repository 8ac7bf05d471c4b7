"""Comba, https://arxiv.org/abs/2506.02475."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.delta_layer import DeltaLayer
from flacompose.layers.heads import in_heads, repeat_heads
from flacompose.layers.initialization import init_decays_
from flacompose.layers.layout import Layout
from flacompose.layers.recurrent import factory_of, linears
from flacompose.layers.state import RecurrentState
from flacompose.ops import chunk_comba, fused_recurrent_comba
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops.gated_delta_rule import log_decay


class Comba(DeltaLayer):
    r"""A layer of the delta rule that reads the replaced value before the state decays, of $x$, per head:

    $$q' = \operatorname{silu}(\operatorname{conv}(x W_q)) \quad k' = \operatorname{silu}(\operatorname{conv}(x W_k))
    \quad v = \operatorname{silu}(\operatorname{conv}(x W_v)) \quad p' = \operatorname{sigmoid}(decay)\, k'$$
    $$q = \frac{q' - D\, p'}{\lVert \cdot \rVert} \quad k = \frac{k'}{\lVert \cdot \rVert} \quad
    p = \frac{p'}{\lVert \cdot \rVert} \quad \beta = \operatorname{sigmoid}(x W_\beta) \quad
    g = -e^{A\_log} \operatorname{softplus}(x W_a + dt\_bias)$$
    $$S_t = e^{g_t}\, S_{t-1} + \beta_t\, k_t (v_t - S_{t-1}^\top p_t)^\top \qquad o_t = K^{-1/2}\, S_t^\top q_t \qquad
    y = \bigl(\operatorname{rmsnorm}(o) \odot \operatorname{sigmoid}(x W_g)\bigr) W_o$$

    From "Comba: Improving Bilinear RNNs with Closed-loop Control" (<https://arxiv.org/abs/2506.02475>). Arguments,
    defaults and parameter names are as in flash-linear-attention 0.6, whose checkpoints load. As there, $p'$ is
    divided by its norm, so the inner decay changes only $q$.

    Heads of more than 512 values are kept in the state as ``P`` heads of equal parts of their values: the recurrent
    state is ``[N, HV * P, K, V / P]``.

    Args:
        hidden_size: Size of the input and of the output.
        expand_v: Number of values of a head: ``V = head_dim * expand_v``.
        head_dim: Keys of a head, ``K``.
        num_heads: Number of heads ``H`` of queries and keys, of $D$ and of the inner decay.
        num_v_heads: Number of heads ``HV`` of values, decays and $\beta$, a multiple of ``H``; neighbouring
            value heads share queries and keys. Default: ``H``.
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution`.
        use_output_gate: Whether the normed output is gated.
        use_output_correction: Whether $D\, p'$ is subtracted from $q'$.
        use_inner_decay: Whether $p'$ is the key times a learned number from 0 to 1. Otherwise it is the key.
        correction_factor: Initial value of $D$. The authors advise 1, or 0.02 for small models.
        conv_size: Width ``W`` of the convolutions.
        conv_bias: Whether the convolutions have a bias.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        norm_eps: Added to the mean square in the norm of the output.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default; float32 for `A_log` and for a norm without a gate.

    Raises:
        ValueError: If an argument has a wrong value, a size is not an integer, `correction_factor` is not finite, or a
            head has over 512 keys or values that have no equal parts of at most 512.
        TypeError: If an argument has the wrong type.
    """

    fusible = ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj")

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        use_output_gate: bool = True,
        use_output_correction: bool = True,
        use_inner_decay: bool = True,
        correction_factor: float = 1.0,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx, conv_size)
        self._keep_flags(use_output_gate=use_output_gate, use_inner_decay=use_inner_decay)
        self._keep_flags(use_output_correction=use_output_correction)
        _check.finite("correction_factor", correction_factor)
        H, HV, K, V = self._set_heads(num_heads, num_v_heads, head_dim, expand_v)
        self.correction_factor = correction_factor

        factory = factory_of(device, dtype)
        self.q_proj, self.k_proj, self.v_proj = linears(hidden_size, (H * K, H * K, HV * V), factory)
        self.a_proj, self.b_proj = linears(hidden_size, (HV, HV), factory)
        if use_inner_decay:
            self.decay = nn.Parameter(torch.empty(H, **factory))
        if use_output_correction:
            self.D = nn.Parameter(torch.empty(H, **factory))
        self.A_log = nn.Parameter(torch.empty(HV, device=device, dtype=dtype or torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(HV, **factory))
        conv = self._add_convolutions("q k v", use_short_conv, conv_size, conv_bias, factory)
        gate = nn.Linear(hidden_size, HV * V, bias=False, **factory) if use_output_gate else None
        self._add_output(gate, "sigmoid", norm_eps, conv, factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters of the layer itself."""
        if self.use_inner_decay:
            nn.init.ones_(self.decay)
        if self.use_output_correction:
            nn.init.constant_(self.D, self.correction_factor)
        init_decays_(self.A_log, self.dt_bias, low=0)

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        q, k, v, gate, a, b = self._projections(x)
        (q, k, v), conv = self._activated(q, k, v, past, tokens)
        q, k = in_heads(q, self.num_heads), in_heads(k, self.num_heads)
        p = k
        if self.use_inner_decay:
            p = (k * in_heads(upcast(self.decay), self.num_heads).sigmoid()).to(k.dtype)
        if self.use_output_correction:
            q = (q - in_heads(upcast(self.D), self.num_heads) * p).to(q.dtype)
        v, q, k, p = self._in_heads(v, q, k, p)
        g = log_decay(upcast(a), self.A_log, self.dt_bias)  # [B, T, HV]
        beta = self._gate_of_keys(b)  # [B, T, HV]
        # A token whose decay and beta are 0 does not change the state.
        g, beta = (repeat_heads(tokens.masked(y), self.value_parts) for y in (g, beta))

        comba = self._op(chunk_comba, fused_recurrent_comba, x, past.recurrent, tokens)
        o, recurrent = comba(q, k, v, p, g, beta, use_qk_l2norm_in_kernel=True)
        return self._output(o, gate), RecurrentState(recurrent, conv)
