"""RWKV6 (Finch), https://arxiv.org/abs/2404.05892, section 4: its time mixing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.activation import activation
from flacompose.layers.heads import heads_of, rows_in_heads
from flacompose.layers.initialization import with_initializers
from flacompose.layers.layout import Layout, rows_of, tokens_of
from flacompose.layers.lora import lora, named
from flacompose.layers.norm import GroupNorm
from flacompose.layers.recurrent import RecurrentLayer, factory_of
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.layers.token_shift import as_projected, token_shift
from flacompose.ops import chunk_rwkv6, fused_recurrent_rwkv6
from flacompose.ops._tensors.dtensor import replicated, unbind
from flacompose.ops._tensors.dtype import upcast


class RWKV6Attention(RecurrentLayer):
    r"""The time mixing of RWKV6, of $x$, with $\delta_t = x_{t-1} - x_t$, per head:

    $$\mu^{rwkvg} = \tanh\bigl((x + \delta \odot \mu^x) W_1\bigr) W_2 + b \qquad
    r = (x + \delta \odot \mu^r) W_r \quad k = (x + \delta \odot \mu^k) W_k \quad v = (x + \delta \odot \mu^v) W_v$$
    $$g = (x + \delta \odot \mu^g) W_g \qquad
    w = -\exp\bigl(\tanh((x + \delta \odot \mu^w) W_3) W_4 + b^w\bigr)$$
    $$o_t = (S_{t-1} + \operatorname{diag}(u)\, k_t v_t^\top)^\top r_t \qquad
    S_t = \operatorname{diag}(e^{w_t})\, S_{t-1} + k_t v_t^\top \qquad
    y = \bigl(\operatorname{groupnorm}(o) \odot \operatorname{gate}(g)\bigr) W_o$$

    From "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence"
    (<https://arxiv.org/abs/2404.05892>). Arguments, defaults, parameter names and initialization are as in
    flash-linear-attention 0.6, whose checkpoints load. ``bonus`` is $u$.

    Args:
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
        hidden_size: Size of the input and of the output.
        expand_k: Size of the keys of all heads: ``hidden_size * expand_k``.
        expand_v: Size of the values of all heads: ``hidden_size * expand_v``.
        num_heads: Number of heads ``H``.
        gate_fn: Activation of the output gate: "relu", "sigmoid", "logsigmoid", "silu" or "swish", "sqrelu", "gelu"
            (its tanh form).
        proj_low_rank_dim: Rank of the projection to each of the five $\mu$.
        gate_low_rank_dim: Rank of the decay's projection.
        fuse_norm: Kept as an attribute and not used, as in flash-linear-attention.
        elementwise_affine: Whether the norm has a weight and a bias; None stands for False.
        norm_eps: Added to the variance in the norm.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default.

    Raises:
        ValueError: If an argument has a wrong value, the heads do not divide the sizes, or a head has over 512 keys.
        TypeError: If an argument has the wrong type.
    """

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
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx)
        self._keep_flags(fuse_norm=fuse_norm)
        affine = _check.optional_flag("elementwise_affine", elementwise_affine)
        H, _, K, V = heads_of(hidden_size, num_heads, None, expand_k, expand_v)
        _check.count("proj_low_rank_dim", proj_low_rank_dim)
        _check.count("gate_low_rank_dim", gate_low_rank_dim)
        self.num_heads = H
        self.key_dim, self.value_dim, self.head_k_dim, self.head_v_dim = H * K, H * V, K, V
        self.proj_low_rank_dim = proj_low_rank_dim
        self.gate_low_rank_dim = gate_low_rank_dim
        self.gate_fn = activation("gate_fn", gate_fn)

        factory = factory_of(device, dtype)
        self.x_proj = nn.Sequential(
            LerpLinear(hidden_size, 5 * proj_low_rank_dim, **factory),
            nn.Tanh(),
            _linear(5 * proj_low_rank_dim, hidden_size, **factory),
        )
        self.x_bias = nn.Parameter(torch.empty(5, hidden_size, **factory))
        self.r_proj = named("linear", _linear(hidden_size, H * K, **factory))
        decay = lora(hidden_size, gate_low_rank_dim, H * K, nn.Tanh(), factory)
        self.w_proj = named("linear", decay)
        self.k_proj = named("linear", _linear(hidden_size, H * K, **factory))
        self.v_proj = named("linear", _linear(hidden_size, H * V, **factory))
        self.g_proj = named("linear", _linear(hidden_size, H * V, **factory))
        self.bonus = nn.Parameter(torch.empty(H, K, **factory))
        self.g_norm = GroupNorm(H, H * V, norm_eps, affine, **factory)
        self.o_proj = _linear(H * V, hidden_size, **factory)
        self.state_shapes = StateShapes(((H, K, V),), shift=(hidden_size,))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters of the layer itself."""
        nn.init.zeros_(self.x_bias)
        nn.init.zeros_(self.bonus)

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        x = as_projected(x)
        before, shift = token_shift(x, past.shift, tokens.lengths, tokens.cu_seqlens, tokens.num_states)
        rows, delta = rows_of(x), rows_of(before - x)
        # One axis of tokens, since Inductor cannot split tensors with more axes if the number of tokens is
        # data-dependent.
        mixed = (rows.flatten(0, -2) + delta.flatten(0, -2) * self._mix(rows, delta)).to(x.dtype)
        mixed_r, mixed_w, mixed_k, mixed_v, mixed_g = unbind(mixed.unflatten(1, rows.shape[:-1]))
        r, k, v = self.r_proj(mixed_r), self.k_proj(mixed_k), self.v_proj(mixed_v)
        # The op takes -inf, but the gradient here would be 0 * inf, NaN. A decay of -e^80 also decays to zero.
        w = -upcast(self.w_proj(mixed_w)).clamp(max=80).exp()
        gate = self.gate_fn(self.g_proj(mixed_g))
        r, w, k, v = (rows_in_heads(y, x, self.num_heads) for y in (r, w, k, v))
        gate = gate.unflatten(-1, (self.num_heads, -1))

        rwkv6 = self._wide_op(chunk_rwkv6, fused_recurrent_rwkv6, x, past.recurrent, tokens)
        o, recurrent = rwkv6(r, tokens.masked(k), v, tokens.masked(w), self.bonus, scale=1.0)
        y = self.o_proj((self.g_norm(rows_of(o)) * gate).flatten(-2))
        return tokens_of(y, x), RecurrentState(recurrent, shift=shift)

    def _mix(self, x: Tensor, delta: Tensor) -> Tensor:
        """The weights of the previous token in r, w, k, v and g, ``[5, B * T, hidden_size]``."""
        lerp, tanh, up = self.x_proj
        low = tanh(lerp(x, delta)).flatten(0, -2)  # [B * T, 5 * R], the five parts side by side
        # Each part is multiplied by its own columns of the weight of `up`. Slices of the weight would bypass adapters
        # and hooks of the module. So the module is called on five copies. In each, all parts but one are zeros.
        part = torch.arange(5, device=x.device)
        kept = part.repeat_interleave(self.proj_low_rank_dim) == part[:, None]  # [5, 5 * R]
        parts = torch.where(replicated(kept, low)[:, None], low, 0)  # [5, B * T, 5 * R]
        return up(parts) + self.x_bias[:, None]


def _linear(inputs: int, outputs: int, **factory: Any) -> nn.Linear:
    return with_initializers(
        nn.Linear(inputs, outputs, bias=False, **factory),
        weight=partial(nn.init.xavier_uniform_, gain=2**-2.5),
    )


class LerpLinear(nn.Module):
    """A projection of tokens that are mixed with the previous token by the weights `mu`."""

    def __init__(self, input_dim: int, output_dim: int, **factory: Any) -> None:
        super().__init__()
        self.linear = _linear(input_dim, output_dim, **factory)
        self.mu = nn.Parameter(torch.empty(input_dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.mu)

    def forward(self, x: Tensor, delta: Tensor) -> Tensor:
        return self.linear((x + delta * self.mu).to(x.dtype))
