"""HGRN, https://arxiv.org/abs/2311.04823, sections 3.1 to 3.3."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.forget_gate import ForgetGateLayer, forget_gate
from flacompose.layers.layout import Layout
from flacompose.layers.norm import GatedRMSNorm
from flacompose.layers.recurrent import factory_of, linears
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops import chunk_hgrn, fused_recurrent_hgrn
from flacompose.ops._tensors.dtype import upcast


class HGRNAttention(ForgetGateLayer):
    r"""A layer of the hierarchically gated recurrent network, of $x$:

    $$i = \operatorname{conv}(x W_i) \qquad
    f = \beta + (1 - \beta) \odot \operatorname{sigmoid}(\operatorname{conv}(x W_f))$$
    $$h_t = f_t \odot h_{t-1} + (1 - f_t) \odot \operatorname{silu}(i_t) \qquad
    y = \bigl(\operatorname{rmsnorm}(h) \odot \operatorname{silu}(x W_g)\bigr) W_o$$

    where $\beta$ is the lower bound of the forget gate $f$. From "Hierarchically Gated Recurrent Neural Network for
    Sequence Modeling" (<https://arxiv.org/abs/2311.04823>). Arguments, defaults and parameter names are as in
    flash-linear-attention 0.6, whose checkpoints load.

    Args:
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
        hidden_size: Size of the input and of the output.
        expand_ratio: The recurrence has ``D = hidden_size * expand_ratio`` channels.
        use_short_conv: Whether $x W_i$ and $x W_f$ pass a `ShortConvolution`, without activation.
        conv_size: Width ``W`` of the convolutions.
        conv_bias: Whether the convolutions have a bias.
        elementwise_affine: Whether the norm has a weight; None stands for False.
        norm_eps: Added to the mean square in the norm.
        layer_idx: Index of the layer in the model. Layer 0 ignores the lower bound.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default.

    Raises:
        ValueError: If an argument has a wrong value, or ``D`` is no positive int.
        TypeError: If an argument has the wrong type.
    """

    fusible = ("i_proj", "f_proj", "g_proj")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_ratio: float = 1,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx, conv_size)
        _check.number("expand_ratio", expand_ratio)
        input_dim = _check.positive_int("hidden_size * expand_ratio", hidden_size * expand_ratio)
        if layer_idx is not None:
            _check.integer("layer_idx", layer_idx)
        self.input_dim = self.gate_channels = input_dim

        factory = factory_of(device, dtype)
        self.i_proj, self.f_proj, self.g_proj = linears(hidden_size, (input_dim,) * 3, factory)
        conv = self._add_convolutions("f i", use_short_conv, conv_size, conv_bias, factory, None)
        self.convolutions = self.convolutions[::-1]  # in the state, i comes first
        self.g_norm = GatedRMSNorm(input_dim, elementwise_affine, norm_eps, **factory)
        self.o_proj = nn.Linear(input_dim, hidden_size, bias=False, **factory)
        self.state_shapes = StateShapes(((input_dim,),), conv)

    def _compute(
        self, x: Tensor, past: RecurrentState, tokens: Layout, lower_bound: Tensor | None
    ) -> tuple[Tensor, RecurrentState]:
        lower_bound = self._bound(x, lower_bound)
        i, f, gate = self._projections(x)
        (i, f), conv = self._convolved((i, f), past, tokens)
        forgotten, g = forget_gate(f, lower_bound)
        i = (forgotten * F.silu(upcast(i))).to(i.dtype)
        i, g = tokens.masked(i), tokens.masked(g)

        hgrn = self._op(chunk_hgrn, fused_recurrent_hgrn, x, past.recurrent, tokens)
        h, recurrent = hgrn(i, g)
        return self.o_proj(self.g_norm(h, gate)), RecurrentState(recurrent, conv)
