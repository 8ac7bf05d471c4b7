"""First values of decays ``-exp(A_log) * softplus(a + dt_bias)``, those of Mamba-2."""

from __future__ import annotations

import math

import torch
from torch import Tensor


@torch.no_grad()
def set_first_decays(A_log: Tensor, dt_bias: Tensor, low: float, high: float = 16) -> None:
    """Rates ``exp(A_log)`` uniform from `low`, or above it if it is 0, to `high`; steps from 0.001 to 0.1.

    The logarithms of the steps ``softplus(dt_bias)`` are uniform.
    """
    # In float32, since in half precision one rate of several hundred would be 0, and its logarithm -inf.
    rate = high - torch.empty_like(A_log, dtype=torch.float32).uniform_(0, high - low)
    A_log.copy_(rate.log())
    log_dt = torch.empty_like(dt_bias, dtype=torch.float32).uniform_(math.log(0.001), math.log(0.1))
    dt = log_dt.exp()
    dt_bias.copy_(dt + (-torch.expm1(-dt)).log())  # the inverse of softplus
