"""One matrix product instead of several, for the projections of a module that read the same input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flacompose._errors import TypeError, ValueError
from flacompose.ops._tensors.dtensor import split

# Rows of the joint weight, and with them outputs of each token, are filled up to a multiple of this. Matrix products of
# 16-bit numbers are fast where rows take a multiple of 16 bytes.
_MULTIPLE = 8


class Joinable(nn.Module):
    """A module in which several linear maps read the same input, which `join_projections` replaces by one."""

    # The paths of these maps, some of which a module may lack: of a child, or of the first part of a `nn.Sequential`.
    # Small ones come last, so that the outputs of large ones begin at a multiple of 16 bytes too.
    joinable: ClassVar[tuple[str, ...]] = ()
    # Once they are joined: how many outputs each map has, in the same order, and how many zeros fill the rest.
    joint_sizes: tuple[int, ...] = ()
    joint_proj: nn.Module

    def _projections(self, x: Tensor) -> list[Any]:
        """The output for `x` of each child that `joinable` names, in the same order; None for an absent child."""
        given: Any = split(self.joint_proj(x), self.joint_sizes, -1) if self.joint_sizes else x
        children = [self._modules.get(path.partition(".")[0]) for path in self.joinable]
        return [None if child is None else child(given) for child in children]


class Part(nn.Module):
    """A module in the place of a joined map, which returns the map's part of the joint product."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        if isinstance(parts, Tensor):
            raise TypeError(
                "a projection that join_projections has joined must be called with the parts of the joint product, "
                "got a tensor: the weight is now in joint_proj of the layer"
            )
        return parts[self.index]

    def extra_repr(self) -> str:
        return f"index={self.index}"


def join_projections(module: nn.Module) -> None:
    """Make those projections of each layer in `module` that read the same input one matrix product.

    It changes `module` in place. A layer computes what it computed before, up to rounding, with fewer kernels. That is
    for calls of few tokens, as in generation, where most of the time of a product is spent on reading its weight or on
    launching its kernel. A layer of `flacompose.layers`, and in a model also a feed-forward network and
    softmax attention, gets one ``nn.Linear`` called ``joint_proj``:

    - It has the rows of the queries, keys, values, output gates, decays and of any other projection of the layer's
      input. Of a low-rank pair it has the first matrix. Rows of zeros fill it up to a multiple of 8.
    - If one of these projections has a bias, so has ``joint_proj``, with zeros for the others, which training changes.
    - A module without parameters takes the place of each of these projections.
    - Layers that mix their inputs, as those of RWKV6 and RWKV7, and layers that have one projection from the start, as
      `Mamba2`, stay as they are. So do layers that are joined already.

    The layers then have other parameters, in other places of the state dict. So load checkpoints, merge adapters and
    convert dtypes before this call. Quantise, compile, export, make optimisers and make a
    [Decoder][flacompose.models.Decoder] after it: a CUDA graph that was recorded before reads weights that are freed
    here. Gradients that the old parameters hold are lost. Sharded layers cannot be joined, nor joined ones be sharded
    by heads.

    Args:
        module: A layer, a `RecurrentLM`, or any module that contains them.

    Raises:
        TypeError: If `module` is no module, or a projection in it is not a plain ``nn.Linear`` with plain parameters,
            as where it is quantised, adapted, sharded or parametrised.
        ValueError: If `module` contains no layer whose projections can be joined, or a projection or a parameter of it
            has hooks or shares its memory with another, or the projections of a layer differ in dtype, device, number
            of inputs or whether they require gradients. All layers are checked first: after such an error nothing is
            changed.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    found = {path: m for path, m in module.named_modules() if isinstance(m, Joinable)}
    if not found:
        raise ValueError(
            f"module must contain a layer whose projections can be joined, got {type(module).__name__}"
        )
    join(module, found)


def join(module: nn.Module, found: Mapping[str, Any]) -> None:
    """Join the maps of the modules `found` in `module`, by their paths: each has the attributes of a `Joinable`."""
    places = _places(module)
    separate = {path: m for path, m in found.items() if not m.joint_sizes and len(joined_paths(m)) > 1}
    for path, layer in separate.items():
        _check(f"{path}." if path else "", layer, places)
    with torch.inference_mode(False), torch.no_grad():
        for layer in separate.values():
            _join(layer)


def joined_paths(layer: Any) -> list[str]:
    """The paths of the maps that `layer` has: an output gate, for example, may be absent."""
    return [path for path in layer.joinable if getattr(layer, path.partition(".")[0], None) is not None]


def _places(module: nn.Module) -> Counter[int]:
    """How often each module, by its ``id``, and each parameter, by its `_memory`, occurs in `module`."""
    places: Counter[int] = Counter()
    for m in module.modules():
        places.update(id(child) for child in m._modules.values())
        places.update(_memory(p) for p in m._parameters.values() if type(p) is nn.Parameter)
    return places


def _memory(p: Tensor) -> int:
    """A number for the memory of `p`, even on the meta device: two parameters may share it."""
    return p.untyped_storage()._cdata


def _check(prefix: str, layer: Any, places: Counter[int]) -> None:
    """Check that the maps of `layer` can be joined. Errors call them by `prefix` and their path."""
    linears: dict[str, nn.Linear] = {}
    for path in joined_paths(layer):
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
    if type(m) is not expected:  # a subclass may compute something else
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
    """The properties that all parameters of all maps must share."""
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
    """Replace the maps of `layer`, which have been checked."""
    paths = joined_paths(layer)
    linears = [layer.get_submodule(path) for path in paths]
    weights: list[Tensor] = [m.weight for m in linears]
    biases: list[Tensor | None] = [m.bias for m in linears]
    sizes = [len(weight) for weight in weights]
    fill = -sum(sizes) % _MULTIPLE
    if fill:
        sizes.append(fill)
        weights.append(weights[0].new_zeros(fill, weights[0].shape[1]))
        biases.append(None)
    # On the meta device, so that no first values are drawn.
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
