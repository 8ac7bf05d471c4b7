"""Mamba-3, https://arxiv.org/abs/2603.15569."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flacompose._errors import ValueError
from flacompose.layers import _check
from flacompose.layers.heads import in_heads
from flacompose.layers.initialization import init_time_steps_
from flacompose.layers.layout import Layout
from flacompose.layers.norm import HeadwiseRMSNorm, RMSNorm
from flacompose.layers.number import number
from flacompose.layers.recurrent import RecurrentLayer, factory_of
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops._composed.mamba3 import Scanned, States, scan
from flacompose.ops._recurrences.fused.gated_skip.op import gated_skip
from flacompose.ops._tensors.dtensor import flatten, split, unflatten
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops._tensors.gate_formulas import time_step
from flacompose.ops.mamba3 import mixed


class Mamba3(RecurrentLayer):
    r"""A layer of Mamba-3, of $u$, per head:

    $$z, x, \tilde{B}, \tilde{C}, \tilde{dt}, \tilde{A}, \lambda, \omega = u W_{in} \qquad
    B, C = \operatorname{rmsnorm}(\tilde{B}), \operatorname{rmsnorm}(\tilde{C}) \qquad
    \Delta = \operatorname{softplus}(\tilde{dt} + dt\_bias) \qquad
    A = \min(-\operatorname{act}(\tilde{A}), -A\_floor)$$
    $$y = \operatorname{mamba3}(C, B, x, \Delta A, \Delta, \lambda, \omega; D, z)\, W_{out}$$

    with [mamba3_siso_combined][flacompose.ops.mamba3_siso_combined] or, if `is_mimo`,
    [mamba3_mimo_combined][flacompose.ops.mamba3_mimo_combined], from "Mamba-3: Improved Sequence Modeling using State
    Space Principles" (<https://arxiv.org/abs/2603.15569>). There is no convolution. Parameter names are as in
    flash-linear-attention 0.6 and of mamba-ssm, whose checkpoints load. Arguments and defaults are as in
    flash-linear-attention, plus `A_activation`. The recurrent state is the tuple of the angles
    ``[N, H, S * rope_fraction / 2]``, the state ``[N, H, S, P]``, the last keys ``[N, R, H, S]`` and the last values
    ``[N, H, P]``.

    Args:
        hidden_size: Size of the input and of the output.
        state_size: Keys of a head, ``S``, an even number.
        expand: Size of the values of all heads: ``hidden_size * expand``.
        head_dim: Values of a head, ``P``. There are ``H = expand * hidden_size / head_dim`` heads.
        n_groups: Number of groups ``G`` of $B$ and $C$, each for ``H / G`` neighbouring heads.
        rope_fraction: Fraction of a key that is rotated, 0.5 or 1.
        dt_min: Least initial time step ``softplus(dt_bias)``.
        dt_max: Greatest initial time step.
        dt_init_floor: Lower bound of the initial time steps.
        A_floor: Least rate of decay.
        is_outproj_norm: Whether the outputs of each head are normed before they are gated.
        is_mimo: Whether each token has several keys and queries.
        mimo_rank: Number ``R`` of keys and queries of a token. Without `is_mimo` it is not used, and ``R`` is 1.
        chunk_size: Kept as an attribute and not used: it changes no result.
        use_bias: Whether the projections have biases.
        norm_eps: Added to the mean square in the norms.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        A_activation: "softplus", or "heavy_tail" as in mamba-ssm: ``1 + x`` above 0 and ``1 / (1 - x)`` below.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default.

    Raises:
        ValueError: If a size does not divide another as required, a bound is wrong, or `state_size` or `head_dim` is
            above 512.
        TypeError: If an argument has the wrong type.
    """

    mimo_x: nn.Parameter | None
    mimo_z: nn.Parameter | None
    mimo_o: nn.Parameter | None
    A_floor = number("A_floor")

    def __init__(
        self,
        hidden_size: int = 2048,
        state_size: int = 128,
        expand: float = 2,
        head_dim: int = 64,
        n_groups: int = 1,
        rope_fraction: float = 0.5,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        A_floor: float = 1e-4,
        is_outproj_norm: bool = False,
        is_mimo: bool = False,
        mimo_rank: int = 4,
        chunk_size: int = 64,
        use_bias: bool = False,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        *,
        A_activation: str = "softplus",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__("chunk", hidden_size, norm_eps, layer_idx)
        _check.flags(is_outproj_norm=is_outproj_norm, is_mimo=is_mimo, use_bias=use_bias)
        _check.head_size("state_size", state_size)
        if state_size % 2 != 0:
            raise ValueError(f"state_size must be even, got {state_size}")
        _check.head_size("head_dim", head_dim)
        _check.number("expand", expand)
        inner = _check.positive_int("expand * hidden_size", expand * hidden_size, "head_dim", head_dim)
        H = inner // head_dim
        _check.integer("n_groups", n_groups)
        if n_groups < 1 or H % n_groups != 0:
            raise ValueError(f"n_groups must divide the {H} heads, got {n_groups}")
        _check.number("rope_fraction", rope_fraction)
        if rope_fraction not in (0.5, 1):
            raise ValueError(f"rope_fraction must be 0.5 or 1, got {rope_fraction}")
        angles = int(state_size * rope_fraction) // 2
        if angles == 0:
            raise ValueError(f"state_size must be at least 4 where rope_fraction is 0.5, got {state_size}")
        _check.initial_time_steps(dt_min, dt_max, dt_init_floor)
        _check.finite("A_floor", A_floor)
        if A_floor <= 0:
            raise ValueError(f"A_floor must be above 0, got {A_floor}")
        _check.count("mimo_rank", mimo_rank)
        _check.count("chunk_size", chunk_size)
        _check.one_of("A_activation", A_activation, ("softplus", "heavy_tail"))

        R = mimo_rank if is_mimo else 1
        self.intermediate_size = inner
        self.num_heads = H
        self.head_dim = head_dim
        self.state_size = state_size
        self.n_groups = n_groups
        self.is_mimo = is_mimo
        self.mimo_rank = R
        self.dt_min = dt_min
        self.dt_max = dt_max
        self.dt_init_floor = dt_init_floor
        self.A_floor = A_floor
        self.A_activation = A_activation
        self.chunk_size = chunk_size

        factory = factory_of(device, dtype)
        BC = R * n_groups * state_size
        self.sizes = [inner, inner, BC, BC, H, H, H, angles]
        self.in_proj = nn.Linear(hidden_size, sum(self.sizes), bias=use_bias, **factory)
        self.dt_bias = nn.Parameter(torch.empty(H, **factory))
        self.B_bias = nn.Parameter(torch.empty(H, R, state_size, **factory))
        self.C_bias = nn.Parameter(torch.empty(H, R, state_size, **factory))
        self.B_norm = RMSNorm(state_size, eps=norm_eps, **factory)
        self.C_norm = RMSNorm(state_size, eps=norm_eps, **factory)
        for name in ("mimo_x", "mimo_z", "mimo_o"):
            weight = nn.Parameter(torch.empty(H, R, head_dim, **factory)) if is_mimo else None
            self.register_parameter(name, weight)
        self.D = nn.Parameter(torch.empty(H, **factory))
        self.norm = HeadwiseRMSNorm(inner, eps=norm_eps, **factory) if is_outproj_norm else None
        self.out_proj = nn.Linear(inner, hidden_size, bias=use_bias, **factory)
        self.state_shapes = StateShapes(
            ((H, angles), (H, state_size, head_dim), (R, H, state_size), (H, head_dim))
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the parameters of the layer itself."""
        init_time_steps_(self.dt_bias, self.dt_min, self.dt_max, self.dt_init_floor)
        for ones in (self.B_bias, self.C_bias, self.D):
            nn.init.ones_(ones)
        for weight, count in ((self.mimo_x, self.mimo_rank), (self.mimo_z, 1), (self.mimo_o, self.mimo_rank)):
            if weight is not None:
                nn.init.constant_(weight, 1 / count)

    def _compute(self, u: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        H, P, G, R = self.num_heads, self.head_dim, self.n_groups, self.mimo_rank
        z, x, B, C, dt, A, trap, angles = split(self.in_proj(u), self.sizes, -1)
        x, z = unflatten(x, -1, (H, P)), unflatten(z, -1, (H, P))
        B, C = (in_heads(in_heads(y, R), G) for y in (B, C))  # [B, T, R, G, S]
        dt = time_step(dt, self.dt_bias, softplus=True, x=x)
        # A token whose decay and time step are 0 changes neither the state nor the angle.
        dt = tokens.masked(dt)
        inputs = Scanned(
            self.C_norm(C), self.B_norm(B), x, self._rates(upcast(A, x)) * dt, dt, trap, self.C_bias, self.B_bias,
            angles.unsqueeze(2), self.D, self.mimo_x, None if self.is_mimo or self.norm is not None else z,
        )  # fmt: skip
        given = past.recurrent or (None,) * 4
        y, new = scan(
            inputs, States(*given), tokens.cu_seqlens, self.is_mimo, tokens.num_states, tokens.lengths
        )
        recurrent = new.angle, new.state, upcast(new.k), upcast(new.v)
        if self.norm is not None:
            y = self.norm(y)
        if self.is_mimo:
            y = mixed(y, z, self.mimo_z, self.mimo_o)
        else:
            y = y.squeeze(2) if self.norm is None else gated_skip(y.squeeze(2), x, z=z)
        y = self.out_proj(flatten(y, 2, 3).to(x.dtype))
        return y, RecurrentState(recurrent)

    def _rates(self, A: Tensor) -> Tensor:
        if self.A_activation == "softplus":
            rates = F.softplus(A)
        else:
            rates = torch.where(A > 0, 1 + A, 1 / (1 - A.masked_fill(A > 0, 0)))
        return -rates.clamp(min=self.A_floor)
