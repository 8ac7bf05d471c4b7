"""Compiled graphs with an operator are found in the compiler's cache by another process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from flacompose import ops
from flacompose.ops._operators import define

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


# A token, which a GPU's graph has as a kernel and not as an operator.
TOKEN = """
import json
import sys
import torch
from torch._dynamo.utils import counters
from flacompose.ops import fused_recurrent_gla
from flacompose.ops._operators import define

if len(sys.argv) > 1:
    define._SOURCES.src = sys.argv[1]
x = torch.zeros(1, 1, 2, 16, device="cuda" if torch.cuda.is_available() else "cpu")
torch.compile(lambda x: fused_recurrent_gla(x, x, x)[0], fullgraph=True)(x)
print(json.dumps(dict(counters["aot_autograd"])))
"""


def counted(code: str, *arguments: str, cache: Path) -> dict[str, int]:
    """The compiler's counters after a fresh process has run `code` beside that cache."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    counters = first, second = [counted(CODE, cache=tmp_path) for _ in range(2)]
    assert first["autograd_cache_miss"] == 1 and second["autograd_cache_hit"] == 1, counters
    assert "autograd_cache_miss" not in second and "autograd_cache_bypass" not in second, counters


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_other_code_compiles_again(tmp_path: Path) -> None:
    """What the compiler keeps has a kernel in it, so that it is found by this version's processes alone."""
    counters = [counted(TOKEN, *other, cache=tmp_path) for other in ((), (), ("other code",))]
    assert ["autograd_cache_hit" in x for x in counters] == [False, True, False], counters


def test_all_of_the_operators_is_this_code() -> None:
    files = sorted(Path(ops.__file__).parent.rglob("*.py"))
    assert define._SOURCES.src == hashlib.sha256(b"".join(x.read_bytes() for x in files)).hexdigest()
