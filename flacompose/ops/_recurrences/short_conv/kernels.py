"""Triton kernels of the short convolution: a loop over tokens with a window of inputs in registers.

The window of a token is the state after it: the last W inputs, its own input in the last column. A step drops
the first column and appends the next input, so each input is loaded once. The backward has such a window of the
gradients of the last W sums, and continues past the chunk until all tokens that read its last input are done.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._tiles.blocks import split_program


@triton.jit
def _bound(i, T, N, cu_seqlens):
    """The first token of part `i` of a packed row: parts 1 to N are the sequences, 0 and N + 1 are around them."""
    at = tl.load(cu_seqlens + i - 1, mask=(i > 0) & (i <= N + 1), other=0)
    return tl.where(i > N + 1, T, at)


@triton.jit
def _find_chunk(row, T, N, cu_seqlens, C: tl.constexpr):
    """The sequence of the chunk in `row`, its row in the batch, its first token and its end, and the chunk's start.

    Tokens are counted from the start of the row in the batch. Tokens of a packed row in no sequence have chunks
    of the sequences -1 and N. Part i of the row begins at chunk ``_bound(i) // C + i``.
    """
    if cu_seqlens is not None:
        # Binary search for the last part that begins at or before this chunk. It is between `i` and `after`.
        i = tl.zeros([], tl.int64)
        after = N + 2 + tl.zeros([], tl.int64)
        while after - i > 1:
            middle = (i + after) // 2
            begins = _bound(middle, T, N, cu_seqlens) // C + middle <= row
            i = tl.where(begins, middle, i)
            after = tl.where(begins, after, middle)
        begin = _bound(i, T, N, cu_seqlens)
        end = _bound(i + 1, T, N, cu_seqlens)
        n, b = i - 1, i * 0
        start = begin + (row - begin // C - i) * C
    else:
        n = row // tl.cdiv(T, C)
        b = n
        begin = n * 0
        end = tl.where(n < N, T + begin, 0)
        start = row % tl.cdiv(T, C) * C
    return n, b, begin, end, start


@triton.jit
def _columns(x, d, in_d, W: tl.constexpr):
    """The columns of ``x [D, W]``."""
    columns = ()
    for w in tl.static_range(W):
        columns += (tl.load(x + d * W + w, mask=in_d, other=0.0).to(tl.float32),)
    return columns


@triton.jit
def _zeros(W: tl.constexpr, BD: tl.constexpr):
    columns = ()
    for _ in tl.static_range(W):
        columns += (tl.zeros([BD], tl.float32),)
    return columns


@triton.jit
def _window(x, initial, token, begin, end, stride, d, in_d, W: tl.constexpr):
    """The window before `token`. Inputs before `begin` come from the state."""
    window = ()
    for w in tl.static_range(W):
        t = token - W + w
        column = tl.load(x + t * stride + d, mask=in_d & (t >= begin) & (t < end), other=0.0).to(tl.float32)
        if initial is not None:
            at_state = initial + (t - begin + W) + d * W
            column += tl.load(at_state, mask=in_d & (t < begin), other=0.0).to(tl.float32)
        window += (column,)
    return window


@triton.jit
def _inputs(x, token, end, stride, d, in_d, U: tl.constexpr):
    """The inputs of `U` tokens, loaded together so that the program waits once. They are zeros from `end` on."""
    inputs = ()
    for u in tl.static_range(U):
        at = x + (token + u) * stride + d
        inputs += (tl.load(at, mask=in_d & (token + u < end), other=0.0).to(tl.float32),)
    return inputs


@triton.jit
def _sum(window, weight, bias, W: tl.constexpr):
    total = bias
    for w in tl.static_range(W):
        total += window[w] * weight[w]
    return total


@triton.jit
def _sum_of_readers(window, weight, W: tl.constexpr):
    """The gradient of an input. The newest gradient in the window is of the token that reads it with column 0."""
    total = window[W - 1] * weight[0]
    for w in tl.static_range(1, W):
        total += window[W - 1 - w] * weight[w]
    return total


@triton.jit
def _d_sum(dy, window, weight, bias, W: tl.constexpr, SILU: tl.constexpr):
    """The gradient of a token's sum before the activation."""
    if SILU:
        a = _sum(window, weight, bias, W)
        s = tl.sigmoid(a)
        dy = dy * s * (1 + a * (1 - s))
    return dy


