"""The functions that transformers' modeling files call for their recurrences, over the ops of this library.

They take the arguments of the functions that they stand in for, and ignore the same ones. Where a modeling file expects
that its cache is written to, it is written to here, at the edge: the ops themselves return new states.

Packed sequences come as `cu_seq_lens_q`, which transformers' collators make for attention, or as `cu_seqlens`. They
come without a cache, which has one row for each row of a batch and none for each sequence.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from flacompose._torch import is_exporting
from flacompose.layers.joint import joined_paths
from flacompose.layers.token_shift import token_shift
from flacompose.ops import (
    causal_conv1d,
    chunk_mlstm,
    chunk_rg_lru,
    chunk_rwkv4,
    chunk_simple_gla,
    fused_recurrent_mlstm,
    fused_recurrent_rg_lru,
    fused_recurrent_rwkv4,
    fused_recurrent_simple_gla,
    mamba_chunk_scan_combined,
    selective_scan_fn,
    selective_state_update,
)
from flacompose.ops._parallel.ranks import sharing
from flacompose.ops._recurrences.matrix.delta_rule import op as delta_op
from flacompose.ops._recurrences.short_conv import op as short_conv
from flacompose.ops._tensors.dtype import state_dtype

# By which of their arguments modules of transformers tell packed sequences apart.
PACKED = ("cu_seq_lens_q", "cu_seqlens", "seq_idx")


def convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | _Bounds | None = None,
    **kwargs: Any,
) -> Tensor:
    """`causal_conv1d_fn` of ``hidden_states [B, D, T]`` and ``weight [D, W]``."""
    x = hidden_states.transpose(1, 2)
    cu_seqlens = seq_idx.cu_seqlens if isinstance(seq_idx, _Bounds) else _given_bounds(kwargs)
    if cu_seqlens is None and isinstance(seq_idx, Tensor):
        y = _convolved_by_index(x, weight, bias, seq_idx)
    else:
        fused = activation in ("silu", "swish")
        y, _ = causal_conv1d(x, weight, bias, "silu" if fused else None, cu_seqlens=cu_seqlens)
        activation = None if fused else activation
    return _activated(y, activation).transpose(1, 2)


def convolve_step(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """`causal_conv1d_update` of ``hidden_states [B, D, T]``, which writes to ``conv_state [B, D, L]``."""
    L, W = conv_state.shape[-1], weight.shape[-1]
    before = _unwritten(conv_state) if L == W else torch.nn.functional.pad(conv_state, (W - L, 0))
    fused = activation in ("silu", "swish")
    y, last = short_conv.update(hidden_states.transpose(1, 2), weight, bias, before, None, fused)
    if L != W:
        last = last[..., -L:] if L < W else torch.cat([conv_state, hidden_states], -1)[..., -L:]
    # The op widens the state that it has written in place. The compiler cancels that with `to`, and not with `copy_`.
    conv_state.copy_(last.to(conv_state.dtype))
    return _activated(y, None if fused else activation).transpose(1, 2)


def delta_rule(form: Callable[..., Any]) -> Callable[..., Any]:
    """The function of modeling files that stands for `form`, of the gated delta rule or of KDA."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return form(
            query, key, value, g, beta,
            initial_state=_unwritten(initial_state), output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=_bounds(kwargs),
        )  # fmt: skip

    return attention


