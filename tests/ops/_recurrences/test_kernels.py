"""The Triton kernels themselves, on CPU: ``TRITON_INTERPRET=1 pytest``.

Triton reads the variable when it is imported, so this is a run of its own. The launches are those of CUDA. The
interpreter has no bfloat16 products and takes about 2 ms a program: float32 and float16, tiny shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from contract.accuracy import VALUES, assert_accurate, assert_equal
from contract.cases import CASES as ALL_CASES
from contract.cases import GATES_ON_BOTH_AXES, KEY_READS_BEFORE, OpCase, each_softmax, every
from contract.problems import Problem, call_reference, draw, evaluate, permuted, side_by_side
from contract.test_pure import head_first
from helpers.launches import tables_of
from helpers.operators import flat, part
from helpers.unregistered import launched
from torch import Tensor

from flacompose.ops._launch import sequences
from flacompose.ops._launch.chip import ADA
from flacompose.ops._recurrences.matrix.delta_rule import kernels as delta_rule_kernels
from flacompose.ops._recurrences.matrix.delta_rule import plan
from flacompose.ops._recurrences.matrix.gates_of_channels import has_bounded_means
from flacompose.ops._recurrences.matrix.head_decay import cuda as head_decay

CPU = torch.device("cpu")
# The interpreter composes the steps of a tile number by number, so the selective scan has smaller ones in tests of its
# own.
CASES = [case for case in ALL_CASES if case.recurrence != "selective_scan"]
# What is launched for these is launched for other entries: groups of queries are more tokens, a mean is two calls, and
# gates are computed or added before.
COMPOSED = (
    "fused_recurrent_gsa-grouped", "chunk_abc", "chunk_linear_attn-normalize", "chunk_retention",
    "fused_recurrent_lightning_attn", "fused_recurrent_simple_gla-g-g_gamma",
    "steps-chunk_gated_delta_product", "steps-fused_recurrent_gated_delta_product",
)  # fmt: skip
DISTINCT = [case for case in CASES if case.name not in COMPOSED]
each_op = every(DISTINCT)
each_gated_op = every([case for case in DISTINCT if case.gates])
each_scaled_op = every([case for case in DISTINCT if case.scaled])

# In chunks whose gates turn out not to be factorisable, or above the diagonal: both are dropped.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


NAMED = {case.name: case for case in CASES}
# Forms for decoding, whose backward is launched as that of another entry is, named beside them.
FORWARD_ALONE = {
    "fused_recurrent_gla-gk": "chunk_gla",
    "fused_recurrent_rwkv6": "chunk_rwkv6",
    "fused_recurrent_hgrn": "chunk_hgrn",
    "fused_recurrent_rg_lru": "chunk_rg_lru",
    "fused_recurrent_rwkv4": "chunk_rwkv4",
    "fused_recurrent_mlstm": "chunk_mlstm",
    "fused_recurrent_simple_gla": "chunk_linear_attn",
}


forward_alone = torch.no_grad()(launched)


def check(problem: Problem, loss: str = "both") -> None:
    if problem.case.name in FORWARD_ALONE:
        results = evaluate(problem, loss, forward_alone)
        assert_accurate(problem, {name: results[name] for name in VALUES}, loss)
    else:
        assert_accurate(problem, evaluate(problem, loss, launched), loss)


@pytest.mark.parametrize(
    ("case", "T"),
    [(case, 65) for case in CASES] + [(case, T) for case in DISTINCT for T in (1, 3)],
    ids=lambda x: x.name if isinstance(x, OpCase) else str(x),
)
def test_dense(case: OpCase, T: int) -> None:
    check(draw(case, CPU, B=1, H=2, T=T, K=5, V=17))


@pytest.mark.parametrize("gates", ["weak", "mixed"])
@pytest.mark.parametrize(("name", "K", "V"), [("chunk_kda", 80, 17), ("chunk_simple_gla-g", 5, 200)])
def test_tables_of_a_small_chip(name: str, K: int, V: int, gates: str) -> None:
    with tables_of(ADA):
        check(draw(NAMED[name], CPU, B=1, H=1, T=66, K=K, V=V, gates=gates))


@each_op
def test_no_initial_state_float16(case: OpCase) -> None:
    check(draw(case, CPU, torch.float16, B=1, H=1, T=66, state=False))


@each_op
@pytest.mark.parametrize("loss", ["o", "state"])
def test_one_loss(case: OpCase, loss: str) -> None:
    check(draw(case, CPU, B=1, H=1, T=5), loss)


@pytest.mark.parametrize(("scale", "T"), [(0.0, 5), (-0.7, 66)])
@each_scaled_op
def test_scale(case: OpCase, scale: float, T: int) -> None:
    check(draw(case, CPU, B=1, H=1, T=T, scale=scale))


@each_op
@pytest.mark.parametrize("lengths", [[6], [0, 65, 1, 0, 3, 0]], ids=["one", "six"])
def test_packed(case: OpCase, lengths: list[int]) -> None:
    check(draw(case, CPU, H=1, lengths=lengths, tail=3))


GATES = [
    (case, gates)
    for case in DISTINCT
    # -4.0 is factorisable in blocks of 16 tokens, but not in a chunk.
    for gates in (-1e-6, -4.0, -8.0, -30.0, float("-inf"), "mixed", "rare")
    if case.gates
]


@pytest.mark.parametrize(("case", "gates"), GATES, ids=[f"{case.name}-{gates}" for case, gates in GATES])
def test_gates(case: OpCase, gates: str | float) -> None:
    check(draw(case, CPU, B=1, H=1, T=66, gates=gates))


@each_gated_op
@pytest.mark.parametrize(("gates", "loss"), [(-4.5, "both"), (-15.0, "both"), (-8.0, "state")])
def test_strong_gates_of_a_few_tokens(case: OpCase, gates: float, loss: str) -> None:
    """The sums of few gates are small. So are gradients, compared with what heads of a group read undecayed."""
    check(draw(case, CPU, B=1, H=1, T=3, gates=gates), loss)


BONUS = NAMED["bonus-chunk-gk-gv"]


@pytest.mark.parametrize("T", [2, 66])
def test_strong_gates_on_both_axes_beside_a_bonus(T: int) -> None:
    """Neighbours meet undecayed, all else is nearly forgotten: gates' gradients come from the little that is left."""
    check(draw(BONUS, CPU, B=1, H=1, T=T, gates=-8.0))


