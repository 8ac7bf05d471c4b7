"""The recurrences, as pure functions: inputs are never changed, and states are returned as new tensors."""

import sys
from typing import TYPE_CHECKING

from flacompose._peer import absent_from, explained
from flacompose.ops.abc import chunk_abc
from flacompose.ops.causal_conv1d import causal_conv1d
from flacompose.ops.comba import chunk_comba, fused_recurrent_comba
from flacompose.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from flacompose.ops.dplr_delta_rule import chunk_dplr_delta_rule, fused_recurrent_dplr_delta_rule
from flacompose.ops.gated_delta_product import (
    chunk_gated_delta_product,
    fused_recurrent_gated_delta_product,
)
from flacompose.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from flacompose.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2
from flacompose.ops.gla import chunk_gla, fused_recurrent_gla
from flacompose.ops.gsa import chunk_gsa, fused_recurrent_gsa
from flacompose.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn
from flacompose.ops.iplr_delta_rule import chunk_iplr_delta_rule, fused_recurrent_iplr_delta_rule
from flacompose.ops.kda import chunk_kda, fused_recurrent_kda
from flacompose.ops.lightning_attn import chunk_lightning_attn, fused_recurrent_lightning_attn
from flacompose.ops.linear_attn import chunk_linear_attn, fused_recurrent_linear_attn
from flacompose.ops.linear_recurrence import linear_recurrence
from flacompose.ops.mamba3 import mamba3_mimo_combined, mamba3_siso_combined
from flacompose.ops.mlstm import chunk_mlstm, fused_recurrent_mlstm
from flacompose.ops.retention import chunk_retention, fused_recurrent_retention
from flacompose.ops.rg_lru import chunk_rg_lru, fused_recurrent_rg_lru
from flacompose.ops.rwkv4 import chunk_rwkv4, fused_recurrent_rwkv4
from flacompose.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6
from flacompose.ops.rwkv7 import chunk_rwkv7, fused_recurrent_rwkv7
from flacompose.ops.selective_scan import selective_scan_fn
from flacompose.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla
from flacompose.ops.ssd import mamba_chunk_scan_combined, selective_state_update

__all__ = [
    "causal_conv1d",
    "chunk_abc",
    "chunk_comba",
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn2",
    "chunk_gla",
    "chunk_gsa",
    "chunk_hgrn",
    "chunk_iplr_delta_rule",
    "chunk_kda",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_mlstm",
    "chunk_retention",
    "chunk_rg_lru",
    "chunk_rwkv4",
    "chunk_rwkv6",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "fused_recurrent_comba",
    "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_product",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn2",
    "fused_recurrent_gla",
    "fused_recurrent_gsa",
    "fused_recurrent_hgrn",
    "fused_recurrent_iplr_delta_rule",
    "fused_recurrent_kda",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_mlstm",
    "fused_recurrent_retention",
    "fused_recurrent_rg_lru",
    "fused_recurrent_rwkv4",
    "fused_recurrent_rwkv6",
    "fused_recurrent_rwkv7",
    "fused_recurrent_simple_gla",
    "linear_recurrence",
    "mamba3_mimo_combined",
    "mamba3_siso_combined",
    "mamba_chunk_scan_combined",
    "selective_scan_fn",
    "selective_state_update",
]

if not TYPE_CHECKING:  # a type checker would accept every name through it
    __getattr__ = absent_from(__name__)

for _name in __all__:
    _function = globals()[_name]
    globals()[_name] = _explained = explained(_function)
    setattr(sys.modules[_function.__module__], _name, _explained)
