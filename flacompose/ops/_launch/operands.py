"""What the launches of all families share, and the launch of the token-by-token kernel of all with matrix states."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.sequences import Sequences
from flacompose.ops._tensors.sizes import MAX_HEAD_SIZE, always_true
from flacompose.ops._tiles.blocks import matrix_token_kernel

NOTHING: Mapping[str, Any] = {}
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def block(D: int, largest: int) -> int:
    """The power of two, 16 at least, that holds `D`, or `largest`."""
    return min(max(1 << (D - 1).bit_length(), 16), largest)


def tile_count(D: int, B: int) -> int:
    return (D + B - 1) // B


def token_blocks(K: int, V: int) -> tuple[int, int]:
    """Keys and values of a block where a kernel computes one token: all keys, and 4096 elements of the state."""
    BK = block(K, 512)
    return BK, block(V, max(4096 // BK, 8))


def launch_by_gates(
    kernel: Any,
    programs: int,
    *parts: Mapping[str, Any],
    gated: bool = True,
    strong: Mapping[str, Any] = NOTHING,
) -> None:
    """Launch a kernel for what has mild gates, and then for the rest. All is mild where nothing is `gated`.

    In the second launch, the arguments in `strong` take the place of those of the same names. The `parts` have no name
    in common: a call raises where one is given twice, as ``{**a, **b}`` does not.
    """
    arguments = reduce(lambda one, other: dict(**one, **other), parts)
    for mild in (True, False) if gated else (True,):
        launch(kernel, (programs,), **(arguments if mild else {**arguments, **strong}), MILD=mild)


def operand_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which kernels take `x`. Not float16, which overflows where a state or a sum of products is large."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32


def operand(x: MaybeTensor) -> MaybeTensor:
    """`x` as kernels take it, or None for an absent one."""
    return None if x is None else x.to(operand_dtype(x)).contiguous()


def by_token(x: Tensor) -> tuple[Tensor, int]:
    """``x [B, T, H, D]`` as kernels read it, and how many elements it is from one token to the next.

    Tokens may be parts of wider ones, such as slices of a joined projection, if those of all rows are equally far
    apart. Otherwise `x` is copied.

    They need not be aligned: Triton asks of each pointer whether it is, and Inductor works that out from the offset of
    a view. Inductor also sees to it that the strides are those of the trace, with a copy if need be.
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
    """`by_token` of `x` in the dtype that kernels take."""
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

    The gates are ``g [B, T, HV]`` and ``g_gamma [HV]``, which add, ``gk [B, T, HG, K]`` for HG heads that divide HV,
    and ``gv [B, T, HV, V]``; the bonus is ``u [H, K]``. ``beta [B, T, HV]`` is how strongly a token is written, and
    with `delta_rule` how much it replaces of what is there, which ``a [B, T, H, K]`` or else the key reads. ``b`` of
    the shape of `a` writes back what that reads. With `read_before` `a` reads before the state decays. `softmax` reads
    with the softmax of `q`. `full_precision` gives the output in float32. With `norm_eps` queries and keys are divided
    by their norms, the roots of it and the sums of their squares. `in_place` has the kernel write the final state where
    it reads a copy of the initial one, which Inductor leaves out if the caller writes the one over the other.
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
    BK = block(K, MAX_HEAD_SIZE)  # a program has all keys
    BV = block(V, 4096 // BK)
    gates_and_state = map(operand, (beta, g, g_gamma, gk, gv, u, a, b, initial_state))
    (q, q_token), (k, k_token), (v, v_token) = map(by_token, (q, k, v))
    launch(
        matrix_token_kernel,
        (sequences.N * HV * tile_count(V, BV),),
        *(q, k, v, *gates_and_state, o, final_state),
        **sequences.arguments,
        scale=scale,
        norm_eps=norm_eps,
        H=H,
        HV=HV,
        HG=H if gk is None else gk.shape[2],
        K=K,
        V=V,
        q_token=q_token,
        k_token=k_token,
        v_token=v_token,
        count=count,
        stride=stride,
        BK=BK,
        BV=BV,
        DELTA_RULE=delta_rule,
        READ_BEFORE=read_before,
        SOFTMAX=softmax,
    )
    return o, final_state
