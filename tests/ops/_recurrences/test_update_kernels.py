"""The form "update": one token, whose kernel writes the state where it reads it if it becomes part of a graph."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from flacompose.ops._launch import launch as launching
from flacompose.ops._launch.launch import launching_by
from flacompose.ops._recurrences.matrix import cuda as matrix
from flacompose.ops._recurrences.matrix.inputs import Inputs
from flacompose.ops._recurrences.short_conv import cuda as short_conv
from flacompose.ops._recurrences.short_conv.inputs import Inputs as ConvInputs


def named(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return kernel, dict(zip(kernel.arg_names, args, strict=False)) | kwargs


def updated(
    update: Any, state: Tensor, launched: list[bool], into_graph: bool, *args: Any
) -> tuple[Tensor, Tensor]:
    """What `update` gives of `args`; `launched` says of each kernel whether it writes where it reads, a copy."""
    before, in_place = state.clone(), []

    def launch(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        given = named(kernel, args, kwargs)[1]
        for x in [x for x in given.values() if hasattr(x, "_asdict")]:
            given |= x._asdict()
        in_place.append(given["initial"].data_ptr() == given["final"].data_ptr())
        kernel[grid](*args, **kwargs)

    # The interpreter runs kernels with tuples, and has no source to make a graph's copy of.
    with launching_by(launch, into_graph), mock.patch.object(launching, "without_tuples", named):
        results = update(*args)
    assert in_place == launched and torch.equal(state, before)
    return results


@pytest.mark.parametrize("into_graph", [False, True])
@pytest.mark.parametrize("gate", ["g", "gk"])
def test_delta_rule(gate: str, into_graph: bool) -> None:
    """Of queries and keys that are divided by their norms, or are taken as they are; `V` takes two programs."""
    B, H, HV, K, V = 2, 1, 2, 3, 300
    torch.manual_seed(0)
    q, k, v, beta = (torch.randn(B, 1, *shape) for shape in ((H, K), (H, K), (HV, V), (HV,)))
    g, state = -torch.rand(B, 1, HV, *[K] * (gate == "gk")), torch.randn(B, HV, K, V)
    for normalize in (0, 1):
        inputs = Inputs(q, k, v, beta=beta, delta_rule=True, **{gate: g}, initial_state=state, scale=0.7)
        o, final_state = updated(matrix.update, state, [into_graph], into_graph, inputs, normalize)
        for b in range(B):
            for h in range(HV):
                q_, k_, v_, b_, g_, S = (
                    x.double() for x in (q[b, 0, 0], k[b, 0, 0], v[b, 0, h], beta[b, 0, h], g[b, 0, h], state[b, h])
                )  # fmt: skip
                if normalize:
                    q_, k_ = (x / (x @ x + 1e-6).sqrt() for x in (q_, k_))
                S = g_.exp().unsqueeze(-1) * S if gate == "gk" else g_.exp() * S
                S = S + b_ * torch.outer(k_, v_ - S.T @ k_)
                # Of float32, rounding in sums of three products.
                torch.testing.assert_close(final_state[b, h].double(), S, atol=1e-6, rtol=1e-5)
                torch.testing.assert_close(o[b, 0, h].double(), 0.7 * S.T @ q_, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("of_state", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("into_graph", [False, True])
def test_short_conv(into_graph: bool, of_state: torch.dtype) -> None:
    """The state has the dtype of a cache, and as many channels as take two programs. One that would round the input is
    not written to: in a graph no kernel runs then, and the new state is the same as without a graph."""
    D, W = 300, 4
    torch.manual_seed(0)
    x, weight = torch.randn(2, 1, D, dtype=torch.float16), torch.randn(D, W)
    state = torch.randn(2, D, W).to(of_state)
    inputs = ConvInputs(x, weight, initial_state=state, silu=True)
    launched = [] if into_graph and of_state == torch.bfloat16 else [into_graph]
    y, final_state = updated(short_conv.update, state, launched, into_graph, inputs)
    window = torch.cat([state[:, :, 1:].float(), x.mT.float()], -1)
    assert final_state.dtype == torch.float32 and torch.equal(final_state, window)
    a = (window.double() * weight).sum(-1)
    expected = (a * a.sigmoid()).unsqueeze(1)
    torch.testing.assert_close(y.double(), expected, atol=1e-3, rtol=1e-3)  # the output is in float16
