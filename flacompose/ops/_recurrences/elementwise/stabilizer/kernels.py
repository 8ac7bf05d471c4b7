"""Triton kernel of the running maximum, which stabilises exponential gates: a scan, tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._recurrences.elementwise.stabilizer import inputs
from flacompose.ops._tiles.blocks import find_sequence, split_program

LOWEST = tl.constexpr(inputs.LOWEST)


@triton.jit
def larger(a, b):
    """The maximum, which is NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _join(g, m, next_g, next_m):
    """Joins two spans of tokens, each given by the sum of its gates and by its maximum."""
    return g + next_g, larger(m + next_g, next_m)


@triton.jit
def _last_two(before, m, one, next_before, next_m, next_one):
    """Joins two spans of tokens, each given by its last two numbers.

    A span of `one` token has no second-last number of its own: it takes the last of the span before it.
    """
    return tl.where(next_one != 0, m, next_before), next_m, one * 0


@triton.jit(do_not_specialize=["T"])
def stabilizer_kernel(
    x,  # [tokens, D]
    g,  # [tokens, D]
    initial,  # [N, D]
    gates,  # [tokens, D]
    m,  # [tokens, D]
    final,  # [N, D]
    cu_seqlens,
    T,
    D: tl.constexpr,
    C: tl.constexpr,
    BD: tl.constexpr,
):
    """``m_t = max(g_t + m_{t-1}, x_t)``, ``gates_t = g_t + m_{t-1} - m_t``: a sequence, a tile of D."""
    tile, n, _ = split_program(tl.cdiv(D, BD), tl.num_programs(0))
    d = (tile * BD).to(tl.int32) + tl.arange(0, BD)[None, :]
    in_d = d < D
    lo, hi, _ = find_sequence(n, T, cu_seqlens, C)
    last = tl.zeros([1, BD], tl.float32)
    if initial is not None:
        last = larger(tl.load(initial + n * D + d, mask=in_d, other=0.0).to(tl.float32), LOWEST)
    t = tl.arange(0, C)[:, None]
    for start in range(lo, hi, C):
        size = tl.minimum(hi - start, C).to(tl.int32)
        mask = (t < size) & in_d
        at = start * D + t * D + d
        x_ = larger(tl.load(x + at, mask=mask, other=0.0).to(tl.float32), LOWEST)
        g_ = tl.load(g + at, mask=mask, other=0.0).to(tl.float32)
        decay, m_ = tl.associative_scan((g_, x_), 0, _join)
        m_ = larger(m_, decay + last)
        # Gates are differences of the stored numbers, which have been rounded once. Unused results have names
        # of their own: Triton 3.6 would take `_` for the number above, of another type.
        before, _m, _one = tl.associative_scan(
            (tl.broadcast_to(last, m_.shape), m_, tl.full(m_.shape, 1, tl.int32)), 0, _last_two
        )
        exact = g_.to(tl.float64) + (before.to(tl.float64) - m_.to(tl.float64))
        tl.store(gates + at, exact.to(tl.float32), mask=mask)
        tl.store(m + at, m_, mask=mask)
        last = tl.sum(tl.where(t == size - 1, m_, 0.0), 0)[None, :]
    tl.store(final + n * D + d, last, mask=in_d)
