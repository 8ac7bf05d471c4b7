"""Marks that run a test on entries of the table of recurrences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from .opcase import OpCase
from .recurrences import CASES, GATES_ON_BOTH_AXES, KEY_READS_BEFORE, MAMBA3, MAMBA3_MIMO, SOFTMAX, SSD

__all__ = [
    "CASES",
    "GATES_ON_BOTH_AXES",
    "KEY_READS_BEFORE",
    "MAMBA3",
    "MAMBA3_MIMO",
    "NAMED",
    "ONE_EACH",
    "SELECTIVE",
    "SELECTIVE_GROUPS",
    "SOFTMAX",
    "SSD",
    "TWO_FORMS",
    "OpCase",
]

NAMED = {case.name: case for case in (*CASES, SSD, MAMBA3)}
SELECTIVE = NAMED["selective_scan_fn"]
# Each of H groups of channels has a B and a C of its own. Not under the whole contract, which draws any number of each.
SELECTIVE_GROUPS = replace(
    SELECTIVE,
    name="selective_scan_fn-groups",
    inputs={**SELECTIVE.inputs, **dict.fromkeys("BC", ("B", "T", "H", "S"))},
    other_ops=(),
)


def every(cases: Iterable[OpCase] = CASES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def given(case: OpCase) -> tuple[str, frozenset[str]]:
    """The recurrence, and the arguments that its operator gets."""
    return case.recurrence, frozenset(case.operands.get(name, name) for name in (*case.inputs, *case.gates))


# On a CPU both forms of a recurrence run the same code under two names, as test_forms shows. So there the entries are
# left out whose form is "recurrent" and whose arguments an entry of the other form has, with heads in as large groups.
CHUNKED = [case for case in CASES if case.form != "recurrent"]
DISTINCT = [
    case
    for case in CASES
    if torch.cuda.is_available()
    or case.form != "recurrent"
    or not any(given(other) == given(case) and other.groups >= case.groups for other in CHUNKED)
]

each_op = every(DISTINCT)
each_op_and_mamba = every([*DISTINCT, SSD, MAMBA3])
each_gated_op = every([case for case in DISTINCT if case.gates])
each_scaled_op = every([case for case in DISTINCT if case.scaled])
each_softmax = every(SOFTMAX)
# The entries with another form; where both forms of one function have an entry, the first of the two.
PAIRS = {
    (frozenset((case.function, case.other)), *case.gates, case.groups): case
    for case in reversed(CASES)
    if case.other is not None
}
TWO_FORMS = [*reversed(PAIRS.values())]
each_op_of_two_forms = every(TWO_FORMS)
# One entry of each recurrence under each of its names, for tests that take long and to which forms make no difference.
ONE_EACH = [*{(case.reference, *case.renamed): case for case in reversed(NAMED.values())}.values()]
INDUCTOR = [case for case in CASES if case.inductor]
one_op_a_form = every(INDUCTOR)
one_op_a_form_of_kernels = every(
    INDUCTOR if torch.cuda.is_available() else [x for x in INDUCTOR if x in CHUNKED]
)


def of_operators(case: OpCase) -> tuple[object, ...]:
    """What the compiler, exports and sharding see of a call: its operators, and PyTorch's around them."""
    return (
        case.recurrence,
        case.nodes,
        case.before[:1],
        case.prepared,
        len(case.states),
        case.other_ops is None,
    )


# One entry of each such call, for tests of operators. A graph for a GPU has the kernels of a call in it, so that there
# each recurrence is another.
CALLS = {of_operators(case): case for case in reversed(NAMED.values())}
CALLS_OF_OPERATORS = ONE_EACH if torch.cuda.is_available() else [*CALLS.values()]
each_call_of_operators = every([case for case in CALLS_OF_OPERATORS if case in DISTINCT])
# To Inductor an operator on a CPU is a call of no known code.
OPERATORS = {case.forward: case for case in reversed(INDUCTOR) if case.form != "recurrent"}
ONE_OP_A_GRAPH = INDUCTOR if torch.cuda.is_available() else [*OPERATORS.values()]
one_op_a_graph = every(ONE_OP_A_GRAPH)
# On a GPU the losses of each input go through other launches.
LOSSES = ["o", "state", "both"] if torch.cuda.is_available() else ["both"]
