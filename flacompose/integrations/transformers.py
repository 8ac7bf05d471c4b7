"""Models of transformers on the ops of this library: `enable` for all models, `accelerate` for one."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial, wraps
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

from torch import nn

from flacompose.integrations import _tested
from flacompose.integrations.modeling import (
    bamba,
    falcon_h1,
    glm5_next,
    inkling,
    kimi_linear,
    lfm2,
    mamba,
    mamba2,
    minimax,
    qwen3_next,
    recurrent_gemma,
    rwkv,
    xlstm,
    zaya,
)
from flacompose.integrations.modeling.convolution import convolve, convolve_step
from flacompose.integrations.modeling.delta_rule import delta_rule, step
from flacompose.integrations.modeling.forward import plain_layer_forward
from flacompose.integrations.modeling.mamba_scan import no_fused_block, selective_scan, ssd, state_space_step
from flacompose.layers.fused_projections import join
from flacompose.ops import chunk_gated_delta_rule, chunk_kda

OLDEST, NEWEST = (5, 17), (5, 24)


class Function(NamedTuple):
    """The replacement of a function of a modeling file, and the op of this library that it calls."""

    function: Callable[..., Any]
    op: str | None = None


# By their names in modeling files. Transformers binds these names to PyTorch code, to flash-linear-attention, to
# mamba-ssm or to a kernel of the Hub, and looks them up in every call.
FUNCTIONS: Mapping[str, Function] = {
    "causal_conv1d_fn": Function(convolve, "causal_conv1d"),
    "causal_conv1d_update": Function(convolve_step, "causal_conv1d"),
    "torch_chunk_gated_delta_rule": Function(delta_rule(chunk_gated_delta_rule), "chunk_gated_delta_rule"),
    "torch_recurrent_gated_delta_rule": Function(
        delta_rule(partial(step, "g")), "fused_recurrent_gated_delta_rule"
    ),
    "chunk_kimi_delta_attention": Function(delta_rule(chunk_kda), "chunk_kda"),
    "recurrent_kimi_delta_attention": Function(delta_rule(partial(step, "gk")), "fused_recurrent_kda"),
    "mamba2_chunk_scan": Function(ssd, "mamba_chunk_scan_combined"),
    "mamba2_selective_state_update": Function(state_space_step, "selective_state_update"),
    "mamba2_split_conv1d_scan_combined": Function(no_fused_block),
    "mamba_selective_scan": Function(selective_scan, "selective_scan_fn"),
    "mamba_selective_state_update": Function(state_space_step, "selective_state_update"),
    "mamba_inner_fn": Function(no_fused_block),
}
# The ops of recurrences that are no functions in modeling files: MiniMax's is a part of its forward, others are
# modules.
FORWARD_OPS = {
    "MiniMaxLightningAttention": "chunk_simple_gla",
    "RecurrentGemmaRecurrentBlock": "chunk_rg_lru",
    "RwkvSelfAttention": "chunk_rwkv4",
    "ZayaCCAProjection": "causal_conv1d",
    "xLSTMLayer": "chunk_mlstm",
}

# The tables of all models: by the name of a class, a function from its forward to the replacement. Other classes that
# call functions above get `plain_layer_forward`.
FORWARDS: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    name: replacement
    for model in (
        bamba, falcon_h1, glm5_next, inkling, kimi_linear, lfm2, mamba, mamba2, minimax, qwen3_next, recurrent_gemma,
        rwkv, xlstm, zaya,
    )
    for names, replacement in model.FORWARDS.items()
    for name in names.split()
}  # fmt: skip

# The projections of a class that read the same input, small ones last. Kimi's `f_a_proj` reads it too, but in the
# module of the forget gate.
_QKV, _MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
FUSIBLE = {
    "KimiLinearAttention": ("q_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    "KimiLinearDeltaAttention": (*_QKV, "g_a_proj", "b_proj"),
    "KimiLinearMLP": _MLP,
    "Qwen3NextAttention": _QKV,
    "Qwen3NextGatedDeltaNet": ("in_proj_qkvz", "in_proj_ba"),
    "Qwen3NextMLP": _MLP,
    "Qwen3_5Attention": _QKV,
    "Qwen3_5GatedDeltaNet": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "Qwen3_5MLP": _MLP,
}

# A function that their forwards call. It is bound to a wrapper of itself, since a compiled model has guards on the
# functions that it calls, but not on forwards.
REBOUND = "apply_mask_to_padding_states"

MODELS = tuple(_tested.LAYERS)


def join_projections(model: nn.Module) -> None:
    """Fuse the projections of each layer in a model of transformers that read the same input into one matrix product.

    It is [join_projections][flacompose.layers.join_projections] for the layers of the delta rule, the softmax attention
    and the dense feed-forward networks of Qwen3-Next, Qwen3.5 and Kimi Linear. Only `f_a_proj` of Kimi Linear, in the
    module of the forget gate, is not fused. It changes `model` in place. The results are the same up to rounding, from
    fewer kernels, whose launches take most of the time of a token in a small batch. Each layer then has a
    ``joint_proj``, which changes the state dict: load a checkpoint before this call. ``save_pretrained`` raises
    RuntimeError afterwards, and a call of the model raises TypeError unless it is enabled or accelerated.

    Args:
        model: A model of transformers, or any module that contains layers of one.

    Raises:
        TypeError: If `model` is no module, or a projection in it is not a plain ``nn.Linear`` with plain parameters.
        ValueError: If `model` contains no layer whose projections can be joined, or if projections differ in dtype,
            device or `requires_grad`, have hooks, or share memory. After an error nothing has changed.
    """
    _check(model)
    found: dict[str, Any] = {}
    new: list[Any] = []
    for path, module in model.named_modules():
        for owner in _files_classes(type(module)):
            if owner.__name__ in FUSIBLE:
                found[path] = module
                if not hasattr(module, "fusible"):
                    new.append(module)
                    module.fusible, module.joint_sizes = FUSIBLE[owner.__name__], ()
    if not found:
        raise ValueError(
            f"model must contain a layer whose projections can be joined, got {type(model).__name__}"
        )
    try:
        join(model, found)
    except (TypeError, ValueError):  # raised by the checks, before anything is fused
        for module in new:
            del module.fusible, module.joint_sizes
        raise
    if hasattr(model, "save_pretrained"):
        vars(model)["save_pretrained"] = _refuse_to_save


def _refuse_to_save(*_: Any, **__: Any) -> None:
    # When it loads the model, transformers would initialize the missing projections at random, and only log it.
    raise RuntimeError(
        "save_pretrained must be called before join_projections, whose model has joint projections, which transformers "
        "does not load; save its state_dict with torch.save, and load it after join_projections"
    )


class Row(NamedTuple):
    """One function that a layer of a model calls."""

    layer: str  # the name of the layer in the model
    kind: str  # the class of the layer
    function: str  # the name of the function in transformers
    runs_on: str  # the op of this library, or the function that the name is bound to
    why: str  # why it is no op of this library; empty for an op


class Enabled:
    """A handle of `enable` or `accelerate`. `disable`, or the end of a ``with`` block, undoes the call."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def disable(self) -> None:
        """Undo the call. A second `disable` does nothing."""
        if self._undo is not None:
            self._undo()
        self._undo = None

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()


