"""What a recurrence launches, as a function that PyTorch differentiates, without its registered operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from contract.problems import Problem, call
from torch import Tensor

from helpers.operators import flat, part


class Launched(torch.autograd.Function):
    """The forward of one form and the shared backward of a recurrence, without registration.

    The first `differentiable` arguments may have gradients.
    """

    @staticmethod
    def forward(ctx, cuda, form, differentiable, *args):
        ctx.set_materialize_grads(False)
        # Tensors, or None, come before numbers.
        ctx.cuda, ctx.differentiable = cuda, differentiable
        ctx.tensors = sum(x is None or isinstance(x, Tensor) for x in args)
        ctx.save_for_backward(*args[: ctx.tensors])
        ctx.constants = args[ctx.tensors :]
        return flat(cuda, form)(*args)

    @staticmethod
    def backward(ctx, *arriving):
        args = *ctx.saved_tensors, *ctx.constants
        wanted = list(ctx.needs_input_grad[3 : 3 + ctx.differentiable])
        grads = flat(ctx.cuda, "backward")(*args, *arriving, wanted)
        grads = [dx if x else None for x, dx in zip(wanted, grads, strict=True)]
        return None, None, None, *grads, *[None] * (len(args) - ctx.differentiable)


def launch_of(cuda: ModuleType, form: str, differentiable: int) -> Callable[..., Any]:
    """A form of an `op` that is not registered."""
    return partial(Launched.apply, cuda, form, differentiable)


def launch_one_token(patch: pytest.MonkeyPatch) -> None:
    """The launches of slot attention and mLSTM in the place of their ops, which are those of one token."""
    for recurrence in ("slot_attention", "mlstm"):
        op = part(recurrence, "op")
        differentiable = op.Inputs._fields.index("scale")
        patch.setattr(op, "token", launch_of(part(recurrence, "cuda"), "token", differentiable))


def launched(problem: Problem, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    """The op on the problem's inputs, its launches in the place of what is registered."""
    case = problem.case
    with pytest.MonkeyPatch.context() as patch:
        op = part(case.recurrence, "op")
        for form in {"chunk", "recurrent", "forward"} & {*vars(op)}:
            differentiable = len(op.SIGNATURE.differentiable)
            patch.setattr(op, form, launch_of(part(case.recurrence, "cuda"), form, differentiable))
        launch_one_token(patch)
        return call(problem, **tensors)
