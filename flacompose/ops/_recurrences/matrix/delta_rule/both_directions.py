"""State passing forwards and backwards in time in one launch, for a backward pass with few programs."""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._recurrences.matrix.delta_rule.kernels import (
    delta_backward_state_passing_kernel,
    delta_state_passing_kernel,
)


@triton.jit(do_not_specialize=["T", "N", "HK", "HV", "SEGMENTS", "scale"])
def delta_both_directions_kernel(
    # The parameters of both kernels, with the same meanings: `d_passed` are the `passed` gradients.
    factors,
    decays,
    passed,
    d_passed,
    v,
    do,
    r,
    dv,
    du,
    cu_seqlens,
    T,
    N,
    scale,
    HK,
    HV,
    SEGMENTS,
    v_token,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    WARM_STARTS: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Fills `r` and the states of `passed` forwards in time, and the given gradients backwards in time.

    The grid has a second axis of size 2: the first half are programs of `delta_state_passing_kernel`, the second half
    programs of `delta_backward_state_passing_kernel`. No program waits for another.
    """
    if tl.program_id(1) == 0:
        delta_state_passing_kernel(
            factors, decays, passed, v, None, r, cu_seqlens, T, N, scale, HK, HV, SEGMENTS, v_token,
            K, V, C, BK, BV, False, WARM_STARTS, READ_BEFORE, DOT,
        )  # fmt: skip
    else:
        delta_backward_state_passing_kernel(
            factors, decays, d_passed, do, dv, du, cu_seqlens, T, N, scale, HK, HV, SEGMENTS,
            K, V, C, BK, BV, WARM_STARTS, READ_BEFORE, DOT,
        )  # fmt: skip
