"""What a type checker and an editor know of calls: read by `make types`, never run.

An error that is ignored here has to be one, as mypy warns of those that are not.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import assert_type

from flacompose.layers import (
    HGRNAttention,
    Mamba2,
    RecurrentState,
    RecurrentStates,
    RWKV7Attention,
    ShortConvolution,
)
from flacompose.models import RecurrentLM


def layers(mamba: Mamba2, hgrn: HGRNAttention, rwkv: RWKV7Attention, x: Tensor) -> None:
    y, state = mamba(x)
    assert_type(mamba(y, state), tuple[Tensor, RecurrentState])
    assert_type(mamba(x, num_states=2), tuple[Tensor, RecurrentStates])
    assert_type(hgrn(x, state, lower_bound=x), tuple[Tensor, RecurrentState])
    assert_type(rwkv(x, state, v_first=x), tuple[Tensor, RecurrentState, Tensor])
    mamba(x, stat=state)  # type: ignore[call-overload]
    mamba(3)  # type: ignore[call-overload]
    mamba(x, lower_bound=x)  # type: ignore[call-overload]


def modules(convolution: ShortConvolution, model: RecurrentLM, x: Tensor) -> None:
    convolution(x, sizes=x)  # type: ignore[arg-type]
    logits, states = model(x)
    assert_type(model(x, states), tuple[Tensor, tuple[RecurrentState, ...]])
    assert_type(model(x, num_states=2), tuple[Tensor, tuple[RecurrentStates, ...]])
