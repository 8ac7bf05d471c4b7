"""Fused projections: one matrix product instead of several that read the same input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flacompose._errors import TypeError, ValueError
from flacompose.ops._tensors.dtensor import split

# The number of rows of the fused weight is padded to a multiple of this, since products of 16-bit numbers are fast if
# the outputs of a token take a multiple of 16 bytes.
_MULTIPLE = 8


class FusesProjections(nn.Module):
    """A module whose projections read the same input, so that `join_projections` can fuse them."""

    # The paths of these projections: a child, or the first module of an `nn.Sequential`. A module may lack some. Small
    # ones come last, so that the outputs of large ones begin at a multiple of 16 bytes.
    fusible: ClassVar[tuple[str, ...]] = ()
    # Once they are fused: the number of outputs of each projection, in the same order, and of the padding.
    joint_sizes: tuple[int, ...] = ()
    joint_proj: nn.Module

    def _projections(self, x: Tensor) -> list[Any]:
        """The outputs for `x` of the children in `fusible`, in the same order. None for an absent child."""
        given: Any = split(self.joint_proj(x), self.joint_sizes, -1) if self.joint_sizes else x
        children = [self._modules.get(path.partition(".")[0]) for path in self.fusible]
        return [None if child is None else child(given) for child in children]


class Part(nn.Module):
    """A module in place of a fused projection. It selects the outputs of this projection from the fused product."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        if isinstance(parts, Tensor):
            raise TypeError(
                "a projection that join_projections has joined must be called with the parts of the fused product, "
                "got a tensor: the weight is now in joint_proj of the layer"
            )
        return parts[self.index]

    def extra_repr(self) -> str:
        return f"index={self.index}"


