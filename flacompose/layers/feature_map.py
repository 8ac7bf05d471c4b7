"""Feature maps of each head of queries or keys, by the names of flash-linear-attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flacompose.layers.initialization import identity_, with_initializers
from flacompose.layers.norm import rms_norm
from flacompose.ops._tensors.dtype import upcast


class HedgehogFeatureMap(nn.Module):
    r"""$\operatorname{softmax}([2 y, -2 y])$ of $y = W x + b$, twice the head size; ``W`` is the identity at first.

    From "The Hedgehog & the Porcupine" (<https://arxiv.org/abs/2402.04347>).
    """

    def __init__(self, head_dim: int, **factory: Any) -> None:
        super().__init__()
        self.layer = with_initializers(
            nn.Linear(head_dim, head_dim, **factory), weight=identity_, bias=nn.init.zeros_
        )

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * self.layer(x)
        return torch.cat([y, -y], dim=-1).softmax(-1)


class T2RFeatureMap(nn.Module):
    r"""$\max(W x, 0)$, from "Finetuning Pretrained Transformers into RNNs" (<https://arxiv.org/abs/2103.13076>)."""

    def __init__(self, head_dim: int, **factory: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(head_dim, head_dim, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x))


class ElementwiseProductFeatureMap(nn.Module):
    r"""$(W_1 x + b_1) \odot (W_2 x + b_2)$."""

    def __init__(self, head_dim: int, **factory: Any) -> None:
        super().__init__()
        self.layer1 = nn.Linear(head_dim, head_dim, **factory)
        self.layer2 = nn.Linear(head_dim, head_dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer1(x) * self.layer2(x)


class DPFPFeatureMap(nn.Module):
    r"""Products of $y = [\max(x, 0), \max(-x, 0)]$ with itself rolled by 1 to ``nu``, ``2 * nu`` times the head size.

    Deterministic and without parameters, from "Linear Transformers Are Secretly Fast Weight Programmers"
    (<https://arxiv.org/abs/2102.11174>).
    """

    nu = 4

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([F.relu(x), F.relu(-x)], dim=-1)
        return torch.cat([y * y.roll(j, -1) for j in range(1, self.nu + 1)], dim=-1)


def elu_plus_one(x: Tensor) -> Tensor:
    # elu(x) + 1 would round a small exp(x) away.
    return torch.where(x > 0, x + 1, x.masked_fill(x > 0, 0).exp())


class ELUFeatureMap(nn.Module):
    r"""$\operatorname{elu}(x) + 1$, from "Transformers are RNNs" (<https://arxiv.org/abs/2006.16236>)."""

    def forward(self, x: Tensor) -> Tensor:
        return elu_plus_one(x)


def squares_and_products(x: Tensor) -> tuple[Tensor, Tensor]:
    """The squares of the channels of ``x [..., K]``, and the products of all pairs of channels."""
    # Slices, since DTensor cannot be indexed by a plain tensor.
    products = [x[..., i : i + 1] * x[..., i + 1 :] for i in range(x.shape[-1] - 1)]
    return x.square(), torch.cat(products, -1) if products else x[..., :0]


class TaylorFeatureMap(nn.Module):
    r"""Features whose products are $1 + s + s^2 / 2$ of $s = y^\top z / \sqrt{K}$, in float32 (float64 for float64).

    From "Simple linear attention language models balance the recall-throughput tradeoff"
    (<https://arxiv.org/abs/2402.18668>).
    """

    def forward(self, x: Tensor) -> Tensor:
        x = upcast(x) * x.shape[-1] ** -0.25
        squares, products = squares_and_products(x)
        return torch.cat([torch.ones_like(x[..., :1]), x, squares * 0.5**0.5, products], -1)


class QuadraticFeatureMap(nn.Module):
    r"""Features whose products are $(y^\top z)^2 / K$ of affine $y$ and $z$, in float32 (float64 for float64).

    From "Linear Transformers with Learnable Kernel Functions are Better In-Context Models"
    (<https://arxiv.org/abs/2402.10644>).
    """

    gamma: nn.Parameter | None
    beta: nn.Parameter | None

    def __init__(
        self, head_dim: int, use_gamma: bool, use_beta: bool, normalize: bool, **factory: Any
    ) -> None:
        super().__init__()
        self.normalize = normalize
        for name, used in (("gamma", use_gamma), ("beta", use_beta)):
            self.register_parameter(name, nn.Parameter(torch.empty(head_dim, **factory)) if used else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.gamma is not None:
            nn.init.ones_(self.gamma)
        if self.beta is not None:
            nn.init.zeros_(self.beta)

    def forward(self, x: Tensor) -> Tensor:
        x = upcast(x)
        if self.normalize:
            x = rms_norm(x - x.mean(-1, keepdim=True), 1e-5)
        if self.gamma is not None:
            x = x * self.gamma
        if self.beta is not None:
            x = x + self.beta
        squares, products = squares_and_products(x * x.shape[-1] ** -0.25)
        return torch.cat([squares, products * 2**0.5], -1)


# By the name of a map: the function that makes it for a head size, and the factor by which it enlarges heads.
FEATURE_MAPS: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "hedgehog": (HedgehogFeatureMap, 2),
    "t2r": (T2RFeatureMap, 1),
    "elementwise_product": (ElementwiseProductFeatureMap, 1),
    "dpfp": (lambda head_dim, **factory: DPFPFeatureMap(), 2 * DPFPFeatureMap.nu),
    "elu": (lambda head_dim, **factory: ELUFeatureMap(), 1),
    "relu": (lambda head_dim, **factory: nn.ReLU(), 1),
    "identity": (lambda head_dim, **factory: nn.Identity(), 1),
}