def delta_rule_step(gate: str) -> Callable[..., Any]:
    """The function of modeling files for one token: `gate` is "g" for decays of heads, "gk" of channels."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        # The compiler makes one kernel for both gates, as they are stacked. Neither may be rounded for that.
        exact = g.shape == beta.shape and torch.promote_types(g.dtype, beta.dtype) == g.dtype
        if exact and torch.compiler.is_compiling():
            g, beta = torch.stack((g, beta.to(g.dtype))).unbind()
        given: Any = {gate: g, "initial_state": _unwritten(initial_state), "cu_seqlens": _bounds(kwargs)}
        inputs = delta_op.Inputs(query, key, value, beta, scale=query.shape[-1] ** -0.5, **given)
        o, state = delta_op.update(*inputs, int(use_qk_l2norm_in_kernel))
        return o, state if output_final_state else None

    return attention


def ssd(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | _Limited | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`mamba2_chunk_scan`."""
    D = D.D if isinstance(D, _Limited) else D  # `dt_limit` is the same limit
    return mamba_chunk_scan_combined(
        hidden_states, dt, A, B, C, chunk_size, D, z, dt_bias, _unwritten(initial_states), dt_softplus,
        (float(dt_limit[0]), float(dt_limit[1])), return_final_states, _bounds(kwargs),
    )  # fmt: skip


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | _Scanned | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`mamba_selective_scan` of ``hidden_states, dt [B, D, T]`` and ``B, C [B, S, T]``."""
    u, delta, B, C = (x.transpose(1, 2) for x in (hidden_states, dt, B, C))
    z = None if z is None else z.transpose(1, 2)
    dtype = u.dtype
    given = D if isinstance(D, _Scanned) else _Scanned(D)
    y = selective_scan_fn(
        u, delta, A, B.to(dtype), C.to(dtype), given.D, z, delta_bias, delta_softplus, return_last_state,
        _unwritten(given.initial_state), given.cu_seqlens,
    )  # fmt: skip
    if isinstance(y, tuple):
        return y[0].transpose(1, 2), y[1]
    return y.transpose(1, 2)


def state_space_step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | _Limited | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """`mamba2_selective_state_update` and `mamba_selective_state_update`, which write to `state`."""
    if isinstance(D, _Limited):
        dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
        dt = dt if dt_bias is None else dt + dt_bias
        dt = (torch.nn.functional.softplus(dt) if dt_softplus else dt).clamp(*D.step_limit)
        D, dt_bias, dt_softplus = D.D, None, False
    before = _unwritten(state)
    y, new = selective_state_update(before, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)
    state.copy_(new)
    return y


def no_fused_block(*_: Any, **__: Any) -> None:
    """Of the functions that compute a whole block in one: transformers then calls its parts."""


def lightning(
    forward: Callable[..., Any],
    layer: Any,
    cache: Any,
    /,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """MiniMax's lightning attention, in place of its forward: one op for its loops over blocks and over tokens.

    The state is where other models have theirs, in a layer of the cache for linear attention. In the list that
    transformers keeps it in for MiniMax, beams would not reorder it, and the cache would take this layer for one of
    softmax attention that has seen no token, and count positions and masks by it.
    """
    from transformers.models.minimax.modeling_minimax import apply_mask_to_padding_states

    from flacompose.integrations._cache import linear_layer

    qkv = layer.act_fn(layer.qkv_proj(hidden_states))
    qkv = apply_mask_to_padding_states(qkv, attention_mask)
    q, k, v = qkv.unflatten(-1, (layer.num_attention_heads, 3 * layer.head_dim)).split(layer.head_dim, -1)

    cached = None if cache is None else linear_layer(cache, layer.layer_idx, layer.num_hidden_layers)
    state = None if cached is None else cached.recurrent_states[0]
    attention = fused_recurrent_simple_gla if _is_step(hidden_states) else chunk_simple_gla
    o, state = attention(
        q, k, v, g_gamma=-layer.slope_rate.flatten(), scale=1.0,
        initial_state=state, output_final_state=True, cu_seqlens=_bounds(kwargs),
    )  # fmt: skip
    if cached is not None:
        cached.keep(state)

    o = layer.norm(o.flatten(2)) * torch.sigmoid(layer.output_gate(hidden_states))
    return layer.out_proj(o), state


def real_gated(
    forward: Callable[..., Any],
    layer: Any,
    cache: Any,
    /,
    input_states: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    *args: Any,
    layer_idx: int | None = None,
    tokens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """RecurrentGemma's recurrent block, in place of its forward: ops for its convolution and its loop over tokens.

    Its states are in a layer of the cache. In the module, where transformers keeps them, they are those of whatever the
    model read last, beams do not reorder them, and a prompt in pieces loses that of the convolution. `tokens` is 0 at
    pads, which transformers would read; between tokens and after them, the convolution reads them as zeros. A token at
    position 0 is not preceded by any, and neither is the first that is no pad, or the first of a packed sequence.
    """
    from flacompose.integrations._cache import recurrent_layer

    bounds, T = _bounds(kwargs), input_states.shape[1]
    cached = None if cache is None else recurrent_layer(cache, cast(int, layer_idx))
    conv, state = (None, None) if cached is None else (cached.conv_states[0], cached.recurrent_states[0])
    if position_ids is None:
        position_ids = torch.arange(T, device=input_states.device)[None]
    reset = (position_ids == 0).expand(input_states.shape[:2])
    x = layer.linear_x(input_states)
    if tokens is not None:
        is_token = tokens[:, -T:] != 0
        reset = is_token & (reset | ((tokens != 0).cumsum(1)[:, -T:] == 1))
        x = x.masked_fill(~is_token.unsqueeze(2), 0)
    if bounds is not None:
        first = torch.zeros(T + 1, dtype=torch.bool, device=x.device)
        reset = reset | first.index_fill(0, bounds[:-1].long(), True)[:T]

    weight, bias = layer.conv_1d.weight.squeeze(1), layer.conv_1d.bias
    x, conv = causal_conv1d(x, weight, bias, None, conv, output_final_state=True, cu_seqlens=bounds)
    unit = layer.rg_lru
    heads = x.unflatten(-1, (unit.num_attention_heads, -1))
    r, i = (
        (torch.einsum("bthd,hde->bthe", heads, weight) + bias).flatten(2)
        for weight, bias in (
            (unit.recurrent_gate_weight, unit.recurrent_gate_bias),
            (unit.input_gate_weight, unit.input_gate_bias),
        )
    )
    if tokens is not None:  # a pad leaves the state as it is
        r = r.masked_fill(~is_token.unsqueeze(2), -torch.inf)
    rg_lru = fused_recurrent_rg_lru if _is_step(x) else chunk_rg_lru
    o, state = rg_lru(x, r, i, unit.recurrent_param, reset, state, output_final_state=True, cu_seqlens=bounds)
    if cached is not None:
        assert state is not None
        cached.keep(state, conv)
    return layer.linear_out(o * layer.act_fn(layer.linear_y(input_states))), None


def weighted(
    forward: Callable[..., Any],
    layer: Any,
    _: Any,
    /,
    hidden: Tensor,
    state: list[Tensor] | None = None,
    use_cache: bool | None = False,
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor] | None]:
    """RWKV's time mixing, in place of its forward: an op for its loop over tokens.

    Its states are where transformers keeps them. With these, transformers mixes a single token of each row with the
    tokens before it of all rows.
    """
    mixed, x, pads, bounds = _shifting(layer, hidden, state, 1, kwargs)
    r, k, v, _ = type(layer).extract_key_value(mixed, x)
    if pads is not None:
        k = k.masked_fill(pads, max(-1e9, torch.finfo(k.dtype).min))  # any key of a token outweighs it
    # Copies of the states, which are written to below, so that a backward finds what it needs.
    before: Any = None if state is None else tuple(s[:, :, layer.layer_id].clone() for s in state[2:])
    wkv = fused_recurrent_rwkv4 if _is_step(hidden) else chunk_rwkv4
    o, after = wkv(-layer.time_decay.exp(), layer.time_first, k, v, before, state is not None, bounds)
    if state is not None and after is not None:
        for kept, new in zip(state[2:], after, strict=True):
            kept[:, :, layer.layer_id] = new
    return layer.output(r * o), state


def shifting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of RWKV's channel mixing, which would mix tokens with pads and with other sequences."""

    @wraps(forward)
    def shifting_forward(self: Any, hidden: Tensor, state: list[Tensor] | None = None, **kwargs: Any) -> Any:
        mixed, x, _, _ = _shifting(self, hidden, state, 0, kwargs)
        return forward(mixed, x)[0], state

    return shifting_forward


