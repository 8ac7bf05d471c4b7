"""The peer's launch configurations: install saved ones, which saves minutes of autotuning, and save its choices.

After a line about their origin, the file has a line for each configuration: ``{"kernel": name, "when": {key
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
    """All autotuned kernels in the loaded modules of the package."""
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
    """Fill the autotuners' caches from the file; return the installed pairs (kernel, key)."""
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
    """Time every candidate for about this long, where Triton takes 25 ms to warm up and 100 ms to time."""
    from triton.testing import do_bench

    for tuner in autotuners(package):
        tuner._do_bench = partial(do_bench, warmup=max(1, round(ms / 4)), rep=max(1, round(ms)))


def origin(path: Path) -> str:
    """A line about the origin of the choices in the file."""
    content = json.loads(path.read_text().splitlines()[0])
    return (
        f"launch configurations in {path.name} were chosen by {content['tuned_with']} on {content['device']}"
    )


def cached(package: str = "fla") -> set[tuple[str, tuple]]:
    """All pairs of a kernel and a key with a configuration."""
    return {(tuner.base_fn.__name__, key) for tuner in autotuners(package) for key in tuner.cache}


def save(path: Path, device: str, version: str, package: str = "fla") -> None:
    """Write all configurations of the autotuners for `install`."""
    lines: list[dict] = [{"device": device, "tuned_with": f"flash-linear-attention {version}"}]
    for tuner in autotuners(package):
        for key, config in tuner.cache.items():
            values, dtypes = key[: len(tuner.keys)], key[len(tuner.keys) :]
            if len(values) < len(tuner.keys) or not all(str(dtype).startswith("torch.") for dtype in dtypes):
                continue  # a key argument kept its default, so values and names do not match
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
