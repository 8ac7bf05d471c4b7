"""Compiled graphs with an operator are found in the compiler's cache by another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = """
import json
import torch
from torch._dynamo.utils import counters
from flacompose.ops import chunk_gla

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
q, k, v, g = (torch.zeros(1, 70, 2, 16, device=device, requires_grad=True) for _ in range(4))
# Nothing but the operator, so that there is no C++ code to compile.
o, _ = torch.compile(chunk_gla, fullgraph=True)(q, k, v, g)
o.backward(torch.ones_like(o))
print(json.dumps(dict(counters["aot_autograd"])))
"""


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    counters = []
    for _ in range(2):
        result = subprocess.run(
            [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
        counters.append(json.loads(result.stdout.splitlines()[-1]))
    first, second = counters
    assert first["autograd_cache_miss"] == 1 and second["autograd_cache_hit"] == 1, counters
    assert "autograd_cache_miss" not in second and "autograd_cache_bypass" not in second, counters
