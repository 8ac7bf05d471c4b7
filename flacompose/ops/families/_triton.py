"""What the Triton kernels of all families are made of."""

from __future__ import annotations

import triton
import triton.language as tl

# exp of it is 0 in float32, so a sum that includes a gate at this bound weighs nothing, as -inf would.
LOWEST_GATE = tl.constexpr(-128.0)


@triton.jit
def load_tile(x, token, end, h, d, H, D):
    """Rows `token` of head `h` of ``x [tokens, H, D]``, zero from `end` on."""
    at = x + (token * H + h)[:, None] * D + d[None, :]
    return tl.load(at, mask=(token < end)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_tile(x, value, token, end, h, d, H, D):
    at = x + (token * H + h)[:, None] * D + d[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=(token < end)[:, None] & (d < D)[None, :])


@triton.jit
def dot(a, b, DOT: tl.constexpr):
    return tl.dot(a.to(DOT), b.to(DOT), input_precision="tf32x3")


@triton.jit
def split_dot(a, b, DOT: tl.constexpr, acc=None):
    """``acc + a @ b`` for float32 `a`, in two parts, and `b` of the inputs' dtype."""
    if DOT == tl.float32:
        out = tl.dot(a, b.to(tl.float32), acc=acc, input_precision="tf32x3")
    else:
        high = a.to(DOT)
        out = tl.dot(high, b, acc=tl.dot((a - high.to(tl.float32)).to(DOT), b, acc=acc))
    return out


@triton.jit
def dot_split(a, b, DOT: tl.constexpr, acc=None):
    """``acc + a @ b`` for `a` of the inputs' dtype and float32 `b`, in two parts."""
    if DOT == tl.float32:
        out = tl.dot(a.to(tl.float32), b, acc=acc, input_precision="tf32x3")
    else:
        high = b.to(DOT)
        out = tl.dot(a.to(DOT), high, acc=tl.dot(a.to(DOT), (b - high.to(tl.float32)).to(DOT), acc=acc))
    return out
