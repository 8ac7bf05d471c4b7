"""The sweeps forwards and backwards in time in one launch, for a backward pass whose programs are few."""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops.families.delta_rule.kernels import reverse_kernel, sweep_kernel


@triton.jit(do_not_specialize=["T", "N", "HK", "HV", "SEGMENTS", "scale"])
def two_way_kernel(
    # The parameters of both kernels, with the same meanings.
    q,
    k,
    v,
    do,
    sums,
    rest,
    total,
    W,
    b,
    P,
    Y,
    growth,
    initial,
    d_final,
    r,
    states,
    dv,
    du,
    d_states,
    d_initial,
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
    RESTARTS: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Fills `r` and `states` forwards in time, and what is given of the gradients backwards.

    The grid has a second axis, of size 2: the first programs of each segment are those of `sweep_kernel`, and the
    second those of `reverse_kernel`, none of which waits for another.
    """
    if tl.program_id(1) == 0:
        sweep_kernel(
            q,
            k,
            v,
            sums,
            rest,
            total,
            W,
            b,
            None,
            Y,
            growth,
            initial,
            None,
            r,
            states,
            None,
            None,
            cu_seqlens,
            T,
            N,
            scale,
            HK,
            HV,
            SEGMENTS,
            v_token,
            K,
            V,
            C,
            BK,
            BV,
            False,
            RESTARTS,
            READ_BEFORE,
            DOT,
        )
    else:
        reverse_kernel(
            q,
            k,
            do,
            sums,
            rest,
            total,
            W,
            b,
            P,
            growth,
            d_final,
            dv,
            du,
            d_states,
            None,
            d_initial,
            cu_seqlens,
            T,
            N,
            scale,
            HK,
            HV,
            SEGMENTS,
            K,
            V,
            C,
            BK,
            BV,
            RESTARTS,
            READ_BEFORE,
            DOT,
        )