def enable() -> Enabled:
    """Run the recurrences of all models of transformers on the ops of this library, in this process.

    It covers all models, loaded before or after, on CPU and CUDA, in training, in generation, under `torch.compile` and
    in `torch.export`, whatever else is installed: it binds the names that modeling files call to functions of this
    library. Weights and configurations do not change. A compiled model is compiled again. If another library, such as
    accelerate, has wrapped the forward of a module before, this forward stays, and calls the new functions. `runs_on`
    shows layers for which that is not enough.

    Returns:
        A handle whose `disable` restores the names. It is a context manager that does so on exit. After several calls,
        the last handle to be disabled restores them.

    Raises:
        ImportError: If transformers is not installed, or is older than the oldest tested version.

    Warns:
        UserWarning: If transformers is newer than the newest tested version. The warning names the files in which code
            that this library relies on has changed. Their models are not changed.
    """
    places = list(_places())
    if _installed() > NEWEST:
        _warn_of_newer([changed for module in _modeling_files() if (changed := _difference(module))])
    handle = Enabled(lambda: _disable(handle))
    with _lock:
        for holder, name, replacement in places:
            if (holder, name) not in _originals:
                original = _originals[holder, name] = vars(holder)[name]
                setattr(holder, name, replacement(original))
                _checkpoint(holder)
        _enabled.append(handle)
    return handle


