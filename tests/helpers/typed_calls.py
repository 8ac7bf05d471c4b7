"""What a type checker and an editor know of calls: read by `make types`, never run.

An error that is ignored here has to be one, as mypy warns of those that are not.
"""

from __future__ import annotations

from functools import partial

import torch
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
from flacompose.ops import (
    chunk_gla,
    fused_recurrent_rwkv4,
    mamba_chunk_scan_combined,
    selective_scan_fn,
)


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


def operators(x: Tensor) -> None:
    """States need no test for None, and results no test for a tuple, in compiled functions either.

    Overloads would say more of a call, and less of a compiled one: of these, type checkers see only the first.
    """
    for function in (chunk_gla, torch.compile(chunk_gla), partial(chunk_gla, output_final_state=True)):
        o, state = function(x, x, x, x, output_final_state=True)
        assert_type(o, Tensor)
        state.shape.numel()
    fused_recurrent_rwkv4(x, x, x, x, output_final_state=True)[1][0].shape.numel()
    y = mamba_chunk_scan_combined(x, x, x, x, x, 64)
    y, states = selective_scan_fn(x, x, x, x, x, return_last_state=True)
    chunk_gla(x, x, x)  # type: ignore[call-arg]
    chunk_gla(x, x, x, x, output_final_states=True)  # type: ignore[call-arg]
