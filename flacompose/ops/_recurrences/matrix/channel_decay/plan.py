"""Block sizes, warps and pipeline stages of the kernels of channel decay."""

from __future__ import annotations

from typing import NamedTuple

from flacompose.ops._launch.chip import Chip
from flacompose.ops._launch.operands import block, tile_count
from flacompose.ops._launch.sequences import MatrixSequences
from flacompose.ops._recurrences.matrix.inputs import Inputs


class AxisPlan(NamedTuple):
    """The launches along one axis of the state, the values or the keys."""

    score: dict[str, int]
    plain: dict[str, int]
    gated: dict[str, int]
    tiles: int  # of the axis that `channel_decay_gated_axis_kernel` writes
    # Whether that kernel computes the products of pairs itself where only reads are wanted and gates are
    # factorisable: its one tile then contains all gates of a chunk.
    reads_alone: bool


class Plan(NamedTuple):
    """The choices of one call."""

    passing: dict[str, int]
    tiles: int  # of a state in state passing
    axes: tuple[AxisPlan, AxisPlan]  # of values and, transposed, of keys


def plan_of(tokens: MatrixSequences, inputs: Inputs) -> Plan:
    K, V, bfloat16 = tokens.K, tokens.V, tokens.bfloat16
    passing = state_config(tokens.chip, bfloat16, K, V, inputs.gk is not None)
    tiles = tile_count(K, passing["BK"]) * tile_count(V, passing["BV"])

    def along(D1: int, D2: int, plain_pairs: bool) -> AxisPlan:
        score, plain = score_config(bfloat16, D1), plain_config(bfloat16, D1, D2)
        gated = gated_config(bfloat16, D1, D2)
        tiles = tile_count(D2, gated["BD2"])
        alone = plain_pairs and isinstance(tiles, int) and tiles == 1
        return AxisPlan(score, plain, gated, tiles, alone)

    values = along(K, V, inputs.gk is None and inputs.u is None)
    return Plan(passing, tiles, (values, along(V, K, inputs.gv is None and inputs.u is None)))


def state_config(chip: Chip, bfloat16: bool, K: int, V: int, has_gk: bool) -> dict[str, int]:
    """Block sizes of the state, warps and pipeline stages.

    Each tile of the axis without gates computes the sums of gates again, so that axis has the larger tiles.
    """
    if not bfloat16:
        return {"BK": block(K, 32), "BV": block(V, 32), "num_warps": 4, "num_stages": 2}
    BK, BV = (_cut(K), block(V, 128)) if has_gk else (block(K, 128), _cut(V))
    return {"BK": BK, "BV": BV, "num_warps": 4, "num_stages": 2 if chip.is_small else 3}


def _cut(D: int) -> int:
    return block(D, 64 if D > 64 else 32)


def score_config(bfloat16: bool, D: int) -> dict[str, int]:
    """Block size of the contracted axis, warps and pipeline stages."""
    return {"BD": block(D, 64 if bfloat16 else 32), "num_warps": 4, "num_stages": 1 if bfloat16 else 2}


def plain_config(bfloat16: bool, D1: int, D2: int) -> dict[str, int]:
    """Block sizes of the contracted and the other axis, warps and pipeline stages."""
    BD2, stages = (block(D2, 128), 3) if bfloat16 else (block(D2, 32), 2)
    return {"BD1": block(D1, 32), "BD2": BD2, "num_warps": 4, "num_stages": stages}


def gated_config(bfloat16: bool, D1: int, D2: int) -> dict[str, int]:
    """`plain_config` for `channel_decay_gated_axis_kernel`.

    Triton 3.6 miscompiles narrower tiles in bfloat16 on Hopper.
    """
    BD1, BD2 = (64, 64) if bfloat16 else (block(D1, 32), block(D2, 32))
    return {"BD1": BD1, "BD2": BD2, "num_warps": 4, "num_stages": 2}
