"""First values of parameters, for modules that PyTorch would fill with others, and for parameters that are DTensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def with_first_values(module: Module, **inits: Callable[[Tensor], Any]) -> Module:
    """`module`, whose parameters get the first values that `inits` set, now and whenever they are reset.

    PyTorch lets every module reset its own parameters, parents first or children first. A parent that reset its
    children's would be overwritten in the first case. A subclass of ``nn.Linear`` would not, but
    `torch.ao.quantization.quantize_dynamic` takes modules by their exact class.

    Args:
        module: As ``nn.Linear`` or ``nn.Embedding``.
        inits: For each of its parameters a function that fills a tensor in place.
    """
    # `reset` refers to `_parameters` and not to the module: a reference to the module would be a cycle. `deepcopy` and
    # pickle copy this dict with the module, so that a copy resets its own parameters.
    reset = partial(_fill, module._parameters, inits)
    setattr(module, "reset_parameters", reset)  # noqa: B010
    reset()
    return module


def _fill(parameters: Mapping[str, Any], inits: Mapping[str, Callable[[Tensor], Any]]) -> None:
    for name, init in inits.items():
        parameter = parameters.get(name)
        if parameter is not None:  # else pruning or a parametrization has put another in its place
            init(parameter)


# PyTorch's functions of these kinds do not take DTensors: `eye_` makes wrong shards, `orthogonal_` raises an error.


def identity_(x: Tensor) -> None:
    """Fill ``x [n, n]`` with the identity."""
    copy_(x, torch.eye(x.shape[0], device=x.device, dtype=x.dtype))


def orthogonal_(x: Tensor, gain: float) -> None:
    """Fill a matrix with `gain` times a random one whose rows or columns, the fewer, are orthonormal."""
    # In float32: there is no QR decomposition in half precision.
    copy_(x, nn.init.orthogonal_(torch.empty(x.shape, device=x.device, dtype=torch.float32), gain))


@torch.no_grad()
def copy_(x: Tensor, values: Tensor) -> None:
    """Copy plain `values` into `x`; if `x` is sharded, the values of the first rank."""
    mesh = getattr(x, "device_mesh", None)
    if mesh is not None:
        from torch.distributed.tensor import distribute_tensor  # slow to import, and here already imported

        shards: Any = x
        values = distribute_tensor(values, mesh).redistribute(placements=shards.placements).to_local()
        # The shards themselves: DTensor does not copy into an axis of size 1 that several ranks share.
        x = shards.to_local()
    x.copy_(values)


@torch.no_grad()
def set_first_decays(A_log: Tensor, dt_bias: Tensor, low: float) -> None:
    """Rates ``exp(A_log)`` uniform from `low`, or above it if it is 0, to 16; steps from 0.001 to 0.1.

    The logarithms of the steps ``softplus(dt_bias)`` are uniform.
    """
    # In float32, since in half precision one rate of several hundred would be 0, and its logarithm -inf.
    rate = 16 - torch.empty_like(A_log, dtype=torch.float32).uniform_(0, 16 - low)
    A_log.copy_(rate.log())
    log_dt = torch.empty_like(dt_bias, dtype=torch.float32).uniform_(math.log(0.001), math.log(0.1))
    dt_bias.copy_(before_softplus(log_dt.exp()))


@torch.no_grad()
def first_time_steps_(x: Tensor, low: float, high: float, floor: float) -> None:
    """Fill `x` so that the logarithms of ``softplus(x)`` are uniform from ``log(low)`` to ``log(high)``.

    Steps below `floor` are raised to it.
    """
    log_dt = torch.empty_like(x, dtype=torch.float32).uniform_(math.log(low), math.log(high))
    x.copy_(before_softplus(log_dt.exp().clamp(min=floor)))


def before_softplus(y: Tensor) -> Tensor:
    """The numbers of which ``y`` are the softplus."""
    return y + (-torch.expm1(-y)).log()
