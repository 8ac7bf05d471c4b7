"""What the launches of all families share, that of the token-by-token form among it."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._define import launch
from flacompose.ops._varlen import bounds
from flacompose.ops.families._kernels import recurrent_kernel


def block(D: int, largest: int) -> int:
    """The power of two, 16 at least, that holds `D`, or `largest`."""
    return min(max(1 << (D - 1).bit_length(), 16), largest)


def tile_count(D: int, B: int) -> int:
    return (D + B - 1) // B


def operand_dtype(x: Tensor) -> torch.dtype:
    """Of computations with `x`: float16 overflows where a state or a sum of products is large."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32


def operand(x: Tensor) -> Tensor:
    return x.to(operand_dtype(x)).contiguous()


def given(x: Tensor | None) -> Tensor | None:
    return None if x is None else operand(x)


def per_token(x: Tensor, *shape: int, packed: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for an output of `shape` per token of ``x [B, T, ...]``, without the batch axis (`batched` adds it).

    Tokens in no packed sequence are written by nobody.
    """
    new = x.new_zeros if packed else x.new_empty
    # A batch axis of 1 stops Inductor in PyTorch 2.11, where it clones such memory.
    return new(x.shape[0] * x.shape[1], *shape, dtype=dtype)


def batched(x: Tensor, T: int) -> Tensor:
    return x.unflatten(0, (-1, T))


def segment_count(NT: int, programs: int) -> int:
    """Parts in which to sweep a sequence of `NT` chunks, `programs` to a part: enough to fill a large chip.

    By the shape of one row, so that its bits do not depend on the batch size.
    """
    # Not `max` and `min`, which would ask a symbolic length and so bound it.
    return torch.sym_max(1, torch.sym_min(NT // 64, 512 // programs))


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    gv: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    u: Tensor | None = None,
    softmax: bool = False,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``.

    The gates are ``g [B, T, HV]``, or ``[HV]`` for every token, ``gk [B, T, H, K]`` and ``gv [B, T, HV, V]``; the
    bonus ``u [H, K]``. `softmax` reads with the softmax of `q`.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    g, gk, gv, u, initial_state = given(g), given(gk), given(gv), given(u), given(initial_state)
    if cu_seqlens is None:
        N = B
    else:
        cu_seqlens = bounds(cu_seqlens, T)
        N = cu_seqlens.shape[0] - 1
    o = torch.empty_like(v, dtype=torch.float32 if wide else None)
    final_state = q.new_empty(N, HV, K, V, dtype=torch.float32)
    BK = block(K, 256)
    BV = block(V, 4096 // BK)
    launch(
        recurrent_kernel,
        (N * HV * tile_count(V, BV),),
        q,
        k,
        v,
        g,
        gk,
        gv,
        u,
        initial_state,
        o,
        final_state,
        cu_seqlens,
        scale,
        T,
        H,
        HV,
        K,
        V,
        0 if g is None or g.dim() == 1 else HV,
        BK,
        BV,
        softmax,
    )
    return o, final_state
