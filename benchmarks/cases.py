"""The measured recurrences, one entry of ``OPS`` each, and the shapes."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Functions = ModuleType | SimpleNamespace
"""The functions of a library, by name."""


class Shape(NamedTuple):
    """Batch, tokens, heads, key and value width; written ``8x2048x16x128x128``.

    A sixth number is the number of value heads per head of queries and keys: ``8x2048x4x128x64x4``.
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
    def D(self) -> int:
        """Channels of a recurrence that has no heads."""
        return self.H * self.K

    @property
    def M(self) -> int:
        """Slots of slot attention, at every shape."""
        return 64

    @property
    def S(self) -> int:
        """Numbers in the state of a channel of Mamba's selective scan, at every shape."""
        return 16

    @property
    def A(self) -> int:
        """Angles of a key of Mamba-3, half of which is rotated in pairs."""
        return self.K // 4

    @property
    def label(self) -> str:
        heads = f"H{self.H} HV{self.HV}" if self.group > 1 else f"H{self.H}"
        widths = f"K=V={self.K}" if self.K == self.V else f"K={self.K} V={self.V}"
        return f"B{self.B} T{self.T} {heads} {widths}"


TRAINING = (Shape(8, 2048, 16, 128, 128), Shape(1, 32768, 16, 128, 128))
SHARED_KEYS = (Shape(4, 8192, 16, 128, 128, group=2), Shape(1, 32768, 16, 128, 128, group=2))
"""Heads of models with the gated delta rule, for which other projects publish times."""
FLASH_QLA = (SHARED_KEYS[1], *(Shape(B, 8192, 16, 128, 128, group=n) for B in (1, 4) for n in (2, 4)))
"""Shapes beside FlashQLA, which takes only heads of 128, after one of the shapes of all ops."""
PUBLISHED_KDA = (Shape(1, 8192, 64, 128, 128), Shape(1, 4096, 16, 128, 128))
"""Shapes for which FlashKDA and attention-gym publish times of KDA."""
HOST_BOUND = Shape(1, 64, 16, 128, 128)
DECODE_GPU = Shape(64, 1, 16, 128, 128)
DECODE_HOST = Shape(1, 1, 16, 128, 128)
ACCURACY = Shape(1, 1024, 16, 128, 128)
MAMBA2_TRAINING = (Shape(8, 2048, 1, 128, 64, group=32), Shape(1, 32768, 1, 128, 64, group=32))
"""One group of B and C and 32 heads of x, as in a model of width 1024; the state is 128 wide."""


def plain(x: Tensor) -> Tensor:
    return x


class Draw(NamedTuple):
    """A random input: its axes by name, and a function of standard normal numbers."""

    axes: str
    transform: Callable[[Tensor], Tensor] = plain
    dtype: torch.dtype | None = None
    """A fixed dtype. Default: the dtype of the call."""

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


