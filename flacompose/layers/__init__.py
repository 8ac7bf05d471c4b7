"""Layers: projections, gates, norms and short convolutions in plain PyTorch around one op of `flacompose.ops`.

Every layer is called the same way,
``layer(hidden_states, state=None, *, attention_mask=None, cu_seqlens=None, num_states=None)``, and returns
``(output, state)``. The state is a new `RecurrentState`, or with `num_states` a `RecurrentStates`. Layers of RWKV7 also
take and return the values of the first layer of a model.
"""

from typing import TYPE_CHECKING

from flacompose._peer import absent_from
from flacompose.layers.abc import ABCAttention
from flacompose.layers.based import BasedLinearAttention
from flacompose.layers.comba import Comba
from flacompose.layers.delta_net import DeltaNet
from flacompose.layers.fused_projections import join_projections
from flacompose.layers.gated_deltanet import GatedDeltaNet
from flacompose.layers.gated_deltaproduct import GatedDeltaProduct
from flacompose.layers.gdn2 import GatedDeltaNet2
from flacompose.layers.gla import GatedLinearAttention
from flacompose.layers.griffin import GriffinRecurrentBlock
from flacompose.layers.gsa import GatedSlotAttention
from flacompose.layers.hgrn import HGRNAttention
from flacompose.layers.hgrn2 import HGRN2Attention
from flacompose.layers.kda import KimiDeltaAttention
from flacompose.layers.lightnet import LightNetAttention
from flacompose.layers.lightning_attn import LightningAttention
from flacompose.layers.linear_attn import LinearAttention
from flacompose.layers.mamba import Mamba
from flacompose.layers.mamba2 import Mamba2
from flacompose.layers.mamba3 import Mamba3
from flacompose.layers.mlstm import MLSTM
from flacompose.layers.multiscale_retention import MultiScaleRetention
from flacompose.layers.norm import GatedRMSNorm, RMSNorm
from flacompose.layers.rebased import ReBasedLinearAttention
from flacompose.layers.rodimus import RodimusAttention
from flacompose.layers.rwkv6 import RWKV6Attention
from flacompose.layers.rwkv7 import RWKV7Attention
from flacompose.layers.short_conv import ShortConvolution
from flacompose.layers.simple_gla import SimpleGatedLinearAttention
from flacompose.layers.state import RecurrentState, RecurrentStates

__all__ = [
    "MLSTM",
    "ABCAttention",
    "BasedLinearAttention",
    "Comba",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "GatedRMSNorm",
    "GatedSlotAttention",
    "GriffinRecurrentBlock",
    "HGRN2Attention",
    "HGRNAttention",
    "KimiDeltaAttention",
    "LightNetAttention",
    "LightningAttention",
    "LinearAttention",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "MultiScaleRetention",
    "RMSNorm",
    "RWKV6Attention",
    "RWKV7Attention",
    "ReBasedLinearAttention",
    "RecurrentState",
    "RecurrentStates",
    "RodimusAttention",
    "ShortConvolution",
    "SimpleGatedLinearAttention",
    "join_projections",
]

if not TYPE_CHECKING:  # a type checker would accept every name through it
    __getattr__ = absent_from(__name__)
