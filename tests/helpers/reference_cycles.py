"""What is left for Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch import Tensor


def in_cycles(call: Callable[[], object]) -> set[type]:
    """The types of the tensors, and of this package's objects, that `call` leaves in reference cycles."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        call()
        gc.collect()
        return {
            type(x) for x in gc.garbage if type(x) is Tensor or type(x).__module__.startswith("flacompose")
        }
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
