"""What a layer carries from one call to the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class RecurrentState(NamedTuple):
    """The state of one layer after the last token of each of ``N`` sequences: a pytree of tensors.

    Attributes:
        recurrent: ``[N, H, K, V]``, float32 (float64 in a float64 layer).
        conv: One ``[N, D, W]`` per short convolution of the layer, in their order (q, k, v): the last ``W`` inputs of
            each sequence, the newest in column ``W - 1``, in the dtype of the layer's projections. Empty without them.
    """

    recurrent: Tensor
    conv: tuple[Tensor, ...] = ()

    def detach(self) -> RecurrentState:
        """The same values cut off from their history: the boundary of truncated backpropagation through time."""
        return RecurrentState(self.recurrent.detach(), tuple(c.detach() for c in self.conv))


# torch.export.load reads example inputs with weights_only.
torch.serialization.add_safe_globals([RecurrentState])
# torch.export.save refuses a named tuple it has no name for, and torch has no public way to give it one.
pytree._register_namedtuple(RecurrentState, serialized_type_name="flacompose.layers.RecurrentState")
