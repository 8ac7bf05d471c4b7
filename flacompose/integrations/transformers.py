"""Models of transformers on the ops of this library: `enable` for all models, `accelerate` for one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import CellType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, NamedTuple

from torch import nn

from flacompose.integrations import _modeling
from flacompose.ops import (
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
)

OLDEST, NEWEST = (5, 17), (5, 23)

# What stands in for each function of a modeling file that this library has an op for. Modeling files look it up by its
# name when they call it, whether transformers has bound it to PyTorch, to flash-linear-attention, to mamba-ssm or to a
# kernel of the hub.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _modeling.convolve,
    "causal_conv1d_update": _modeling.convolve_step,
    "torch_chunk_gated_delta_rule": _modeling.delta_rule(chunk_gated_delta_rule),
    "torch_recurrent_gated_delta_rule": _modeling.delta_rule(fused_recurrent_gated_delta_rule),
    "chunk_kimi_delta_attention": _modeling.delta_rule(chunk_kda),
    "recurrent_kimi_delta_attention": _modeling.delta_rule(fused_recurrent_kda),
    "mamba2_chunk_scan": _modeling.ssd,
    "mamba2_selective_state_update": _modeling.state_space_step,
    "mamba2_split_conv1d_scan_combined": _modeling.no_fused_block,
    "mamba_selective_scan": _modeling.selective_scan,
    "mamba_selective_state_update": _modeling.state_space_step,
    "mamba_inner_fn": _modeling.no_fused_block,
}

# The op that each of them is over, for `runs_on`.
OPS: Mapping[str, str] = {
    "causal_conv1d_fn": "causal_conv1d",
    "causal_conv1d_update": "causal_conv1d",
    "torch_chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule": "fused_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "chunk_kda",
    "recurrent_kimi_delta_attention": "fused_recurrent_kda",
    "mamba2_chunk_scan": "mamba_chunk_scan_combined",
    "mamba2_selective_state_update": "selective_state_update",
    "mamba_selective_scan": "selective_scan_fn",
    "mamba_selective_state_update": "selective_state_update",
    "forward": "chunk_simple_gla",  # that of MiniMaxLightningAttention
}

# What stands in for the forward of a class, made of that forward: where a recurrence is written out in it, where it
# makes copies of queries and keys for an op that needs none, and where the op cannot see what it has to refuse.
FORWARDS: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "FalconMambaMixer": _modeling.scanned_apart,
    "InklingShortConvolution": _modeling.convolved_apart,
    "JambaMambaMixer": _modeling.scanned_apart,
    "Lfm2MoeShortConv": _modeling.convolved_apart,
    "Lfm2ShortConv": _modeling.convolved_apart,
    "Lfm3ShortConv": _modeling.packed_or_cached,
    "MambaMixer": _modeling.scanned_apart,
    "MiniMaxLightningAttention": lambda _: _modeling.lightning_attention,
    "OlmoHybridGatedDeltaNet": _modeling.grouped,
    "Qwen3NextGatedDeltaNet": _modeling.grouped,
    "Qwen3_5GatedDeltaNet": _modeling.grouped,
    "Qwen3_5MoeGatedDeltaNet": _modeling.grouped,
    "Qwen4ExpTextGatedDeltaNet": _modeling.grouped,
    "ZambaMambaMixer": _modeling.scanned_apart,
}

# The same for modules around them, which call them without the bounds of packed sequences.
AROUND: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "FalconMambaBlock": _modeling.passing_to("mixer"),
    "FalconMambaForCausalLM": _modeling.passing_to("backbone"),
    "FalconMambaModel": _modeling.passing_to("layers"),
    "InklingAttention": _modeling.passing_to("k_sconv", "v_sconv"),
    "InklingDecoderLayer": _modeling.passing_to("attn_sconv", "mlp_sconv"),
    "JambaMambaDecoderLayer": _modeling.passing_to("mamba"),
    "Lfm2DecoderLayer": _modeling.passing_to("conv"),
    "Lfm2MoeDecoderLayer": _modeling.passing_to("conv"),
    "Mamba2ForCausalLM": _modeling.passing_to("backbone"),
    "MambaBlock": _modeling.passing_to("mixer"),
    "MambaForCausalLM": _modeling.passing_to("backbone"),
    "MambaModel": _modeling.passing_to("layers"),
}

MODELS = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "glm5_next", "granitemoehybrid", "inkling", "inkling2",
    "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid",
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp", "zamba", "zamba2",
)  # fmt: skip


class Row(NamedTuple):
    """One function that a layer of a model calls."""

    layer: str  # its name in the model
    kind: str  # its class
    function: str  # the name of what it calls, in transformers
    runs_on: str  # the op of this library, or what transformers has bound the name to
    why: str  # why it is not an op of this library; empty if it is


class Enabled:
    """What `enable` and `accelerate` return: undone by `disable`, or on leaving a ``with`` block."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def disable(self) -> None:
        """Undo it. A second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()


def enable() -> Enabled:
    """Run the recurrences of all models of transformers on the ops of this library, in this process.

    Models that were loaded before and models that will be are meant, on CPU and CUDA, in training, in generation, under
    `torch.compile` and in `torch.export`, whatever else is installed: the names that modeling files call are bound to
    the functions of this library. No weight and no configuration changes. What has been compiled before is compiled
    again.

    Returns:
        A handle whose `disable` binds the names as they were. It is a context manager that does so on exit. After
        several calls, the last handle to be disabled does it.

    Raises:
        ImportError: If transformers is not installed, or its version is not one of those that are known.
    """
    for holder, name, replacement in list(_places()):
        if (holder, name) not in _originals:
            original = _originals[holder, name] = vars(holder)[name]
            setattr(holder, name, replacement(original))
    handle = Enabled(lambda: _disable(handle))
    _enabled.append(handle)
    return handle


# The handles that are not disabled, and what modeling files and their classes had before the first of them.
_enabled: list[Enabled] = []
_originals: dict[tuple[ModuleType | type, str], Any] = {}


def _disable(handle: Enabled) -> None:
    _enabled.remove(handle)
    if not _enabled:
        for (holder, name), original in _originals.items():
            setattr(holder, name, original)
        _originals.clear()


def accelerate(model: nn.Module) -> Enabled:
    """Run the recurrences of one model of transformers on the ops of this library, and leave other models alone.

    Each layer gets a forward of its own: that of its class, with other functions by the names that it calls.

    Args:
        model: A model of transformers, or any module that contains layers of one.

    Returns:
        A handle whose `disable` takes these forwards away again. It is a context manager that does so on exit.

    Raises:
        ImportError: If transformers is not installed, or its version is not one of those that are known.
        ValueError: If no layer of `model` calls a function that this library replaces, or one has a forward of its own.
    """
    list(_modeling_files())  # checks the version
    found = list(_layers(model))
    layers = [layer for _, layer, _ in found]
    if not any(names for _, _, names in found):
        known = ", ".join(MODELS)
        raise ValueError(
            f"model must contain a recurrent layer of transformers ({known}), got {type(model).__name__}"
        )
    for layer in layers:
        # With ``use_kernels=True`` a layer for which there is no kernel has the forward of its class as its own.
        given = vars(layer).get("forward", layer.forward)
        if getattr(given, "__func__", None) not in (type(layer).forward, _forward(type(layer))[1]):
            raise ValueError(
                f"model must have the forwards of its classes, got another one in a {type(layer).__name__}"
            )
    before: list[Any] = []
    for layer in layers:
        owner, forward = _forward(type(layer))
        if owner.__name__ in AROUND:
            forward = AROUND[owner.__name__](forward)
        else:
            forward = FORWARDS.get(owner.__name__, _unchanged)(_calling(forward, FUNCTIONS))
        before.append(vars(layer).get("forward"))
        layer.forward = MethodType(forward, layer)

    def undo() -> None:
        for layer, forward in zip(layers, before, strict=True):
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward

    return Enabled(undo)


def runs_on(model: nn.Module) -> list[Row]:
    """What each recurrent layer of a model of transformers calls, and what that runs on now.

    Args:
        model: A model of transformers, or any module that contains layers of one.

    Returns:
        A list of `Row`, in the order of the layers: ``(layer, kind, function, runs_on, why)``.
    """
    rows = []
    for path, layer, names in _layers(model):
        forward = inspect.unwrap(vars(layer).get("forward", type(layer).forward))
        forward = getattr(forward, "__func__", forward)
        for name in names:
            # A forward from elsewhere, such as a kernel of the hub, stands for all that it replaces.
            bound = forward.__globals__.get(name, forward)
            kind = type(layer).__name__
            if name in OPS and bound in (FUNCTIONS.get(name), _modeling.lightning_attention):
                rows.append(Row(path, kind, name, f"flacompose.ops.{OPS[name]}", ""))
            elif name in OPS:
                rows.append(Row(path, kind, name, _origin(bound), "neither enabled nor accelerated"))
    return rows


def _origin(bound: Any) -> str:
    """Where a function comes from, which transformers wraps to prefer another library, and `kernels` as a module."""
    function = getattr(bound.forward, "__func__", bound.forward) if isinstance(bound, nn.Module) else bound
    for name in ("func", "implementation"):
        function = _enclosed(function).get(name, function)
    return f"{function.__module__}.{function.__qualname__}"


def _enclosed(function: Any) -> dict[str, Any]:
    """The variables of an outer function that a function refers to."""
    names = function.__code__.co_freevars if isinstance(function, FunctionType) else ()
    return dict(zip(names, (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())))


def _places() -> Iterator[tuple[ModuleType | type, str, Callable[[Any], Any]]]:
    """What `enable` replaces: where it is, its name there, and the function that makes its replacement of it."""
    for module in _modeling_files():
        for name, function in FUNCTIONS.items():
            if name in vars(module):
                yield module, name, partial(_instead, function)
        for name, replacement in {**FORWARDS, **AROUND}.items():
            if name in vars(module):
                yield vars(module)[name], "forward", replacement


def _modeling_files() -> Iterator[ModuleType]:
    """The modeling files of `MODELS` that the installed transformers has."""
    if find_spec("transformers") is None:
        raise ImportError("transformers must be installed, from 5.17 on: pip install 'transformers>=5.17'")
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not OLDEST <= version <= NEWEST:
        known = " to ".join(".".join(map(str, end)) for end in (OLDEST, NEWEST))
        raise ImportError(f"transformers must be of a version from {known}, got {transformers.__version__}")
    for name in MODELS:
        if find_spec(f"transformers.models.{name}") is not None:
            yield import_module(f"transformers.models.{name}.modeling_{name}")


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """The modules of `model` whose forwards call functions of `FUNCTIONS`: path, module, and the names of these.

    Where the whole forward is replaced, ``forward`` is the name. A module of `AROUND` has no names.
    """
    for path, module in model.named_modules():
        owner, forward = _forward(type(module))
        forward = inspect.unwrap(forward)
        if not isinstance(forward, FunctionType) or not owner.__module__.startswith("transformers.models."):
            continue
        names = [name for name in forward.__code__.co_names if name in forward.__globals__]
        found = [name for name in names if name in FUNCTIONS]
        if not found and owner.__name__ in FORWARDS:
            found = ["forward"]
        if found or owner.__name__ in AROUND:
            yield path, module, found


def _forward(kind: type[nn.Module]) -> tuple[type, Callable[..., Any]]:
    """The class that a module's class has its forward from, and that forward as it is when nothing is enabled."""
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    return owner, _originals.get((owner, "forward"), vars(owner)["forward"])


def _instead(function: Callable[..., Any], _: Any) -> Callable[..., Any]:
    return function


def _unchanged(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def _calling(function: Callable[..., Any], functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """A copy of `function`, and of what it wraps, that finds other functions by the names that it calls."""
    assert isinstance(function, FunctionType)
    inner = getattr(function, "__wrapped__", None)
    scope, closure = function.__globals__, function.__closure__
    if inner is None:
        # Without the module's name the compiler looks names up in this scope and not in the module.
        scope = {name: x for name, x in scope.items() if name != "__name__"}
        scope |= {name: x for name, x in functions.items() if name in scope}
        scope["__builtins__"] = function.__globals__["__builtins__"]
    else:
        changed = _calling(inner, functions)
        closure = tuple(CellType(changed) if cell.cell_contents is inner else cell for cell in closure or ())
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__, copy.__qualname__, copy.__doc__ = (
        function.__module__,
        function.__qualname__,
        function.__doc__,
    )
    if inner is not None:
        copy.__wrapped__ = changed  # type: ignore[attr-defined]
    return copy
