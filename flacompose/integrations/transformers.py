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


# By the names in modeling files, which look them up when they call them, whether transformers has bound a name to
# PyTorch, to flash-linear-attention, to mamba-ssm or to a kernel of the hub.
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
# The recurrence of MiniMax is written out in its forward. The other forwards call modules of theirs for it.
FORWARD_OPS = {
    "MiniMaxLightningAttention": "chunk_simple_gla",
    "RecurrentGemmaRecurrentBlock": "chunk_rg_lru",
    "RwkvSelfAttention": "chunk_rwkv4",
    "ZayaCCAProjection": "causal_conv1d",
    "xLSTMLayer": "chunk_mlstm",
}

# The tables of all models: by the names of classes, functions from the forward of a class to the one that replaces it.
# Other classes that call functions above get `plain_layer_forward`.
FORWARDS: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    name: replacement
    for model in (
        bamba, falcon_h1, glm5_next, inkling, kimi_linear, lfm2, mamba, mamba2, minimax, qwen3_next, recurrent_gemma,
        rwkv, xlstm, zaya,
    )
    for names, replacement in model.FORWARDS.items()
    for name in names.split()
}  # fmt: skip

# The projections of a class that read the same input, with small ones last. Kimi's `f_a_proj` reads it too, but the
# module of the forget gate calls it.
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

# A function that their forwards call. It is bound to one that does the same, since the guards of a compiled model ask
# whether the functions that it calls are the same as before, and do not ask that of forwards.
REBOUND = "apply_mask_to_padding_states"

MODELS = tuple(_tested.LAYERS)


def join_projections(model: nn.Module) -> None:
    """Make those projections of each layer in a model of transformers that read the same input one matrix product.

    It is [join_projections][flacompose.layers.join_projections] for Qwen3-Next, Qwen3.5 and Kimi Linear: their layers
    of the delta rule, their softmax attention and their dense feed-forward networks. Only `f_a_proj` of
    Kimi Linear, which is within the module of its forget gate, stays by itself. It changes `model` in place, which
    computes what it computed before, up to rounding, with fewer kernels: a token of a small batch takes most of its
    time to launch them. Each of these layers then has a ``joint_proj`` for its projections, so its state dict is not
    that of transformers: load a checkpoint before this call, after which ``save_pretrained`` raises RuntimeError. Where
    the model is neither enabled nor accelerated, a call of it raises TypeError.

    Args:
        model: A model of transformers, or any module that contains layers of one.

    Raises:
        TypeError: If `model` is no module, or a projection in it is not a plain ``nn.Linear`` with plain parameters.
        ValueError: If `model` contains no layer whose projections can be joined, or they differ in dtype, device or
            whether they require gradients, have hooks, or share memory. After an error nothing is changed.
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
    except (TypeError, ValueError):  # of the checks, before anything is joined
        for module in new:
            del module.fusible, module.joint_sizes
        raise
    if hasattr(model, "save_pretrained"):
        vars(model)["save_pretrained"] = _refuse_to_save


def _refuse_to_save(*_: Any, **__: Any) -> None:
    # Loaded again, transformers would draw the projections that it does not find, and only log that.
    raise RuntimeError(
        "save_pretrained must be called before join_projections, whose model has joint projections, which transformers "
        "does not load; save its state_dict with torch.save, and load it after join_projections"
    )


class Row(NamedTuple):
    """One function that a layer of a model calls."""

    layer: str  # its name in the model
    kind: str  # its class
    function: str  # its name in transformers
    runs_on: str  # the op of this library, or the function that transformers has bound the name to
    why: str  # why it is not an op of this library; empty if it is


class Enabled:
    """A handle of `enable` or `accelerate`, which is undone by `disable`, or on leaving a ``with`` block."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def disable(self) -> None:
        """Undo it. A second call does nothing."""
        if self._undo is not None:
            self._undo()
        self._undo = None

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()


