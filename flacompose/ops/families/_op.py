"""The registered ops of a family: a chunked form and a recurrent one, of the same function, with one backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from flacompose.ops._define import define_op, primal_of

if TYPE_CHECKING:
    from flacompose.ops.families._replay import Replay

CUDA = torch.version.cuda is not None and find_spec("triton") is not None


def define_forms(
    family: str,
    eager: ModuleType,
    *,
    arguments: str,
    gradients: str,
    axes: Mapping[str, str],
    autocast: Mapping[str, str | None],
    fake: Callable[..., tuple[Tensor, Tensor]],
    flops: Callable[..., int],
) -> tuple[OpOverload, OpOverload]:
    """Register ``<family>_chunk``, ``<family>_recurrent`` and ``<family>_backward``, return the first two.

    Args:
        family: the name of the family, and of its folder.
        eager: its `forward` and `backward` in PyTorch.
        arguments: of both forms, as a schema has them. Those of the backward are these, then ``Tensor? do``, ``Tensor?
            d_final_state`` and ``bool[] output_mask``.
        gradients: what the backward returns, as a schema has it.
        axes: as `define_op` takes it.
        autocast: as `define_op` takes it.
        fake: ``(o, final_state)`` of the forms, without values.
        flops: of a form; the backward has twice as many.
    """
    names = [argument.split()[-1] for argument in arguments.split(", ")]
    wanted_of = [names.index(primal_of(gradient.split()[-1], names)) for gradient in gradients.split(", ")]

    def backward_fake(*args: Any) -> tuple[Tensor, ...]:
        inputs = [args[i] if wanted else None for i, wanted in zip(wanted_of, args[-1], strict=True)]
        return tuple(args[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)

    load = {form: cache(partial(_on_cuda, family, form)) for form in ("chunk", "recurrent", "backward")}
    backward = define_op(
        f"{family}_backward",
        f"({arguments}, Tensor? do, Tensor? d_final_state, bool[] output_mask) -> ({gradients})",
        eager=eager.backward,
        triton=load["backward"],
        fake=_compiling(backward_fake, load["backward"]),
        axes=axes,
        flops=lambda *args, **kwargs: 2 * flops(*args, **kwargs),
    )
    chunk, recurrent = (
        define_op(
            f"{family}_{form}",
            f"({arguments}) -> (Tensor o, Tensor final_state)",
            eager=eager.forward,
            triton=load[form],
            fake=fake if form == "recurrent" else _compiling(fake, load[form]),  # recurrent is one kernel
            backward=backward,
            axes=axes,
            autocast=autocast,
            flops=flops,
        )
        for form in ("chunk", "recurrent")
    )
    return chunk, recurrent


def _on_cuda(family: str, name: str) -> Replay:
    """What CUDA runs of a family, imported when it is first needed: it needs Triton."""
    from flacompose.ops.families._replay import Replay

    return Replay(getattr(import_module(f"flacompose.ops.families.{family}.cuda"), name))


def _compiling(fake: Callable[..., Any], load: Callable[[], Replay]) -> Callable[..., Any]:
    """`fake`, which also starts to compile the kernels for a GPU, while a graph with the operator is traced."""

    def compiling_fake(*args: Any) -> Any:
        x = args[0]
        launches = CUDA and x.is_cuda and x.dtype is not torch.float64 and torch.cuda.is_available()
        if launches and not torch.compiler.is_exporting():
            # What fails here fails again, and says so, when it is called.
            with torch.cuda.device(x.device), suppress(Exception):
                load().implementation.begin(args)
        return fake(*args)

    return compiling_fake
