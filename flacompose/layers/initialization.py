"""Initialization of parameters that PyTorch's modules would initialize differently, also as DTensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def with_initializers(module: Module, **inits: Callable[[Tensor], Any]) -> Module:
    """`module`, whose parameters are initialized by `inits`, now and in `reset_parameters`.

    PyTorch resets every module by itself, parents or children first. So a parent cannot reset the parameters of its
    children: their own reset may follow. Nor is a subclass of ``nn.Linear`` a solution, since
    `torch.ao.quantization.quantize_dynamic` looks for the exact class.

    Args:
        module: For example ``nn.Linear`` or ``nn.Embedding``.
        inits: For each parameter of `module`, a function that fills a tensor in place.
    """
    # `reset` refers to `_parameters`, since a reference to the module would be a cycle. `deepcopy` and pickle copy this
    # dict with the module, so a copy resets its own parameters.
    reset = partial(_fill, module._parameters, inits)
    setattr(module, "reset_parameters", reset)  # noqa: B010
    reset()
    return module


def _fill(parameters: Mapping[str, Any], inits: Mapping[str, Callable[[Tensor], Any]]) -> None:
    for name, init in inits.items():
        parameter = parameters.get(name)
        if parameter is not None:  # else pruning or a parametrization has replaced it
            init(parameter)


# PyTorch's own functions do not support DTensors: `eye_` makes wrong shards, `orthogonal_` raises an error.


def identity_(x: Tensor) -> None:
    """Fill ``x [n, n]`` with the identity."""
    copy_(x, torch.eye(x.shape[0], device=x.device, dtype=x.dtype))


def orthogonal_(x: Tensor, gain: float) -> None:
    """Fill a matrix with `gain` times a random matrix with orthonormal rows, or columns if there are fewer."""
    # In float32, since PyTorch has no QR decomposition in half precision.
    copy_(x, nn.init.orthogonal_(torch.empty(x.shape, device=x.device, dtype=torch.float32), gain))


@torch.no_grad()
def copy_(x: Tensor, values: Tensor) -> None:
    """Copy plain `values` into `x`. If `x` is sharded, the values of the first rank are taken."""
    mesh = getattr(x, "device_mesh", None)
    if mesh is not None:
        from torch.distributed.tensor import distribute_tensor  # slow to import; a DTensor has imported it

        shards: Any = x
        values = distribute_tensor(values, mesh).redistribute(placements=shards.placements).to_local()
        # Copy local shards, since DTensor does not copy into a sharded axis of size 1.
        x = shards.to_local()
    x.copy_(values)


@torch.no_grad()
def init_decays_(A_log: Tensor, dt_bias: Tensor, low: float) -> None:
    """Rates ``exp(A_log)`` uniform from `low` to 16, and never 0; steps ``softplus(dt_bias)`` from 0.001 to 0.1.

    The logarithms of the steps are uniform.
    """
    # In float32, since in half precision one rate of several hundred would be 0, with a logarithm of -inf.
    rate = 16 - torch.empty_like(A_log, dtype=torch.float32).uniform_(0, 16 - low)
    A_log.copy_(rate.log())
    log_dt = torch.empty_like(dt_bias, dtype=torch.float32).uniform_(math.log(0.001), math.log(0.1))
    dt_bias.copy_(inverse_softplus(log_dt.exp()))


@torch.no_grad()
def init_time_steps_(x: Tensor, low: float, high: float, floor: float) -> None:
    """Fill `x` so that the logarithms of ``softplus(x)`` are uniform from ``log(low)`` to ``log(high)``.

    Steps are at least `floor`.
    """
    log_dt = torch.empty_like(x, dtype=torch.float32).uniform_(math.log(low), math.log(high))
    x.copy_(inverse_softplus(log_dt.exp().clamp(min=floor)))


def inverse_softplus(y: Tensor) -> Tensor:
    """The inverse of softplus."""
    return y + (-torch.expm1(-y)).log()
