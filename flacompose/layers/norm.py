"""Norms of the last axis."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from flacompose._errors import ValueError
from flacompose._peer import explained
from flacompose.layers import _check
from flacompose.layers.number import number
from flacompose.ops._tensors.dtensor import unflatten
from flacompose.ops._tensors.dtype import upcast


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """``x`` divided by the root of the mean square over its last axis, in the dtype of `x`.

    It has no weight, since PyTorch's function warns about a weight with another dtype than the input.
    """
    # On a CPU, PyTorch's function adds in place, which DTensor does not support for a sharded mean. In graphs, Inductor
    # computes the gradients of this formula and of a weight in one kernel, instead of two with PyTorch's function.
    if hasattr(x, "device_mesh") or is_compiling():
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    # Two axes, since for four axes PyTorch checks for channels-last layout, a guard on the number of tokens.
    rows = x.reshape(-1, x.shape[-1])
    return F.rms_norm(rows, rows.shape[-1:], None, eps).view(x.shape)


class RMSNorm(nn.RMSNorm):
    r"""Root-mean-square norm over the last axis, in float32 (float64 for float64), rounded to the dtype of `x`.

    $$y = x / \sqrt{\operatorname{mean}(x^2) + \epsilon} \odot \text{weight}$$

    From "Root Mean Square Layer Normalization" (<https://arxiv.org/abs/1910.07467>).

    Args:
        hidden_size: Size ``D`` of the last axis.
        elementwise_affine: Whether there is a weight, ``[D]``, of ones at first; None stands for False.
        eps: Added to the mean square.
        device: Device of the weight.
        dtype: Dtype of the weight.

    Raises:
        ValueError: If `hidden_size` is below 1, or `eps` below 0 or not finite.
        TypeError: If an argument has the wrong type, or `dtype` is no float dtype.

    It is a `torch.nn.RMSNorm`, but its arguments have another order.
    """

    eps: float

    @explained
    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool | None = True,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check.count("hidden_size", hidden_size)
        _check.not_negative("eps", eps)
        affine = _check.optional_flag("elementwise_affine", elementwise_affine)
        _check.optional_float_dtype(dtype)
        super().__init__(hidden_size, eps, affine, device, dtype)
        self.hidden_size = hidden_size

    @explained
    def forward(self, x: Tensor) -> Tensor:
        return self._normed(x).to(x.dtype)

    def _normed(self, x: Tensor) -> Tensor:
        """The norm before it is rounded."""
        shape = tuple(x.shape)
        if shape[-1] != self.hidden_size:
            raise ValueError(f"x must have a last axis of size {self.hidden_size}, got shape {shape}")
        y = rms_norm(upcast(x), self.eps)
        return y if self.weight is None else y * self.weight

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, elementwise_affine={self.elementwise_affine}, eps={self.eps}"


class HeadwiseRMSNorm(RMSNorm):
    """A norm of each head of ``x [..., H, D / H]``, not rounded, with a weight for each of ``D`` channels."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(upcast(x), self.eps) * unflatten(self.weight, 0, tuple(x.shape[-2:]))


class GatedRMSNorm(RMSNorm):
    """An `RMSNorm` whose output is multiplied by a gate before it is rounded.

    The gate is ``silu(g)``, or, with ``activation="sigmoid"``, ``sigmoid(g)``; ``g`` has the shape of `x`.
    """

    @explained
    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool | None = True,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "silu",
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, eps, device, dtype)
        _check.one_of("activation", activation, ("silu", "swish", "sigmoid"))
        self.activation = activation

    @explained
    def forward(self, x: Tensor, g: Tensor) -> Tensor:  # type: ignore[override]
        gate = F.sigmoid if self.activation == "sigmoid" else F.silu
        return (self._normed(x) * gate(upcast(g))).to(x.dtype)


class GroupNorm(nn.GroupNorm):
    """A layer norm of each group of channels, ``[..., groups, channels / groups]``.

    In float32 (float64 for float64), rounded to the dtype of its input.
    """

    eps = number("eps")

    def forward(self, x: Tensor) -> Tensor:
        # One axis of tokens, since with more axes PyTorch's gradient refuses a data-dependent number of tokens.
        y = F.layer_norm(upcast(x).flatten(0, -3), x.shape[-1:], None, None, self.eps)
        y = y.unflatten(0, x.shape[:-2])
        for p, join in ((self.weight, torch.mul), (self.bias, torch.add)):
            y = y if p is None else join(y, p.unflatten(0, (self.num_groups, -1)))
        return y.to(x.dtype)
