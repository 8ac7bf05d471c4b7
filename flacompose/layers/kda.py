"""Kimi Delta Attention (KDA), https://arxiv.org/abs/2510.26692."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flacompose._errors import ValueError
from flacompose.layers import _check
from flacompose.layers.delta_layer import DeltaLayer
from flacompose.layers.heads import repeat_heads
from flacompose.layers.initialization import init_decays_
from flacompose.layers.layout import Layout
from flacompose.layers.recurrent import factory_of, linears, low_rank
from flacompose.layers.state import RecurrentState
from flacompose.ops import chunk_kda, fused_recurrent_kda
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops.gated_delta_rule import log_decay


class KimiDeltaAttention(DeltaLayer):
    r"""A layer of the delta rule with a decay per channel of the key, of $x$, per head:

    $$q = \frac{\operatorname{silu}(\operatorname{conv}(x W_q))}{\lVert \cdot \rVert} \quad
    k = \frac{\operatorname{silu}(\operatorname{conv}(x W_k))}{\lVert \cdot \rVert} \quad
    v = \operatorname{silu}(\operatorname{conv}(x W_v)) \quad \beta = \operatorname{sigmoid}(x W_\beta)$$
    $$g = -e^{A\_log} \operatorname{softplus}(x W_1 W_2 + dt\_bias) \qquad
    S'_t = \operatorname{diag}(e^{g_t})\, S_{t-1} \qquad S_t = S'_t + \beta_t\, k_t (v_t - {S'_t}^\top k_t)^\top$$
    $$o_t = K^{-1/2}\, S_t^\top q_t \qquad
    y = \bigl(\operatorname{rmsnorm}(o) \odot \operatorname{sigmoid}(x W_3 W_4 + b)\bigr) W_o$$

    From "Kimi Linear: An Expressive, Efficient Attention Architecture" (<https://arxiv.org/abs/2510.26692>). Arguments,
    defaults and parameter names are as in flash-linear-attention 0.6, whose checkpoints load.

    Heads of more than 512 values are kept in the state as ``P`` heads of equal parts of their values: the recurrent
    state is then ``[N, HV * P, K, V / P]``.

    Args:
        hidden_size: Size of the input and of the output.
        expand_v: Number of values of a head: ``V = head_dim * expand_v``, which is also the rank of $W_1 W_2$ and of
            $W_3 W_4$.
        head_dim: Keys of a head, ``K``.
        num_heads: Number of heads ``H`` of queries and keys.
        num_v_heads: Number of heads ``HV`` of values, decays and $\beta$, a multiple of ``H``; neighbouring
            value heads share queries and keys. Default: ``H``.
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution`.
        allow_neg_eigval: Whether $\beta$ is doubled, so that a token may reverse the state along its key
            (<https://arxiv.org/abs/2411.12537>).
        safe_gate: Whether the rates ``exp(A_log)`` are initialized with 1. It requires a `lower_bound`, and changes
            nothing else.
        lower_bound: The lowest decay, below 0 and finite. The decay is then
            $g = \text{lower\_bound} \cdot \operatorname{sigmoid}(e^{A\_log} (x W_1 W_2 + dt\_bias))$. Default: none.
        conv_size: Width ``W`` of the convolutions.
        conv_bias: Whether the convolutions have a bias.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        norm_eps: Added to the mean square in the norm of the output.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default; float32 for `A_log` and `dt_bias`.

    Raises:
        ValueError: If an argument has a wrong value, `lower_bound` is not finite or not below 0, `safe_gate` comes
            without `lower_bound`, a size is not an integer, or a head has over 512 keys or values that
            have no equal parts of at most 512.
        TypeError: If an argument has the wrong type.
    """

    fusible = ("q_proj", "k_proj", "v_proj", "f_proj.0", "g_proj.0", "b_proj")

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx, conv_size)
        self._keep_flags(allow_neg_eigval=allow_neg_eigval, safe_gate=safe_gate)
        H, HV, K, V = self._set_heads(num_heads, num_v_heads, head_dim, expand_v)
        if lower_bound is not None:
            _check.finite("lower_bound", lower_bound)
            if lower_bound >= 0:
                raise ValueError(f"lower_bound must be below 0, as log-decays are, got {lower_bound}")
        elif safe_gate:
            raise ValueError("safe_gate must not be True without a lower_bound")
        self.lower_bound = lower_bound

        factory = factory_of(device, dtype)
        self.q_proj, self.k_proj, self.v_proj = linears(hidden_size, (H * K, H * K, HV * V), factory)
        conv = self._add_convolutions("q k v", use_short_conv, conv_size, conv_bias, factory)
        self.f_proj = low_rank(hidden_size, V, HV * K, False, factory)
        self.b_proj = nn.Linear(hidden_size, HV, bias=False, **factory)
        self.A_log = nn.Parameter(torch.empty(HV, device=device, dtype=dtype or torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(HV * K, device=device, dtype=dtype or torch.float32))
        self._add_output(low_rank(hidden_size, V, HV * V, True, factory), "sigmoid", norm_eps, conv, factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters of the layer itself."""
        init_decays_(self.A_log, self.dt_bias, low=1)
        if self.safe_gate:
            nn.init.zeros_(self.A_log)

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        q, k, v, a, gate, b = self._projections(x)
        (q, k, v), conv = self._activated(q, k, v, past, tokens)
        v, q, k = self._in_heads(v, q, k)
        a, bias = (y.unflatten(-1, (self.num_v_heads, -1)) for y in (a, self.dt_bias))
        g = log_decay(upcast(a), self.A_log, bias, self.lower_bound)  # [B, T, HV, K]
        beta = self._gate_of_keys(b)  # [B, T, HV]
        # A token whose decay and beta are 0 does not change the state.
        g, beta = (repeat_heads(tokens.masked(y), self.value_parts) for y in (g, beta))

        kda = self._op(chunk_kda, fused_recurrent_kda, x, past.recurrent, tokens)
        o, recurrent = kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        return self._output(o, gate), RecurrentState(recurrent, conv)
