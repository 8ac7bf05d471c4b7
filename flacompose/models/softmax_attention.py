"""Causal softmax attention for hybrid models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from flacompose._errors import ValueError
from flacompose._torch import assert_async, is_exporting
from flacompose.layers import _check
from flacompose.layers.heads import repeat_heads
from flacompose.layers.layout import Layout
from flacompose.layers.number import number
from flacompose.layers.recurrent import StatefulLayer, factory_of
from flacompose.layers.rotary import positions, rotary
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops._operators.bounds import verified
from flacompose.ops._parallel.ranks import Ranks, gathered, lengths_of_ranks, of_all, sharing
from flacompose.ops._tensors.packed import bounds
from flacompose.ops._tensors.sizes import always_true


class SoftmaxAttention(StatefulLayer):
    r"""Softmax attention with a rotary embedding, of $x$, per head:

    $$q_t = R_t (x W_q)_t \quad k_t = R_t (x W_k)_t \quad v = x W_v \qquad
    o_t = \sum_{s \le t} \operatorname{softmax}_s (K^{-1/2} q_t \cdot k_s)\, v_s \qquad y = o W_o$$

    It is called like a layer. Its state holds all keys and values so far. A call of ``T`` tokens, including pads, adds
    ``T`` places to it; the tokens of a sequence are in its first places.

    Packed sequences attend within themselves. Their state has positions but no keys and values, which would need ``N``
    rows of the greatest possible length. So no call can continue from this state, and a call with ``cu_seqlens`` cannot
    continue from a state with keys and values.

    Args:
        hidden_size: Size of the input, of the output, and of all heads together.
        num_heads: Number of heads.
        num_kv_heads: Number of heads of keys and values. Neighbouring heads of queries share each.
            Default: `num_heads`.
        qkv_bias: Whether the projections to queries, keys and values have a bias.
        window_size: Number of tokens that a token sees, including itself. Default: all earlier tokens and itself.
        rope_theta: Base of the frequencies of the rotary embedding.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ValueError: If an argument has a wrong value, or `hidden_size` is no multiple of ``2 * num_heads``.
        TypeError: If an argument has the wrong type.
    """

    fusible = ("q_proj", "k_proj", "v_proj")
    rope_theta = number("rope_theta")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        window_size: int | None = None,
        rope_theta: float = 10000.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size)
        _check.count("num_heads", num_heads)
        H, HKV = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        _check.count("num_kv_heads", HKV)
        _check.flags(qkv_bias=qkv_bias)
        if H % HKV != 0:
            raise ValueError(f"num_kv_heads must divide num_heads = {H}, got {HKV}")
        if hidden_size % (2 * H) != 0:
            raise ValueError(
                f"hidden_size must be a multiple of 2 * num_heads = {2 * H}, for rotary positions, "
                f"got {hidden_size}"
            )
        if window_size is not None:
            _check.count("window_size", window_size)
        _check.positive("rope_theta", rope_theta)
        _check.finite("rope_theta", rope_theta)
        D = hidden_size // H
        self.num_heads, self.num_kv_heads, self.head_dim = H, HKV, D
        self.window_size = window_size
        self.rope_theta = float(rope_theta)

        factory = factory_of(device, dtype)
        self.q_proj = nn.Linear(hidden_size, H * D, bias=qkv_bias, **factory)
        self.k_proj = nn.Linear(hidden_size, HKV * D, bias=qkv_bias, **factory)
        self.v_proj = nn.Linear(hidden_size, HKV * D, bias=qkv_bias, **factory)
        self.o_proj = nn.Linear(H * D, hidden_size, bias=False, **factory)
        self.state_shapes = StateShapes((), position=True, cache=(HKV, D))

    def _compute(self, x: Tensor, past: RecurrentState, tokens: Layout) -> tuple[Tensor, RecurrentState]:
        cu_seqlens = tokens.cu_seqlens
        if cu_seqlens is not None and past.cache and not always_true(past.cache[0].shape[1] == 0):
            raise ValueError(
                "state must not hold keys and values of softmax attention in a call with cu_seqlens, got a "
                f"cache of {past.cache[0].shape[1]} places: put the sequences in rows, with an attention_mask"
            )
        ranks = sharing()
        if ranks is None:  # else the bounds have been checked
            tokens = tokens._replace(cu_seqlens=verified(cu_seqlens, x.shape[1]))
            cu_seqlens = tokens.cu_seqlens
        q, k, v = self._projections(x)
        q = q.unflatten(-1, (self.num_heads, -1))
        k, v = (y.unflatten(-1, (self.num_kv_heads, -1)) for y in (k, v))
        position, next_position = positions(x, past.position, tokens)  # [B, T], [B]
        q, k = rotary(q, k, position, self.rope_theta)
        if ranks is not None:
            k, v = _of_all_ranks(ranks, k, v, tokens)
        if cu_seqlens is not None:
            o = self._attend_packed(q, k, v, cu_seqlens)
            return self.o_proj(o.flatten(2)), RecurrentState((), position=next_position)
        first = past.position is None
        if first:
            # A copy, so that the state does not keep the whole product of fused projections in memory, nor is a view.
            # Later caches are no views, and a call that was compiled for a view would be compiled again.
            v = v.clone(memory_format=torch.contiguous_format)
        else:
            k, v = (_appended(old, new, past.position) for old, new in zip(past.cache, (k, v), strict=True))
        o = self._attend(q, k, v, position, first)
        return self.o_proj(o.flatten(2)), RecurrentState((), position=next_position, cache=(k, v))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, first: bool) -> Tensor:
        """Attention of ``q [B, T, H, D]`` to ``k [B, L, HKV, D]``. The key of a token is at its `position`.

        In the `first` call there are no other keys.
        """
        groups = self.num_heads // self.num_kv_heads
        q, k, v = (y.transpose(1, 2) for y in (q, repeat_heads(k, groups), repeat_heads(v, groups)))
        plain, ranks = first and self.window_size is None, sharing()
        if plain and ranks is None:
            # Pads come after the tokens of their row, so no token sees a pad.
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif plain and ranks is not None and not is_compiling():
            # The keys up to this rank's tokens. Dynamo cannot trace this kind of mask, whose module imports all of it.
            from torch.nn.attention.bias import causal_lower_right

            L = q.shape[2] * (ranks.rank + 1)
            mask: Any = causal_lower_right(q.shape[2], L)
            o = F.scaled_dot_product_attention(q, k[:, :, :L], v[:, :, :L], attn_mask=mask)
        else:
            age = position[:, None, :, None] - torch.arange(k.shape[2], device=k.device)  # [B, 1, T, L]
            visible = age >= 0
            if self.window_size is not None:
                visible = visible & (age < self.window_size)
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return o.transpose(1, 2)

    def _attend_packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Attention of ``q [1, T, H, D]`` to ``k`` and ``v [1, L, HKV, D]`` within each sequence.

        The ``L`` keys belong to the ``T`` tokens, or to the tokens of all ranks.
        """
        groups, T, L = self.num_heads // self.num_kv_heads, q.shape[1], k.shape[1]
        k, v = repeat_heads(k, groups), repeat_heads(v, groups)
        own, ranks = bounds(cu_seqlens, T), sharing()
        # The bounds of sequences among all keys, and the number of keys before the first query.
        all_bounds, before = own, 0
        if ranks is not None:
            all_bounds, before = gathered(ranks, own).sum(0), ranks.rank * T
        if _has_flash(q):
            from torch.nn.attention.varlen import varlen_attn  # slow to import

            # The kernels write only places in sequences. So the places before and after all sequences count as two more
            # sequences. The last query of a sequence is aligned with the last key.
            window = (-1 if self.window_size is None else self.window_size - 1, 0)
            end = before + T
            cu_q, cu_k = _covering(own, T), _covering(all_bounds.clamp(max=end), end)
            q, k, v = (y.contiguous() for y in (q[0], k[0, :end], v[0, :end]))
            o: Any = varlen_attn(q, k, v, cu_q, cu_k, T, end, window_size=window)
            return o[None]
        query, key = before + torch.arange(T, device=q.device), torch.arange(L, device=q.device)
        query_sequence, key_sequence = (
            torch.searchsorted(all_bounds, place, right=True) for place in (query, key)
        )
        age = query[:, None] - key  # [T, L]
        visible = (query_sequence[:, None] == key_sequence) & (age >= 0)
        if self.window_size is not None:
            visible = visible & (age < self.window_size)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)