def join_projections(module: nn.Module) -> None:
    """Fuse the projections of each layer in `module` that read the same input into one matrix product.

    It changes `module` in place. The results are the same up to rounding, from fewer kernels. This makes calls of few
    tokens faster, as in generation, where a product spends most of its time on reading the weight or on launching the
    kernel. Each layer of `flacompose.layers`, and each feed-forward network and softmax attention of a model, gets one
    ``nn.Linear`` called ``joint_proj``:

    - Its rows are the rows of the projections to queries, keys, values, output gates, decays and so on, and of the
      first matrix of low-rank pairs. Rows of zeros pad it to a multiple of 8.
    - If one of the projections has a bias, ``joint_proj`` has a bias too. It is 0 for projections without a bias, until
      training changes it.
    - A module without parameters replaces each of the projections.
    - Some layers are not changed: layers that mix their inputs first, such as RWKV6 and RWKV7, layers with a single
      projection, such as `Mamba2`, and layers that are fused already.

    The parameters and their names in the state dict change. So load checkpoints, merge adapters and convert dtypes
    before this call. Quantise, compile, export, make optimisers and make a [Decoder][flacompose.models.Decoder] after
    it: a CUDA graph that was recorded before would read freed weights. Gradients of the old parameters are lost.
    Sharded layers cannot be fused, and fused layers cannot be sharded by heads.

    Args:
        module: A layer, a `RecurrentLM`, or any module that contains them.

    Raises:
        TypeError: If `module` is no module, or a projection is not a plain ``nn.Linear`` with plain parameters, because
            it is quantised, adapted, sharded or parametrised.
        ValueError: If `module` contains no layer whose projections can be joined, if a projection or its parameter has
            hooks or shares memory with another, or if the projections of a layer differ in dtype, device, number of
            inputs or `requires_grad`. All layers are checked first, so after an error nothing has changed.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    found = {path: m for path, m in module.named_modules() if isinstance(m, FusesProjections)}
    if not found:
        raise ValueError(
            f"module must contain a layer whose projections can be joined, got {type(module).__name__}"
        )
    join(module, found)


def join(module: nn.Module, found: Mapping[str, Any]) -> None:
    """Fuse the projections of the layers `found` in `module`, by path. Each is like a `FusesProjections`."""
    places = _places(module)
    separate = {path: m for path, m in found.items() if not m.joint_sizes and len(fusible_paths(m)) > 1}
    for path, layer in separate.items():
        _check(f"{path}." if path else "", layer, places)
    with torch.inference_mode(False), torch.no_grad():
        for layer in separate.values():
            _join(layer)


def fusible_paths(layer: Any) -> list[str]:
    """The paths in `layer.fusible` that exist. For example, a layer may have no output gate."""
    return [path for path in layer.fusible if getattr(layer, path.partition(".")[0], None) is not None]


def _places(module: nn.Module) -> Counter[int]:
    """The number of occurrences in `module` of each module, by ``id``, and each parameter, by `_memory`."""
    places: Counter[int] = Counter()
    for m in module.modules():
        places.update(id(child) for child in m._modules.values())
        places.update(_memory(p) for p in m._parameters.values() if type(p) is nn.Parameter)
    return places


def _memory(p: Tensor) -> int:
    """An identifier of the memory of `p`, which two parameters may share. It works on the meta device too."""
    return p.untyped_storage()._cdata


def _check(prefix: str, layer: Any, places: Counter[int]) -> None:
    """Check that the projections of `layer` can be fused. Errors name them by `prefix` and path."""
    linears: dict[str, nn.Linear] = {}
    for path in fusible_paths(layer):
        child, _, inner = path.partition(".")
        name, m = prefix + child, getattr(layer, child)
        if inner:
            _check_module(name, m, nn.Sequential, places)
            name, m = prefix + path, m[int(inner)]
        _check_module(name, m, nn.Linear, places)
        linears[name] = m
    first, *others = linears
    for name in others:
        for kind in ("dtype", "device", "number of inputs", "requires_grad"):
            expected, got = _kinds(linears[first])[kind], _kinds(linears[name])[kind]
            if len(expected | got) > 1:
                raise ValueError(
                    f"{name} must have the {kind} of {first}, {_listed(expected)}, to be joined with it, "
                    f"got {_listed(got)}"
                )


def _check_module(name: str, m: nn.Module, expected: type[nn.Module], places: Counter[int]) -> None:
    if type(m) is not expected:  # a subclass may compute another function
        raise TypeError(
            f"{name} must be a plain nn.{expected.__name__} to be joined, got a {_name(m)}: merge adapters "
            "before projections are joined, and quantise after it"
        )
    for key, p in m._parameters.items():
        if p is None:
            continue
        if type(p) is not nn.Parameter:
            raise TypeError(
                f"{name}.{key} must be a plain parameter to be joined, got a {_name(p)}: join projections before "
                "they are quantised; sharded ones cannot be joined"
            )
        if places[_memory(p)] > 1:
            raise ValueError(f"{name}.{key} must be in one place to be joined, got {places[_memory(p)]}")
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise ValueError(f"{name}.{key} must have no hooks to be joined, got some")
    hooks = m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks
    if any(hooks) or "forward" in vars(m):
        raise ValueError(f"{name} must have no hooks, and no forward of its own, to be joined, got some")
    if places[id(m)] > 1:
        raise ValueError(f"{name} must be in one place to be joined, got {places[id(m)]}")


def _name(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _kinds(m: nn.Linear) -> dict[str, set[Any]]:
    """The properties that all projections must share."""
    parameters = list(m.parameters())
    return {
        "dtype": {p.dtype for p in parameters},
        "device": {p.device for p in parameters},
        "number of inputs": {m.weight.shape[1]},
        "requires_grad": {p.requires_grad for p in parameters},
    }


def _listed(values: set[Any]) -> str:
    return " and ".join(sorted(map(str, values)))


def _join(layer: Any) -> None:
    """Fuse the projections of `layer`, which have been checked."""
    paths = fusible_paths(layer)
    linears = [layer.get_submodule(path) for path in paths]
    weights: list[Tensor] = [m.weight for m in linears]
    biases: list[Tensor | None] = [m.bias for m in linears]
    sizes = [len(weight) for weight in weights]
    fill = -sum(sizes) % _MULTIPLE
    if fill:
        sizes.append(fill)
        weights.append(weights[0].new_zeros(fill, weights[0].shape[1]))
        biases.append(None)
    # On the meta device, so that no values are drawn.
    joint = nn.Linear(weights[0].shape[1], sum(sizes), bias=False, device="meta")
    requires_grad = weights[0].requires_grad
    joint.weight = nn.Parameter(torch.cat(weights), requires_grad)
    if any(bias is not None for bias in biases):
        filled = [
            weights[0].new_zeros(n) if bias is None else bias for bias, n in zip(biases, sizes, strict=True)
        ]
        joint.bias = nn.Parameter(torch.cat(filled), requires_grad)
    joint.train(layer.training)
    for index, path in enumerate(paths):
        parent, _, name = path.rpartition(".")
        setattr(layer.get_submodule(parent), name, Part(index))
    layer.joint_proj, layer.joint_sizes = joint, tuple(sizes)
