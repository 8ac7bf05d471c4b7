"""Block sizes, warps and pipeline stages of the kernels of diagonal plus low rank.

Tiles of products in bfloat16 are 64 wide at least: Triton 3.6 miscompiles narrower ones on Hopper.
"""

from __future__ import annotations

from flacompose.ops._launch.chip import Chip


def pair_config(bfloat16: bool, K: int) -> dict[str, int]:
    """Block size of the contracted axis, warps, stages and, for one block, registers."""
    if not bfloat16:
        return {"BK": 32, "num_warps": 4, "num_stages": 1}
    if K <= 64:
        return {"BK": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 168}
    return {"BK": 64, "num_warps": 4, "num_stages": 3}


def factor_config(bfloat16: bool) -> dict[str, int]:
    """Block size of the keys, as in `gradient_config`, warps, stages and registers."""
    if not bfloat16:
        return {"BK": 32, "num_warps": 4, "num_stages": 1}
    return {"BK": 64, "num_warps": 4, "num_stages": 1, "maxnreg": 168}


def pair_gradient_config(bfloat16: bool) -> dict[str, int]:
    """Block size of the contracted axis, warps and pipeline stages."""
    return {"BV": 128 if bfloat16 else 32, "num_warps": 4, "num_stages": 1}


def gradient_config(chip: Chip, bfloat16: bool, V: int) -> dict[str, int]:
    """Block sizes of the key axis and of the value axis, which is contracted, warps and pipeline stages."""
    if not bfloat16:  # with three stages, Triton 3.8 takes more memory than small chips have
        return {"BK": 32, "BV": 32, "num_warps": 4, "num_stages": 2 if chip.is_small else 3}
    return {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 2 if V <= 64 else 3}
