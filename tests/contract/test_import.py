"""Importing and calling need neither Triton nor a GPU, and load neither the specification nor what is slow to load."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # importing it raises
import torch
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
print("right")
"""


def test_without_triton() -> None:
    run = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "right\n"
