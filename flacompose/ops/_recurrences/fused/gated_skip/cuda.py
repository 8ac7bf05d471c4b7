"""Launches of the Triton kernel on CUDA, in float32, bfloat16 and float16."""

from __future__ import annotations

from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import block, by_token, tile_count
from flacompose.ops._launch.sequences import Sequences
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.fused.gated_skip.inputs import Inputs
from flacompose.ops._recurrences.fused.gated_skip.kernels import gated_skip_kernel
from flacompose.ops._tensors.packed import bounds, sequence_count

TILE = 2048  # elements per program


def forward(inputs: Inputs) -> tuple[Tensor]:
    """``(o [B, T, H, P],)``."""
    rows, (H, P) = _rows(inputs), inputs.x.shape[2:]
    o = rows.per_token(H, P, dtype=inputs.x.dtype)
    _launch(inputs, rows, None, o=o)
    return (rows.batched(o),)


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The requested gradients."""
    rows, wanted, found = _rows(call.inputs), call.wanted_input, {}
    for name in ("y", "x", "w", "z"):
        u = wanted(name)
        found[name] = None if u is None else rows.per_token(*u.shape[2:], dtype=u.dtype)
    D = wanted("D")
    dD = None if D is None else rows.per_chunk(*D.shape)
    _launch(call.inputs, rows, call.do, dD=dD, **{f"d{name}": u for name, u in found.items()})
    found = {name: None if u is None else rows.batched(u) for name, u in found.items()}
    return call.select(D=None if dD is None else dD[: rows.chunks].sum(0), **found)


def _rows(inputs: Inputs) -> Sequences:
    """The chunks of all tokens of the batch. A chunk may contain tokens of two rows, or tokens in no sequence."""
    rows = Sequences(inputs.x, None, TILE // block(inputs.x.shape[3], TILE))
    rows.chunks = tile_count(rows.B * rows.T, rows.C)
    return rows


def _launch(inputs: Inputs, rows: Sequences, do: Tensor | None, **results: Tensor | None) -> None:
    """Fill `o` or, if `do` is given, the gradients in `results` that are not None."""
    x, (H, P) = inputs.x, inputs.x.shape[2:]
    D, w = (None if u is None else u.contiguous() for u in (inputs.D, inputs.w))
    # As in other ops, wrong bounds are clamped, since the host does not read them.
    cu_seqlens = None if inputs.cu_seqlens is None else bounds(inputs.cu_seqlens, rows.T)
    given = dict.fromkeys(("o", "dy", "dx", "dD", "dw", "dz")) | results
    for name, u in (("y", inputs.y), ("x", x), ("z", inputs.z), ("do", do)):
        given[name], given[f"{name}_token"] = (None, None) if u is None else by_token(u)
    launch(
        gated_skip_kernel, (rows.chunks * H,), **given,
        D=D, w=w, cu_seqlens=cu_seqlens, tokens=rows.B * rows.T, N=sequence_count(x, cu_seqlens),
        H=H, P=P, E=1 if D is None else D.shape[1], BT=rows.C, BP=block(P, TILE), num_warps=4,
    )  # fmt: skip