# The handles that are not disabled, and the values in modeling files and classes before the first handle.
_enabled: list[Enabled] = []
_originals: dict[tuple[ModuleType | type, str], Any] = {}
_lock = Lock()  # guards both


def _disable(handle: Enabled) -> None:
    with _lock:
        _enabled.remove(handle)
        if not _enabled:
            for (holder, name), original in _originals.items():
                setattr(holder, name, original)
            _originals.clear()


def accelerate(model: nn.Module) -> Enabled:
    """Run the recurrences of one model of transformers on the ops of this library, and leave other models alone.

    Each layer gets a class of the same name, whose forward is the old forward but calls functions of this
    library. Copies and pickles of an accelerated model are accelerated too, and stay so.

    Args:
        model: A model of transformers, or any module that contains layers of one.

    Returns:
        A handle whose `disable` restores the classes of the layers. It is a context manager that does so on exit. It
        raises ValueError, and changes nothing, if another library has wrapped the forward of a layer since.

    Raises:
        ImportError: If transformers is not installed, is older than the oldest tested version, or is newer than the
            newest and code in the file of `model` that this library relies on has changed.
        ValueError: If no layer of `model` calls a function that this library replaces, or a layer has a forward of its
            own, for example because it is accelerated.
        TypeError: If `model` is no module.

    Warns:
        UserWarning: If transformers is newer than the newest tested version, without such changes.
    """
    list(_modeling_files())  # checks the version
    _check(model)
    found = list(_layers(model))
    if _installed() > NEWEST:
        for _, _, owner, _ in found:
            changed = _difference(sys.modules[owner.__module__])
            if changed:
                raise ImportError(
                    f"transformers must be of a version up to {_dotted(NEWEST)} here: {changed}"
                )
        _warn_of_newer([])
    layers = [layer for _, layer, _, _ in found]
    if not any(names for _, _, _, names in found):
        known = ", ".join(MODELS)
        raise ValueError(
            f"model must contain a recurrent layer of transformers ({known}), got {type(model).__name__}"
        )
    for layer in layers:
        owner, forward = _forward(type(layer))
        # With ``use_kernels=True`` a layer without a kernel has the forward of its class as an attribute.
        given = getattr(vars(layer).get("forward", layer.forward), "__func__", None)
        kind = type(layer).__name__
        if _is_accelerated(owner):
            raise ValueError(f"model must have the forwards of its classes, got an accelerated {kind}")
        if owner not in _files_classes(owner) or given not in (type(layer).forward, forward):
            raise ValueError(f"model must have the forwards of its classes, got another one in a {kind}")
    before = [vars(layer).pop("forward", None) for layer in layers]
    for layer in layers:
        layer.__class__ = _accelerated(cast(Any, type(layer)))

    def undo() -> None:
        for layer in layers:
            if "forward" in vars(layer):
                raise ValueError(
                    f"model must have the forwards that accelerate gave it, got one that has been wrapped since in a "
                    f"{type(layer).__name__}: take that away before disable()"
                )
        for layer, forward in zip(layers, before, strict=True):
            layer.__class__ = _plain(type(layer))
            if forward is not None:
                layer.forward = forward

    return Enabled(undo)


@cache
def _accelerated(kind: Any) -> Any:
    """The subclass that `accelerate` gives to layers of the class `kind`."""
    owner, forward = _forward(kind)
    forward = _replacement(owner)(_calling(forward))
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**names, "forward": forward, "__reduce_ex__": _reduce})


def _is_accelerated(kind: type) -> bool:
    return vars(kind).get("__reduce_ex__") is _reduce


def _plain(kind: type) -> Any:
    """The class behind an accelerated class."""
    return kind.__mro__[1]


