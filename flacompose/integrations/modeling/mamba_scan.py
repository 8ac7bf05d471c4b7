"""The scans of Mamba and Mamba-2 in modeling files, and the step of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.integrations.modeling.arguments import bounds_of, unwritten
from flacompose.ops import mamba_chunk_scan_combined, selective_scan_fn, selective_state_update

NO_LIMIT = (0.0, float("inf"))  # of time steps


def ssd(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_states: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT, return_final_states: bool = False, z: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`mamba2_chunk_scan`."""
    return mamba_chunk_scan_combined(
        hidden_states, dt, A, B, C, chunk_size, D, z, dt_bias, unwritten(initial_states), dt_softplus,
        (float(dt_limit[0]), float(dt_limit[1])), return_final_states, bounds_of(kwargs),
    )  # fmt: skip


def selective_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False, **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`mamba_selective_scan` of ``hidden_states, dt [B, D, T]`` and ``B, C [B, S, T]``."""
    u, delta, B, C = (x.transpose(1, 2) for x in (hidden_states, dt, B, C))
    z = None if z is None else z.transpose(1, 2)
    B, C = B.to(u.dtype), C.to(u.dtype)
    y = selective_scan_fn(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state)
    if isinstance(y, tuple):
        return y[0].transpose(1, 2), y[1]
    return y.transpose(1, 2)


def state_space_step(
    state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, z: Tensor | None = None,
    dt_limit: tuple[float, float] = NO_LIMIT, **_: Any,
) -> Tensor:  # fmt: skip
    """`mamba2_selective_state_update` and `mamba_selective_state_update`, which write to `state`.

    Transformers has no `dt_limit` for one token. The replaced forwards of Mamba-2 pass it.
    """
    if tuple(dt_limit) != NO_LIMIT:
        dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
        dt = dt if dt_bias is None else dt + dt_bias
        dt = (torch.nn.functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        dt_bias, dt_softplus = None, False
    before = unwritten(state)
    y, new = selective_state_update(before, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)
    state.copy_(new)
    return y


def no_fused_block(*_: Any, **__: Any) -> None:
    """In place of functions that compute a block at once. Transformers then calls the parts of the block."""
