"""Importing and calling need neither Triton nor a GPU, and load neither the specification nor what is slow to load."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules["triton"] = None  # importing it raises
import torch
from torch.utils.flop_counter import FlopCounterMode  # before the package, which then registers its formulas at once
import flacompose
from flacompose.layers import GatedLinearAttention
from flacompose.ops import chunk_gla, chunk_simple_gla, fused_recurrent_gla, fused_recurrent_simple_gla

assert not torch.cuda.is_initialized()
assert not [name for name in sys.modules if name.startswith("flacompose.") and name.endswith(".reference")]
q, k, v, g = (torch.randn(2, 5, 2, 16).requires_grad_() for _ in range(4))
for functions, gate in (
    ((chunk_gla, fused_recurrent_gla), g),
    ((chunk_simple_gla, fused_recurrent_simple_gla), g[..., 0]),
):
    for function in functions:
        o, state = function(q, k, v, -gate.exp(), output_final_state=True)
        (o.sum() + state.sum()).backward()
assert g.grad.isfinite().all()
layer = GatedLinearAttention(hidden_size=16, num_heads=2)
layer(torch.randn(2, 70, 16))[0].sum().backward()
assert layer.q_proj.weight.grad.isfinite().all()
assert "torch.distributed.tensor" not in sys.modules and "torch._dynamo" not in sys.modules
with FlopCounterMode(display=False) as counter:
    chunk_gla(q, k, v, -g.exp())
assert counter.get_total_flops() == 4 * 2 * 5 * 2 * 16 * 16
print("right")
"""

UNLOADED = """
import sys
import torch
import flacompose.integrations.fla, flacompose.integrations.transformers, flacompose.layers, flacompose.models

slow = {"triton", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "transformers"}
assert not slow & sys.modules.keys(), slow & sys.modules.keys()

from torch.utils.flop_counter import FlopCounterMode  # imports Triton, and registers the formulas now

with FlopCounterMode(display=False) as counter:
    flacompose.ops.chunk_gla(*torch.zeros(4, 1, 8, 2, 16))
assert counter.get_total_flops() == 4 * 8 * 2 * 16 * 16
print("right")
"""


@pytest.mark.parametrize("program", [PROGRAM, UNLOADED], ids=["without Triton", "without what is slow"])
def test_import(program: str) -> None:
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "right\n"
