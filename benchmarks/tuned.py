"""The peer's launch configurations: install saved ones, which spares minutes of autotuning, and save its choices.

After a line about where they were chosen, the file has a line for each configuration: ``{"kernel": name, "when": {key
argument: value}, "dtypes": [...], "config": {...}}``. Key arguments are saved by name, because the peer reorders and
extends them between releases. A line with other names than the kernel's is ignored. A kernel that finds no
configuration tunes as usual.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any


def autotuners(package: str = "fla") -> Iterator[Any]:
    """Every autotuned kernel in the loaded modules of the package, each once."""
    from triton.runtime.autotuner import Autotuner, Heuristics

    seen = set()
    for name, module in sorted(sys.modules.items()):
        if name != package and not name.startswith(package + "."):
            continue
        for value in list(vars(module).values()):
            while isinstance(value, Heuristics):
                value = value.fn
            if isinstance(value, Autotuner) and id(value) not in seen:
                seen.add(id(value))
                yield value


def install(path: Path, package: str = "fla") -> set[tuple[str, tuple]]:
    """Fill the autotuners' caches from the file; returns what was installed, as (kernel, key)."""
    from triton import Config

    _, *entries = map(json.loads, path.read_text().splitlines())
    installed = set()
    for tuner in autotuners(package):
        name = tuner.base_fn.__name__
        for entry in entries:
            when, config = entry["when"], entry["config"]
            if entry["kernel"] != name or set(when) != set(tuner.keys):
                continue
            # Triton's own key: the key arguments in order, then the dtypes of the tensors.
            key = (*(when[k] for k in tuner.keys), *(f"torch.{dtype}" for dtype in entry["dtypes"]))
            tuner.cache[key] = Config(
                config["kwargs"], num_warps=config["num_warps"], num_stages=config["num_stages"]
            )
            installed.add((name, key))
    return installed


def shorten(ms: float, package: str = "fla") -> None:
    """Have every candidate timed for about so many milliseconds, where Triton takes 25 to warm up and 100 to time."""
    from triton.testing import do_bench

    for tuner in autotuners(package):
        tuner._do_bench = partial(do_bench, warmup=max(1, round(ms / 4)), rep=max(1, round(ms)))


def origin(path: Path) -> str:
    """A line that says who made the choices in the file, and where."""
    content = json.loads(path.read_text().splitlines()[0])
    return (
        f"launch configurations in {path.name} were chosen by {content['tuned_with']} on {content['device']}"
    )


def cached(package: str = "fla") -> set[tuple[str, tuple]]:
    """All pairs of a kernel and a key that have a configuration now."""
    return {(tuner.base_fn.__name__, key) for tuner in autotuners(package) for key in tuner.cache}


def save(path: Path, device: str, version: str, package: str = "fla") -> None:
    """Write every configuration that the autotuners hold, in the form that `install` reads."""
    lines: list[dict] = [{"device": device, "tuned_with": f"flash-linear-attention {version}"}]
    for tuner in autotuners(package):
        for key, config in tuner.cache.items():
            values, dtypes = key[: len(tuner.keys)], key[len(tuner.keys) :]
            if len(values) < len(tuner.keys) or not all(str(dtype).startswith("torch.") for dtype in dtypes):
                continue  # a key argument kept its default, so that the values cannot be matched with names
            lines.append(
                {
                    "kernel": tuner.base_fn.__name__,
                    "when": dict(zip(tuner.keys, values, strict=True)),
                    "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
                    "config": {
                        "kwargs": config.kwargs,
                        "num_warps": config.num_warps,
                        "num_stages": config.num_stages,
                    },
                }
            )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
