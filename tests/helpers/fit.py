"""``python tests/helpers/fit.py``: every launch compiles for every GPU, and fits in what memory a program may have.

None of the GPUs has to be here. It prints what does not fit, and then exits with 1. All takes hours of processor time,
shared out among processes; Triton's cache keeps what is done. A part is named by options.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tqdm import tqdm

from helpers.launches import CHIPS, DTYPES, SIZES, Launch, every_call, recorded, tables_of

Job = tuple[Launch, int, str]


def jobs(
    capabilities: Iterable[int], dtypes: Iterable[torch.dtype], sizes: Iterable[tuple[int, int]], only: str
) -> list[Job]:
    """Each launch, the compute capability it is for, and where it comes from."""
    found = []
    for capability in capabilities:
        with tables_of(CHIPS[capability]):
            launches = recorded(every_call(dtypes, sizes))
        found += [(launch, capability, at) for launch, at in launches.items() if only in f"{launch} {at}"]
    return found


def check(job: Job) -> str | None:
    """What is wrong with a launch."""
    launch, capability, at = job
    try:
        launch.compile(capability)
        excess = launch.excess(capability)
    except Exception as error:  # one launch that does not compile must not hide the others
        excess = f"{type(error).__name__}: {error}"
    return None if excess is None else f"{capability}: {at}: {launch}: {excess}"


def size(text: str) -> tuple[int, int]:
    K, V = text.split("x")
    return int(K), int(V)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capability", type=int, nargs="+", choices=CHIPS, default=[*CHIPS])
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    parser.add_argument("--dtype", nargs="+", choices=names, default=names)
    parser.add_argument("--size", type=size, nargs="+", default=SIZES, help="of keys and values, as 128x64")
    parser.add_argument("--only", default="", help="a part of a launch's description, as state_passing")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    torch.set_num_threads(1)
    todo = jobs(args.capability, [getattr(torch, name) for name in args.dtype], args.size, args.only)
    wrong = 0
    # PyTorch's threads do not survive a fork.
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        for problem in tqdm(pool.map(check, todo, chunksize=4), total=len(todo), unit="launch"):
            if problem is not None:
                wrong += 1
                tqdm.write(problem)
    print(f"{len(todo)} launches, {wrong} of which do not compile or do not fit")
    return int(wrong > 0 or not todo)


if __name__ == "__main__":
    sys.exit(main())
