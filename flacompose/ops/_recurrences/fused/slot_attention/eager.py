"""One token of gated slot attention as two passes of channel decay, in PyTorch or in kernels.

    Sk = Sk_0 diag(exp g) + k s^T        p = softmax(scale * Sk^T q)
    Sv = diag(exp g) Sv_0 + s v^T        o = Sv^T p

The slots are the values of the first pass and the keys of the second. The first pass gives the logits, the second
reads with their softmax. The queries of a group become tokens (`_tensors/grouped_queries.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.fused.slot_attention.inputs import Inputs
from flacompose.ops._recurrences.matrix import eager as matrix
from flacompose.ops._recurrences.matrix.inputs import SIGNATURE as PASS
from flacompose.ops._recurrences.matrix.inputs import Inputs as Pass
from flacompose.ops._tensors.grouped_queries import by_head, interleave_zeros, queries_as_tokens

Forward = Callable[[Pass], tuple[Tensor, Tensor]]
Backward = Callable[[BackwardCall[Pass]], Gradients]


def forward(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """``(o [B, 1, H, G, V], final_k [B, H, K, M], final_v [B, H, M, V])``."""
    keys = _keys(inputs)
    logits, final_k = matrix.forward(keys)
    o, final_v = matrix.forward(_values(inputs, keys, logits))
    return _by_head(o), final_k, final_v


def backward(
    call: BackwardCall[Inputs],
    pass_forward: Forward = matrix.forward,
    pass_backward: Backward = matrix.backward,
) -> Gradients:
    """The requested gradients, from the forward and the backward of channel decay."""
    inputs, (do, d_final_k, d_final_v) = call.inputs, call.arriving
    keys = _keys(inputs)
    of_values: Gradients = {}
    of_keys: Gradients = {}
    if do is not None or d_final_v is not None:
        # For each argument of the pass, the input it gets. Its queries are the logits, its keys the slots.
        names = {"k": "s", "v": "v", "gk": "g", "initial_state": "initial_v"}
        wanted = {x for x, name in names.items() if name in call.wanted}
        if call.wants("q", "k", "s", "g", "initial_k"):
            wanted.add("q")
        values = _values(inputs, keys, pass_forward(keys)[0])
        arriving = PASS.outputs(None if do is None else queries_as_tokens(do), d_final_v)
        of_values = pass_backward(BackwardCall(PASS, values, arriving, frozenset(wanted)))
    d_logits = of_values.pop("q", None)
    names = {"q": "q", "k": "k", "v": "s", "gv": "g", "initial_state": "initial_k"}
    wanted = {x for x, name in names.items() if name in call.wanted}
    if (d_logits is not None or d_final_k is not None) and wanted:
        of_keys = pass_backward(
            BackwardCall(PASS, keys, PASS.outputs(d_logits, d_final_k), frozenset(wanted))
        )

    def of_tokens(*gradients: Tensor | None) -> Tensor | None:
        """The gradient of an input that only the first of each group of tokens has."""
        found = [x for x in gradients if x is not None]
        return _new(sum(found[1:], start=found[0])[:, :1]) if found else None

    dq = of_keys.get("q")
    made = {
        "q": None if dq is None else _by_head(dq),
        "k": of_tokens(of_keys.get("k")),
        "v": of_tokens(of_values.get("v")),
        "s": of_tokens(of_values.get("k"), of_keys.get("v")),
        "g": of_tokens(of_values.get("gk"), of_keys.get("gv")),
        "initial_k": of_keys.get("initial_state"),
        "initial_v": of_values.get("initial_state"),
    }
    nothing = {name: torch.zeros_like(getattr(inputs, name)) for name in call.wanted if made[name] is None}
    return call.select(**made | nothing)


def _keys(inputs: Inputs) -> Pass:
    """The first pass. Its logits stay in float32, since the softmax makes an absolute error a relative one."""
    k, s, g = (interleave_zeros(x, inputs.q.shape[3]) for x in (inputs.k, inputs.s, inputs.g))
    q, initial_k, scale = queries_as_tokens(inputs.q), inputs.initial_k, inputs.scale
    return Pass(q, k, s, gv=g, initial_state=initial_k, scale=scale, full_precision=True)


def _values(inputs: Inputs, keys: Pass, logits: Tensor) -> Pass:
    """The second pass, with the slots and gates of the first."""
    v = interleave_zeros(inputs.v, inputs.q.shape[3])
    return Pass(logits, keys.v, v, gk=keys.gv, initial_state=inputs.initial_v, softmax=True)


def _by_head(o: Tensor) -> Tensor:
    return _new(by_head(o, 1, o.shape[1]))


def _new(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)  # an op returns no view
