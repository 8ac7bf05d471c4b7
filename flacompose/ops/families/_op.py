"""The registered ops of a family: a chunked form and a recurrent one, of the same function, with one backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from flacompose.ops._define import define_op
from flacompose.ops._dtype import state_dtype


def define_forms(
    family: str,
    eager: ModuleType,
    inputs: str,
    tokens: Sequence[str],
    fake: Callable[..., tuple[Tensor, ...]],
    autocast: Mapping[str, str | None],
    flops: Callable[..., int],
    shared: Sequence[str] = (),
) -> tuple[OpOverload, OpOverload]:
    """Register ``<family>_chunk``, ``<family>_recurrent`` and ``<family>_backward``, return the first two.

    Args:
        family: its name, and that of its folder.
        eager: its `forward` and `backward`, the latter of the gradients of the outputs too.
        inputs: their arguments, as a schema has them: first `tokens`, `shared` and ``initial_state``, among others
            ``cu_seqlens``.
        tokens: the names of those with gradients that are ``[B, T, ...]``, independent along the dimension after.
        fake: of ``(o, final_state)``.
        autocast: as `define_op` takes it.
        flops: of the forward.
        shared: the names of those with gradients that are ``[H, ...]``, the same for all tokens.
    """
    gradients = ", ".join(f"Tensor d{x}" for x in (*tokens, *shared, "_initial_state"))
    by_row = dict.fromkeys((*tokens, "o"), 2) | {"initial_state": 1, "final_state": 1}
    heads = by_row | dict.fromkeys(shared, 0)
    batch = dict.fromkeys(by_row, 0) | dict.fromkeys(shared, None)

    def backward_fake(*args: Tensor | None) -> tuple[Tensor, ...]:
        first = args[0]
        assert first is not None
        return tuple(
            first.new_empty(0) if x is None else x.new_empty(x.shape)
            for x in args[: len(tokens) + len(shared) + 1]
        )

    def triton(name: str) -> Callable[..., tuple[Tensor, ...]]:
        def launched(*args) -> tuple[Tensor, ...]:
            return getattr(import_module(f"flacompose.ops.families.{family}.cuda"), name)(*args)

        return launched

    backward = define_op(
        f"{family}_backward",
        f"({inputs}, Tensor? do, Tensor? d_final_state) -> ({gradients})",
        eager=eager.backward,
        triton=triton("backward"),
        fake=backward_fake,
        heads=heads,
        batch=batch,
        flops=lambda *args, **kwargs: 2 * flops(*args, **kwargs),
    )
    chunk, recurrent = (
        define_op(
            f"{family}_{form}",
            f"({inputs}) -> (Tensor o, Tensor final_state)",
            eager=eager.forward,
            triton=triton(form),
            fake=fake,
            backward=backward,
            heads=heads,
            batch=batch,
            autocast=autocast,
            flops=flops,
        )
        for form in ("chunk", "recurrent")
    )
    return chunk, recurrent


def define_family(
    family: str,
    eager: ModuleType,
    gates: Sequence[str],
    shared: Sequence[str] = (),
    options: str = "",
    wide: bool = False,
    exempt: str | None = None,
) -> tuple[OpOverload, OpOverload]:
    """`define_forms` of a family of matrices.

    Its arguments are ``q, k, v``, `gates`, `shared`, ``initial_state, cu_seqlens, scale`` and `options`.

    Args:
        family: its name, and that of its folder.
        eager: its `forward` and `backward`.
        gates: the names of its gates, each of which may be absent.
        shared: likewise, of what all tokens share.
        options: its own last arguments, with their types in a schema.
        wide: whether its very last is ``bool wide``, which gives the output in the dtype of states.
        exempt: which of its own arguments keeps autocast from casting `q`.
    """
    optional = (*gates, *shared, "initial_state", "cu_seqlens")
    tensors = [*(f"Tensor {x}" for x in "qkv"), *(f"Tensor? {x}" for x in optional)]
    inputs = ", ".join([*tensors, "float scale", *filter(None, [options, "bool wide" if wide else ""])])

    def fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
        N, dtype = rows(q, others[len(optional) - 1]), state_dtype(q.dtype)
        o = v.new_empty(v.shape, dtype=dtype if wide and others[-1] else v.dtype)
        return o, q.new_empty(N, v.shape[2], q.shape[3], v.shape[3], dtype=dtype)

    def flops(q, k, v, *_, **__) -> int:
        """The recurrence's own products: one write and one read of the state a token."""
        B, T, H, V = v
        return 4 * B * T * H * q[-1] * V

    tokens, autocast = ("q", "k", "v", *gates), {"q": exempt, "k": None, "v": None}
    return define_forms(family, eager, inputs, tokens, fake, autocast, flops, shared)


def rows(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """The number of sequences in ``x [B, T, ...]``."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