@pytest.mark.parametrize(
    ("axes", "gates"),
    [((), "weak"), *[((axis,), gates) for axis in ("gk", "gv") for gates in ("weak", "mixed")]],
    ids=str,
)
@pytest.mark.parametrize(("H", "lengths"), [(2, None), (1, [3, 0, 70, 65])], ids=["dense", "packed"])
def test_bonus_beside_any_gates(H: int, lengths: list[int] | None, axes: tuple[str, ...], gates: str) -> None:
    case = replace(BONUS, gates={name: BONUS.gates[name] for name in axes})
    check(draw(case, CPU, H=H, T=66, K=33, V=18, lengths=lengths, tail=2, gates=gates))


@pytest.mark.parametrize("gates", ["weak", "mixed"])
def test_gates_on_both_axes_in_chunks(gates: str) -> None:
    """What is read from the state along the value axis, which is one tile, is decayed along the key axis too."""
    check(draw(GATES_ON_BOTH_AXES, CPU, B=1, H=2, T=66, gates=gates))


@every([GATES_ON_BOTH_AXES, NAMED["chunk_gsa"]])
@pytest.mark.parametrize("strong", [slice(32), slice(32, None)], ids=["first", "last"])
def test_one_tile_of_strong_gates(case: OpCase, strong: slice) -> None:
    """Whether gates are factorisable is noted for each tile, and the pairs of a chunk are stored unless all are."""
    problem = draw(case, CPU, B=1, H=1, T=20, K=40, V=40, M=70)
    for name in case.gates:
        problem.tensors[name][..., strong] = -20.0
    check(problem)


def test_a_strong_gate_that_no_read_meets() -> None:
    """A read before the decay stops short of a chunk's last gate, the write of that token does not."""
    problem = draw(NAMED["chunk_rwkv6"], CPU, B=1, H=1, T=64, gates=0.0)
    problem.tensors["w"][:, 63] = float("-inf")
    check(problem)


