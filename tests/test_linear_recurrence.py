"""One function for all matrix recurrences: the table of its page, and what the arguments mean together."""

from __future__ import annotations

import inspect
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from contract.graphs import op_nodes, recorded
from torch import Tensor
from torch.export import Dim, export
from torch.testing import assert_close

from flacompose import ops
from flacompose.ops import linear_recurrence

PAGE = (Path(__file__).parents[1] / "docs" / "ops" / "linear_recurrence.md").read_text(encoding="utf-8")
BEFORE_TABLE, TABLE = PAGE.split("<!-- recurrences:end -->")[0].split("<!-- recurrences:begin -->")
ROWS = re.findall(r"^\| `(.+)` \| `(.+)` \|$", TABLE, re.MULTILINE)
DEFINITIONS = "\n".join(re.findall(r"^```python\n(.*?)^```$", BEFORE_TABLE, re.MULTILINE | re.DOTALL))
NO_MATRIX_STATE = {
    "causal_conv1d": "its state is the last inputs",
    "chunk_hgrn": "its state is a vector",
    "selective_scan_fn": "each number of its state has a decay of its own",
    "selective_state_update": "one token of Mamba and of Mamba-2, in PyTorch",
    "linear_recurrence": "the function itself",
}
close = partial(assert_close, atol=1e-10, rtol=1e-10)


def test_the_table_has_every_function() -> None:
    """Both forms of a recurrence are the same function, as the contract proves, and a row has one of them."""
    rows = {
        re.match(r"\w+", call)[0].removeprefix("chunk_").removeprefix("fused_recurrent_") for call, _ in ROWS
    }
    assert len(ROWS) == TABLE.count("\n| `")
    for name in ops.__all__:
        recurrence = name.removeprefix("chunk_").removeprefix("fused_recurrent_")
        assert (recurrence in rows) != (
            name in NO_MATRIX_STATE or f"chunk_{recurrence}" in NO_MATRIX_STATE
        ), name


@pytest.mark.parametrize(("call", "choice"), ROWS, ids=[call for call, _ in ROWS])
def test_rows_are_equal(call: str, choice: str) -> None:
    """Values, final states, and the gradients of all inputs, with grouped heads where the function has them."""
    names: dict = {}
    grouped = "``HV``" in inspect.getdoc(getattr(ops, re.match(r"\w+", call)[0]))
    definitions = DEFINITIONS.replace("= 2, 70, 2, 2,", "= 2, 70, 2, 4,") if grouped else DEFINITIONS
    exec(definitions, names)
    states: list[Tensor] = []

    def with_state(function, keyword: str, *args, **options):
        o, state = function(*args, **options, **{keyword: True})
        parts = state if isinstance(state, tuple) else [state]
        states.extend(x.mT if function is ops.mamba_chunk_scan_combined else x for x in parts)
        return o, state

    for name in ops.__all__:
        scan = name == "mamba_chunk_scan_combined"
        keyword = "return_final_states" if scan else "output_final_state"
        names[name] = partial(with_state, getattr(ops, name), keyword)
    used = {name for name, x in names.items() if isinstance(x, Tensor) and re.search(rf"\b{name}\b", call)}
    leaves = [names[name].requires_grad_() for name in sorted(used)]

    results = []
    for code in (call, choice):
        states.clear()
        o, _ = eval(code, names)
        o = o[:, 1::2] if "delta_product" in call and code == choice else o
        made = [o, *states[:2]]
        loss = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in made)
        results.append([*made, *torch.autograd.grad(loss, leaves)])
    for x, y in zip(*results, strict=True):
        close(x, y)


def inputs(T: int = 70, HV: int = 2, B: int = 2) -> dict[str, Tensor]:
    names: dict = {}
    exec(DEFINITIONS.replace("= 2, 70, 2, 2,", f"= {B}, {T}, 2, {HV},"), names)
    return {name: x for name, x in names.items() if isinstance(x, Tensor)}


# Choices that no function above makes, one or more for each family and each way to come to it.
CHOICES = {
    "scalar_decay": ["g"],
    "vector_decay": ["g gv", "g gk", "g gk gv", "g before u", "before", "gv before u"],
    "delta_rule": ["g gk beta", "beta a", "gk beta a"],
    "low_rank": ["g gk a b", "beta erase", "g gk beta a erase", "a b erase"],
}
each_choice = pytest.mark.parametrize(
    ("family", "names"), [(family, names) for family in CHOICES for names in CHOICES[family]]
)
WORDS = {"before": {"read": "before"}, "erase": {"erase": "before"}}


def chosen(x: dict[str, Tensor], names: str) -> dict:
    """The arguments that `names` says, of which two are words."""
    arguments: dict = {"q": x["q"], "k": x["k"], "v": x["v"]}
    for name in names.split():
        arguments |= WORDS.get(name) or {name: x[name]}
    return arguments