def _shifting(
    layer: Any, hidden: Tensor, state: list[Tensor] | None, index: int, kwargs: dict[str, Any]
) -> tuple[Any, Tensor, Tensor | None, Tensor | None]:
    """A layer of RWKV whose ``time_shift`` gives the token before each, and `hidden` with zeros where pads are.

    The token in front of a sequence is that which `state` has at `index`, or zeros. The last token is written there.
    The other two results are what is a pad, and the bounds of packed sequences, or None for each.
    """
    bounds, mask, pads = _bounds(kwargs), kwargs.get("attention_mask"), None
    if state is not None:
        _refuse_packed(kwargs)
    if mask is not None:
        pads = (mask[:, -hidden.shape[1] :] == 0).unsqueeze(2)
        hidden = hidden.masked_fill(pads, 0)
    before = None if state is None else state[index][:, :, layer.layer_id]
    shifted, last = token_shift(hidden, before, cu_seqlens=bounds)
    if state is not None:
        state[index][:, :, layer.layer_id] = last
    return _With(layer, time_shift=lambda _: shifted), hidden, pads, bounds


def stabilised(
    forward: Callable[..., Any],
    layer: Any,
    _: Any,
    /,
    x: Tensor,
    state: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the forward of xLSTM's layer with an op for its backend, which is a loop over chunks and tokens.

    Its state is a tuple of tensors of the cache, which the model writes to. Pads are neither written to it nor forget.
    """
    bounds, mask, T = _bounds(kwargs), kwargs.get("attention_mask"), x.shape[1]
    if state is not None:
        _refuse_packed(kwargs)
        heads = layer.config.num_heads
        expected = x.shape[0], heads, layer.qk_dim // heads, layer.v_dim // heads
        if tuple(state[0].shape) != expected:
            raise ValueError(
                f"the cache of an xLSTM must have states of shape {expected} here, got {tuple(state[0].shape)}; the "
                "xLSTMCache of transformers rounds up the sizes of heads: leave it out, and the model makes its own"
            )
        state = [_unwritten(part) for part in state]

    def backend(query: Tensor, key: Tensor, value: Tensor, igate: Tensor, fgate: Tensor, **_: Any) -> Any:
        q, k, v, i, f = (y.transpose(1, 2) for y in (query, key, value, igate, fgate))
        if mask is not None:
            pads = (mask[:, -T:] == 0).unsqueeze(2)
            i, f = i.masked_fill(pads, -torch.inf), f.masked_fill(pads, torch.inf)
        initial: Any = None if state is None else (*state[:2], state[2].squeeze(-1))
        mlstm: Any = fused_recurrent_mlstm if _is_step(x) else chunk_mlstm
        o, (C, n, m) = mlstm(
            q, k, v, i, f,
            initial_state=initial, output_final_state=True, cu_seqlens=bounds, eps=layer.config.eps,
        )  # fmt: skip
        return o.transpose(1, 2), (C, n, m.unsqueeze(-1))

    return forward(_With(layer, mlstm_backend=backend), x, state, *args)


class _With:
    """A module that has some attributes unlike its own."""

    forward = None  # where transformers asks whether its wrapper for checkpoints is the outermost: it is further out

    def __init__(self, module: Any, **attributes: Any) -> None:
        object.__setattr__(self, "_module", module)
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    # Transformers records hidden states by the class of a model, and notes in the model that it does.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._module.__class__ if vars(self) else _With  # where Dynamo traces it, it is empty

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def grouped(forward: Callable[..., Any], layer: Any, _: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a layer of the gated delta rule, which then leaves queries and keys as they are.

    It reads ``num_v_heads`` for one purpose: to repeat them for each value head. The op takes groups of value heads.
    """
    return forward(_With(layer, num_v_heads=layer.num_k_heads, **_projections(layer)), *args, **kwargs)


def projected(forward: Callable[..., Any], layer: Any, _: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a layer whose projections may be joined."""
    return forward(_With(layer, **_projections(layer)), *args, **kwargs)


def joined(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module beside recurrent layers whose projections may be joined."""

    @wraps(forward)
    def joined_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = _projections(self)
        return forward(_With(self, **given) if given else self, *args, **kwargs)

    return joined_forward


def _projections(layer: Any) -> dict[str, Any]:
    """What stands in for the projections that `join_projections` has joined, for one call of the layer's forward.

    The first that is called computes all of them: a forward calls them with the same input.
    """
    parts: list[Tensor] = []

    def part(i: int, x: Tensor) -> Tensor:
        if not parts:
            parts.extend(layer.joint_proj(x).split(layer.joint_sizes, -1))
        return parts[i]

    names = joined_paths(layer) if getattr(layer, "joint_sizes", ()) else []
    return {name: partial(part, i) for i, name in enumerate(names)}


def unchanged(forward: Callable[..., Any], layer: Any, _: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a layer that needs nothing but the functions that it calls replaced."""
    return forward(layer, *args, **kwargs)


def checked(call: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in for the forward of a layer: `call` is given it, the layer, the cache or None, and the arguments.

    It refuses what a cache cannot have, before it writes to that: packed sequences, and a record of the past, by which
    `Cache.crop` would take tokens back out of the convolution's state and leave that of the recurrence as it is.
    """
    cache_in = finder_of_caches()

    @wraps(forward)
    def checked_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = cache_in(args, kwargs)
        if cache is None:
            return call(forward, self, None, *args, **kwargs)
        _refuse_packed(kwargs)
        index = kwargs["layer_idx"] if "layer_idx" in kwargs else self.layer_idx
        layer: Any = cache.layers[index] if index < len(cache.layers) else None
        if getattr(layer, "record_past", False) and any(layer.is_recurrent_states_initialized.values()):
            raise ValueError(
                f"the cache must not record the past (activate_past_recording) for a {type(self).__name__}, since no "
                "token can be taken back out of its recurrent state: copy the cache instead"
            )
        return call(forward, self, cache, *args, **kwargs)

    return checked_forward


def convolved_apart(forward: Callable[..., Any], layer: Any, _: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a layer that is a convolution and nothing else, which gives that `seq_idx` and no bounds."""
    bounds = _given_bounds(kwargs)
    if bounds is not None:
        kwargs = {key: x for key, x in kwargs.items() if key not in PACKED}
        kwargs["seq_idx"] = _Bounds(bounds)
    return forward(layer, *args, **kwargs)


def compressed(forward: Callable[..., Any], layer: Any, _: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of ZAYA's projection to queries, keys and values, which mixes tokens in three of its modules.

    The first, a convolution of each channel, is an op. The second mixes the channels of a head too, and the third gives
    the part of a value that the next token uses: packed sequences are kept apart in them here.
    """
    bounds, depthwise, heads = _bounds(kwargs), layer.conv_qk_depthwise, layer.conv_qk_grouped
    weight, bias = depthwise.weight.squeeze(1), depthwise.bias
    if bounds is None:

        def convolved(x: Tensor) -> Tensor:
            y, _ = causal_conv1d(x.mT, weight, bias)
            return y[:, weight.shape[1] - 1 :].mT  # the first tokens are those before the sequence

        return forward(_With(layer, conv_qk_depthwise=convolved), *args, **kwargs)

    kwargs = {key: x for key, x in kwargs.items() if key not in PACKED}

    def sequences(T: int) -> Tensor:
        """The number of each token's sequence."""
        return torch.searchsorted(bounds[1:], torch.arange(T, device=bounds.device), right=True)

    def convolved_packed(x: Tensor) -> Tensor:
        y, _ = causal_conv1d(x[..., layer.conv_kernel_size :].mT, weight, bias, cu_seqlens=bounds)
        return y.mT

    def of_heads(x: Tensor) -> Tensor:
        # What is before a sequence is, as in front of a row, the convolution of zeros, which is its bias.
        T, W = x.shape[-1], heads.weight.shape[-1]
        number, past = sequences(T), bias[:, None].expand(-1, W - 1)[None]
        history, numbers = torch.cat([past, x], -1), torch.nn.functional.pad(number, (W - 1, 0), value=-1)
        taps = [
            torch.nn.functional.conv1d(
                torch.where(numbers[w : w + T] == number, history[..., w : w + T], bias[:, None]),
                heads.weight[..., w : w + 1],
                heads.bias if w == 0 else None,
                groups=heads.groups,
            )
            for w in range(W)
        ]
        return torch.stack(taps).sum(0)

    def delayed(x: Tensor) -> Tensor:
        number = sequences(x.shape[1])
        ends = torch.nn.functional.pad(number[1:] != number[:-1], (0, 1), value=False)
        return layer.v_proj_delayed(x.masked_fill(ends[:, None], 0))

    modules = {"conv_qk_depthwise": convolved_packed, "conv_qk_grouped": of_heads, "v_proj_delayed": delayed}
    return forward(_With(layer, **modules), *args, **kwargs)


class _Bounds(NamedTuple):
    """The bounds of packed sequences, in place of the number of each token's sequence."""

    cu_seqlens: Tensor | None


class _Scanned:
    """`D` of a layer of Mamba, with which it calls nothing but its scan, and what it keeps from that."""

    def __init__(
        self, D: Tensor | None, cu_seqlens: Tensor | None = None, initial_state: Tensor | None = None
    ) -> None:
        self.D = D
        self.cu_seqlens = cu_seqlens
        self.initial_state = initial_state

    def __getitem__(self, head: int) -> _Scanned:
        state = None if self.initial_state is None else self.initial_state[:, head]
        return _Scanned(None if self.D is None else self.D[head], self.cu_seqlens, state)

    def float(self) -> _Scanned:
        return _Scanned(None if self.D is None else self.D.float(), self.cu_seqlens, self.initial_state)


def scanned(
    forward: Callable[..., Any], layer: Any, cache: Any, /, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Call the forward of a layer of Mamba, whose scan then gets bounds of packed sequences, and the cached state."""
    bounds, state, T = _bounds(kwargs), None, hidden_states.shape[1]
    mask = kwargs.get("attention_mask")
    if cache is not None and cache.has_previous_state(layer.layer_idx):
        state = cache.layers[layer.layer_idx].recurrent_states[0]
        if mask is not None:
            kwargs["attention_mask"] = mask[:, -T:]  # Mamba gives that of the cached tokens too
    if bounds is not None:
        kwargs["seq_idx"] = _Bounds(bounds)  # Zamba's convolution gets nothing else
    # One token goes through the function for steps, which gets the state.
    if bounds is not None or (state is not None and T > 1):
        layer = _With(layer, D=_Scanned(layer.D, bounds, state))
    return forward(layer, hidden_states, *args, **kwargs)


class _Limited:
    """`D` of a layer of Mamba-2, and the limits of its time steps."""

    def __init__(self, D: Tensor, step_limit: tuple[float, float]) -> None:
        self.D = D
        self.step_limit = step_limit

    def __getitem__(self, index: Any) -> _Limited:
        return _Limited(self.D[index], self.step_limit)

    def expand(self, *shape: int) -> _Limited:
        return _Limited(self.D.expand(*shape), self.step_limit)


def limited(forward: Callable[..., Any], layer: Any, cache: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a layer of Mamba-2, whose steps of decoding then keep within its limits of time steps.

    Transformers does not limit the step of a single token, so decoding would differ from the whole sequence. `D` is
    what each of these layers gives to its function for steps.
    """

    if cache is not None and tuple(layer.time_step_limit) != (0.0, float("inf")):
        layer = _With(layer, D=_Limited(layer.D, layer.time_step_limit))
    return forward(layer, *args, **kwargs)


def maskless(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a decoder, which is then compiled without a mask if it is given nothing but whole sequences.

    PyTorch's softmax attention is causal by itself. Traced, transformers cannot see that there is no more to mask, and
    makes a mask of all pairs of tokens, with which no kernel leaves out those that it masks.
    """
    cache_in = finder_of_caches()

    @wraps(forward)
    def maskless_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [kwargs.get(key) for key in ("attention_mask", "position_ids", *PACKED)]
        whole = len(args) <= 1 and all(x is None for x in given) and cache_in((), kwargs) is None
        config = self.config
        by_itself = config._attn_implementation == "sdpa" and getattr(config, "is_causal", True)
        # An exported program may be called with one token and a cache where the example had several and none.
        if whole and by_itself and torch.compiler.is_compiling() and not is_exporting():
            kwargs["attention_mask"] = dict.fromkeys(config.layer_types)
        return forward(self, *args, **kwargs)

    return maskless_forward


def counting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of Bamba's decoder, which would number the tokens after a cache from 0 on."""
    cache_in = finder_of_caches()

    @wraps(forward)
    def counting_forward(
        self: nn.Module,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        cache, x = cache_in(args, kwargs), kwargs.get("inputs_embeds") if input_ids is None else input_ids
        if position_ids is None and cache is not None and x is not None:
            position_ids = cache.get_seq_length() + torch.arange(x.shape[1], device=x.device)[None]
        return forward(self, input_ids, attention_mask, position_ids, *args, **kwargs)

    return counting_forward


# What transformers calls a cache: "cache" in newer releases, which have the others still, as deprecated names.
CACHES = ("cache", "past_key_values", "cache_params", "state")


def making(
    make: Callable[[Any, Tensor], Any], in_training: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For the forward of a model that would make no cache, or one that its layers cannot use, where it is given none.

    `make` is given the model and its ids or embeddings, in training only if the model makes a cache then unasked.
    """

    def of(forward: Callable[..., Any]) -> Callable[..., Any]:
        _, *parameters = inspect.signature(forward).parameters.values()
        names, name = [x.name for x in parameters if x.kind is not x.VAR_KEYWORD], name_of_cache(forward)

        @wraps(forward)
        def making_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(**dict(zip(names, args, strict=False)), **kwargs)
            given = {key: x for key, x in given.items() if x is not None or key not in CACHES}
            x, use_cache = given.get("input_ids"), given.get("use_cache")
            x = given.get("inputs_embeds") if x is None else x
            if use_cache is None:
                use_cache = self.config.use_cache and (in_training or not self.training)
            checkpointed = self.training and self.gradient_checkpointing  # which transformers refuses a cache
            if use_cache and x is not None and not checkpointed and not given.keys() & {*CACHES}:
                given[name] = make(self, x)
            return forward(self, *args[len(names) :], **given)

        return making_forward

    return of


def name_of_cache(forward: Callable[..., Any]) -> str:
    """What a forward calls its cache, in the transformers that is there."""
    names = inspect.signature(forward).parameters
    return next(name for name in CACHES if name in names)


def _dtype_of_states(model: nn.Module, x: Tensor) -> torch.dtype:
    """That of the states of a model that is given ids or embeddings `x`."""
    return state_dtype(
        x.dtype if x.is_floating_point() else cast(Any, model).get_input_embeddings().weight.dtype
    )


def numbering(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of RecurrentGemma's decoder, whose recurrent blocks know neither their number nor what is a pad.

    It returns the cache, which that of transformers does not.
    """
    from transformers.cache_utils import DynamicCache
    from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPast

    cache_in, name = finder_of_caches(), name_of_cache(forward)

    @making(lambda model, _: DynamicCache(config=model.config))
    @wraps(forward)
    def numbering_forward(self: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        tokens = _tokens(attention_mask)
        layers = [
            partial(layer, layer_idx=i, tokens=tokens) if hasattr(layer.temporal_block, "rg_lru") else layer
            for i, layer in enumerate(self.layers)
        ]
        out = forward(_With(self, layers=layers), attention_mask=attention_mask, **kwargs)
        if torch.compiler.is_compiling() or not isinstance(out, BaseModelOutput):
            return out  # older releases bind methods to the cache, which the compiler cannot return
        return BaseModelOutputWithPast(**out, **{name: cache_in((), kwargs)})

    return numbering_forward


def returning(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of RecurrentGemma's language model, which would not return the cache that its decoder does."""
    from transformers.modeling_outputs import CausalLMOutput, CausalLMOutputWithPast

    name = name_of_cache(forward)

    @wraps(forward)
    def returning_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        caches = []

        def model(*args: Any, **kwargs: Any) -> Any:
            out = self.model(*args, **kwargs)
            caches.append(getattr(out, name, None))
            return out

        out = forward(_With(self, model=model), *args, **kwargs)
        return CausalLMOutputWithPast(**out, **{name: caches[0]}) if isinstance(out, CausalLMOutput) else out

    return returning_forward


class RwkvState(list[Tensor]):
    """The five states of RWKV, ``[B, D, layers]`` each, in a list as in transformers, whose rows beams can reorder."""

    def reorder_cache(self, rows: Tensor) -> None:
        self[:] = [x.index_select(0, rows) for x in self]


def rwkv_state(model: Any, x: Tensor) -> RwkvState:
    """What RWKV begins with: that of transformers has as many channels in all five states."""
    sizes = [model.config.hidden_size] * 2 + [model.config.attention_hidden_size] * 3
    wide = _dtype_of_states(model, x)
    dtypes = [model.get_input_embeddings().weight.dtype] * 2 + [wide] * 3
    state = RwkvState(
        [
            torch.zeros(x.shape[0], size, model.config.num_hidden_layers, dtype=dtype, device=x.device)
            for size, dtype in zip(sizes, dtypes, strict=True)
        ]
    )
    state[4] -= 1e30
    return state


def masking(
    *names: str, make: Callable[[Any, Tensor], Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For the forward of a module of RWKV, which calls modules of these names without the mask of pads and bounds.

    `make` is that of `making`, for the module that makes the states.
    """

    def of(forward: Callable[..., Any]) -> Callable[..., Any]:
        takes_mask = "attention_mask" in inspect.signature(forward).parameters

        @wraps(forward)
        def masking_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if takes_mask and len(args) > 1:
                kwargs["attention_mask"], args = args[1], (args[0], None, *args[2:])
            given = {
                key: kwargs.pop(key) for key in (*PACKED, "attention_mask") if kwargs.get(key) is not None
            }
            rescales = hasattr(self, "layers_are_rescaled") and self.layers_are_rescaled == self.training
            if rescales and self.config.rescale_every > 0 and is_exporting():
                raise ValueError(
                    "model must have been called once before it is exported, in evaluation or training as then, since "
                    f"the first call of an {type(self).__name__} changes its weights"
                )
            called = {name: _called_with(getattr(self, name), given) for name in names}
            out = forward(_With(self, **called), *args, **kwargs)
            if isinstance(getattr(out, "state", None), list):
                out.state = RwkvState(out.state)
            return out

        return masking_forward if make is None else making(make, in_training=False)(masking_forward)

    return of


def whole(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of xLSTM, which would take a long sequence in pieces, without gradients."""

    @wraps(forward)
    def whole_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = _With(self.config, max_inference_chunksize=sys.maxsize)
        return forward(_With(self, config=config), *args, **kwargs)

    return whole_forward


def remembering(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of xLSTM's decoder, which tells its blocks neither pads nor bounds, and whose cache has no beams."""
    from transformers.models.xlstm import modeling_xlstm

    if modeling_xlstm.external_xlstm:
        return forward  # the blocks are those of the package xlstm
    from flacompose.integrations._xlstm_cache import BeamCache

    told = whole(passing_to("blocks", keys=(*PACKED, "attention_mask"))(forward))

    @making(lambda model, x: BeamCache(model, x.shape[0], _dtype_of_states(model, x), x.device))
    @wraps(forward)
    def remembering_forward(self: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return told(self, attention_mask=_tokens(attention_mask), **kwargs)

    return remembering_forward


def refusing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module that mixes packed sequences."""

    @wraps(forward)
    def unpacked_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for key in PACKED:
            if kwargs.get(key) is not None:
                raise ValueError(
                    f"{key} must not be given to a {type(self).__name__}, which cannot keep sequences apart"
                )
        return forward(self, *args, **kwargs)

    return unpacked_forward


def passing_to(
    *names: str, keys: tuple[str, ...] = PACKED
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For the forward of a module that calls modules of these names without the bounds of packed sequences."""

    def of(forward: Callable[..., Any]) -> Callable[..., Any]:
        takes_any = inspect.getfullargspec(inspect.unwrap(forward)).varkw is not None

        @wraps(forward)
        def passing_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = {key: kwargs[key] for key in keys if kwargs.get(key) is not None}
            if not given:
                return forward(self, *args, **kwargs)
            called = {name: _called_with(getattr(self, name), given) for name in names if hasattr(self, name)}
            kwargs = kwargs if takes_any else {key: x for key, x in kwargs.items() if key not in given}
            return forward(_With(self, **called), *args, **kwargs)

        return passing_forward

    return of


def _unwritten(state: Any) -> Any:
    """A state of a cache, or a copy, which the op that reads it may keep for a backward: the cache is written to."""
    return state.clone() if state is not None and torch.is_grad_enabled() else state


def _is_step(x: Tensor) -> bool:
    """Whether there is one token of ``x [B, T, ...]``, as in decoding; across ranks it is one of many."""
    return x.shape[1] == 1 and sharing() is None


def finder_of_caches() -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """What finds the cache, or None, among the arguments of a forward, whatever transformers calls it."""
    from transformers.cache_utils import Cache

    def cache_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for x in (*args, *kwargs.values()):
            if isinstance(x, Cache):
                return x
        return None

    return cache_in


def _called_with(module: nn.Module, given: dict[str, Any]) -> Any:
    if isinstance(module, nn.ModuleList):
        return [partial(each, **given) for each in module]
    return partial(module, **given)


def _tokens(attention_mask: Any) -> Tensor | None:
    """``[B, T]``, 0 at pads, of a mask, or of one for each kind of layer, which `generate` of newer releases makes."""
    mask = attention_mask.get("linear_attention") if isinstance(attention_mask, dict) else attention_mask
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _refuse_packed(kwargs: dict[str, Any]) -> None:
    for key in PACKED:
        if kwargs.get(key) is not None:
            raise ValueError(f"{key} must come without a cache (use_cache=False), got one")


def _bounds(kwargs: dict[str, Any]) -> Tensor | None:
    """The bounds of packed sequences, or None if each row is one."""
    given = _given_bounds(kwargs)
    if given is None and kwargs.get("seq_idx") is not None:
        raise ValueError(
            "seq_idx must come with cu_seq_lens_q, the bounds of the packed sequences, got seq_idx alone"
        )
    return given


def _given_bounds(kwargs: dict[str, Any]) -> Tensor | None:
    given = kwargs.get("cu_seqlens")
    return kwargs.get("cu_seq_lens_q") if given is None else given


def _convolved_by_index(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor) -> Tensor:
    """The convolution where only ``seq_idx [B, T]``, the number of each token's sequence, tells sequences apart."""
    T, W = x.shape[1], weight.shape[1]
    if sharing() is not None:
        raise ValueError("seq_idx must come with cu_seq_lens_q across ranks, got seq_idx alone")
    if seq_idx.shape[1] != T:
        raise ValueError(f"seq_idx must have a number for each of {T} tokens, got {seq_idx.shape[1]}")
    dtype = torch.promote_types(x.dtype, torch.float32)
    history = torch.nn.functional.pad(x, (0, 0, W - 1, 0)).to(dtype)
    of_history = torch.nn.functional.pad(seq_idx, (W - 1, 0), value=-1)
    y = x.new_zeros((), dtype=dtype) if bias is None else bias.to(dtype)
    for w in range(W):
        same = (of_history[:, w : w + T] == seq_idx)[:, :, None]
        y = y + torch.where(same, history[:, w : w + T], 0) * weight[:, w]
    return y.to(x.dtype)


def _activated(y: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return y
    from transformers.activations import ACT2FN

    return ACT2FN[activation](y)
