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
    log_norm,
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
    WARM_STARTS: tl.constexpr,
    READ_BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Fills `r` and `states` forwards in time, and the given ones of the gradients backwards in time.

    The grid has a second axis of size 2: the first half are programs of `delta_state_passing_kernel`, the second half
    programs of `delta_backward_state_passing_kernel`. No program waits for another.
    """
    if tl.program_id(1) == 0:
        delta_state_passing_kernel(
            q=q,
            k=k,
            v=v,
            sums=sums,
            rest=rest,
            total=total,
            W=W,
            b=b,
            P=None,
            Y=Y,
            log_norm=log_norm,
            initial=initial,
            o=None,
            r=r,
            states=states,
            ends=None,
            final=None,
            cu_seqlens=cu_seqlens,
            T=T,
            N=N,
            scale=scale,
            HK=HK,
            HV=HV,
            SEGMENTS=SEGMENTS,
            v_token=v_token,
            K=K,
            V=V,
            C=C,
            BK=BK,
            BV=BV,
            IDENTITY=False,
            WARM_STARTS=WARM_STARTS,
            READ_BEFORE=READ_BEFORE,
            DOT=DOT,
        )
    else:
        delta_backward_state_passing_kernel(
            q=q,
            k=k,
            do=do,
            sums=sums,
            rest=rest,
            total=total,
            W=W,
            b=b,
            P=P,
            log_norm=log_norm,
            d_final=d_final,
            dv=dv,
            du=du,
            d_states=d_states,
            ends=None,
            d_initial=d_initial,
            cu_seqlens=cu_seqlens,
            T=T,
            N=N,
            scale=scale,
            HK=HK,
            HV=HV,
            SEGMENTS=SEGMENTS,
            K=K,
            V=V,
            C=C,
            BK=BK,
            BV=BV,
            WARM_STARTS=WARM_STARTS,
            READ_BEFORE=READ_BEFORE,
            DOT=DOT,
        )
