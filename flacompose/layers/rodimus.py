"""Rodimus, https://arxiv.org/abs/2410.06577."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.initialization import inverse_softplus, with_initializers
from flacompose.layers.layout import Layout
from flacompose.layers.norm import RMSNorm
from flacompose.layers.number import number
from flacompose.layers.recurrent import RecurrentLayer, factory_of, linears, low_rank
from flacompose.layers.short_conv import ShortConvolution
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops import chunk_gla, fused_recurrent_gla
from flacompose.ops._tensors.dtype import upcast


class RodimusAttention(RecurrentLayer):
    r"""A layer of gated linear attention with a temperature that sets how much a token replaces, of $x$, in one head:

    $$u = x W_u \quad s = \operatorname{silu}(\operatorname{conv}(u)) \quad q = s W_q \quad
    v = \operatorname{sigmoid}(u W_1 W_2 + b) \odot u$$
    $$f = \operatorname{softplus}(s W_f + b_f) \quad \tau = \operatorname{sigmoid}(s W_\tau + b_\tau) \quad
    k = \frac{s W_k}{\lVert s W_k \rVert} \odot f^\tau$$
    $$S_t = \operatorname{diag}(e^{-f_t \odot \tau_t})\, S_{t-1} + k_t v_t^\top \qquad
    o_t = K^{-1/2}\, S_t^\top q_t \qquad
    y = \operatorname{rmsnorm}\bigl((o + w \odot s) \odot \operatorname{silu}(x W_g)\bigr) W_o$$

    From "Rodimus*: Breaking the Accuracy-Efficiency Trade-Off with Efficient Attentions"
    (<https://arxiv.org/abs/2410.06577>). The ``V`` channels of $u$ are ``2 * hidden_size``, rounded up to a multiple of
    8. Arguments, defaults and parameter names are as in flash-linear-attention 0.6, whose checkpoints load. Its
    initialization is the one of the models there.

    Args:
        block_type: "rodimus" or "rodimus_plus", the block of flash-linear-attention. This layer is the same in both:
            the second adds sliding-window attention, which is a layer of its own.
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
        hidden_size: Size of the input and of the output.
        input_gate_low_rank: Rank of $W_1 W_2$; "auto" for ``max(hidden_size // 64, 16)``.
        expand_ratio: Keys of the head, ``K``.
        use_short_conv: Whether $u$ passes a `ShortConvolution`. Otherwise $s$ is $u$.
        conv_size: Width ``W`` of the convolutions.
        conv_bias: Whether the convolutions have a bias.
        norm_eps: Added to the mean square in the norm.
        k_norm_eps: The least norm that $s W_k$ is divided by, above 0. Default: 1e-12.
        residual_in_fp32: Whether $w$ is a float32 parameter unless `dtype` is given. The sum is always computed in
            float32 (float64 for float64).
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default, except for $w$.

    Raises:
        ValueError: If an argument has a wrong value, or `expand_ratio` is above 512.
        TypeError: If an argument has the wrong type.
    """

    fusible = ("up_proj", "gate_proj")
    num_heads = 1
    k_norm_eps = number("k_norm_eps")

    def __init__(
        self,
        block_type: str = "rodimus",
        mode: str = "chunk",
        hidden_size: int = 1024,
        input_gate_low_rank: int | str = "auto",
        expand_ratio: int = 64,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = True,
        norm_eps: float = 1e-5,
        k_norm_eps: float | None = None,
        residual_in_fp32: bool = True,
        layer_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx, conv_size)
        _check.one_of("block_type", block_type, ("rodimus", "rodimus_plus"))
        _check.flags(conv_bias=conv_bias, residual_in_fp32=residual_in_fp32)
        self._keep_flags(use_short_conv=use_short_conv)
        rank: Any = max(hidden_size // 64, 16) if input_gate_low_rank == "auto" else input_gate_low_rank
        _check.count("input_gate_low_rank", rank)
        _check.head_size("expand_ratio", expand_ratio)
        self.k_norm_eps = 1e-12 if k_norm_eps is None else k_norm_eps
        _check.positive("k_norm_eps", self.k_norm_eps)
        self.block_type = block_type
        self.d_inner = V = -(-2 * hidden_size // 8) * 8
        self.mem_size = K = expand_ratio

        factory = factory_of(device, dtype)
        self.gate_proj, self.up_proj = linears(hidden_size, (V, V), factory)
        self.activation_norm = RMSNorm(V, True, norm_eps, **factory)
        self.down_proj = nn.Linear(V, hidden_size, bias=False, **factory)
        if use_short_conv:
            self.short_conv = ShortConvolution(V, conv_size, conv_bias, **factory)
            self.convolutions = ("short_conv",)
        own = dtype or (torch.float32 if residual_in_fp32 else None)
        self.residual_weight = nn.Parameter(torch.empty(V, device=device, dtype=own))
        self.k_proj, self.q_proj = linears(V, (K, K), factory)
        small = partial(nn.init.xavier_uniform_, gain=2**-2.5)
        self.g_gate_proj, self.tau_gate_proj = (
            with_initializers(nn.Linear(V, K, **factory), weight=small, bias=bias)
            for bias in (_first_gates_, _first_temperatures_)
        )
        self.i_gate_proj = low_rank(V, rank, V, True, factory)
        for m in self.i_gate_proj:
            with_initializers(m, weight=small, bias=nn.init.zeros_)
        self.i_gate_proj.append(nn.Sigmoid())
        self.state_shapes = StateShapes(((1, K, V),), ((V, conv_size),) * use_short_conv)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters of the layer itself."""
        nn.init.ones_(self.residual_weight)

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        u, gate = self._projections(x)
        (s,), conv = self._convolved((u,), past, tokens)
        q, v = self.q_proj(s), self.i_gate_proj(u) * u
        f, tau = upcast(self.g_gate_proj(s)), upcast(self.tau_gate_proj(s)).sigmoid()
        k = F.normalize(upcast(self.k_proj(s)), dim=-1, eps=self.k_norm_eps) * (tau * _log_softplus(f)).exp()
        g = -tau * F.softplus(f, threshold=40)
        # A token whose decay and key are 0 does not change the state.
        k, g = tokens.masked(k.to(q.dtype)), tokens.masked(g)

        gla = self._wide_op(chunk_gla, fused_recurrent_gla, x, past.recurrent, tokens)
        o, recurrent = gla(*(y.unsqueeze(2) for y in (q, k, v, g)))
        y = (upcast(o.squeeze(2)) + upcast(s) * self.residual_weight) * F.silu(upcast(gate))
        return self.down_proj(self.activation_norm(y).to(o.dtype)), RecurrentState(recurrent, conv)


def _log_softplus(x: Tensor) -> Tensor:
    """``log(softplus(x))``, with a finite derivative where the softplus underflows."""
    # Below -20 the next term of the series, 5 / 24 * exp(2 * x), is below the rounding error of float64.
    low, high = x.masked_fill(x >= -20, -20), x.masked_fill(x < -20, -20)
    return torch.where(x < -20, low - low.exp() / 2, F.softplus(high, threshold=40).log())


@torch.no_grad()
def _first_gates_(bias: Tensor) -> None:
    """Gates ``f`` from 0.001 to 0.1, whose logarithms are uniform."""
    log_gate = torch.empty_like(bias, dtype=torch.float32).uniform_(math.log(0.001), math.log(0.1))
    bias.copy_(inverse_softplus(log_gate.exp()))


@torch.no_grad()
def _first_temperatures_(bias: Tensor) -> None:
    """Temperatures uniform from 1/16 to 0.9."""
    bias.copy_(torch.empty_like(bias, dtype=torch.float32).uniform_(1 / 16, 0.9).logit())
