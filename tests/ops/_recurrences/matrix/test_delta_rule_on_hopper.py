"""Kernels in Gluon, run by an emulator as they are launched on Hopper, and Triton's around them.

In bfloat16 all that a recurrence makes, values and gradients, is right by the measure of the contract.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from contract.accuracy import assert_accurate, assert_equal, error
from contract.cases import NAMED, OpCase
from contract.problems import Call, Problem, Results, call_reference, draw, evaluate
from contract.test_pure import nan_in_new_memory  # noqa: F401
from helpers.gluon_emulator import run
from helpers.launches import tables_of
from helpers.unregistered import launched

from flacompose.ops._launch import sequences
from flacompose.ops._launch.chip import AMPERE, HOPPER, Chip
from flacompose.ops._launch.launch import launching_by
from flacompose.ops._recurrences.matrix import eager
from flacompose.ops._recurrences.matrix.delta_rule import cuda as delta_rule
from flacompose.ops._recurrences.matrix.delta_rule import hopper, launch_factors, plan
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
from flacompose.ops._recurrences.matrix.delta_rule.operands import operands
from flacompose.ops._recurrences.matrix.inputs import Inputs

CPU = torch.device("cpu")
OF_HEADS = {hopper_head_factor_kernel, hopper_head_gradient_kernel}
FORWARDS = {hopper_head_state_passing_kernel}
BACKWARD = {hopper_head_backward_kernel}
OF_CHANNELS = {
    hopper_channel_factor_kernel,
    hopper_channel_chunk_gradient_kernel,
    hopper_channel_block_gradient_kernel,
}
KERNELS = {
    "chunk_delta_rule": OF_HEADS | FORWARDS,
    "chunk_gated_delta_rule": OF_HEADS | FORWARDS,
    "chunk_comba-after": OF_HEADS,
    "chunk_comba": OF_HEADS,
    "chunk_kda": OF_CHANNELS,
    "chunk_gdn2": OF_CHANNELS,
}


def test_every_kernel_is_run() -> None:
    kernels = set()
    for path in Path(hopper.__file__).parent.glob("*.py"):
        module = import_module(f"{hopper.__name__}.{path.stem}")
        kernels |= {x for name, x in vars(module).items() if name.endswith("_kernel")}
    assert kernels == set().union(BACKWARD, *KERNELS.values())


def emulated(problem: Problem, function: Call, loss: str = "both") -> tuple[Results, set[Any]]:
    """What `function` computes on Hopper, and the kernels in Gluon that it launches."""
    in_gluon = set()

    def emulate(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        if kernel.is_gluon():
            in_gluon.add(kernel)
        run(kernel, grid, *args, **kwargs)

    with tables_of(HOPPER), launching_by(emulate):
        return evaluate(problem, loss, function), in_gluon


def gated(*gates: str) -> list[tuple[str, str]]:
    """Every recurrence with each of the `gates`, or once if it has none."""
    return [(name, gate) for name in KERNELS for gate in (gates if NAMED[name].gates else gates[:1])]


# Strong gates of channels have a kernel of their own.
STRONG = [(name, "strong") for name, kernels in KERNELS.items() if kernels == OF_CHANNELS]


@pytest.mark.parametrize(("name", "gates"), gated("weak", "rare", "resets") + STRONG)
@pytest.mark.parametrize(
    ("H", "K", "V", "lengths"), [(2, 64, 128, None), (1, 128, 64, [3, 70, 0, 64])], ids=["dense", "packed"]
)
@pytest.mark.usefixtures("nan_in_new_memory")
def test_accurate(name: str, H: int, K: int, V: int, lengths: list[int] | None, gates: str) -> None:
    """Of a chunk and a part of the next, and of packed rows that have tokens after them. Most heads share keys."""
    problem = draw(
        NAMED[name], CPU, torch.bfloat16, B=1, T=70, H=H, K=K, V=V, lengths=lengths, tail=5, gates=gates
    )
    results, in_gluon = emulated(problem, launched)
    assert in_gluon == KERNELS[name]
    assert_accurate(problem, results)


@pytest.mark.parametrize("gates", ["weak", "strong"])
def test_gates_in_float32(gates: str) -> None:
    """They are in two parts as factors of products."""
    problem = draw(
        NAMED["chunk_kda"], CPU, torch.bfloat16, T=70, H=1, K=64, V=64, gates=gates, gate_dtype=torch.float32
    )
    results, _ = emulated(problem, launched)
    assert_accurate(problem, results)


def of_two_tokens(case: OpCase, reader: int, *gates: tuple[int, int, float], **options: Any) -> Problem:
    """Token 15 alone has a value, and `reader` alone a gradient of its output. Gates are weak, except `gates`."""
    problem = draw(case, CPU, torch.bfloat16, B=1, T=64, H=1, K=64, V=64, gates=-0.01, state=False, **options)
    g = problem.tensors["g"].clone()
    for start, stop, gate in gates:
        g[:, start:stop] = gate
    v, do = (torch.zeros_like(x) for x in (problem.tensors["v"], problem.do))
    v[:, 15], do[:, reader] = problem.tensors["v"][:, 15], problem.do[:, reader]
    return replace(problem.with_tensors(g=g, v=v), do=do)


@pytest.mark.parametrize("others", [-0.01, -3.0])
def test_a_gate_in_float32_between_two_tokens(others: float) -> None:
    """All results are those of one pair, and would be off by 1.6 per cent if its gate were rounded to bfloat16."""
    gates = (16, 17, -7.953), (40, 56, others)
    problem = of_two_tokens(NAMED["chunk_kda"], 16, *gates, gate_dtype=torch.float32)
    results, _ = emulated(problem, launched, "o")
    assert_accurate(problem, results, "o")


@pytest.mark.parametrize("between", [24.0, 38.0])
def test_gradients_of_two_tokens(between: float) -> None:
    """They are as exact as any, though what is left between the middles of their blocks is too little for float32.

    The gradient of `beta` is a single number, so its error is chance, and may be a few times that of others.
    """
    gates = (8, 16, -5.5), (16, 33, -between / 17), (33, 40, -5.5)
    problem = of_two_tokens(replace(NAMED["chunk_kda"], groups=1), 32, *gates)
    results, _ = emulated(problem, launched, "o")
    truth = evaluate(problem.to(torch.float64), "o", call_reference)
    assert error(results.pop("dbeta"), truth["dbeta"]) < 0.02
    assert_accurate(problem, results, "o")


NEAR_THE_BOUND = -6.40625, -5.59375  # in the first half of each block, and in the second


@pytest.mark.parametrize(
    ("early", "late", "of_q", "of_k"),
    [(-5.0, -5.0, 1.0, 1e-12), (*NEAR_THE_BOUND, 1.0, 1e-12), (*NEAR_THE_BOUND, 16.0, 1.0)],
    ids=["small keys", "smaller keys", "large queries"],
)
def test_products_within_float32(early: float, late: float, of_q: float, of_k: float) -> None:
    """No factor of a product that counts leaves float32, though a block weakens keys by exp(-90).

    What queries have with later keys does, and reaches nothing.
    """
    problem = draw(NAMED["chunk_kda"], CPU, torch.bfloat16, B=1, T=64, H=1, K=64, V=64)
    g = torch.full_like(problem.tensors["g"], early)
    g[:, torch.arange(64) % 16 >= 8] = late
    q, k = of_q * problem.tensors["q"], of_k * problem.tensors["k"]
    problem = problem.with_tensors(g=g, q=q, k=k)
    results, _ = emulated(problem, launched)
    assert_accurate(problem, results)


@pytest.mark.parametrize(
    ("strongest", "strong", "writes", "reads", "exact"),
    [
        # From token 47 to the chunk's end, and from its start to token 16.
        (slice(40, 48), slice(48, 64), 47, None, ("final_state", "dv")),
        (slice(16, 24), slice(0, 16), None, 16, ("o", "dinitial_state")),
        # From token 15 to token 32, whose block's early half is decayed too.
        (slice(33, 40), slice(16, 32), 15, 32, ("o", "dv")),
    ],
    ids=["to end", "from start", "between blocks"],
)
def test_all_is_decayed_to_almost_nothing(
    strongest: slice, strong: slice, writes: int | None, reads: int | None, exact: tuple[str, ...]
) -> None:
    """What only gates of a block and of a half of the next, of 60 and 44, have left is as exact as anything else.

    No token writes but `writes`, and none reads but `reads`, so nothing larger is beside it. The gradients of queries,
    keys and gates are not as exact.
    """
    case = replace(NAMED["chunk_kda"], groups=1)
    problem = draw(case, CPU, torch.bfloat16, B=1, T=64, H=1, K=64, V=64, state=writes is None)
    g = torch.full_like(problem.tensors["g"], -0.01)
    g[:, strongest], g[:, strong] = -5.5, -3.75
    t = torch.arange(64).view(1, 64, 1)
    beta = torch.where(t == writes if writes is not None else t < 0, 0.5, 0.0).to(g.dtype)
    problem = problem.with_tensors(g=g, beta=beta)
    if reads is not None:
        q, do = (torch.where(t[..., None] == reads, x, 0) for x in (problem.tensors["q"], problem.do))
        problem = replace(problem.with_tensors(q=q), do=do)
    loss = "state" if reads is None else "o"
    results, _ = emulated(problem, launched, loss)
    assert_accurate(problem, {name: results[name] for name in exact}, loss)


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32])
def test_gates_that_are_in_no_sum(gate_dtype: torch.dtype) -> None:
    """The first gate of a block is in no sum from its middle. It may be -inf where its blocks are factorisable."""
    problem = draw(
        NAMED["chunk_kda"], CPU, torch.bfloat16, B=1, T=70, H=1, K=64, V=64, gates=-0.5, gate_dtype=gate_dtype
    )
    g = problem.tensors["g"].clone()
    g[:, ::16, :, 3] = -torch.inf
    problem = problem.with_tensors(g=g)
    results, _ = emulated(problem, launched)
    assert_accurate(problem, results)


@pytest.mark.parametrize("name", ["chunk_kda", "chunk_gdn2"])
@pytest.mark.parametrize("gates", [-5.0, -0.01])
@pytest.mark.parametrize("largest", ["written", "read"])
def test_gradients_of_gates_beside_large_ones(name: str, gates: float, largest: str) -> None:
    """A gate's gradient has no noise of what it does not decay: a last token's write, or a first one's read."""
    case = replace(NAMED[name], groups=1)
    problem = draw(case, CPU, torch.bfloat16, B=1, T=64, H=1, K=64, V=64, gates=gates)
    g, v = problem.tensors["g"].clone(), problem.tensors["v"].clone()
    if largest == "written":
        g[:, -1], v[:, -1] = -7.9, 8 * v[:, -1]
        problem = problem.with_tensors(g=g, v=v)
    else:
        g[:, 1] = -7.9
        do = problem.do.clone()
        do[:, 0] *= 8
        problem = replace(problem.with_tensors(g=g), do=do)
    loss = "state" if largest == "written" else "o"
    results, _ = emulated(problem, launched, loss)
    assert_accurate(problem, results, loss)


