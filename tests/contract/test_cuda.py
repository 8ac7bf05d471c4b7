"""What only a GPU can show: offsets past 2**31, and the kernels' own launches at any length."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flacompose.ops._launch import sequences

from .accuracy import error
from .cases import CASES, OpCase, every, one_op_a_form
from .problems import draw, evaluate

GIB = 2**30
large_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 60 * GIB,
    reason="a GPU with 60 GiB of memory",
)


@large_gpu
@one_op_a_form
def test_more_elements_than_int32_counts(case: OpCase) -> None:
    """The last rows are those of a short run from the state carried to them."""
    T, H, D, rows = 2**20 + 128, 16, 128, 256
    assert T * H * D > 2**31 > (T - rows) * H * D
    generator = torch.Generator("cuda").manual_seed(0)
    size = {"B": 1, "T": T, "H": H, "HV": H, "HQ": H, "K": D, "V": D, "D": H * D, "S": 16, "W": 4}
    tensors = {
        name: torch.randn(
            [size[axis] for axis in axes], generator=generator, dtype=torch.bfloat16, device="cuda"
        )
        for name, axes in {**case.inputs, **case.gates}.items()
    }
    for name in tensors.keys() & case.draws.keys():
        tensors[name] = case.draws[name](tensors[name])
    for name in case.gates:
        tensors[name].abs_().mul_(-0.1)
    with torch.no_grad():
        o, state = case.call(**tensors, output_final_state=True)
        last = o[:, -rows:].clone()
        del o
        head = case.at(slice(T - rows), tensors, "T")
        _, carried = case.call(**head, output_final_state=True)
        tail = {name: x.clone() for name, x in case.at(slice(T - rows, None), tensors, "T").items()}
        expected, final = case.call(**tail, initial_state=carried, output_final_state=True)
    assert last.isfinite().all() and expected.norm() > 0
    # bfloat16's own rounding is 2e-3.
    assert error(last, expected) <= 4e-3
    for found, truth in zip(tree_leaves(state), tree_leaves(final), strict=True):
        assert error(found, truth) <= 4e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")
@one_op_a_form
def test_one_graph_from_64_tokens_to_many_segments(case: OpCase) -> None:
    """The compiled launches are those of every length, however many segments a row has."""
    function = torch.compile(case.call, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for T in (65, 8200, 20000):
            tensors = draw(case, torch.device("cuda"), B=1, T=T, K=32, V=32, state=False).tensors
            o, state = function(**tensors, output_final_state=True)
            expected, final = case.call(**tensors, output_final_state=True)
            assert error(o, expected) <= 1e-6
            assert error(state, final) <= 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")
@pytest.mark.parametrize("gates", [-0.05, -3.0], ids=["weak", "strong"])
@one_op_a_form
def test_every_run_has_the_same_bits(case: OpCase, gates: float) -> None:
    """Heads of 128 are several tiles wide, so that kernels load the next tile while they work on one: races show."""
    problem = draw(case, torch.device("cuda"), torch.bfloat16, B=1, T=1000, H=2, K=128, V=128, gates=gates)
    first = evaluate(problem)
    for _ in range(30):
        for name, x in evaluate(problem).items():
            assert torch.equal(x, first[name]), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")
@pytest.mark.parametrize("D", [64, 128])
@every([case for case in CASES if "beta" in case.inputs and case.form == "chunk"])
def test_a_row_has_its_bits_in_a_large_batch(case: OpCase, D: int) -> None:
    """Other kernels are launched where their programs fill a chip."""
    case = replace(case, groups=1)
    sizes = {"B": 120, "T": 150, "H": 2, "K": D, "V": D}
    tensors = draw(case, torch.device("cuda"), torch.bfloat16, state=False, **sizes).tensors
    do = torch.randn(120, 150, 2, D, dtype=torch.bfloat16, device="cuda")

    def computed(rows: slice) -> dict[str, Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in case.at(rows, tensors, "B").items()}
        o, _ = case.call(**leaves)
        return {
            "o": o,
            **dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), do[rows]), strict=True)),
        }

    for name, x in computed(slice(1)).items():
        assert torch.equal(x, computed(slice(None))[name][:1]), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")
@pytest.mark.parametrize("D", [128, 256, 512])
@every([case for case in CASES if "beta" in case.inputs and case.form == "chunk"])
def test_states_outlive_segments(case: OpCase, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where little is replaced, what a long row begins with reaches its end through many transitions."""
    sizes = {"B": 1, "T": 16500, "H": 1, "K": D, "V": D}
    problem = draw(case, torch.device("cuda"), torch.bfloat16, gates=-1e-4, **sizes)
    problem = problem.with_tensors(beta=0.02 * problem.tensors["beta"])
    first = evaluate(problem)
    for _ in range(10):
        for name, x in evaluate(problem).items():
            assert torch.equal(x, first[name]), name
    monkeypatch.setattr(sequences, "segment_count", lambda *_: 1)
    for name, x in evaluate(problem).items():
        # bfloat16's own rounding is 2e-3.
        assert error(first[name], x) <= 4e-3, name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")
@pytest.mark.parametrize("gates", [-0.1, -30.0], ids=["weak", "strong"])
@one_op_a_form
def test_nan_is_not_lost(case: OpCase, gates: float) -> None:
    """One in a gradient that comes in is in every one that goes out, however products round their factors."""
    sizes = {"B": 1, "T": 64, "H": 1, "K": 64, "V": 64}
    tensors = draw(case, torch.device("cuda"), torch.bfloat16, gates=gates, state=False, **sizes).tensors
    for x in tensors.values():
        x.requires_grad_()
    o, _ = case.call(**tensors)
    gradients = torch.autograd.grad(o, list(tensors.values()), torch.full_like(o, float("nan")))
    inner = case.at(slice(1, -1), dict(zip(tensors, gradients, strict=True)), "T")
    for x in inner.values():
        assert x.isnan().all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
@pytest.mark.parametrize("current", [0, 1])
@one_op_a_form
def test_second_gpu(case: OpCase, current: int) -> None:
    """Whichever device is the current one."""
    K = 48 if current else 80  # so that its kernels are new to each
    with torch.cuda.device(current):
        results = []
        for device in ("cuda:1", "cuda:0"):
            tensors = draw(case, torch.device(device), B=1, K=K, V=K, state=False).tensors
            for x in tensors.values():
                x.requires_grad_()
            o, _ = case.call(**tensors)
            results.append([o.detach(), *torch.autograd.grad(o.sin().sum(), list(tensors.values()))])
        for x, y in zip(*results, strict=True):
            assert error(x.cpu(), y.cpu()) <= 1e-6
