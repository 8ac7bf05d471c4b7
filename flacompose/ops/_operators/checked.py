"""`flacompose.checked`: a context in which the values of the inputs of every op are checked, on any device.

`_arguments/call.py` passes the inputs on as the user gave them, and so do a few public functions that check their
arguments themselves.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Mapping
from threading import Lock
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from flacompose._errors import ValueError
from flacompose._torch import FakeTensor, report_from_trace
from flacompose.ops._tensors.packed import check_bounds

# An axis of heads looks like an axis of tokens if it is at least this long, and longer than the axis of tokens.
MANY_HEADS = 64

# PyTorch has one stance per process: the first context of all threads sets it, and the last one resets it.
_lock, _entered = Lock(), 0
_stance: Any = None


class checked:
    """A context in which every op of this library first checks the values of its inputs, to find what is wrong.

    It is for debugging, in eager mode, on any device: it reads values, so that every call waits for the GPU. Functions
    of `torch.compile` run uncompiled within it, so that the ops in them are checked too. It checks every call of
    `flacompose.ops`, by any thread: in layers, in models, in models of transformers. An exported program or a package
    of AOTInductor has operators only, and is not checked.

        with flacompose.checked():
            loss = model(input_ids, labels=labels).loss

    Raises, from a call within it:
        ValueError: If bounds of packed sequences do not ascend from 0 to at most ``T``; if the logarithm of a decay is
            above 0; or if an input is not finite, unless it may be -inf, as a gate that resets the state. Tokens past
            the last bound are not checked. The error names the op, the layer that called it, the argument, the value
            and where it is first.

    Warns, from a call within it:
        UserWarning: If there are two tokens or more, 64 heads or more, and fewer tokens than heads, as if tensors
            ``[B, H, T, ...]`` were given for ``[B, T, H, ...]``.
    """

    def __enter__(self) -> None:
        global _entered, _stance
        if torch.compiler.is_dynamo_compiling():
            report_from_trace("RuntimeError", "flacompose.checked() must be entered outside of compiled code")
        with _lock:
            if _entered == 0:
                _stance = torch.compiler.set_stance("force_eager")
                _stance.__enter__()
            _entered += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _entered
        with _lock:
            _entered -= 1
            if _entered == 0:
                _stance.__exit__(kind, error, trace)


def checking() -> bool:
    """Whether values are to be checked. In a trace nothing is read, and nothing guards on it."""
    return not torch.compiler.is_compiling() and _entered > 0


def check_values(
    tensors: Mapping[str, Any],
    cu_seqlens: Tensor | None = None,
    gates: Collection[str] = (),
    lowest: Collection[str] = (),
) -> None:
    """Check the values of `tensors`, the first of which has an axis of tokens; to be called if `checking`.

    The `gates` are logarithms of decays. They, and the tensors named in `lowest`, may be -inf.
    """
    first_name, first = next(iter(tensors.items()))
    if not isinstance(first, Tensor) or any(map(_has_no_values, tensors.values())):
        return
    T = first.shape[1] if first.dim() > 1 else 1
    end = T
    if cu_seqlens is not None:
        _bounds(cu_seqlens, T)
        end = int(cu_seqlens[-1])
    if first.dim() == 4 and 1 < T < first.shape[2] >= MANY_HEADS:
        warnings.warn(
            f"{first_name} of {_where()} has {T} tokens and {first.shape[2]} heads, "
            f"[B, T, H, ...] = {tuple(first.shape)}: is it head-first?",
            stacklevel=_levels_to_user(),
        )
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            continue
        x = getattr(x, "_local_tensor", x).detach()  # a DTensor's local shard
        if cu_seqlens is not None and x.dim() > 2 and "state" not in name and x.shape[1] % T == 0:
            # A token may have several places, as in a gated delta product.
            x = x[:, : end * (x.shape[1] // T)]
        is_gate = name in gates
        _refuse(name, x, ~(x < torch.inf) if is_gate or name in lowest else ~x.isfinite(), "must be finite")
        if is_gate and name == "A":
            _refuse(
                name,
                x,
                x > 0,
                "must be at most 0, as a rate of decay is",
                ": of a checkpoint, give -exp(A_log)",
            )
        elif is_gate:
            decays = ": these look like decays themselves, so give their logarithms" if _is_decay(x) else ""
            _refuse(name, x, x > 0, "must be at most 0, as the logarithm of a decay is", decays)


def check_parameters(A_log: Tensor | None, dt_bias: Tensor | None) -> None:
    """Check a gate's parameters; to be called if `checking`. A rate of 0 has an `A_log` of -inf."""
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None and not _has_no_values(x):
            x = getattr(x, "_local_tensor", x).detach()
            _refuse(name, x, ~(x < torch.inf) if name == "A_log" else ~x.isfinite(), "must be finite")


def check_steps(name: str, dt: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None = None) -> None:
    """Check time steps without softplus; to be called if `checking`. One below 0 makes the state grow."""
    if not _has_no_values(dt):
        dt = dt if cu_seqlens is None else dt[:, : int(cu_seqlens[-1])]
        dt = dt.detach() if bias is None else dt.detach() + bias.detach()
        _refuse(name, dt, dt < 0, "must be at least 0 where it passes no softplus, its bias added")


def _has_no_values(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_meta or isinstance(x, FakeTensor))


def _bounds(cu_seqlens: Tensor, T: int) -> None:
    try:
        check_bounds(cu_seqlens, T)
    except ValueError as error:
        raise ValueError(f"{error}, in {_where()}") from None


def _is_decay(x: Tensor) -> bool:
    return bool(((x >= 0) & (x <= 1)).all())


def _refuse(name: str, x: Tensor, wrong: Tensor, rule: str, why: str = "") -> None:
    try:
        found = bool(wrong.any())
    except RuntimeError as error:
        raise RuntimeError(
            f"flacompose.checked() reads values, and {name} has none here, as within torch.vmap: leave one of them out"
        ) from error
    if found:
        at = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"{name} {rule}, got {x[at].item():.6g} first at index {at}, {int(wrong.sum())} in all, "
            f"in {_where()}{why}"
        )


def _levels_to_user() -> int:
    """The number of calls of this package, the caller's included, between this one and the user's."""
    levels, frame = 0, sys._getframe(1)
    # PyTorch calls the forward of layers.
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("flacompose", "torch"):
        levels, frame = levels + 1, frame.f_back  # type: ignore[assignment]
    return levels + 1


def _where() -> str:
    """The op that is being called, and the layer that calls it."""
    public = sys.modules["flacompose.ops"].__all__
    op, frame = None, sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("flacompose.ops"):
        if frame.f_code.co_name in public or op is None:
            op = frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            index = getattr(module, "layer_idx", None)
            return f"{op} of {type(module).__name__}" + ("" if index is None else f" with layer_idx={index}")
        frame = frame.f_back  # type: ignore[assignment]
    return str(op)
