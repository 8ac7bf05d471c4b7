"""One function for all matrix recurrences: the table of its page, and what the arguments mean together."""

from __future__ import annotations

import inspect
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.graphs import op_nodes, recorded
from torch import Tensor
from torch.export import Dim, export
from torch.testing import assert_close

from flacompose import ops
from flacompose.ops import linear_recurrence
from flacompose.ops._recurrences.matrix.inputs import Inputs, scheme

PAGE = (Path(__file__).parents[4] / "docs" / "ops" / "linear_recurrence.md").read_text(encoding="utf-8")
BEFORE_TABLE, TABLE = PAGE.split("<!-- recurrences:end -->")[0].split("<!-- recurrences:begin -->")
ROW = re.compile(r"^\| `(.+)` \| `(.+)` \|$", re.MULTILINE)
ROWS, REFUSED = ROW.findall(TABLE), ROW.findall(BEFORE_TABLE.split("<!-- refused:")[1])
DEFINITIONS = re.findall(r"^```python\n(.*?)^```$", BEFORE_TABLE, re.MULTILINE | re.DOTALL)[-1]
SIZES = "B, T, H, HV, K, V, M = 2, 70, 2, 2,"
WITHOUT_ROW = {
    "causal_conv1d": "its state is the last inputs",
    "chunk_hgrn": "its state is a vector",
    "chunk_mlstm": "it is normalised, and stabilised",
    "chunk_rg_lru": "its state is a vector",
    "chunk_rwkv4": "its state is two vectors, one of which divides the other",
    "selective_scan_fn": "each number of its state has a decay of its own",
    "selective_state_update": "one token of Mamba and of Mamba-2, in PyTorch",
    "linear_recurrence": "the function itself",
    "mamba3_siso_combined": "a token writes again at the next",
    "mamba3_mimo_combined": "a token writes again at the next",
}
close = partial(assert_close, atol=1e-10, rtol=1e-10)


def definitions(T: int = 70, HV: int = 2, B: int = 2) -> dict[str, Any]:
    """What the names in the table stand for, with other sizes."""
    names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "linear_recurrence": linear_recurrence}
    exec(DEFINITIONS.replace(SIZES, f"B, T, H, HV, K, V, M = {B}, {T}, 2, {HV},"), names)
    return names


def recurrence(call: str) -> str:
    return re.sub("^(chunk|fused_recurrent)_", "", re.match(r"\w+", call)[0])


def test_the_table_has_every_function() -> None:
    """Both forms of a recurrence are the same function, as the contract proves, and a row has one of them."""
    assert len(ROWS) == TABLE.count("\n| `")
    of_rows, others = {recurrence(call) for call, _ in ROWS}, {recurrence(name) for name in WITHOUT_ROW}
    assert not of_rows & others
    assert of_rows | others == {recurrence(name) for name in ops.__all__}


@pytest.mark.parametrize(("call", "choice"), ROWS, ids=[call for call, _ in ROWS])
def test_rows_are_equal(call: str, choice: str) -> None:
    """Values, final states, and the gradients of all inputs, with grouped heads where the function has them."""
    function, states = getattr(ops, re.match(r"\w+", call)[0]), []
    is_scan = function is ops.mamba_chunk_scan_combined
    grouped = is_scan or "``HV``" in inspect.getdoc(function)
    names = definitions(HV=4 if grouped else 2)

    def with_state(function, *args, **options):
        keyword = "return_final_states" if function is ops.mamba_chunk_scan_combined else "output_final_state"
        o, state = function(*args, **options, **{keyword: True})
        states.extend(state if isinstance(state, tuple) else [state])
        return o, state

    names |= {name: partial(with_state, getattr(ops, name)) for name in ops.__all__}
    used = [name for name, x in names.items() if isinstance(x, Tensor) and re.search(rf"\b{name}\b", call)]
    leaves = [names[name].requires_grad_() for name in used]

    results = []
    for code in (call, choice):
        states.clear()
        o, _ = eval(code, names)
        if code == call and is_scan:
            states[0] = states[0].mT
        if code == choice and "delta_product" in call:
            o = o[:, 1::2]
        made = [o, *states[:2]]
        loss = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in made)
        results.append([*made, *torch.autograd.grad(loss, leaves)])
    for x, y in zip(*results, strict=True):
        close(x, y)


