"""Chunks, block sizes, warps and pipeline stages of the kernels of head decay."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flacompose.ops._launch import sequences
from flacompose.ops._launch.chip import Chip
from flacompose.ops._launch.operands import block, tile_count
from flacompose.ops._recurrences.matrix.inputs import Inputs


class Plan(NamedTuple):
    """The choices of one call."""

    has_gate_gradients: bool  # of `g`, `g_gamma` or `beta`, from the state before each chunk
    fine: bool  # whether these states are float32, although the inputs are bfloat16
    step: int  # tokens of a step of state passing
    C: int  # tokens of a chunk
    parts: int  # of the heads of values that share queries and keys
    passing: tuple[dict[str, int], dict[str, int]]  # state passing, and with the state transposed
    gradient: dict[str, int]


def plan_of(inputs: Inputs, has_gate_gradients: bool = False, fine: bool = False) -> Plan:
    q, (HV, V) = inputs.q, inputs.v.shape[2:]
    chip, bfloat16, (H, K) = sequences.chip_of(q.device), q.dtype == torch.bfloat16, q.shape[2:]
    fine = fine and bfloat16
    gated = inputs.g is not None or inputs.g_gamma is not None or has_gate_gradients
    step = step_size(bfloat16, max(K, V), gated)
    C = chunk_size(bfloat16, step, has_gate_gradients, HV // H, K, V, fine)
    passing = tuple(state_passing_config(chip, bfloat16, step, *D) for D in ((K, V), (V, K)))
    gradient = gradient_config(chip, bfloat16, K, fine)
    return Plan(has_gate_gradients, fine, step, C, head_parts(HV // H), (passing[0], passing[1]), gradient)


def head_parts(group: int) -> int:
    """The number of parts of the heads of values that share queries and keys, each of at most 32 heads.

    A program has one part. If there are several, each has gradients of queries and keys of its own, in
    float32. Few parts save memory, and time too where there are enough chunks for a whole GPU. Their number
    must not depend on the batch size, since a row has the same bits in every batch.
    """
    return next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= 32)


def step_size(bfloat16: bool, D: int, gated: bool) -> int:
    """The number of tokens in one step of state passing; `D` is the larger head size.

    It is 64 where there is room: gates and larger states need registers, and the pipeline's operands 160 KiB.
    """
    return 32 if not bfloat16 or gated or D > 128 else 64


def chunk_size(
    bfloat16: bool, step: int, gate_gradient: bool, group: int, K: int, V: int, fine: bool = False
) -> int:
    """The number of tokens of a chunk. The gradient of gates needs the state before each chunk.

    With chunks of 64 tokens instead of 128, `head_decay_gradient_kernel` is faster, but a step of simple GLA takes a
    third more memory, since there are twice as many states. Where a group of heads of values shares keys, the
    gradients of keys need little memory, and where values are few beside keys, as in Mamba-3, states need
    little, so chunks of 64 are affordable. With more than 16 heads per program, as in Mamba-2, a step is fast
    enough even so, and chunks of 128 save more memory than they cost time. At most 64 keys, and states in
    float32 (`fine`), were not measured, and stay with 64.
    """
    if not gate_gradient:
        return step
    if group > 1:
        return 128 if bfloat16 and not fine and K > 64 and group // head_parts(group) > 16 else 64
    return 128 if bfloat16 and not V <= 64 < K else 64


def state_passing_config(chip: Chip, bfloat16: bool, C: int, D1: int, D2: int) -> dict[str, int]:
    """Block sizes of the contracted axis, of the other, and of the parts of the former; warps, pipeline stages.

    In bfloat16, tiles of the contracted axis have equal sizes, multiples of 64, so that there is little padding.
    """
    if not bfloat16:
        BD1, BD2 = block(D1, 256), 16 if D1 > 128 else 32
        return {"BD1": BD1, "BD2": BD2, "BP": min(BD1, 64), "num_warps": 4, "num_stages": 1}
    BD2 = 128 if C == 64 and D2 > 64 and not chip.is_small else 64
    BD1 = 64 * tile_count(D1, 64 * tile_count(D1, 256))
    stages = 2 if C == 64 and chip.is_small else 3
    return {"BD1": BD1, "BD2": BD2, "BP": 64, "num_warps": BD2 // 16, "num_stages": stages}


def gradient_config(chip: Chip, bfloat16: bool, K: int, fine: bool) -> dict[str, int]:
    """Tokens of a block, block sizes of the key axis and of the contracted value axis, warps and stages.

    With three stages, both halves of 128 values are loaded at once. Small chips have room for two stages.
    Where states are float32 (`fine`), two stages let two programs fit on a multiprocessor of a large chip.
    """
    if not bfloat16:
        return {"BC": 64, "BK": 32, "BV": 32, "num_warps": 4, "num_stages": 1}
    stages = 2 if chip.is_small or fine else 3
    return {"BC": 64, "BK": 128 if K > 64 else 64, "BV": 64, "num_warps": 4, "num_stages": stages}
