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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import cuda, measure, tuned, warm
from .cases import MAMBA2_TRAINING, Draw, Op, Shape, Targets
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


PARAMETER = torch.float32
"""The dtype of parameters, as the layer keeps them, whatever the dtype of the inputs."""
INPUTS = {
    "x": Draw("B T HV V"),
    "dt": Draw("B T HV", small_steps),
    "A": Draw("HV", decays, PARAMETER),
    "B": Draw("B T H K"),
    "C": Draw("B T H K"),
}
OPTIONAL = {"D": Draw("HV", dtype=PARAMETER), "z": Draw("B T HV V"), "dt_bias": Draw("HV", dtype=PARAMETER)}


def _op(name: str, inputs: Mapping[str, Draw]) -> Op:
    return Op(
        name,
        chunk="chunk_mamba2",
        recurrent="chunk_mamba2",
        inputs=inputs,
        output="x",
        states={"state": Draw("B HV V K")},
        options={"chunk_size": CHUNK},
        training=MAMBA2_TRAINING,
        targets=Targets(memory=None),
    )


OPS = (_op("mamba2", INPUTS), _op("mamba2 with D, z and dt_bias", INPUTS | OPTIONAL))
COMPILED = dataclasses.replace(OPS[-1], name=f"{OPS[-1].name} under torch.compile")
"""What surrounds the scan is in kernels of mamba-ssm. flacompose leaves its fusion to the compiler."""


def ssd(
    scan: Callable[..., Any],
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **inputs: Any,
) -> tuple[Tensor, Tensor | None]:
    """A side's `scan`, its keywords for states as the other functions have them."""
    results = scan(
        **inputs, dt_softplus=True, initial_states=initial_state, return_final_states=output_final_state
    )
    return results if output_final_state else (results, None)


def functions(module: Any) -> SimpleNamespace:
    """The scan of one side by the name that the ops have for it."""
    return SimpleNamespace(chunk_mamba2=partial(ssd, module.mamba_chunk_scan_combined))


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
