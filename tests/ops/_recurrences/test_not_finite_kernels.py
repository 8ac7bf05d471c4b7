"""How far a NaN reaches in the kernels: no further than in PyTorch."""

from __future__ import annotations

import pytest
import torch
from contract.cases import CASES, OpCase, every
from contract.problems import call_reference, draw
from contract.test_not_finite import check
from helpers.unregistered import launched

from ops._recurrences.test_kernels import CPU, forward_alone

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
BOTH_WAYS = (
    "chunk_gla", "fused_recurrent_gla-gk-gv", "chunk_rwkv6", "chunk_gsa", "chunk_hgrn", "chunk_rg_lru", "chunk_rwkv4",
    "chunk_simple_gla-g", "chunk_comba", "chunk_dplr_delta_rule", "chunk_mlstm", "causal_conv1d-silu",
    "selective_scan_fn",
)  # fmt: skip
# The backward of these is launched as that of another recurrence above is.
FORWARD_ALONE = (
    "fused_recurrent_simple_gla-g-g_gamma", "fused_recurrent_hgrn", "fused_recurrent_rg_lru", "fused_recurrent_mlstm",
    "fused_recurrent_rwkv4",
)  # fmt: skip


@every([case for case in CASES if case.name in BOTH_WAYS + FORWARD_ALONE])
def test_how_far_it_reaches(case: OpCase) -> None:
    function = forward_alone if case.name in FORWARD_ALONE else launched
    check(draw(case, CPU, K=5, V=6, M=4, lengths=[3, 0, 68, 2], gates="weak"), torch.nan, function)


@every([case for case in CASES if case.name in BOTH_WAYS + FORWARD_ALONE and "initial_state" in case.axes])
@pytest.mark.parametrize("gates", [-0.01, -1.0])
def test_an_infinite_number_of_a_state(case: OpCase, gates: float) -> None:
    """It stays infinite under every finite gate, also one whose decay is a difference."""
    problem = draw(case, CPU, B=1, H=1, T=3, K=5, V=6, M=4, gates=gates)
    state = problem.tensors["initial_state"].clone()
    state[(0,) * state.dim()] = torch.inf
    problem = problem.with_tensors(initial_state=state)
    (_, actual), (_, expected) = forward_alone(problem), call_reference(problem.to(torch.float64))
    assert torch.equal(actual.isinf(), expected.isinf()) and torch.equal(actual.isnan(), expected.isnan())
