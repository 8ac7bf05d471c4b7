"""What a token costs on a CPU, beside plain PyTorch, for one op of each family."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from contract.cases import NAMED
from contract.problems import call, draw

CPU = torch.device("cpu")
# A token is to be within 3. Other processes disturb times on a busy machine, the least of many times least of all, and
# the rest of the limit is for that.
LIMIT = 4.0


def ratio(ours: Callable[[], object], other: Callable[[], object], repeats: int) -> float:
    """Of the least times, the two taken in turns so that what disturbs one disturbs both."""
    least = [float("inf")] * 2
    for _ in range(repeats):
        for i, function in enumerate((ours, other)):
            start = time.perf_counter()
            function()
            least[i] = min(least[i], time.perf_counter() - start)
    return least[0] / least[1]


def naive_vector(q, k, v, gk, initial_state):
    state = gk[:, 0, :, :, None].exp() * initial_state + k[:, 0, :, :, None] * v[:, 0, :, None]
    return (q[:, 0, :, None] @ state * q.shape[-1] ** -0.5).transpose(1, 2), state


def naive_scalar(q, k, v, g, g_gamma, initial_state):
    decay = (g[:, 0] + g_gamma)[:, :, None, None].exp()
    state = decay * initial_state + k[:, 0, :, :, None] * v[:, 0, :, None]
    return (q[:, 0, :, None] @ state * q.shape[-1] ** -0.5).transpose(1, 2), state


def naive_scan(x, g, initial_state):
    state = g[:, 0].exp() * initial_state + x[:, 0]
    return state[:, None], state


ONE_TOKEN = {
    "fused_recurrent_gla-gk": naive_vector,
    "fused_recurrent_simple_gla-g-g_gamma": naive_scalar,
    "fused_recurrent_hgrn": naive_scan,
}


@pytest.mark.parametrize("name", ONE_TOKEN)
@torch.no_grad()
def test_one_token(name: str) -> None:
    problem = draw(NAMED[name], CPU, B=1, T=1, H=4, K=64, V=64)
    naive = ONE_TOKEN[name]
    if "HV" in problem.case.state:  # one head of queries for each of values, as in the naive form
        heads = {"q": 2, "k": 2}
        repeated = {x: problem.tensors[x].repeat_interleave(2, dim) for x, dim in heads.items()}
        problem = problem.with_tensors(**repeated)
    for x, y in zip(call(problem), naive(**problem.tensors), strict=True):
        torch.testing.assert_close(x, y)
    assert ratio(lambda: call(problem), lambda: naive(**problem.tensors), 2000) <= LIMIT
