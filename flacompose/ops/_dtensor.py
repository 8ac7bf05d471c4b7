"""Constants beside distributed tensors."""

from __future__ import annotations

from torch import Tensor


def replicated(x: Tensor, like: Tensor) -> Tensor:
    """``x``, the same on every rank, as a DTensor if `like` is one: PyTorch mixes no plain tensors with these."""
    mesh = getattr(like, "device_mesh", None)
    if mesh is None:
        return x
    from torch.distributed.tensor import DTensor, Replicate  # slow to import, and here already imported

    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
