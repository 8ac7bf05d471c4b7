"""Lightning attention, https://arxiv.org/abs/2405.17381, with the layer of MiniMax-01, arXiv 2501.08313."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flacompose._errors import ValueError
from flacompose.layers import _check
from flacompose.layers.activation import activation
from flacompose.layers.layout import Layout
from flacompose.layers.norm import RMSNorm
from flacompose.layers.recurrent import RecurrentLayer, factory_of
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops import chunk_simple_gla, fused_recurrent_simple_gla
from flacompose.ops.lightning_attn import check_decay, log_decay


class LightningAttention(RecurrentLayer):
    r"""A layer of lightning attention, of $x$, per head $h = 0, 1, \dots$:

    $$q, k, v = \operatorname{act}(x W_{qkv}) \qquad S_t = e^{-r_h}\, S_{t-1} + k_t v_t^\top \qquad
    o_t = S_t^\top q_t \qquad y = \bigl(\operatorname{rmsnorm}(o) \odot \sigma(x W_g)\bigr) W_o$$

    with the rates $r_h$ of [chunk_lightning_attn][flacompose.ops.chunk_lightning_attn]. The norm is over all heads
    together. From "Various Lengths, Constant Speed: Efficient Language Modeling with Lightning Attention"
    (<https://arxiv.org/abs/2405.17381>) and "MiniMax-01: Scaling Foundation Models with Lightning Attention"
    (<https://arxiv.org/abs/2501.08313>). Parameter names are as in `MiniMaxLightningAttention` in transformers,
    whose parameters load. Its buffers, tables of decays for one block length, are not needed here.

    Args:
        mode: "chunk" or "fused_recurrent", two forms of the same function. A single token always takes the second.
        hidden_size: Size of the input and of the output.
        num_heads: Number of heads ``H``.
        head_dim: Number of keys, and of values, of a head. Default: ``hidden_size / num_heads``.
        layer_idx: Index of the layer in the model, from 0. It determines the rates.
        num_layers: Number of layers of the model, including layers without a recurrence.
        hidden_act: Activation of queries, keys and values: "relu", "sigmoid", "logsigmoid", "silu" or "swish",
            "sqrelu", "gelu" (its tanh form).
        norm_eps: Added to the mean square in the norm.
        decay: "minimax" or "tnl", as in the op.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default.

    Raises:
        ValueError: If an argument has a wrong value, the heads do not divide `hidden_size`, or `head_dim` is above 512.
        TypeError: If an argument has the wrong type.
    """

    fusible = ("qkv_proj", "output_gate")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        num_heads: int = 8,
        head_dim: int | None = None,
        *,
        layer_idx: int,
        num_layers: int,
        hidden_act: str = "silu",
        norm_eps: float = 1e-6,
        decay: str = "minimax",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mode, hidden_size, norm_eps, layer_idx)
        _check.count("num_heads", num_heads)
        if head_dim is None:
            if hidden_size % num_heads != 0:
                raise ValueError(
                    f"hidden_size must be a multiple of num_heads = {num_heads} without a head_dim, "
                    f"got {hidden_size}"
                )
            head_dim = hidden_size // num_heads
            _check.head_size("hidden_size / num_heads", head_dim)
        _check.head_size("head_dim", head_dim)
        check_decay(layer_idx, num_layers, decay)

        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_layers = num_layers
        self.decay = decay
        self.act = activation("hidden_act", hidden_act)

        factory = factory_of(device, dtype)
        dim = num_heads * head_dim
        self.norm = RMSNorm(dim, eps=norm_eps, **factory)
        self.qkv_proj = nn.Linear(hidden_size, 3 * dim, bias=False, **factory)
        self.out_proj = nn.Linear(dim, hidden_size, bias=False, **factory)
        self.output_gate = nn.Linear(hidden_size, dim, bias=False, **factory)
        self.state_shapes = StateShapes(((num_heads, head_dim, head_dim),))

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        qkv, gate = self._projections(x)
        # The q, k and v of each head are side by side.
        qkv = self.act(qkv).unflatten(-1, (self.num_heads, 3 * self.head_dim))
        q, k, v = qkv.split(self.head_dim, -1)
        decay = log_decay(self.num_heads, self.layer_idx, self.num_layers, self.decay, q)
        # With pads, gates per token replace the constant decay, which would decay at pads too.
        g = None if tokens.lengths is None else tokens.masked(decay.expand(q.shape[:3]))
        simple_gla = self._op(chunk_simple_gla, fused_recurrent_simple_gla, x, past.recurrent, tokens)
        o, recurrent = simple_gla(q, tokens.masked(k), v, g, decay if g is None else None, scale=1.0)
        o = self.norm(o.flatten(-2)) * gate.sigmoid()
        return self.out_proj(o), RecurrentState(recurrent)
