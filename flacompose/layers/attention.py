"""What layers of linear attention share: heads, projections, short convolutions, states, the output's norm and gate."""

from __future__ import annotations

from typing import ClassVar

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from flacompose.layers import _check
from flacompose.layers.activation import activation
from flacompose.layers.layout import Layout
from flacompose.layers.norm import GatedRMSNorm, RMSNorm
from flacompose.layers.recurrent import RecurrentLayer
from flacompose.layers.short_conv import ShortConvolution
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops._check import MAX_HEAD_SIZE


class AttentionLayer(RecurrentLayer):
    """``H`` heads of queries, and as many or fewer of keys and values, around one recurrence.

    A layer adds its parameters in the order of the peer's checkpoints, and its `forward` calls the methods in theirs.
    """

    chunk_modes: ClassVar[tuple[str, ...]] = ("fused_chunk",)
    projections: ClassVar[tuple[str, str, str]] = ("q", "k", "v")  # what queries, keys and values are called
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    g_proj: nn.Module
    use_short_conv = False

    def __init__(
        self,
        mode: str,
        hidden_size: int,
        expand_k: float,
        expand_v: float,
        num_heads: int,
        num_kv_heads: int | None,
        norm_eps: float,
        layer_idx: int | None,
    ) -> None:
        super().__init__(hidden_size, mode)
        _check.count("num_heads", num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check.integer("num_kv_heads", num_kv_heads)
        if num_kv_heads < 1 or num_heads % num_kv_heads != 0:
            raise ValueError(f"num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}")
        _check.not_negative("norm_eps", norm_eps)

        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.num_kv_groups = num_heads // num_kv_heads
        self.key_dim = _expanded("expand_k", hidden_size, expand_k, num_heads)
        self.value_dim = _expanded("expand_v", hidden_size, expand_v, num_heads)
        self.head_k_dim = self.key_dim // num_heads
        self.head_v_dim = self.value_dim // num_heads
        self.norm_eps = norm_eps
        self.layer_idx = layer_idx
        self.state_shapes = StateShapes(((num_heads, self.head_k_dim, self.head_v_dim),))

    def _add_projections(self, output_gate: bool = False) -> None:
        k_dim, v_dim = self.num_kv_heads * self.head_k_dim, self.num_kv_heads * self.head_v_dim
        for name, dim in zip(self.projections, (self.key_dim, k_dim, v_dim), strict=True):
            setattr(self, f"{name}_proj", nn.Linear(self.hidden_size, dim, bias=False))
        self.use_output_gate = output_gate
        if output_gate:
            self.g_proj = nn.Linear(self.hidden_size, self.value_dim, bias=False)

    def _add_convolutions(
        self, use_short_conv: bool, conv_size: int, conv_bias: bool, activation: str | None = "silu"
    ) -> None:
        _check.count("conv_size", conv_size)
        self.use_short_conv = use_short_conv
        if not use_short_conv:
            return
        shapes = []
        for name in self.projections:
            D = getattr(self, f"{name}_proj").out_features
            conv = ShortConvolution(D, conv_size, bias=conv_bias, activation=activation)
            setattr(self, f"{name}_conv1d", conv)
            shapes.append((D, conv_size))
        self.state_shapes = self.state_shapes._replace(conv=tuple(shapes))

    def _add_output_norm(self, gate_fn: str, fuse_norm: bool, elementwise_affine: bool | None) -> None:
        self.gate_fn = activation("gate_fn", gate_fn)
        self.fuse_norm_and_gate = fuse_norm and self.use_output_gate and gate_fn == "swish"
        if self.fuse_norm_and_gate:
            self.g_norm_swish_gate = GatedRMSNorm(self.head_v_dim, elementwise_affine, self.norm_eps)
        else:
            self.g_norm = RMSNorm(self.head_v_dim, elementwise_affine, self.norm_eps, dtype=torch.float32)

    def _add_output_projection(self) -> None:
        self.o_proj = nn.Linear(self.value_dim, self.hidden_size, bias=False)

    @property
    def _weight(self) -> Tensor:
        return self.q_proj.weight

    def _project(
        self, x: Tensor, tokens: Layout, state: RecurrentState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """``q [B, T, H, K]``, ``k`` and ``v`` in their own heads, and the new states of the convolutions."""
        q, k, v = (getattr(self, f"{name}_proj")(x) for name in self.projections)
        conv: tuple[Tensor, ...] = ()
        if self.use_short_conv:
            before = (None, None, None) if state is None else state.conv
            (q, q_conv), (k, k_conv), (v, v_conv) = (
                getattr(self, f"{name}_conv1d")(h, window, lengths=tokens.lengths, cu_seqlens=cu_seqlens)
                for name, h, window in zip(self.projections, (q, k, v), before, strict=True)
            )
            conv = (q_conv, k_conv, v_conv)
        q = rearrange(q, "b t (h k) -> b t h k", h=self.num_heads)
        k, v = (rearrange(h, "b t (h d) -> b t h d", h=self.num_kv_heads) for h in (k, v))
        return q, k, v, conv

    def _share(self, x: Tensor) -> Tensor:
        """``[B, T, H, D]``, each head of keys or values given to neighbouring heads of queries."""
        return repeat(x, "b t h d -> b t (h groups) d", groups=self.num_kv_groups)

    def _norm_and_gate(self, o: Tensor, x: Tensor) -> Tensor:
        """``o [B, T, H, V]`` normed, and gated by `x` where there is an output gate."""
        if not self.use_output_gate:
            return self.g_norm(o)
        if self.fuse_norm_and_gate:
            g = rearrange(self.g_proj(x), "b t (h v) -> b t h v", h=self.num_heads)
            return self.g_norm_swish_gate(o, g)
        return self.g_norm(o) * rearrange(
            self.gate_fn(self.g_proj(x)), "b t (h v) -> b t h v", h=self.num_heads
        )

    def _normed(self, o: Tensor) -> Tensor:
        """``o [B, T, H, V]`` normed, all heads together."""
        return self.g_norm(rearrange(o, "b t h v -> b t (h v)")).unflatten(2, o.shape[2:])

    def _leave(self, o: Tensor, tokens: Layout) -> Tensor:
        """The output ``[B, T, hidden_size]`` of ``o [B, T, H, V]``."""
        H, V = o.shape[2:]
        # What stands in for a linear layer may not say what it takes.
        takes = getattr(self.o_proj, "in_features", H * V)
        if takes != H * V:
            raise ValueError(
                f"o_proj must take {H * V} features, {H} heads of {V}, got in_features = {takes}"
            )
        return tokens.leave(self.o_proj(rearrange(o, "b t h v -> b t (h v)")))

    def extra_repr(self) -> str:
        return f"mode={self.mode}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"


def expanded_heads(
    hidden_size: int, num_heads: int | None, expand_ratio: int | None, agree: bool = False
) -> tuple[int, int]:
    """How many heads there are, and how many keys each has, one of which follows from the other.

    With `agree` they must, given both, still follow from each other.
    """
    _check.count("hidden_size", hidden_size)
    if num_heads is None and expand_ratio is None:
        raise ValueError("num_heads or expand_ratio must be given, got None for both")
    if expand_ratio is not None:
        _check.head_size("expand_ratio", expand_ratio)
        if (agree or num_heads is None) and expand_ratio > hidden_size:
            raise ValueError(f"expand_ratio must be at most hidden_size = {hidden_size}, got {expand_ratio}")
    if num_heads is None:
        assert expand_ratio is not None
        num_heads = hidden_size // expand_ratio
    _check.count("num_heads", num_heads)
    if agree and expand_ratio is not None and num_heads != hidden_size // expand_ratio:
        raise ValueError(
            f"num_heads must be hidden_size // expand_ratio = {hidden_size // expand_ratio}, got {num_heads}"
        )
    if hidden_size % num_heads != 0:
        raise ValueError(f"hidden_size must be a multiple of num_heads = {num_heads}, got {hidden_size}")
    V = hidden_size // num_heads
    if V > MAX_HEAD_SIZE:
        raise ValueError(f"hidden_size / num_heads must be at most {MAX_HEAD_SIZE}, got {V}")
    return num_heads, V if expand_ratio is None else expand_ratio


def _expanded(argument: str, hidden_size: int, ratio: float, num_heads: int) -> int:
    """``hidden_size * ratio``, which must be whole heads."""
    _check.number(argument, ratio)
    size = hidden_size * ratio
    dim = _check.whole(size)
    if dim < 1 or dim % num_heads != 0:
        raise ValueError(
            f"hidden_size * {argument} must be a positive multiple of num_heads = {num_heads}, got {size}"
        )
    if dim // num_heads > MAX_HEAD_SIZE:
        raise ValueError(
            f"hidden_size * {argument} / num_heads must be at most {MAX_HEAD_SIZE}, got {dim // num_heads}"
        )
    return dim