def _reduce(layer: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Pickle and copy an accelerated layer, whose class no module has under its name."""
    kind = _plain(type(layer))
    _, _, *state = kind.__reduce_ex__(layer, max(protocol, 2))
    return _empty, (kind,), *state


def _empty(kind: Any) -> nn.Module:
    accelerated = _accelerated(kind)
    return accelerated.__new__(accelerated)


def runs_on(model: nn.Module) -> list[Row]:
    """List the functions that the recurrent layers of a model of transformers call, and the op behind each.

    Args:
        model: A model of transformers, or any module that contains its layers or subclasses of them.

    Returns:
        A list of `Row`, in the order of the layers: ``(layer, kind, function, runs_on, why)``.

    Raises:
        TypeError: If `model` is no module.
    """
    _check(model)
    rows = []
    for path, layer, owner, names in _layers(model):
        if not names:
            continue
        kind, chain = type(layer).__name__, _chain(layer)
        if _forward(type(layer))[0] is not owner:
            rows.append(
                Row(
                    path, kind, "forward", _origin(chain[-1]), f"a forward of its own, not {owner.__name__}'s"
                )
            )
            continue
        changed = _difference(sys.modules[owner.__module__])
        enabled = bool(_enabled) and not changed
        replaced = vars(owner)["forward"] in chain and (_is_accelerated(owner) or enabled)
        for name in names:
            # A forward from elsewhere, such as a kernel of the Hub, replaces all functions of the layer.
            bound = getattr(chain[-1], "__globals__", {}).get(name, chain[-1])
            op = FORWARD_OPS[owner.__name__] if name == "forward" else FUNCTIONS[name].op
            ours = replaced if name == "forward" else bound is FUNCTIONS[name].function
            if op is None:
                continue
            if ours:
                rows.append(Row(path, kind, name, f"flacompose.ops.{op}", ""))
            else:
                wrapped = name == "forward" and enabled
                why = (
                    "its forward was bound before enable()" if wrapped else "neither enabled nor accelerated"
                )
                rows.append(Row(path, kind, name, _origin(bound), changed or why))
    return rows


def _check(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _chain(layer: nn.Module) -> list[Callable[..., Any]]:
    """The forward of a layer, the function that it wraps, and so on."""
    forward = vars(layer).get("forward", type(layer).forward)
    chain = [getattr(forward, "__func__", forward)]
    while hasattr(chain[-1], "__wrapped__"):
        inner = chain[-1].__wrapped__
        chain.append(getattr(inner, "__func__", inner))
    return chain


def _origin(bound: Any) -> str:
    """The origin of a function, behind the wrapper with which transformers prefers another library."""
    function = _without_kernels(bound)
    function = _enclosed(function).get("implementation", function)
    return f"{function.__module__}.{function.__qualname__}"


def _without_kernels(bound: Any) -> Any:
    """The function behind a module of the package `kernels`."""
    function = getattr(bound.forward, "__func__", bound.forward) if isinstance(bound, nn.Module) else bound
    return _enclosed(function).get("func", function)


def _enclosed(function: Any) -> dict[str, Any]:
    """The variables of outer functions that a function refers to."""
    names = function.__code__.co_freevars if isinstance(function, FunctionType) else ()
    return dict(zip(names, (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())))


def _places() -> Iterator[tuple[ModuleType | type, str, Callable[[Any], Any]]]:
    """The places that `enable` changes: a module or class, a name in it, and a function from old to new value."""
    for module in _modeling_files():
        if _difference(module):
            continue
        for name, (function, _) in FUNCTIONS.items():
            if name in vars(module):
                yield module, name, partial(_instead, function)
        for owner in _owners(module):
            yield owner, "forward", partial(_while_enabled, _replacement(owner))
        if REBOUND in vars(module):
            yield module, REBOUND, _same


def _replacement(owner: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The function from the forward of a class to its replacement."""
    return FORWARDS.get(owner.__name__, plain_layer_forward)


def _instead(function: Callable[..., Any], _: Any) -> Callable[..., Any]:
    return function


def _while_enabled(replacement: Callable[[Any], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that calls the replacement until `disable`, then the original. Wrappers may keep it after that."""
    replaced = replacement(original)

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (replaced if _enabled else original)(self, *args, **kwargs)

    return forward


def _checkpoint(holder: ModuleType | type) -> None:
    """Let transformers wrap the new forward of a layer too, if it checkpoints in the outermost wrapper of a forward."""
    for base in getattr(holder, "__mro__", ())[1:]:
        if base.__name__ == "GradientCheckpointingLayer" and "__init_subclass__" in vars(base):
            vars(base)["__init_subclass__"].__func__(holder)


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def same(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return same


def _modeling_files() -> Iterator[ModuleType]:
    """The modeling files of `MODELS` in the installed version of transformers."""
    if find_spec("transformers") is None:
        raise ImportError("transformers must be installed, from 5.17 on: pip install 'transformers>=5.17'")
    if _installed() < OLDEST:
        raise ImportError(
            f"transformers must be of version {_dotted(OLDEST)} or newer, got {_dotted(_installed())}"
        )
    for name in MODELS:
        if find_spec(f"transformers.models.{name}") is not None:
            yield import_module(f"transformers.models.{name}.modeling_{name}")


def _installed() -> tuple[int, ...]:
    """The first two numbers of the installed version of transformers."""
    import transformers

    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _owners(module: ModuleType) -> list[type]:
    """The classes of a modeling file whose forwards are replaced."""
    classes = [owner for owner in vars(module).values() if inspect.isclass(owner)]
    return [owner for owner in classes if owner.__module__ == module.__name__ and _called(owner) is not None]


def _difference(module: ModuleType) -> str:
    """The difference between a modeling file of a newer version and the tested versions; empty if there is none."""
    if _installed() <= NEWEST:
        return ""
    functions = {
        name: _without_kernels(_originals.get((module, name), vars(module)[name]))
        for name in FUNCTIONS
        if name in vars(module)
    }
    found = _tested.difference(
        module, {owner.__name__: bool(_called(owner)) for owner in _owners(module)}, functions
    )
    return found and f"{module.__name__} of transformers {_dotted(_installed())}: {found}"


def _warn_of_newer(changed: list[str]) -> None:
    """Warn that this version of transformers is untested, and name the models that stay unchanged."""
    left = ". It has changed what is replaced, so these models stay as they are: " + "; ".join(changed)
    warnings.warn(
        f"transformers {_dotted(_installed())} is newer than {_dotted(NEWEST)}, the newest version that is tested"
        + (left if changed else ", and has the same names in what is replaced"),
        stacklevel=3,
    )


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, type, list[str]]]:
    """The modules of `model` whose forwards call functions of `FUNCTIONS` or are replaced.

    Yields the path, the module, the class in transformers with the forward, and the names of the called functions:
    ``forward`` if the forward itself is replaced, and no names for a module around a recurrent layer.
    """
    for path, module in model.named_modules():
        for owner in _files_classes(type(module)):
            names = _called(owner)
            if names is not None:
                yield path, module, owner, names
                break


def recurrent_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, type]]:
    """The path, the module and the class in transformers of each layer with a state."""
    for path, module, owner, names in _layers(model):
        if names or FORWARDS.get(owner.__name__) is rwkv.rwkv_channel_mixing_forward:
            yield path, module, owner


def _called(owner: type) -> list[str] | None:
    """The names of `FUNCTIONS` that the forward of a class calls; None if the class is not supported."""
    if owner not in _files_classes(owner):
        return None
    if owner.__name__ in FORWARD_OPS:
        return ["forward"]
    forward: Any = inspect.unwrap(_forward(owner)[1])
    names = [name for name in forward.__code__.co_names if name in FUNCTIONS and name in forward.__globals__]
    return names if names or owner.__name__ in FORWARDS else None


def _files_classes(kind: type) -> list[type]:
    """The class and its bases that have a forward in a modeling file."""
    return [
        base
        for base in kind.__mro__
        if base.__module__.startswith("transformers.models.")
        and isinstance(inspect.unwrap(vars(base).get("forward", object)), FunctionType)
    ]


def _forward(kind: type) -> tuple[type, Callable[..., Any]]:
    """The class that defines the forward of a class, and this forward without `enable`."""
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    return owner, _originals.get((owner, "forward"), vars(owner)["forward"])


def _calling(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of `function`, and of the function that it wraps, that calls the replacements in `FUNCTIONS`."""
    assert isinstance(function, FunctionType)
    inner = getattr(function, "__wrapped__", None)
    scope, closure = function.__globals__, function.__closure__
    if inner is None:
        # Without the name of the module, the compiler looks names up in this scope.
        scope = {name: x for name, x in scope.items() if name != "__name__"}
        scope |= {name: x for name, (x, _) in FUNCTIONS.items() if name in scope}
        scope["__builtins__"] = function.__globals__["__builtins__"]
    else:
        changed = _calling(inner)
        closure = tuple(CellType(changed) if cell.cell_contents is inner else cell for cell in closure or ())
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    for name in ("__module__", "__qualname__", "__doc__"):
        setattr(copy, name, getattr(function, name))
    if inner is not None:
        copy.__wrapped__ = changed  # type: ignore[attr-defined]
    return copy
