"""What is measured: one entry of ``OPS`` per recurrence, and the shapes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .recurrences import CASES

Functions = ModuleType | SimpleNamespace
"""The functions of a library, by name."""

ROOT = Path(__file__).parents[1]
"""Where ``python -m benchmarks...`` finds this package."""


class Shape(NamedTuple):
    """Batch, tokens, heads, key and value width; written ``8x2048x16x128x128``.

    With a sixth number that many heads of values share one of queries and keys: ``8x2048x4x128x64x4``.
    """

    B: int
    T: int
    H: int
    K: int
    V: int
    group: int = 1

    @classmethod
    def parse(cls, text: str) -> Shape:
        if not re.fullmatch(r"\d+(x\d+){4,5}", text):
            raise ValueError(
                f"a shape is BxTxHxKxV or BxTxHxKxVxgroup, such as 8x2048x16x128x128, got {text!r}"
            )
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return "x".join(map(str, self if self.group > 1 else self[:5]))

    @property
    def HV(self) -> int:
        return self.H * self.group

    @property
    def HQ(self) -> int:
        """Heads of queries where they may share one of keys; here each has its own."""
        return self.H

    @property
    def N(self) -> int:
        """Sequences."""
        return self.B

    @property
    def D(self) -> int:
        """Channels of a recurrence that has no heads."""
        return self.H * self.K

    @property
    def M(self) -> int:
        """Slots of a recurrence that has them, at every shape."""
        return 64

    @property
    def label(self) -> str:
        heads = f"H{self.H} HV{self.HV}" if self.group > 1 else f"H{self.H}"
        widths = f"K=V={self.K}" if self.K == self.V else f"K={self.K} V={self.V}"
        return f"B{self.B} T{self.T} {heads} {widths}"


TRAINING = (Shape(8, 2048, 16, 128, 128), Shape(1, 32768, 16, 128, 128))
MORE = (
    Shape(8, 2048, 16, 64, 64),
    Shape(8, 2048, 8, 256, 256),
    Shape(8, 2048, 16, 64, 128),
    Shape(8, 2048, 16, 128, 64),
)
GROUPED = Shape(8, 2048, 4, 128, 64, group=4)
SHARED_KEYS = (Shape(4, 8192, 16, 128, 128, group=2), Shape(1, 32768, 16, 128, 128, group=2))
"""Heads as models with the gated delta rule have them, at which other projects publish their times."""
HEADS_OF_256 = Shape(8, 2048, 8, 256, 256)
LARGER_HEADS = (
    Shape(8, 2048, 6, 320, 320),
    Shape(8, 2048, 4, 512, 512),
    Shape(8, 2048, 4, 256, 512),
)
"""Heads of more than 256 keys or values, about as many channels of values in all as the heads of 256 have."""
HOST_BOUND = Shape(1, 64, 16, 128, 128)
DECODE_GPU = Shape(64, 1, 16, 128, 128)
DECODE_HOST = Shape(1, 1, 16, 128, 128)
ACCURACY = Shape(1, 1024, 16, 128, 128)
CPU = Shape(1, 2048, 4, 64, 64)
MAMBA2 = Shape(1, 2048, 1, 128, 64, group=24)
"""One group of B and C, 24 heads of x; the state is 128 wide."""
MAMBA2_TRAINING = (Shape(8, 2048, 1, 128, 64, group=32), Shape(1, 32768, 1, 128, 64, group=32))
"""The same with 32 heads, as in a model of width 1024."""


def plain(x: Tensor) -> Tensor:
    return x


class Draw(NamedTuple):
    """A random input: its axes by name, and what is done to standard normal numbers."""

    axes: str
    transform: Callable[[Tensor], Tensor] = plain
    dtype: torch.dtype | None = None
    """The dtype that it always has. Default: that of the call."""

    def __call__(self, shape: Shape, dtype: torch.dtype, device: str) -> Tensor:
        sizes = [getattr(shape, axis) for axis in self.axes.split()]
        return self.transform(torch.randn(sizes, dtype=self.dtype or dtype, device=device))


@dataclass(frozen=True)
class Targets:
    """Upper limits: ratios to the other implementation, or absolute figures on one H100."""

    forward: float | None = None
    step: float | None = 0.5
    memory: float | None = 0.6
    cold_s: float | None = 10.0
    decode_gpu_us: float | None = None
    decode_host_us: float | None = 60.0
    cpu: float | None = 0.2


@dataclass(frozen=True)
class Op:
    """One recurrence. Function and argument names are the ones that flacompose and the peer share."""

    name: str
    chunk: str
    recurrent: str
    inputs: Mapping[str, Draw]
    reference: Callable[..., tuple[Tensor, Tensor]]
    output: str = "v"
    """The input that has the output's shape."""
    states: Mapping[str, Draw] = field(default_factory=lambda: {"state": Draw("B HV K V")})
    label: Callable[[Shape], str] = lambda shape: shape.label
    state_gradients: bool = True
    """Whether the peer has them."""
    recurrent_names: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    grouped: bool = False
    has_heads: bool = True
    peer_keys: int | None = None
    """The most keys of a head that the peer takes, where it refuses more."""
    training: Sequence[Shape] = TRAINING
    targets: Targets = Targets()

    def chunk_of(self, module: Functions) -> Callable[..., tuple]:
        """One side's chunk function, the op's options bound."""
        return functools.partial(getattr(module, self.chunk), **self.options)

    def recurrent_of(self, module: Functions) -> Callable[..., tuple]:
        """Its recurrent function, likewise."""
        return functools.partial(getattr(module, self.recurrent), **self.options)

    def draw(self, shape: Shape, dtype: torch.dtype, device: str, *, grad: bool = False) -> dict[str, Tensor]:
        """Fresh inputs by the chunk function's argument names; q, k, v and gates all in ``dtype``."""
        return {name: d(shape, dtype, device).requires_grad_(grad) for name, d in self.inputs.items()}

    def draw_do(self, shape: Shape, dtype: torch.dtype, device: str) -> Tensor:
        """The gradient that arrives on the output."""
        return self.inputs[self.output](shape, dtype, device)

    def draw_states(self, shape: Shape, device: str) -> dict[str, Tensor]:
        """Fresh states by name."""
        return {name: d(shape, torch.float32, device) for name, d in self.states.items()}

    def packed(self, states: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        """States as functions take and return them."""
        return states[0] if len(self.states) == 1 else tuple(states)

    def unpacked(self, state: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (state,) if isinstance(state, Tensor) else tuple(state)

    def for_recurrent(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self.recurrent_names.get(name, name): x for name, x in inputs.items()}


def more_shapes(op: Op, taken: Sequence[Shape]) -> list[Shape]:
    """The further shapes that are not among those `taken`, each once: without heads, some of them are the same."""
    labels = {op.label(shape) for shape in taken}
    shapes = []
    for shape in (*MORE, *([GROUPED] if op.grouped else [])):
        if op.label(shape) not in labels:
            labels.add(op.label(shape))
            shapes.append(shape)
    return shapes


def _op(name: str, entry: str, targets: Targets, **fields) -> Op:
    """The op of this entry of the table of recurrences: its inputs and states with their axes, and its reference."""
    case = next(case for case in CASES if case.name == entry)

    def reference(**inputs: Tensor) -> tuple[Tensor, Tensor]:
        arguments: dict[str, Any] = dict(inputs)
        if case.scaled:
            arguments["scale"] = inputs[case.first].shape[-1] ** -0.5
        return case.joint_reference(**arguments)

    def label(shape: Shape) -> str:
        if "D" in case.inputs[case.first]:
            return f"B{shape.B} T{shape.T} D={shape.D}"
        slots = any("M" in axes for axes in case.inputs.values())
        return f"{shape.label} M={shape.M}" if slots else shape.label

    names = {1: ("state",), 2: ("Hk", "Hv")}[len(case.states)]
    return Op(
        name=name,
        chunk=f"chunk_{name}",
        recurrent=f"fused_recurrent_{name}",
        inputs={x: Draw(" ".join(axes), case.draws.get(x, plain)) for x, axes in case.inputs.items()}
        | {x: Draw(" ".join(axes), F.logsigmoid) for x, axes in case.gates.items()},
        reference=reference,
        output=case.output,
        states={x: Draw(" ".join(axes)) for x, axes in zip(names, case.states.values(), strict=True)},
        label=label,
        grouped=any("HV" in axes for axes in case.inputs.values()),
        has_heads="D" not in case.inputs[case.first],
        targets=targets,
        **fields,
    )


TARGETS = Targets(forward=0.6, decode_gpu_us=70.0)

OPS = {
    op.name: op
    for op in (
        _op("gla", "chunk_gla", TARGETS, recurrent_names={"g": "gk"}),
        _op("simple_gla", "chunk_simple_gla-g", TARGETS),
        _op("retention", "chunk_retention", TARGETS),
        # The peer's chunk form would normalise, unless it is told not to.
        _op("linear_attn", "chunk_linear_attn", TARGETS, options={"normalize": False}),
        _op("gsa", "chunk_gsa", TARGETS),
        _op("rwkv6", "chunk_rwkv6", TARGETS),
        _op("hgrn", "chunk_hgrn", Targets(forward=0.6), state_gradients=False),
        _op("delta_rule", "chunk_delta_rule", TARGETS, peer_keys=256),
        _op(
            "gated_delta_rule",
            "chunk_gated_delta_rule",
            TARGETS,
            training=(*TRAINING, *SHARED_KEYS),
            peer_keys=256,
        ),
        _op("kda", "chunk_kda", TARGETS, peer_keys=256),
    )
}
