"""The Triton kernel that joins the transitions of segments, for states whose numbers decay independently."""

from __future__ import annotations

import triton
import triton.language as tl

from flacompose.ops._tiles.blocks import decayed, finite, split_program


@triton.jit(do_not_specialize=["N", "H", "SEGMENTS"])
def decay_join_kernel(
    states,  # [SEGMENTS, N, H, K, V]: in, the end of each segment from zero; out, the state before it
    g,  # [SEGMENTS, N, H], the sums of its gates
    gk,  # [SEGMENTS, N, H, K]
    gv,  # [SEGMENTS, N, H, V]
    rates,  # [K, V], factors of the gates
    initial,  # [N, H, K, V]
    N,
    H,
    SEGMENTS,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``S <- exp((g + gk + gv) rates) * S + end`` from segment to segment; the state before each replaces its end."""
    tile, nh, _ = split_program(tl.cdiv(K * V, BLOCK), N * H)
    i = tile.to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    in_state = i < K * V
    S = tl.zeros([BLOCK], dtype=tl.float32)
    if initial is not None:
        S += tl.load(initial + nh * K * V + i, mask=in_state, other=0.0).to(tl.float32)
    if rates is not None:
        rate = finite(tl.load(rates + i, mask=in_state, other=0.0).to(tl.float32))
    for segment in tl.range(0, SEGMENTS, num_stages=4):
        row = segment * N * H + nh
        end = tl.load(states + row * K * V + i, mask=in_state, other=0.0)
        tl.store(states + row * K * V + i, S, mask=in_state)
        gate = tl.zeros([BLOCK], dtype=tl.float32)
        if g is not None:
            gate += tl.load(g + row)
        if gk is not None:
            gate += tl.load(gk + row * K + i // V, mask=in_state, other=0.0)
        if gv is not None:
            gate += tl.load(gv + row * V + i % V, mask=in_state, other=0.0)
        if rates is not None:
            gate *= rate
        # A segment without tokens leaves every bit of the state as it is, also in numbers that are not
        # finite.
        S = tl.where((gate == 0.0) & (end == 0.0), S, decayed(S, gate) + end)
