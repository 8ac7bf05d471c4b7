"""The tensors that kernels of the delta rule take together, as named tuples. Absent tensors are None."""

from __future__ import annotations

from typing import Any, NamedTuple


class KeyVectors(NamedTuple):
    q: Any  # [tokens, H, K]
    k: Any  # [tokens, H, K]
    a: Any  # [tokens, H, K], reading keys; `k` if it is None
    beta: Any  # [tokens, HV]


class GateSums(NamedTuple):
    """The running sums of gates of heads, from `head_gate_sum_kernel` of head decay."""

    sums: Any = None  # [chunks, HV, C]
    rest: Any = None  # [chunks, HV, C]


class WYFactors(NamedTuple):
    q_read: Any  # [tokens, HK, K], queries; where gates are of channels, `q_decayed`, and HK is HV
    k_read: Any  # [tokens, HK, K], reading keys; likewise `k_decayed`
    W: Any = None  # [tokens, HV, K], keys that write the errors of values
    b: Any = None  # [tokens, HV, K], keys that write the reads of `k_read`, in the low-rank recurrence
    P: Any = None  # [chunks, HV, C, C], transposed
    Y: Any = None  # [chunks, HV, C, C], transposed, in float32; or in bfloat16, if it is alone


class ChunkDecays(NamedTuple):
    sums: Any = None  # [chunks, HV, C], as in `GateSums`
    rest: Any = None  # [chunks, HV, C]
    chunk_decay: Any = None  # [chunks, HV, K], the decay of each chunk by gates of channels
    # [chunks, HV], the log-norm bound. With it, passes for `ends` skip chunks before which the state has decayed to 0.
    log_norm: Any = None


class PassedStates(NamedTuple):
    initial: Any = None  # [SEGMENTS, N, HV, K, V], before each segment
    states: Any = None  # [chunks, HV, K, V], before each chunk
    ends: Any = None  # [SEGMENTS, N, HV, K, V], after each segment
    final: Any = None  # [N, HV, K, V]


class PassedGradients(NamedTuple):
    """The gradients of states, which are passed backwards in time."""

    d_final: Any = None  # [SEGMENTS, N, HV, K, V], after each segment
    d_states: Any = None  # [chunks, HV, K, V], after each chunk
    ends: Any = None  # [SEGMENTS, N, HV, K, V], before each segment
    d_initial: Any = None  # [N, HV, K, V]


class ValueVectors(NamedTuple):
    do: Any  # [tokens, HV, V]
    r: Any  # [tokens, HV, V], the errors of values
    dv: Any  # [tokens, HV, V], where keys get gradients


class StoredPairs(NamedTuple):
    """The gradients of the products of queries (`d_qk`) and of reading keys (`d_ak`) with the writing keys."""

    pairs: Any  # [chunks, HV, 2, C, C]: `d_qk` and `d_ak`, without their diagonals
    diagonal: Any  # [chunks, HV, C]: the diagonal of `d_qk`


class KeyGradients(NamedTuple):
    dq: Any  # [tokens, HV, K], or [tokens, H, K] from `hopper_head_gradient_kernel`, like `dk` and `da`
    dk: Any
    da: Any  # with `a`
    dbeta: Any  # [tokens, tiles of K, HV], to be added up
