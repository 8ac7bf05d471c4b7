"""The linear recurrence with a matrix state on CUDA: one kernel for a few tokens, or the scheme of the arguments."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from flacompose.ops._launch import operands
from flacompose.ops._launch.launch import launches_into_graph
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.matrix.inputs import NORM_EPS, Inputs, scheme


def _scheme(inputs: Inputs) -> Any:
    """The launches of a scheme, imported when they are needed: Triton reads every kernel of a file."""
    return import_module(f"{__package__}.{scheme(inputs)}.cuda")


def chunk(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    o, final_state = _scheme(inputs).chunk(inputs)
    return o, final_state


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    gradients: Gradients = _scheme(call.inputs).backward(call)
    return gradients


def ends(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(end [N, HV, K, V], sum_g [N, HV], sum_gk [N, HV, K], sum_gv [N, HV, V])``."""
    end, *sums = _scheme(inputs).ends(inputs)
    N, HV, K, V = end.shape
    if scheme(inputs) == "head_decay":
        return end, *sums, end.new_zeros(N, HV, K), end.new_zeros(N, HV, V)
    return end, end.new_zeros(N, HV), *sums


def matrix_ends(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(end [N, HV, K, V], matrix [N, HV, K, K])``."""
    end, matrix = _scheme(inputs).ends(inputs)
    return end, matrix


def recurrent(inputs: Inputs, count: int | None = None, stride: int | None = None) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``, or ``[N, count, HV, K, V]`` with `count` and `stride`."""
    scheme(inputs)  # refuses arguments that no scheme takes together, as the other forms do
    return operands.recurrent(**inputs._asdict(), count=count, stride=stride)


steps = recurrent


def update(inputs: Inputs, normalize: int) -> tuple[Tensor, Tensor]:
    """`recurrent`, which in a graph overwrites the old state. It may divide by norms first."""
    scheme(inputs)
    eps = NORM_EPS if normalize else None
    return operands.recurrent(**inputs._asdict(), norm_eps=eps, in_place=launches_into_graph())
