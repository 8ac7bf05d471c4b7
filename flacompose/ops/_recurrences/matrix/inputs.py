"""The signature of the linear recurrence with a matrix state: its arguments and results.

Every published recurrence of this kind is a choice of these arguments; `scheme` says which ones go together.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose._errors import ValueError
from flacompose.ops._operators.signature import AUTOCAST, GATE, Autocast, Dtype, Signature
from flacompose.ops._tensors.sizes import violated


class Inputs(NamedTuple):
    """The arguments of every form, in the order of the schema."""

    q: Annotated[Tensor, "B T H K", Autocast(unless="softmax")]
    k: Annotated[Tensor, "B T H K", AUTOCAST]
    # HV is H, or a multiple of it in head decay and the delta rule.
    v: Annotated[Tensor, "B T HV V", AUTOCAST]
    g: Annotated[Tensor | None, "B T HV", GATE] = None  # a decay per token and head
    g_gamma: Annotated[Tensor | None, "HV", GATE] = None  # a decay per head, the same for every token
    gk: Annotated[Tensor | None, "B T HV K", GATE] = None  # a decay per token, head and channel of the keys
    gv: Annotated[Tensor | None, "B T HV V", GATE] = None  # a decay per token, head and channel of the values
    u: Annotated[Tensor | None, "H K"] = None  # the bonus of the current token
    beta: Annotated[Tensor | None, "B T HV"] = None  # the strength of writes, 1 if absent
    a: Annotated[Tensor | None, "B T H K", AUTOCAST] = None  # reads `a^T S`; `k` if absent
    b: Annotated[Tensor | None, "B T H K", AUTOCAST] = None  # `b (a^T S)` is added to the state
    initial_state: Annotated[Tensor | None, "N HV K V"] = None
    cu_seqlens: Tensor | None = None  # [N + 1]
    scale: float = 1.0
    delta_rule: bool = False  # a write replaces the value that `a` reads, by the part `beta`
    read_before: bool = False  # whether `a` reads the state before it decays
    softmax: bool = False  # the softmax of `q`, logits of any dtype, reads the state
    full_precision: bool = False  # the output has the dtype of states, whatever that of the inputs


class Outputs(NamedTuple):
    """The results."""

    o: Annotated[Tensor, "B T HV V", Dtype("v", unless="full_precision")]
    final_state: Annotated[Tensor, "N HV K V"]


SIGNATURE = Signature(Inputs, Outputs)
NORM_EPS = 1e-6  # added to the squared norms by which queries and keys are divided


SCHEME_CHOOSERS = "g g_gamma gk gv u beta a b delta_rule read_before softmax full_precision".split()
# The arguments that each scheme takes and, below, needs.
SCHEME_ARGUMENTS = {
    "head_decay": {"g", "g_gamma", "beta"},
    "channel_decay": {"gk", "gv", "u", "softmax", "full_precision"},
    "delta_rule": {"delta_rule", "g", "gk", "beta", "a", "read_before"},
    "low_rank": {"gk", "a", "b", "read_before"},
}
NEEDS = {"delta_rule": ("beta",), "low_rank": ("a",)}
SHARES_HEADS = ("head_decay", "delta_rule")


def scheme(inputs: Inputs) -> str:
    """The scheme that computes these inputs: a module of this package, with `eager` and `cuda`.

        chosen by                               scheme
        b                                       low_rank
        delta_rule                              delta_rule
        gk, gv, u, softmax or full_precision    channel_decay
        none of these                           head_decay

    Raises:
        ValueError: If the scheme does not take one of the arguments, or needs another, or heads are shared.
    """
    given = [x for x in SCHEME_CHOOSERS if (y := getattr(inputs, x)) is not None and y is not False]
    of_channels = not SCHEME_ARGUMENTS["channel_decay"].isdisjoint(given)
    name = "low_rank" if inputs.b is not None else "delta_rule" if inputs.delta_rule else "head_decay"
    name = "channel_decay" if name == "head_decay" and of_channels else name
    for x in given:
        if x not in SCHEME_ARGUMENTS[name]:
            others = ", ".join(y for y in given if y != x) or "no gate, a or b"
            raise ValueError(f"{x} must not be given with {others}: {name} does not compute both")
    for x in NEEDS.get(name, ()):
        if x not in given:
            raise ValueError(f"{x} must be given with {', '.join(given)}, got None")
    H, HV = inputs.q.shape[2], inputs.v.shape[2]
    if name not in SHARES_HEADS and violated(H == HV):
        raise ValueError(f"v must have the {H} heads of q in {name}, got {HV}")
    return name
