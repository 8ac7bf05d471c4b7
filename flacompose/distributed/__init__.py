"""Layers and models on several devices, by ``torch.distributed``. Importing flacompose does not import it."""

from flacompose.distributed.context_parallel import context_parallel
from flacompose.distributed.tensor_parallel import tensor_parallel_plan

__all__ = ["context_parallel", "tensor_parallel_plan"]
