"""A name or an argument of flash-linear-attention that is not here: the error says what to write in its place.

`peer_names.json` has its names and, under "arguments", those of functions and methods that flacompose has too.
"""

from __future__ import annotations

import inspect
import json
import pickle
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from flacompose import layers, models, ops
from flacompose._peer import ORDERS

PEER = json.loads((Path(__file__).parent / "helpers" / "peer_names.json").read_text(encoding="utf-8"))
ARGUMENTS = {name: arguments.split() for name, arguments in PEER["arguments"].items()}
FUNCTIONS = [name for name in ARGUMENTS if "." not in name]


def function_of(name: str) -> Callable[..., object]:
    owner, *method = name.split(".")
    found = (vars(ops) | vars(layers) | vars(models))[owner]
    return getattr(found, method[0]) if method else found


@pytest.mark.parametrize("name", ARGUMENTS)
def test_keywords(name: str) -> None:
    function = function_of(name)
    of_older_versions = ["head_first", "offsets", "transpose_state_layout"] if name in FUNCTIONS else []
    for keyword in [*ARGUMENTS[name], *of_older_versions]:
        if keyword not in inspect.signature(function).parameters:
            with pytest.raises(TypeError, match=rf"\(\) got an unexpected keyword argument '{keyword}': \w"):
                function(**{keyword: None})


@pytest.mark.parametrize("name", [*ops.__all__, *(name for name in ARGUMENTS if "." in name)])
def test_nothing_else_changes(name: str) -> None:
    function = function_of(name)
    inside = inspect.unwrap(function)
    assert inside is not function
    assert inspect.signature(function) == inspect.signature(inside) and function.__doc__ == inside.__doc__
    assert pickle.loads(pickle.dumps(function)) is function
    with pytest.raises(TypeError) as ordinary:
        inside(quadratic=None)
    with pytest.raises(TypeError, match=f"^{re.escape(str(ordinary.value))}$"):
        function(quadratic=None)


@pytest.mark.parametrize("compiled", [False, True])
def test_misspelt_keywords(compiled: bool) -> None:
    function = torch.compile(ops.chunk_gla, fullgraph=True, backend="eager") if compiled else ops.chunk_gla
    with pytest.raises(Exception, match=r"keyword argument 'output_finalstate': is it output_final_state\?"):
        function(*torch.ones(4, 1, 2, 1, 3), output_finalstate=True)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_orders(name: str) -> None:
    """Wherever the next argument by position is another one than in flash-linear-attention, that is known."""
    function = function_of(name)
    ours = [x.name for x in inspect.signature(function).parameters.values() if x.kind is not x.KEYWORD_ONLY]
    ours = ours[1:] if "." in name else ours
    theirs = ARGUMENTS[name]
    same = next((i for i, pair in enumerate(zip(ours, theirs)) if len({*pair}) > 1), None)
    if same is None:
        assert function.__qualname__ not in ORDERS
    else:
        last, following = ORDERS[function.__qualname__]
        assert last == theirs[same - 1] and following.split(", ") == theirs[same:][: following.count(",") + 1]


