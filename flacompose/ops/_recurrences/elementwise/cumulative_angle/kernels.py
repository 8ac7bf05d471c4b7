"""Triton kernels of the cumulative angle: scans in float64, tile by tile; states in radians."""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._tiles.blocks import find_sequence, split_program

PI = tl.constexpr(3.141592653589793)


@triton.jit
def tanh(x):
    """Exact to float32, also where it is small: a series there, and an exponential elsewhere."""
    z = x * x
    series = -5.37397155531e-2 + z * (2.06390887954e-2 - z * 5.70498872745e-3)
    series = x + x * z * (-3.33332819422e-1 + z * (1.33314422036e-1 + z * series))
    size = 1 - 2 / (tl.exp(2 * tl.abs(x)) + 1)
    return tl.where(tl.abs(x) < 0.625, series, tl.where(x < 0, -size, size))


@triton.jit
def _speed(x, dt, token, mask, in_tile, h, a, H, HV, A):
    """``tanh(x)`` of a tile, in float32, and ``dt [tokens, 1]``."""
    at = x + (token * H + h // (HV // H))[:, None] * A + a[None, :]
    speed = tanh(tl.load(at, mask=mask, other=0.0).to(tl.float32))
    return speed, tl.load(dt + token * HV + h, mask=in_tile, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _program(T, N, HV, A, cu_seqlens, C: tl.constexpr, BA: tl.constexpr):
    """This program's tile of angles, its head and sequence, and the sequence's first token and end."""
    tile, h, n = split_program(tl.cdiv(A, BA), HV)
    lo, hi, _ = find_sequence(n, T, cu_seqlens, C)
    return tile, h, n, lo, hi, (tile * BA).to(tl.int32) + tl.arange(0, BA)


@triton.jit
def _initial(x, at, in_a, BA: tl.constexpr):
    """The numbers at `at` in float64, or zeros."""
    state = tl.zeros([BA], tl.float64)
    if x is not None:
        state += tl.load(x + at, mask=in_a, other=0.0).to(tl.float64)
    return state


@triton.jit(do_not_specialize=["T", "N", "H", "HV"])
def cumulative_angle_kernel(
    x,  # [tokens, H, A]
    dt,  # [tokens, HV]
    initial,  # [N, HV, A]
    o,  # [tokens, HV, A]
    final,  # [N, HV, A]
    cu_seqlens,
    T,
    N,
    H,
    HV,
    A: tl.constexpr,
    C: tl.constexpr,
    BA: tl.constexpr,
):
    _, h, n, lo, hi, a = _program(T, N, HV, A, cu_seqlens, C, BA)
    in_a = a < A
    state = _initial(initial, (n * HV + h) * A + a, in_a, BA) / PI
    t = tl.arange(0, C)
    for start in range(lo, hi, C):
        token, in_tile = start + t, start + t < hi
        mask = in_tile[:, None] & in_a[None, :]
        speed, dt_ = _speed(x, dt, token, mask, in_tile, h, a, H, HV, A)
        total = state[None, :] + tl.cumsum((speed * dt_).to(tl.float64), 0)
        total -= 2 * tl.floor(0.5 * total + 0.5)
        tl.store(o + (token * HV + h)[:, None] * A + a[None, :], total.to(tl.float32), mask=mask)
        # Tokens past the end add nothing.
        state = tl.sum(tl.where((t == C - 1)[:, None], total, 0.0), 0)
    tl.store(final + (n * HV + h) * A + a, (state * PI).to(tl.float32), mask=in_a)


@triton.jit(do_not_specialize=["T", "N", "H", "HV"])
def cumulative_angle_gradient_kernel(
    x,  # [tokens, H, A]
    dt,  # [tokens, HV]
    do,  # [tokens, HV, A]
    d_final,  # [N, HV, A]
    dx,  # [tokens, HV, A], of each head of `dt`
    d_dt,  # [tiles, tokens, HV], the sum over the angles of each tile
    d_initial,  # [N, HV, A]
    cu_seqlens,
    T,
    N,
    H,
    HV,
    tokens,  # of all rows
    A: tl.constexpr,
    C: tl.constexpr,
    BA: tl.constexpr,
):
    """From the last token to the first: the gradient of a step is the sum of those of all later angles."""
    tile, h, n, lo, hi, a = _program(T, N, HV, A, cu_seqlens, C, BA)
    in_a = a < A
    state = _initial(d_final, (n * HV + h) * A + a, in_a, BA) * PI
    t = tl.arange(0, C)
    chunks = tl.cdiv(hi - lo, C)
    for i in range(chunks):
        token = lo + (chunks - 1 - i) * C + t
        in_tile = token < hi
        mask = in_tile[:, None] & in_a[None, :]
        at = (token * HV + h)[:, None] * A + a[None, :]
        speed, dt_ = _speed(x, dt, token, mask, in_tile, h, a, H, HV, A)
        do_ = tl.load(do + at, mask=mask, other=0.0).to(tl.float64)
        total = state[None, :] + tl.cumsum(do_, 0, reverse=True)
        state = tl.sum(tl.where((t == 0)[:, None], total, 0.0), 0)
        steps = total.to(tl.float32)
        if dx is not None:
            tl.store(dx + at, (steps * dt_ * (1 - speed * speed)).to(dx.dtype.element_ty), mask=mask)
        if d_dt is not None:
            of_tile = tl.sum(tl.where(mask, steps * speed, 0.0), 1)
            tl.store(d_dt + (tile * tokens + token) * HV + h, of_tile, mask=in_tile)
    if d_initial is not None:
        tl.store(d_initial + (n * HV + h) * A + a, (state / PI).to(d_initial.dtype.element_ty), mask=in_a)
