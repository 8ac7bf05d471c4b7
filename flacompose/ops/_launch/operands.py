"""Operands and block sizes of launches, and the launch of the token kernel of all matrix states."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.sequences import Sequences
from flacompose.ops._tensors.sizes import MAX_HEAD_SIZE, always_true
from flacompose.ops._tiles.blocks import TokenGates, TokenStates, TokenVectors, matrix_token_kernel

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def block(D: int, largest: int) -> int:
    """The smallest power of two from 16 on that is at least `D`, or `largest` if that is less."""
    return min(max(1 << (D - 1).bit_length(), 16), largest)


def tile_count(D: int, B: int) -> int:
    return (D + B - 1) // B


def token_blocks(K: int, V: int) -> tuple[int, int]:
    """Keys and values of a block of a token kernel: all keys, and 4096 elements of the state."""
    BK = block(K, 512)
    return BK, block(V, max(4096 // BK, 8))


def launch_by_gates(
    kernel: Any,
    programs: int,
    *parts: Mapping[str, Any],
    gated: bool = True,
) -> None:
    """Launch a kernel for factorisable gates, and again for other gates, unless nothing is `gated`.

    The `parts` have no name in common: the call raises if one is given twice, as ``{**a, **b}`` does not.
    """
    arguments = reduce(lambda one, other: dict(**one, **other), parts)
    for factorisable in (True, False) if gated else (True,):
        launch(kernel, (programs,), **arguments, FACTORISABLE=factorisable)


def operand_dtype(x: Tensor) -> torch.dtype:
    """The dtype of `x` in kernels. Float16 becomes float32, since large states and sums would overflow."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32


def operand(x: MaybeTensor) -> MaybeTensor:
    """`x` in the dtype of kernels, contiguous, or None for an absent one."""
    return None if x is None else x.to(operand_dtype(x)).contiguous()


def by_token(x: Tensor) -> tuple[Tensor, int]:
    """``x [B, T, H, D]`` with contiguous tokens, and the number of elements from one token to the next.

    Tokens may be slices of wider ones, such as of a fused projection, if all rows have the same distance
    between tokens. Otherwise `x` is copied.

    They need not be aligned: Triton checks the alignment of each pointer, and Inductor derives it from the
    offset of a view. Inductor also ensures that the strides are those of the trace, with a copy if need be.
    """
    B, T, H, D = x.shape
    one_token = always_true(T == 1)
    # The stride of an axis of size 1 may be any number.
    together = always_true(D == 1) or always_true(x.stride(3) == 1)
    together = together and (always_true(H == 1) or always_true(x.stride(2) == D))
    rows = one_token or always_true(B == 1) or always_true(x.stride(0) == T * x.stride(1))
    if together and rows:
        return x, x.stride(0 if one_token else 1)
    return x.contiguous(), H * D


def operand_by_token(x: Tensor) -> tuple[Tensor, int]:
    """`by_token` of `x` in the dtype of kernels."""
    return by_token(x.to(operand_dtype(x)))


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    *,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    u: Tensor | None = None,
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    read_before: bool = False,
    delta_rule: bool = False,
    softmax: bool = False,
    full_precision: bool = False,
    count: int | None = None,
    stride: int | None = None,
    norm_eps: float | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``, or with `count` and `stride`, ``[N, count, HV, K, V]`` states.

    The gates are ``g [B, T, HV]`` and ``g_gamma [HV]``, which add, ``gk [B, T, HG, K]`` for HG heads that
    divide HV, and ``gv [B, T, HV, V]``; the bonus is ``u [H, K]``. ``beta [B, T, HV]`` is the strength of
    writes. With `delta_rule` a write replaces the value that is read by ``a [B, T, H, K]``, or by the key if
    `a` is None. ``b``, of the shape of `a`, writes the read of `a`. With `read_before` `a` reads before the
    state decays. `softmax` replaces `q` by its softmax. `full_precision` returns the output in float32. With
    `norm_eps` queries and keys are divided by their norms, the square roots of `norm_eps` plus the sums of
    their squares. With `in_place` the kernel overwrites a copy of the initial state with the final one;
    Inductor omits the copy if the caller overwrites the initial state.
    """
    H, K = q.shape[2:]
    HV, V = v.shape[2:]
    sequences = Sequences(q, cu_seqlens)
    dtype = torch.float32 if full_precision else v.dtype
    o = torch.empty_like(v, dtype=dtype, memory_format=torch.contiguous_format)
    if in_place and initial_state is not None:
        initial_state = final_state = initial_state.to(
            torch.float32, copy=True, memory_format=torch.contiguous_format
        )
    else:
        final_state = sequences.per_sequence(*([] if count is None else [count]), HV, K, V)
    BK = block(K, MAX_HEAD_SIZE)  # a program needs all keys
    BV = block(V, 4096 // BK)
    vectors, strides = zip(*map(by_token, (q, k, v)))
    launch(
        matrix_token_kernel,
        (sequences.N * HV * tile_count(V, BV),),
        TokenVectors(*vectors, *strides),
        TokenGates(*map(operand, (g, g_gamma, gk, gv))),
        TokenStates(operand(initial_state), final_state, count, stride),
        *map(operand, (beta, u, a, b)),
        o,
        **sequences.arguments,
        scale=scale,
        norm_eps=norm_eps,
        H=H,
        HV=HV,
        HG=H if gk is None else gk.shape[2],
        K=K,
        V=V,
        BK=BK,
        BV=BV,
        DELTA_RULE=delta_rule,
        READ_BEFORE=read_before,
        SOFTMAX=softmax,
    )
    return o, final_state