@dataclass(frozen=True)
class Op:
    """One recurrence. flacompose and flash-linear-attention share the names of functions and arguments."""

    name: str
    chunk: str
    recurrent: str
    inputs: Mapping[str, Draw]
    output: str = "v"
    """The input with the shape of the output."""
    states: Mapping[str, Draw] = field(default_factory=lambda: {"state": Draw("B HV K V")})
    state_gradients: bool = True
    """Whether the peer has them."""
    recurrent_names: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    adapt: Callable[..., Callable[..., tuple]] | None = None
    """An adapter of both functions, if their keywords or results differ from other functions."""
    peer_chunk: str | None = None
    """The name of the chunk function in flash-linear-attention, if it differs."""
    training: Sequence[Shape] = TRAINING
    targets: Targets = Targets()

    @property
    def axes(self) -> set[str]:
        """All axes of its inputs."""
        return {axis for x in self.inputs.values() for axis in x.axes.split()}

    @property
    def has_heads(self) -> bool:
        return "D" not in self.axes

    def label(self, shape: Shape) -> str:
        if not self.has_heads:
            return f"B{shape.B} T{shape.T} D={shape.D}"
        return f"{shape.label} M={shape.M}" if "M" in self.axes else shape.label

    def _of(self, module: Functions, name: str) -> Callable[..., tuple]:
        fn = getattr(module, name)
        return functools.partial(self.adapt(fn) if self.adapt else fn, **self.options)

    def chunk_of(self, module: Functions) -> Callable[..., tuple]:
        """The chunk function of a side, with the options of the op."""
        of_peer = self.peer_chunk or self.chunk
        return self._of(module, of_peer if hasattr(module, of_peer) else self.chunk)

    def recurrent_of(self, module: Functions) -> Callable[..., tuple]:
        """The recurrent function of a side, with the options of the op."""
        return self._of(module, self.recurrent)

    def draw(self, shape: Shape, dtype: torch.dtype, device: str, *, grad: bool = False) -> dict[str, Tensor]:
        """Fresh inputs by the chunk function's argument names; q, k, v and gates all in ``dtype``."""
        return {name: d(shape, dtype, device).requires_grad_(grad) for name, d in self.inputs.items()}

    def draw_do(self, shape: Shape, dtype: torch.dtype, device: str) -> Tensor:
        """The gradient of the output."""
        return self.inputs[self.output](shape, dtype, device)

    def draw_states(self, shape: Shape, device: str) -> dict[str, Tensor]:
        """Fresh states by name."""
        return {name: d(shape, torch.float32, device) for name, d in self.states.items()}

    def packed(self, states: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        """States in the form of arguments and results."""
        return states[0] if len(self.states) == 1 else tuple(states)

    def unpacked(self, state: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (state,) if isinstance(state, Tensor) else tuple(state)

    def for_recurrent(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self.recurrent_names.get(name, name): x for name, x in inputs.items()}


def with_states(
    scan: Callable[..., Any],
    returned: str,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **inputs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Call a `scan` of Mamba, whose keyword `returned` requests the states, like other functions."""
    results = scan(**inputs, **{"initial_states": initial_state, returned: output_final_state})
    return results if output_final_state else (results, None)


def _op(name: str, inputs: Mapping[str, Draw], **fields) -> Op:
    return Op(
        name,
        chunk=f"chunk_{name}",
        recurrent=f"fused_recurrent_{name}",
        inputs=inputs,
        **{"targets": Targets(forward=0.6, decode_gpu_us=70.0), **fields},
    )


def gate(axes: str) -> Draw:
    """Natural-log decays."""
    return Draw(axes, F.logsigmoid)


def small_steps(x: Tensor) -> Tensor:
    """Time steps before softplus, as in a trained Mamba: at a rate of 1 a token lasts some fifty steps."""
    return x - 4


def rates(x: Tensor) -> Tensor:
    """Rates of decay, which time steps multiply to natural logarithms of decays."""
    return -x.exp()


def parameter(axes: str, transform: Callable[[Tensor], Tensor] = plain) -> Draw:
    """A parameter or a function of it, which layers keep in float32 for inputs of every dtype."""
    return Draw(axes, transform, torch.float32)


ROWS, GROUPED_ROWS = Draw("B T H K"), Draw("B T HV V")
QKV, QKV_GROUPED = ({"q": ROWS, "k": ROWS, "v": v} for v in (Draw("B T H V"), GROUPED_ROWS))
# Keys have norm 1, and replace up to twice the stored value.
DELTA = {
    "q": ROWS,
    "k": Draw("B T H K", functools.partial(F.normalize, dim=-1)),
    "v": GROUPED_ROWS,
    "beta": Draw("B T HV", lambda x: 2 * x.sigmoid()),
}
# Gates from -0.6 to 0, and tokens that erase a part of the value that `a` reads.
RWKV7 = {
    "r": ROWS,
    "w": Draw("B T H K", lambda x: -math.exp(-0.5) * x.sigmoid()),
    "k": Draw("B T H K", lambda x: x / 8),
    "v": Draw("B T H V"),
    "a": Draw("B T H K", functools.partial(F.normalize, dim=-1)),
    "b": Draw("B T H K", lambda x: F.normalize(x, dim=-1) / 2),
}
# `p` reads the replaced value, and is about as long as a key times a number from 0 to 1.
COMBA = DELTA | {"p": RWKV7["b"], "g": gate("B T HV"), "beta": Draw("B T HV", torch.sigmoid)}
GDN2 = {
    **{name: DELTA[name] for name in ("q", "k")},
    "v": Draw("B T H V"),
    "g": gate("B T H K"),
    "b": Draw("B T H K", torch.sigmoid),
    "w": Draw("B T H V", torch.sigmoid),
}
CHANNELS = Draw("B T D")
SELECTIVE_SCAN = {
    "u": CHANNELS,
    "delta": Draw("B T D", small_steps),
    "A": parameter("D S", rates),
    "B": Draw("B T S"),
    "C": Draw("B T S"),
    "D": parameter("D"),
    "z": CHANNELS,
    "delta_bias": parameter("D"),
}
SLOTS = {"s": Draw("B T H M"), "g": gate("B T H M")}
OPS = {
    op.name: op
    for op in (
        _op("gla", {**QKV, "g": gate("B T H K")}, recurrent_names={"g": "gk"}),
        _op("simple_gla", {**QKV_GROUPED, "g": gate("B T HV")}),
        _op("retention", QKV_GROUPED),
        # The chunk form of flash-linear-attention normalises by default.
        _op("linear_attn", QKV_GROUPED, options={"normalize": False}),
        _op("gsa", {**QKV, **SLOTS}, states={"Hk": Draw("B H K M"), "Hv": Draw("B H M V")}),
        _op("rwkv6", {"r": ROWS, "k": ROWS, "v": QKV["v"], "u": Draw("H K"), "w": gate("B T H K")}),
        _op(
            "hgrn",
            {"x": Draw("B T D"), "g": gate("B T D")},
            output="x",
            states={"state": Draw("B D")},
            state_gradients=False,
            targets=Targets(forward=0.6),
        ),
        _op("delta_rule", DELTA),
        _op("gated_delta_rule", {**DELTA, "g": gate("B T HV")}, training=(*TRAINING, *SHARED_KEYS)),
        _op("kda", {**DELTA, "g": gate("B T HV K")}, training=(*TRAINING, *PUBLISHED_KDA)),
        Op(
            "kda_strong_gates",
            "chunk_kda",
            "fused_recurrent_kda",
            {**DELTA, "g": Draw("B T HV K", lambda x: -5 * x.sigmoid())},
            peer_chunk="chunk_kda_with_safe_gates",
            training=(TRAINING[0], *PUBLISHED_KDA),
            targets=Targets(forward=0.6, decode_gpu_us=70.0),
        ),
        _op(
            "mlstm",
            # Layers compute gates in float32, and mlstm_kernels does not compile with other dtypes.
            {
                **QKV,
                "i": Draw("B T H", dtype=torch.float32),
                "f": Draw("B T H", lambda x: x + 3, torch.float32),
            },
            states={"C": Draw("B H K V"), "n": Draw("B H K"), "m": Draw("B H")},
            state_gradients=False,
            training=(*TRAINING, Shape(8, 2048, 8, 256, 512)),
        ),
        _op("rwkv7", RWKV7, training=(*TRAINING, Shape(8, 2048, 32, 64, 64))),
        _op("comba", COMBA),
        _op("gdn2", GDN2),
        _op(
            "rwkv4",
            {"w": parameter("D", rates), "u": parameter("D"), "k": CHANNELS, "v": CHANNELS},
            states={"a": Draw("B D"), "b": Draw("B D", lambda x: x.abs() + 1), "m": Draw("B D")},
            state_gradients=False,
            targets=Targets(forward=0.6),
        ),
        _op(
            "rg_lru",
            {"x": CHANNELS, "r": CHANNELS, "i": CHANNELS, "a_param": parameter("D", small_steps)},
            output="x",
            states={"state": Draw("B D")},
            state_gradients=False,
            targets=Targets(forward=0.6),
        ),
        # flacompose has one function for prompts and for single tokens.
        Op(
            "selective_scan",
            chunk="selective_scan_fn",
            recurrent="selective_scan_fn",
            inputs=SELECTIVE_SCAN,
            output="u",
            states={"state": Draw("B D S")},
            options={"delta_softplus": True},
            adapt=lambda scan: functools.partial(with_states, scan, "return_last_state"),
        ),
    )
}
