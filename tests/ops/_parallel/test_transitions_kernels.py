"""The kernels' maps of spans: the end of each sequence, and the sums of its gates."""

from __future__ import annotations

import pytest
import torch
from helpers.operators import flat, part

from flacompose.ops._launch import sequences
from flacompose.ops._recurrences.elementwise.selective_scan import cuda as selective_scan
from flacompose.ops._recurrences.matrix.delta_rule import launch_factors, plan
from flacompose.ops._recurrences.matrix.delta_rule.operands import operands
from flacompose.ops._recurrences.matrix.inputs import Inputs
from ops._parallel.test_transitions import CASES, MATRICES, Case, drawn, packed

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


# What is the same for all tokens is added to the gates before.
@pytest.mark.parametrize("case", [case for case in CASES if "g_gamma" not in case.given], ids=str)
@packed
@pytest.mark.parametrize("segments", [1, 3])
def test_ends(case: Case, bounds: list[int] | None, segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are compared by what they leave of a state. In float32 they have rounding errors of 1e-6."""
    monkeypatch.setattr(sequences, "segment_count", lambda *_: segments)
    monkeypatch.setattr(plan, "warm_start_count", lambda *_: 3)  # of no use to maps
    for config, (tokens, _) in (("SWEEP", selective_scan.SWEEP), ("GRADIENT", selective_scan.GRADIENT)):
        monkeypatch.setattr(selective_scan, config, (tokens, 2))
    inputs = drawn(case, bounds)
    with torch.no_grad():
        of_float32 = [
            x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs
        ]
        form = "matrix_ends" if case.recurrence in MATRICES else "ends"
        end, *sums = flat(part(case.recurrence, "cuda"), form)(*of_float32)
        expected, *truth = getattr(torch.ops.flacompose, case.ends)(*inputs)
    assert (end - expected).norm() <= 1e-5 * expected.norm()
    for x, y in zip(sums, truth, strict=True):
        if case.recurrence not in ("selective_scan", *MATRICES):  # not of time steps, and no matrices
            x, y = x.exp(), y.exp()
        assert (x - y).norm() <= 1e-5 * y.norm()


def test_log_norm_bounds_what_a_chunk_multiplies_a_state_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence is a chunk. Of one token the bound is the norm itself. Gates are weak, some keys larger than 1."""
    monkeypatch.setattr(sequences, "segment_count", lambda *_: 3)
    bounds = torch.tensor([0, 32, 33, 53, 54, 55])
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 55, 2, 3, generator=generator, dtype=torch.float64)
    beta, g = torch.rand(2, 1, 55, 2, generator=generator, dtype=torch.float64)
    inputs = Inputs(q, k, v, -1e-5 * g, beta=2 * beta, cu_seqlens=bounds, delta_rule=True)
    floats = {x: getattr(inputs, x).float() for x in ("q", "k", "v", "g", "beta")}
    given = inputs._replace(**floats)
    x = operands(given, 32)
    gates = launch_factors.compute_gates(x, given.g)
    passing = launch_factors.compute_factors(x, plan.plan_of(x, "ends"), gates)
    log_norm = passing.decays.log_norm
    _, matrix = torch.ops.flacompose.matrix_recurrence_matrix_ends(*inputs)
    norm = torch.linalg.matrix_norm(matrix, 2).log2()
    over = log_norm[bounds[:-1] // 32 + torch.arange(5)] - norm
    one = bounds.diff() == 1
    # Logarithms up to 2 in float32.
    assert over.min() > -1e-6 and over[one].max() < 1e-6 and norm[one].max() > 1
