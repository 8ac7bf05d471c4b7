"""Distributed tensors: by rows of the batch and by heads on two ranks, the results and gradients of one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch._dynamo
from ranks import check_sharded, on_two_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.recurrences import BATCH, HEADS

from .cases import NAMED, ONE_EACH
from .problems import call_named, draw, named


def check(mesh: DeviceMesh, name: str, compiled: bool, state: bool) -> None:
    """Results lie as the inputs do, by their axes; without a state, and compiled, of one form."""
    from torch.distributed.tensor import Replicate, Shard

    case = NAMED[name]
    tensors = named(draw(case, torch.device("cpu"), T=5, K=4, V=6, M=3, state=state))
    output = case.output_axes or case.inputs[case.output]
    axes_of = {**case.inputs, **case.gates, **case.states}

    def run(form, *x: Tensor) -> tuple[Tensor, ...]:
        o, final = call_named(case, form, **dict(zip(tensors, x, strict=True)), output_final_state=True)
        return (o, final) if isinstance(final, Tensor) else (o, *final)

    for sharded_axes in (BATCH, HEADS):

        def placement(axes: tuple[str, ...], sharded_axes=sharded_axes):
            return next((Shard(dim) for dim, axis in enumerate(axes) if axis in sharded_axes), Replicate())

        for form in (case.function, None if compiled or not state else case.other):
            if form is None:
                continue
            torch._dynamo.reset()  # of the graphs of other ops
            whole = partial(run, form)
            sharded = torch.compile(whole, fullgraph=True, backend="aot_eager") if compiled else whole
            placements = [placement(axes_of[x]) for x in tensors]
            outputs = check_sharded(mesh, sharded, list(tensors.values()), placements, whole)
            assert outputs == [placement(axes) for axes in (output, *case.states.values())], (name, form)


def check_all(mesh: DeviceMesh, names: list[str], compiled: bool, state: bool) -> None:
    for name in names:
        check(mesh, name, compiled, state)


@pytest.mark.parametrize("state", [False, True], ids=["from nothing", "from a state"])
def test_dtensor(state: bool) -> None:
    on_two_ranks(check_all, list(NAMED), False, state)


def test_compiled_dtensor() -> None:
    on_two_ranks(check_all, [case.name for case in ONE_EACH], True, True)
