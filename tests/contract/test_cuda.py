"""What only a GPU can show: offsets past 2**31, and the kernels' own launches at any length."""

from __future__ import annotations

import pytest
import torch

from .accuracy import error
from .cases import OpCase, one_op_a_form

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
    shape = (1, T, H, D)
    tensors = {
        name: torch.randn(shape, generator=generator, dtype=torch.bfloat16, device="cuda")
        for name in (*case.inputs, *case.gates)
    }
    for name in case.gates:
        tensors[name].abs_().mul_(-0.1)
    with torch.no_grad():
        o, state = case.call(**tensors, output_final_state=True)
        last = o[:, -rows:].clone()
        del o
        head = {name: x[:, : T - rows] for name, x in tensors.items()}
        _, carried = case.call(**head, output_final_state=True)
        tail = {name: x[:, T - rows :].clone() for name, x in tensors.items()}
        expected, final = case.call(**tail, initial_state=carried, output_final_state=True)
    assert last.isfinite().all() and expected.norm() > 0
    # bfloat16's own rounding is 2e-3.
    assert error(last, expected) <= 4e-3
    assert error(state, final) <= 4e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")
@one_op_a_form
def test_one_graph_from_64_tokens_to_many_segments(case: OpCase) -> None:
    """The compiled launches are those of every length, however many segments it is swept in."""
    function = torch.compile(case.call, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for T in (65, 8200, 20000):
            tensors = {name: torch.randn(1, T, 2, 32, device="cuda") for name in (*case.inputs, *case.gates)}
            for name in case.gates:
                tensors[name] = -tensors[name].abs()
            o, state = function(**tensors, output_final_state=True)
            expected, final = case.call(**tensors, output_final_state=True)
            assert error(o, expected) <= 1e-6
            assert error(state, final) <= 1e-6
