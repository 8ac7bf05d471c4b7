"""Gated DeltaProduct, https://arxiv.org/abs/2502.10297."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.delta_layer import DeltaLayer
from flacompose.layers.heads import in_heads, repeat_heads, sharded_like_values
from flacompose.layers.initialization import init_decays_
from flacompose.layers.layout import Layout
from flacompose.layers.recurrent import factory_of, linears
from flacompose.layers.state import RecurrentState
from flacompose.ops import chunk_gated_delta_product, fused_recurrent_gated_delta_product
from flacompose.ops._tensors.dtensor import unflatten
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops.gated_delta_rule import log_decay


class GatedDeltaProduct(DeltaLayer):
    r"""A layer of $n$ steps of the delta rule for each token, of $x$, per head, with $i = 1, \dots, n$:

    $$q = \frac{\operatorname{silu}(\operatorname{conv}(x W_q))}{\lVert \cdot \rVert} \quad
    k_i = \frac{\operatorname{silu}(\operatorname{conv}(x W_{k,i}))}{\lVert \cdot \rVert} \quad
    v_i = \operatorname{silu}(\operatorname{conv}(x W_{v,i})) \quad
    \beta_i = 2 \operatorname{sigmoid}(x W_{\beta,i})$$
    $$g = -e^{A\_log} \operatorname{softplus}(x W_a + dt\_bias) \qquad S_{t,0} = e^{g_t}\, S_{t-1,n} \qquad
    S_{t,i} = S_{t,i-1} + \beta_{t,i}\, k_{t,i} (v_{t,i} - S_{t,i-1}^\top k_{t,i})^\top$$
    $$o_t = K^{-1/2}\, S_{t,n}^\top q_t \qquad
    y = \bigl(\operatorname{rmsnorm}(o) \odot \operatorname{silu}(x W_g)\bigr) W_o$$

    From "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products"
    (<https://arxiv.org/abs/2502.10297>). Arguments, defaults and parameter names are as in flash-linear-attention
    0.6, whose checkpoints load.

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
        use_output_gate: Whether the normed output is gated.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution`.
        conv_size: Width ``W`` of the convolutions.
        conv_bias: Whether the convolutions have a bias.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        norm_eps: Added to the mean square in the norm of the output.
        use_forget_gate: Whether there is a decay. Otherwise $g$ is 0.
        allow_neg_eigval: Whether $\beta$ is doubled, so that a step may reverse the state along its key
            (<https://arxiv.org/abs/2411.12537>).
        num_householder: Steps of a token, $n$.
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
        use_output_gate: bool = True,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        use_forget_gate: bool = True,
        allow_neg_eigval: bool = True,
        num_householder: int = 2,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx, conv_size)
        self._keep_flags(use_output_gate=use_output_gate, use_forget_gate=use_forget_gate)
        self._keep_flags(allow_neg_eigval=allow_neg_eigval)
        H, HV, K, V = self._set_heads(num_heads, num_v_heads, head_dim, expand_v)
        _check.count("num_householder", num_householder)
        self.num_householder = n = num_householder

        factory = factory_of(device, dtype)
        sizes = H * K, n * H * K, n * HV * V, n * HV
        self.q_proj, self.k_proj, self.v_proj, self.b_proj = linears(hidden_size, sizes, factory)
        if use_forget_gate:
            self.a_proj = nn.Linear(hidden_size, HV, bias=False, **factory)
            self.A_log = nn.Parameter(torch.empty(HV, device=device, dtype=dtype or torch.float32))
            self.dt_bias = nn.Parameter(torch.empty(HV, **factory))
        conv = self._add_convolutions("q k v", use_short_conv, conv_size, conv_bias, factory)
        gate = nn.Linear(hidden_size, HV * V, bias=False, **factory) if use_output_gate else None
        self._add_output(gate, "silu", norm_eps, conv, factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters of the layer itself."""
        if self.use_forget_gate:
            init_decays_(self.A_log, self.dt_bias, low=0)

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        H, HV, n = self.num_heads, self.num_v_heads, self.num_householder
        q, k, v, gate, a, b = self._projections(x)
        (q, k, v), conv = self._activated(q, k, v, past, tokens)
        # A token whose decay and betas are 0 does not change the state.
        beta, g = tokens.masked(self._gate_of_keys(b)), None
        if a is not None:
            g = log_decay(upcast(a), self.A_log, self.dt_bias)  # [B, T, HV]
            g = repeat_heads(tokens.masked(g), self.value_parts)
        # The n steps of a token side by side: [B, T * n, heads, ...].
        heads = HV * self.value_parts
        q, k = in_heads(q, H), unflatten(k, -1, (n, H, -1)).flatten(1, 2)
        q, k = (sharded_like_values(y, v, heads) for y in (q, k))
        v = unflatten(v, -1, (n, heads, -1)).flatten(1, 2)
        beta = repeat_heads(unflatten(beta, -1, (n, HV)).flatten(1, 2), self.value_parts)

        gated_delta_product = self._op(
            chunk_gated_delta_product, fused_recurrent_gated_delta_product, x, past.recurrent, tokens
        )
        o, recurrent = gated_delta_product(q, k, v, g, beta, n, use_qk_l2norm_in_kernel=True)
        return self._output(o, gate), RecurrentState(recurrent, conv)