@triton.jit
def _multiply(x, n):
    i = tl.arange(0, 4)
    tl.store(x + i, i * n)


def test_overflow_is_seen() -> None:
    """The tests' interpreter checks integers in a way of its own."""
    x = torch.zeros(4, dtype=torch.int64)
    _multiply[(1,)](x, 2**29)
    assert x.tolist() == [0, 2**29, 2**30, 3 * 2**29]
    with pytest.raises(triton.runtime.errors.InterpreterError, match="int overflow"):
        _multiply[(1,)](x, 2**30)


@triton.jit
def _has_bounded_means(g, out, rows, columns):
    i, j = tl.arange(0, 64)[:, None], tl.arange(0, 32)[None, :]
    is_factorisable = has_bounded_means(tl.load(g + i * 32 + j), (i < rows) & (j < columns))
    tl.store(out, is_factorisable.to(tl.float32))


def test_gates_whose_gradient_needs_the_levels() -> None:
    """In bfloat16 a strong gate among others does not, a token or channel of strong gates does. Padding is left out."""

    def is_factorisable(rows: int, columns: int, **strong: object) -> bool:
        g, out = torch.zeros(64, 32), torch.zeros(1)
        g[:rows, :columns] = -1.3
        for at in strong.values():
            g[at] = -12.0
        _has_bounded_means[(1,)](g, out, rows, columns)
        return bool(out)

    for rows, columns in ((64, 32), (3, 32), (64, 5)):
        assert is_factorisable(rows, columns)
        assert is_factorisable(rows, columns, one=(1, 2))
        assert not is_factorisable(rows, columns, token=(rows - 1, slice(columns)))
        assert not is_factorisable(rows, columns, channel=(slice(rows), columns - 1))


@each_gated_op
@pytest.mark.parametrize("value", [-8.0, -20.0])
def test_what_strong_gates_leave(case: OpCase, value: float) -> None:
    """Nothing is written, so that the final state is what is left of the first."""
    problem = draw(case, CPU, B=1, H=1, T=1, gates=value)
    check(problem.with_tensors(**{case.output: torch.zeros_like(problem.tensors[case.output])}), "state")


@each_gated_op
def test_strong_gates_in_float16(case: OpCase) -> None:
    """What they leave of a state is below float16's range, its product with a large gradient is not."""
    problem = draw(case, CPU, torch.float16, B=1, H=1, T=5, gates=-15.0)
    check(replace(problem, do=problem.do * 2**10), "o")


@pytest.mark.parametrize("sizes", [(1, 1), (40, 70)], ids=str)
@each_op
def test_head_sizes(case: OpCase, sizes: tuple[int, int]) -> None:
    K, V = sizes
    check(draw(case, CPU, B=1, H=1, T=5, K=K, V=V))


# One of each kernel that works in tiles of heads of more than 256, and in what these add up.
LARGE = [
    "chunk_gla", "chunk_gsa", "chunk_simple_gla-g", "chunk_linear_attn", "chunk_delta_rule", "chunk_gated_delta_rule",
    "chunk_kda", "fused_recurrent_gated_delta_rule", "chunk_comba", "chunk_dplr_delta_rule", "chunk_mlstm",
]  # fmt: skip