@triton.jit
def _store_zeros(y, start, stop, d, in_d, D: tl.constexpr, BD: tl.constexpr):
    """Stores zeros for the tokens of a chunk that are in no sequence."""
    for t in tl.range(start, stop):
        tl.store(y + t * D + d, tl.zeros([BD], y.dtype.element_ty), mask=in_d)


@triton.jit(do_not_specialize=["T", "N"])
def short_conv_kernel(
    x,  # [B, T, D], with the strides `x_row`, `x_token` and 1
    weight,  # [D, W]
    bias,  # [D]
    initial,  # [N, D, W]
    y,  # [B, T, D]
    final,  # [N, D, W]
    cu_seqlens,
    T,
    N,
    x_row,
    x_token,
    D: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    U: tl.constexpr,
    BD: tl.constexpr,
    SILU: tl.constexpr,
):
    """``y_t = act(bias + sum_w weight_w * x_{t-W+1+w})``. One program per chunk and tile of channels.

    It loads `U` tokens at a time. The program of the last chunk of a sequence stores the final state; an empty
    sequence has a chunk without tokens.
    """
    tile, _, row = split_program(tl.cdiv(D, BD), 1)
    d = (tile * BD).to(tl.int32) + tl.arange(0, BD)
    in_d = d < D
    n, b, begin, end, start = _find_chunk(row, T, N, cu_seqlens, C)
    x += b * x_row
    y += b * T * D
    stop = tl.minimum(start + C, end)
    if (n < 0) | (n == N):
        _store_zeros(y, start, stop, d, in_d, D, BD)
        return
    if initial is not None:
        initial += n * D * W

    # 1. The weight, and the window before the chunk.
    columns = _columns(weight, d, in_d, W)
    bias_ = tl.zeros([BD], tl.float32)
    if bias is not None:
        bias_ = tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)
    window = _window(x, initial, start, begin, end, x_token, d, in_d, W)
    # 2. Loop over the tokens.
    for t in tl.range(start, stop, U):
        inputs = _inputs(x, t, stop, x_token, d, in_d, U)
        for u in tl.static_range(U):
            window = window[1:] + (inputs[u],)
            y_ = _sum(window, columns, bias_, W)
            if SILU:
                y_ *= tl.sigmoid(y_)
            tl.store(y + (t + u) * D + d, y_.to(y.dtype.element_ty), mask=in_d & (t + u < stop))

    # 3. The final state is the window after the last token.
    if (stop == end) & ((start < end) | (start == begin)):
        window = _window(x, initial, end, begin, end, x_token, d, in_d, W)
        for w in tl.static_range(W):
            tl.store(final + n * D * W + w + d * W, window[w], mask=in_d)