# Choices that no row makes, but for the first; one or more for each scheme and each way to come to it.
CHOICES = {
    "head_decay": ["g"],
    "channel_decay": ["g gv", "g gk", "g gk gv", "g before u", "before", "gv before u"],
    "delta_rule": [
        "g gk beta",
        "beta a",
        "gk beta a",
        "g beta a",
        "beta erase",
        "g beta erase",
        "g beta a erase",
    ],
    "low_rank": ["g gk a b", "gk beta erase", "g gk beta a erase", "a b erase"],
}
each_choice = pytest.mark.parametrize(
    ("scheme_name", "names"), [(x, names) for x in CHOICES for names in CHOICES[x]]
)
WORDS = {"before": "read", "erase": "erase"}


def chosen(names: str, **sizes: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors that `names` says, and the words."""
    tensors, names_of_tensors = definitions(**sizes), [name for name in names.split() if name not in WORDS]
    words = {WORDS[name]: "before" for name in names.split() if name in WORDS}
    return {name: tensors[name] for name in ("q", "k", "v", *names_of_tensors)}, words


def window(tensors: dict[str, Tensor], lo: int, hi: int) -> dict[str, Tensor]:
    return {name: x if name == "u" else x[:, lo:hi] for name, x in tensors.items()}


def by_tokens(
    q, k, v, g=None, gk=None, gv=None, beta=None, a=None, b=None, u=None, read="after", erase="after"
) -> tuple[Tensor, Tensor]:
    """The law of the page, one token after the other."""
    (B, T, HV, V), K = v.shape, q.shape[3]
    q, k, a, b = (None if x is None else x.repeat_interleave(HV // x.shape[2], 2) for x in (q, k, a, b))
    u = 0 if u is None else u.repeat_interleave(HV // u.shape[0], 0)[:, :, None]
    of_axes = (g, (..., None, None)), (gk, (..., None)), (gv, (..., None, slice(None)))
    decay = sum((x[axes] for x, axes in of_axes if x is not None), v.new_zeros(B, T, HV, K, V)).exp()
    S, o = v.new_zeros(B, HV, K, V), []
    for t in range(T):
        key, value, query = k[:, t, :, :, None], v[:, t, :, None], q[:, t, :, None]
        old, S = S, decay[:, t] * S
        reader = key.mT if a is None else a[:, t, :, None]
        found = reader @ (old if erase == "before" else S)
        if beta is not None:
            S = S + beta[:, t, :, None, None] * key @ (value - found)
        else:
            S = S + key @ value + (0 if b is None else b[:, t, :, :, None] @ found)
        o.append(query @ (old + u * key @ value if read == "before" else S))
    return K**-0.5 * torch.cat(o, 2).transpose(1, 2), S


@each_choice
@pytest.mark.parametrize("HV", [2, 4], ids=["heads", "groups"])
def test_choices_without_a_function(scheme_name: str, names: str, HV: int) -> None:
    """Equal to the law, with gradients, in one call of the operator of the scheme, whole and in two pieces."""
    tensors, words = chosen(names, HV=HV)
    leaves = [x.requires_grad_() for x in tensors.values()]
    with recorded() as calls:
        actual = linear_recurrence(**tensors, **words, output_final_state=True)
    ((op, args, _),) = calls
    assert op.name() == "flacompose::matrix_recurrence_chunk" and scheme(Inputs(*args)) == scheme_name
    expected = by_tokens(**tensors, **words)
    gradients = [torch.autograd.grad(o.sin().sum() + S.cos().sum(), leaves) for o, S in (actual, expected)]
    for x, y in zip((*actual, *gradients[0]), (*expected, *gradients[1]), strict=True):
        close(x, y)

    first, state = linear_recurrence(**window(tensors, 0, 33), **words, output_final_state=True)
    options = {"initial_state": state, "output_final_state": True}
    second, state = linear_recurrence(**window(tensors, 33, 70), **words, **options)
    close(torch.cat([first, second], 1), actual[0])
    close(state, actual[1])


@each_choice
def test_one_row_one_token_and_packed(scheme_name: str, names: str) -> None:
    """A token is the recurrent operator; packed sequences are those that they are alone."""
    tensors, words = chosen(names, B=1)
    options = {"cu_seqlens": torch.tensor([0, 1, 1, 40]), "output_final_state": True}
    o, states = linear_recurrence(**tensors, **words, **options)
    assert states.shape[0] == 3 and not states[1].any() and not o[:, 40:].any()
    for n, lo, hi, form in ((0, 0, 1, "recurrent"), (2, 1, 40, "chunk")):
        with recorded() as calls:
            part, state = linear_recurrence(**window(tensors, lo, hi), **words, output_final_state=True)
        assert [op.name() for op, _, _ in calls] == [f"flacompose::matrix_recurrence_{form}"]
        close(o[:, lo:hi], part)
        close(states[n], state[0])


@each_choice
def test_exported_it_is_one_node_for_every_length(scheme_name: str, names: str) -> None:
    tensors, words = chosen(names, HV=4)

    class Module(torch.nn.Module):
        def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            return linear_recurrence(**tensors, **words, output_final_state=True)

    T = Dim("T", min=2, max=4096)
    shapes = {name: None if name == "u" else {1: T} for name in tensors}
    program = export(Module(), (tensors,), dynamic_shapes=(shapes,))
    assert op_nodes(program.graph_module) == ["flacompose::matrix_recurrence_chunk"]
    longer = {name: x if name == "u" else torch.cat([x, x], 1) for name, x in tensors.items()}
    for x, y in zip(program.module()(longer), Module()(longer)):
        close(x, y)


WORDS_REFUSED = [
    (f'{x}="first"', f'{x} must be "after" or "before", got \'first\'') for x in ("read", "erase")
]


@pytest.mark.parametrize(("arguments", "message"), [*REFUSED, *WORDS_REFUSED])
def test_what_is_refused(arguments: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        eval(f"linear_recurrence(q, k, v, {arguments})", definitions())


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (
            "delta_rule beta gv",
            "gv must not be given with beta, delta_rule: delta_rule does not compute both",
        ),
        ("delta_rule beta g_gamma", "g_gamma must not be given"),
        ("delta_rule beta softmax", "softmax must not be given"),
        ("delta_rule g", "beta must be given with g, delta_rule, got None"),
        ("a b u", "u must not be given with a, b: low_rank"),
        ("a b g", "g must not be given"),
        ("b", "a must be given with b, got None"),
        ("gk g", "g must not be given with gk: channel_decay"),
        ("gv beta", "beta must not be given"),
        ("full_precision g", "g must not be given"),
        ("read_before g", "read_before must not be given with g: head_decay"),
    ],
)
def test_no_scheme_ignores_an_argument(given: str, refused: str) -> None:
    """Of the operator itself, which the function does not call so; of one token too, on a GPU before its kernel."""
    cuda = pytest.importorskip("flacompose.ops._recurrences.matrix.cuda")
    B, T, H, K, V = 1, 3, 2, 4, 5
    sizes = {"q": (H, K), "k": (H, K), "v": (H, V), "g": (H,), "gk": (H, K), "gv": (H, V), "beta": (H,)}
    tensors = {name: torch.zeros(B, T, *size) for name, size in sizes.items()}
    tensors |= {"a": tensors["k"], "b": tensors["k"], "u": torch.zeros(H, K), "g_gamma": torch.zeros(H)}
    chosen = {name: tensors.get(name, True) for name in ("q", "k", "v", *given.split())}
    token = {name: x[:, :1] if name in sizes or name in ("a", "b") else x for name, x in chosen.items()}
    for form, inputs in (
        (torch.ops.flacompose.matrix_recurrence_chunk, Inputs(**chosen)),
        (torch.ops.flacompose.matrix_recurrence_recurrent, Inputs(**token)),
        (lambda *x: cuda.recurrent(Inputs(*x)), Inputs(**token)),
        (lambda *x: cuda.update(Inputs(*x), 0), Inputs(**token)),
    ):
        with pytest.raises(ValueError, match=refused):
            form(*inputs)


@pytest.mark.parametrize("given", ["gk", "a b"])
def test_no_scheme_shares_heads_unknowingly(given: str) -> None:
    q, v = torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 4, 4)
    chosen = {name: v if name == "gk" else q for name in given.split()}
    with pytest.raises(ValueError, match="v must have the 2 heads of q in .*, got 4"):
        torch.ops.flacompose.matrix_recurrence_chunk(*Inputs(q, q, v, **chosen))
