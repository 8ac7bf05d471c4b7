"""Mamba-2, https://arxiv.org/abs/2405.21060, section 7."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flacompose._errors import ValueError
from flacompose._peer import explained
from flacompose.layers import _check
from flacompose.layers.activation import activation
from flacompose.layers.heads import in_heads, sharded_like_values
from flacompose.layers.initialization import init_time_steps_
from flacompose.layers.layout import Layout, rows_of, tokens_of
from flacompose.layers.norm import RMSNorm, rms_norm
from flacompose.layers.recurrent import RecurrentLayer, factory_of
from flacompose.layers.short_conv import ShortConvolution
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops._tensors.dtensor import flatten, split
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops._tensors.gate_formulas import time_step
from flacompose.ops.ssd import check_dt_limit, chunk_ssd, recurrent_ssd


class Mamba2(RecurrentLayer):
    r"""A layer of Mamba-2, of $u$, per head:

    $$z, \tilde{x}, \tilde{B}, \tilde{C}, \tilde{dt} = u W_{in} \qquad
    x, B, C = \operatorname{act}(\operatorname{conv}(\tilde{x}, \tilde{B}, \tilde{C})) \qquad
    \Delta = \operatorname{clamp}(\operatorname{softplus}(\tilde{dt} + dt\_bias))$$
    $$S_t = e^{-\Delta_t e^{A\_log}}\, S_{t-1} + \Delta_t\, B_t x_t^\top \qquad o_t = S_t^\top C_t + D\, x_t \qquad
    y = \operatorname{rmsnorm}(o \odot \operatorname{silu}(z))\, W_{out}$$

    From "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality"
    (<https://arxiv.org/abs/2405.21060>). Parameter names are as in flash-linear-attention 0.6 and of mamba-ssm,
    whose checkpoints load. Arguments and defaults are as in flash-linear-attention, without `backend`. The
    recurrent state is ``[N, H, S, P]``, like all states of this library; mamba-ssm transposes it.

    Args:
        num_heads: Number of heads ``H``. Default: ``expand * hidden_size / head_dim``, which it must equal.
        head_dim: Values of a head, ``P``.
        hidden_size: Size of the input and of the output.
        state_size: Keys of a head, ``S``.
        expand: Size of the values of all heads: ``hidden_size * expand``.
        n_groups: Number of groups ``G`` of $B$ and $C$, each for ``H / G`` neighbouring heads, and of the norm.
        conv_kernel: Width ``W`` of the convolution.
        conv_init: The weights of the convolution are initialized uniformly in ``[-conv_init, conv_init]``. Default: as
            in `torch.nn.Conv1d`.
        use_conv_bias: Whether the convolution has a bias.
        hidden_act: Activation after the convolution: "relu", "sigmoid", "logsigmoid", "silu" or "swish", "sqrelu",
            "gelu" (its tanh form).
        A_init_range: Bounds of the initial decay rates ``exp(A_log)``.
        D_has_hdim: Whether D is one number per value, ``[H * P]``, or one per head, ``[H]``.
        rmsnorm: Whether the output is normed.
        norm_before_gate: Whether the norm precedes the gate.
        dt_min: Least initial time step ``softplus(dt_bias)``.
        dt_max: Greatest initial time step.
        dt_init_floor: Lower bound of the initial time steps.
        dt_limit: Bounds that time steps are clamped to.
        use_bias: Whether the projections have biases.
        norm_eps: Added to the mean square in the norm.
        chunk_size: Kept as an attribute and not used: it changes no result.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default; float32 for `A_log`.

    Raises:
        ValueError: If a size does not divide another as required, a bound is wrong, or `state_size` is above 512.
        TypeError: If an argument has the wrong type.
    """

    convolutions = ("conv1d",)

    @explained
    def __init__(
        self,
        num_heads: int | None = None,
        head_dim: int = 64,
        hidden_size: int = 2048,
        state_size: int = 128,
        expand: float = 2,
        n_groups: int = 1,
        conv_kernel: int = 4,
        conv_init: float | None = None,
        use_conv_bias: bool = True,
        hidden_act: str = "silu",
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        use_bias: bool = False,
        norm_eps: float = 1e-5,
        chunk_size: int = 256,
        layer_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__("chunk", hidden_size, norm_eps, layer_idx)
        self._keep_flags(D_has_hdim=D_has_hdim, norm_before_gate=norm_before_gate)
        _check.flags(rmsnorm=rmsnorm)
        _check.flags(use_conv_bias=use_conv_bias, use_bias=use_bias)
        _check.count("head_dim", head_dim)
        _check.head_size("state_size", state_size)
        _check.number("expand", expand)
        inner = _check.positive_int("expand * hidden_size", expand * hidden_size, "head_dim", head_dim)
        H = inner // head_dim
        if num_heads is not None:
            _check.integer("num_heads", num_heads)
        if num_heads not in (None, H):
            raise ValueError(f"num_heads must be expand * hidden_size / head_dim = {H}, got {num_heads}")
        _check.integer("n_groups", n_groups)
        if n_groups < 1 or H % n_groups != 0:
            raise ValueError(f"n_groups must divide the {H} heads, got {n_groups}")
        _check.count("conv_kernel", conv_kernel)
        if conv_init is not None:
            _check.not_negative("conv_init", conv_init)
        _check.ascending("A_init_range", A_init_range)
        _check.initial_time_steps(dt_min, dt_max, dt_init_floor)
        check_dt_limit(dt_limit)
        _check.count("chunk_size", chunk_size)

        self.intermediate_size = inner
        self.num_heads = H
        self.head_dim = head_dim
        self.state_size = state_size
        self.n_groups = n_groups
        self.A_init_range = A_init_range
        self.dt_min = dt_min
        self.dt_max = dt_max
        self.dt_init_floor = dt_init_floor
        self.dt_limit = dt_limit
        self.chunk_size = chunk_size
        act = activation("hidden_act", hidden_act)
        self.act = None if act is F.silu else act  # the convolution applies silu

        factory = factory_of(device, dtype)
        conv_dim = inner + 2 * n_groups * state_size
        self.conv1d = _Convolution(
            conv_dim, conv_kernel, use_conv_bias, "silu" if act is F.silu else None, conv_init, **factory
        )
        self.in_proj = nn.Linear(hidden_size, inner + conv_dim + H, bias=use_bias, **factory)
        self.dt_bias = nn.Parameter(torch.empty(H, **factory))
        self.A_log = nn.Parameter(torch.empty(H, device=device, dtype=dtype or torch.float32))
        self.norm = _GroupedRMSNorm(inner, n_groups, norm_eps, **factory) if rmsnorm else None
        self.D = nn.Parameter(torch.empty(inner if D_has_hdim else H, **factory))
        self.out_proj = nn.Linear(inner, hidden_size, bias=use_bias, **factory)
        self.state_shapes = StateShapes(((H, state_size, head_dim),), ((conv_dim, conv_kernel),))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the parameters of the layer itself."""
        init_time_steps_(self.dt_bias, self.dt_min, self.dt_max, self.dt_init_floor)
        self.A_log.uniform_(*self.A_init_range).log_()
        nn.init.ones_(self.D)

    def _compute(self, u: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        H, P, G, S = self.num_heads, self.head_dim, self.n_groups, self.state_size
        z, xBC, dt = split(tokens_of(self.in_proj(rows_of(u)), u), [H * P, H * P + 2 * G * S, H], -1)
        # Split by the convolution, so that on a GPU each part is contiguous and the scan needs no copy.
        (parts,), conv = self._convolved((xBC,), past, tokens, sizes=(H * P, G * S, G * S))
        x, B, C = parts if self.act is None else map(self.act, parts)
        x, B, C = x.unflatten(-1, (H, P)), in_heads(B, G), in_heads(C, G)
        # A token whose time step is 0 does not change the state.
        dt = tokens.masked(time_step(dt, self.dt_bias, True, x, self.dt_limit))  # [B, T, H]
        A = rates(self.A_log, dt)
        B, C = sharded_like_values(B, dt, H), sharded_like_values(C, dt, H)
        gated_after = self.norm is not None and self.norm_before_gate
        # The op returns the gated output in the dtype of x, which a large gate can take out of the range of float16. A
        # norm would bring it back. So before a norm, float16 is gated here, in float32.
        gated_here = self.norm is not None and not gated_after and x.dtype == torch.float16
        gate = None if gated_after or gated_here else in_heads(z, H)

        ssd = self._op(chunk_ssd, recurrent_ssd, u, past.recurrent, tokens)
        o, recurrent = ssd(C, B, x, dt, A, self.D.reshape(H, -1), gate)
        o = o.flatten(-2)
        if gated_here:
            o = upcast(o) * F.silu(upcast(z))
        if self.norm is not None:
            o = self.norm(rows_of(o), rows_of(z) if gated_after else None).to(x.dtype)
        return tokens_of(self.out_proj(rows_of(o)), u), RecurrentState(recurrent, conv)


def rates(A_log: Tensor, *others: Tensor) -> Tensor:
    """The rates of decay ``-exp(A_log)``, in float32 (float64 if one of the tensors is).

    `A_log` is clamped, since an infinite rate would have neither a gradient nor a decay.
    """
    return -upcast(A_log, *others).clamp(max=80.0).exp()


class _Convolution(ShortConvolution):
    """A convolution whose weights are initialized uniformly between ``-init`` and ``init``."""

    def __init__(
        self, channels: int, width: int, bias: bool, act: str | None, init: float | None, **factory: Any
    ) -> None:
        self.init = init
        super().__init__(channels, width, bias, act, **factory)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.init is not None:
            nn.init.uniform_(self.weight, -self.init, self.init)


class _GroupedRMSNorm(RMSNorm):
    """A norm of each of `groups` parts of the last axis, then the gate ``silu(g)``, if `g` is given."""

    def __init__(self, size: int, groups: int, eps: float, **factory: Any) -> None:
        super().__init__(size, eps=eps, **factory)
        self.groups = groups

    def forward(self, x: Tensor, g: Tensor | None = None) -> Tensor:
        """The result is float32 (float64 for float64)."""
        x = upcast(x)
        if self.groups == 1:
            x = rms_norm(x, self.eps)
        else:
            x = flatten(rms_norm(in_heads(x, self.groups), self.eps), -2, -1)
        x = x * self.weight
        return x if g is None else x * F.silu(upcast(g))

    def extra_repr(self) -> str:
        return f"groups={self.groups}, eps={self.eps}"
