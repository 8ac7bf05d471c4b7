"""A long row in segments, which are swept at the same time, each from its own start.

A segment maps the state as a token and a chunk do: ``S_end = decay * S_start + end``. So a long row takes three steps.

- The sweep of a family, begun at zero, finds the `ends` of all segments, and the sums of their gates.
- `join` composes these maps to the state before each segment.
- The same sweep, begun there, gives what is wanted.

Backwards in time the map of a segment is the same, and segments are counted from the last.
"""

from __future__ import annotations

from torch import Tensor

from flacompose.ops._launching import launch
from flacompose.ops.families._join import join_kernel
from flacompose.ops.families._launch import tile_count

BLOCK = 256  # numbers of a state for a program


def join(
    ends: Tensor,
    initial: Tensor | None,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    rates: Tensor | None = None,
) -> Tensor:
    """The state before each segment, in the memory of `ends`, from the state before the first, zero if it is None.

    `ends` and the sums of gates are of `Sequences.per_segment`; those of the last segment are not used.

    Args:
        ends: ``[SEGMENTS, N, H, K, V]``, where an axis that a state has not is 1.
        initial: ``[N, H, K, V]``.
        g: ``[SEGMENTS, N, H]``, the sums of the gates of heads.
        gk: ``[SEGMENTS, N, H, K]``, of the channels of keys.
        gv: ``[SEGMENTS, N, H, V]``, of the channels of values.
        rates: ``[K, V]``, by which the sums of gates are multiplied.
    """
    segments, N, H, K, V = ends.shape
    launch(
        join_kernel,
        (tile_count(K * V, BLOCK) * N * H,),
        states=ends,
        g=g,
        gk=gk,
        gv=gv,
        rates=rates,
        initial=initial,
        N=N,
        H=H,
        SEGMENTS=segments - 1,
        K=K,
        V=V,
        BLOCK=BLOCK,
        num_warps=2,
    )
    return ends
