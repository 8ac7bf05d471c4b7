"""flash-linear-attention, the peer: how to find it, and how to time what it refuses to run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace


def load() -> SimpleNamespace:
    """All functions of ``fla.ops``. Where the package is missing, the program ends and says what to install."""
    try:
        # `fla.ops` lacks some functions of HGRN.
        modules = [importlib.import_module(name) for name in ("fla.ops", "fla.ops.hgrn")]
        return SimpleNamespace(**{name: x for module in modules for name, x in vars(module).items()})
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "fla":
            raise SystemExit("--against fla needs the package: pip install flash-linear-attention") from error
        raise


def version() -> str:
    return str(getattr(importlib.import_module("fla"), "__version__", "unknown"))


def lift_hopper_check() -> None:
    """Let the peer's backward with one gate per head run on Hopper under Triton 3.4 to 3.7.0, only to time it.

    ``chunk_bwd_dqkwg`` refuses to run there, because Triton compiles it wrongly (flash-linear-attention issue 640):
    its results may be wrong, but it takes the same time. GLA's backward has kernels of its own without this check.
    """
    module = importlib.import_module("fla.ops.common.chunk_o")
    if not hasattr(module, "TRITON_ABOVE_3_7_1"):
        raise RuntimeError(f"flash-linear-attention {version()} no longer has the check that this lifts")
    vars(module)["TRITON_ABOVE_3_7_1"] = True


def first_call(fn: Callable[[], object]) -> str | None:
    """Call ``fn``; where the peer refuses Hopper, lift the check and call again. Returns a note if it did."""
    try:
        fn()
    except RuntimeError as error:
        if "on Hopper GPUs produces incorrect results" not in str(error):
            raise
        lift_hopper_check()
        fn()
        return "the peer refuses this backward on Hopper with this Triton; its check was lifted to time it"
    return None