@every([NAMED[name] for name in LARGE])
@pytest.mark.parametrize("sizes", [(300, 20), (20, 300)], ids=str)
def test_large_heads(case: OpCase, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In two segments, so that the passes that compute their ends have large states as well."""
    monkeypatch.setattr(sequences, "segment_count", lambda *_: 2)
    K, V = sizes
    check(draw(case, CPU, B=1, H=1, T=68, K=K, V=V, M=max(K, V)))


@every([case for case in DISTINCT if case.name not in FORWARD_ALONE])
@pytest.mark.parametrize("lengths", [None, [3, 150, 0, 66]], ids=["dense", "packed"])
def test_segments(case: OpCase, lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the forms in chunks, and of the backward."""
    monkeypatch.setattr(sequences, "segment_count", lambda *_: 3)
    check(draw(case, CPU, B=1, H=1, T=200, K=5, V=6, lengths=lengths, gates="mixed"))


each_head_decay = every([case for case in CASES if case.recurrence == "head_decay" and case.gates])


@pytest.fixture
def two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks as in bfloat16, of two blocks of 64 tokens."""
    monkeypatch.setattr(
        head_decay.plan, "chunk_size", lambda bfloat16, step, gates, *_: 4 * step if gates else step
    )


@each_head_decay
@pytest.mark.parametrize(
    ("lengths", "segments", "gates", "groups"),
    [
        (None, 1, "weak", 1),
        (None, 3, "mixed", 2),
        ([3, 150, 0, 33], 1, "mixed", 1),
        ([3, 150, 0, 33], 3, "weak", 2),
    ],
    ids=["dense-1-weak", "dense-3-mixed-shared", "packed-1-mixed", "packed-3-weak-shared"],
)
@pytest.mark.usefixtures("two_blocks")
def test_chunks_of_several_blocks(
    case: OpCase,
    lengths: list[int] | None,
    segments: int,
    gates: str,
    groups: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in bfloat16, where a state is stored for every second block of 64 tokens, and a step of state passing has 32.

    Weak gates leave pairs of tokens of two blocks, which heads that share keys add up.
    """
    monkeypatch.setattr(sequences, "segment_count", lambda *_: segments)
    case = replace(case, groups=groups)
    problem = draw(case, CPU, B=1, H=1, T=150, K=40, V=70, lengths=lengths, gates=gates)
    empty = torch.empty

    def not_a_number(*args: Any, **kwargs: Any) -> torch.Tensor:
        """Memory in which one sees what no kernel has written."""
        new = empty(*args, **kwargs)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    monkeypatch.setattr(torch, "empty", not_a_number)
    check(problem)


with_blocks = pytest.mark.parametrize("name", ["chunk_simple_gla-g", "chunk_simple_gla-g-beta"])


@pytest.mark.usefixtures("two_blocks")
def test_gates_above_zero() -> None:
    """As rounding makes some of mLSTM's."""
    problem = draw(replace(NAMED["chunk_simple_gla-g-beta"], groups=1), CPU, B=1, H=1, T=150)
    check(problem.with_tensors(g=problem.tensors["g"].abs() / 100))


@with_blocks
@pytest.mark.parametrize(("scale", "groups"), [(0.0, 1), (0.0, 2), (-0.7, 1), (-0.7, 2)])
@pytest.mark.usefixtures("two_blocks")
def test_scale_of_chunks_of_two_blocks(name: str, scale: float, groups: int) -> None:
    check(draw(replace(NAMED[name], groups=groups), CPU, B=1, H=1, T=150, K=40, V=70, scale=scale))


@pytest.mark.parametrize(("strong", "groups"), [(20, 1), (63, 1), (64, 1), (100, 1), (63, 2), (64, 2)])
@pytest.mark.parametrize("large", ["state", "later block"])
@pytest.mark.usefixtures("two_blocks")
def test_gradients_of_gates_before_a_strong_one(strong: int, groups: int, large: str) -> None:
    """Far larger gradients of later states or blocks end at a strong gate: they leave no error on gates before it."""
    case = replace(NAMED["chunk_simple_gla-g-beta"], groups=groups)
    problem = draw(case, CPU, B=1, H=1, T=150, K=40, V=70)
    problem.tensors["g"][:, strong] = -40.0
    if large == "state":
        problem.d_final_state.mul_(1e7)
    else:
        problem.do[:, (strong // 64 + 1) * 64 :] *= 1e7
    truth = evaluate(problem.to(torch.float64), "both", call_reference)["dg"][:, :strong]
    wrong = evaluate(problem, "both", launched)["dg"][:, :strong] - truth
    assert wrong.norm() < 1e-5 * truth.norm()


@pytest.mark.parametrize(("HV", "parts"), [(6, 1), (33, 3)])
def test_many_heads_of_values_share_keys(HV: int, parts: int) -> None:
    """Gradients of queries and keys are added up in a program, and beyond 32 heads in several."""
    assert head_decay.plan.head_parts(HV) == parts
    case = replace(NAMED["chunk_simple_gla-g"], groups=HV)
    check(draw(case, CPU, B=2, H=1, T=20 if parts > 1 else 70, K=5, V=6, gates="mixed"))


each_delta_rule = every(
    [
        case
        for case in DISTINCT
        if "beta" in case.inputs and "beta" not in case.optional and case.name not in FORWARD_ALONE
    ]
)


@each_delta_rule
@pytest.mark.parametrize("lengths", [None, [3, 100, 0]], ids=["dense", "packed"])
def test_segments_with_little_replaced(
    case: OpCase, lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a segment begins with reaches its end: otherwise its transition would be too small to be seen."""
    monkeypatch.setattr(sequences, "segment_count", lambda *_: 3)
    problem = draw(case, CPU, B=1, H=1, T=100, K=40, V=20, lengths=lengths, gates=-1e-3)
    check(problem.with_tensors(beta=0.05 * problem.tensors["beta"]))


@pytest.fixture(params=["transitions", "warm_starts"])
def joined(request: pytest.FixtureRequest) -> str:
    """How segments come by the state before them."""
    how: str = request.param
    return how


@pytest.fixture
def decaying(joined: str, monkeypatch: pytest.MonkeyPatch) -> Problem:
    """Three segments of four chunks, and four heads: two gates of -80 decay a state to zero, and one does not.

    Such a gate is in the middle of every chunk of the first head, of no chunk of the second, of each segment's last two
    in the third, and of its first two in the fourth. Segments are joined by their transitions, or start warm where the
    states of all heads decay to zero: then the second head has two such gates in the middle segment.
    """
    by_transitions = joined == "transitions"
    monkeypatch.setattr(sequences, "segment_count", lambda *_: 3 if by_transitions else 1)
    monkeypatch.setattr(plan, "warm_start_count", lambda *_: 3)
    problem = draw(NAMED["chunk_gated_delta_rule"], CPU, B=1, H=2, T=12 * 32, K=6, V=5, gates=-0.02)
    problem.tensors["beta"].mul_(0.02)  # else keys replace what gates leave
    middle = problem.tensors["g"].unflatten(1, (3, 4, 32))[:, :, :, 16]
    middle[..., 0] = middle[:, :, 2:, 2] = middle[:, :, :2, 3] = -80.0
    if not by_transitions:
        middle[:, 1, 1:3, 1] = -80.0
    return problem


def test_states_that_decay_to_zero(decaying: Problem) -> None:
    """Chunks are left out in which the initial state decays to zero, by head and in either direction."""
    check(decaying)


@pytest.mark.parametrize("lengths", [None, [3, 150, 0, 100, 131]], ids=["dense", "packed"])
@pytest.mark.parametrize(("gates", "asked"), [("mixed", 16), (-3.0, 16), (-3.0, 1), (-8.0, 1), (-1e-3, 16)])
def test_warm_starts(
    lengths: list[int] | None, gates: str | float, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four segments, some without tokens; one chunk of each, or all, are examined for a decay to zero."""
    monkeypatch.setattr(delta_rule_kernels, "CHUNKS_EXAMINED", tl.constexpr(asked))
    monkeypatch.setattr(plan, "warm_start_count", lambda *_: 4)
    check(draw(NAMED["chunk_gated_delta_rule"], CPU, B=2, H=1, T=384, K=6, V=5, lengths=lengths, gates=gates))


def test_warm_starts_change_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number depends on the batch size, on which the results of a row must not depend."""
    problem = draw(NAMED["chunk_gated_delta_rule"], CPU, B=1, H=2, T=384, K=6, V=5, gates=-2.0)
    problem.tensors["g"][..., 0] /= 100

    def results(count: int) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(plan, "warm_start_count", lambda *_: count)
        return evaluate(problem, "both", launched)

    once, warm = results(1), results(4)
    assert all(torch.equal(x, warm[name]) for name, x in once.items())


def test_last_chunks_are_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only a segment's last chunk is examined, its first chunk alone cannot give the next one a warm start."""
    monkeypatch.setattr(plan, "warm_start_count", lambda *_: 3)
    monkeypatch.setattr(delta_rule_kernels, "CHUNKS_EXAMINED", tl.constexpr(1))
    problem = draw(NAMED["chunk_gated_delta_rule"], CPU, B=1, H=1, T=12 * 32, K=6, V=5, gates=-0.02)
    problem.tensors["g"].unflatten(1, (3, 4, 32))[:, :, 0] = -8.0
    problem.tensors["initial_state"][:] = torch.nan
    assert evaluate(problem, "both", launched)["o"].isnan().all()


def test_gate_that_is_nan_reaches_the_next_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although all other gates are strong."""
    monkeypatch.setattr(plan, "warm_start_count", lambda *_: 3)
    problem = draw(NAMED["chunk_gated_delta_rule"], CPU, B=1, H=2, T=12 * 32, K=6, V=5, gates=-8.0)
    problem.tensors["g"][:, 100, 1] = torch.nan
    o = evaluate(problem, "both", launched)["o"]
    assert o[:, 100:256, 1].isnan().all() and o[:, :, 0].isfinite().all()


@every([NAMED[name] for name in ("chunk_gated_delta_rule", "chunk_comba", "chunk_kda", "chunk_rwkv7")])
@pytest.mark.parametrize("segments", [1, 3])
def test_both_directions_at_once(case: OpCase, segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those of one pass after the other: which is launched depends on the batch size."""
    monkeypatch.setattr(sequences, "segment_count", lambda *_: segments)
    problem = draw(case, CPU, B=1, H=1, T=150, K=16, V=16, gates=-0.3)
    at_once = evaluate(problem, "both", launched)
    monkeypatch.setattr(plan, "are_few", lambda *_: False)
    assert_equal(evaluate(problem, "both", launched), at_once)


def test_nan_in_a_state_that_decays_to_zero(decaying: Problem, joined: str) -> None:
    """A NaN at the row's start, and one that arrives at its end, stay in their segments where all gates are strong.

    With warm starts, it also reaches the segment beside, since the second head's state decays only in the middle one.
    """
    reach = 128 if joined == "transitions" else 256
    v, do = decaying.tensors["v"].clone(), decaying.do.clone()
    v[:, 0, 0] = do[:, -1, 0] = torch.nan
    results = evaluate(replace(decaying.with_tensors(v=v), do=do), "both", launched)
    o, dv = results["o"][..., 0, :], results["dv"][..., 0, :]
    assert o[:, :reach].isnan().any(-1).all() and o[:, reach:].isfinite().all()
    assert dv[:, -reach:].isnan().any(-1).all() and dv[:, :-reach].isfinite().all()


@every([NAMED[name] for name in ("chunk_delta_rule", "chunk_gated_delta_rule", "chunk_comba", "chunk_kda")])
@pytest.mark.parametrize(
    ("segments", "lengths"), [(1, None), (3, None), (3, [3, 100, 0])], ids=["one", "three", "packed"]
)
def test_states_in_parts(
    case: OpCase, segments: int, lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in bfloat16, where a program holds a state of more than 128 keys in several tiles."""
    monkeypatch.setattr(sequences, "segment_count", lambda *_: segments)
    config = {"BK": 16, "BV": 16, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(plan, "state_passing_config", lambda *_: config)
    check(draw(case, CPU, B=1, H=1, T=100, K=20, V=20, lengths=lengths, gates=-1e-3))


@every(
    [
        NAMED[name]
        for name in ("chunk_delta_rule", "chunk_gated_delta_rule", "chunk_comba", "chunk_comba-after")
    ]
)
@pytest.mark.parametrize("loss", ["both", "o", "state"])
def test_gradients_of_tiles_of_keys(case: OpCase, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with more than 64 keys: a chunk has several programs."""
    config = {"BK": 16, "BV": 16, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(plan, "gradient_config", lambda *_: config)
    check(draw(case, CPU, B=1, H=1, T=70, K=20, V=37, gates="mixed"), loss)


@pytest.mark.parametrize("gates", ["weak", "mixed", -30.0])
@pytest.mark.parametrize("lengths", [None, [3, 0, 70, 65]], ids=["dense", "packed"])
def test_key_that_reads_before_the_decay(lengths: list[int] | None, gates: str | float) -> None:
    """With no other vector that reads."""
    check(draw(KEY_READS_BEFORE, CPU, B=1, H=1, T=70, K=5, V=6, lengths=lengths, gates=gates))


@every(
    [
        case
        for case in DISTINCT
        if case.name not in FORWARD_ALONE and not case.name.startswith(("chunk_gsa", "chunk_abc"))
    ]
)
def test_segments_without_tokens(case: OpCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave a state as it is, to the bit, also what is not finite."""
    monkeypatch.setattr(sequences, "segment_count", lambda *_: 3)
    problem = draw(case, CPU, H=1, K=4, V=6, lengths=[70, 0, 5])  # the scale is a power of two
    for state in (problem.tensors["initial_state"], problem.d_final_state):
        state[1].view(-1)[0] = torch.inf
    results = evaluate(problem, "both", launched)
    assert torch.equal(results["final_state"][1], problem.tensors["initial_state"][1])
    assert torch.equal(results["dinitial_state"][1], problem.d_final_state[1])
    assert all(results[name][0].isfinite().all() for name in ("final_state", "dinitial_state", "o"))


@each_delta_rule
@pytest.mark.parametrize("lengths", [None, [3, 66, 0]], ids=["dense", "packed"])
def test_values_beside_others(case: OpCase, lengths: list[int] | None) -> None:
    """They are read where they are, the other inputs as copies."""
    problem = draw(case, CPU, T=5, H=2, K=5, V=6, lengths=lengths)
    strided = problem.with_tensors(v=side_by_side(problem.tensors["v"]))
    assert_equal(evaluate(strided, "both", launched), evaluate(problem, "both", launched))


@each_delta_rule
def test_values_of_one_token_head_first(case: OpCase) -> None:
    """PyTorch calls them contiguous, although their stride from token to token is that of a head."""
    problem = draw(case, CPU, B=3, T=1, H=2, K=5, V=6)
    v = problem.tensors["v"].transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    assert v.is_contiguous() and v.stride(1) < v.stride(0)
    head_first = problem.with_tensors(v=v)
    found = evaluate(head_first, "both", launched)
    assert_equal(found, evaluate(problem, "both", launched))
    assert found["o"].stride() == torch.empty(found["o"].shape).stride()


@every([case for case in CASES if case.form == "recurrent" and case.recurrence != "scan"])
@pytest.mark.parametrize("layout", [side_by_side, head_first])
@pytest.mark.parametrize(
    ("B", "T", "lengths"),
    [(1, 1, None), (3, 1, None), (2, 5, None), (1, 5, [2, 0, 2])],
    ids=["one token", "a token each", "rows", "packed"],
)
def test_tokens_beside_others(
    case: OpCase, layout: Callable[[Tensor], Tensor], B: int, T: int, lengths: list[int] | None
) -> None:
    """They are read where they are, and what lies between them is not."""
    problem = draw(case, CPU, B=B, T=T, H=2, K=5, V=6, M=3, lengths=lengths)
    other = problem.with_tensors(**{name: layout(x) for name, x in problem.tensors.items()})
    with torch.no_grad():
        assert all(map(torch.equal, launched(other), launched(problem)))


@each_gated_op
@pytest.mark.parametrize("exponent", [-45, 40])
def test_gradients_of_any_size(case: OpCase, exponent: int) -> None:
    """Gates that are just factorisable in a chunk, where factors are largest, and a loss scaled far up or down."""
    problem = draw(case, CPU, B=1, H=1, T=64, gates=-1.4)
    factor = 2.0**exponent
    scaled = replace(problem, do=problem.do * factor, d_final_state=problem.d_final_state * factor)
    check(scaled)


@pytest.mark.parametrize("strength", [1.0, 100.0])
@each_softmax
def test_softmax(case: OpCase, strength: float) -> None:
    """It is taken before the scale, of logits of any size and layout."""
    problem = draw(case, CPU, B=1, H=2, T=66, K=5, V=17, scale=-0.7)
    check(problem.with_tensors(q=permuted(problem.tensors["q"] * strength)))


def test_large_gradients_of_the_softmax_in_float16() -> None:
    """That of a probability is above float16's range, that of a logit is not."""
    problem = draw(NAMED["chunk_gsa"], CPU, torch.float16, B=1, H=1, T=5)
    check(replace(problem, do=problem.do * 2**12), "o")


DELTA = "q k v beta g"
DELTA_TOKENS = [(1, 34, 1, 5), (1, 34, 1, 5), (1, 34, 2, 6), (1, 34, 2), (1, 34, 2)]
OF_DELTA = {"scale": 0.7, "delta_rule": True}


@pytest.mark.parametrize(
    "recurrence, names, shapes, options",
    [
        ("head_decay", "q k v g g_gamma beta initial_state",
         [(1, 34, 1, 5), (1, 34, 1, 5), (1, 34, 2, 6), (1, 34, 2), (2,), (1, 34, 2), (1, 2, 5, 6)], {"scale": 0.7}),
        ("channel_decay", "q k v gk gv u initial_state",
         [(1, 34, 1, 5), (1, 34, 1, 5), (1, 34, 1, 6), (1, 34, 1, 5), (1, 34, 1, 6), (1, 5), (1, 1, 5, 6)],
         {"scale": 0.7}),
        ("delta_rule", f"{DELTA} initial_state", [*DELTA_TOKENS, (1, 2, 5, 6)], OF_DELTA),
        ("delta_rule", f"{DELTA} a initial_state", [*DELTA_TOKENS, (1, 34, 1, 5), (1, 2, 5, 6)],
         OF_DELTA | {"read_before": True}),
        ("delta_rule", f"{DELTA} gk a initial_state",
         [*DELTA_TOKENS, (1, 34, 2, 5), (1, 34, 1, 5), (1, 2, 5, 6)], OF_DELTA),
        ("low_rank", "q k v a b gk initial_state",
         [*[(1, 34, 1, 5)] * 2, (1, 34, 1, 6), *[(1, 34, 1, 5)] * 3, (1, 1, 5, 6)],
         {"scale": 0.7, "read_before": True}),
        ("normalizer", "q k x g beta floor initial_state",
         [*[(1, 34, 1, 5)] * 2, (1, 34, 2, 6), *[(1, 34, 2)] * 3, (1, 2, 5)], {"scale": 0.7, "eps": 0.1}),
        ("scan", "x g initial_state", [(1, 34, 3), (1, 34, 3), (1, 3)], {}),
        ("rg_lru", "x r i a_param initial_state", [*[(1, 34, 3)] * 3, (3,), (1, 3)], {}),  # without resets
        ("short_conv", "x weight bias initial_state", [(1, 34, 3), (3, 4), (3,), (1, 3, 4)], {"silu": True}),
        ("selective_scan", "x dt A B C D z dt_bias initial_state",
         [(1, 18, 3), (1, 18, 3), (3, 2), (1, 18, 1, 2), (1, 18, 1, 2), (3,), (1, 18, 3), (3,), (1, 3, 2)],
         {"softplus": True}),
    ],
    ids=["scalar", "vector", "delta", "delta that reads before", "delta with gates of channels", "low rank",
         "normaliser", "scan", "RG-LRU", "convolution", "selective"],
)  # fmt: skip
def test_one_gradient(
    recurrence: str, names: str, shapes: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    """Each is what it is among all of them, and those that are not wanted are empty."""
    backward, module = flat(part(recurrence, "cuda"), "backward"), part(recurrence, "inputs")
    given = {name: -torch.rand(shape) for name, shape in zip(names.split(), shapes, strict=True)}
    first, state = next(iter(given.values())), given["initial_state"]
    do = torch.randn_like(first if first.dim() == 3 else given.get("v", given.get("x")))
    args = *module.Inputs(**given, **options), do, torch.randn_like(state)
    everything = module.SIGNATURE.differentiable
    expected = backward(*args, [name in given for name in everything])
    for i, name in enumerate(everything):
        if name not in given:
            continue
        found = backward(*args, [name == other for other in everything])
        # The sums of some kernels have another order where less is wanted, which float32 sees.
        torch.testing.assert_close(found[i], expected[i], rtol=1e-4, atol=1e-5)
        assert all(x.shape == (0,) for x in (*found[:i], *found[i + 1 :]))
