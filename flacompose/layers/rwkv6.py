"""RWKV6 (Finch), https://arxiv.org/abs/2404.05892, section 4: its time mixing."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.activation import activation
from flacompose.layers.attention import AttentionLayer
from flacompose.layers.norm import GroupNorm
from flacompose.layers.state import RecurrentState
from flacompose.layers.token_shift import token_shift
from flacompose.ops import chunk_rwkv6, fused_recurrent_rwkv6
from flacompose.ops._define import autocast_dtype
from flacompose.ops._dtype import wide


class RWKV6Attention(AttentionLayer):
    r"""The time mixing of RWKV6, of $x$, with $\delta_t = x_{t-1} - x_t$, per head:

    $$\mu^{rwkvg} = \tanh\bigl((x + \delta \odot \mu^x) W_1\bigr) W_2 + b \qquad
    r = (x + \delta \odot \mu^r) W_r \quad k = (x + \delta \odot \mu^k) W_k \quad v = (x + \delta \odot \mu^v) W_v$$
    $$g = (x + \delta \odot \mu^g) W_g \qquad
    w = -\exp\bigl(\tanh((x + \delta \odot \mu^w) W_3) W_4 + b^w\bigr)$$
    $$o_t = \bigl(S_{t-1} + \operatorname{diag}(u)\, k_t v_t^\top\bigr)^\top r_t \qquad
    S_t = \operatorname{diag}(e^{w_t})\, S_{t-1} + k_t v_t^\top \qquad
    y = \bigl(\operatorname{groupnorm}(o) \odot \operatorname{gate}(g)\bigr) W_o$$

    From "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence"
    (<https://arxiv.org/abs/2404.05892>). Arguments, defaults, parameter names and first values are those of
    flash-linear-attention 0.6, whose checkpoints load. ``bonus`` is $u$.

    Args:
        mode: "chunk" or "fused_recurrent", two ways to the same numbers; calls of one token always take the second.
        hidden_size: Size of the input and of the output.
        expand_k: The keys of all heads take ``hidden_size * expand_k``.
        expand_v: The values of all heads take ``hidden_size * expand_v``.
        num_heads: Number of heads ``H``.
        gate_fn: Activation of the output gate: "relu", "sigmoid", "logsigmoid", "silu" or "swish", "sqrelu", "gelu"
            (its tanh form).
        proj_low_rank_dim: Rank of the projection to each of the five $\mu$.
        gate_low_rank_dim: Rank of the decay's projection.
        fuse_norm: Kept as an attribute and not used, as in the peer.
        elementwise_affine: Whether the norm has a weight and a bias.
        norm_eps: Added to the variance in the norm.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.

    Raises:
        ValueError: If an argument is none of these, the heads do not divide the sizes, or one takes over 256 keys or
            values.
        TypeError: If an argument has the wrong type.
    """

    chunk_modes = ()

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        gate_fn: str = "swish",
        proj_low_rank_dim: int = 32,
        gate_low_rank_dim: int = 64,
        fuse_norm: bool = True,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, expand_k, expand_v, num_heads, None, norm_eps, layer_idx)
        _check.count("proj_low_rank_dim", proj_low_rank_dim)
        _check.count("gate_low_rank_dim", gate_low_rank_dim)
        self.proj_low_rank_dim = proj_low_rank_dim
        self.gate_low_rank_dim = gate_low_rank_dim
        self.fuse_norm = fuse_norm
        self.gate_fn = activation("gate_fn", gate_fn)

        self.x_proj = nn.Sequential(
            _LerpLinear(hidden_size, 5 * proj_low_rank_dim),
            nn.Tanh(),
            _Linear(5 * proj_low_rank_dim, hidden_size, bias=False),
        )
        self.x_bias = nn.Parameter(torch.empty(5, hidden_size))
        self.r_proj = _DDLerpLinear(_Linear(hidden_size, self.key_dim, bias=False))
        self.w_proj = _DDLerpLinear(_LoRA(hidden_size, self.key_dim, gate_low_rank_dim))
        k, v, g = (
            _DDLerpLinear(_Linear(hidden_size, dim, bias=False))
            for dim in (self.key_dim, self.value_dim, self.value_dim)
        )
        self.k_proj, self.v_proj, self.g_proj = k, v, g  # type: ignore[assignment]
        self.bonus = nn.Parameter(torch.empty(num_heads, self.head_k_dim))
        self.g_norm = GroupNorm(num_heads, self.value_dim, elementwise_affine, norm_eps)  # type: ignore[assignment]
        self.o_proj = _Linear(self.value_dim, hidden_size, bias=False)
        self.state_shapes = self.state_shapes._replace(shift=hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The first values of what belongs to no part of the layer."""
        nn.init.zeros_(self.x_bias)
        nn.init.zeros_(self.bonus)

    @property
    def _weight(self) -> Tensor:
        return self.o_proj.weight

    def forward(
        self,
        hidden_states: Tensor,
        state: RecurrentState | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, RecurrentState]:
        """Go through ``T`` tokens from `state`; the first of a sequence has the last of the call before beside it.

        Arguments, results and errors are those of
        [GatedLinearAttention][flacompose.layers.GatedLinearAttention.forward].
        """
        tokens, x = self._enter(hidden_states, state, attention_mask, cu_seqlens)
        dtype = autocast_dtype(x.device)
        if dtype is not None and x.dtype != torch.float64:
            x = x.to(dtype)
        shifted, shift = token_shift(x, () if state is None else state.shift, tokens.lengths, cu_seqlens)
        delta = shifted - x
        mu_r, mu_w, mu_k, mu_v, mu_g = self._mix(x, delta)
        r, k, v = self.r_proj(x, delta, mu_r), self.k_proj(x, delta, mu_k), self.v_proj(x, delta, mu_v)
        # The op takes -inf, but its gradient times that is NaN. e^80 forgets all too, and sums of it are finite.
        w = -wide(self.w_proj(x, delta, mu_w)).clamp(max=80).exp()
        gate = self.gate_fn(self.g_proj(x, delta, mu_g))
        r, w, k, v, gate = (y.unflatten(-1, (self.num_heads, -1)) for y in (r, w, k, v, gate))

        rwkv6 = fused_recurrent_rwkv6 if self._recurrent(x) else chunk_rwkv6
        o, recurrent = rwkv6(
            r, tokens.silence(k), v, tokens.silence(w), self.bonus,
            scale=1.0,
            initial_state=None if state is None else state.recurrent,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        assert recurrent is not None  # asked for
        return self._leave(self.g_norm(o) * gate, tokens), RecurrentState(recurrent, shift=shift)

    def _mix(self, x: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        """How much of the token before goes into each of r, w, k, v and g, five of ``[B, T, hidden_size]``."""
        lerp = self.x_proj[0]
        low = (
            lerp(x, delta, lerp.mu).tanh().unflatten(-1, (5, -1)).flatten(0, 1).transpose(0, 1)
        )  # [5, B * T, R]
        up: Tensor = self.x_proj[2].weight  # type: ignore[assignment]
        up = up.unflatten(-1, (5, -1)).permute(1, 2, 0)  # [5, R, hidden_size]
        return ((low @ up).unflatten(1, x.shape[:2]) + self.x_bias[:, None, None]).unbind(0)


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight, gain=2**-2.5)


class _DDLerpLinear(nn.Module):
    """A projection of tokens mixed with those before them, each by a `mu` of its own."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor, delta: Tensor, mu: Tensor) -> Tensor:
        return self.linear(x + delta * mu)


class _LerpLinear(_DDLerpLinear):
    """Likewise, all by one `mu`."""

    def __init__(self, input_dim: int, output_dim: int) -> None:
        super().__init__(_Linear(input_dim, output_dim, bias=False))
        self.mu = nn.Parameter(torch.empty(input_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.mu)


class _LoRA(nn.Module):
    """``tanh(x W_1) W_2 + b``, at first 0."""

    def __init__(self, input_dim: int, output_dim: int, low_rank_dim: int) -> None:
        super().__init__()
        self.lora = nn.Sequential(
            _Down(input_dim, low_rank_dim, bias=False), nn.Tanh(), _Up(low_rank_dim, output_dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.lora(x)


class _Down(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class _Up(nn.Linear):
    @torch.no_grad()
    def reset_parameters(self) -> None:
        D, R = self.weight.shape
        # In float32: there is no QR decomposition in half precision.
        start = torch.empty_like(self.weight, dtype=torch.float32)
        self.weight.copy_(nn.init.orthogonal_(start, gain=0.1 * math.sqrt(max(R / D, 1))))
        nn.init.zeros_(self.bias)
