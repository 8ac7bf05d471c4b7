"""Mamba-2's scan beside mamba-ssm's: `mamba_chunk_scan_combined` of both, on a GPU.

Only mamba-ssm's Triton kernels are needed, which are plain Python. Importing its package would ask for its compiled
extensions, which the scan does not use: the modules are imported without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import cuda, measure, tuned, warm
from .cases import MAMBA2_TRAINING, Draw, Op, Shape, Targets, plain
from .recurrences import SSD, ssd
from .report import Row

PACKAGE, SIDE = "mamba_ssm", "mamba-ssm"
CHUNK = 256
"""The tokens of a chunk that mamba-ssm's layer asks for. To flacompose it makes no difference."""
ACCURACY = Shape(1, 1024, 1, 128, 64, group=32)
TOLERANCE = 0.03
"""By how much results and gradients of the two sides may differ: several times the rounding errors of both."""
NOTE = "mamba-ssm's Triton kernels are imported without its package, which would ask for compiled extensions"


def load() -> Any:
    """mamba-ssm's module with the scan. Where its files are missing, the program ends and says what to install."""
    if PACKAGE not in sys.modules:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.submodule_search_locations is None:
            raise SystemExit("--parts mamba2 needs the Python files of mamba-ssm, and einops, on the path")
        # In place of the package, a module that only says where its files are.
        package = types.ModuleType(PACKAGE)
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules[PACKAGE] = package
    return importlib.import_module(f"{PACKAGE}.ops.triton.ssd_combined")


def version() -> str:
    try:
        return metadata.version(SIDE)
    except metadata.PackageNotFoundError:
        return "unknown"


def small_steps(x: Tensor) -> Tensor:
    """Before softplus, as a trained model has them: the state keeps tokens for some fifty steps."""
    return x - 4


def decays(x: Tensor) -> Tensor:
    return -x.exp()


def _op(name: str, *optional: str) -> Op:
    """The scan with some of its optional inputs. Parameters are float32, as the layer keeps them."""
    wanted = ("x", "dt", "A", "B", "C", *optional)
    transforms = {"dt": small_steps, "A": decays}
    parameters = ("A", "D", "dt_bias")
    (state,) = SSD.states.values()
    return Op(
        name=name,
        chunk="chunk_mamba2",
        recurrent="chunk_mamba2",
        inputs={
            x: Draw(" ".join(axes), transforms.get(x, plain), torch.float32 if x in parameters else None)
            for x, axes in SSD.inputs.items()
            if x in wanted
        },
        reference=SSD.joint_reference,
        output=SSD.output,
        states={"state": Draw(" ".join(state))},
        options={"chunk_size": CHUNK},
        grouped=True,
        training=MAMBA2_TRAINING,
        targets=Targets(memory=None),
    )


OPS = (_op("mamba2"), _op("mamba2 with D, z and dt_bias", "D", "z", "dt_bias"))
COMPILED = dataclasses.replace(OPS[-1], name=f"{OPS[-1].name} under torch.compile")
"""What surrounds the scan is in kernels of mamba-ssm. flacompose leaves its fusion to the compiler."""


def functions(module: Any) -> SimpleNamespace:
    """The scan of one side, its keywords for states as the other functions have them."""
    return SimpleNamespace(chunk_mamba2=partial(ssd, scan=module.mamba_chunk_scan_combined))


def difference(op: Op, both: cuda.Sides, shape: Shape) -> Row:
    """The largest relative difference between the sides, of the output and of all gradients."""
    inputs = op.draw(shape, torch.bfloat16, cuda.DEVICE, grad=True)
    do = op.draw_do(shape, torch.bfloat16, cuda.DEVICE)
    results, notes = [], []
    for side, module in both.items():
        try:
            o, _ = op.chunk_of(module)(**inputs)
            gradients = torch.autograd.grad(o, list(inputs.values()), do)
            results.append({"o": o.detach(), **{f"d{name}": x for name, x in zip(inputs, gradients)}})
        except Exception as error:
            notes.append(cuda.failure(side, error))
    name = value = None
    if not notes:
        ours, other = results
        differences = {name: measure.relative_error(x, other[name]) for name, x in ours.items()}
        name = max(differences, key=lambda name: (differences[name] != differences[name], differences[name]))
        value = differences[name]
    quantity = "largest relative difference of the sides" + (f", in {name}" if name else "")
    return Row(op.name, op.label(shape), quantity, "", value, max_value=TOLERANCE, note="; ".join(notes))


def take(ours: Any, other: Any, shapes: Sequence[Shape] | None, notes: list[str]) -> Iterator[Row]:
    """For each op, whether the sides agree and what they cost at each shape, and the errors of both.

    Then the scan with all its inputs is compared and timed again, flacompose's under ``torch.compile``.
    """
    both = {"flacompose": functions(ours), SIDE: functions(other)}
    for op in OPS:
        for shape in shapes or op.training:
            yield difference(op, both, shape)
            yield from cuda.training(op, both, shape, notes)
        yield from cuda.accuracy(op, both, ACCURACY)
    compiled = torch.compile(both["flacompose"].chunk_mamba2, fullgraph=True, dynamic=False)
    both["flacompose"] = SimpleNamespace(chunk_mamba2=compiled)
    for shape in shapes or COMPILED.training:
        torch.compiler.reset()  # Dynamo compiles one function for a limited number of shapes
        yield difference(COMPILED, both, shape)
        yield from cuda.training(COMPILED, both, shape, notes)


def compile_candidates(shapes: Sequence[Shape] | None, timeout_s: float, workers: int) -> str:
    """Compile the candidates of mamba-ssm's kernels in worker processes. Returns a line that says how it went."""
    asked = ",".join(map(str, [*(shapes or MAMBA2_TRAINING), ACCURACY]))
    return warm.side_by_side([sys.executable, "-m", "benchmarks.mamba", asked], timeout_s, workers)


def main() -> None:
    parser = argparse.ArgumentParser(description="one worker of compile_candidates")
    for name in ("shapes", "index", "workers"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    module = functions(load())
    for tuner in tuned.autotuners(PACKAGE):
        warm.compile_only(tuner, int(arguments.index), int(arguments.workers))
    # At full length, since Triton compiles anew where a number of chunks is divisible by 16.
    shapes = [Shape.parse(text) for text in arguments.shapes.split(",")]
    for op in OPS:
        warm.steps(op, module, shapes, states=False)
        warm.steps(op, module, shapes[-1:], states=True)


if __name__ == "__main__":
    main()
