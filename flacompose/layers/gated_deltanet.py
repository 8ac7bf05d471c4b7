"""Gated DeltaNet, https://arxiv.org/abs/2412.06464."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.delta_layer import DeltaLayer
from flacompose.layers.heads import repeat_heads
from flacompose.layers.initialization import init_decays_
from flacompose.layers.layout import Layout, rows_of, tokens_of
from flacompose.layers.recurrent import factory_of, linears
from flacompose.layers.state import RecurrentState
from flacompose.ops import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops.gated_delta_rule import log_decay


class GatedDeltaNet(DeltaLayer):
    r"""A layer of the delta rule with one decay per head and token, of $x$, per head:

    $$q = \frac{\operatorname{silu}(\operatorname{conv}(x W_q))}{\lVert \cdot \rVert} \quad
    k = \frac{\operatorname{silu}(\operatorname{conv}(x W_k))}{\lVert \cdot \rVert} \quad
    v = \operatorname{silu}(\operatorname{conv}(x W_v)) \quad \beta = \operatorname{sigmoid}(x W_\beta)$$
    $$g = -e^{A\_log} \operatorname{softplus}(x W_a + dt\_bias) \qquad S'_t = e^{g_t}\, S_{t-1} \qquad
    S_t = S'_t + \beta_t\, k_t (v_t - {S'_t}^\top k_t)^\top$$
    $$o_t = K^{-1/2}\, S_t^\top q_t \qquad
    y = \bigl(\operatorname{rmsnorm}(o) \odot \operatorname{gate}(x W_g)\bigr) W_o$$

    From "Gated Delta Networks: Improving Mamba2 with Delta Rule" (<https://arxiv.org/abs/2412.06464>). Arguments,
    defaults and parameter names are as in flash-linear-attention 0.6, whose checkpoints load.

    Heads of more than 512 values are kept in the state as ``P`` heads of equal parts of their values: the recurrent
    state is ``[N, HV * P, K, V / P]``.

    Args:
        hidden_size: Size of the input and of the output.
        expand_v: Number of values of a head: ``V = head_dim * expand_v``.
        head_dim: Keys of a head, ``K``.
        num_heads: Number of heads ``H`` of queries and keys.
        num_v_heads: Number of heads ``HV`` of values, decays and $\beta$, a multiple of ``H``; neighbouring
            value heads share queries and keys. Default: ``H``.
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
        use_gate: Whether the normed output is gated.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution`.
        allow_neg_eigval: Whether $\beta$ is doubled, so that a token may reverse the state along its key
            (<https://arxiv.org/abs/2411.12537>).
        conv_size: Width ``W`` of the convolutions.
        conv_bias: Whether the convolutions have a bias.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        norm_eps: Added to the mean square in the norm of the output.
        output_gate_activation: Of the output gate: "swish" or "silu", or "sigmoid".
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default; float32 for `A_log` and for a norm without a gate.

    Raises:
        ValueError: If an argument has a wrong value, a size is not an integer, or a head has over 512 keys or values
            that have no equal parts of at most 512.
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
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        output_gate_activation: str = "swish",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx, conv_size)
        self._keep_flags(use_gate=use_gate, allow_neg_eigval=allow_neg_eigval)
        H, HV, K, V = self._set_heads(num_heads, num_v_heads, head_dim, expand_v)
        _check.one_of("output_gate_activation", output_gate_activation, ("swish", "silu", "sigmoid"))

        factory = factory_of(device, dtype)
        self.q_proj, self.k_proj, self.v_proj = linears(hidden_size, (H * K, H * K, HV * V), factory)
        self.a_proj, self.b_proj = linears(hidden_size, (HV, HV), factory)
        self.A_log = nn.Parameter(torch.empty(HV, device=device, dtype=dtype or torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(HV, **factory))
        conv = self._add_convolutions("q k v", use_short_conv, conv_size, conv_bias, factory)
        gate = nn.Linear(hidden_size, HV * V, bias=False, **factory) if use_gate else None
        self._add_output(gate, output_gate_activation, norm_eps, conv, factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters of the layer itself."""
        init_decays_(self.A_log, self.dt_bias, low=0)

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        q, k, v, gate, a, b = self._projections(rows_of(x))
        q, k, v = (tokens_of(y, x) for y in (q, k, v))
        (q, k, v), conv = self._activated(q, k, v, past, tokens)
        v, q, k = self._in_heads(v, q, k)
        g = log_decay(upcast(a), self.A_log, self.dt_bias)  # of HV heads, in rows or tokens
        beta = self._gate_of_keys(b)
        # A token whose decay and beta are 0 does not change the state.
        g, beta = (repeat_heads(tokens.masked(tokens_of(y, x)), self.value_parts) for y in (g, beta))

        gated_delta_rule = self._op(
            chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, x, past.recurrent, tokens
        )
        o, recurrent = gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        return self._output(o, gate), RecurrentState(recurrent, conv)
