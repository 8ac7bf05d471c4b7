"""Modules that are made on the meta device and filled afterwards, and whether that gives what constructors give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flacompose.models import RecurrentConfig, RecurrentLM
from helpers.truth import EVERY, made

# Every layer, those with first values of their own, and models with every kind of module that layers do not have. Sizes
# are such that no parameter that is drawn has fewer numbers than the comparison needs.
WIDE = {name: config | {"hidden_size": 192} for name, config in EVERY.items()}
WIDE["simple_gla"] |= {"num_heads": 192, "num_kv_heads": 96, "expand_k": 1}
WIDE["griffin"] |= {"lru_width": 192}
WIDE["mamba"] |= {"intermediate_size": 192, "dt_rank": 12}
WIDE["mamba2"] |= {"hidden_size": 256, "n_groups": 2}
for _name in ("gated_deltanet", "gated_deltaproduct", "kda", "comba"):
    WIDE[_name] |= {"num_heads": 16, "num_v_heads": 64}
WIDE["gdn2"] |= {"num_heads": 64, "num_v_heads": 64}
WIDE["rodimus"] |= {"expand_ratio": 64}
LAYERS = WIDE | {
    "hedgehog": WIDE["linear_attn"] | {"num_heads": 64, "feature_map": "hedgehog"},
    "mamba2, its own bounds": WIDE["mamba2"] | {"conv_init": 0.01, "D_has_hdim": True, "use_bias": True},
    "kda, bounded gates": WIDE["kda"] | {"safe_gate": True, "lower_bound": -5.0},
}
SMALL = {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 32}
MODELS = {
    "RWKV6 model": {
        "layer": "RWKV6Attention",
        "layer_options": {"num_heads": 4, "proj_low_rank_dim": 4, "gate_low_rank_dim": 32},
        "feed_forward": "rwkv6",
        "norm": "layer",
        "norm_embeddings": True,
    },
    "RWKV7 model": {
        "layer": "RWKV7Attention",
        "layer_options": {"head_dim": 12},
        "feed_forward": "rwkv7",
    },
    "HGRN hybrid": {
        "layer": "HGRNAttention",
        "use_lower_bound": True,
        "tie_word_embeddings": True,
        "attn": [{"layers": [1], "num_heads": 2, "qkv_bias": True}],
    },
}


def _layer(config: dict[str, Any], **factory: Any) -> nn.Module:
    return made(config, **factory)


def _model(config: dict[str, Any], **factory: Any) -> nn.Module:
    return RecurrentLM(RecurrentConfig(**SMALL, **config), **factory)


MODULES: dict[str, Callable[..., nn.Module]] = {
    **{name: partial(_layer, config) for name, config in LAYERS.items()},
    **{name: partial(_model, config) for name, config in MODELS.items()},
}

Draw = dict[str, Tensor]


def draw(module: nn.Module) -> Draw:
    """Its parameters and buffers, whole where they are sharded."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    whole = {name: x.full_tensor() if hasattr(x, "device_mesh") else x for name, x in tensors.items()}
    return {name: x.detach().clone() for name, x in whole.items()}


def reset(module: nn.Module, children_first: bool = False) -> None:
    """Fill a module that has only memory, as PyTorch's guides do."""
    for x in (*module.parameters(), *module.buffers()):
        nn.init.constant_(x, torch.nan)

    def fill(m: nn.Module) -> None:
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()

    if children_first:
        module.apply(fill)
    else:
        for m in module.modules():
            fill(m)


def assert_first_values(found: Draw, constructed: Sequence[Draw]) -> None:
    """`found` can be one more draw of the constructor that has drawn the others."""
    assert found.keys() == constructed[0].keys()
    for name, x in found.items():
        y = torch.stack([draw[name] for draw in constructed])
        assert x.dtype == y.dtype and x.shape == y.shape[1:], name
        assert x.isfinite().all(), name
        if (y == y[0]).all():
            assert (x == y[0]).all(), f"{name} must be the constant that the constructor sets"
        elif y.ndim == 3 and _alike(*map(_products, y)):
            assert _alike(_products(x), _products(y[0])), f"{name} must be orthogonal"
        else:
            _assert_one_distribution(name, _some(x), torch.cat([*map(_some, y)]))


def _products(x: Tensor) -> Tensor:
    """Those of the rows of a matrix with each other, or of the columns where they are fewer."""
    x = x.double()
    return x.T @ x if x.shape[0] > x.shape[1] else x @ x.T


def _alike(first: Tensor, *others: Tensor) -> bool:
    """Up to a few roundings of float32."""
    return all(torch.allclose(x, first, rtol=0, atol=1e-6 * float(first.abs().max())) for x in others)


def _some(x: Tensor) -> Tensor:
    """At most 2,000 of its numbers, from all parts of it: more of them only take time."""
    return x.flatten()[:: 1 + x.numel() // 2000]


def _assert_one_distribution(name: str, x: Tensor, y: Tensor) -> None:
    """The distance of Kolmogorov and Smirnov: the most by which the parts of `x` and `y` below any number differ.

    For numbers of one distribution it is above the bound in one case of 30 millions: ``2 exp(-2 * 3**2)``.
    """
    bound = 3 * (1 / len(x) + 1 / len(y)) ** 0.5
    assert bound < 0.5, f"{name} has too few numbers, {len(x)}: a constant would pass"
    both = torch.cat([x, y])
    below_x, below_y = (torch.searchsorted(z.sort().values, both, right=True) / len(z) for z in (x, y))
    distance = float((below_x - below_y).abs().max())
    assert distance < bound, (
        f"{name} is drawn from another distribution, {distance:.2f} from the constructor's"
    )
