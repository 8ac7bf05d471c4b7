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

ROOT = Path(__file__).parents[3]
CODE = """
import json
import sys
import torch
from torch._dynamo.utils import counters
from flacompose.ops import chunk_gla, fused_recurrent_gla
from flacompose.ops._operators import define

if len(sys.argv) > 1:
    define._SOURCES.src = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
q, k, v, g = (torch.zeros(1, 70, 2, 16, device=device, requires_grad=True) for _ in range(4))
# Nothing but the operator, so that there is no C++ code to compile.
o, _ = torch.compile(chunk_gla, fullgraph=True)(q, k, v, g)
o.backward(torch.ones_like(o))
training = dict(counters["aot_autograd"])
torch._dynamo.reset()
counters.clear()
# A token, which a GPU's graph has as a kernel and not as an operator.
x = torch.zeros(1, 1, 2, 16, device=device)
torch.compile(lambda x: fused_recurrent_gla(x, x, x)[0], fullgraph=True)(x)
print(json.dumps([training, dict(counters["aot_autograd"])]))
"""


def counted(cache: Path, *arguments: str) -> list[dict[str, int]]:
    """The compiler's counters of training and of a token, in a fresh process beside that cache."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_other_processes_compile_nothing_but_other_code(tmp_path: Path) -> None:
    """What the compiler keeps has a kernel in it, so that it is found by this version's processes alone."""
    first, second, other = (counted(tmp_path, *arguments) for arguments in ((), (), ("other code",)))
    assert first[0]["autograd_cache_miss"] == 1 and second[0]["autograd_cache_hit"] == 1, (first, second)
    assert not {"autograd_cache_miss", "autograd_cache_bypass"} & second[0].keys(), second
    assert ["autograd_cache_hit" in token for _, token in (first, second, other)] == [False, True, False]


def test_all_of_the_operators_is_this_code() -> None:
    files = sorted(Path(ops.__file__).parent.rglob("*.py"))
    assert define._SOURCES.src == hashlib.sha256(b"".join(x.read_bytes() for x in files)).hexdigest()
