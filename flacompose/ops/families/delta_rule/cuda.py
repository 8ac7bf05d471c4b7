"""Launches of the Triton kernels: what CUDA runs, in float32, bfloat16 and float16."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from flacompose.ops._define import launch
from flacompose.ops._varlen import stretched
from flacompose.ops.families import _launch
from flacompose.ops.families._compile import compile_ahead
from flacompose.ops.families._launch import block, none_as_empty, operand, operand_dtype, tile_count
from flacompose.ops.families._sequences import MatrixSequences
from flacompose.ops.families.delta_rule.inputs import Inputs
from flacompose.ops.families.delta_rule.kernels import (
    key_gradient_kernel,
    pair_kernel,
    query_gradient_kernel,
    reverse_kernel,
    sweep_kernel,
)
from flacompose.ops.families.scalar_decay import cuda as scalar_decay
from flacompose.ops.families.vector_decay import cuda as vector_decay


@compile_ahead
def chunk(*args: Any) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    inputs = Inputs(*args)
    rule = _Launches(inputs)
    o = rule.per_token(rule.HV, rule.V, dtype=inputs.v.dtype)
    final_state = rule.state(torch.float32)
    rule.sweep(o=o, final=final_state)
    return rule.batched(o), final_state


@compile_ahead
def backward(*args: Any) -> tuple[Tensor, ...]:
    """``(dq, dk, dv, dbeta, dg, dgk, d_initial_state)``, empty where `output_mask` does not want them."""
    inputs, (do, d_final_state, output_mask) = Inputs(*args[:-3]), args[-3:]
    wants = {name: wanted and x is not None for name, x, wanted in zip(inputs._fields, inputs, output_mask)}
    by_reads = any(wants[name] for name in ("q", "k", "beta", "g", "gk"))
    rule = _Launches(inputs, with_r=by_reads)
    do = operand(torch.zeros_like(inputs.v) if do is None else do)
    d_final_state = operand(d_final_state)
    of_channels = inputs.gk is not None
    dv = rule.per_token(rule.HV, rule.V, dtype=rule.dtype)
    d_initial_state = None
    if inputs.initial_state is not None and wants["initial_state"]:
        d_initial_state = rule.state(inputs.initial_state.dtype)
    r = S = dS = None
    if by_reads:
        r = rule.per_token(rule.HV, rule.V, dtype=rule.dtype)
        S, dS = (None, None) if of_channels else (rule.per_chunk_state(), rule.per_chunk_state())
        rule.sweep(r=r, states=S)
    rule.reverse(do, d_final_state, dv=dv, d_states=dS, d_initial=d_initial_state)
    rule.free()
    made: dict[str, Tensor] = {"v": rule.batched(dv)}
    if r is not None and of_channels:
        made |= _of_two_reads(inputs, rule, do, d_final_state, rule.batched(r), made["v"])
    elif r is not None:
        made |= rule.gradients(do, r, dv, S, dS, gates=wants["g"])
    tokens = inputs._asdict()
    gradients = [
        made[name].to(tokens[name].dtype) if wants[name] else None
        for name in ("q", "k", "v", "beta", "g", "gk")
    ]
    return none_as_empty(inputs.q, *gradients, d_initial_state)


chunk.backward = backward


def _of_two_reads(
    inputs: Inputs, rule: _Launches, do: Tensor, d_final_state: Tensor | None, r: Tensor, dv: Tensor
) -> dict[str, Tensor]:
    """The gradients but dv, where channels have gates, by their names.

    The state is read twice at each token: by its key, before it writes and with the gradient -dv, and by its query,
    with the gradient do. So they are those of linear attention of twice as many tokens, in pairs, of which the first
    decays and reads, and the second writes and reads.
    """
    (B, T, H, K), HV = inputs.q.shape, rule.HV
    q, k = (operand(x).repeat_interleave(HV // H, 2) for x in (inputs.q, inputs.k))
    assert inputs.gk is not None
    gk = _gates_of_channels(inputs.g, inputs.gk)
    u = (r * inputs.beta.unsqueeze(-1)).to(rule.dtype)

    def in_turn(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([x, y], 2).flatten(1, 2)

    d_read, d_write, d_written, d_gates, *_ = vector_decay.backward.implementation(
        in_turn(k, q),
        in_turn(torch.zeros_like(k), k),
        in_turn(torch.zeros_like(u), u),
        in_turn(gk, torch.zeros_like(gk)),
        None,
        None,
        inputs.initial_state,
        stretched(inputs.cu_seqlens, 2),
        1.0,
        False,
        False,
        in_turn(-dv, (do * inputs.scale).to(rule.dtype)),
        d_final_state,
        [True, True, True, True, False, False, False],
    )
    # In float32: gradients of the same key may cancel, and those of heads that share one are added up.
    dq, dk = d_read[:, 1::2].float(), d_read[:, 0::2].float() + d_write[:, 1::2]
    dq, dk = (x.reshape(B, T, H, HV // H, K).sum(3) for x in (dq, dk))
    dgk = d_gates[:, 0::2].clone(memory_format=torch.contiguous_format)
    return {"q": dq, "k": dk, "beta": (d_written[:, 1::2].float() * r).sum(-1), "gk": dgk, "g": dgk.sum(-1)}


def recurrent(*args: Any) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    q, k, v, beta, g, gk, initial_state, cu_seqlens, scale = Inputs(*args)
    return _launch.recurrent(q, k, v, initial_state, cu_seqlens, scale, g=g, gk=gk, beta=beta)


def _gates_of_channels(g: Tensor | None, gk: Tensor) -> Tensor:
    """``gk [B, T, HV, K]`` with ``g [B, T, HV]`` added, if it is given too."""
    return gk if g is None else gk.float() + g.unsqueeze(-1)


class _Launches(MatrixSequences):
    """The launches of one call, and what they have in common."""

    def __init__(self, inputs: Inputs, with_r: bool = False) -> None:
        q, k, v, beta, g, gk, initial_state, cu_seqlens, scale = inputs
        bfloat16 = q.dtype == torch.bfloat16
        super().__init__(q, v, cu_seqlens, chunk_size(bfloat16, gk is not None))
        self.HV = self.arguments.pop("H")
        self.dtype = operand_dtype(q)
        self.q, self.k, self.v, self.beta = map(operand, (q, k, v, beta))
        self.initial = operand(initial_state)
        self.arguments |= {"HV": self.HV, "scale": scale, "K": self.K, "C": self.C}
        self.arguments["DOT"] = tl.bfloat16 if bfloat16 else tl.float32
        self.config = sweep_config(bfloat16, self.K)
        if gk is not None:
            gk, g = _gates_of_channels(g, gk), None
        self.gates: dict[str, Tensor | None] = dict.fromkeys(("sums", "rest", "total"))
        if g is not None:
            self.gates["sums"], self.gates["rest"] = scalar_decay.sum_gates(self, operand(g), None)
        reads: dict[str, Tensor | None] = dict.fromkeys(("q_read", "k_read"))
        if gk is not None:
            reads = {name: self.per_token(self.HV, self.K, dtype=self.dtype) for name in reads}
            self.gates["total"] = self.per_chunk(self.HV, self.K)
        self.pairs: dict[str, Tensor | None] = {
            "W": self.per_token(self.HV, self.K, dtype=self.dtype),
            "P": self.per_chunk(self.HV, self.C, self.C, dtype=self.dtype),
        }
        self.Y = self.per_chunk(self.HV, self.C, self.C, dtype=self.dtype) if with_r else None
        launch(
            pair_kernel,
            (self.chunks * self.HV,),
            q=self.q,
            k=self.k,
            beta=self.beta,
            gk=operand(gk),
            Y=self.Y,
            **self.gates,
            **self.pairs,
            **reads,
            **self.arguments,
            H=q.shape[2],
            **pair_config(bfloat16, gk is not None),
        )
        self.reads = (
            {"q": self.q, "k": self.k} if gk is None else {"q": reads["q_read"], "k": reads["k_read"]}
        )
        self.arguments["HK"] = q.shape[2] if gk is None else self.HV

    def free(self) -> None:
        """Give back the memory that only sweeps need."""
        self.pairs.clear()
        self.Y = None

    def per_chunk_state(self) -> Tensor:
        """Memory for a state of each chunk."""
        return self.per_chunk(self.HV, self.K, self.V, dtype=self.dtype)

    def sweep(
        self,
        o: Tensor | None = None,
        r: Tensor | None = None,
        states: Tensor | None = None,
        final: Tensor | None = None,
    ) -> None:
        """Forwards in time: fill what is given."""
        launch(
            sweep_kernel,
            self.grid(),
            v=self.v,
            Y=self.Y if r is not None else None,
            initial=self.initial,
            o=o,
            r=r,
            states=states,
            final=final,
            **self.reads,
            **self.gates,
            **self.pairs,
            **self.arguments,
            V=self.V,
            **self.config,
        )

    def reverse(
        self,
        do: Tensor,
        d_final: Tensor | None,
        dv: Tensor,
        d_states: Tensor | None = None,
        d_initial: Tensor | None = None,
    ) -> None:
        """Backwards in time: fill `dv` and what else is given."""
        launch(
            reverse_kernel,
            self.grid(),
            do=do,
            d_final=d_final,
            dv=dv,
            d_states=d_states,
            d_initial=d_initial,
            **self.reads,
            **self.gates,
            **self.pairs,
            **self.arguments,
            V=self.V,
            **self.config,
        )

    def gradients(
        self, do: Tensor, r: Tensor, dv: Tensor, S: Tensor | None, dS: Tensor | None, gates: bool
    ) -> dict[str, Tensor]:
        """The gradients of queries, keys, `beta` and, if wanted, of the gates of heads, by their names."""
        config = gradient_config(self.bfloat16, self.K)
        parts = tile_count(self.K, config["BK"])
        HV, H = self.HV, self.q.shape[2]
        dtype = self.dtype if HV == H else torch.float32
        dq, dk = (self.per_token(HV, self.K, dtype=dtype) for _ in range(2))
        dbeta = self.per_token(parts, HV, dtype=torch.float32)
        d_sums = self.per_chunk(3, 2 * parts, HV, self.C) if gates else None
        d_whole = self.per_chunk(HV, self.K) if gates else None
        arguments = {name: x for name, x in self.arguments.items() if name != "HK"}
        arguments |= {"q": self.q, "k": self.k, "beta": self.beta, "r": r, "do": do, "states": S}
        arguments |= {"sums": self.gates["sums"], "rest": self.gates["rest"], "d_sums": d_sums}
        arguments |= {"H": H, "V": self.V, **config}
        grid = (parts * self.chunks * HV,)
        launch(query_gradient_kernel, grid, dq=dq, **arguments)
        launch(
            key_gradient_kernel, grid, dv=dv, d_states=dS, dk=dk, dbeta=dbeta, d_whole=d_whole, **arguments
        )
        made = {"q": dq, "k": dk}
        made = {
            name: self.batched(x).unflatten(2, (H, -1)).sum(3) if HV != H else self.batched(x)
            for name, x in made.items()
        }
        made["beta"] = self.batched(dbeta).sum(2) if parts > 1 else self.batched(dbeta).squeeze(2)
        if d_sums is not None and d_whole is not None:
            made["g"] = scalar_decay.gate_gradient(self, d_sums, d_whole, 1.0, torch.float32)
        return made

    def grid(self) -> tuple[int]:
        return (tile_count(self.V, self.config["BV"]) * self.HV * self.N,)


def chunk_size(bfloat16: bool, of_channels: bool) -> int:
    """Tokens of a chunk. Gates of channels are worked on in chunks of vector decay."""
    return vector_decay.CHUNK if of_channels else 64 if bfloat16 else 32


# Tiles of products in bfloat16 are 64 wide at least: Triton 3.6 miscompiles narrower ones on Hopper.


def pair_config(bfloat16: bool, of_channels: bool) -> dict[str, int]:
    """Block size of the contracted axis, warps and pipeline stages."""
    return {
        "BK": 64 if bfloat16 else 32,
        "num_warps": 4,
        "num_stages": 1,
    }


def sweep_config(bfloat16: bool, K: int) -> dict[str, int]:
    """Block sizes of the contracted axis, which is one block, and of the other, warps and pipeline stages."""
    BK = block(K, 256)
    if not bfloat16:
        return {"BK": BK, "BV": 16 if BK == 256 else 32, "num_warps": 4, "num_stages": 1}
    if BK == 256:
        return {"BK": BK, "BV": 64, "num_warps": 8, "num_stages": 1}
    return {"BK": max(BK, 64), "BV": 64, "num_warps": 4, "num_stages": 2}


def gradient_config(bfloat16: bool, K: int) -> dict[str, int]:
    """Block sizes of the key axis and of the value axis, which is contracted, warps and pipeline stages."""
    if not bfloat16:
        return {"BK": 32, "BV": 32, "num_warps": 4, "num_stages": 1}
    return {"BK": max(block(K, 128), 64), "BV": 64, "num_warps": 8, "num_stages": 2}
