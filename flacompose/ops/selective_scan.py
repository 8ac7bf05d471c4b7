"""Mamba's selective scan, https://arxiv.org/abs/2312.00752, under the name that mamba-ssm gives it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flacompose._errors import ValueError
from flacompose.ops._arguments import require
from flacompose.ops._operators.checked import check_steps, check_values, checking
from flacompose.ops._recurrences.elementwise.selective_scan import op


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    initial_states: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor | Any:
    r"""Mamba's scan of a sequence, with its time steps, skip and gate: the form for training and for prompts.

    $$\Delta_t = \operatorname{softplus}(\delta_t + \delta\_bias) \qquad
    h_t = e^{\Delta_t A} \odot h_{t-1} + (\Delta_t \odot u_t)\, B_t^\top \qquad
    y_t = (h_t C_t + D \odot u_t) \odot \operatorname{silu}(z_t)$$

    From "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (<https://arxiv.org/abs/2312.00752>). Each
    channel has a state of ``S`` numbers and a time step of its own. The states of all tokens are
    never in memory at the same time.

    Args:
        u: Inputs, ``[B, T, D]``, in float32, bfloat16, float16 or float64.
        delta: Time steps, ``[B, T, D]``, at least 0 (after the softplus, if there is one), in any float dtype.
        A: Rates, ``[D, S]``, at most 0, in any float dtype. A rate of -inf resets the state at a time step above 1e-36
            and does nothing at a time step of 0; its gradient is 0. Rates below -1e31 (-1e300 in float64) give `delta`
            no gradient.
        B: Weights of the inputs in the state, ``[B, T, S]`` or ``[B, T, G, S]``, in the dtype of `u`; ``G`` divides
            ``D``, and channel ``d`` has group ``d // (D / G)``.
        C: Weights of the state in the output, of the shape and dtype of `B`.
        D: Weight of the skip connection, ``[D]``. Default: nothing.
        z: Gate of the output, ``[B, T, D]``, through silu. Default: none.
        delta_bias: Added to `delta`, ``D`` numbers in any shape. Default: nothing.
        delta_softplus: Whether `delta` passes softplus, after its bias.
        return_last_state: Whether to return the states after the last token too.
        initial_states: States before the first token, ``[N, D, S]``, in any float dtype. Default: zeros.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.

    Returns:
        ``y``, ``[B, T, D]`` in the dtype of `u`, or of autocast where it is on; or ``(y, last_states)``, where
            `last_states` is ``[N, D, S]`` in float32 (float64 for float64 inputs), a new tensor.

    Raises:
        ValueError: If a shape or a device is wrong, or ``S`` is above 512.
        TypeError: If an argument has the wrong type or dtype.
    """
    require.axes("u", u, ("B", "T", "D"))
    require.not_empty("u", u)
    batch, T, channels = u.shape
    require.like(u, "delta", delta, u.shape, q_name="u")
    require.axes("A", A, ("D", "S"))
    S = A.shape[1]
    require.like(u, "A", A, (channels, S), q_name="u")
    require.head_size("A", A, size_of="state")
    require.floating("B", B)
    grouped = B.dim() == 4
    if not require.has_shape(B, (batch, T, *(B.shape[2:3] if grouped else ()), S)):
        raise ValueError(
            f"B must have shape {(batch, T, S)} or, in groups, ({batch}, {T}, G, {S}), got {tuple(B.shape)}"
        )
    require.like(u, "B", B, B.shape, q_name="u")
    if grouped and (B.shape[2] == 0 or channels % B.shape[2] != 0):
        raise ValueError(
            f"B must have a number of groups that divides the {channels} channels of u, got {B.shape[2]}"
        )
    require.like(u, "C", C, B.shape, q_name="u")
    require.same_dtype(u, "B", B, q_name="u")
    require.same_dtype(u, "C", C, q_name="u")
    N = require.sequences(u, cu_seqlens, q_name="u")
    require.optional(u, "D", D, (channels,), q_name="u")
    require.optional(u, "z", z, u.shape, q_name="u")
    require.parameter(u, "delta_bias", delta_bias, (channels,), q_name="u")
    require.flags(delta_softplus=delta_softplus, return_last_state=return_last_state)
    require.optional(u, "initial_states", initial_states, (N, channels, S), q_name="u")

    if checking():
        values = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias}
        check_values(values | {"initial_states": initial_states}, cu_seqlens, gates=("A",), lowest=("delta",))
        if not delta_softplus:
            bias = None if delta_bias is None else delta_bias.reshape(channels)
            check_steps("delta", delta, bias, cu_seqlens)

    bias = None if delta_bias is None else delta_bias.reshape(channels)
    if not grouped:
        B, C = B.unsqueeze(2), C.unsqueeze(2)
    given = op.Inputs(u, delta, A, B, C, D, z, bias, initial_states, cu_seqlens, delta_softplus)
    y, states = op.forward(*given)
    return (y, states) if return_last_state else y