def by_tokens(
    q, k, v, g=None, gk=None, gv=None, beta=None, a=None, b=None, u=None, read="after", erase="after", S=None
) -> tuple[Tensor, Tensor]:
    """The law of the page, one token after the other."""
    (B, T, HV, V), K = v.shape, q.shape[3]
    q, k, a, b = (None if x is None else x.repeat_interleave(HV // x.shape[2], 2) for x in (q, k, a, b))
    S, o = torch.zeros(B, HV, K, V, dtype=v.dtype) if S is None else S, []
    for t in range(T):
        old, key, value, query = S, k[:, t, :, :, None], v[:, t, :, None], q[:, t, :, None]
        for decay in (
            None if g is None else g[:, t, :, None, None],
            None if gk is None else gk[:, t, :, :, None],
            None if gv is None else gv[:, t, :, None],
        ):
            S = S if decay is None else decay.exp() * S
        state_read = old if erase == "before" else S
        if beta is not None:
            reader = key.mT if a is None else a[:, t, :, None]
            S = S + beta[:, t, :, None, None] * key @ (value - reader @ state_read)
        else:
            erased = 0 if a is None else b[:, t, :, :, None] @ (a[:, t, :, None] @ state_read)
            S = S + erased + key @ value
        if read == "before":
            weights = 0 if u is None else u.repeat_interleave(HV // u.shape[0], 0)[None, :, :, None]
            o.append(query @ (old + weights * key @ value))
        else:
            o.append(query @ S)
    return K**-0.5 * torch.cat(o, 2).transpose(1, 2), S


@each_choice
@pytest.mark.parametrize("HV", [2, 4], ids=["heads", "groups"])
def test_choices_without_a_function(family: str, names: str, HV: int) -> None:
    """Equal to the law, with gradients, in one call of the operator of the family, whole and in two pieces."""
    arguments = chosen(inputs(HV=HV), names)
    leaves = [x.requires_grad_() for x in arguments.values() if isinstance(x, Tensor)]
    with recorded() as calls:
        actual = linear_recurrence(**arguments, output_final_state=True)
    assert [op.name() for op, _, _ in calls] == [f"flacompose::{family}_chunk"]
    expected = by_tokens(**arguments)
    gradients = [torch.autograd.grad(o.sin().sum() + S.cos().sum(), leaves) for o, S in (actual, expected)]
    for x, y in zip((*actual, *gradients[0]), (*expected, *gradients[1]), strict=True):
        close(x, y)

    state, o = None, []
    for window in (slice(0, 33), slice(33, None)):
        piece = {n: x[:, window] if isinstance(x, Tensor) and n != "u" else x for n, x in arguments.items()}
        part, state = linear_recurrence(**piece, initial_state=state, output_final_state=True)
        o.append(part)
    close(torch.cat(o, 1), actual[0])
    close(state, actual[1])


@each_choice
def test_one_row_one_token_and_packed(family: str, names: str) -> None:
    """A token is the recurrent operator; packed sequences are those that they are alone."""
    x = inputs(B=1)
    arguments = chosen(x, names)
    cu_seqlens = torch.tensor([0, 1, 1, 40])
    o, states = linear_recurrence(**arguments, cu_seqlens=cu_seqlens, output_final_state=True)
    assert states.shape[0] == 3 and not states[1].any() and not o[:, 40:].any()
    for n, (lo, hi) in enumerate(((0, 1), (1, 40))):
        alone = {
            name: y[:, lo:hi] if isinstance(y, Tensor) and name != "u" else y for name, y in arguments.items()
        }
        with recorded() as calls:
            part, state = linear_recurrence(**alone, output_final_state=True)
        form = "recurrent" if hi - lo == 1 else "chunk"
        assert [op.name() for op, _, _ in calls] == [f"flacompose::{family}_{form}"]
        close(o[:, lo:hi], part)
        close(states[2 * n], state[0])


@each_choice
def test_exported_it_is_one_node_for_every_length(family: str, names: str) -> None:
    arguments = chosen(inputs(HV=4), names)
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    others = {name: x for name, x in arguments.items() if not isinstance(x, Tensor)}

    class Module(torch.nn.Module):
        def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            return linear_recurrence(**tensors, **others, output_final_state=True)

    T = Dim("T", min=2, max=4096)
    shapes = {name: None if name == "u" else {1: T} for name in tensors}
    program = export(Module(), (tensors,), dynamic_shapes=(shapes,))
    assert op_nodes(program.graph_module) == [f"flacompose::{family}_chunk"]
    longer = {name: x if name == "u" else torch.cat([x, x], 1) for name, x in tensors.items()}
    for x, y in zip(program.module()(longer), Module()(longer)):
        close(x, y)


def test_refusals_name_both_arguments() -> None:
    """What the page lists is run there; these are errors of one argument, and what comes in the wrong shape."""
    x = inputs(HV=4)
    for message, arguments in {
        'read must be "after" or "before", got \'first\'': {"read": "first"},
        'erase must be "after" or "before", got \'first\'': {"erase": "first"},
        "u must have shape (2, 8), got (4, 8)": {"u": torch.ones(4, 8), "read": "before"},
        "gk must have shape (2, 70, 4, 8), got (2, 70, 2, 8)": {"gk": x["k"]},
        "b must have shape (2, 70, 2, 8), got (2, 70, 4, 8)": {"a": x["a"], "b": x["gk"]},
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            linear_recurrence(x["q"], x["k"], x["v"], **arguments)
