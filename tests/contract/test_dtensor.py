"""Distributed tensors: by rows of the batch and by heads on two ranks, the results and gradients of one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch._dynamo
from helpers.ranks import BATCH, HEADS, check_sharded, on_two_ranks, placement
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flacompose.ops._composed import logsumexp

from .cases import CALLS_OF_OPERATORS, NAMED, ONE_EACH, OPERATORS
from .problems import call_named, draw, named


def check(
    mesh: DeviceMesh, name: str, compiled: bool, state: bool, lengths: list[int] | None, T: int
) -> None:
    """Results lie as the inputs do, by their axes; without a state, compiled, and packed, of one form."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    case = NAMED[name]
    problem = draw(case, torch.device("cpu"), T=T, K=4, V=6, M=3, state=state, lengths=lengths)
    tensors, bounds = named(problem), problem.cu_seqlens
    everywhere = None if bounds is None else distribute_tensor(bounds, mesh, [Replicate()])
    axes_of = {**case.inputs, **case.gates, **case.states}

    def run(form, cu_seqlens: Tensor | None, *x: Tensor) -> tuple[Tensor, ...]:
        arguments = dict(zip(tensors, x, strict=True))
        o, final = call_named(case, form, **arguments, output_final_state=True, cu_seqlens=cu_seqlens)
        return (o, final) if isinstance(final, Tensor) else (o, *final)

    for split in (BATCH, HEADS) if bounds is None else (HEADS,):
        for form in (case.function, case.other if state and not compiled and bounds is None else None):
            if form is None:
                continue
            torch._dynamo.reset()  # of the graphs of other ops
            unsharded, sharded = partial(run, form, bounds), partial(run, form, everywhere)
            if compiled:
                logsumexp.LEVELS = (
                    4  # in this process, which ends with the test: a graph has that many times its code
                )
                sharded = torch.compile(sharded, fullgraph=True, backend="aot_eager")
            placements = [placement(axes_of[x], split) for x in tensors]
            outputs = check_sharded(mesh, sharded, list(tensors.values()), placements, unsharded)
            expected = [placement(axes, split) for axes in (case.output_axes, *case.states.values())]
            assert outputs == expected, (name, form)


def check_all(
    mesh: DeviceMesh,
    names: list[str],
    compiled: bool,
    state: bool,
    lengths: list[int] | None = None,
    T: int = 5,
) -> None:
    for name in names:
        check(mesh, name, compiled, state, lengths, T)


@pytest.mark.parametrize("state", [False, True], ids=["from nothing", "from a state"])
def test_dtensor(state: bool) -> None:
    cases = ONE_EACH if state else CALLS_OF_OPERATORS
    on_two_ranks(check_all, [case.name for case in cases], False, state)


def test_compiled_dtensor() -> None:
    """One of each operator, and those of two nodes: what the compiler adds to the placements is PyTorch's own."""
    names = [case.name for case in (*OPERATORS.values(), *(case for case in ONE_EACH if case.nodes > 1))]
    on_two_ranks(check_all, list(dict.fromkeys(names)), True, True)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_one_token(compiled: bool) -> None:
    """Gated slot attention has an operator of its own for it, of which the second form is called if not compiled."""
    names = ["chunk_gsa", "fused_recurrent_gsa-grouped", "chunk_abc"]
    on_two_ranks(check_all, names, compiled, True, None, 1)


PACKED = ["chunk_gla", "chunk_gsa", "chunk_abc", "causal_conv1d-silu", "mamba_chunk_scan_combined"]


def test_packed_dtensor() -> None:
    """Packed sequences are sharded by heads; their bounds are on every rank."""
    on_two_ranks(check_all, PACKED, False, True, [3, 0, 2])


def check_wanted(mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    for case in ONE_EACH:
        tensors = named(draw(case, torch.device("cpu"), T=5, K=4, V=6, M=3, state=True))

        def run(*x: Tensor, case=case, tensors=tensors) -> list[Tensor]:
            o, final = call_named(case, **dict(zip(tensors, x, strict=True)), output_final_state=True)
            return [o, final] if isinstance(final, Tensor) else [o, *final]

        first, *others = (distribute_tensor(x, mesh, [Replicate()]) for x in tensors.values())
        sum(y.sin().sum() for y in run(first.requires_grad_(), *others)).backward()
        check_sharded(mesh, run, list(tensors.values()), [Replicate()] * len(tensors))


def test_wanted_gradients() -> None:
    """Of calls that are otherwise alike, one may want gradients that one before did not."""
    on_two_ranks(check_wanted)


def check_plain_part(mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    tensors = named(draw(NAMED["chunk_abc"], torch.device("cpu"), T=5))
    plain = "initial_state[2]"
    mixed = {x: y if x == plain else distribute_tensor(y, mesh, [Replicate()]) for x, y in tensors.items()}
    with pytest.raises(TypeError, match=r"initial_state\[2\]"):
        call_named(NAMED["chunk_abc"], **mixed)


def test_a_plain_part_of_a_distributed_state_is_named() -> None:
    """One part of a state that is a plain tensor, where everything else is distributed, is an error that says which."""
    on_two_ranks(check_plain_part)
