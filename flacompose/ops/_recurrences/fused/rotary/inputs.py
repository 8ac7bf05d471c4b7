"""The signature of the rotary embedding of Mamba-3: its arguments and results."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from flacompose.ops._operators.signature import Dtype, Signature


class Inputs(NamedTuple):
    """The arguments, in the order of the schema; HV is a multiple of H, and each token has R queries and keys."""

    q: Annotated[Tensor, "B T R H S"]  # S is even
    k: Annotated[Tensor, "B T R H S"]
    v: Annotated[Tensor, "B T HV P"]
    q_bias: Annotated[Tensor, "HV R S"]
    k_bias: Annotated[Tensor, "HV R S"]
    angle: Annotated[Tensor, "B T HV A"]  # in units of pi, of the first A of S / 2 pairs
    # The states before the first token, zeros if absent
    initial_k: Annotated[Tensor | None, "N R HV S"] = None
    initial_v: Annotated[Tensor | None, "N HV P"] = None
    cu_seqlens: Tensor | None = None  # [N + 1]
    halves: bool = False  # pairs are the numbers i and i + S / 2 of a key, not neighbours


class Outputs(NamedTuple):
    """The results."""

    q_turned: Annotated[Tensor, "B T R HV S", Dtype("q")]
    k_before: Annotated[Tensor, "B T R HV S", Dtype("k")]  # the rotated keys of the previous token
    v_before: Annotated[Tensor, "B T HV P", Dtype("v")]
    products: Annotated[Tensor, "B T HV R R"]  # of each query and each key of a token
    last_k: Annotated[Tensor, "N R HV S", Dtype("k")]  # the rotated keys of a sequence's last token
    last_v: Annotated[Tensor, "N HV P", Dtype("v")]


SIGNATURE = Signature(Inputs, Outputs)
