"""The registered ops of a decay family: a chunked form and a recurrent one, of the same function, with one backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from torch._ops import OpOverload

from flacompose.ops._define import define_op


def define_family(
    family: str, eager: ModuleType, gates: Sequence[str], option: str
) -> tuple[OpOverload, OpOverload]:
    """Register ``<family>_chunk``, ``<family>_recurrent`` and ``<family>_backward``, return the first two.

    Args:
        family: its name, and that of its folder.
        eager: its `forward` and `backward`, of the arguments ``q, k, v, *gates, initial_state, cu_seqlens, scale`` and
            `option`, the latter with the gradients of the outputs too.
        gates: the names of its gates, each of which may be absent.
        option: its own last argument, with its type in a schema.
    """
    absent = (*gates, "initial_state", "cu_seqlens")
    inputs = ", ".join(
        [*(f"Tensor {x}" for x in "qkv"), *(f"Tensor? {x}" for x in absent), "float scale", option]
    )
    gradients = ", ".join(f"Tensor d{x}" for x in ("q", "k", "v", *gates))
    heads = dict.fromkeys(("q", "k", "v", *gates, "o"), 2) | {"initial_state": 1, "final_state": 1}
    batch = dict.fromkeys(heads, 0)

    def forward_fake(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        cu_seqlens = others[len(gates) + 1]
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return v.new_empty(v.shape), q.new_empty(N, v.shape[2], q.shape[3], v.shape[3], dtype=dtype)

    def backward_fake(*args: Tensor | None) -> tuple[Tensor, ...]:
        q = args[0]
        assert q is not None
        return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in args[: 4 + len(gates)])

    def forward_flops(q, k, v, *_, **__) -> int:
        """The recurrence's own products: one write and one read of the state a token."""
        B, T, H, V = v
        return 4 * B * T * H * q[-1] * V

    def backward_flops(q, k, v, *_, **__) -> int:
        return 2 * forward_flops(q, k, v)

    def triton(name: str) -> Callable[..., tuple[Tensor, ...]]:
        def launched(*args) -> tuple[Tensor, ...]:
            return getattr(import_module(f"flacompose.ops.families.{family}.cuda"), name)(*args)

        return launched

    backward = define_op(
        f"{family}_backward",
        f"({inputs}, Tensor? do, Tensor? d_final_state) -> ({gradients}, Tensor d_initial_state)",
        eager=eager.backward,
        triton=triton("backward"),
        fake=backward_fake,
        heads=heads,
        batch=batch,
        flops=backward_flops,
    )
    chunk, recurrent = (
        define_op(
            f"{family}_{form}",
            f"({inputs}) -> (Tensor o, Tensor final_state)",
            eager=eager.forward,
            triton=triton(form),
            fake=forward_fake,
            backward=backward,
            heads=heads,
            batch=batch,
            autocast=("q", "k", "v"),
            flops=forward_flops,
        )
        for form in ("chunk", "recurrent")
    )
    return chunk, recurrent
