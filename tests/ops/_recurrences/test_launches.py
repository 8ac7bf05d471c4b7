"""What the recurrences launch, where there is no GPU: on tensors without values, recorded instead of run."""

from __future__ import annotations

import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, statically_known_true
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")

from helpers.launches import Launch, matrix_calls, other_calls, recorded, tables_of
from helpers.operators import flat
from helpers.reference_cycles import in_cycles

from flacompose.ops import chunk_delta_rule, chunk_gsa, fused_recurrent_delta_rule, fused_recurrent_gsa
from flacompose.ops._launch import hopper
from flacompose.ops._launch.chip import AMPERE, BLACKWELL, HOPPER, Chip
from flacompose.ops._launch.flat import without_tuples
from flacompose.ops._launch.launch import launching_by
from flacompose.ops._recurrences.elementwise.rg_lru import cuda as rg_lru
from flacompose.ops._recurrences.elementwise.scan import cuda as scan
from flacompose.ops._recurrences.elementwise.selective_scan import cuda as selective_scan
from flacompose.ops._recurrences.fused.slot_attention import cuda as slot_attention
from flacompose.ops._recurrences.fused.slot_attention.kernels import slot_attention_token_kernel
from flacompose.ops._recurrences.matrix import cuda as matrix
from flacompose.ops._recurrences.matrix.channel_decay import cuda as channel_decay
from flacompose.ops._recurrences.matrix.channel_decay.kernels import (
    channel_decay_gated_axis_kernel,
    channel_decay_plain_axis_kernel,
    channel_decay_score_kernel,
)
from flacompose.ops._recurrences.matrix.delta_rule import cuda as delta_rule
from flacompose.ops._recurrences.matrix.delta_rule import plan
from flacompose.ops._recurrences.matrix.delta_rule.both_directions import delta_both_directions_kernel
from flacompose.ops._recurrences.matrix.delta_rule.channel_factors import delta_channel_factor_kernel
from flacompose.ops._recurrences.matrix.delta_rule.channel_gradients import (
    delta_channel_gradient_kernel,
    delta_channel_product_gradient_kernel,
)
from flacompose.ops._recurrences.matrix.delta_rule.head_gradients import (
    delta_add_heads_kernel,
    delta_head_gradient_kernel,
)
from flacompose.ops._recurrences.matrix.delta_rule.hopper.channel_block_gradients import (
    hopper_channel_block_gradient_kernel,
)
from flacompose.ops._recurrences.matrix.delta_rule.hopper.channel_chunk_gradients import (
    hopper_channel_chunk_gradient_kernel,
)
from flacompose.ops._recurrences.matrix.delta_rule.hopper.channel_factors import hopper_channel_factor_kernel
from flacompose.ops._recurrences.matrix.delta_rule.hopper.head_backward import hopper_head_backward_kernel
from flacompose.ops._recurrences.matrix.delta_rule.hopper.head_factors import hopper_head_factor_kernel
from flacompose.ops._recurrences.matrix.delta_rule.hopper.head_gradients import hopper_head_gradient_kernel
from flacompose.ops._recurrences.matrix.delta_rule.hopper.head_state_passing import (
    hopper_head_state_passing_kernel,
)
from flacompose.ops._recurrences.matrix.delta_rule.kernels import (
    delta_backward_state_passing_kernel,
    delta_factor_kernel,
    delta_state_passing_kernel,
)
from flacompose.ops._recurrences.matrix.delta_rule.operands import launch_steps, operands
from flacompose.ops._recurrences.matrix.gates_of_heads import head_gate_gradient_kernel, head_gate_sum_kernel
from flacompose.ops._recurrences.matrix.head_decay import cuda as head_decay
from flacompose.ops._recurrences.matrix.inputs import SIGNATURE, Inputs

Launches = list[tuple[Any, dict[str, Any]]]


