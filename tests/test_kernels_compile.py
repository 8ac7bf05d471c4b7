"""Every kernel variant compiles for a GPU, also where there is none: the interpreter checks no types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, statically_known_true
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")

from launches import Launch

from flacompose.ops import (
    chunk_delta_rule,
    chunk_gsa,
    fused_recurrent_delta_rule,
    fused_recurrent_gsa,
)
from flacompose.ops._chip import HOPPER
from flacompose.ops.families import _launch
from flacompose.ops.families.delta_rule import cuda as delta_rule
from flacompose.ops.families.delta_rule.channel_kernels import channel_pair_kernel
from flacompose.ops.families.delta_rule.gradients import gradient_kernel
from flacompose.ops.families.delta_rule.kernels import (
    pair_kernel,
    reverse_kernel,
    sweep_kernel,
)
from flacompose.ops.families.scalar_decay import cuda as scalar_decay
from flacompose.ops.families.scalar_decay.gates import gate_gradient_kernel, gate_kernel
from flacompose.ops.families.scan import cuda as scan
from flacompose.ops.families.selective_scan import cuda as selective_scan
from flacompose.ops.families.short_conv import cuda as short_conv
from flacompose.ops.families.slot_attention import cuda as slot_attention
from flacompose.ops.families.slot_attention.kernels import token_kernel
from flacompose.ops.families.vector_decay import cuda as vector_decay
from flacompose.ops.families.vector_decay import slots
from flacompose.ops.families.vector_decay.kernels import (
    gated_kernel,
    plain_kernel,
    score_kernel,
)

SHARED_MEMORY = HOPPER.shared_memory


def launch_with(launch: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    families = delta_rule, scalar_decay, scan, selective_scan, short_conv, slot_attention, vector_decay
    for module in (_launch, slots, *families):
        monkeypatch.setattr(module, "launch", launch)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """The kernels that are launched from now on, with their arguments by name, and none is run."""
    launches = []

    def record(kernel, grid, *args, **kwargs) -> None:
        launches.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | kwargs))

    launch_with(record, monkeypatch)
    return launches


def compile_only(kernel, grid, *args, capability: int = 90, shared: int = SHARED_MEMORY, **kwargs) -> None:
    """Compiles a kernel instead of launching it."""
    assert Launch.of(kernel, *args, **kwargs).compile(capability).shared <= shared


def run(family: ModuleType, do: Tensor, d_final_state: Tensor | None, *args: Any) -> None:
    """Everything that a family launches."""
    family.chunk(*args)
    family.recurrent(*args)
    family.steps(*args, 3, 1)
    family.steps(*args, 4, 2)
    wanted = {scan: 3, scalar_decay: 7, vector_decay: 7, delta_rule: 7}[family]
    family.backward(*args, do, d_final_state, [True] * wanted)


GATES = [(), ("gk",), ("gv",), ("gk", "gv")]
BOTH = ("gk", "gv")


@pytest.mark.parametrize(
    "gates, dtype, gate_dtype, K, V, bonus, packed, part",
    [
        ((), torch.bfloat16, torch.bfloat16, 128, 128, None, False, None),
        (("gk",), torch.bfloat16, torch.bfloat16, 128, 128, None, False, None),
        (("gv",), torch.bfloat16, torch.bfloat16, 128, 128, None, False, None),
        (BOTH, torch.bfloat16, torch.bfloat16, 128, 128, None, False, None),
        ((), torch.float32, torch.float32, 256, 16, None, True, None),
        (BOTH, torch.float32, torch.float64, 256, 16, None, False, None),
        (BOTH, torch.float16, torch.float16, 64, 64, None, True, None),
        (("gv",), torch.bfloat16, torch.bfloat16, 128, 64, None, False, "logits"),
        (("gv",), torch.float16, torch.float16, 64, 64, None, True, "logits"),
        (("gk",), torch.bfloat16, torch.bfloat16, 40, 128, None, False, "slots"),
        (("gk",), torch.float16, torch.float16, 64, 64, None, True, "slots"),
        (("gk",), torch.bfloat16, torch.float32, 128, 128, torch.float32, False, None),
        (("gk",), torch.bfloat16, torch.float32, 40, 200, torch.bfloat16, True, None),
        (("gk",), torch.float32, torch.float64, 256, 16, torch.float64, False, None),
        (BOTH, torch.bfloat16, torch.bfloat16, 512, 320, None, False, None),
    ],
)
def test_compiles(
    gates, dtype, gate_dtype, K, V, bonus, packed, part, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What public functions launch: a bonus goes with a gate on the key axis.

    `part` is one of the two calls of gated slot attention: the "logits", which are wide and whose gate is on the value
    axis, or the "slots", which are read with the softmax of the logits and whose gate is on the key axis.
    """
    launch_with(compile_only, monkeypatch)
    B, T, H, N = 1, 130, 3, 2
    q, k = torch.zeros(2, B, T, H, K, dtype=dtype)
    v = torch.zeros(B, T, H, V, dtype=dtype)
    gk = torch.zeros(B, T, H, K, dtype=gate_dtype) if "gk" in gates else None
    gv = torch.zeros(B, T, H, V, dtype=gate_dtype) if "gv" in gates else None
    cu_seqlens = torch.tensor([0, 70, T]) if packed else None
    state = torch.zeros(N if packed else B, H, K, V)
    u = None if bonus is None else torch.zeros(H, K, dtype=bonus)
    do = v.float() if part == "logits" else v
    q = q.float() if part == "slots" else q
    options = part == "slots", part == "logits"
    run(vector_decay, do, state, q, k, v, gk, gv, u, state, cu_seqlens, 1.0, *options)


