"""The recurrent block of Griffin and Hawk, https://arxiv.org/abs/2402.19427, section 2.3."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flacompose._errors import ValueError
from flacompose.layers import _check
from flacompose.layers.activation import activation
from flacompose.layers.heads import in_heads
from flacompose.layers.initialization import inverse_softplus
from flacompose.layers.layout import Layout
from flacompose.layers.recurrent import Factory, RecurrentLayer, factory_of
from flacompose.layers.rotary import positions
from flacompose.layers.short_conv import ShortConvolution
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops import chunk_rg_lru, fused_recurrent_rg_lru
from flacompose.ops._tensors.dtensor import flatten


class GriffinRecurrentBlock(RecurrentLayer):
    r"""The recurrent block of Griffin, Hawk and RecurrentGemma, of $u$:

    $$x = \operatorname{conv}(u W_x) \qquad r = x W_r \qquad i = x W_i \qquad
    a_t = \exp\bigl(-8 \operatorname{softplus}(\Lambda) \odot \sigma(r_t)\bigr)$$
    $$h_t = a_t \odot h_{t-1} + \sqrt{1 - a_t^2} \odot \sigma(i_t) \odot x_t \qquad
    y = \bigl(h \odot \operatorname{gelu}(u W_y)\bigr) W_{out}$$

    where $\sigma$ is the sigmoid, $W_r$ and $W_i$ are block-diagonal, every map has a bias, and for the first token of
    a sequence the square root is 1. From "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient
    Language Models" (<https://arxiv.org/abs/2402.19427>). Parameter names are as in `RecurrentGemmaRecurrentBlock`
    of transformers, whose weights load.

    Args:
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
        hidden_size: Size of the input and of the output.
        num_heads: Number of equal blocks of $W_r$ and of $W_i$.
        lru_width: Channels ``D`` of the recurrence. Default: `hidden_size`.
        conv_size: Width ``W`` of the convolution.
        hidden_act: Activation of the gate of the output: "relu", "sigmoid", "logsigmoid", "silu" or "swish", "sqrelu",
            "gelu" (its tanh form).
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default.

    Raises:
        ValueError: If an argument has a wrong value, or `num_heads` does not divide `lru_width`.
        TypeError: If an argument has the wrong type.
    """

    fusible = ("linear_x", "linear_y")
    convolutions = ("conv_1d",)

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 2560,
        num_heads: int = 10,
        lru_width: int | None = None,
        conv_size: int = 4,
        hidden_act: str = "gelu",
        layer_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, 0.0, layer_idx, conv_size)
        D = hidden_size if lru_width is None else lru_width
        _check.count("lru_width", D)
        _check.count("num_heads", num_heads)
        if D % num_heads != 0:
            raise ValueError(f"lru_width must be a multiple of num_heads = {num_heads}, got {D}")
        self.num_heads = num_heads
        self.lru_width = D
        self.act = activation("hidden_act", hidden_act)

        factory = factory_of(device, dtype)
        self.linear_y = nn.Linear(hidden_size, D, **factory)
        self.linear_x = nn.Linear(hidden_size, D, **factory)
        self.linear_out = nn.Linear(D, hidden_size, **factory)
        self.conv_1d = ShortConvolution(D, conv_size, bias=True, activation=None, **factory)
        self.rg_lru = RGLRUGates(D, num_heads, factory)
        self.state_shapes = StateShapes(((D,),), ((D, conv_size),), position=True)

    def _compute(self, u: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        x, gate = self._projections(u)
        (x,), conv = self._convolved((x,), past, tokens)
        r, i, a_param = self.rg_lru(x)
        position, next_position = positions(u, past.position, tokens)
        first = position == 0
        if tokens.is_token is not None:
            first = first & tokens.is_token
        # A pad, whose recurrence gate is closed, does not change the state.
        rg_lru = self._op(chunk_rg_lru, fused_recurrent_rg_lru, u, past.recurrent, tokens)
        h, recurrent = rg_lru(x, tokens.masked(r, -torch.inf), i, a_param, first)
        return self.linear_out(h * self.act(gate)), RecurrentState(recurrent, conv, position=next_position)


class RGLRUGates(nn.Module):
    """The recurrence and the input gates of the RG-LRU, before their sigmoids, and its rates of decay."""

    def __init__(self, width: int, blocks: int, factory: Factory) -> None:
        super().__init__()
        P = width // blocks
        self.recurrent_param = nn.Parameter(torch.empty(width, **factory))
        self.input_gate_weight = nn.Parameter(torch.empty(blocks, P, P, **factory))
        self.input_gate_bias = nn.Parameter(torch.empty(blocks, P, **factory))
        self.recurrent_gate_weight = nn.Parameter(torch.empty(blocks, P, P, **factory))
        self.recurrent_gate_bias = nn.Parameter(torch.empty(blocks, P, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As in the authors' code, decays at an open gate are ``a^8``, with ``a^2`` uniform for a from 0.9 to 0.999."""
        square = torch.empty_like(self.recurrent_param, dtype=torch.float32).uniform_(0.9**2, 0.999**2)
        self.recurrent_param.copy_(inverse_softplus(-square.log() / 2))
        for weight in (self.input_gate_weight, self.recurrent_gate_weight):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        for bias in (self.input_gate_bias, self.recurrent_gate_bias):
            nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(r, i, a_param)``: the gates of ``x``, ``[B, T, D]``, and the rates before their softplus, ``[D]``."""
        blocks = in_heads(x, self.input_gate_weight.shape[0])

        def gate(weight: Tensor, bias: Tensor) -> Tensor:
            return flatten(torch.einsum("bthi,hij->bthj", blocks, weight) + bias, 2, 3)

        return (
            gate(self.recurrent_gate_weight, self.recurrent_gate_bias),
            gate(self.input_gate_weight, self.input_gate_bias),
            self.recurrent_param,
        )