def launched(call: Callable[[], Any], into_graph: bool = False) -> tuple[Launches, Any]:
    """The kernels that `call` launches, with their arguments by name, and what it returns; none of them runs.

    The fields of named tuples are beside the tuples, if no argument has their name. So are those of a copy for a
    graph, which has no tuples; in its place stands the kernel itself.
    """
    launches: Launches = []

    def record(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        kernel = getattr(import_module(kernel.fn.__module__), kernel.__name__)
        fields = {name: y for x in given.values() if hasattr(x, "_fields") for name, y in x._asdict().items()}
        for name in given.keys() - {*kernel.arg_names}:
            fields |= {name.removeprefix(f"{x}_"): given[name] for x in kernel.arg_names if f"{x}_" in name}
        launches.append((kernel, fields | given))

    with launching_by(record, into_graph):
        return launches, call()


def ir_of(launch: Launch) -> str:
    """A kernel in Triton's own IR, with values numbered in the order in which they appear."""
    numbers: dict[str, str] = {}
    text = launch.parse(90).str_nodebug()
    return re.sub(r"%\w+", lambda x: numbers.setdefault(x[0], f"%{len(numbers)}"), text)


def test_graphs_take_kernels_without_tuples(monkeypatch: pytest.MonkeyPatch) -> None:
    """What enters a graph takes a tuple's fields one by one, and is the same kernel."""
    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    with torch.device("meta"):
        for call in (*matrix_calls(torch.bfloat16, 64, 64, 130), *other_calls(torch.bfloat16, 130)):
            for kernel, arguments in launched(call)[0]:
                if any(isinstance(x, tuple) for x in arguments.values()) and not kernel.is_gluon():
                    found[kernel.__name__] = kernel, arguments
            for _, arguments in launched(call, into_graph=True)[0]:
                assert not any(isinstance(x, tuple) for x in arguments.values())
    assert len(found) >= 8
    for name, (kernel, arguments) in found.items():
        expected = ir_of(Launch.of(kernel, **arguments))
        copy, flattened = without_tuples(kernel, (), arguments)
        assert not any(isinstance(x, tuple) for x in flattened.values())
        assert copy is without_tuples(kernel, (), arguments)[0]  # compiled once
        with monkeypatch.context() as patched:
            patched.setattr(import_module(kernel.fn.__module__), name, copy)
            assert ir_of(Launch.of(copy, **flattened)) == expected, name


def described(results: Any) -> list[tuple[Any, ...]]:
    return [(x.shape, x.dtype, x.stride()) for x in results]


# The inputs of a scheme in the order in which the tests below give them.
ORDER = {
    channel_decay: "q k v gk gv u initial_state cu_seqlens scale softmax full_precision".split(),
    delta_rule: "q k v beta g gk a initial_state cu_seqlens scale read_before".split(),
    head_decay: "q k v g g_gamma beta initial_state cu_seqlens scale".split(),
}


def named(scheme: Any, *args: Any) -> list[Any]:
    """The operator's arguments, from those in the `ORDER` of a scheme, and of a backward ``do, d_state, mask``."""
    order = ORDER[scheme]
    inputs = Inputs(**dict(zip(order, args)), delta_rule=scheme is delta_rule)
    of_backward = list(args[len(order) :])
    if of_backward:
        wanted = dict(zip(order, of_backward[-1]))
        of_backward[-1] = [wanted.get(x, False) for x in SIGNATURE.differentiable]
    return [*inputs, *of_backward]


def test_memory_has_a_dtype_of_its_own() -> None:
    """Whatever PyTorch makes tensors of by default, kernels get the same, on rows of one segment and of several."""
    with torch.device("meta"):
        calls = [call for T in (130, 64 * 260) for call in matrix_calls(torch.bfloat16, 64, 64, T)]
        calls += other_calls(torch.bfloat16, 64 * 260)
    expected = recorded(calls)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert recorded(calls).keys() == expected.keys()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("chip", [HOPPER, AMPERE], ids=["Hopper", "Ampere"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_launches_leave_no_cycles(chip: Chip, dtype: torch.dtype) -> None:
    """No tensor waits for Python's garbage collector, which does not know when a GPU has no memory left."""
    with torch.device("meta"), tables_of(chip):
        calls = [call for T in (130, 64 * 260) for call in matrix_calls(dtype, 64, 64, T)]
        calls += other_calls(dtype, 64 * 260)
        assert in_cycles(lambda: recorded(calls)) == set()


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("dtype", "K", "V"),
    [(torch.bfloat16, 64, 64), (torch.float16, 64, 64), (torch.float32, 64, 16), (torch.bfloat16, 300, 512)],
    ids=str,
)
def test_results_are_as_a_trace_has_them(dtype: torch.dtype, K: int, V: int, packed: bool) -> None:
    """A compiled model reads what the trace says, whatever the kernels compute in, and what is not wanted is empty.

    Of heads of more than 256, tiles add up in float32.
    """
    bounds = 3 if packed else None
    with torch.device("meta"):
        for call in (*matrix_calls(dtype, K, V, 130, bounds), *other_calls(dtype, 130, bounds)):
            _, results = launched(call)
            assert described(results) == described(call.traced()), f"{call.at} {call.op}"


class Symbols:
    """Sizes that every question about them would leave a guard on."""

    def __init__(self) -> None:
        self.env = ShapeEnv()

    def __call__(self, name: str, hint: int) -> torch.SymInt:
        source = ConstantSource(name)
        created = self.env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        return self.env.create_symintnode(created, hint=hint, source=source)


@pytest.mark.parametrize(
    ("dtype", "N"),
    [(torch.bfloat16, None), (torch.float32, 1), (torch.bfloat16, 5)],
    ids=["rows", "one", "five"],
)
def test_launches_at_every_length(dtype: torch.dtype, N: int | None) -> None:
    """Traced at a symbolic length and number of sequences, the launches ask nothing about them."""
    symbol = Symbols()
    with FakeTensorMode(shape_env=symbol.env) as mode:
        # Of a tensor that comes from this cache, PyTorch asks its sizes whether it is contiguous.
        mode.cache_enabled = False
        T, bounds = symbol("T", 65), None if N is None else symbol("N", N + 1)
        for call in (*matrix_calls(dtype, 16, 16, T, bounds), *other_calls(dtype, T, bounds)):
            launched(call)
            assert [guard.expr for guard in symbol.env.guards] == [], f"{call.at} {call.op}"


def one_token_of_slots(dtype: torch.dtype, B: Any, H: int, G: int, K: int, M: int, V: int) -> tuple[Any, ...]:
    """The arguments of the op of one token of slot attention."""
    q, k, v, s = (torch.zeros(B, 1, H, *D, dtype=dtype) for D in ((G, K), (K,), (V,), (M,)))
    return q, k, v, s, torch.zeros(B, 1, H, M), torch.zeros(B, H, K, M), torch.zeros(B, H, M, V), 1.0


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_one_token_of_slots_is_one_launch(dtype: torch.dtype, G: int) -> None:
    """And nothing is copied for it."""
    args = one_token_of_slots(dtype, 2, 3, G, 128, 64, 200)
    ((kernel, arguments),), _ = launched(lambda: flat(slot_attention, "token")(*args))
    assert kernel is slot_attention_token_kernel
    assert [arguments[name] for name in kernel.arg_names[:7]] == [Is(x) for x in args[:7]]


class Is:
    """Equal to the very same object."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return self.x is other


def test_slot_attention_launches_for_every_batch() -> None:
    symbol = Symbols()
    with FakeTensorMode(shape_env=symbol.env):
        B = symbol("B", 5)
        args = one_token_of_slots(torch.float32, B, 2, 3, 16, 12, 20)
        _, (o, final_k, final_v) = launched(lambda: flat(slot_attention, "token")(*args))
    assert o.shape[0] == final_k.shape[0] == final_v.shape[0] == B
    assert [guard.expr for guard in symbol.env.guards] == []


@pytest.mark.parametrize("gates", [("gk",), ("gv",), ("gk", "gv")], ids="-".join)
def test_factorisable_gates_are_found_once(gates: tuple[str, ...]) -> None:
    """The backward of one gate is told by the plain kernel; beside another gate there is none to tell."""
    q, k, v, g, do = torch.zeros(5, 1, 5, 2, 16)
    gk, gv = (g if name in gates else None for name in ("gk", "gv"))
    args = q, k, v, gk, gv, None, None, None, 1.0, False, False, do, None, [True] * 7
    launches, _ = launched(lambda: flat(channel_decay, "backward")(*named(channel_decay, *args)))
    alone = len(gates) == 1
    found = [x["factorisable_chunks"] for kernel, x in launches if kernel is channel_decay_plain_axis_kernel]
    told = [arguments for kernel, arguments in launches if kernel is channel_decay_gated_axis_kernel]
    assert {arguments["KNOWN"] for arguments in told} == {alone}
    assert {any(x is arguments["factorisable_tiles"] for x in found) for arguments in told} == {alone}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("q", {delta_state_passing_kernel, delta_head_gradient_kernel}),
        ("k", {delta_both_directions_kernel, delta_head_gradient_kernel}),
        ("v", {delta_backward_state_passing_kernel}),
        ("g", {delta_both_directions_kernel, delta_head_gradient_kernel, head_gate_gradient_kernel}),
        ("initial_state", {delta_backward_state_passing_kernel}),
    ],
)
def test_unwanted_gradients_cost_nothing(wanted: str, expected: set[Any]) -> None:
    q, k, v, do = torch.zeros(4, 1, 5, 2, 16)
    beta, g = torch.zeros(2, 1, 5, 2)
    mask = [name == wanted for name in ("q", "k", "v", "beta", "g", "gk", "a", "initial_state")]
    args = q, k, v, beta, g, None, None, torch.zeros(1, 2, 16, 16), None, 1.0, False, do, None, mask
    launches, _ = launched(lambda: flat(delta_rule, "backward")(*named(delta_rule, *args)))
    assert {kernel for kernel, _ in launches} == expected | {head_gate_sum_kernel, delta_factor_kernel}


@pytest.mark.parametrize("chip", [AMPERE, HOPPER, BLACKWELL], ids=["Ampere", "Hopper", "Blackwell"])
@pytest.mark.parametrize(
    ("dtype", "K", "V", "unaligned", "into_graph"),
    [
        (torch.bfloat16, 128, 128, "", False),
        (torch.bfloat16, 128, 64, "v", False),
        (torch.bfloat16, 128, 64, "q", False),
        (torch.bfloat16, 128, 64, "k", False),
        (torch.bfloat16, 128, 64, "do", False),
        (torch.bfloat16, 128, 128, "", True),
        (torch.bfloat16, 64, 80, "", False),
        (torch.bfloat16, 80, 64, "", False),
        (torch.float16, 128, 128, "", False),
        (torch.float32, 64, 64, "", False),
    ],
)
def test_gluon_on_hopper(
    chip: Chip, dtype: torch.dtype, K: int, V: int, unaligned: str, into_graph: bool
) -> None:
    """Its kernels take heads of 64 and 128 in bfloat16, that of pairs any values. No graph can have them.

    They copy 16 bytes at a time, which have to be aligned. Gradients of heads that share keys are added up by its
    kernel, and by PyTorch after Triton's.
    """

    def zeros(name: str, H: int, D: int) -> Tensor:
        start = 4 if name == unaligned else 0
        return torch.zeros(start + 5 * H * D, dtype=dtype)[start:].view(1, 5, H, D)

    q, k, v, do = zeros("q", 2, K), zeros("k", 2, K), zeros("v", 6, V), zeros("do", 6, V)
    beta, g = torch.zeros(2, 1, 5, 6)
    args = q, k, v, beta, g, None, None, None, None, 1.0, False, do, None, [True] * 5 + [False] * 3
    with tables_of(chip):
        launches, (dq, *_) = launched(
            lambda: flat(delta_rule, "backward")(*named(delta_rule, *args)), into_graph
        )
    assert dq.shape == q.shape
    found = [
        (kernel, x["dq"].shape[-2], x.get("of_group"), x.get("ADDS")) for kernel, x in launches if "dq" in x
    ]
    (pairs,) = (kernel for kernel, x in launches if "beta" in x and "P" in x)
    on_hopper = chip == HOPPER and dtype == torch.bfloat16 and not into_graph
    has_pairs = on_hopper and K != 80 and unaligned not in ("q", "k")
    assert pairs is (hopper_head_factor_kernel if has_pairs else delta_factor_kernel)
    if has_pairs and V != 80 and unaligned != "do":
        assert found == [(hopper_head_gradient_kernel, 2, i, i > 0) for i in range(3)]
    else:
        ((kernel, *others),) = found
        assert kernel is not hopper_head_gradient_kernel and others == [6, None, None]


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ("", True),
        ("no gates", True),
        ("long", True),
        ("wide", True),  # tokens of v are parts of wider ones
        ("odd", False),  # and these do not begin at multiples of 16 bytes
        ("v", False),
        ("k", False),
        ("V=80", False),
        ("float16", False),
        ("Ampere", False),
        ("graph", False),
        ("a", False),
        ("before", False),
        ("channels", False),
    ],
)
def test_gluon_passes_states_forwards(change: str, taken: bool) -> None:
    """With the inverses of chunks alone, where the key reads what is replaced, after a decay of the whole head."""
    T, V = 64 * 260 if change == "long" else 5, 80 if change == "V=80" else 128
    dtype = torch.float16 if change == "float16" else torch.bfloat16

    def zeros(name: str, H: int, D: int) -> Tensor:
        first, more = 4 * (name == change), {"wide": 8, "odd": 4}.get(change, 0) * (name == "v")
        x = torch.zeros(T * (H * D + more) + first, dtype=dtype)[first:]
        return x.view(1, T, H * D + more)[..., : H * D].unflatten(2, (H, D))

    q, k, v, a = zeros("q", 2, 128), zeros("k", 2, 128), zeros("v", 4, V), zeros("a", 2, 128)
    beta, g, gk = torch.zeros(1, T, 4), torch.zeros(1, T, 4), torch.zeros(1, T, 4, 128)
    g_ = None if change in ("no gates", "channels") else g
    args = q, k, v, beta, g_, gk if change == "channels" else None, a if change == "a" else None
    args += None, None, 1.0, change == "before"
    with tables_of(AMPERE if change == "Ampere" else HOPPER):
        launches, (o, _) = launched(
            lambda: flat(delta_rule, "chunk")(*named(delta_rule, *args)), change == "graph"
        )
    assert o.shape == v.shape
    kernels = {kernel for kernel, _ in launches}
    alone = any(kernel is hopper_head_factor_kernel and x["W"] is None for kernel, x in launches)
    assert alone == (hopper_head_state_passing_kernel in kernels) == taken
    assert (delta_state_passing_kernel in kernels) != taken
    passes = [x for kernel, x in launches if kernel is hopper_head_state_passing_kernel]
    assert all(x["v_token"] % 8 == 0 and x["q_read"] is q and x["k_read"] is k for x in passes)
    # Of a long row, the states that segments end at, what they do to any other, and the outputs.
    assert [(x["IDENTITY"], x["o"] is not None) for x in passes] == (
        [(False, False), (True, False)] * (change == "long") + [(False, True)]
    ) * taken


@pytest.mark.parametrize(("wanted", "sums"), [("q k v", 2), ("k", 1), ("beta", 0)])
def test_heads_are_added_after_states_are_free(wanted: str, sums: int) -> None:
    """And only for the gradients of queries and keys that are wanted."""
    states: list[weakref.ref[Tensor]] = []
    are_free: list[bool] = []

    def record(kernel: Any, *_: Any, **arguments: Any) -> None:
        if kernel is hopper_head_backward_kernel:
            states.append(weakref.ref(arguments["states"]))
        elif kernel is delta_add_heads_kernel:
            are_free.append(states[0]() is None)

    q, v, beta = (torch.zeros(60, 3, *size, dtype=torch.bfloat16) for size in ((1, 64), (4, 64), (4,)))
    mask = [name in wanted.split() for name in ("q", "k", "v", "beta", *[""] * 4)]
    args = q, q, v, beta, beta.float(), *[None] * 4, 1.0, False, v, None, mask
    with tables_of(HOPPER), launching_by(record):
        flat(delta_rule, "backward")(*named(delta_rule, *args))
    assert len(states) == 1
    assert are_free == [True] * sums


@pytest.mark.parametrize(
    ("change", "taken"),
    [("", True), ("64", True), ("rows", False), ("few", False), ("groups", True), ("V=64", False)]
    + [("a", False), ("before", False), ("channels", False), ("values", False), ("keys", True)]
    + [
        ("groups of four", True),
        ("groups of five", False),
        ("packed", False),
        ("warm_starts", False),
        ("float32", False),
        ("q", False),
        ("graph", False),
        ("Ampere", False),
    ],
)
def test_head_backward_in_gluon(change: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If its programs fill a chip nearly: 132 of them at a time, and 264 of heads of 64."""
    B = {"few": 59, "rows": 69, "64": 120, "packed": 1, "groups of four": 30, "groups of five": 24}.get(
        change, 60
    )
    D, HV = 64 if change == "64" else 128, {"groups of four": 4, "groups of five": 5}.get(change, 2)
    H, V = 1 if "groups" in change else 2, 64 if change == "V=64" else D
    T, dtype = 120 if change == "packed" else 3, torch.float32 if change == "float32" else torch.bfloat16
    first = 4 * (change == "q")
    q = torch.zeros(first + B * T * H * D, dtype=dtype)[first:].view(B, T, H, D)
    v, beta = torch.zeros(B, T, HV, V, dtype=dtype), torch.zeros(B, T, HV)
    gk = beta.unsqueeze(-1).expand(B, T, HV, D) if change == "channels" else None
    cu_seqlens = torch.arange(0, 121, 2) if change == "packed" else None
    if change == "warm_starts":
        monkeypatch.setattr(plan, "warm_start_count", lambda *_: 2)
    args = q, q, v, beta, beta, gk, q if change == "a" else None, None, cu_seqlens, 1.0, change == "before"
    mask = {"values": [False, False, True], "keys": [False, True, False]}.get(change, [True] * 3)
    with tables_of(AMPERE if change == "Ampere" else HOPPER):
        launches, _ = launched(
            lambda: flat(delta_rule, "backward")(*named(delta_rule, *args, v, None, [*mask, *[False] * 5])),
            change == "graph",
        )
    kernels = {kernel for kernel, _ in launches}
    assert (hopper_head_backward_kernel in kernels) == taken
    assert (
        delta_backward_state_passing_kernel in kernels or delta_both_directions_kernel in kernels
    ) != taken


@pytest.mark.parametrize(
    ("version", "known"),
    [("3.6.0", True), ("3.9.7", True), ("3.10rc1", False), ("3.dev0", False), ("4.0.0+git", False)],
)
def test_gluon_of_a_newer_triton(version: str, known: bool) -> None:
    """It may have changed what its kernels are written in, and then they are not even imported."""
    assert hopper.is_known(version) == known


def test_gluon_is_imported_where_it_is_launched() -> None:
    code = f"import sys, {delta_rule.__name__}; assert 'triton.experimental' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("group", "kernel"),
    [(4, hopper_head_gradient_kernel), (5, delta_head_gradient_kernel)],
)
def test_gluon_adds_up_few_heads(group: int, kernel: Any) -> None:
    """Each is a rounding of the sum."""
    q, v = (
        torch.zeros(1, 5, 1, 128, dtype=torch.bfloat16),
        torch.zeros(1, 5, group, 128, dtype=torch.bfloat16),
    )
    beta = torch.zeros(1, 5, group)
    args = q, q, v, beta, None, None, None, None, None, 1.0, False, v, None, [True] * 4 + [False] * 4
    with tables_of(HOPPER):
        launches, _ = launched(lambda: flat(delta_rule, "backward")(*named(delta_rule, *args)))
    assert {found for found, x in launches if "dq" in x} == {kernel}


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize(("with_a", "read_before"), [(True, False), (True, True), (False, True)])
def test_gluon_reads_by_any_vector_before_and_after_the_decay(
    with_a: bool, read_before: bool, first: int
) -> None:
    """Where gates are of heads, if the vector is aligned too. Its gradient is that of heads of keys, as theirs is."""
    q, do = (torch.zeros(1, 5, H, 128, dtype=torch.bfloat16) for H in (1, 2))
    a = torch.zeros(first + q.numel(), dtype=q.dtype)[first:].view(q.shape) if with_a else None
    gates, mask = torch.zeros(2, 1, 5, 2), [True] * 5 + [False, with_a, False]
    args = q, q, do, *gates, None, a, None, None, 1.0, read_before, do, None, mask
    with tables_of(HOPPER):
        launches, gradients = launched(lambda: flat(delta_rule, "backward")(*named(delta_rule, *args)))
    kernels = {kernel for kernel, _ in launches}
    if with_a and first:
        assert {delta_factor_kernel, delta_head_gradient_kernel} <= kernels
    else:
        assert {
            hopper_head_factor_kernel,
            hopper_head_gradient_kernel,
        } <= kernels
    told = [
        x for kernel, x in launches if kernel.__name__.endswith(("_factor_kernel", "_head_gradient_kernel"))
    ]
    assert {x["READ_BEFORE"] for x in told} == {x["READ_BEFORE"] for _, x in launches if "READ_BEFORE" in x}
    assert {x["READ_BEFORE"] for x in told} == {read_before}
    assert all(x["a"] is a for x in told)
    assert not with_a or gradients[SIGNATURE.differentiable.index("a")].shape == q.shape


@pytest.mark.parametrize(
    ("B", "chunks", "chip", "into_graph", "segments"),
    [
        (1, 64, HOPPER, False, 2),
        (1, 63, HOPPER, False, 1),
        (1, 64, HOPPER, True, 1),
        (32, 64, HOPPER, False, 2),
        (33, 64, HOPPER, False, 1),
        (16, 64, AMPERE, False, 2),
        (17, 64, AMPERE, False, 1),
    ],
)
def test_few_rows_have_warm_starts(B: int, chunks: int, chip: Chip, into_graph: bool, segments: int) -> None:
    """Rows of 64 chunks and more have warm starts where they leave multiprocessors idle, but in no graph.

    One program of a forward pass has all values of a head on Hopper, and half of them elsewhere.
    """
    q, gates = torch.zeros(B, 64 * chunks, 2, 128, dtype=torch.bfloat16), torch.zeros(2, B, 64 * chunks, 2)
    args = q, q, q, *gates, None, None, None, None, 1.0, False
    with tables_of(chip):
        launches, _ = launched(lambda: flat(delta_rule, "chunk")(*named(delta_rule, *args)), into_graph)
    passes = [(x["SEGMENTS"], x["WARM_STARTS"]) for _, x in launches if "WARM_STARTS" in x]
    # One launch for the ends, if there are any, and one for all tokens.
    assert passes == [(segments, segments > 1)] * min(segments, 2)


@pytest.mark.parametrize(
    ("B", "K", "V", "change", "both_directions", "in_place"),
    [
        (64, 64, 64, "", True, False),
        (32, 128, 128, "", True, False),
        (33, 128, 128, "", False, True),
        (64, 128, 64, "", True, False),
        (65, 128, 64, "", False, False),
        (65, 64, 64, "", False, True),
        (65, 64, 64, "packed", False, False),
        (65, 64, 64, "graph", False, False),
        (33, 256, 256, "", False, False),
        (1, 128, 128, "values", False, False),
        (33, 128, 128, "values", False, True),
    ],
)
def test_few_programs_pass_both_directions(
    B: int, K: int, V: int, change: str, both_directions: bool, in_place: bool
) -> None:
    """At most 128 programs each way, at once. Others store dv in the place of W, if each reads all of that alone."""
    q, v = torch.zeros(B, 3, 1, K, dtype=torch.bfloat16), torch.zeros(B, 3, 2, V, dtype=torch.bfloat16)
    beta, gk = torch.zeros(B, 3, 2), torch.zeros(B, 3, 2, K)
    cu_seqlens = torch.arange(0, 3 * B + 1, 3) if change == "packed" else None
    if change == "packed":
        q, v, beta, gk = (x.flatten(0, 1).unsqueeze(0) for x in (q, v, beta, gk))
    mask = [False, False, True, *[False] * 5] if change == "values" else [True] * 6 + [False] * 2
    args = q, q, v, beta, None, gk, None, None, cu_seqlens, 1.0, False, v, None, mask
    with tables_of(HOPPER):
        launches, _ = launched(
            lambda: flat(delta_rule, "backward")(*named(delta_rule, *args)), change == "graph"
        )
    both = [x for kernel, x in launches if kernel is delta_both_directions_kernel]
    apart = [x for kernel, x in launches if kernel is delta_backward_state_passing_kernel]
    assert (len(both), len(apart)) == (both_directions, not both_directions)
    (arguments,) = both or apart
    assert (arguments["dv"] is arguments["W"]) == in_place


@pytest.mark.parametrize("unaligned", [None, "q", "a"])
@pytest.mark.parametrize(("K", "V"), [(128, 64), (80, 64), (64, 80)])
@pytest.mark.parametrize("chip", [AMPERE, HOPPER], ids=["Ampere", "Hopper"])
def test_gluon_of_channels(chip: Chip, K: int, V: int, unaligned: str | None) -> None:
    """Where gates are factorisable in a chunk or in its blocks, it makes the gradients, and Triton the others."""

    def new(name: str, D: int) -> Tensor:
        start = 4 if name == unaligned else 0
        return torch.zeros(start + 5 * 2 * D, dtype=torch.bfloat16)[start:].view(1, 5, 2, D)

    q, k, a, gk, v, do = (
        new(name, D) for name, D in zip(("q", "k", "a", "gk", "v", "do"), (K,) * 4 + (V,) * 2)
    )
    args = (
        q,
        k,
        v,
        torch.zeros(1, 5, 2),
        None,
        gk,
        a,
        None,
        None,
        1.0,
        False,
        do,
        None,
        [True] * 4 + [False, True, True, False],
    )
    with tables_of(chip):
        launches, _ = launched(lambda: flat(delta_rule, "backward")(*named(delta_rule, *args)))
    in_gluon = (
        hopper_channel_chunk_gradient_kernel,
        hopper_channel_block_gradient_kernel,
    )
    pairs_in_gluon = hopper_channel_factor_kernel
    pairs = [x for x in launches if x[0] in (pairs_in_gluon, delta_channel_factor_kernel)]
    gradients = [
        x
        for x in launches
        if x[0] in (*in_gluon, delta_channel_product_gradient_kernel, delta_channel_gradient_kernel)
    ]
    found = [(kernel, x.get("FACTORISABLE")) for kernel, x in gradients]
    strong = delta_channel_factor_kernel, False
    if chip == HOPPER and K in (64, 128) and unaligned is None:
        expected = [(pairs_in_gluon, None, None), (*strong, False)]
    else:
        expected = [(delta_channel_factor_kernel, True, True), (*strong, True)]
    assert [(kernel, x.get("FACTORISABLE"), x.get("IN_BLOCKS")) for kernel, x in pairs] == expected
    if chip == HOPPER and (K, V) == (128, 64) and unaligned is None:
        assert found == [*((kernel, None) for kernel in in_gluon), (delta_channel_gradient_kernel, False)]
        chunks, blocks, others = (x for _, x in gradients)
        noted = chunks["factorisable_chunks"]
        assert all(x["factorisable_chunks"] is noted for x in (blocks, *(x for _, x in pairs)))
        assert all(blocks[name] is others[name] for name in ("factorisable_tiles", "pairs", "diagonal"))
    else:
        assert found == [
            (delta_channel_product_gradient_kernel, None),
            (delta_channel_gradient_kernel, True),
            (delta_channel_gradient_kernel, False),
        ]


@pytest.mark.parametrize(("more", "named"), [({"gates": None, "gate": None}, "gate"), ({}, "gates")])
def test_kernels_get_their_arguments_and_no_others(more: dict[str, Any], named: str) -> None:
    """An error names an argument that no kernel takes, and one that is absent."""
    q, beta = torch.zeros(1, 5, 2, 16), torch.zeros(1, 5, 2)
    x = operands(Inputs(q, q, q, beta=beta, delta_rule=True), 32)
    step = plan.Step("hopper.head_factors", "hopper_head_factor_kernel", {"READ_BEFORE": False})
    arguments = {"vectors": None, "W": q, "P": q, "Y": q, "log_norm": None, "H": 2, **more}
    with pytest.raises(TypeError, match=f"hopper_head_factor_kernel.*'{named}'"):
        launched(lambda: launch_steps((step,), 2, x.tokens, **arguments))


@pytest.mark.parametrize("wanted", [True, False])
def test_gates_of_heads_beside_those_of_channels(wanted: bool) -> None:
    """Their gradient, a sum over channels, is made only where they have one."""
    sums = []

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket is torch.ops.aten.sum:
                sums.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    q, v, gk = torch.zeros(3, 1, 5, 2, 32)
    beta, g = torch.zeros(2, 1, 5, 2)
    mask = [True] * 4 + [wanted, True, False, False]
    args = q, q, v, beta, g if wanted else None, gk, None, None, None, 1.0, False, v, None, mask
    with Sums():
        launched(lambda: flat(delta_rule, "backward")(*named(delta_rule, *args)))
    assert sums == [gk.shape] * wanted


@pytest.mark.parametrize("S", [3, 40])
@pytest.mark.parametrize("wanted", range(9))
def test_states_are_computed_where_a_gradient_needs_them(wanted: int, S: int) -> None:
    """In the selective scan, those of dt, its bias, A, C and the gate do. Large states give the gate the output."""
    x, A, B = torch.zeros(1, 5, 6), torch.zeros(6, S), torch.zeros(1, 5, 2, S)
    D = torch.zeros(6)
    args = x, x, A, B, B, D, x, D, torch.zeros(1, 6, S), None, False, x, None
    launches, _ = launched(lambda: flat(selective_scan, "backward")(*args, [i == wanted for i in range(9)]))
    assert len(launches) == 1 + (wanted in (1, 2, 4, 6, 7))


@pytest.mark.parametrize(("B", "rows", "copied"), [(2, 5, False), (2, 6, True), (1, 6, False)])
def test_values_beside_others_are_not_copied(B: int, rows: int, copied: bool) -> None:
    """Those of a projection with more in it, unless there is also more between rows."""
    q, k = torch.zeros(2, B, 5, 2, 16)
    v = torch.zeros(B, rows, 96)[:, :5, 32:64].unflatten(2, (2, 16))
    args = q, k, v, torch.zeros(B, 5, 2), None, None, None, None, None, 1.0
    launches, _ = launched(lambda: flat(delta_rule, "chunk")(*named(delta_rule, *args)))
    (found,) = (arguments for kernel, arguments in launches if kernel is delta_state_passing_kernel)
    assert (found["v"].data_ptr() != v.data_ptr()) == copied
    assert found["v_token"] == (32 if copied else 96)


def launch_recurrent(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> None:
    """The recurrent form, and the form that stores states."""
    inputs = Inputs(q, k, v, cu_seqlens=cu_seqlens)
    flat(matrix, "recurrent")(*inputs)
    flat(matrix, "steps")(*inputs, 1, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("B", "T", "rows", "copied"),
    [
        (2, 5, 5, False),
        (2, 5, 6, True),
        (1, 5, 6, False),
        (2, 1, 1, False),
        (2, 1, 6, False),
        (1, 1, 6, False),
    ],
)
def test_one_token_after_the_other_is_not_copied(
    B: int, T: int, rows: int, copied: bool, dtype: torch.dtype
) -> None:
    """Of a projection to all of them, unless there is also more between rows of several tokens. `v` has more heads."""
    wide = torch.zeros(B, rows, 160, dtype=dtype)[:, :T]
    q, k, v = (x.unflatten(2, (-1, 16)) for x in wide.split([32, 32, 96], 2))
    launches, _ = launched(lambda: launch_recurrent(q, k, v))
    assert len(launches) == 2
    for _, arguments in launches:
        for name, x in (("q", q), ("k", k), ("v", v)):
            taken = arguments[name]
            assert (taken is not x) == (taken.data_ptr() != x.data_ptr()) == copied
            distance = x[0, 0].numel() if copied else 160 * (rows if T == 1 and B > 1 else 1)
            assert arguments[f"{name}_token"] == distance or B == T == 1


@pytest.mark.parametrize("T", [1, 5])
def test_strides_of_one_are_of_no_account(T: int) -> None:
    """Those of axes with one head, of one number."""
    q, k, v = (torch.zeros(1000).as_strided((2, T, 1, 1), (3 * T, 3, 7, 9), i) for i in range(3))
    launches, _ = launched(lambda: launch_recurrent(q, k, v))
    for _, arguments in launches:
        assert [arguments[name] for name in "qkv"] == [Is(x) for x in (q, k, v)]
        assert [arguments[f"{name}_token"] for name in "qkv"] == [3 * T if T == 1 else 3] * 3


@pytest.mark.parametrize("N", [None, 5], ids=["rows", "packed"])
@pytest.mark.parametrize("one", ["", "row", "token"])
def test_tokens_beside_others_at_every_length(N: int | None, one: str) -> None:
    """Of a projection whose width is open, too, nothing is copied and nothing asked."""
    symbol = Symbols()
    with FakeTensorMode(shape_env=symbol.env):
        B = 1 if one == "row" or N is not None else symbol("B", 3)
        T, beside = 1 if one == "token" else symbol("T", 65), symbol("beside", 40)
        wide = torch.empty(B, T, beside + 160)
        q, k, v = (wide[..., i : i + n].unflatten(2, (n // 16, 16)) for i, n in ((0, 32), (32, 32), (64, 96)))
        cu_seqlens = None if N is None else torch.empty(symbol("N", N + 1), dtype=torch.int64)
        known = len(symbol.env.guards)
        launches, _ = launched(lambda: launch_recurrent(q, k, v, cu_seqlens))
    assert len(launches) == 2
    for _, arguments in launches:
        assert [arguments[name] for name in "qkv"] == [Is(x) for x in (q, k, v)]
        if not (one == "token" and N is not None):  # of one token there is no next
            assert statically_known_true(arguments["q_token"] == beside + 160)
    assert symbol.env.guards[known:] == []


def test_no_scores_of_factorisable_chunks() -> None:
    """The forward of one gate on the value axis makes those of the others alone."""
    q, k, v, gv = torch.zeros(4, 1, 5, 2, 16)
    args = q, k, v, None, gv, None, None, None, 1.0, False, False
    launches, _ = launched(lambda: flat(channel_decay, "chunk")(*named(channel_decay, *args)))
    factorisable, scored, others = (
        arguments
        for kernel, arguments in launches
        if kernel in (channel_decay_gated_axis_kernel, channel_decay_score_kernel)
    )
    assert factorisable["P"] is None and scored["P"] is others["P"]
    marks = factorisable["factorisable_tiles"]
    assert scored["factorisable_chunks"] is marks is others["factorisable_tiles"] is not None


def test_gates_are_read_as_they_come() -> None:
    """The kernels of RG-LRU get no copy of its inputs, each in a dtype of its own."""
    dtypes = torch.bfloat16, torch.bfloat16, torch.float32
    tokens = [torch.empty(2, 5, 8, dtype=dtype, device="meta") for dtype in dtypes]
    a_param, state = (torch.empty(*shape, device="meta") for shape in ((8,), (2, 8)))
    reset = torch.empty(2, 5, 1, dtype=torch.bool, device="meta")
    args = *tokens, a_param, state, reset, None
    for form, more in (("chunk", ()), ("recurrent", ()), ("backward", (tokens[0], state, [True] * 5))):
        launches, _ = launched(lambda: flat(rg_lru, form)(*args, *more))  # noqa: B023
        assert len(launches) == 1 + (form == "backward")
        for _, arguments in launches:
            given = [arguments[name] for name in ("x", "r", "i", "a_param", "reset")]
            assert all(a is b for a, b in zip(given, (*tokens, a_param, reset), strict=True))


@pytest.mark.parametrize(
    "recurrence", [head_decay, channel_decay, delta_rule, scan], ids=["scalar", "vector", "delta", "scan"]
)
@pytest.mark.parametrize("sequences", [1, 600])
def test_many_sequences_are_not_cut(recurrence: Any, sequences: int) -> None:
    """A long packed row is cut into segments if it is few sequences: else their states would outgrow it."""
    T = 200 * 64
    q, k, v = torch.empty(3, 1, T, 2, 16, device="meta")
    cu_seqlens = torch.empty(sequences + 1, dtype=torch.int64, device="meta")
    if recurrence is scan:
        args = q[:, :, 0], k[:, :, 0], None, cu_seqlens
    else:
        given = {"beta": v[..., 0], "delta_rule": True} if recurrence is delta_rule else {}
        args = (
            *Inputs(q, k, v, gk=k if recurrence is channel_decay else None, cu_seqlens=cu_seqlens, **given),
        )
    launches, _ = launched(lambda: flat(recurrence, "chunk")(*args))
    cut = any(getattr(x.get("states"), "ends", x.get("ends")) is not None for _, x in launches)
    assert cut == (sequences == 1)


KERNEL = ["triton_kernel_wrapper_functional"]
QKV = [(16,)] * 3


@pytest.mark.parametrize(
    ("function", "sizes", "T", "expected"),
    [
        (fused_recurrent_delta_rule, [*QKV, ()], 1, KERNEL),
        (fused_recurrent_delta_rule, [*QKV, ()], 2, ["flacompose.matrix_recurrence_recurrent.default"]),
        (chunk_delta_rule, [*QKV, ()], 1, ["flacompose.matrix_recurrence_chunk.default"]),
        (fused_recurrent_gsa, [*QKV, (12,), (12,)], 1, KERNEL),
        pytest.param(
            *(fused_recurrent_gsa, [*QKV, (12,)], 1, KERNEL),
            # test_kernels_of_a_step sees it elsewhere, by the layer of ABC.
            marks=pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="indexing asks for CUDA"),
        ),
        (
            fused_recurrent_gsa,
            [*QKV, (12,), (12,)],
            2,
            ["flacompose.matrix_recurrence_recurrent.default"] * 2,
        ),
        (chunk_gsa, [*QKV, (12,), (12,)], 1, ["flacompose.matrix_recurrence_chunk.default"] * 2),
    ],
)
def test_inductor_launches_one_token_itself(
    function: Callable[..., Any], sizes: list[tuple[int, ...]], T: int, expected: list[str]
) -> None:
    from torch._functorch.aot_autograd import aot_export_module
    from torch._inductor.virtualized import V

    class Module(torch.nn.Module):
        def forward(self, *args: Tensor) -> Any:
            return tree_leaves(function(*args, output_final_state=True))

    with FakeTensorMode() as mode, V.set_fake_mode(mode):
        args = [torch.empty(2, T, 2, *size, device="cuda") for size in sizes]
        graph, _ = aot_export_module(Module(), args, trace_joint=False)
    targets = (str(node.target) for node in graph.graph.nodes)
    assert [x for x in targets if "triton_kernel_wrapper" in x or "flacompose" in x] == expected
