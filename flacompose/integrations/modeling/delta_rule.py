"""The gated delta rule and KDA of modeling files, for sequences and for one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flacompose.integrations.modeling.arguments import bounds_of, unwritten
from flacompose.ops._recurrences.matrix import op


def delta_rule(form: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of a function of modeling files that calls `form`, an op or `step` below."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        return form(
            query, key, value, g, beta,
            initial_state=unwritten(initial_state), output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=bounds_of(kwargs),
        )  # fmt: skip

    return attention


def step(
    gate: str, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *,
    output_final_state: bool, use_qk_l2norm_in_kernel: bool, **given: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """One token: `gate` is "g" for decays of heads, "gk" of channels."""
    # Stacked, both gates are one kernel of the compiler. The cast must not round `beta`.
    exact = g.shape == beta.shape and torch.promote_types(g.dtype, beta.dtype) == g.dtype
    if exact and torch.compiler.is_compiling():
        g, beta = torch.stack((g, beta.to(g.dtype))).unbind()
    given |= {gate: g}
    inputs = op.Inputs(query, key, value, beta=beta, scale=query.shape[-1] ** -0.5, delta_rule=True, **given)
    o, state = op.update(*inputs, int(use_qk_l2norm_in_kernel))
    return o, state if output_final_state else None