def _has_flash(q: Tensor) -> bool:
    """Whether PyTorch has kernels of packed sequences for ``q [1, T, H, D]``.

    Exported programs do not use them, since other runtimes do not know their operator.
    """
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[3] % 8 == 0
        and q.shape[3] <= 256
        and not is_exporting()
        and torch.cuda.get_device_properties(q.device).major >= 8
    )


def _covering(cu: Tensor, T: int) -> Tensor:
    """The bounds `cu`, int32, with one more sequence before and after, so that they cover all ``T`` places."""
    return torch.cat([cu.new_zeros(1), cu, cu.new_full((1,), T)]).int()


def _of_all_ranks(ranks: Ranks, k: Tensor, v: Tensor, tokens: Layout) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens of all ranks, ``[B, size * T, H, D]``."""
    if tokens.lengths is not None:
        raise ValueError(
            "attention_mask must not be given across ranks to a model with softmax attention, whose keys would have "
            "pads between them"
        )
    lengths = lengths_of_ranks(ranks, k.shape[1], k.device)
    assert_async((lengths == k.shape[1]).all(), "softmax attention across ranks takes pieces of one length")
    rows = of_all(ranks, torch.stack([k, v])).movedim(0, 2)  # [2, B, size, T, H, D]
    k, v = rows.flatten(2, 3).unbind()
    return k, v


def _appended(old: Tensor, new: Tensor, count: Tensor) -> Tensor:
    """``new [N, T, H, D]`` after the first ``count [N]`` places of ``old [N, L, H, D]``: ``[N, L + T, H, D]``."""
    L, T = old.shape[1], new.shape[1]
    # Clamped, so that a wrong `count` cannot cause an access out of bounds.
    place = count.long().clamp(0, L)[:, None] + torch.arange(T, device=new.device)
    index = place[:, :, None, None].expand_as(new)
    return F.pad(old.to(new.dtype), (0, 0, 0, 0, 0, T)).scatter(1, index, new)
