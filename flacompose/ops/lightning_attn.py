"""Lightning attention, https://arxiv.org/abs/2405.17381."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose._errors import ValueError
from flacompose.ops._arguments import require
from flacompose.ops._arguments.call import check, run
from flacompose.ops._arguments.intermediate_states import recurrent_form
from flacompose.ops._recurrences.matrix import op
from flacompose.ops._tensors.dtensor import replicated
from flacompose.ops._tensors.dtype import state_dtype


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    decay: str = "tnl",
) -> tuple[Tensor, Tensor | Any]:
    r"""Lightning attention, computed in chunks: the form for training and for prompts.

    $$S_t = e^{-r_h}\, S_{t-1} + k_t v_t^\top \qquad o_t = \text{scale} \cdot S_t^\top q_t$$

    for head $h = 0, 1, \dots, H - 1$ of layer $l$ of $L$, with the rates of

    - "tnl": $r_h = \frac{8 h}{H} (1 - \frac{l}{L})$, from "Various Lengths, Constant Speed: Efficient Language Modeling
      with Lightning Attention" (<https://arxiv.org/abs/2405.17381>) and its TransNormerLLM;
    - "minimax": $r_h = 2^{-8 (h + 1) / H} (1 - \frac{l}{L - 1 + 10^{-5}} + 10^{-5})$, as in the checkpoints of
      MiniMax-01 (<https://arxiv.org/abs/2501.08313>).

    Args:
        q: Queries, ``[B, T, H, K]``, in float32, bfloat16, float16 or float64.
        k: Keys, ``[B, T, H, K]``, in the dtype of `q`.
        v: Values, ``[B, T, HV, V]``, in the dtype of `q`. ``HV`` is a multiple of ``H``, and value head ``h`` uses
            head ``h // (HV / H)`` of queries and keys. ``H`` in the rates is then ``HV``.
        layer_idx: The layer ``l``, from 0.
        num_layers: The number of layers ``L``.
        scale: Factor of the output. Default: ``K ** -0.5``.
        initial_state: State before the first token, ``[N, HV, K, V]``, in any float dtype. Default: zeros.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B`` is
            then 1. Sequences may be empty; tokens past ``cu_seqlens[-1]`` give zeros. Default: ``N = B`` sequences
            of ``T`` tokens.
        decay: "tnl" or "minimax".

    Returns:
        ``(o, final_state)``: `o` is ``[B, T, HV, V]`` in the dtype of `v`, or of autocast where it is on;
            `final_state` is ``[N, HV, K, V]`` in float32 (float64 for float64 inputs), a new tensor, or None unless
            `output_final_state`.

    Raises:
        ValueError: If a shape or a device is wrong, ``K`` or ``V`` is above 512, `scale` is not finite, `layer_idx` is
            no layer of `num_layers`, or `decay` is unknown.
        TypeError: If an argument has the wrong type or dtype.
    """
    scale = require.scale(scale, q)
    inputs = op.Inputs(q, k, v, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale)
    check(op, inputs, output_final_state=output_final_state)
    inputs = inputs._replace(g_gamma=log_decay(v.shape[2], layer_idx, num_layers, decay, q))
    return run(op.chunk, inputs, output_final_state)


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    decay: str = "tnl",
    output_states: int | None = None,
) -> tuple[Tensor, Tensor | Any]:
    """[chunk_lightning_attn][flacompose.ops.chunk_lightning_attn], token by token: the form for decoding.

    It is the same function of the same arguments, derivatives included, for one or a few tokens at a time.

    Args:
        output_states: Number ``n`` of states to return instead of the final one, as in
            [fused_recurrent_gla][flacompose.ops.fused_recurrent_gla]: ``[N, n, HV, K, V]``.
            Default: the final state alone.
    """
    form, wanted = recurrent_form(op, q, output_final_state, cu_seqlens, output_states)
    scale = require.scale(scale, q)
    inputs = op.Inputs(q, k, v, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale)
    check(op, inputs)
    inputs = inputs._replace(g_gamma=log_decay(v.shape[2], layer_idx, num_layers, decay, q))
    return run(form, inputs, wanted)


def log_decay(HV: int, layer_idx: int, num_layers: int, decay: str, q: Tensor) -> Tensor:
    """The decays ``-r_h``, ``[HV]``, in float32 (float64 for float64 queries `q`)."""
    check_decay(layer_idx, num_layers, decay)
    dtype = state_dtype(q.dtype)
    if decay == "tnl":
        rate = 8 / HV * (1 - layer_idx / num_layers)
        g_gamma = torch.linspace(0, -rate * (HV - 1), HV, dtype=dtype, device=q.device)
    else:
        rate = 1 - layer_idx / (num_layers - 1 + 1e-5) + 1e-5
        g_gamma = -rate * torch.logspace(-8 / HV, -8, HV, base=2.0, dtype=dtype, device=q.device)
    return replicated(g_gamma, q)


def check_decay(layer_idx: int, num_layers: int, decay: str) -> None:
    require.integer("layer_idx", layer_idx)
    require.integer("num_layers", num_layers)
    if not 0 <= layer_idx < num_layers:
        raise ValueError(f"layer_idx must be from 0 to num_layers - 1 = {num_layers - 1}, got {layer_idx}")
    if not require.is_one_of(decay, "tnl", "minimax"):
        raise ValueError(f"decay must be 'tnl' or 'minimax', got {decay!r}")
