"""When kernels for Hopper are launched, which are written in Gluon.

In Triton every load waits in registers for the product that takes it, and few loads are under way while products are
computed. A kernel of Gluon asks for all that it reads at its start, straight into shared memory, where products take it
from. Two or three programs side by side then keep the memory and the tensor cores of a multiprocessor busy. A sweep has
a multiprocessor to itself, and asks for the next chunks while it works on one.

Each of these kernels, or two of them together, computes what one or two of Triton's do. Those of Triton run on all
other chips, in Triton's interpreter, in graphs for AOTInductor, and for other dtypes, sizes of heads and alignments.
They remain the specification.
"""

from __future__ import annotations

import re

import torch
import triton
from torch import Tensor
from triton import knobs

from flacompose.ops._launch.chip import HOPPER, Chip
from flacompose.ops._launch.launch import launches_into_graph

# Gluon is experimental, and changes with Triton. So its kernels are imported where they are launched, and they are not
# launched by a newer Triton than this.
NEWEST_TRITON = (3, 9)


def takes(chip: Chip, operands: tuple[Tensor, ...], *sizes: int) -> bool:
    """Whether a kernel of Gluon is launched with these `operands`, of heads of these `sizes`.

    They are copied 16 bytes at a time, which begin at multiples of 16. Heads of such sizes do if the first one does.
    """
    if chip.capability != HOPPER.capability or knobs.runtime.interpret or not is_known(triton.__version__):
        return False
    fits = all(size in (64, 128) for size in sizes) and all(x.dtype == torch.bfloat16 for x in operands)
    if not fits or launches_into_graph():  # in a graph, tensors have no memory yet
        return False
    return all(x.data_ptr() % 16 == 0 for x in operands)


def is_known(version: str) -> bool:
    """Whether Gluon of this version of Triton is what its kernels are written in."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and tuple(map(int, numbers.groups())) <= NEWEST_TRITON
