"""The ops under contract, one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

import flacompose  # noqa: F401  registers the ops
from flacompose.ops import chunk_gla, fused_recurrent_gla
from flacompose.ops.families.vector_decay import reference

Q = K = ("B", "T", "H", "K")
V = ("B", "T", "H", "V")
QKV = {"q": Q, "k": K, "v": V}


@dataclass(frozen=True)
class OpCase:
    """What the suite has to know about one op.

    `call` takes the inputs by name, with `scale`, `initial_state`, `output_final_state` and `cu_seqlens`; `reference`
    takes one batch of whole sequences, the scale as a number, and returns ``(o, final_state)``.
    """

    name: str
    call: Callable[..., tuple[Tensor, Tensor | None]]
    reference: Callable[..., tuple[Tensor, Tensor]]
    forward: str  # the registered op that one call is
    backward: str
    gates: dict[str, tuple[str, ...]] = field(default_factory=dict)  # axes by argument
    inputs: dict[str, tuple[str, ...]] = field(default_factory=lambda: dict(QKV))
    state: tuple[str, ...] = ("N", "H", "K", "V")
    public: bool = True  # it checks its arguments
    inductor: bool = False  # it stands for its family where each test costs a C++ compilation

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {**self.inputs, **self.gates, "initial_state": self.state}


def read_before(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    op: str,
) -> tuple[Tensor, Tensor | None]:
    """RWKV6 without its bonus, straight on the family's op, which takes a gate on the value axis too."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    overload = getattr(torch.ops.flacompose, op)
    o, state = overload(q, k, v, gk, gv, initial_state, cu_seqlens, scale, True)
    return o, state if output_final_state else None


def gla_reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options) -> tuple[Tensor, Tensor]:
    return reference.vector_decay(q, k, v, gk=g, **options)


decay = reference.vector_decay
before = partial(reference.vector_decay, read_before=True)
recurrent = fused_recurrent_gla
chunk, token, back = "vector_decay_chunk", "vector_decay_recurrent", "vector_decay_backward"
# fmt: off
CASES = [
    OpCase("chunk_gla", chunk_gla, gla_reference, chunk, back, {"g": K}, inductor=True),
    OpCase("fused_recurrent_gla-gk-gv", recurrent, decay, token, back, {"gk": K, "gv": V}, inductor=True),
    OpCase("fused_recurrent_gla-gk", recurrent, decay, token, back, {"gk": K}),
    OpCase("fused_recurrent_gla-gv", recurrent, decay, token, back, {"gv": V}),
    OpCase("fused_recurrent_gla", recurrent, decay, token, back),
    OpCase("read_before-chunk", partial(read_before, op=chunk), before, chunk, back, {"gk": K, "gv": V}, public=False),
    OpCase("read_before-recurrent", partial(read_before, op=token), before, token, back, {"gk": K}, public=False),
]
# fmt: on


def every(cases: list[OpCase] = CASES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


each_op = every()
each_gated_op = every([case for case in CASES if case.gates])
each_public_op = every([case for case in CASES if case.public])
one_op_a_form = every([case for case in CASES if case.inductor])
