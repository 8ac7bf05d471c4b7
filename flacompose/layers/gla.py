"""Gated linear attention, https://arxiv.org/abs/2312.06635, section 4.4."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from flacompose.layers import _check
from flacompose.layers.activation import activation
from flacompose.layers.layout import layout
from flacompose.layers.norm import GatedRMSNorm, RMSNorm
from flacompose.layers.short_conv import ShortConvolution
from flacompose.layers.state import RecurrentState
from flacompose.ops import chunk_gla, fused_recurrent_gla
from flacompose.ops._check import _MAX_HEAD_SIZE
from flacompose.ops._define import autocast_on
from flacompose.ops._dtype import wide


class GatedLinearAttention(nn.Module):
    r"""A layer of gated linear attention, of $x$, per head:

    $$q = \phi(\operatorname{conv}(x W_q)) \quad k = \phi(\operatorname{conv}(x W_k)) \quad
    v = \operatorname{conv}(x W_v) \quad g = \operatorname{logsigmoid}(x W_1 W_2 + b) / \tau$$
    $$S_t = \operatorname{diag}(e^{g_t})\, S_{t-1} + k_t v_t^\top \qquad o_t = K^{-1/2}\, S_t^\top q_t \qquad
    y = \bigl(\operatorname{rmsnorm}(o) \odot \operatorname{gate}(x W_g)\bigr) W_o$$

    From "Gated Linear Attention Transformers with Hardware-Efficient Training" (<https://arxiv.org/abs/2312.06635>).
    Arguments, defaults and parameter names are those of flash-linear-attention 0.6, whose checkpoints load.

    Args:
        mode: "chunk" or "fused_recurrent", two ways to the same numbers; calls of one token always take the second.
            "fused_chunk" is refused: there is no such op, and the peer's only raises.
        hidden_size: Size of the input and of the output.
        expand_k: The keys of all heads take ``hidden_size * expand_k``.
        expand_v: The values of all heads take ``hidden_size * expand_v``.
        num_heads: Number of heads ``H``.
        num_kv_heads: Number of heads that keys, decays and values have, each shared by ``H / num_kv_heads``
            neighbouring heads of queries. Default: ``H``.
        feature_map: Activation $\phi$ of queries and keys: "relu", "sigmoid", "logsigmoid", "silu" or "swish",
            "sqrelu", "gelu" (its tanh form). Default: none.
        use_short_conv: Whether queries, keys and values pass a `ShortConvolution` with silu.
        conv_size: Its width ``W``.
        conv_bias: Whether it has a bias.
        use_output_gate: Whether the normed output is gated.
        gate_fn: Activation of the output gate, one of those that `feature_map` takes.
        elementwise_affine: Whether the norm has a weight.
        norm_eps: Added to the mean square in the norm.
        gate_logit_normalizer: Divisor $\tau$ of the log-decay, above 0.
        gate_low_rank_dim: Rank of the decay's projection.
        clamp_min: Least log-decay. Default: none.
        fuse_norm: With a "swish" output gate: round once, after norm and gate, and name the norm ``g_norm_swish_gate``.
            Otherwise it is named ``g_norm``, and its output is rounded too.
        layer_idx: Kept as an attribute and not used: a state is given to the layer, not looked up.

    Raises:
        ValueError: If an argument is none of these, the heads do not divide the sizes, or one takes over 256 keys or
            values.
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: float = 16,
        gate_low_rank_dim: int = 16,
        clamp_min: float | None = None,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        if mode == "fused_chunk":
            raise ValueError("mode 'fused_chunk' is no op of its own: use 'chunk', the same function")
        if mode not in ("chunk", "fused_recurrent"):
            raise ValueError(f"mode must be 'chunk' or 'fused_recurrent', got {mode!r}")
        if num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {num_heads}")
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads != 0:
            raise ValueError(f"num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}")
        # Written so that NaN fails.
        if not gate_logit_normalizer > 0:
            raise ValueError(f"gate_logit_normalizer must be positive, got {gate_logit_normalizer}")
        if clamp_min is not None and not clamp_min <= 0:
            raise ValueError(f"clamp_min must be at most 0, as log-decays are, got {clamp_min}")
        if not norm_eps >= 0:
            raise ValueError(f"norm_eps must be at least 0, got {norm_eps}")
        if gate_low_rank_dim < 1:
            raise ValueError(f"gate_low_rank_dim must be at least 1, got {gate_low_rank_dim}")

        self.mode = mode
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.num_kv_groups = num_heads // num_kv_heads
        self.key_dim = _expanded("expand_k", hidden_size, expand_k, num_heads)
        self.value_dim = _expanded("expand_v", hidden_size, expand_v, num_heads)
        self.head_k_dim = self.key_dim // num_heads
        self.head_v_dim = self.value_dim // num_heads
        self.use_short_conv = use_short_conv
        self.use_output_gate = use_output_gate
        self.gate_logit_normalizer = gate_logit_normalizer
        self.clamp_min = clamp_min
        self.layer_idx = layer_idx
        self.feature_map_fn = None if feature_map is None else activation("feature_map", feature_map)
        self.gate_fn = activation("gate_fn", gate_fn)
        self.fuse_norm_and_gate = fuse_norm and use_output_gate and gate_fn == "swish"

        k_dim, v_dim = num_kv_heads * self.head_k_dim, num_kv_heads * self.head_v_dim
        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, k_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, v_dim, bias=False)
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(self.key_dim, conv_size, bias=conv_bias)
            self.k_conv1d = ShortConvolution(k_dim, conv_size, bias=conv_bias)
            self.v_conv1d = ShortConvolution(v_dim, conv_size, bias=conv_bias)
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, gate_low_rank_dim, bias=False),
            nn.Linear(gate_low_rank_dim, k_dim, bias=True),
        )
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        if self.fuse_norm_and_gate:
            self.g_norm_swish_gate = GatedRMSNorm(self.head_v_dim, elementwise_affine, norm_eps)
        else:
            self.g_norm = RMSNorm(self.head_v_dim, elementwise_affine, norm_eps, dtype=torch.float32)

    def init_state(self, batch_size: int) -> RecurrentState:
        """The state before the first token of `batch_size` sequences: zeros, on the device of the parameters.

        The recurrent state is float32 (float64 in a float64 layer). Those of convolutions have the dtype that
        projections have, that of autocast where it is on, so that a compiled layer meets one dtype in every call.
        """
        weight = self.q_proj.weight
        device, dtype = weight.device, weight.dtype
        recurrent = torch.zeros(
            batch_size,
            self.num_heads,
            self.head_k_dim,
            self.head_v_dim,
            device=device,
            dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        )
        if not self.use_short_conv:
            return RecurrentState(recurrent)
        if autocast_on(device):
            dtype = torch.get_autocast_dtype(device.type)
        return RecurrentState(
            recurrent,
            tuple(
                torch.zeros(batch_size, conv.hidden_size, conv.kernel_size, device=device, dtype=dtype)
                for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)
            ),
        )

    def forward(
        self,
        hidden_states: Tensor,
        state: RecurrentState | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, RecurrentState]:
        """Go through ``T`` tokens from `state`.

        A sequence given in pieces, each with the state that the piece before returned, gives what the whole gives.

        Args:
            hidden_states: ``[B, T, hidden_size]``.
            state: What `init_state` or a call returned, with ``N`` rows, ``B`` or the number of packed sequences.
                It is not written to. Default: zeros.
            attention_mask: ``[B, T]``, bool or integers, 0 for pads, wherever they are in a row, anything else
                for tokens. A pad changes no state, is seen by no token and gives zeros. It is the mask of these ``T``
                tokens; of a longer one, the mask of a whole history, the last ``T`` columns count. Default: no pads.
            cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B``
                is then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: a sequence a row.

        Returns:
            ``(output, state)``: `output` is ``[B, T, hidden_size]``; `state` is new, that after the last tokens.

        Raises:
            ValueError: If a shape or a device is wrong, or `attention_mask` comes with `cu_seqlens`.
            TypeError: If `state` is no `RecurrentState`, another argument no tensor, or a dtype wrong: without
                autocast, `hidden_states` has that of the weights.
        """
        tokens = layout(hidden_states, self.hidden_size, attention_mask, cu_seqlens)
        _check.same_dtype(
            "hidden_states", hidden_states, self.q_proj.weight, autocast_on(hidden_states.device)
        )
        if state is not None:
            N = hidden_states.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            self._check_state(hidden_states, state, N)

        x = tokens.enter(hidden_states)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        gk = F.logsigmoid(wide(self.gk_proj(x))) / self.gate_logit_normalizer
        if self.clamp_min is not None:
            gk = gk.clamp(min=self.clamp_min)

        conv: tuple[Tensor, ...] = ()
        if self.use_short_conv:
            q_conv, k_conv, v_conv = (None, None, None) if state is None else state.conv
            q, q_conv = self.q_conv1d(q, q_conv, lengths=tokens.lengths, cu_seqlens=cu_seqlens)
            k, k_conv = self.k_conv1d(k, k_conv, lengths=tokens.lengths, cu_seqlens=cu_seqlens)
            v, v_conv = self.v_conv1d(v, v_conv, lengths=tokens.lengths, cu_seqlens=cu_seqlens)
            conv = (q_conv, k_conv, v_conv)

        q = rearrange(q, "b t (h k) -> b t h k", h=self.num_heads)
        k, v, gk = (
            repeat(h, "b t (h d) -> b t (h groups) d", h=self.num_kv_heads, groups=self.num_kv_groups)
            for h in (k, v, gk)
        )
        if self.feature_map_fn is not None:
            q, k = self.feature_map_fn(q), self.feature_map_fn(k)
        k, gk = tokens.silence(k), tokens.silence(gk)

        one_token = statically_known_true(hidden_states.shape[1] == 1)
        gla = fused_recurrent_gla if one_token or self.mode == "fused_recurrent" else chunk_gla
        o, recurrent = gla(
            q, k, v, gk,
            initial_state=None if state is None else state.recurrent,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        assert recurrent is not None  # asked for

        if self.fuse_norm_and_gate:
            o = self.g_norm_swish_gate(o, rearrange(self.g_proj(x), "b t (h v) -> b t h v", h=self.num_heads))
        else:
            o = self.g_norm(o)
            if self.use_output_gate:
                o = o * rearrange(self.gate_fn(self.g_proj(x)), "b t (h v) -> b t h v", h=self.num_heads)
        return tokens.leave(self.o_proj(rearrange(o, "b t h v -> b t (h v)"))), RecurrentState(
            recurrent, conv
        )

    def _check_state(self, x: Tensor, state: RecurrentState, N: int) -> None:
        if not isinstance(state, RecurrentState):
            raise TypeError(
                f"state must be a RecurrentState, got {type(state).__name__} "
                "(a mask is the keyword attention_mask)"
            )
        shape = (N, self.num_heads, self.head_k_dim, self.head_v_dim)
        _check.state_of(x, "state.recurrent", state.recurrent, shape)
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d) if self.use_short_conv else ()
        if not isinstance(state.conv, (tuple, list)):
            raise TypeError(f"state.conv must be a tuple of tensors, got {type(state.conv).__name__}")
        if len(state.conv) != len(convs):
            raise ValueError(f"state.conv must hold {len(convs)} tensors, got {len(state.conv)}")
        for i, conv in enumerate(convs):
            _check.state_of(x, f"state.conv[{i}]", state.conv[i], (N, conv.hidden_size, conv.kernel_size))

    def extra_repr(self) -> str:
        return f"mode={self.mode}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"


def _expanded(argument: str, hidden_size: int, ratio: float, num_heads: int) -> int:
    """``hidden_size * ratio``, which must be whole heads."""
    size = hidden_size * ratio
    dim = round(size) if math.isfinite(size) else 0
    if not math.isclose(size, dim) or dim < 1 or dim % num_heads != 0:
        raise ValueError(
            f"hidden_size * {argument} must be a positive multiple of num_heads = {num_heads}, got {size}"
        )
    if dim // num_heads > _MAX_HEAD_SIZE:
        raise ValueError(
            f"hidden_size * {argument} / num_heads must be at most {_MAX_HEAD_SIZE}, got {dim // num_heads}"
        )
    return dim
