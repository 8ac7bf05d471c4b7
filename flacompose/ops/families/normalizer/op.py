"""The registered ops of the normaliser: `inputs` lists their arguments, `eager` states the recurrence."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from flacompose.ops._dtype import upcast
from flacompose.ops.families._across import across_ranks
from flacompose.ops.families._op import define_ops, start_gradient
from flacompose.ops.families._stretches import Decay
from flacompose.ops.families.normalizer import eager
from flacompose.ops.families.normalizer.inputs import SIGNATURE
from flacompose.ops.families.normalizer.inputs import Inputs as Inputs  # for the public functions
from flacompose.ops.families.scalar_decay import op as scalar_decay


def _flops(q: Any, k: Any, x: Any, *_: Any, **__: Any) -> int:
    """A write and a read of the state for each token, and one division for each element of the output."""
    return 4 * prod(x[:-1]) * q[-1] + prod(x)


_ops = define_ops("normalizer", SIGNATURE, eager, forms=("chunk", "recurrent"), flops=_flops)
recurrent, steps = _ops["recurrent"], _ops["steps"]
d_start = start_gradient(SIGNATURE, _ops["backward"])


def stretch(inputs: Inputs) -> tuple[Decay, Tensor]:
    """What the tokens of each sequence do to a state: that of scalar decay with values of 1, in float32."""
    q, k, ones = upcast(inputs.q), upcast(inputs.k), inputs.g.new_ones(*inputs.g.shape, 1)
    written = upcast(inputs.beta)
    decay, end = scalar_decay.stretch(
        scalar_decay.Inputs(
            q, k, ones.to(k.dtype), inputs.g, None, written, None, inputs.cu_seqlens, scale=1.0
        )
    )
    return Decay(tuple(x.squeeze(3) for x in decay.tensors)), end.squeeze(3)


chunk = across_ranks(SIGNATURE, _ops["chunk"], _ops["backward"], stretch, d_start)
