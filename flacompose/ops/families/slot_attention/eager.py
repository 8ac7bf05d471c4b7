"""One token of gated slot attention as two passes of vector decay, in PyTorch or in kernels.

    Sk = Sk_0 diag(exp g) + k s^T        p = softmax(scale * Sk^T q)
    Sv = diag(exp g) Sv_0 + s v^T        o = Sv^T p

The first pass gives the logits and has its gate on the value axis, where the slots are. The second reads with the
softmax of the logits and has its gate on the key axis. The queries of a group are read one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flacompose.ops._groups import by_head, in_turn, spread
from flacompose.ops.families.slot_attention.inputs import Inputs
from flacompose.ops.families.vector_decay import eager as vector_decay
from flacompose.ops.families.vector_decay.inputs import Inputs as Pass

Forward = Callable[[Pass], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, ...]]


def forward(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """``(o [B, 1, H, G, V], final_k [B, H, K, M], final_v [B, H, M, V])``."""
    keys = _keys(inputs)
    logits, final_k = vector_decay.forward(keys)
    o, final_v = vector_decay.forward(_values(inputs, keys, logits))
    return _by_head(o), final_k, final_v


def backward(
    inputs: Inputs,
    do: Tensor | None,
    d_final_k: Tensor | None,
    d_final_v: Tensor | None,
    output_mask: Sequence[bool],
    passes: tuple[Forward, Backward] = (vector_decay.forward, vector_decay.backward),
) -> tuple[Tensor, ...]:
    """``(dq, dk, dv, ds, dg, d_initial_k, d_initial_v)``, empty where `output_mask` is False or the input is absent.

    `passes` are the forward and the backward of vector decay.
    """
    pass_forward, pass_backward = passes
    want_q, want_k, want_v, want_s, want_g, want_initial_k, want_initial_v = output_mask
    keys = _keys(inputs)
    dq = dk = dv = ds = dg = d_initial_k = d_initial_v = d_logits = None
    if do is not None or d_final_v is not None:
        through_logits = want_q or want_k or want_s or want_g or want_initial_k
        wanted = [through_logits, want_s, want_v, want_g, False, False, want_initial_v]
        values = _values(inputs, keys, pass_forward(keys)[0])
        found = pass_backward(values, None if do is None else in_turn(do), d_final_v, wanted)
        d_logits, ds, dv, dg, _, _, d_initial_v = _wanted(found, wanted)
    wanted = [want_q, want_k, want_s, False, want_g, False, want_initial_k]
    if (d_logits is not None or d_final_k is not None) and any(wanted):
        found = pass_backward(keys, d_logits, d_final_k, wanted)
        dq, dk, written, _, decayed, _, d_initial_k = _wanted(found, wanted)
        ds, dg = _sum(ds, written), _sum(dg, decayed)
    dq = None if dq is None else _by_head(dq)
    dk, dv, ds, dg = (None if x is None else _new(x[:, :1]) for x in (dk, dv, ds, dg))
    made = dq, dk, dv, ds, dg, d_initial_k, d_initial_v
    return tuple(
        inputs.q.new_empty(0) if x is None or not wanted else x.new_zeros(x.shape) if dx is None else dx
        for x, dx, wanted in zip(inputs[:7], made, output_mask, strict=True)
    )


def _keys(inputs: Inputs) -> Pass:
    """The first pass. Logits are not rounded: their error would be a relative error of the softmax's weights."""
    k, s, g = (spread(x, inputs.q.shape[3]) for x in (inputs.k, inputs.s, inputs.g))
    q, initial_k, scale = in_turn(inputs.q), inputs.initial_k, inputs.scale
    return Pass(q, k, s, gv=g, initial_state=initial_k, scale=scale, full_precision=True)


def _values(inputs: Inputs, keys: Pass, logits: Tensor) -> Pass:
    """The second pass, with the slots and gates of the first."""
    v = spread(inputs.v, inputs.q.shape[3])
    return Pass(logits, keys.v, v, gk=keys.gv, initial_state=inputs.initial_v, softmax=True)


def _by_head(o: Tensor) -> Tensor:
    return _new(by_head(o, 1, o.shape[1]))


def _new(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)  # an op returns no view


def _wanted(gradients: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor | None]:
    return [dx if wanted else None for dx, wanted in zip(gradients, mask, strict=True)]


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x + y
