"""``python tests/helpers/narrow_tiles.py``: tiles that Triton compiles wrongly on the GPU that is here.

Triton 3.6 miscompiles tiles in bfloat16 that are narrower than the shipped ones on Hopper. This runs such tiles, each
in a process of its own, since some crash, and compares values and all gradients with the float64 reference. It prints
a line for each that is wrong and then their number, so that two versions of Triton can be compared.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A file's function of a configuration, the names of its tiles, the widths that are tried, and an entry that uses it.
PLACES = [
    ("channel_decay.plan", "gated_config", ("BD1", "BD2"), (16, 32, 64), "chunk_gla"),
    ("channel_decay.plan", "gated_config", ("BD1", "BD2"), (32, 64), "bonus-chunk-gk-gv"),
    ("channel_decay.plan", "plain_config", ("BD1", "BD2"), (16, 32, 64), "chunk_gla"),
    ("channel_decay.plan", "state_config", ("BK", "BV"), (16, 32, 64), "chunk_gla"),
    ("channel_decay.plan", "score_config", ("BD",), (16, 32), "chunk_gla"),
    ("delta_rule.plan", "channel_gradient_config", ("BK", "BV"), (16, 32, 64), "chunk_kda"),
    ("delta_rule.plan", "gradient_config", ("BK", "BV"), (16, 32, 64), "chunk_gated_delta_rule"),
    ("delta_rule.plan", "product_gradient_config", ("BV",), (16, 32), "chunk_kda"),
    ("delta_rule.plan", "factor_config", ("BK",), (32, 64), "chunk_gated_delta_rule"),
]
STAGES = (2, 3)


def check(file: str, function: str, tiles: str, stages: str, name: str) -> None:
    """In a process of its own: the entry with these tiles, against the reference."""
    from importlib import import_module

    import torch
    from contract.accuracy import assert_accurate
    from contract.cases import NAMED
    from contract.problems import draw, evaluate

    module = import_module(f"flacompose.ops._recurrences.matrix.{file}")
    shipped = getattr(module, function)
    widths = {key: int(width) for key, _, width in (tile.partition("=") for tile in tiles.split(","))}
    setattr(module, function, lambda *args: {**shipped(*args), **widths, "num_stages": int(stages)})
    problem = draw(NAMED[name], torch.device("cuda"), torch.bfloat16, B=1, T=200, K=128, V=128, gates="rare")
    assert_accurate(problem, evaluate(problem))


def outcome(job: tuple[str, ...]) -> str:
    """How a process that checks ends: "right", or in which way it is wrong."""
    command = [sys.executable, __file__, *job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    except subprocess.TimeoutExpired:
        return "no end after 240 s"
    return "right" if done.returncode == 0 else (done.stderr.splitlines() or ["killed"])[-1][:150]


def main() -> None:
    import triton

    jobs = [
        (
            file,
            function,
            ",".join(f"{x}={width}" for x, width in zip(names, given, strict=True)),
            str(stages),
            name,
        )
        for file, function, names, widths, name in PLACES
        for given in product(widths, repeat=len(names))
        for stages in STAGES
    ]
    with ThreadPoolExecutor(14) as pool:
        found = list(zip(jobs, pool.map(outcome, jobs), strict=True))
    kinds: dict[str, int] = {}
    for job, result in found:
        kind = "right"
        if result != "right":
            print(*job, result)
            refused = "OutOfResources" in result or "does not fit" in result or "Compilation" in result
            kind = (
                "refused"
                if refused
                else "wrong"
                if "is off by" in result or "finite" in result
                else "crashed"
            )
        kinds[kind] = kinds.get(kind, 0) + 1
    print(f"Triton {triton.__version__}: {len(jobs)} configurations, {kinds}")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    check(*sys.argv[1:]) if len(sys.argv) > 1 else main()
