"""Scans beside other packages on a GPU: Mamba-2 and Mamba-3 of mamba-ssm, mLSTM of mlstm_kernels.

Only the Triton kernels of these packages are needed, which are plain Python. The package mamba-ssm would import
compiled extensions, which the scans do not use, so its modules are imported without the package. The gated delta rule
of FlashQLA is compared likewise, but its package, with kernels in TileLang, is imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cases, cuda, measure, tuned, warm
from .cases import MAMBA2_TRAINING, Draw, Op, Shape, Targets, parameter, rates, small_steps, with_states
from .report import Row

CHUNK = 256
"""The chunk size of mamba-ssm's layer of Mamba-2. flacompose ignores it."""
ACCURACY = Shape(1, 1024, 1, 128, 64, group=32)
TOLERANCE = 0.03
"""The allowed difference between results and gradients of the sides: several times their rounding errors."""


MAMBA2 = {
    "x": Draw("B T HV V"),
    "dt": Draw("B T HV", small_steps),
    "A": parameter("HV", rates),
    "B": Draw("B T H K"),
    "C": Draw("B T H K"),
}
MAMBA2_MORE = {"D": parameter("HV"), "z": Draw("B T HV V"), "dt_bias": parameter("HV")}
MAMBA3 = {
    "Q": Draw("B T H K"),
    "K": Draw("B T H K"),
    "V": Draw("B T HV V"),
    "ADT": parameter("B T HV", lambda x: -F.softplus(small_steps(x))),
    "DT": parameter("B T HV", lambda x: F.softplus(small_steps(x))),
    "Trap": Draw("B T HV"),
    "Q_bias": parameter("HV K"),
    "K_bias": parameter("HV K"),
    "Angles": parameter("B T HV A"),
}
MAMBA3_MORE = {"D": parameter("HV"), "Z": Draw("B T HV V")}