@pytest.mark.parametrize("gates", ["", "gamma", "g", "g gamma", "g beta"])
@pytest.mark.parametrize(
    "dtype, gate_dtype, K, V, groups, packed",
    [
        (torch.bfloat16, torch.bfloat16, 128, 128, 1, False),
        (torch.bfloat16, torch.float32, 256, 40, 4, True),
        (torch.bfloat16, torch.float32, 64, 256, 1, False),
        (torch.float16, torch.float16, 64, 64, 1, True),
        (torch.float32, torch.float64, 256, 16, 2, False),
        (torch.bfloat16, torch.float32, 320, 512, 1, False),
    ],
)
def test_scalar_decay_compiles(
    gates: str,
    dtype: torch.dtype,
    gate_dtype: torch.dtype,
    K: int,
    V: int,
    groups: int,
    packed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch_with(compile_only, monkeypatch)
    # As many as lead to several segments.
    B, T, H, N = 1, 64 * 130, 2, 2
    q, k = torch.zeros(2, B, T, H, K, dtype=dtype)
    v = torch.zeros(B, T, H * groups, V, dtype=dtype)
    g = torch.zeros(B, T, H * groups, dtype=gate_dtype) if "g" in gates.split() else None
    g_gamma = torch.zeros(H * groups, dtype=gate_dtype) if "gamma" in gates else None
    beta = torch.zeros(B, T, H * groups) if "beta" in gates else None
    cu_seqlens = torch.tensor([0, 70, T]) if packed else None
    state = torch.zeros(N if packed else B, H * groups, K, V)
    run(scalar_decay, v, state, q, k, v, g, g_gamma, beta, state, cu_seqlens, 1.0)


@pytest.mark.parametrize("gates", ["", "g", "gk"])
@pytest.mark.parametrize(
    "dtype, K, V, groups, packed",
    [
        (torch.bfloat16, 128, 128, 1, False),
        (torch.bfloat16, 256, 256, 2, True),
        (torch.bfloat16, 40, 200, 1, False),
        (torch.float16, 64, 64, 1, True),
        (torch.float32, 256, 16, 2, False),
        (torch.bfloat16, 512, 320, 1, False),
        (torch.float32, 320, 512, 1, True),
    ],
)
def test_delta_rule_compiles(
    gates: str,
    dtype: torch.dtype,
    K: int,
    V: int,
    groups: int,
    packed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch_with(compile_only, monkeypatch)
    # With groups, as many as lead to several segments.
    B, T, H, N = 1, 64 * 260 if groups > 1 else 130, 2, 2
    q, k = torch.zeros(2, B, T, H, K, dtype=dtype)
    v = torch.zeros(B, T, H * groups, V, dtype=dtype)
    beta = torch.zeros(B, T, H * groups)
    g = torch.zeros(B, T, H * groups) if gates == "g" else None
    gk = torch.zeros(B, T, H * groups, K, dtype=dtype) if gates == "gk" else None
    cu_seqlens = torch.tensor([0, 70, T]) if packed else None
    state = torch.zeros(N if packed else B, H * groups, K, V)
    run(delta_rule, v, state, q, k, v, beta, g, gk, state, cu_seqlens, 1.0)


@pytest.mark.parametrize("T", [130, 64 * 130], ids=["whole", "segments"])
@pytest.mark.parametrize(
    "dtype, gate_dtype, D, state_dtype, packed",
    [
        (torch.bfloat16, torch.bfloat16, 2048, torch.float32, False),
        (torch.bfloat16, torch.float32, 40, torch.bfloat16, True),
        (torch.float16, torch.float16, 1, None, False),
        (torch.float32, torch.float64, 300, torch.float64, True),
    ],
)
def test_scan_compiles(
    dtype: torch.dtype,
    gate_dtype: torch.dtype,
    D: int,
    state_dtype: torch.dtype | None,
    packed: bool,
    T: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch_with(compile_only, monkeypatch)
    x, g = torch.zeros(1, T, D, dtype=dtype), torch.zeros(1, T, D, dtype=gate_dtype)
    cu_seqlens = torch.tensor([0, 70, T]) if packed else None
    state = None if state_dtype is None else torch.zeros(2 if packed else 1, D, dtype=state_dtype)
    run(scan, x, state, x, g, state, cu_seqlens)


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize(
    "dtype, parameter_dtype, D, W, T, state_dtype, packed",
    [
        (torch.bfloat16, torch.bfloat16, 4096, 4, 130, None, False),
        (torch.bfloat16, torch.float32, 40, 3, 130, torch.bfloat16, True),
        (torch.float16, torch.float16, 1, 2, 1, torch.float16, False),
        (torch.float32, torch.float64, 300, 8, 130, torch.float64, True),
    ],
)
def test_short_conv_compiles(
    dtype: torch.dtype,
    parameter_dtype: torch.dtype,
    D: int,
    W: int,
    T: int,
    state_dtype: torch.dtype | None,
    packed: bool,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In next to no shared memory."""
    launch_with(partial(compile_only, capability=capability, shared=4096), monkeypatch)
    x = torch.zeros(1, T, D, dtype=dtype)
    weight, bias = torch.zeros(D, W, dtype=parameter_dtype), torch.zeros(D, dtype=parameter_dtype)
    cu_seqlens = torch.tensor([0, 70, T]) if packed else None
    state = None if state_dtype is None else torch.zeros(2 if packed else 1, D, W, dtype=state_dtype)
    run_short_conv(x, None if state is None else state.float(), x, weight, bias, state, cu_seqlens, True)


def run_short_conv(dy: Tensor, d_final_state: Tensor | None, *args: Any) -> None:
    short_conv.forward(*args)
    short_conv.backward(*args, dy, d_final_state, [True] * 4)


@pytest.mark.parametrize("T", [130, 64 * 130], ids=["whole", "segments"])
@pytest.mark.parametrize(
    "dtype, other_dtype, D, S, G, state_dtype, packed",
    [
        (torch.bfloat16, torch.float32, 2048, 16, 1, torch.float32, False),
        (torch.bfloat16, torch.bfloat16, 40, 200, 1, torch.bfloat16, True),
        (torch.float16, torch.float16, 2, 1, 2, None, False),
        (torch.float32, torch.float64, 120, 5, 3, torch.float64, True),
    ],
)
def test_selective_scan_compiles(
    dtype: torch.dtype,
    other_dtype: torch.dtype,
    D: int,
    S: int,
    G: int,
    state_dtype: torch.dtype | None,
    packed: bool,
    T: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In so little shared memory that many programs fit side by side."""
    launch_with(partial(compile_only, shared=16384), monkeypatch)
    x, dt = torch.zeros(1, T, D, dtype=dtype), torch.zeros(1, T, D, dtype=other_dtype)
    A, B = torch.zeros(D, S, dtype=other_dtype), torch.zeros(1, T, G, S, dtype=dtype)
    cu_seqlens = torch.tensor([0, 70, T]) if packed else None
    state = None if state_dtype is None else torch.zeros(2 if packed else 1, D, S, dtype=state_dtype)
    run_selective_scan(x, None if state is None else state.float(), x, dt, A, B, B, state, cu_seqlens)


def run_selective_scan(dy: Tensor, d_final_state: Tensor | None, *args: Any) -> None:
    selective_scan.forward(*args)
    selective_scan.backward(*args, dy, d_final_state, [True] * 6)


def one_token_of_slots(
    dtype: torch.dtype, B: Any, H: int, G: int, K: int, M: int, V: int, gate_dtype: torch.dtype, state: bool
) -> tuple[Any, ...]:
    """The arguments of the op of one token of slot attention."""
    q, k, v = (torch.zeros(B, 1, H, *D, dtype=dtype) for D in ((G, K), (K,), (V,)))
    s, g = (torch.zeros(B, 1, H, M, dtype=x) for x in (dtype, gate_dtype))
    states = (torch.zeros(B, H, K, M), torch.zeros(B, H, M, V)) if state else (None, None)
    return q, k, v, s, g, *states, 1.0


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize(
    "dtype, gate_dtype, G, K, M, V, state",
    [
        (torch.bfloat16, torch.float32, 1, 128, 64, 128, True),
        (torch.bfloat16, torch.bfloat16, 4, 256, 64, 256, False),
        (torch.float16, torch.float16, 3, 20, 12, 300, True),
        (torch.float32, torch.float64, 1, 512, 512, 512, True),
        (torch.bfloat16, torch.float32, 1, 1, 1, 1, True),
    ],
)
def test_slot_attention_compiles(
    dtype: torch.dtype,
    gate_dtype: torch.dtype,
    G: int,
    K: int,
    M: int,
    V: int,
    state: bool,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In next to no shared memory. The kernels of the backward are vector decay's."""
    launch_with(partial(compile_only, capability=capability, shared=4096), monkeypatch)
    slot_attention.token(*one_token_of_slots(dtype, 2, 2, G, K, M, V, gate_dtype, state))


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_one_token_of_slots_is_one_launch(
    dtype: torch.dtype, G: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is copied for it, whose results are as a trace has them."""
    launches = recorded(monkeypatch)
    args = one_token_of_slots(dtype, 2, 3, G, 128, 64, 200, torch.float32, True)
    results = slot_attention.token(*args)
    ((kernel, arguments),) = launches
    assert kernel is token_kernel
    assert [arguments[name] for name in kernel.arg_names[:7]] == [Is(x) for x in args[:7]]
    with FakeTensorMode(allow_non_fake_inputs=True):
        traced = torch.ops.flacompose.slot_attention_token(*args)
    described = [[(x.shape, x.dtype, x.stride()) for x in tensors] for tensors in (results, traced)]
    assert described[0] == described[1]


class Is:
    """Equal to the very same object."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return self.x is other


def test_slot_attention_launches_for_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_with(lambda *_, **__: None, monkeypatch)
    symbol = Symbols()
    with FakeTensorMode(shape_env=symbol.env):
        B = symbol("B", 5)
        args = one_token_of_slots(torch.float32, B, 2, 3, 16, 12, 20, torch.float32, True)
        o, final_k, final_v = slot_attention.token(*args)
    assert o.shape[0] == final_k.shape[0] == final_v.shape[0] == B
    assert [guard.expr for guard in symbol.env.guards] == []


@pytest.mark.parametrize("wanted", [range(7), (0,), (1,), (2,), (3,), (4,), (5,), (6,)], ids=str)
@pytest.mark.parametrize("G", [1, 3])
def test_gradients_of_slot_attention_are_as_a_trace_has_them(
    G: int, wanted: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are not wanted and those of absent inputs too, in whatever dtypes the kernels compute."""
    launch_with(lambda *_, **__: None, monkeypatch)
    args = one_token_of_slots(torch.float16, 2, 2, G, 16, 12, 20, torch.bfloat16, True)
    do = torch.zeros(2, 1, 2, G, 20, dtype=torch.float16)
    arguments = *args, do, None, args[6], [i in wanted for i in range(7)]
    launched = slot_attention.backward(*arguments)
    with FakeTensorMode(allow_non_fake_inputs=True):
        traced = torch.ops.flacompose.slot_attention_token_backward(*arguments)
    described = [[(x.shape, x.dtype, x.stride()) for x in results] for results in (launched, traced)]
    assert described[0] == described[1]


class Symbols:
    """Sizes that every question about them would leave a guard on."""

    def __init__(self) -> None:
        self.env = ShapeEnv()

    def __call__(self, name: str, hint: int) -> torch.SymInt:
        source = ConstantSource(name)
        created = self.env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        return self.env.create_symintnode(created, hint=hint, source=source)


@pytest.mark.parametrize(
    "gates, bonus, softmax",
    [*[(gates, False, False) for gates in GATES], (("gk",), True, False), (("gk",), False, True)],
)
@pytest.mark.parametrize("N", [None, 1, 5], ids=["rows", "one", "five"])
def test_launches_at_every_length(gates, N, bonus, softmax, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced at a symbolic length and number of sequences, the launches ask nothing about them."""
    launch_with(lambda *_, **__: None, monkeypatch)
    symbol = Symbols()
    with FakeTensorMode(shape_env=symbol.env):
        T = symbol("T", 65)
        q, k, v, g = (torch.empty(1, T, 2, 16) for _ in range(4))
        cu_seqlens = None if N is None else torch.empty(symbol("N", N + 1), dtype=torch.int64)
        state = torch.empty(1 if cu_seqlens is None else cu_seqlens.shape[0] - 1, 2, 16, 16)
        gk, gv = (g if name in gates else None for name in ("gk", "gv"))
        u = torch.empty(2, 16) if bonus else None
        run(vector_decay, v, state, q, k, v, gk, gv, u, state, cu_seqlens, 1.0, softmax, False)
    assert [guard.expr for guard in symbol.env.guards] == []


@pytest.mark.parametrize(
    "dtype, q_dtype, softmax",
    [
        (torch.float16, torch.float16, False),
        (torch.float16, torch.float16, True),
        (torch.float16, torch.float32, True),
        (torch.bfloat16, torch.float32, True),
    ],
)
@pytest.mark.parametrize("wanted", [(0, 1, 2), (1,), (0, 3)], ids=str)
def test_gradients_are_as_a_trace_has_them(
    dtype, q_dtype, softmax, wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are not wanted and those of absent inputs too, in whatever dtypes the kernels compute."""
    launch_with(lambda *_, **__: None, monkeypatch)
    k, v = torch.zeros(2, 1, 5, 2, 16, dtype=dtype)
    mask = [i in wanted for i in range(7)]
    args = k.to(q_dtype), k, v, None, None, None, None, None, 1.0, softmax, False, v, None, mask
    launched = vector_decay.backward(*args)
    with FakeTensorMode(allow_non_fake_inputs=True):
        traced = torch.ops.flacompose.vector_decay_backward(*args)
    assert [(x.shape, x.dtype) for x in launched] == [(x.shape, x.dtype) for x in traced]


@pytest.mark.parametrize("gates", GATES[1:], ids="-".join)
def test_what_is_mild_is_found_once(gates, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of one gate is told by the plain kernel; beside another gate there is none to tell."""
    launches = recorded(monkeypatch)
    q, k, v, g, do = torch.zeros(5, 1, 5, 2, 16)
    gk, gv = (g if name in gates else None for name in ("gk", "gv"))
    vector_decay.backward(q, k, v, gk, gv, None, None, None, 1.0, False, False, do, None, [True] * 7)
    alone = len(gates) == 1
    found = [arguments["mild"] for kernel, arguments in launches if kernel is plain_kernel]
    told = [arguments for kernel, arguments in launches if kernel is gated_kernel]
    assert {arguments["KNOWN"] for arguments in told} == {alone}
    assert {any(x is arguments["mild"] for x in found) for arguments in told} == {alone}


@pytest.mark.parametrize("K", [64, 320, 512])
def test_pairs_of_channels_fit(K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, where many channels leave no room to keep what they write with."""

    def compile_pairs(kernel, grid, *args, **kwargs) -> None:
        if kernel is channel_pair_kernel and kwargs["MILD"]:
            compile_only(kernel, grid, *args, **kwargs)

    launch_with(compile_pairs, monkeypatch)
    q, k = torch.empty(2, 1, 65, 2, K, device="meta")
    v, beta = torch.empty(1, 65, 2, 16, device="meta"), torch.empty(1, 65, 2, device="meta")
    delta_rule.chunk(q, k, v, beta, None, torch.empty_like(k), None, None, 1.0)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("q", {sweep_kernel, gradient_kernel}),
        ("k", {sweep_kernel, reverse_kernel, gradient_kernel}),
        ("v", {reverse_kernel}),
        ("g", {sweep_kernel, reverse_kernel, gradient_kernel, gate_gradient_kernel}),
        ("initial_state", {reverse_kernel}),
    ],
)
def test_unwanted_gradients_cost_nothing(wanted: str, expected: set, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch)
    q, k, v, do = torch.zeros(4, 1, 5, 2, 16)
    beta, g = torch.zeros(2, 1, 5, 2)
    mask = [name == wanted for name in ("q", "k", "v", "beta", "g", "gk", "initial_state")]
    delta_rule.backward(q, k, v, beta, g, None, torch.zeros(1, 2, 16, 16), None, 1.0, do, None, mask)
    assert {kernel for kernel, _ in launches} == expected | {gate_kernel, pair_kernel}


@pytest.mark.parametrize(("B", "rows", "copied"), [(2, 5, False), (2, 6, True), (1, 6, False)])
def test_values_beside_others_are_not_copied(
    B: int, rows: int, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a projection with more in it, unless there is also more between rows."""
    launches = recorded(monkeypatch)
    q, k = torch.zeros(2, B, 5, 2, 16)
    v = torch.zeros(B, rows, 96)[:, :5, 32:64].unflatten(2, (2, 16))
    delta_rule.chunk(q, k, v, torch.zeros(B, 5, 2), None, None, None, None, 1.0)
    (found,) = (arguments for kernel, arguments in launches if kernel is sweep_kernel)
    assert (found["v"].data_ptr() != v.data_ptr()) == copied
    assert found["v_token"] == (32 if copied else 96)


FAMILIES = {"delta": delta_rule, "scalar": scalar_decay, "vector": vector_decay}


def launch_recurrent(family: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> None:
    """The recurrent form of a family, and the form that stores states."""
    gates = {"delta": (v[..., 0], None, None), "scalar": (None,) * 3, "vector": (None,) * 3}[family]
    args = q, k, v, *gates, None, cu_seqlens, 1.0, *((False, False) if family == "vector" else ())
    FAMILIES[family].recurrent(*args)
    FAMILIES[family].steps(*args, 1, 1)


@pytest.mark.parametrize("family", FAMILIES)
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
    B: int, T: int, rows: int, copied: bool, dtype: torch.dtype, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a projection to all of them, unless there is also more between rows of several tokens. `v` has more heads."""
    launches = recorded(monkeypatch)
    wide = torch.zeros(B, rows, 160, dtype=dtype)[:, :T]
    q, k, v = (x.unflatten(2, (-1, 16)) for x in wide.split([32, 32, 96], 2))
    launch_recurrent(family, q, k, v)
    assert len(launches) == 2
    for _, arguments in launches:
        for name, x in (("q", q), ("k", k), ("v", v)):
            taken = arguments[name]
            assert (taken is not x) == (taken.data_ptr() != x.data_ptr()) == copied
            distance = x[0, 0].numel() if copied else 160 * (rows if T == 1 and B > 1 else 1)
            assert arguments[f"{name}_token"] == distance or B == T == 1


@pytest.mark.parametrize("T", [1, 5])
def test_strides_of_one_are_of_no_account(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of axes with one head, of one number."""
    launches = recorded(monkeypatch)
    q, k, v = (torch.zeros(1000).as_strided((2, T, 1, 1), (3 * T, 3, 7, 9), i) for i in range(3))
    launch_recurrent("vector", q, k, v)
    for _, arguments in launches:
        assert [arguments[name] for name in "qkv"] == [Is(x) for x in (q, k, v)]
        assert [arguments[f"{name}_token"] for name in "qkv"] == [3 * T if T == 1 else 3] * 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("N", [None, 5], ids=["rows", "packed"])
@pytest.mark.parametrize("one", ["", "row", "token"])
def test_tokens_beside_others_at_every_length(
    family: str, N: int | None, one: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a projection whose width is open, too, nothing is copied and nothing asked."""
    launches = recorded(monkeypatch)
    symbol = Symbols()
    with FakeTensorMode(shape_env=symbol.env):
        B = 1 if one == "row" or N is not None else symbol("B", 3)
        T, beside = 1 if one == "token" else symbol("T", 65), symbol("beside", 40)
        wide = torch.empty(B, T, beside + 160)
        q, k, v = (wide[..., i : i + n].unflatten(2, (n // 16, 16)) for i, n in ((0, 32), (32, 32), (64, 96)))
        cu_seqlens = None if N is None else torch.empty(symbol("N", N + 1), dtype=torch.int64)
        known = len(symbol.env.guards)
        launch_recurrent(family, q, k, v, cu_seqlens)
    assert len(launches) == 2
    for _, arguments in launches:
        assert [arguments[name] for name in "qkv"] == [Is(x) for x in (q, k, v)]
        if not (one == "token" and N is not None):  # of one token there is no next
            assert statically_known_true(arguments["q_token"] == beside + 160)
    assert symbol.env.guards[known:] == []


def test_no_scores_of_mild_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward of one gate on the value axis makes those of the others alone."""
    launches = recorded(monkeypatch)
    q, k, v, gv = torch.zeros(4, 1, 5, 2, 16)
    vector_decay.chunk(q, k, v, None, gv, None, None, None, 1.0, False, False)
    mild, scored, strong = (
        arguments for kernel, arguments in launches if kernel in (gated_kernel, score_kernel)
    )
    assert mild["P"] is None and scored["P"] is strong["P"]
    assert scored["mild"] is mild["mild"] is strong["mild"] is not None


@pytest.mark.parametrize("gates", ["", "gamma", "g", "g gamma", "g beta", "beta"])
@pytest.mark.parametrize("N", [None, 1, 5], ids=["rows", "one", "five"])
def test_scalar_decay_launches_at_every_length(gates, N, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_with(lambda *_, **__: None, monkeypatch)
    symbol = Symbols()
    with FakeTensorMode(shape_env=symbol.env):
        T = symbol("T", 65)
        q, k, v = (torch.empty(1, T, H, 16) for H in (2, 2, 6))
        g = torch.empty(1, T, 6) if "g" in gates.split() else None
        g_gamma = torch.empty(6) if "gamma" in gates else None
        beta = torch.empty(1, T, 6) if "beta" in gates else None
        cu_seqlens = None if N is None else torch.empty(symbol("N", N + 1), dtype=torch.int64)
        state = torch.empty(1 if cu_seqlens is None else cu_seqlens.shape[0] - 1, 6, 16, 16)
        run(scalar_decay, v, state, q, k, v, g, g_gamma, beta, state, cu_seqlens, 1.0)
    assert [guard.expr for guard in symbol.env.guards] == []


@pytest.mark.parametrize("gates", ["", "g", "gk"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("N", [None, 1, 5], ids=["rows", "one", "five"])
def test_delta_rule_launches_at_every_length(
    gates: str, dtype: torch.dtype, N: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_with(lambda *_, **__: None, monkeypatch)
    symbol = Symbols()
    with FakeTensorMode(shape_env=symbol.env):
        T = symbol("T", 65)
        q, k, v = (torch.empty(1, T, H, 16, dtype=dtype) for H in (2, 2, 6))
        beta = torch.empty(1, T, 6)
        g = torch.empty(1, T, 6) if gates == "g" else None
        gk = torch.empty(1, T, 6, 16) if gates == "gk" else None
        cu_seqlens = None if N is None else torch.empty(symbol("N", N + 1), dtype=torch.int64)
        state = torch.empty(1 if cu_seqlens is None else cu_seqlens.shape[0] - 1, 6, 16, 16)
        run(delta_rule, v, state, q, k, v, beta, g, gk, state, cu_seqlens, 1.0)
    assert [guard.expr for guard in symbol.env.guards] == []


@pytest.mark.parametrize("gates", ["", "g", "gk", "g gk"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("wanted", [range(7), (0,), (2,), (3,), (4, 5), (6,)], ids=str)
def test_gradients_of_the_delta_rule_are_as_a_trace_has_them(
    gates: str, groups: int, wanted: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_with(lambda *_, **__: None, monkeypatch)
    q, k = torch.zeros(2, 1, 5, 2, 16, dtype=torch.float16)
    v = torch.zeros(1, 5, 2 * groups, 16, dtype=torch.float16)
    beta = torch.zeros(1, 5, 2 * groups)
    g = torch.zeros(1, 5, 2 * groups) if "g" in gates.split() else None
    gk = torch.zeros(1, 5, 2 * groups, 16, dtype=torch.bfloat16) if "gk" in gates else None
    state = torch.zeros(1, 2 * groups, 16, 16, dtype=torch.bfloat16)
    args = q, k, v, beta, g, gk, state, None, 1.0, v, None, [i in wanted for i in range(7)]
    launched = delta_rule.backward(*args)
    with FakeTensorMode(allow_non_fake_inputs=True):
        traced = torch.ops.flacompose.delta_rule_backward(*args)
    described = [[(x.shape, x.dtype, x.stride()) for x in results] for results in (launched, traced)]
    assert described[0] == described[1]


@pytest.mark.parametrize("gates", ["", "g", "gamma", "g beta", "beta"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("sizes", [(16, 16), (64, 512), (512, 64), (300, 512)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_of_scalar_decay_are_as_a_trace_has_them(
    gates: str, groups: int, sizes: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of more than 256 too, whose tiles add up in float32: a compiled model reads what the trace says."""
    launch_with(lambda *_, **__: None, monkeypatch)
    (K, V), H = sizes, 2 * groups
    q, k = torch.empty(2, 2, 70, 2, K, dtype=dtype, device="meta")
    v = torch.empty(2, 70, H, V, dtype=dtype, device="meta")
    g, beta = torch.empty(2, 2, 70, H, device="meta")
    gamma = torch.empty(H, device="meta") if gates == "gamma" else None
    state = torch.empty(2, H, K, V, device="meta")
    args = (
        q,
        k,
        v,
        g if "g" in gates.split() else None,
        gamma,
        beta if "beta" in gates else None,
        state,
        None,
        1.0,
    )
    ops = torch.ops.flacompose
    pairs = [(scalar_decay.chunk(*args), ops.scalar_decay_chunk(*args))]
    for wanted in (range(7), range(3), (0,), (2, 6)):
        backward = *args, v, None, [i in wanted for i in range(7)]
        pairs.append((scalar_decay.backward(*backward), ops.scalar_decay_backward(*backward)))
    for launched, traced in pairs:
        described = [[(x.shape, x.dtype, x.stride()) for x in results] for results in (launched, traced)]
        assert described[0] == described[1]


@pytest.mark.parametrize("N", [None, 1, 5], ids=["rows", "one", "five"])
def test_scan_launches_at_every_length(N, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_with(lambda *_, **__: None, monkeypatch)
    symbol = Symbols()
    with FakeTensorMode(shape_env=symbol.env):
        x = torch.empty(1, symbol("T", 65), 40)
        cu_seqlens = None if N is None else torch.empty(symbol("N", N + 1), dtype=torch.int64)
        state = torch.empty(1 if cu_seqlens is None else cu_seqlens.shape[0] - 1, 40)
        run(scan, x, state, x, x, state, cu_seqlens)
    assert [guard.expr for guard in symbol.env.guards] == []


@pytest.mark.parametrize("N", [None, 1, 5], ids=["rows", "one", "five"])
def test_short_conv_launches_at_every_length(N, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_with(lambda *_, **__: None, monkeypatch)
    W = 4
    symbol = Symbols()
    with FakeTensorMode(shape_env=symbol.env):
        x = torch.empty(1, symbol("T", 65), 40)
        cu_seqlens = None if N is None else torch.empty(symbol("N", N + 1), dtype=torch.int64)
        state = torch.empty(1 if cu_seqlens is None else cu_seqlens.shape[0] - 1, 40, W)
        weight, bias = torch.empty(40, W), torch.empty(40)
        run_short_conv(x, state, x, weight, bias, state, cu_seqlens, True)
    assert [guard.expr for guard in symbol.env.guards] == []


@pytest.mark.parametrize("S", [5, 40])
@pytest.mark.parametrize("N", [None, 1, 5], ids=["rows", "one", "five"])
def test_selective_scan_launches_at_every_length(N, S: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_with(lambda *_, **__: None, monkeypatch)
    symbol = Symbols()
    with FakeTensorMode(shape_env=symbol.env):
        T = symbol("T", 65)
        x, A, B = torch.empty(1, T, 40), torch.empty(40, S), torch.empty(1, T, 2, S)
        cu_seqlens = None if N is None else torch.empty(symbol("N", N + 1), dtype=torch.int64)
        state = torch.empty(1 if cu_seqlens is None else cu_seqlens.shape[0] - 1, 40, S)
        run_selective_scan(x, state, x, x, A, B, B, state, cu_seqlens)
    assert [guard.expr for guard in symbol.env.guards] == []


@pytest.mark.parametrize("S", [3, 40])
@pytest.mark.parametrize("wanted", [range(6), (0,), (1,), (2,), (3,), (4,), (5,)], ids=str)
def test_gradients_of_the_selective_scan_are_as_a_trace_has_them(
    wanted: Sequence[int], S: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = recorded(monkeypatch)
    x, dt = torch.zeros(1, 5, 6, dtype=torch.float16), torch.zeros(1, 5, 6, dtype=torch.bfloat16)
    A, B = torch.zeros(6, S, dtype=torch.float64), torch.zeros(1, 5, 2, S, dtype=torch.float16)
    state = torch.zeros(1, 6, S, dtype=torch.bfloat16)
    args = x, dt, A, B, B, state, None, x, None, [i in wanted for i in range(6)]
    launched = selective_scan.backward(*args)
    # The states are swept for the gradients of dt, A and C alone.
    assert len(launches) == 1 + any(i in wanted for i in (1, 2, 4))
    with FakeTensorMode(allow_non_fake_inputs=True):
        traced = torch.ops.flacompose.selective_scan_backward(*args)
    described = [[(x.shape, x.dtype, x.stride()) for x in results] for results in (launched, traced)]
    assert described[0] == described[1]


@pytest.mark.parametrize("W", [4, 9])
@pytest.mark.parametrize("wanted", [range(4), (0,), (1,), (2,), (3,)], ids=str)
def test_gradients_of_the_short_conv_are_as_a_trace_has_them(
    wanted: Sequence[int], W: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_with(lambda *_, **__: None, monkeypatch)
    x = torch.zeros(1, 5, 3, dtype=torch.float16)
    weight, bias = torch.zeros(3, W), torch.zeros(3, dtype=torch.bfloat16)
    state = torch.zeros(1, 3, W, dtype=torch.bfloat16)
    args = x, weight, bias, state, None, True, x, None, [i in wanted for i in range(4)]
    launched = short_conv.backward(*args)
    with FakeTensorMode(allow_non_fake_inputs=True):
        traced = torch.ops.flacompose.short_conv_backward(*args)
    described = [[(x.shape, x.dtype, x.stride()) for x in results] for results in (launched, traced)]
    assert described[0] == described[1]


@pytest.mark.parametrize(
    "family", [scalar_decay, vector_decay, delta_rule, scan], ids=["scalar", "vector", "delta", "scan"]
)
@pytest.mark.parametrize("sequences", [1, 600])
def test_many_sequences_are_not_cut(family, sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long packed row is cut into segments if it is few sequences: else their states would outgrow it."""
    launches = recorded(monkeypatch)
    T = 200 * 64
    q, k, v = torch.zeros(3, 1, T, 2, 16)
    cu_seqlens = torch.linspace(0, T, sequences + 1).long()
    if family is scan:
        scan.chunk(q[:, :, 0], k[:, :, 0], None, cu_seqlens)
    else:
        gates = {scalar_decay: (None,) * 3, vector_decay: (None,) * 3, delta_rule: (v[..., 0], None, None)}[
            family
        ]
        options = (False, False) if family is vector_decay else ()
        family.chunk(q, k, v, *gates, None, cu_seqlens, 1.0, *options)
    ends = "ends" if family is delta_rule else "segment_state"
    cut = any(arguments.get(ends) is not None for _, arguments in launches)
    assert cut == (sequences == 1)


KERNEL = ["triton_kernel_wrapper_functional"]
QKV = [(16,)] * 3


@pytest.mark.parametrize(
    ("function", "sizes", "T", "expected"),
    [
        (fused_recurrent_delta_rule, [*QKV, ()], 1, KERNEL),
        (fused_recurrent_delta_rule, [*QKV, ()], 2, ["flacompose.delta_rule_recurrent.default"]),
        (chunk_delta_rule, [*QKV, ()], 1, ["flacompose.delta_rule_chunk.default"]),
        (fused_recurrent_gsa, [*QKV, (12,), (12,)], 1, KERNEL),
        pytest.param(
            *(fused_recurrent_gsa, [*QKV, (12,)], 1, KERNEL),
            # test_kernels_of_a_step sees it elsewhere, by the layer of ABC.
            marks=pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="indexing asks for CUDA"),
        ),
        (fused_recurrent_gsa, [*QKV, (12,), (12,)], 2, ["flacompose.vector_decay_recurrent.default"] * 2),
        (chunk_gsa, [*QKV, (12,), (12,)], 1, ["flacompose.vector_decay_chunk.default"] * 2),
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
