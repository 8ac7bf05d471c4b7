"""The ranks that share the tokens of each sequence, and their communication during a sequence parallel call.

`flacompose.distributed.context_parallel` makes such calls. Every function that passes a state from one token
to the next asks `sharing()` whether it must be passed from rank to rank as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flacompose._errors import ValueError
from flacompose._torch import collectives
from flacompose.ops._operators.bounds import verified
from flacompose.ops._tensors.dtensor import of_shards


class Ranks(NamedTuple):
    """A group of processes, each with the tokens that follow those of the one before it."""

    group: str  # its name in torch.distributed
    rank: int  # of this process
    size: int
    device: str  # the type of device of its communication


_ranks: Ranks | None = None


def sharing() -> Ranks | None:
    """The ranks of the current call, None for a call of this process alone."""
    return _ranks


@contextmanager
def shared(ranks: Ranks | None) -> Iterator[None]:
    """A context in which calls are sequence parallel across these ranks."""
    global _ranks
    before, _ranks = _ranks, ranks
    try:
        yield
    finally:
        _ranks = before


def refuse_second_derivatives() -> None:
    """Raise in a backward in which gradients are enabled: it is to be differentiated again."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("a call across ranks has no second derivative: create_graph must be False")


def check_device(ranks: Ranks, name: str, x: Any) -> None:
    """Check, before any communication, that the ranks can send results computed from the tensor `x`."""
    if isinstance(x, Tensor) and x.device.type != ranks.device:
        raise ValueError(f"{name} must be on the device of the mesh, {ranks.device}, got {x.device}")


def gathered(ranks: Ranks, x: Tensor) -> Tensor:
    """``[size, *x.shape]``: `x` of every rank. It has no gradient."""

    def gather(x: Tensor) -> Tensor:
        rows = collectives.all_gather_into_tensor(x.reshape(-1), ranks.size, ranks.group)
        return collectives.wait_tensor(rows).view(ranks.size, *x.shape)

    return of_shards(gather, x, 1)


class _OfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, rank: int, size: int, device: str) -> Tensor:
        ctx.group, ctx.size = group, size
        return gathered(Ranks(group, rank, size, device), x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_second_derivatives()

        def own_share(d_rows: Tensor) -> Tensor:
            total = collectives.reduce_scatter_tensor(d_rows.reshape(-1), "sum", ctx.size, ctx.group)
            return collectives.wait_tensor(total).view(d_rows.shape[1:])

        return of_shards(own_share, grads[0], -1), None, None, None, None


def of_all(ranks: Ranks, x: Tensor) -> Tensor:
    """``[size, *x.shape]``: `x` of every rank. Its gradient is the sum of the gradients of all ranks."""
    return _OfAll.apply(x, *ranks)


def lengths_of_ranks(ranks: Ranks, T: int, device: torch.device) -> Tensor:
    """``[size]``, the number of tokens of each rank; this one has ``T``."""
    return gathered(ranks, torch.full((1,), T, dtype=torch.int64, device=device)).flatten()


def bounds_of_rank(ranks: Ranks, cu_seqlens: Tensor | None, T: int) -> Tensor | None:
    """The bounds of sequences within this rank's ``T`` tokens, from those in the whole row, `cu_seqlens`."""
    if cu_seqlens is None:
        return None
    lengths = lengths_of_ranks(ranks, T, cu_seqlens.device)
    return (verified(cu_seqlens, T, lengths).long() - lengths[: ranks.rank].sum()).clamp(0, T)
