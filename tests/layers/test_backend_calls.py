"""A compiled operator goes to the backend once: no number of ours becomes symbolic and Dynamo begins again.

Layers do in test_laws.py without gradients and in test_segments.py with them, and operators with them in the contract.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from contract.cases import NAMED, OpCase
from contract.problems import call_named, draw, named
from helpers.backend_calls import compiled
from helpers.truth import EVERY, build, tokens_of

from flacompose.ops import chunk_rwkv7


# The recurrent forms take the same numbers.
@pytest.mark.parametrize(
    "case", [case for case in NAMED.values() if case.form != "recurrent"], ids=lambda case: case.name
)
def test_operators_go_to_the_backend_once(case: OpCase, few_levels: None) -> None:
    problem = draw(case, torch.device("cpu"), T=9, K=4, V=4, M=4)
    run, sizes = compiled(partial(call_named, case, output_final_state=True))
    run(**named(problem))
    assert len(sizes) == 1


def test_the_default_scale_of_rwkv7_is_a_constant() -> None:
    """Which the contract does not call with."""
    r = torch.randn(2, 9, 2, 4)
    run, sizes = compiled(chunk_rwkv7)
    run(r, -r.abs(), r, r, r, r)
    assert len(sizes) == 1


@pytest.mark.parametrize(
    ("name", "number", "value"), [("mamba3", "A_floor", 9.0), ("rwkv6", "g_norm.eps", 1.0)]
)
def test_a_number_that_changes_is_not_ignored(name: str, number: str, value: float) -> None:
    layer = build(EVERY[name])
    run, sizes = compiled(layer)
    x = tokens_of(layer, 2, 9)
    with torch.no_grad():
        before = run(x)[0]
        module, _, attribute = number.rpartition(".")
        setattr(layer.get_submodule(module), attribute, value)
        after = run(x)[0]
        assert len(sizes) == 2
        assert not torch.allclose(before, after)
        torch.testing.assert_close(after, layer(x)[0])