def enable() -> Enabled:
    """Run the recurrences of all models of transformers on the ops of this library, in this process.

    Models that were loaded before and models that will be are meant, on CPU and CUDA, in training, in generation, under
    `torch.compile` and in `torch.export`, whatever else is installed: the names that modeling files call are bound to
    the functions of this library. No weight and no configuration changes. A model that was compiled before is compiled
    again. A module whose forward another library has wrapped before, such as accelerate's hooks, keeps that forward,
    with other functions by the names that it calls; `runs_on` says where that is not enough.

    Returns:
        A handle whose `disable` binds the names as they were. It is a context manager that does so on exit. After
        several calls, the last handle to be disabled does it.

    Raises:
        ImportError: If transformers is not installed, or is older than the oldest version that is tested.

    Warns:
        UserWarning: If transformers is newer than the newest version that is tested. Files in which it has changed what
            this library relies on are named, and their models left as they are.
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


# The handles that are not disabled, and the values in modeling files and their classes before the first of them.
_enabled: list[Enabled] = []
_originals: dict[tuple[ModuleType | type, str], Any] = {}
_lock = Lock()  # of both


def _disable(handle: Enabled) -> None:
    with _lock:
        _enabled.remove(handle)
        if not _enabled:
            for (holder, name), original in _originals.items():
                setattr(holder, name, original)
            _originals.clear()


def accelerate(model: nn.Module) -> Enabled:
    """Run the recurrences of one model of transformers on the ops of this library, and leave other models alone.

    Each layer gets a class of the same name with a forward of its own: the forward of its class, with other functions
    by the names that it calls. Copies and pickles of an accelerated model are accelerated too, and stay so.

    Args:
        model: A model of transformers, or any module that contains layers of one.

    Returns:
        A handle whose `disable` gives the layers their classes back. It is a context manager that does so on exit. It
        raises ValueError, and changes nothing, if another library has wrapped the forward of a layer since.

    Raises:
        ImportError: If transformers is not installed, is older than the oldest version that is tested, or is newer than
            the newest and has changed what this library relies on in the file of `model`.
        ValueError: If no layer of `model` calls a function that this library replaces, or one has a forward of its own,
            as one that is accelerated has.
        TypeError: If `model` is no module.

    Warns:
        UserWarning: If transformers is newer than the newest version that is tested, and has changed nothing of that.
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
        # With ``use_kernels=True`` a layer for which there is no kernel has the forward of its class as its own.
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
    """The class that `accelerate` gives to layers of a class."""
    owner, forward = _forward(kind)
    forward = _replacement(owner)(_calling(forward))
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**names, "forward": forward, "__reduce_ex__": _reduce})


def _is_accelerated(kind: type) -> bool:
    return vars(kind).get("__reduce_ex__") is _reduce


def _plain(kind: type) -> Any:
    """The class that `_accelerated` was made of."""
    return kind.__mro__[1]


def _reduce(layer: nn.Module, protocol: int) -> tuple[Any, ...]:
    """For pickles and copies, which cannot find a class by its name that a module does not have."""
    kind = _plain(type(layer))
    _, _, *state = kind.__reduce_ex__(layer, max(protocol, 2))
    return _empty, (kind,), *state


def _empty(kind: Any) -> nn.Module:
    accelerated = _accelerated(kind)
    return accelerated.__new__(accelerated)


def runs_on(model: nn.Module) -> list[Row]:
    """List the functions that each recurrent layer of a model of transformers calls, and the op that each runs on now.

    Args:
        model: A model of transformers, or any module that contains layers of one, or of classes derived from these.

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
            # A forward from elsewhere, such as a kernel of the hub, stands for all that it replaces.
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
    """The functions that a call of a layer goes through: its forward, the function that it wraps, and so on."""
    forward = vars(layer).get("forward", type(layer).forward)
    chain = [getattr(forward, "__func__", forward)]
    while hasattr(chain[-1], "__wrapped__"):
        inner = chain[-1].__wrapped__
        chain.append(getattr(inner, "__func__", inner))
    return chain


def _origin(bound: Any) -> str:
    """Where a function comes from, which transformers wraps to prefer another library."""
    function = _without_kernels(bound)
    function = _enclosed(function).get("implementation", function)
    return f"{function.__module__}.{function.__qualname__}"


def _without_kernels(bound: Any) -> Any:
    """A function that `kernels` wraps as a module."""
    function = getattr(bound.forward, "__func__", bound.forward) if isinstance(bound, nn.Module) else bound
    return _enclosed(function).get("func", function)


def _enclosed(function: Any) -> dict[str, Any]:
    """The variables of an outer function that a function refers to."""
    names = function.__code__.co_freevars if isinstance(function, FunctionType) else ()
    return dict(zip(names, (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())))


def _places() -> Iterator[tuple[ModuleType | type, str, Callable[[Any], Any]]]:
    """The places that `enable` changes: a module or class, a name there, and a function of the old value."""
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
    """The function that makes the forward in place of a class's."""
    return FORWARDS.get(owner.__name__, plain_layer_forward)


