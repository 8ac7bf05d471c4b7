"""What a token costs on a CPU, beside plain PyTorch, for one op of each recurrence, and what is not computed at all."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from statistics import median

import pytest
import torch
from contract.cases import NAMED
from contract.problems import call, draw
from helpers.operators import flat, part
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
# A token is to take at most 3 times as long. The rest of the limit is for other processes of a busy machine.
LIMIT = 4.0


def ratio(ours: Callable[[], object], other: Callable[[], object], repeats: int) -> float:
    """The ratio of both median times. The functions take turns, so that what disturbs one disturbs the other.

    A median stands both calls that are interrupted and wrong readings of the clock. One reading that is too small would
    make the least of many times one that no call took.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, taken in zip((ours, other), times, strict=True):
            start = time.thread_time()
            function()
            taken.append(time.thread_time() - start)
    return median(times[0]) / median(times[1])


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


class Counted(TorchDispatchMode):
    """Counts the operations within it, by overload."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[object] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("recurrence", "operation", "count"),
    [
        ("head_decay", torch.ops.aten.bmm.default, 1),  # of queries and gradients of outputs
        ("channel_decay", torch.ops.aten.bmm.default, 1),
        # One a token of a chunk but the last, all chunks at once, and one a chunk.
        ("scan", torch.ops.aten.add.Tensor, 63 + 2),
    ],
)
def test_what_no_gradient_asks_for_is_not_computed(recurrence: str, operation: object, count: int) -> None:
    """The gradient of the initial state alone takes one pass over the chunks, and nothing within them."""
    eager, inputs = part(recurrence, "eager"), part(recurrence, "inputs")
    q, k, v, do = torch.randn(4, 1, 128, 2, 8)
    if recurrence == "scan":
        given, do = inputs.Inputs(q[..., 0], -k[..., 0].abs(), torch.randn(1, 2)), do[..., 0]
    else:
        given = inputs.Inputs(q, k, v, initial_state=torch.randn(1, 2, 8, 8))
    fields = given._fields[: given._fields.index("cu_seqlens")]
    with Counted() as counted:
        *others, d_state = flat(eager, "backward")(
            *given, do, None, [name == "initial_state" for name in fields]
        )
    assert d_state.shape == given.initial_state.shape and all(x.numel() == 0 for x in others)
    assert counted.counts[operation] == count