LAYER = layers.GatedLinearAttention(hidden_size=16, num_heads=1)
X, G = torch.randn(1, 5, 16), torch.zeros(1, 5, 1)
Q = X.unsqueeze(2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.fused_recurrent_gated_delta_rule(Q, Q, Q, G, None, None, G),
            "beta must be a tensor, got NoneType. Arguments after g are gk, gv, beta, scale in flash-linear-attention, "
            "and beta, scale, initial_state, output_final_state here: give them by keyword",
        ),
        (
            lambda: ops.fused_recurrent_comba(Q, Q, Q, Q[..., :8], G, G),
            "p must have shape (1, 5, 1, 16), got (1, 5, 1, 8). Arguments after k are p, v in flash-linear-attention, "
            "and v, p here: give them by keyword",
        ),
        (
            lambda: ops.fused_recurrent_comba(Q, Q[..., :8], Q, Q, G, G),
            "k must have shape (1, 5, 1, 16), got (1, 5, 1, 8)",
        ),
        (
            lambda: LAYER(X, None, None, True),
            "StatefulLayer.forward() takes from 2 to 3 positional arguments but 5 were given. Arguments after "
            "hidden_states are attention_mask, past_key_values, use_cache in flash-linear-attention, and state, "
            "attention_mask, cu_seqlens here: give them by keyword",
        ),
    ],
    ids=["beta", "p", "k", "layer"],
)  # fmt: skip
def test_errors_by_position(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        call()


@pytest.mark.parametrize(("keyword", "words"), [("cu_seqlens_cpu", ": leave it out;"), ("scle", "")])
def test_keyword_in_a_compiled_function(keyword: str, words: str) -> None:
    """The report begins with the error's text and, where graphs may break, it is the error itself."""
    expected = f"chunk_gla() got an unexpected keyword argument '{keyword}'{words}"

    def call() -> object:
        return ops.chunk_gla(Q, Q, Q, Q, **{keyword: Q})

    with pytest.raises(torch._dynamo.exc.Unsupported, match="^TypeError: " + re.escape(expected)):
        torch.compile(call, fullgraph=True, backend="eager")()
    with pytest.raises(TypeError, match="^" + re.escape(expected)):
        torch.compile(call, backend="eager")()


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(ops.chunk_gla, dict(q=Q, k=Q, v=Q, g=-Q.abs())), (LAYER, dict(hidden_states=X, state=None))],
    ids=["function", "layer"],
)
def test_one_graph_by_position_and_by_keyword(function, arguments) -> None:
    graphs = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, backend=graphs)
    compiled(*arguments.values())
    compiled(**arguments)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("package", ["ops", "layers", "models"])
def test_names(package: str) -> None:
    module = import_module(f"flacompose.{package}")
    for name in PEER[package]:
        if name not in vars(module):
            message = rf"^module 'flacompose.{package}' has no attribute '{name}': \w"
            with pytest.raises(AttributeError, match=message):
                getattr(module, name)
            with pytest.raises(ImportError, match=message):
                exec(f"from flacompose.{package} import {name}")


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("from flacompose.ops import fused_chunk_gla", "use chunk_gla, the same function"),
        (
            "from flacompose.ops import chunk_gal",
            "is it chunk_gla or chunk_gsa?",
        ),
        ("from flacompose.models import GLAForCausalLM", "load_fla of flacompose.integrations.fla"),
        ("from flacompose import GLAForCausalLM", "load_fla of flacompose.integrations.fla"),
        ("from flacompose.models import load_fla", "it is in flacompose.integrations.fla"),
        ("from flacompose import chunk_gla", "it is in flacompose.ops"),
        ("from flacompose.ops import GatedDeltaNet", "it is in flacompose.layers"),
        ("from flacompose.ops import chunk_gated_oja_rule", "the page on coverage"),
        ("from flacompose.layers import FusedRMSNormGated", "its name is GatedRMSNorm, of flacompose.layers"),
        (
            "from flacompose import modules",
            "ShortConvolution, RMSNorm and GatedRMSNorm are in flacompose.layers",
        ),
        ("import flacompose.modules", "ShortConvolution, RMSNorm and GatedRMSNorm are in flacompose.layers"),
        ("from flacompose.modules.norm import RMSNorm", "RMSNorm and GatedRMSNorm are in flacompose.layers"),
    ],
)
def test_imports(statement: str, message: str) -> None:
    with pytest.raises(ImportError, match=re.escape(message)):
        exec(statement)


def test_other_names_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is looked for, one of no library, and a submodule that no attribute names yet."""
    assert not hasattr(ops, "fused_chunk_gla")
    with pytest.raises(ImportError, match="^cannot import name '_no' from 'flacompose.ops'"):
        exec("from flacompose.ops import _no")
    monkeypatch.delattr(ops, "gla")
    exec("from flacompose.ops import gla")
