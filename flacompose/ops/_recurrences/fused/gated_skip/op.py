"""The registered op of the gated skip: `inputs` lists its arguments, `eager` states the function."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from flacompose.ops._recurrences.forms import define_ops
from flacompose.ops._recurrences.fused.gated_skip import eager
from flacompose.ops._recurrences.fused.gated_skip.inputs import SIGNATURE, Inputs


def _flops(y: Any, *_: Any, **__: Any) -> int:
    """A weighted sum and a gate for each element."""
    return 6 * prod(y)


operator = define_ops(SIGNATURE, eager, forms=("forward",), flops=_flops)["forward"]


def gated_skip(
    y: Tensor,
    x: Tensor,
    D: Tensor | None = None,
    w: Tensor | None = None,
    z: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """``(y + (D + w) x) * silu(z)``, without the terms that are None; zeros for tokens in no sequence.

    On CUDA, forward and backward are one kernel each. A graph gets PyTorch operations instead: the compiler
    fuses them with neighbouring operations, such as casts and norms, but cannot fuse an operator.
    """
    if D is None and w is None:
        if z is None:  # a scan returns zeros for tokens in no sequence
            return y.to(x.dtype)
        x = x.detach()  # only its dtype is used
    inputs = Inputs(y, x, D, w, z, cu_seqlens)
    if is_compiling() or not y.is_cuda:
        return eager.forward(inputs)[0]
    o: Tensor = operator(*inputs)
    return o
