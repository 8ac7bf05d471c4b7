"""The signature of the linear recurrence with a matrix state: its arguments and results.

Every published recurrence of this kind is a choice of these arguments; `scheme` says which ones go together.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose._errors import ValueError
from flacompose.ops._operators.signature import AUTOCAST, GATE, Autocast, Dtype, Signature


class Inputs(NamedTuple):
    """The arguments of every form, in the order of the schema."""

    q: Annotated[Tensor, "B T H K", Autocast(unless="softmax")]
    k: Annotated[Tensor, "B T H K", AUTOCAST]
    v: Annotated[
        Tensor, "B T HV V", AUTOCAST
    ]  # HV is H, or a multiple of it in head decay and the delta rule
    g: Annotated[Tensor | None, "B T HV", GATE] = None  # a decay per token and head
    g_gamma: Annotated[Tensor | None, "HV", GATE] = None  # a decay per head, the same for every token
    gk: Annotated[Tensor | None, "B T HV K", GATE] = None  # a decay per token, head and channel of the keys
    gv: Annotated[Tensor | None, "B T HV V", GATE] = None  # a decay per token, head and channel of the values
    u: Annotated[Tensor | None, "H K"] = None  # the bonus of the current token
    beta: Annotated[Tensor | None, "B T HV"] = None  # the strength of writes, 1 if absent
    a: Annotated[Tensor | None, "B T H K", AUTOCAST] = None  # reads what is erased; `k` if absent
    b: Annotated[Tensor | None, "B T H K", AUTOCAST] = None  # writes the read of `a`
    initial_state: Annotated[Tensor | None, "N HV K V"] = None
    cu_seqlens: Tensor | None = None  # [N + 1]
    scale: float = 1.0
    delta_rule: bool = False  # a write replaces the value that `a` reads, by the part `beta`
    read_before: bool = False  # whether `a` reads the state before it decays
    softmax: bool = False  # q are logits, of any dtype, and the state is read with their softmax
    full_precision: bool = False  # the output has the dtype of states, whatever that of the inputs


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T HV V", Dtype("v", unless="full_precision")]
    final_state: Annotated[Tensor, "N HV K V"]


SIGNATURE = Signature(Inputs, Outputs)
NORM_EPS = 1e-6  # added to the squared norms by which queries and keys are divided


def scheme(inputs: Inputs) -> str:
    """The cheapest scheme that computes these inputs: a module of this package, with `eager` and `cuda`.

    scheme          arguments of it alone            and beside them
    low_rank        a, b                             gk, read_before
    delta_rule      delta_rule, beta, a              g, gk, read_before (with g)
    channel_decay   gk, gv, u, softmax, full_precision
    head_decay                                       g, g_gamma, beta
    """
    if inputs.delta_rule or inputs.b is not None:
        for name in ("gv", "u"):
            if getattr(inputs, name) is not None:
                raise ValueError(f"{name} must not be given where a write erases: no scheme computes both")
    if inputs.b is not None:
        return "low_rank"
    if inputs.delta_rule:
        return "delta_rule"
    of_channels = any(x is not None for x in (inputs.gk, inputs.gv, inputs.u))
    return "channel_decay" if of_channels or inputs.softmax or inputs.full_precision else "head_decay"
