"""The plan of one call of the delta rule on CUDA: the kernels of each step, and their configurations.

This is the only file of this folder that asks for the chip, dtypes, sizes and alignment. Hopper's kernels take
bfloat16 that is aligned, and are in no graph: see `_launch/hopper`. "Read by `k`" means that neither `a` nor
`read_before` is given.

Forward: for each chunk the WY factors, then state passing.

    gates          condition                              kernel                            file
    heads or none  Hopper, K, V 64 or 128, read by `k`    hopper_head_factor_kernel: Y alone hopper/head_factors.py
                                                          hopper_head_state_passing_kernel  hopper/head_state_passing.py
    heads or none  Hopper, K 64 or 128                    hopper_head_factor_kernel         hopper/head_factors.py
    heads or none  otherwise                              delta_factor_kernel               kernels.py
    channels       Hopper, K 64 or 128, 8 tokens sum to   hopper_channel_factor_kernel      hopper/channel_factors.py
                   above -45
    channels       otherwise                              delta_channel_factor_kernel       channel_factors.py
    any            long rows: state before each segment   delta_join_kernel                 kernels.py
    any            state passing, except in the first row delta_state_passing_kernel        kernels.py

Backward: the WY factors, `delta_state_passing_kernel` or `delta_both_directions_kernel` for the states,
`delta_backward_state_passing_kernel` for their gradients, and for each chunk the gradients of queries, keys, `a`, beta
and gates.

    gates          condition                              kernel                            file
    heads or none  Hopper, read by `k`, K = V, many       hopper_head_backward_kernel       hopper/head_backward.py
                   programs: with state passing
    heads or none  Hopper, at most 4 heads share keys     hopper_head_gradient_kernel       hopper/head_gradients.py
    heads or none  otherwise                              delta_head_gradient_kernel        head_gradients.py
    channels       Hopper, 32 tokens sum to above -45     hopper_channel_chunk_gradient_kernel
                                                                             hopper/channel_chunk_gradients.py
    channels       Hopper, 8 tokens sum to above -45      hopper_channel_block_gradient_kernel
                                                                             hopper/channel_block_gradients.py
    channels       Hopper, stronger gates                 delta_channel_gradient_kernel     channel_gradients.py
    channels       otherwise                              delta_channel_product_gradient_kernel,
                                                          delta_channel_gradient_kernel     channel_gradients.py

In each channel, the gates of each half of a chunk (32 tokens) or of each half of a block (8 tokens) sum to
above -45. If all gates are equal, 32 tokens do so for gates from -1.4 to 0, and 8 tokens for gates from -5.6 to
0, which contain all gates of KDA that are bounded by -5. For gradients each gate must be above -8 too. The
device decides: `hopper_channel_factor_kernel` marks each chunk in `factorisable_chunks`,
`hopper_channel_block_gradient_kernel` marks each tile of channels in `factorisable_tiles`. The three gradient
kernels of channels on Hopper are all launched, in this order, and a program returns at once if its chunk or
tile is not its own. The second one stores the products for the tiles that it leaves to the third.

The gradient of gates of heads follows from the gradients of their sums, by `head_gate_gradient_kernel`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flacompose.ops._launch import hopper
from flacompose.ops._launch.chip import HOPPER, Chip
from flacompose.ops._launch.launch import launches_into_graph
from flacompose.ops._launch.operands import block, tile_count
from flacompose.ops._launch.sequences import MatrixSequences
from flacompose.ops._recurrences.matrix.channel_decay import cuda as channel_decay
from flacompose.ops._recurrences.matrix.delta_rule.kernels import CHUNKS_EXAMINED, MAX_WARM_START_HEADS
from flacompose.ops._recurrences.matrix.delta_rule.operands import CallOperands, Step

# The most heads of values that share keys for which kernels for Hopper add up the gradients of queries, keys
# and `a`. Each sum is rounded to the dtype of the inputs, and with more heads these roundings would exceed
# the kernels' own error.
LARGEST_GROUP = 4
# How many programs of `hopper_head_backward_kernel` a Hopper chip runs at a time, by the size of heads.
RESIDENT_PROGRAMS = {64: 264, 128: 132}


class Passing(NamedTuple):
    """State passing along each row, which is one segment, or several that are processed at the same time."""

    forwards: Step
    of_keys: Step  # `forwards` of states with K values, for the transitions of segments and sequences
    backwards: Step
    both_directions: Step  # `forwards` and `backwards` in one launch
    join: Step
    join_of_keys: Step  # `join` of states with K values
    segments: int
    is_split: bool  # whether segments start at states that follow from their transitions
    has_warm_starts: bool  # whether they start at the states that the chunks before them reach from zero
    has_few_programs: bool  # so few that both directions fit on a chip at once
    overwrites_W: bool  # whether the gradients of values may, if `backwards` is launched


class GradientPlan(NamedTuple):
    """The launches of the gradients of each chunk: of queries, keys, `a`, `beta` and gates."""

    steps: tuple[Step, ...] = ()
    takes_marks: bool = False  # whether the marks of chunks say which kernel computes which
    adds_heads: bool = False  # whether they are added up over the heads that share keys
    passes_states: bool = False  # whether the one kernel passes the gradients of states too

    @property
    def tiles(self) -> int:
        """The tiles of the key axis that a head has."""
        return self.steps[-1].programs


class Plan(NamedTuple):
    """The launches of each step, in their order."""

    factors: tuple[Step, ...]
    takes_inverses: bool  # whether state passing takes the inverses of chunks in place of W and P
    passing: Passing
    takes_log_norms: bool  # whether passes leave out chunks in which the state decays to zero
    gradients: GradientPlan  # none but in the backward


def chunk_size(q: Tensor, of_channels: bool) -> int:
    """Tokens of a chunk. With gates of channels, the chunks are those of channel decay."""
    return channel_decay.CHUNK if of_channels else 64 if q.dtype == torch.bfloat16 else 32


def plan_of(x: CallOperands, form: str, do: Tensor | None = None, with_keys: bool = False) -> Plan:
    """The plan of the `form` "chunk", "ends" or "backward", the latter with gradients of keys or of queries alone."""
    factors, takes_inverses = _factors(x, form == "chunk")
    warm_starts = 1
    decays = x.has_gates_of_heads and x.reads_by_key
    if decays and form != "ends":  # the matrix of a transition is a product over all chunks
        # So many programs share the values of a state where programs are few.
        tiles = 1 if takes_inverses else tile_count(x.tokens.V, 64)
        warm_starts = warm_start_count(x.tokens.chunks_of_row, x.tokens.N * x.tokens.H * tiles)
    passing = plan_state_passing(x.tokens, warm_starts, takes_inverses)
    takes_log_norms = decays and (passing.is_split or passing.has_warm_starts)
    gradients = GradientPlan()
    if do is not None:
        of_heads = x.gk is None
        gradients = _head_gradients(x, do, passing, with_keys) if of_heads else _channel_gradients(x, do)
    return Plan(factors, takes_inverses, passing, takes_log_norms, gradients)


def _factors(x: CallOperands, forward: bool) -> tuple[tuple[Step, ...], bool]:
    """The launches of the factors of each chunk, and whether these are the inverses alone."""
    chip, bfloat16, K, V = x.tokens.chip, x.tokens.bfloat16, x.tokens.K, x.tokens.V
    takes = partial(hopper.takes, chip)
    if x.gk is None:
        in_gluon = Step("hopper.head_factors", "hopper_head_factor_kernel", {"num_warps": 4, "maxnreg": 168})
        if forward and x.reads_by_key and takes((*x.read_by, x.v), K, V) and x.v_token % 8 == 0:
            return (in_gluon._replace(config={"num_warps": 4, "maxnreg": 96}),), True
        if takes(x.read_by, K):
            return (in_gluon,), False
        return (Step("kernels", "delta_factor_kernel", factor_config(bfloat16)),), False
    # Chunks with factorisable gates are computed and marked first, the others by the second launch. Wider tiles
    # of gates that are not factorisable spill three times as many registers.
    config = channel_factor_config(chip, bfloat16, K)
    others = partial(Step, "channel_factors", "delta_channel_factor_kernel")
    narrow = config | {"BK": min(config["BK"], 64), "FACTORISABLE": False}
    if takes(x.read_by, K):
        first = Step("hopper.channel_factors", "hopper_channel_factor_kernel", {"num_warps": 4})
        return (first, others(narrow | {"IN_BLOCKS": False})), False
    return (
        others(config | {"FACTORISABLE": True, "IN_BLOCKS": True}),
        others(narrow | {"IN_BLOCKS": True}),
    ), False


def plan_state_passing(
    tokens: MatrixSequences, warm_starts: int = 1, takes_inverses: bool = False, low_rank: bool = False
) -> Passing:
    """The plan of state passing, with so many segments of warm starts if a row is not long enough for others."""
    chip, bfloat16, K, V = tokens.chip, tokens.bfloat16, tokens.K, tokens.V
    # The states before segments take two more passes, so two or three segments would gain nothing.
    segments, is_split = tokens.segments(tokens.chunks_of_row, 4 * tokens.H, least=4)
    # Not in a graph: its compiler would copy memory that is filled segment by segment.
    has_warm_starts = not is_split and not launches_into_graph() and warm_starts > 1
    if has_warm_starts:
        segments = warm_starts
    states = segments * tokens.N * tokens.H
    of_values, of_keys = (
        state_passing_config(chip, bfloat16, K, width, states, low_rank) for width in (V, K)
    )
    tiles, tiles_of_keys = tile_count(V, of_values["BV"]), tile_count(K, of_keys["BV"])
    if takes_inverses:  # a program has all values
        forwards, keys = (
            Step("hopper.head_state_passing", "hopper_head_state_passing_kernel", {"num_warps": width // 16})
            for width in (V, K)
        )
    else:
        forwards = Step("kernels", "delta_state_passing_kernel", of_values, tiles)
        keys = forwards._replace(config=of_keys, programs=tiles_of_keys)
    joins = join_config(chip, bfloat16, K)
    join = Step("kernels", "delta_join_kernel", joins, tile_count(V, joins["BV"]))
    # If each program of `backwards` reads the whole W of its head, it stores as much. When it stores the gradients
    # of a chunk, all its threads have waited for the chunk's W, which nothing reads afterwards. Tokens outside
    # packed sequences have gradients of zero, and a graph copies the tensors that its kernels change.
    reads_all = of_values["BV"] >= V == K
    overwrites_W = reads_all and tokens.cu_seqlens is None and not launches_into_graph()
    return Passing(
        forwards,
        keys,
        Step("kernels", "delta_backward_state_passing_kernel", of_values, tiles),
        Step("both_directions", "delta_both_directions_kernel", of_values, tiles, directions=2),
        join,
        join._replace(programs=tile_count(K, joins["BV"])),
        segments,
        is_split,
        has_warm_starts,
        has_few_programs=are_few(states, V),
        overwrites_W=overwrites_W,
    )


def _head_gradients(x: CallOperands, do: Tensor, passing: Passing, with_keys: bool) -> GradientPlan:
    tokens, (H, K) = x.tokens, x.q.shape[2:]
    takes = partial(hopper.takes, tokens.chip, (*x.read_by, do))
    if with_keys and _passes_states(x, passing) and takes(K):
        step = Step("hopper.head_backward", "hopper_head_backward_kernel", {"num_warps": K // 16})
        return GradientPlan((step,), passes_states=True)
    if with_keys and tokens.H // H <= LARGEST_GROUP and takes(K, tokens.V):
        # Heads of values that share keys are processed one after the other: each adds to the stored sum of
        # the heads before.
        configs = ({"BK": 64, "num_warps": 4, "of_group": i, "ADDS": i > 0} for i in range(tokens.H // H))
        step = Step("hopper.head_gradients", "hopper_head_gradient_kernel", {}, tile_count(K, 64))
        return GradientPlan(tuple(step._replace(config=x) for x in configs), adds_heads=True)
    config = gradient_config(tokens.bfloat16, tokens.V)
    return GradientPlan(
        (Step("head_gradients", "delta_head_gradient_kernel", config, tile_count(K, config["BK"])),)
    )


def _passes_states(x: CallOperands, passing: Passing) -> bool:
    """Whether one kernel passes the state's gradient and computes the gradients of queries and keys.

    Each of its programs processes a whole segment, so it is faster only if hardly any multiprocessor is
    idle at the end. Packed sequences may have any lengths, so this is unknown for them. Where heads share
    keys it takes less memory than the two kernels, and at times a few per cent longer. Both ways give the same
    bits, so the choice may depend on the batch size.
    """
    tokens, (H, K) = x.tokens, x.q.shape[2:]
    programs = tokens.N * tokens.H * passing.segments
    if not x.reads_by_key or passing.has_warm_starts or tokens.cu_seqlens is not None:
        return False
    if K != tokens.V or tokens.H > LARGEST_GROUP * H or not isinstance(programs, int):
        return False
    if K not in RESIDENT_PROGRAMS:
        return False
    return programs >= 0.9 * RESIDENT_PROGRAMS[K] * tile_count(programs, RESIDENT_PROGRAMS[K])


def _channel_gradients(x: CallOperands, do: Tensor) -> GradientPlan:
    tokens = x.tokens
    config = channel_gradient_config(tokens.chip, tokens.bfloat16)
    tiles = tile_count(tokens.K, config["BK"])
    others = partial(Step, "channel_gradients", "delta_channel_gradient_kernel", programs=tiles)
    last = others(config=config | {"FACTORISABLE": False})
    if hopper.takes(tokens.chip, (*x.read_by, do), tokens.K, tokens.V):
        in_gluon = {"BK": config["BK"], "num_warps": 4}
        steps = (
            Step("hopper.channel_chunk_gradients", "hopper_channel_chunk_gradient_kernel", in_gluon, tiles),
            Step("hopper.channel_block_gradients", "hopper_channel_block_gradient_kernel", in_gluon, tiles),
            last,
        )
        return GradientPlan(steps, takes_marks=True)
    of_products = product_gradient_config(tokens.bfloat16)
    products = Step("channel_gradients", "delta_channel_product_gradient_kernel", of_products)
    return GradientPlan((products, others(config=config | {"FACTORISABLE": True}), last))


def warm_start_count(chunks: int, programs: int) -> int:
    """The number of segments of a row of `chunks` with warm starts, if `programs` process all rows uncut.

    The segments are as many as fill a large chip, and have at least twice the `CHUNKS_EXAMINED` chunks. A row is
    cut only if the programs, and so the heads of a row, are at most `MAX_WARM_START_HEADS`. Unlike the number of
    segments that are joined by their transitions, it may depend on the batch size: a finite state below 2^43 that
    decays to zero changes no bit of the results, wherever a segment starts. Only a warm start drops a larger state.
    The number is 1 for sizes that the compiler does not know.
    """
    if not isinstance(chunks, int) or not isinstance(programs, int):
        return 1
    return max(1, min(chunks // (2 * CHUNKS_EXAMINED.value), 2 * MAX_WARM_START_HEADS.value // programs))


def are_few(states: int, V: int) -> bool:
    """Whether `states` of `V` values are at most 128 tiles of 64 values, about one for each multiprocessor.

    False for sizes that the compiler does not know.
    """
    return isinstance(states, int) and states * tile_count(V, 64) <= 128


# Tiles of products in bfloat16 are 64 wide at least: Triton 3.6 miscompiles narrower ones on Hopper.


def factor_config(bfloat16: bool) -> dict[str, int]:
    """Block size of the contracted axis, warps, pipeline stages and, for three programs at a time, registers."""
    if not bfloat16:
        return {"BK": 32, "num_warps": 4, "num_stages": 1}
    return {"BK": 128, "num_warps": 4, "num_stages": 1, "maxnreg": 168}


def channel_factor_config(chip: Chip, bfloat16: bool, K: int) -> dict[str, int]:
    """Block size of the contracted axis, whether writing keys are kept for W, warps and stages.

    They are kept in shared memory and take 512 bytes for each channel. In bfloat16, more than 128 channels of
    them leave no room for a second program on a multiprocessor. In float32 there are 65 KiB of other factors
    beside them.
    """
    BK, keep = 64 if K > 128 else max(block(K, 128), 64), K <= 128
    if not bfloat16:
        BK = 32
        keep = 65 * 1024 + 512 * BK * tile_count(K, BK) <= chip.shared_memory
    return {"BK": BK, "KEEP": keep, "num_warps": 4, "num_stages": 1}


def wide_warps(chip: Chip, K: int) -> int:
    """The warps of a program that holds a state of more than 128 keys.

    Such a state does not fit in tensor memory. Triton does not use tensor memory where a program has 16
    warps.
    """
    return 16 if chip.has_tensor_memory and K > 128 else 8


def state_passing_config(
    chip: Chip, bfloat16: bool, K: int, V: int, states: int, low_rank: bool = False
) -> dict[str, int]:
    """Block sizes of the contracted axis and of the other, warps and stages.

    A program has all blocks of the contracted axis. Where there are enough `states` for all multiprocessors,
    and no tensor memory, two groups of four warps share the operands that they load.
    """
    if not bfloat16:
        return {
            "BK": block(K, 128 if K <= 128 else 64),
            "BV": 16 if K > 128 else 32,
            "num_warps": 4,
            "num_stages": 1,
        }
    # Two parts of 256 keys do not fit in the registers beside the operands of a chunk.
    BK = 128 if K > 256 else block(K, 256)
    # Hopper multiplies operands in registers, which suffice for 256 keys if one part of 64 is rounded at a
    # time.
    if K > 256 or (K > 128 and chip.capability != HOPPER.capability):
        return {"BK": BK, "BV": 64, "num_warps": wide_warps(chip, K), "num_stages": 1}
    # Tensor memory has no room for the state of programs with 128 values and keys.
    BV = 64 if V <= 64 or chip.has_tensor_memory or are_few(states, V) else 128
    # The fourth key factor of the low-rank recurrence leaves no room for a second stage beside larger heads.
    stages = 1 if low_rank and (K > 128 or (chip.is_small and K > 64)) else 2
    # The operands of a part of 128 keys do not fit in the registers of four warps.
    BK = 64 if K > 128 or BV == 64 else max(BK, 64)
    return {"BK": BK, "BV": BV, "num_warps": BV // 16, "num_stages": stages}


def join_config(chip: Chip, bfloat16: bool, K: int) -> dict[str, int]:
    """Block sizes of the keys, of the values, and of the keys where contracted; warps and stages."""
    BK = block(K, 256)
    if bfloat16:
        return {"BK": max(BK, 64), "BV": 64, "BD": 64, "num_warps": wide_warps(chip, K), "num_stages": 1}
    return {"BK": BK, "BV": 16, "BD": 16, "num_warps": 8, "num_stages": 1}


def gradient_config(bfloat16: bool, V: int) -> dict[str, int]:
    """Block sizes of the key axis and of the value axis, which is contracted, warps and pipeline stages."""
    if not bfloat16:
        return {"BK": 64, "BV": 32, "num_warps": 4, "num_stages": 1}
    return {"BK": 64, "BV": max(block(V, 128), 64), "num_warps": 4, "num_stages": 1}


def product_gradient_config(bfloat16: bool) -> dict[str, int]:
    """Block size of the contracted axis, warps and pipeline stages."""
    return {"BV": 64 if bfloat16 else 32, "num_warps": 4, "num_stages": 2}


def channel_gradient_config(chip: Chip, bfloat16: bool) -> dict[str, int]:
    """Block sizes of the key axis and of the value axis, which is contracted, warps and pipeline stages."""
    B = 64 if bfloat16 else 32
    # On a small chip Triton 3.7 makes two stages fit in float32, and Triton 3.8 does not, by 1 KiB.
    stages = 3 if not chip.is_small else 2 if bfloat16 else 1
    return {"BK": B, "BV": B, "num_warps": 4, "num_stages": stages}
