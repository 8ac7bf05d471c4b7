"""flash-linear-attention, the peer: its functions, and adapters to time them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MODULES = ("fla.ops", *(f"fla.ops.{name}" for name in ("hgrn", "gdn2", "rwkv4")))
"""The modules of its functions. ``fla.ops`` lacks some of them."""


def load() -> SimpleNamespace:
    """All functions of `MODULES`. If the package is missing, the program ends and names it."""
    try:
        modules = [importlib.import_module(name) for name in MODULES]
        return adapted({name: x for module in modules for name, x in vars(module).items()})
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "fla":
            raise SystemExit("the peer is needed: pip install flash-linear-attention") from error
        raise


def adapted(functions: dict[str, Any]) -> SimpleNamespace:
    """The peer's `functions` by name, with adapters to the arguments of flacompose."""
    # It has faster kernels for gates from -5 to 0, but only with this flag.
    changed = {"chunk_kda_with_safe_gates": partial(functions["chunk_kda"], safe_gate=True)}
    # It has one function of RWKV-4 for rows and for single tokens, which loops over tokens.
    for form in ("chunk", "fused_recurrent"):
        changed[f"{form}_rwkv4"] = partial(rwkv4, functions["fused_recurrent_rwkv4"])
        changed[f"{form}_rg_lru"] = partial(rg_lru, functions[f"{form}_hgrn"])
    return SimpleNamespace(**functions | changed)


def rwkv4(
    scan: Callable[..., tuple],
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Sequence[Tensor] | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """The peer's function takes ``log(-w)``, and always the three tensors of the state, stacked."""
    if initial_state is None:
        start = k.new_zeros(k.shape[0], 3, 1, k.shape[2])
        start[:, 2] = -1e38
    else:
        start = torch.stack([*initial_state], 1).unsqueeze(2)
    o, end = scan((-w).log(), u, k, v, start)
    return o, tuple(end.squeeze(2).unbind(1)) if output_final_state else None


def rg_lru(
    scan: Callable[..., tuple], x: Tensor, r: Tensor, i: Tensor, a_param: Tensor, **states: Any
) -> tuple:
    """RG-LRU from kernels of the peer, which has none: the gates in PyTorch, then the `scan` of HGRN."""
    g = -8 * F.softplus(a_param.float()) * r.float().sigmoid()
    entering = (-torch.expm1(2 * g)).sqrt() * i.float().sigmoid() * x
    return scan(entering.to(x.dtype), g, **states)


def version() -> str:
    return str(getattr(importlib.import_module("fla"), "__version__", "unknown"))


def lift_hopper_check() -> None:
    """Let the peer's backward with one gate per head run on Hopper under Triton 3.4 to 3.7.0, to time it.

    ``chunk_bwd_dqkwg`` refuses to run there, because Triton compiles it wrongly (flash-linear-attention issue 640):
    its results may be wrong, but it takes the same time. GLA's backward has kernels of its own without this check.
    """
    module = importlib.import_module("fla.ops.common.chunk_o")
    if not hasattr(module, "TRITON_ABOVE_3_7_1"):
        raise RuntimeError(f"flash-linear-attention {version()} no longer has the check that this lifts")
    vars(module)["TRITON_ABOVE_3_7_1"] = True


def first_call(fn: Callable[[], object]) -> str | None:
    """Call ``fn``. If the peer refuses Hopper, lift the check, call again and return a note."""
    try:
        fn()
    except RuntimeError as error:
        if "on Hopper GPUs produces incorrect results" not in str(error):
            raise
        lift_hopper_check()
        fn()
        return "the peer refuses this backward on Hopper with this Triton; its check was lifted to time it"
    return None
