"""The ranks that share out the tokens of each sequence, and what they tell each other during a call across them.

`flacompose.distributed.context_parallel` makes such calls. Whatever hands something on from one token to the next asks
`sharing()` whether it has to be handed on from rank to rank as well.
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
    device: str  # the kind of device that it communicates from


_ranks: Ranks | None = None


def sharing() -> Ranks | None:
    """The ranks of the call that is being made, None for a call of this process alone."""
    return _ranks


@contextmanager
def shared(ranks: Ranks | None) -> Iterator[None]:
    """Within it, calls are made across these ranks."""
    global _ranks
    before, _ranks = _ranks, ranks
    try:
        yield
    finally:
        _ranks = before


def refuse_second_derivatives() -> None:
    """To be called in a backward, in which gradients are on where it is to be differentiated again."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("a call across ranks has no second derivative: create_graph must be False")


def check_device(ranks: Ranks, name: str, x: Any) -> None:
    """Check, before anything is sent, that the ranks can send what is made of the tensor `x`."""
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
    """``[size, *x.shape]``: `x` of every rank, to whose gradients every rank adds its own."""
    return _OfAll.apply(x, *ranks)


def lengths_of_ranks(ranks: Ranks, T: int, device: torch.device) -> Tensor:
    """``[size]``, how many tokens each rank has, of which this one has ``T``."""
    return gathered(ranks, torch.full((1,), T, dtype=torch.int64, device=device)).flatten()


def bounds_of_rank(ranks: Ranks, cu_seqlens: Tensor | None, T: int) -> Tensor | None:
    """The bounds within this rank's ``T`` tokens of sequences whose bounds in the whole row are `cu_seqlens`."""
    if cu_seqlens is None:
        return None
    lengths = lengths_of_ranks(ranks, T, cu_seqlens.device)
    return (verified(cu_seqlens, T, lengths).long() - lengths[: ranks.rank].sum()).clamp(0, T)