def ssd(scan: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The `scan` of Mamba-2, with the keywords of other functions for states."""
    return partial(with_states, scan, "return_final_states", dt_softplus=True)


def stateless(
    scan: Callable[..., Any],
    transposed: str = "",
    initial_state: tuple[()] = (),
    output_final_state: bool = False,
    **inputs: Any,
) -> tuple[Tensor, tuple[()]]:
    """Another `scan` without states. The inputs in `transposed` have heads before tokens."""
    o = scan(**inputs | {name: inputs[name].transpose(1, 2).contiguous() for name in transposed.split()})
    return (o if isinstance(o, Tensor) else o[0]), ()


def xlstm(scan: Callable[..., Any], **inputs: Any) -> Tensor:
    """The `scan` of mlstm_kernels. Its output has heads before tokens, and its products the dtype of the inputs."""
    return scan(**inputs, autocast_kernel_dtype=inputs["q"].dtype).transpose(1, 2)


class Part(NamedTuple):
    """The comparison with one package: the function of flacompose, and a function in a module of the package."""

    side: str
    package: str
    module: str
    ops: tuple[Op, ...]
    ours: Callable[[Any], Callable[..., Any]]
    other: Callable[[Any], Callable[..., Any]]
    accuracy: Shape | None = None
    slow_to_compile: bool = False
    """Whether the package compiles for minutes at each shape, so that only timed calls are made."""

    def sides(self, ours: Any, other: Any) -> dict[str, cases.Functions]:
        """The functions of both sides."""
        scans = {"flacompose": self.ours(ours), self.side: self.other(other)}
        return {side: SimpleNamespace(scan=scan) for side, scan in scans.items()}

    @property
    def note(self) -> str:
        if not self.module:
            return f"{self.side} was imported whole, and had compiled its kernels before"
        return f"{self.side}'s Triton kernels are imported without its package, which may ask for compiled extensions"

    @property
    def compiled(self) -> Op:
        """The op under ``torch.compile``, which fuses operations around a scan. The packages have kernels for them."""
        return dataclasses.replace(self.ops[-1], name=f"{self.ops[-1].name} under torch.compile")


_OP = Op(
    "mamba2",
    chunk="scan",
    recurrent="scan",
    inputs=MAMBA2,
    output="x",
    states={"state": Draw("B HV V K")},
    options={"chunk_size": CHUNK},
    training=MAMBA2_TRAINING,
    targets=Targets(memory=None),
)
_OF_3 = dataclasses.replace(
    _OP, name="mamba3", inputs=MAMBA3, output="V", states={}, options={"chunk_size": 64}
)
_XLSTM = dataclasses.replace(cases.OPS["mlstm"], chunk="scan", states={}, targets=Targets(memory=None))
# Gates from hardly any decay in the first head to a strong decay in the last.
_WEAK = parameter(
    "B T HV", lambda x: F.logsigmoid(x + 2) * torch.logspace(-4, 0, x.shape[-1], device=x.device)
)
_GDN = [
    dataclasses.replace(
        cases.OPS["gated_delta_rule"],
        name=name,
        chunk="scan",
        inputs=cases.DELTA | {"beta": parameter("B T HV", torch.sigmoid), "g": g},
        states={},
        training=(cases.TRAINING[0], *cases.FLASH_QLA),
        targets=Targets(step=None, memory=None),
    )
    for name, g in (
        ("gated_delta_rule", parameter("B T HV", F.logsigmoid)),
        ("gated_delta_rule with weak gates", _WEAK),
    )
]
PARTS = {
    "flashqla": Part(
        "FlashQLA",
        "flash_qla",
        "",
        tuple(_GDN),
        ours=lambda ops: partial(stateless, ops.chunk_gated_delta_rule),
        other=lambda module: partial(stateless, module.chunk_gated_delta_rule),
        slow_to_compile=True,
    ),
    "mamba2": Part(
        "mamba-ssm",
        "mamba_ssm",
        "ops.triton.ssd_combined",
        (_OP, dataclasses.replace(_OP, name="mamba2 with D, z and dt_bias", inputs=MAMBA2 | MAMBA2_MORE)),
        ours=lambda ops: ssd(ops.mamba_chunk_scan_combined),
        other=lambda module: ssd(module.mamba_chunk_scan_combined),
    ),
    "mamba3": Part(
        "mamba-ssm",
        "mamba_ssm",
        "ops.triton.mamba3.mamba3_siso_combined",
        (_OF_3, dataclasses.replace(_OF_3, name="mamba3 with D and Z", inputs=MAMBA3 | MAMBA3_MORE)),
        ours=lambda ops: partial(stateless, ops.mamba3_siso_combined),
        other=lambda module: partial(stateless, module.mamba3_siso_combined, "ADT DT Trap"),
    ),
    "mlstm": Part(
        "mlstm_kernels",
        "mlstm_kernels",
        "torch.chunkwise.triton_xl_chunk",
        (_XLSTM,),
        ours=lambda ops: partial(stateless, ops.chunk_mlstm),
        other=lambda module: partial(
            stateless, partial(xlstm, module.mlstm_chunkwise__xl_chunk), "q k v i f"
        ),
        accuracy=Shape(1, 1024, 16, 128, 128),
    ),
}


def load(part: str) -> Any:
    """The module with the scan. If files are missing, the program ends and names them."""
    side, package, module, *_ = PARTS[part]
    if package not in sys.modules:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.submodule_search_locations is None:
            files = f"the Python files of {side}, and einops," if module else f"the package {package}"
            raise SystemExit(f"--parts {part} needs {files} on the path")
        if module:
            # In place of the package, a module with nothing but the path of its files.
            stand_in = types.ModuleType(package)
            stand_in.__path__ = list(spec.submodule_search_locations)
            sys.modules[package] = stand_in
    return importlib.import_module(f"{package}.{module}" if module else package)


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def difference(op: Op, both: cuda.Sides, shape: Shape) -> Row:
    """The largest relative difference between the sides, over the output and all gradients."""
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


def take(
    part: Part, ours: Any, other: Any, shapes: Sequence[Shape] | None, notes: list[str]
) -> Iterator[Row]:
    """For each op, the agreement and the costs of the sides at each shape, and the errors of both.

    Then the scan with all inputs is compared and timed again, with flacompose under ``torch.compile``.
    """
    both = part.sides(ours, other)
    for op in part.ops:
        for shape in shapes or op.training:
            yield difference(op, both, shape)
            yield from cuda.training(op, both, shape, notes, with_host=part.slow_to_compile)
        if not part.slow_to_compile:
            yield from cuda.accuracy(op, both, part.accuracy or ACCURACY)
    if part.slow_to_compile:
        return
    compiled = torch.compile(both["flacompose"].scan, fullgraph=True, dynamic=False)
    both["flacompose"] = SimpleNamespace(scan=compiled)
    for shape in shapes or part.compiled.training:
        torch.compiler.reset()  # Dynamo compiles one function for a limited number of shapes
        yield difference(part.compiled, both, shape)
        yield from cuda.training(part.compiled, both, shape, notes)


def compile_candidates(part: str, shapes: Sequence[Shape] | None, timeout_s: float, workers: int) -> str:
    """Compile the candidates of the package's kernels in worker processes; return a line about the outcome."""
    last = [] if PARTS[part].slow_to_compile else [PARTS[part].accuracy or ACCURACY]
    asked = ",".join(map(str, [*(shapes or PARTS[part].compiled.training), *last]))
    return warm.side_by_side([sys.executable, "-m", "benchmarks.mamba", part, asked], timeout_s, workers)


def main() -> None:
    parser = argparse.ArgumentParser(description="one worker of compile_candidates")
    for name in ("part", "shapes", "index", "workers"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    part = PARTS[arguments.part]
    module = part.other(load(arguments.part))
    index, workers = int(arguments.index), int(arguments.workers)
    for tuner in tuned.autotuners(part.package):
        warm.compile_only(tuner, index, workers)
    # At full length, since Triton compiles again for a number of chunks that is divisible by 16.
    shapes = [Shape.parse(text) for text in arguments.shapes.split(",")]
    if part.slow_to_compile:
        # Without candidates, each worker calls the kernels at some of the shapes.
        shapes = shapes[index::workers]
    for op in part.ops:
        warm.steps(op, SimpleNamespace(scan=module), shapes, states=False)
        if op.states:
            warm.steps(op, SimpleNamespace(scan=module), shapes[-1:], states=True)


if __name__ == "__main__":
    main()
