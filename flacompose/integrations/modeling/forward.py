"""The common parts of forwards of several models."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from flacompose.integrations.modeling.arguments import (
    CACHES,
    PACKED,
    finder_of_caches,
    name_of_cache,
    refuse_packed,
)
from flacompose.ops._tensors.dtype import state_dtype

Forward: TypeAlias = Callable[..., Any]


class ModuleWith:
    """A module with some other attributes, for one call of its forward."""

    forward = None  # transformers looks here for its checkpointing wrapper, which is outside of this object

    def __init__(self, module: Any, **attributes: Any) -> None:
        object.__setattr__(self, "_module", module)
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    # Transformers records hidden states by the class of a model, and marks the model.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._module.__class__ if vars(self) else ModuleWith  # it is empty while Dynamo traces it

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def module_forward(compute: Callable[..., Any]) -> Callable[[Forward], Forward]:
    """Turn `compute` into a function from the forward of a module to its replacement.

    `compute` gets the replaced forward, the module, the cache or None, and all arguments, including the cache.
    """

    def of(forward: Forward) -> Forward:
        cache_in = finder_of_caches()

        @wraps(forward)
        def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
            return compute(forward, self, cache_in(args, kwargs), *args, **kwargs)

        return replacement

    return of


def layer_forward(compute: Callable[..., Any]) -> Callable[[Forward], Forward]:
    """`module_forward` for a recurrent layer. With a cache it refuses packed sequences, and a record of the past.

    With such a record, `Cache.crop` would remove tokens from the state of the convolution, but not from the state of
    the recurrence.
    """

    @module_forward
    def checked(forward: Forward, layer: Any, cache: Any, /, *args: Any, **kwargs: Any) -> Any:
        if cache is not None:
            refuse_packed(kwargs)
            index = kwargs["layer_idx"] if "layer_idx" in kwargs else layer.layer_idx
            kept: Any = cache.layers[index] if index < len(cache.layers) else None
            if getattr(kept, "record_past", False) and any(kept.is_recurrent_states_initialized.values()):
                raise ValueError(
                    f"the cache must not record the past (activate_past_recording) for a {type(layer).__name__}, since "
                    "no token can be taken back out of its recurrent state: copy the cache instead"
                )
        return compute(forward, layer, cache, *args, **kwargs)

    return checked


@layer_forward
def plain_layer_forward(forward: Forward, layer: Any, _: Any, /, *args: Any, **kwargs: Any) -> Any:
    """For a layer in which only the functions that its forward calls are replaced."""
    return forward(layer, *args, **kwargs)


@module_forward
def unpacked_forward(forward: Forward, module: Any, _: Any, /, *args: Any, **kwargs: Any) -> Any:
    """For a module that would mix packed sequences. It refuses them."""
    for key in PACKED:
        if kwargs.get(key) is not None:
            raise ValueError(
                f"{key} must not be given to a {type(module).__name__}, which cannot keep sequences apart"
            )
    return forward(module, *args, **kwargs)


def passing_to(*names: str, keys: tuple[str, ...] = PACKED) -> Callable[[Forward], Forward]:
    """For a module that drops the arguments `keys`. They are passed on to its children `names`."""

    def of(forward: Forward) -> Forward:
        takes_any = inspect.getfullargspec(inspect.unwrap(forward)).varkw is not None

        @wraps(forward)
        def passing(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = {key: kwargs[key] for key in keys if kwargs.get(key) is not None}
            if not given:
                return forward(self, *args, **kwargs)
            called = {name: called_with(getattr(self, name), given) for name in names if hasattr(self, name)}
            kwargs = kwargs if takes_any else {key: x for key, x in kwargs.items() if key not in given}
            return forward(ModuleWith(self, **called), *args, **kwargs)

        return passing

    return of


def called_with(module: nn.Module, given: dict[str, Any]) -> Any:
    """A module, or a list of modules, that adds the arguments `given` to each call."""
    if isinstance(module, nn.ModuleList):
        return [partial(each, **given) for each in module]
    return partial(module, **given)


def making_cache(
    make: Callable[[Any, Tensor], Any], in_training: bool = True
) -> Callable[[Forward], Forward]:
    """For a model that, without a given cache, makes none, or one that its layers cannot use.

    `make` gets the model and its ids or embeddings. `in_training` tells whether the model makes a cache in training
    too.
    """

    def of(forward: Forward) -> Forward:
        _, *parameters = inspect.signature(forward).parameters.values()
        names, name = [x.name for x in parameters if x.kind is not x.VAR_KEYWORD], name_of_cache(forward)

        @wraps(forward)
        def making(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(**dict(zip(names, args, strict=False)), **kwargs)
            given = {key: x for key, x in given.items() if x is not None or key not in CACHES}
            x, use_cache = given.get("input_ids"), given.get("use_cache")
            x = given.get("inputs_embeds") if x is None else x
            if use_cache is None:
                use_cache = self.config.use_cache and (in_training or not self.training)
            checkpointed = self.training and self.gradient_checkpointing  # then transformers makes no cache
            if use_cache and x is not None and not checkpointed and not given.keys() & {*CACHES}:
                given[name] = make(self, x)
            return forward(self, *args[len(names) :], **given)

        return making

    return of


def dtype_of_states(model: nn.Module, x: Tensor) -> torch.dtype:
    """The dtype of the states of a model with the ids or embeddings `x`."""
    return state_dtype(
        x.dtype if x.is_floating_point() else cast(Any, model).get_input_embeddings().weight.dtype
    )