@triton.jit(do_not_specialize=["T", "N"])
def short_conv_gradient_kernel(
    x,  # [B, T, D], with the strides `x_row`, `x_token` and 1
    weight,  # [D, W]
    bias,  # [D]
    initial,  # [N, D, W]
    dy,  # [B, T, D], with the strides `dy_row`, `dy_token` and 1
    d_final,  # [N, D, W]
    dx,  # [B, T, D]
    d_weight,  # [chunks, W, D]: the sum over the tokens of each chunk
    d_bias,  # [chunks, D], likewise
    d_initial,  # [N, D, W]
    cu_seqlens,
    T,
    N,
    x_row,
    x_token,
    dy_row,
    dy_token,
    D: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    U: tl.constexpr,
    BD: tl.constexpr,
    SILU: tl.constexpr,
):
    """Fills the gradients that are not None. One program per chunk and tile of channels, `U` tokens at a time.

    With the gradient ``da_t`` of a token's sum, ``dx_p = sum_w weight_w * da_{p+W-1-w}``. The last inputs of a
    sequence also get the gradient of the final state. The program of the first chunk stores `d_initial`.
    """
    tile, _, row = split_program(tl.cdiv(D, BD), 1)
    d = (tile * BD).to(tl.int32) + tl.arange(0, BD)
    in_d = d < D
    n, b, begin, end, start = _find_chunk(row, T, N, cu_seqlens, C)
    x += b * x_row
    dy += b * dy_row
    inside = (n >= 0) & (n < N)
    if dx is not None:
        dx += b * T * D
        if not inside:
            _store_zeros(dx, start, tl.minimum(start + C, end), d, in_d, D, BD)
    end = tl.where(inside, end, start)
    if initial is not None:
        initial += n * D * W
    if d_final is not None:
        d_final += n * D * W

    # 1. The weight, and the window before the chunk.
    stop = tl.minimum(start + C, end)
    columns = _columns(weight, d, in_d, W)
    bias_ = tl.zeros([BD], tl.float32)
    if bias is not None:
        bias_ = tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)
    # The tokens from `stop` to `readers` read the last inputs of the chunk.
    readers = tl.minimum(stop + W - 1, end)
    d_columns = _zeros(W, BD)
    d_bias_ = tl.zeros([BD], tl.float32)
    window = _window(x, initial, start, begin, end, x_token, d, in_d & inside, W)
    d_window = _zeros(W, BD)
    # 2. Loop over the tokens of the chunk, and over later tokens that read its last inputs.
    for t in tl.range(start, stop if dx is None else stop + W - 1, U):
        inputs = _inputs(x, t, readers, x_token, d, in_d, U)
        dys = _inputs(dy, t, readers, dy_token, d, in_d, U)
        for u in tl.static_range(U):
            window = window[1:] + (inputs[u],)
            da = _d_sum(dys[u], window, columns, bias_, W, SILU)
            da = tl.where(t + u < readers, da, 0.0)
            own = tl.where(t + u < stop, da, 0.0)
            if d_weight is not None:
                sums = ()
                for w in tl.static_range(W):
                    sums += (d_columns[w] + own * window[w],)
                d_columns = sums
            if d_bias is not None:
                d_bias_ += own
            if dx is not None:
                d_window = d_window[1:] + (da,)
                p = t + u - (W - 1)
                dx_ = _sum_of_readers(d_window, columns, W)
                if d_final is not None:
                    in_final = (p >= tl.maximum(end - W, start)) & (p < end)
                    at_final = d_final + (p - end + W) + d * W
                    dx_ += tl.load(at_final, mask=in_d & in_final, other=0.0).to(tl.float32)
                tl.store(dx + p * D + d, dx_.to(dx.dtype.element_ty), mask=in_d & (p >= start) & (p < stop))

    # 3. The sums over the chunk.
    if d_weight is not None:
        for w in tl.static_range(W):
            tl.store(d_weight + (row * W + w) * D + d, d_columns[w], mask=in_d)
    if d_bias is not None:
        tl.store(d_bias + row * D + d, d_bias_, mask=in_d)
    # 4. The gradient of the initial state, which the first tokens of the sequence read.
    if d_initial is not None:
        if inside & (start == begin):
            window = _window(x, initial, begin, begin, end, x_token, d, in_d, W)
            d_window = _zeros(W, BD)
            for w in tl.static_range(W):
                # The last token that reads column w of the state. None reads column 0.
                if w > 0:
                    t = begin + w - 1
                    inputs = _inputs(x, t, end, x_token, d, in_d, 1)
                    dys = _inputs(dy, t, end, dy_token, d, in_d, 1)
                    window = window[1:] + inputs
                    da = _d_sum(dys[0], window, columns, bias_, W, SILU)
                    d_window = d_window[1:] + (tl.where(t < end, da, 0.0),)
                d_state = _sum_of_readers(d_window, columns, W)
                if d_final is not None:
                    in_final = w >= end - begin
                    at_final = d_final + (w - (end - begin)) + d * W
                    d_state += tl.load(at_final, mask=in_d & in_final, other=0.0).to(tl.float32)
                at_state = d_initial + n * D * W + w + d * W
                tl.store(at_state, d_state.to(d_initial.dtype.element_ty), mask=in_d)
