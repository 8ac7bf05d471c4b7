"""Mamba, https://arxiv.org/abs/2312.00752, section 3.4."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flacompose._peer import explained
from flacompose.layers import _check
from flacompose.layers.activation import activation
from flacompose.layers.initialization import copy_, init_time_steps_, with_initializers
from flacompose.layers.layout import Layout
from flacompose.layers.mamba2 import rates
from flacompose.layers.recurrent import RecurrentLayer, factory_of
from flacompose.layers.short_conv import ShortConvolution
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops import selective_scan_fn
from flacompose.ops._arguments.require import is_one_of
from flacompose.ops._tensors.dtensor import split
from flacompose.ops._tensors.dtype import upcast


class Mamba(RecurrentLayer):
    r"""A layer of Mamba, of $u$:

    $$\tilde{x}, z = u W_{in} \qquad x = \operatorname{act}(\operatorname{conv}(\tilde{x})) \qquad
    \tilde{\Delta}, B, C = x W_x \qquad \Delta = \operatorname{softplus}(\tilde{\Delta} W_{dt} + b_{dt})$$
    $$h_t = e^{-\Delta_t e^{A\_log}} \odot h_{t-1} + (\Delta_t \odot x_t)\, B_t^\top \qquad
    y = \bigl((h C + D \odot x) \odot \operatorname{silu}(z)\bigr)\, W_{out}$$

    From "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (<https://arxiv.org/abs/2312.00752>).
    Parameter names are as in flash-linear-attention 0.6, mamba-ssm and transformers, whose checkpoints load;
    arguments and defaults are as in flash-linear-attention, without `backend`. The recurrent state is ``[N, D, S]``.

    Args:
        hidden_size: Size of the input and of the output.
        state_size: Numbers ``S`` in the state of a channel.
        conv_kernel: Width ``W`` of the convolution.
        use_conv_bias: Whether the convolution has a bias.
        intermediate_size: Channels ``D`` of the recurrence.
        dt_rank: Size of $\tilde{\Delta}$. "auto" stands for ``hidden_size / 16``, rounded up.
        dt_min: Least initial time step ``softplus(b_dt)``.
        dt_max: Greatest initial time step.
        dt_init: Initialization of $W_{dt}$: "random", uniform between plus and minus ``dt_scale / sqrt(dt_rank)``, or
            "constant", that number.
        dt_scale: Factor of the initial $W_{dt}$.
        dt_init_floor: Lower bound of the initial time steps.
        use_bias: Whether the projections in and out have biases.
        hidden_act: Activation after the convolution: "relu", "sigmoid", "logsigmoid", "silu" or "swish", "sqrelu",
            "gelu" (its tanh form).
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default; float32 for `A_log`.

    Raises:
        ValueError: If an argument has a wrong value, or `state_size` is above 512.
        TypeError: If an argument has the wrong type.
    """

    convolutions = ("conv1d",)

    @explained
    def __init__(
        self,
        hidden_size: int = 2048,
        state_size: int = 16,
        conv_kernel: int = 4,
        use_conv_bias: bool = True,
        intermediate_size: int = 2048,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        use_bias: bool = False,
        hidden_act: str = "silu",
        layer_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__("chunk", hidden_size, 0.0, layer_idx)
        _check.head_size("state_size", state_size)
        _check.count("conv_kernel", conv_kernel)
        _check.count("intermediate_size", intermediate_size)
        _check.flags(use_conv_bias=use_conv_bias, use_bias=use_bias)
        rank: Any = math.ceil(hidden_size / 16) if is_one_of(dt_rank, "auto") else dt_rank
        _check.count("dt_rank", rank)
        _check.initial_time_steps(dt_min, dt_max, dt_init_floor)
        _check.one_of("dt_init", dt_init, ("random", "constant"))
        _check.finite("dt_scale", dt_scale)

        D, R, S = intermediate_size, rank, state_size
        self.intermediate_size = D
        self.state_size = S
        self.dt_rank = R
        self.act = activation("hidden_act", hidden_act)

        factory = factory_of(device, dtype)
        self.conv1d = ShortConvolution(D, conv_kernel, use_conv_bias, activation=None, **factory)
        self.in_proj = nn.Linear(hidden_size, 2 * D, bias=use_bias, **factory)
        self.x_proj = nn.Linear(D, R + 2 * S, bias=False, **factory)
        scale = abs(dt_scale) * R**-0.5
        self.dt_proj = with_initializers(
            nn.Linear(R, D, **factory),
            weight=partial(nn.init.uniform_, a=scale if dt_init == "constant" else -scale, b=scale),
            bias=partial(init_time_steps_, low=dt_min, high=dt_max, floor=dt_init_floor),
        )
        self.A_log = nn.Parameter(torch.empty(D, S, device=device, dtype=dtype or torch.float32))
        self.D = nn.Parameter(torch.empty(D, **factory))
        self.out_proj = nn.Linear(D, hidden_size, bias=use_bias, **factory)
        self.state_shapes = StateShapes(((D, S),), ((D, conv_kernel),))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters of the layer itself. The rates of each channel are from 1 to ``S``."""
        rates = torch.arange(1, self.state_size + 1, device=self.A_log.device, dtype=torch.float32)
        copy_(self.A_log, rates.log().expand(self.A_log.shape))
        nn.init.ones_(self.D)

    def _compute(self, u: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        D, S = self.intermediate_size, self.state_size
        x, z = split(self.in_proj(u), [D, D], -1)
        (x,), conv = self._convolved((x,), past, tokens)
        x = self.act(x)
        dt, B, C = split(self.x_proj(x), [self.dt_rank, S, S], -1)
        # A time step of 0 does not change the state.
        dt = tokens.masked(F.softplus(upcast(self.dt_proj(dt))))
        scan = partial(
            selective_scan_fn,
            A=rates(self.A_log),
            D=self.D,
            return_last_state=True,
            cu_seqlens=tokens.cu_seqlens,
        )
        if tokens.num_states is None:
            y, h = scan(x, dt, B=B, C=C, z=z, initial_states=past.recurrent)
        else:
            y, h = _every_state(scan, (x, dt, B, C, z), past.recurrent, tokens.num_states)
        return self.out_proj(y), RecurrentState(h, conv)


def _every_state(
    scan: Callable[..., Any], inputs: tuple[Tensor, ...], h: Tensor | None, n: int
) -> tuple[Tensor, Tensor]:
    """The outputs of a scan, and the states after each of the last `n` tokens.

    Each of these tokens has a call of its own, and all earlier tokens have one call. That call begins with two tokens
    of zeros, which change nothing: a graph for any number of tokens needs a length that is never 0 or 1.
    """
    sizes = [inputs[0].shape[1] - n + 2] + [1] * n
    pieces = zip(*(F.pad(x, (0, 0, 2, 0)).split(sizes, 1) for x in inputs), strict=True)
    outputs, states = [], []
    for x, dt, B, C, z in pieces:
        y, h = scan(x, dt, B=B, C=C, z=z, initial_states=h)
        outputs.append(y)
        states.append(h)
    return torch.cat(outputs, 1)[:, 2:], torch.stack(states[1:], 1)
