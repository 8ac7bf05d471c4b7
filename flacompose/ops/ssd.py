"""Mamba-2's state space duality (SSD), https://arxiv.org/abs/2405.21060, under the names that mamba-ssm gives it."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from flacompose._errors import TypeError, ValueError
from flacompose.ops._arguments import require
from flacompose.ops._arguments.large_heads import Op, by_values, fits
from flacompose.ops._operators.checked import check_steps, check_values, checking
from flacompose.ops._recurrences.fused.gated_skip.op import gated_skip
from flacompose.ops._recurrences.fused.ssd.inputs import Inputs
from flacompose.ops._recurrences.fused.ssd.op import ssd
from flacompose.ops._tensors.dtype import upcast
from flacompose.ops._tensors.gate_formulas import clamped, log_decay_of_step, time_step
from flacompose.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0, float("inf")),  # 0 as an int, which graphs have as a constant
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | Any:
    r"""Mamba-2's scan of a sequence, with its time steps, skip and gate.

    $$\Delta_t = \operatorname{clamp}(\operatorname{softplus}(dt_t + dt\_bias)) \qquad
    h_t = e^{\Delta_t A}\, h_{t-1} + \Delta_t\, x_t B_t^\top \qquad
    y_t = (h_t C_t + D x_t) \odot \operatorname{silu}(z_t)$$

    From "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality"
    (<https://arxiv.org/abs/2405.21060>). It is [chunk_simple_gla][flacompose.ops.chunk_simple_gla] of queries ``C``,
    keys ``B``, values ``dt * x`` and gates ``dt * A``, with transposed states: ``[N, H, S, P]``.

    Args:
        x: Inputs, ``[B, T, H, P]``, in float32, bfloat16, float16 or float64.
        dt: Time steps, ``[B, T, H]``, in any float dtype.
        A: Rate of each head, ``[H]``, at most 0. A rate of -inf resets the state at a time step above 1e-36
            and does nothing at a time step of 0; its gradient is 0. Rates below -1e31 (-1e300 in float64) give `dt` no
            gradient.
        B: Weights of the inputs in the state, ``[B, T, G, S]``, in the dtype of `x`; ``G`` divides ``H``, and head
            ``h`` has group ``h // (H / G)``.
        C: Weights of the state in the output, ``[B, T, G, S]``, in the dtype of `x`.
        chunk_size: Accepted for compatibility with mamba-ssm, and not used: it changes no result.
        D: Weight of the skip connection, ``[H]`` or ``[H, P]``. Default: nothing.
        z: Gate of the output, ``[B, T, H, P]``, through silu. Default: none.
        dt_bias: Added to `dt`, ``H`` numbers in any shape. Default: nothing.
        initial_states: States before the first token, ``[N, H, P, S]``, in any float dtype. Default: zeros.
        dt_softplus: Whether `dt` passes softplus, after its bias.
        dt_limit: Bounds to which `dt` is clamped last. The lower bound is at least 0.
        return_final_states: Whether to return the states after the last token too.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.

    Returns:
        ``y``, ``[B, T, H, P]`` in the dtype of `x`, or ``(y, final_states)``, where `final_states` is ``[N, H, P, S]``
            in float32 (float64 for float64 inputs), a new tensor.

    Raises:
        ValueError: If a shape, a device or a bound is wrong, or ``P`` or ``S`` is above 512.
        TypeError: If an argument has the wrong type or dtype.
    """
    require.axes("x", x, ("B", "T", "H", "P"))
    batch, T, H, P = x.shape
    require.like(x, "dt", dt, (batch, T, H), q_name="x")
    require.like(x, "A", A, (H,), q_name="x")
    require.axes("B", B, ("B", "T", "G", "S"))
    G, S = B.shape[2:]
    require.like(x, "B", B, (batch, T, G, S), q_name="x")
    require.like(x, "C", C, B.shape, q_name="x")
    if G == 0 or H % G != 0:
        raise ValueError(f"B must have a number of groups that divides the {H} heads of x, got {G}")
    require.same_dtype(x, "B", B, q_name="x")
    require.same_dtype(x, "C", C, q_name="x")
    require.head_size("x", x)
    require.head_size("B", B, size_of="state")
    N = require.sequences(x, cu_seqlens, q_name="x")
    require.count("chunk_size", chunk_size)
    require.optional(x, "D", D, (H,) if isinstance(D, Tensor) and D.dim() == 1 else (H, P), q_name="x")
    require.optional(x, "z", z, x.shape, q_name="x")
    require.parameter(x, "dt_bias", dt_bias, (H,), q_name="x")
    require.flags(dt_softplus=dt_softplus, return_final_states=return_final_states)
    check_dt_limit(dt_limit)
    require.optional(x, "initial_states", initial_states, (N, H, P, S), q_name="x")
    if checking():
        values = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
        check_values(values | {"initial_states": initial_states}, cu_seqlens, gates=("A",), lowest=("dt",))
    if initial_states is not None:
        initial_states = initial_states.mT

    D = D if D is None or D.dim() == 2 else D.unsqueeze(-1)
    dt_bias = None if dt_bias is None else dt_bias.reshape(H)
    inputs = Inputs(
        x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus, *map(float, dt_limit)
    )
    y, states = ssd(inputs)
    return (y, states.mT.contiguous()) if return_final_states else y


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""One token of Mamba or Mamba-2: the output and a new state. The given state is not changed.

    $$\Delta = \operatorname{softplus}(dt + dt\_bias) \qquad h' = e^{\Delta A} \odot h + \Delta\, x B^\top \qquad
    y = (h' C + D \odot x) \odot \operatorname{silu}(z)$$

    From "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (<https://arxiv.org/abs/2312.00752>) and
    "Transformers are SSMs" (<https://arxiv.org/abs/2405.21060>). For Mamba-2, expand the time step and rate
    of each head to these shapes.

    Args:
        state: ``[N, H, P, S]``, in any float dtype. It is upcast to float32 (float64 for float64 states).
        x: Input, ``[N, H, P]``, in any float dtype, like all the following.
        dt: Time steps, ``[N, H, P]``.
        A: Rates, ``[H, P, S]``, at most 0, -inf as in
            [mamba_chunk_scan_combined][flacompose.ops.mamba_chunk_scan_combined].
        B: Weights of the input in the state, ``[N, G, S]``; ``G`` divides ``H``.
        C: Weights of the state in the output, ``[N, G, S]``.
        D: Weight of the skip connection, ``[H, P]``. Default: nothing.
        z: Gate of the output, ``[N, H, P]``, through silu. Default: none.
        dt_bias: Added to `dt`, ``[H, P]``, or as many numbers in another shape. Default: nothing.
        dt_softplus: Whether `dt` passes softplus, after its bias.

    Heads are optional. Without them, every ``H`` and ``G`` is absent: ``state [N, P, S]``, ``x [N, P]``, ``A [P, S]``,
    ``B [N, S]``.

    Returns:
        ``(y, new_state)``, of the shapes and dtypes of `x` and `state`, new tensors.

    Raises:
        ValueError: If a shape or a device is wrong.
        TypeError: If an argument has the wrong type or dtype.
    """
    require.floating("state", state)
    if state.dim() not in (3, 4):
        raise ValueError(f"state must have shape [N, H, P, S] or [N, P, S], got {tuple(state.shape)}")
    heads = state.dim() == 4
    N, S = state.shape[0], state.shape[-1]
    channels = tuple(state.shape[1:-1])  # (H, P), or (P,)
    require.tensor("B", B)
    G = B.shape[1] if heads and B.dim() == 3 else 1
    if heads and (G == 0 or state.shape[1] % G != 0):
        raise ValueError(f"B must have a number of groups that divides the {state.shape[1]} heads, got {G}")
    group = (N, G, S) if heads else (N, S)
    token = (N, *channels)
    for name, y, shape in (
        ("x", x, token), ("dt", dt, token), ("A", A, (*channels, S)), ("B", B, group), ("C", C, group)
    ):  # fmt: skip
        require.like(state, name, y, shape, q_name="state")
    for name, option, shape in (("D", D, channels), ("z", z, token)):
        require.optional(state, name, option, shape, q_name="state")
    require.parameter(state, "dt_bias", dt_bias, channels, q_name="state")
    require.flags(dt_softplus=dt_softplus)
    if checking():
        values = {
            "x": x,
            "dt": dt,
            "A": A,
            "B": B,
            "C": C,
            "D": D,
            "z": z,
            "dt_bias": dt_bias,
            "state": state,
        }
        check_values(values, gates=("A",), lowest=("dt",))
        if not dt_softplus:
            check_steps("dt", dt, None if dt_bias is None else dt_bias.reshape(channels))

    dt_bias = None if dt_bias is None else dt_bias.reshape(channels)
    dt = time_step(dt, dt_bias, dt_softplus, state).unsqueeze(-1)
    if heads:
        B, C = (y.repeat_interleave(state.shape[1] // G, 1) for y in (B, C))
    B, C = B.unsqueeze(-2), C.unsqueeze(-2)  # [N, (H,) 1, S]
    new = log_decay_of_step(dt, upcast(A, state)).exp() * upcast(state) + dt * x.unsqueeze(-1) * B
    y = (new * C).sum(-1)
    if D is not None:
        y = y + D * x
    if z is not None:
        y = y * F.silu(upcast(z, state))
    return y.to(x.dtype), new.to(state.dtype)


def chunk_ssd(
    C: Tensor,
    B: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    D: Tensor,
    z: Tensor | None,
    initial_state: Tensor | None = None,
    output_final_state: Literal[True] = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The scan of the layer: `dt` is the final time step, heads have any size, states are ``[N, H, S, P]``.

    Heads that are too large for the operator are computed by `chunk_simple_gla`.
    """
    if not fits(x):
        return _composed(chunk_simple_gla, C, B, x, dt, A, D, z, initial_state, cu_seqlens)
    return ssd(Inputs(x, dt, A, B, C, D, z, None, initial_state, cu_seqlens, False, 0.0, inf))


def recurrent_ssd(
    C: Tensor,
    B: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    D: Tensor,
    z: Tensor | None,
    initial_state: Tensor | None = None,
    output_final_state: Literal[True] = True,
    cu_seqlens: Tensor | None = None,
    output_states: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunk_ssd` token by token; `output_states` as in `fused_recurrent_simple_gla`."""
    op = partial(fused_recurrent_simple_gla, output_states=output_states)
    return _composed(op, C, B, x, dt, A, D, z, initial_state, cu_seqlens)


def _composed(
    op: Op,
    C: Tensor,
    B: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    D: Tensor,
    z: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    g, options = clamped(log_decay_of_step(dt, A)), {"output_final_state": True, "cu_seqlens": cu_seqlens}
    y, states = by_values(op, initial_state, C, B, x, g, scale=1.0, beta=dt, **options)
    return gated_skip(y, x, D, None, z, cu_seqlens), states


def check_dt_limit(dt_limit: tuple[float, float]) -> None:
    if not isinstance(dt_limit, (tuple, list)):
        raise TypeError(f"dt_limit must be a tuple of two bounds, got {type(dt_limit).__name__}")
    for i, bound in enumerate(dt_limit):
        require.number(f"dt_limit[{i}]", bound)
    if len(dt_limit) != 2 or not 0 <= dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"dt_limit must be two ascending bounds of at least 0, got {dt_limit}")
    require.finite("dt_limit[0]", dt_limit[0])