def _instead(function: Callable[..., Any], _: Any) -> Callable[..., Any]:
    return function


def _while_enabled(replacement: Callable[[Any], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that calls the replacement until `disable`, then the original: hooks that wrap it keep it longer."""
    replaced = replacement(original)

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (replaced if _enabled else original)(self, *args, **kwargs)

    return forward


def _checkpoint(holder: ModuleType | type) -> None:
    """Let transformers wrap a layer's new forward too, where it checkpoints in the outermost wrapper of a forward."""
    for base in getattr(holder, "__mro__", ())[1:]:
        if base.__name__ == "GradientCheckpointingLayer" and "__init_subclass__" in vars(base):
            vars(base)["__init_subclass__"].__func__(holder)


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def same(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return same


def _modeling_files() -> Iterator[ModuleType]:
    """The modeling files of `MODELS` that the installed transformers has."""
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
    """The first two numbers of the version of transformers that is installed."""
    import transformers

    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _owners(module: ModuleType) -> list[type]:
    """The classes of a modeling file whose forwards are replaced."""
    classes = [owner for owner in vars(module).values() if inspect.isclass(owner)]
    return [owner for owner in classes if owner.__module__ == module.__name__ and _called(owner) is not None]


def _difference(module: ModuleType) -> str:
    """How a modeling file of an untested, newer version differs from the tested ones; empty if it does not."""
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
    """Warn that this transformers is untested, and name the models left unchanged because their files differ."""
    left = ". It has changed what is replaced, so these models stay as they are: " + "; ".join(changed)
    warnings.warn(
        f"transformers {_dotted(_installed())} is newer than {_dotted(NEWEST)}, the newest version that is tested"
        + (left if changed else ", and has the same names in what is replaced"),
        stacklevel=3,
    )


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, type, list[str]]]:
    """The modules of `model` whose forwards call functions of `FUNCTIONS`, or are replaced by one of this library.

    Gives the path, the module, the class in transformers that has the forward, and the names of the functions:
    ``forward`` where the whole forward is replaced, none of a module around it.
    """
    for path, module in model.named_modules():
        for owner in _files_classes(type(module)):
            names = _called(owner)
            if names is not None:
                yield path, module, owner, names
                break


def recurrent_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, type]]:
    """The path, the module and the class in transformers of each layer that hands on something from token to token."""
    for path, module, owner, names in _layers(model):
        if names or FORWARDS.get(owner.__name__) is rwkv.rwkv_channel_mixing_forward:
            yield path, module, owner


def _called(owner: type) -> list[str] | None:
    """The names of `FUNCTIONS` that the forward of a class calls; None if this library does not replace it."""
    if owner not in _files_classes(owner):
        return None
    if owner.__name__ in FORWARD_OPS:
        return ["forward"]
    forward: Any = inspect.unwrap(_forward(owner)[1])
    names = [name for name in forward.__code__.co_names if name in FUNCTIONS and name in forward.__globals__]
    return names if names or owner.__name__ in FORWARDS else None


def _files_classes(kind: type) -> list[type]:
    """The classes that a class is derived from, itself included, with a forward that a file of transformers has."""
    return [
        base
        for base in kind.__mro__
        if base.__module__.startswith("transformers.models.")
        and isinstance(inspect.unwrap(vars(base).get("forward", object)), FunctionType)
    ]


def _forward(kind: type) -> tuple[type, Callable[..., Any]]:
    """The class that a module's class has its forward from, and that forward as it is when nothing is enabled."""
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    return owner, _originals.get((owner, "forward"), vars(owner)["forward"])


def _calling(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of `function`, and of the one that it wraps, that calls the functions of `FUNCTIONS` by their names."""
    assert isinstance(function, FunctionType)
    inner = getattr(function, "__wrapped__", None)
    scope, closure = function.__globals__, function.__closure__
    if inner is None:
        # Without the module's name the compiler looks names up in this scope and not in the module.
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