@pytest.mark.parametrize("name", ["chunk_kda", "chunk_gdn2"])
def test_gradients_of_gates_between_two_tokens(name: str) -> None:
    """Gates that do not decay the only pair of tokens, of two blocks, have no gradient: all bits of float32 cancel."""
    problem = of_two_tokens(replace(NAMED[name], groups=1), 16, (0, 64, -2.5))
    results, _ = emulated(problem, launched, "o")
    size = results["dg"].float().abs().amax((0, 2, 3))
    assert size[torch.arange(64) != 16].max() <= 1e-6 * size[16]


def of_two_tiles(first: float | str, second: float | str) -> Tensor:
    """Gates of a chunk of one head, of 64 channels each: all the same, or from -5 to 0."""
    strong = -5 * torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
    tiles = [strong if isinstance(x, str) else torch.full((64, 64), x) for x in (first, second)]
    return torch.cat(tiles, -1).view(1, 64, 1, 128)


@pytest.mark.parametrize(
    ("gates", "chunk", "tiles"),
    [
        (of_two_tiles(-0.5, -0.5), 1, [1, 1]),
        # From the chunk's middle, sums of 44.8 are factorisable, and those of 45.3 in one of its halves are not.
        (of_two_tiles(-1.3984375, -0.01), 1, [1, 1]),
        (of_two_tiles(-1.4140625, -0.01).index_fill(1, torch.arange(32), -0.01), 2, [1, 1]),
        (of_two_tiles(-1.4921875, -0.01).index_fill(1, torch.arange(32, 64), -0.01), 2, [1, 1]),
        (of_two_tiles("strong", -0.5), 2, [1, 1]),
        (of_two_tiles("strong", -30.0), 0, [1, 0]),
        # The sum of half a block is beyond the bound, and no gate is.
        (of_two_tiles(-7.0, "strong"), 0, [0, 1]),
        # One gate is, and no sum. That matters to gradients alone.
        (of_two_tiles(-0.01, "strong").index_fill(1, torch.tensor([20]), -15.0), 2, [0, 0]),
        (of_two_tiles(-0.01, -0.01).index_fill(1, torch.tensor([20]), -9.0), 2, [0, 0]),
    ],
    ids=["weak", "nearly", "late", "early", "blocks", "left", "sums", "size", "size alone"],
)
@pytest.mark.parametrize("memory", [0, 1])
def test_what_is_factorisable_in_blocks(gates: Tensor, chunk: int, tiles: list[int], memory: int) -> None:
    """The kernel of pairs notes what a chunk is, and those of gradients share out its tiles.

    They do so whatever was in the memory in which they note it.
    """
    case = replace(NAMED["chunk_kda"], groups=1)
    problem = draw(case, CPU, torch.bfloat16, B=1, T=64, H=1, K=128, V=64)
    problem = problem.with_tensors(g=gates.to(problem.tensors["g"].dtype).clone())
    noted = {}

    def emulate(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        taken = kernel is hopper_channel_block_gradient_kernel
        if taken or kernel is hopper_channel_factor_kernel:
            kwargs["factorisable_tiles" if taken else "factorisable_chunks"].fill_(memory)
        run(kernel, grid, *args, **kwargs)
        if taken:
            names = "factorisable_chunks", "factorisable_tiles"
            noted.update({name: kwargs[name][0].flatten().tolist() for name in names})

    with tables_of(HOPPER), launching_by(emulate):
        results = evaluate(problem, function=launched)
    assert noted == {"factorisable_chunks": [chunk], "factorisable_tiles": tiles}
    # Of so few tokens, `dbeta` may be beyond the bound of the contract with all kernels. Those of Triton make the same.
    with tables_of(AMPERE), launching_by(run):
        expected = evaluate(problem, function=launched)
    for name, x in results.items():
        assert (x.float() - expected[name].float()).norm() <= 2**-8 * expected[name].float().norm(), name


@pytest.mark.parametrize(
    ("name", "gates"), [("chunk_gated_delta_rule", "weak"), ("chunk_kda", "weak"), ("chunk_kda", "strong")]
)
def test_gates_without_gradient(name: str, gates: str) -> None:
    """The other gradients are the same to the bit."""
    problem = draw(NAMED[name], CPU, torch.bfloat16, B=1, T=70, H=1, K=64, V=64, gates=gates)
    g = problem.tensors["g"]
    results, _ = emulated(problem, lambda problem, **tensors: launched(problem, **{**tensors, "g": g}))
    expected, _ = emulated(problem, launched)
    assert_equal(results, expected | {"dg": torch.zeros_like(g)})


def test_pairs_of_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse, and the bound of what a chunk multiplies a state by, which is made for rows of segments alone.

    They are those of Triton's kernel.
    """
    monkeypatch.setattr(sequences, "segment_count", lambda *_: 3)
    q, k, v = torch.randn(3, 1, 140, 1, 64, dtype=torch.bfloat16)
    beta, g = torch.rand(2, 1, 140, 1)
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    inputs = Inputs(
        q, k, v, -g, beta=2.5 * beta, scale=0.3, delta_rule=True
    )  # beyond 2 a token enlarges the state

    def pairs(chip: Chip) -> tuple[Tensor, Tensor]:
        with tables_of(chip), launching_by(run):
            x = operands(inputs, 64)
            gates, steps = launch_factors.compute_gates(x, inputs.g), plan.plan_of(x, "backward", inputs.v)
            made = launch_factors.compute_factors(x, steps, gates, with_r=True)
        return made.decays.log_norm[:3], made.factors.Y[:3]

    for x, expected in zip(pairs(HOPPER), pairs(AMPERE), strict=True):
        # Products of two parts keep 16 bits.
        assert (x - expected).norm() <= 2**-16 * expected.norm()


@pytest.mark.parametrize("gates", ["weak", "resets", -15.0])
@pytest.mark.parametrize("restarts", [1, 3])
@pytest.mark.parametrize(
    ("K", "V", "lengths"), [(64, 128, None), (128, 64, [140, 0, 190])], ids=["dense", "packed"]
)
@pytest.mark.usefixtures("nan_in_new_memory")
def test_segments(
    K: int,
    V: int,
    lengths: list[int] | None,
    restarts: int,
    gates: str | float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Segments are joined by their transitions, or have warm starts."""
    monkeypatch.setattr(plan, "warm_start_count", lambda *_: restarts)
    if restarts == 1:
        monkeypatch.setattr(sequences, "segment_count", lambda *_: 3)
    case = NAMED["chunk_gated_delta_rule"]
    problem = draw(case, CPU, torch.bfloat16, B=1, T=330, H=1, K=K, V=V, lengths=lengths, gates=gates)
    results, in_gluon = emulated(problem, launched)
    assert in_gluon >= FORWARDS
    assert_accurate(problem, results)


@pytest.mark.parametrize(("beta", "unlike"), [(1.0, 0.1), (0.5, 0.1), (1.0, 0.0)])
def test_keys_that_are_alike(beta: float, unlike: float) -> None:
    """Most of what products add up cancels there: outputs and states are as exact as those of Triton's kernels."""
    q, k, v = torch.randn(3, 1, 200, 2, 64)
    k = torch.nn.functional.normalize(k[:, :1] + unlike * k, dim=-1)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    inputs = Inputs(q, k, v, beta=torch.full((1, 200, 2), beta), scale=0.125, delta_rule=True)
    exact = eager.forward(Inputs(*(x.double() if isinstance(x, Tensor) else x for x in inputs)))
    errors = []
    for chip in (HOPPER, AMPERE):
        with tables_of(chip), launching_by(run):
            found = delta_rule.chunk(inputs)
        errors.append([((x - y).norm() / y.norm()).item() for x, y in zip(found, exact, strict=True)])
    assert all(mine <= 1.1 * other + 2**-14 for mine, other in zip(*errors, strict=True)), errors


@pytest.mark.parametrize(("name", "gates"), [x for x in gated("weak", "resets") if FORWARDS <= KERNELS[x[0]]])
@pytest.mark.parametrize(
    ("D", "B", "T", "groups", "segments"),
    [(64, 2, 150, 1, 1), (128, 1, 70, 1, 1), (64, 1, 330, 1, 3), (64, 2, 150, 3, 1)],
    ids=["dense", "wide", "segments", "groups"],
)
@pytest.mark.usefixtures("nan_in_new_memory")
def test_head_backward(
    name: str,
    D: int,
    B: int,
    T: int,
    groups: int,
    segments: int,
    gates: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where programs fill a chip, one kernel makes all gradients: the same to the bit as the two that it replaces."""
    monkeypatch.setattr(sequences, "segment_count", lambda *_: segments)
    monkeypatch.setattr(plan, "are_few", lambda *_: False)
    case = replace(NAMED[name], groups=groups)
    problem = draw(case, CPU, torch.bfloat16, B=B, T=T, H=2, K=D, V=D, gates=gates)
    expected, apart = emulated(problem, launched)
    monkeypatch.setattr(plan, "RESIDENT_PROGRAMS", {64: 1, 128: 1})
    results, in_one = emulated(problem, launched)
    assert BACKWARD <= in_one and not BACKWARD & apart
    assert_equal(results, expected)
    assert_accurate(problem, results)


@pytest.mark.parametrize(
    ("name", "in_one"),
    [("chunk_gated_delta_rule", True), ("chunk_gated_delta_rule", False), ("chunk_comba", False)],
)
def test_pairs_that_overflow(name: str, in_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of a token that reads with a later one that writes reach nothing, even if they are inf."""
    monkeypatch.setattr(plan, "RESIDENT_PROGRAMS", {64: 1 if in_one else 10**9})
    problem = draw(
        replace(NAMED[name], groups=1), CPU, torch.bfloat16, B=1, T=64, H=1, K=64, V=64, gates=-0.1
    )
    later = torch.arange(64)[:, None, None] >= 32
    problem = problem.with_tensors(v=problem.tensors["v"] * torch.where(later, 1e20, 1.0).bfloat16())
    early = problem.do * torch.where(later, 0.0, 1e20).bfloat16()
    results, in_gluon = emulated(replace(problem, do=early), launched)
    assert (BACKWARD <= in_gluon) == in_one
    assert all(x.isfinite().all() for x in results.values())


@pytest.mark.usefixtures("nan_in_new_memory")
def test_both_directions_with_keys_of_low_rank() -> None:
    """In bfloat16, in which nothing else runs the sweeps of this recurrence without a GPU."""
    problem = draw(NAMED["chunk_rwkv7"], CPU, torch.bfloat16, B=1, T=70, H=1, K=64, V=64)
    results, _ = emulated(problem, launched)
    assert_accurate(problem, results)
