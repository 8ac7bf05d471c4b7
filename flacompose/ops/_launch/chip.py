"""The properties of a device on which the choice of kernels and of their tiles depends."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, NamedTuple

import torch


class Chip(NamedTuple):
    """A CUDA GPU."""

    shared_memory: int  # bytes that one program may have
    capability: int  # 80 for compute capability 8.0

    @property
    def is_small(self) -> bool:
        """Whether a program has less shared memory than on the large chips of data centres."""
        return self.shared_memory < AMPERE.shared_memory

    @property
    def has_tensor_memory(self) -> bool:
        """Whether matrix products are accumulated in tensor memory, with their factors in shared memory."""
        return self.capability // 10 in (10, 11)


# One chip for each amount of shared memory. A kernel that fits on it fits on all chips of the capabilities in
# its comment.
AMPERE = Chip(163 * 1024, 80)  # A100
ADA = Chip(99 * 1024, 89)  # RTX 4090, and with 86 and 120 the RTX 3090 and the RTX 5090
HOPPER = Chip(227 * 1024, 90)  # H100 and H200
BLACKWELL = Chip(227 * 1024, 100)  # B200


def chip_of(device: torch.device) -> Chip:
    """The chip of `device`, without reading any tensor.

    A device that is no GPU stands for the current one: kernels that are compiled ahead are chosen on meta
    tensors. A GPU that this machine does not have, as in a trace for another machine, is treated as an H100.
    """
    if not is_here(device):
        return HOPPER
    properties: Any = torch.cuda.get_device_properties(device if device.type == "cuda" else None)
    return Chip(properties.shared_memory_per_block_optin, 10 * properties.major + properties.minor)


def is_here(device: torch.device) -> bool:
    """Whether this machine has the GPU `device` or, for a device that is no GPU, any."""
    return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()


@cache
def runs_kernels(index: int) -> bool:
    """Whether the kernels run on this GPU. If not, it warns once."""
    chip = chip_of(torch.device("cuda", index))
    if chip.capability >= AMPERE.capability and chip.shared_memory >= ADA.shared_memory:
        return True
    name = torch.cuda.get_device_properties(index).name
    warn_of_eager(f"{name}, of compute capability {chip.capability / 10},")
    return False


@cache
def warn_of_eager(device: str) -> None:
    """Say once that operators are computed by PyTorch on `device`, which has no kernels."""
    warnings.warn(
        f"flacompose computes its operators on {device} with PyTorch, which is slower than its Triton kernels: these "
        "need an NVIDIA GPU of compute capability 8.0 (Ampere) or later, a CUDA build of PyTorch, and Triton",
        stacklevel=2,
    )
