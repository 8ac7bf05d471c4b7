"""Gates of channels in a chunk: their local sums, and the test of whether their decays are factorisable.

At level l, tokens of neighbouring blocks of 2^l are paired, by a mask. The sums of gates within these blocks are a
product with a matrix of 0 and 1. The gates of a chunk are factorisable if float32 can hold two factors of the decay
between any two tokens: from the earlier one to the chunk's middle, and from there to the later one. One of them may
exceed 1; `FACTORISABLE_BOUND` bounds their exponents. One product then contains all pairs, without levels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._tiles.blocks import clamp_gate, fine_dot, load_tile

C = tl.constexpr(64)  # tokens of a chunk
LEVELS = tl.constexpr(6)  # levels of blocks in a chunk
BLOCK = tl.constexpr(16)  # tokens of a block whose pairs one product may hold
BLOCK_LEVELS = tl.constexpr(4)  # levels of smaller blocks in it
# Leaves room in float32 for products of queries, keys, values and their gradients from 1e-18 to 1e18.
FACTORISABLE_BOUND = tl.constexpr(45.0)
LEAST_KEPT = tl.constexpr(0.05)  # about exp(-3)


@triton.jit
def load_clamped_gates(g, token, end, h, d, H, D):
    return clamp_gate(load_tile(g, token, end, h, d, H, D)).to(g.dtype.element_ty)


@triton.jit
def select(choice, x, DOT: tl.constexpr):
    """``choice @ x`` for a matrix of 0 and 1 (and -1), `x` to at least 16 bits."""
    if x.dtype != tl.float32:
        out = tl.dot(choice.to(x.dtype), x)
    elif DOT == tl.float32:
        out = tl.dot(choice.to(tl.float32), x, input_precision="tf32x3")
    else:
        high = x.to(DOT)
        low = (x - high.to(tl.float32)).to(DOT)
        out = tl.dot(choice.to(DOT), high, acc=tl.dot(choice.to(DOT), low))
    return out


@triton.jit
def tf32_rounded(x, DOT: tl.constexpr):
    """`x`, rounded to the 11 bits that a TF32 product keeps; the hardware would truncate it."""
    if DOT == tl.float32:
        out = x
    else:
        rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        out = tl.where(x == x, rounded, x)  # the sum wraps for a NaN
    return out


@triton.jit
def rounded_dot(a, b, DOT: tl.constexpr):
    """``a @ b`` for float32 factors from `tf32_rounded`."""
    return tl.dot(a, b, input_precision="tf32x3" if DOT == tl.float32 else "tf32")


@triton.jit
def reads_gate(t, j, READ_BEFORE: tl.constexpr):
    """Whether the gate of token `j` lies between the start of a block and the read of token `t` in it."""
    if READ_BEFORE:
        return j < t
    return j <= t


@triton.jit
def in_local_sum(t, j, level, READ_BEFORE: tl.constexpr):
    """Whether gate `j` is in the local sum of token `t`: from its block's start if odd, to its block's end if even."""
    # Every term depends on `level`: otherwise the compiler would keep it in registers across the levels.
    in_t = t & ((1 << level) - 1)
    in_j = j & ((1 << level) - 1)
    odd = ((t >> level) & 1) == 1
    return ((t >> level) == (j >> level)) & tl.where(odd, reads_gate(in_t, in_j, READ_BEFORE), in_j > in_t)


@triton.jit
def siblings(t, s, level):
    """Whether `t` and `s` are in sibling blocks, so that one of them is the reader and the other the writer."""
    return ((t >> level) ^ (s >> level)) == 1


@triton.jit
def from_middle(t, j):
    """The sign of gate `j` in the sum from the chunk's middle to the write of token `t`, and 0 if it is not in it."""
    late = t >= C // 2
    inside = late == (j >= C // 2)
    return tl.where(inside & (late == (t >= j)), tl.where(late, 1.0, -1.0), 0.0)


@triton.jit
def from_block_middle(t, j):
    """`from_middle`, with the middle of a token's block of 16 in place of the chunk's."""
    late = t % BLOCK >= BLOCK // 2
    inside = t // (BLOCK // 2) == j // (BLOCK // 2)
    return tl.where(inside & (late == (t >= j)), tl.where(late, 1.0, -1.0), 0.0)


@triton.jit
def in_same_block(t, s):
    """Whether two tokens are in the same block of 16."""
    return t // BLOCK == s // BLOCK


@triton.jit
def middle_sums(g, t, s, READ_BEFORE: tl.constexpr, DOT: tl.constexpr):
    """The sums of gates from the chunk's middle to each write and to each read."""
    write = select(from_middle(t, s), g, DOT)
    read = write
    if READ_BEFORE:
        # A read stops before the token's gate. The difference is used only where both sums are below
        # `FACTORISABLE_BOUND`.
        read = write - g.to(tl.float32)
    return write, read


@triton.jit
def size_of_sums(write, read):
    """The size of the sums of gates. Gates are factorisable if all sizes are below `FACTORISABLE_BOUND`."""
    return tl.maximum(tl.abs(write), tl.abs(read))


@triton.jit
def scaled_gate_size(g, DOT: tl.constexpr):
    """The size of each gate, scaled so that its bound, 4 or in bfloat16 8, becomes `FACTORISABLE_BOUND`.

    Channel decay and low rank test it where the gradient of gates is wanted, the delta rule always but for the factors
    of blocks on Hopper.

    The gradient of a gate below -4, or -8 where products are rounded to bfloat16, would be lost in the rounding
    errors of the pairs that the gate does not decay.
    """
    return tl.abs(g.to(tl.float32)) * (FACTORISABLE_BOUND / (4.0 if DOT == tl.float32 else 8.0))


@triton.jit
def has_bounded_means(g, inside):
    """Whether gates are factorisable for their gradient in bfloat16 although `scaled_gate_size` exceeds the bound.

    The error of a gate's gradient is measured relative to the gradients of all gates. A single gate may
    therefore be as strong as the sums allow if the decays have a mean of at least `LEAST_KEPT`, for each
    token over the channels and for each channel over the tokens. If instead all gates of a token or of a channel
    are strong, there may be no gate whose gradient is large beside the error. `inside` distinguishes gates from
    padding.
    """
    margin = tl.where(inside, tl.exp(g.to(tl.float32)) - LEAST_KEPT, 0.0)
    least = tl.minimum(tl.min(tl.sum(margin, 1)), tl.min(tl.sum(margin, 0)))
    return least >= 0.0


@triton.jit
def exact_pairs(a, b, g, t, s, READ_BEFORE: tl.constexpr, DOT: tl.constexpr):
    """``a_t . b_s`` for each reader `t` and writer `s`, decayed by any gates, at ``[t, s]`` and at ``[s, t]``."""
    out = tl.where(t == s, tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)[:, None], 0.0)
    for level in range(LEVELS):
        role = tl.where(((t >> level) & 1) == 1, a, b)
        role = role * tl.exp(select(in_local_sum(t, s, level, READ_BEFORE), g, DOT))
        out += tl.where(siblings(t, s, level), fine_dot(role, tl.trans(role), DOT), 0.0)
    return out


@triton.jit
def factorisable_for_gradient(
    g, token, end, h, H, D, BD: tl.constexpr, READ_BEFORE: tl.constexpr, DOT: tl.constexpr
):
    """Whether a chunk's gates ``g [tokens, H, D]`` are factorisable by sums and by `has_bounded_means`."""
    i = tl.arange(0, C)
    is_factorisable = True
    for first in tl.range(0, D, BD, num_stages=1):
        d = first + tl.arange(0, BD)
        g_ = load_clamped_gates(g, token, end, h, d, H, D)
        write, read = middle_sums(g_, i[:, None], i[None, :], READ_BEFORE, DOT)
        by_sums = tl.max(size_of_sums(write, read)) < FACTORISABLE_BOUND
        is_factorisable = (
            is_factorisable & by_sums & has_bounded_means(g_, (token < end)[:, None] & (d < D)[None, :])
        )
    return is_factorisable
