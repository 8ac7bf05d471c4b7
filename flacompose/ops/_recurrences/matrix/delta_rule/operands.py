"""The operands of one call of the delta rule on CUDA, and the launches of its plan."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import operand, operand_by_token
from flacompose.ops._launch.sequences import MatrixSequences
from flacompose.ops._recurrences.matrix.inputs import Inputs


class CallOperands(NamedTuple):
    """The inputs in the form that kernels take, and the layout of their tokens."""

    tokens: MatrixSequences  # its `H` is the number of heads of values
    q: Tensor
    k: Tensor
    a: Tensor | None
    beta: Tensor
    gk: Tensor | None  # the sum of both gates, if there are both
    v: Tensor
    v_token: int  # the number of elements from one token of `v` to the next
    initial: Tensor | None
    has_gates_of_heads: bool
    read_before: bool

    @property
    def read_by(self) -> tuple[Tensor, ...]:
        """The vectors that read the state or write it."""
        return tuple(x for x in (self.q, self.k, self.a) if x is not None)

    @property
    def reads_by_key(self) -> bool:
        """Whether keys read the state, after its decay, as in the gated delta rule."""
        return self.a is None and not self.read_before


def operands(inputs: Inputs, C: int) -> CallOperands:
    """The operands of a call whose chunks have `C` tokens."""
    g, gk = inputs.g, inputs.gk
    if inputs.read_before and gk is not None:
        raise ValueError(
            "read_before needs gates of heads, got gates of channels: their kernels read after the decay"
        )
    if gk is not None and g is not None:
        gk, g = gk.float() + g.unsqueeze(-1), None
    tokens = MatrixSequences(inputs.q, inputs.v, inputs.cu_seqlens, inputs.scale, C)
    q, k, a, beta, gk = map(operand, (inputs.q, inputs.k, inputs.a, inputs.beta, gk))
    assert q is not None and k is not None and beta is not None
    v, v_token = operand_by_token(inputs.v)
    # Without gates, reads before and after the decay are the same.
    read_before = inputs.read_before and g is not None
    return CallOperands(
        tokens, q, k, a, beta, gk, v, v_token, operand(inputs.initial_state), g is not None, read_before
    )


class Step(NamedTuple):
    """A launch of a plan."""

    file: str  # in this folder
    kernel: str
    config: dict[str, int]  # block sizes, flags, warps and stages
    programs: int = 1  # for each chunk, or segment, and head
    directions: int = 1  # the second axis of the grid: 2 to pass states forwards and backwards in time


def launch_steps(steps: tuple[Step, ...], groups: int, tokens: MatrixSequences, **arguments: Any) -> None:
    """Launch the kernels of `steps` with programs for each of the `groups`: chunks or segments, times heads.

    A kernel takes the `arguments` and the sizes of `tokens` that it has parameters for. A TypeError is raised if
    an argument is absent, or if no kernel takes it. Kernels are imported here, because kernels in Gluon need a
    newer Triton.
    """
    kernels = [getattr(import_module(f"{__package__}.{step.file}"), step.kernel) for step in steps]
    if unknown := arguments.keys() - {name for kernel in kernels for name in kernel.arg_names}:
        raise TypeError(f"{', '.join(step.kernel for step in steps)}: no kernel takes {sorted(unknown)}")
    given = {**tokens.arguments, "HV": tokens.H, "K": tokens.K, "V": tokens.V, "C": tokens.C, **arguments}
    for step, kernel in zip(steps, kernels):
        if absent := {*kernel.arg_names} - given.keys() - step.config.keys():
            raise TypeError(f"{step.kernel} takes {sorted(absent)} too, got {sorted(arguments)}")
        taken = {name: given[name] for name in kernel.arg_names if name in given}
        launch(kernel, (step.programs * groups, step.directions), **taken, **step.config)
