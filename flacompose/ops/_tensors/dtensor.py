"""Operations on distributed tensors (DTensors) that PyTorch computes wrongly or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from flacompose._errors import TypeError


def replicated(x: Tensor, like: Tensor) -> Tensor:
    """``x``, equal on every rank, as a DTensor if `like` is one, since PyTorch does not mix both."""
    mesh = getattr(like, "device_mesh", None)
    if mesh is None:
        return x
    from torch.distributed.tensor import DTensor, Replicate  # slow to import, and here already imported

    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def shards(x: Any, dim: int) -> int:
    """The number of shards of an axis of a DTensor; of a plain tensor, 1."""
    mesh = getattr(x, "device_mesh", None)
    if mesh is None:
        return 1
    return prod([mesh.size(i) for i, p in enumerate(x.placements) if p.is_shard(dim % x.ndim)])


def unflatten(x: Any, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """``x.unflatten(dim, sizes)``, also if shards of a DTensor begin or end within the new parts.

    Such a DTensor is gathered along this axis first. Its shards fit the parts if the number of ranks divides
    the first of `sizes` that is above 1.
    """
    ranks = shards(x, dim)
    if ranks > 1 and next((size for size in sizes if size > 1), 1) % ranks != 0:
        x = _gathered(x, dim)
    return x.unflatten(dim, sizes)


def flatten(x: Tensor, start: int, end: int) -> Tensor:
    """``x.flatten(start, end)``; the gradient of a DTensor first gets the shards of the result.

    The gradient may arrive with other shards, which PyTorch could not unflatten along the outer axis. If the
    size of that axis is 1, any shards will do.
    """
    y = x.flatten(start, end)
    return _with_own_gradient(y) if hasattr(x, "device_mesh") and x.shape[start] > 1 else y


def with_dense_gradient(x: Tensor) -> Tensor:
    """``x``, whose gradient, if it is a DTensor, gets the strides that PyTorch expects."""
    if hasattr(x, "device_mesh") and x.requires_grad:
        x.register_hook(partial(torch.clone, memory_format=torch.contiguous_format))
    return x


def split(x: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
    """``x.split(sizes, dim)``, also if some parts of a DTensor get no gradient.

    PyTorch would concatenate the parts' gradients with plain zeros for an absent one, and cannot concatenate
    these with DTensors. So each part of a DTensor is a slice of its own, although its gradient is then padded
    with zeros to the size of `x`.
    """
    if not hasattr(x, "device_mesh"):
        return x.split(sizes, dim)
    x = _gathered(x, dim)
    starts = accumulate(sizes, initial=0)
    return [_with_own_gradient(x.narrow(dim, start, size)) for start, size in zip(starts, sizes)]


def unbind(x: Tensor) -> Sequence[Tensor]:
    """``x.unbind()``, also if some parts of a DTensor get no gradient, as in `split`."""
    return [x[i] for i in range(x.shape[0])] if hasattr(x, "device_mesh") else x.unbind()


def _gathered(x: Any, dim: int) -> Any:
    """The DTensor, gathered along an axis: every rank has the whole axis."""
    from torch.distributed.tensor import Replicate

    cut = dim % x.ndim
    return x.redistribute(placements=[Replicate() if p.is_shard(cut) else p for p in x.placements])


def _with_own_gradient(x: Any) -> Any:
    """A DTensor whose gradient gets the same shards."""
    return x.redistribute(placements=x.placements)


def of_shards(function: Callable[[Tensor], Tensor], x: Any, moved: int) -> Any:
    """``function(x)`` on the local shard if `x` is a DTensor; sharded axes move by `moved` in the result."""
    mesh = getattr(x, "device_mesh", None)
    if mesh is None:
        return function(x)
    dims = _cut(x)
    y = function(x.redistribute(placements=_placed(dims)).to_local())
    shape = list(y.shape)
    for d in dims:
        if d is not None:
            shape[d + moved] = x.shape[d]
    return _distributed(y, mesh, _placed([None if d is None else d + moved for d in dims]), shape)


def by_channels(function: Callable[..., Sequence[Tensor]], x: Any, *others: Any) -> list[Tensor]:
    """``function(x, *others)``; if `x` is a DTensor, computed by each rank for its own channels.

    The channels are the axes from the third on, of `x` and of all tensors with as many axes, results
    included. Other arguments have no channels, and are None or whole on every rank.
    """
    from torch.distributed.tensor import DTensor

    dims = _cut(x, first=2)
    given = [
        y.redistribute(placements=_placed(dims if y.ndim == x.ndim else [None] * len(dims))).to_local()
        if isinstance(y, DTensor)
        else y
        for y in (x, *others)
    ]
    return [
        _distributed(y, x.device_mesh, _placed(dims), [*y.shape[:2], *x.shape[2:]]) for y in function(*given)
    ]


def _cut(x: Any, first: int = 0) -> list[int | None]:
    """The axis of the DTensor, from the `first` on, that each dimension of the mesh shards, or None."""
    # `p.dim` would be dynamic for the compiler.
    return [next((d for d in range(first, x.dim()) if p.is_shard(d)), None) for p in x.placements]


def _placed(dims: Sequence[int | None]) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if d is None else Shard(d) for d in dims]


def _distributed(x: Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> Tensor:
    """The DTensor of this `shape`, which is explicit because ranks may have shards of different sizes."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        x.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def by_shard(
    function: Callable[..., Sequence[Tensor]], s: Any, z: Any, cu_seqlens: Any, output_states: int | None
) -> list[Tensor]:
    """``function(s, z, cu_seqlens, output_states)``, computed by each rank for its own rows and heads.

    It is for functions of independent rows and heads, with operations that DTensor lacks. ``s [B,
    T, H, ...]`` is a DTensor, and so are ``z [N, H, ...]`` and ``cu_seqlens`` unless they are absent. The
    first two results are like `s`, the third like `z` or, with `output_states`, like `s` with that many
    tokens.
    """
    from torch.distributed.tensor import DTensor

    if z is not None and not isinstance(z, DTensor):
        raise TypeError(
            "initial_state[2], the running logsumexp, must be a DTensor, as s is, got a plain tensor"
        )
    mesh, joined = s.device_mesh, (1,) if cu_seqlens is None else (0, 1)
    dims = [None if d in joined else d for d in _cut(s)]
    of_s, of_z = _placed(dims), _placed([None if d is None else max(d - 1, 0) for d in dims])
    N = s.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    results = function(
        s.redistribute(mesh, of_s).to_local(),
        None if z is None else z.redistribute(mesh, of_z).to_local(),
        cu_seqlens.full_tensor() if isinstance(cu_seqlens, DTensor) else cu_seqlens,
        output_states,
    )
    of_last = (of_z, N, *s.shape[2:]) if output_states is None else (of_s, N, output_states, *s.shape[2:])
    layouts = (of_s, *s.shape), (of_s, *s.shape), of_last
    return [_distributed(x, mesh, placements, shape) for x, (placements, *shape) in zip(results, layouts)]
