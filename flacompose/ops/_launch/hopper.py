"""The condition for launching the Gluon kernels for Hopper.

In Triton every load waits in registers for the product that takes it, and few loads are under way while
products are computed. A Gluon kernel issues all its copies at its start, straight into shared memory, where
products read them. Two or three programs side by side then keep the memory and the tensor cores of a
multiprocessor busy. A program of state passing has a multiprocessor to itself, and copies the next chunks
while it computes one.

Each of these kernels, or two of them together, computes the results of one or two Triton kernels. Triton's
run on all other chips, in Triton's interpreter, in graphs for AOTInductor, for other dtypes, sizes of heads and
alignments, and for gates of channels that are too strong for the Gluon kernels. They remain the specification.
"""

from __future__ import annotations

import re

import torch
import triton
from torch import Tensor
from triton import knobs

from flacompose.ops._launch.chip import HOPPER, Chip
from flacompose.ops._launch.launch import launches_into_graph

# Gluon is experimental, and changes with Triton. So its kernels are imported only where they are launched,
# and never launched by a newer Triton than this.
NEWEST_TRITON = (3, 9)


def takes(chip: Chip, operands: tuple[Tensor, ...], *sizes: int) -> bool:
    """Whether a Gluon kernel is launched with these `operands`, of heads of these `sizes`.

    It copies 16 bytes at a time, from addresses that are multiples of 16. With such sizes all heads are
    aligned if the first one is.
    """
    if chip.capability != HOPPER.capability or knobs.runtime.interpret or not is_known(triton.__version__):
        return False
    fits = all(size in (64, 128) for size in sizes) and all(x.dtype == torch.bfloat16 for x in operands)
    if not fits or launches_into_graph():  # in a graph, tensors have no memory yet
        return False
    return all(x.data_ptr() % 16 == 0 for x in operands)


def is_known(version: str) -> bool:
    """Whether the kernels are written for the Gluon of this version of Triton."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and tuple(map(int, numbers.groups())) <= NEWEST_TRITON
