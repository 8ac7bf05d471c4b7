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
from flacompose.ops.families.delta_rule.kernels import pair_kernel, reverse_kernel, sweep_kernel
from flacompose.ops.families.scalar_decay import cuda as scalar_decay
from flacompose.ops.families.scalar_decay.kernels import gate_kernel
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
    """``(dq, dk, dv, dbeta, dg, dgk, d_initial_state)``, empty where `output_mask` does not want them.

    The state is read twice at each token: by its key, before it writes and with the gradient -dv, and by its query,
    with the gradient do. So the gradients but dv are those of linear attention of twice as many tokens, of which
    the odd ones decay and read, and the even ones write and read.
    """
    inputs, (do, d_final_state, output_mask) = Inputs(*args[:-3]), args[-3:]
    q, k, v, beta, g, gk, initial_state, cu_seqlens, scale = inputs
    wants_q, wants_k, wants_v, wants_beta, wants_g, wants_gk, wants_state = (
        wanted and x is not None for wanted, x in zip(output_mask, inputs)
    )
    rule = _Launches(inputs)
    do = operand(torch.zeros_like(v) if do is None else do)
    dv = rule.per_token(rule.HV, rule.V, dtype=rule.dtype)
    d_initial_state = rule.state(initial_state.dtype) if initial_state is not None and wants_state else None
    rule.reverse(do, operand(d_final_state), dv=dv, d_initial=d_initial_state)
    dv = rule.batched(dv)
    dq = dk = dbeta = dg = dgk = None
    if wants_q or wants_k or wants_beta or wants_g or wants_gk:
        r = rule.per_token(rule.HV, rule.V, dtype=torch.float32)
        rule.sweep(r=r)
        r = rule.batched(r)
        u = (r * beta.unsqueeze(-1)).to(rule.dtype)
        k_, q_ = operand(k), operand(q)
        if gk is not None and g is not None:
            gk = gk + g.unsqueeze(-1)
        if gk is not None:
            k_, q_ = (x.repeat_interleave(rule.HV // x.shape[2], 2) for x in (k_, q_))
        none = torch.zeros_like(k_)
        gates = [None if x is None else _pairwise(x, torch.zeros_like(x)) for x in (g, gk)]
        do_ = _pairwise(-dv, (do * scale).to(rule.dtype))
        tokens = _pairwise(k_, q_), _pairwise(none, k_), _pairwise(torch.zeros_like(u), u)
        cu_seqlens = stretched(cu_seqlens, 2)
        if gk is not None:
            mask = [True, True, True, True, False, False, False]
            given = *tokens, gates[1], None, None, initial_state, cu_seqlens, 1.0, False, False
            d_read, d_write, d_written, dgk, *_ = vector_decay.backward.implementation(
                *given, do_, d_final_state, mask
            )
        else:
            mask = [True, True, True, g is not None, False, False]
            given = *tokens, gates[0], None, initial_state, cu_seqlens, 1.0
            d_read, d_write, d_written, dg, *_ = scalar_decay.backward.implementation(
                *given, do_, d_final_state, mask
            )
        (d_by_k, dq), (_, d_write) = _halves(d_read), _halves(d_write)
        dk = d_by_k + d_write
        solved = _halves(d_written)[1]
        dbeta = (solved * r).sum(-1).to(beta.dtype)
        if gk is not None:
            dgk = _halves(dgk)[0]
            if wants_g:
                dg = dgk.sum(-1).to(inputs.g.dtype)
            dq, dk = (
                x.unflatten(2, (q.shape[2], -1)).sum(3) if x.shape[2] != q.shape[2] else x for x in (dq, dk)
            )
            dgk = None if inputs.gk is None else dgk.to(inputs.gk.dtype)
        elif g is not None:
            dg = _halves(dg)[0]

    def gradient(wanted: bool, dx: Tensor | None, x: Tensor | None) -> Tensor | None:
        return dx.to(x.dtype).contiguous() if wanted and dx is not None and x is not None else None

    return none_as_empty(
        q,
        gradient(wants_q, dq, q),
        gradient(wants_k, dk, k),
        gradient(wants_v, dv, v),
        gradient(wants_beta, dbeta, beta),
        gradient(wants_g, dg, inputs.g),
        gradient(wants_gk, dgk, inputs.gk),
        d_initial_state,
    )


chunk.backward = backward


def recurrent(*args: Any) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    q, k, v, beta, g, gk, initial_state, cu_seqlens, scale = Inputs(*args)
    return _launch.recurrent(q, k, v, initial_state, cu_seqlens, scale, g=g, gk=gk, beta=beta)


def _pairwise(x: Tensor, y: Tensor) -> Tensor:
    """``[B, 2 T, ...]``: the tokens of `x` and of `y` in turn."""
    return torch.stack([x, y], 2).flatten(1, 2)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, 0::2], x[:, 1::2]


class _Launches(MatrixSequences):
    """The launches of one call, and what they have in common."""

    def __init__(self, inputs: Inputs) -> None:
        q, k, v, beta, g, gk, initial_state, cu_seqlens, scale = inputs
        bfloat16 = q.dtype == torch.bfloat16
        self.C = chunk_size(bfloat16, gk is not None)
        super().__init__(q, v, cu_seqlens, self.C)
        self.HV = self.arguments.pop("H")
        self.dtype = operand_dtype(q)
        self.v, self.beta, self.initial = operand(v), operand(beta), operand(initial_state)
        q, k = operand(q), operand(k)
        self.arguments |= {"HV": self.HV, "scale": scale, "K": self.K, "C": self.C}
        self.arguments["DOT"] = tl.bfloat16 if bfloat16 else tl.float32
        self.config = sweep_config(bfloat16, self.C, self.K, self.V)
        if gk is not None and g is not None:
            gk, g = gk + g.unsqueeze(-1), None
        self.gates: dict[str, Tensor | None] = dict.fromkeys(("sums", "rest", "total"))
        if g is not None:
            self.gates["sums"] = self.per_chunk(self.HV, self.C)
            self.gates["rest"] = None if bfloat16 else self.per_chunk(self.HV, self.C)
            self.sum_gates(operand(g))
        of_channels = dict.fromkeys(("q_read", "k_read", "k_write"))
        self.vectors = {"q": q, "k_read": k, "k_write": k}
        if gk is not None:
            of_channels = {name: self.per_token(self.HV, self.K, dtype=self.dtype) for name in of_channels}
            self.gates["total"] = self.per_chunk(self.HV, self.K)
            self.vectors = dict(zip(self.vectors, of_channels.values()))
        self.pairs = {name: self.per_chunk(self.HV, self.C, self.C, dtype=self.dtype) for name in ("P", "Y")}
        launch(
            pair_kernel,
            (self.chunks * self.HV,),
            q=q,
            k=k,
            beta=self.beta,
            gk=operand(gk),
            **self.gates,
            **self.pairs,
            **of_channels,
            **self.arguments,
            H=q.shape[2],
            **pair_config(bfloat16, self.K),
        )
        self.arguments["HK"] = q.shape[2] if gk is None else self.HV

    def sum_gates(self, g: Tensor) -> None:
        launch(
            gate_kernel,
            (self.chunks, tile_count(self.HV, scalar_decay.BH)),
            g=g,
            gamma=None,
            sums=self.gates["sums"],
            rest=self.gates["rest"],
            cu_seqlens=self.cu_seqlens,
            T=self.T,
            N=self.N,
            H=self.HV,
            C=self.C,
            BH=scalar_decay.BH,
        )

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
            beta=self.beta,
            initial=self.initial,
            o=o,
            r=r,
            states=states,
            final=final,
            **self.vectors,
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
        dv: Tensor | None = None,
        d_states: Tensor | None = None,
        d_initial: Tensor | None = None,
    ) -> None:
        """Backwards in time: fill what is given."""
        launch(
            reverse_kernel,
            self.grid(),
            do=do,
            beta=self.beta,
            d_final=d_final,
            dv=dv,
            d_states=d_states,
            d_initial=d_initial,
            **self.vectors,
            **self.gates,
            **self.pairs,
            **self.arguments,
            V=self.V,
            **self.config,
        )

    def grid(self) -> tuple[int]:
        return (tile_count(self.V, self.config["BV"]) * self.HV * self.N,)


def chunk_size(bfloat16: bool, of_channels: bool) -> int:
    """Tokens of a chunk. Gates of channels are worked on in chunks of vector decay."""
    return vector_decay.CHUNK if of_channels else 64 if bfloat16 else 32


def pair_config(bfloat16: bool, K: int) -> dict[str, int]:
    """Block size of the contracted axis, warps and pipeline stages."""
    return {"BK": block(K, 64 if bfloat16 else 32), "num_warps": 4, "num_stages": 1}


def sweep_config(bfloat16: bool, C: int, K: int, V: int) -> dict[str, int]:
    """Block sizes of the contracted axis, which is one block, and of the other, warps and pipeline stages."""
    BK = block(K, 256)
    if not bfloat16:
        return {"BK": BK, "BV": block(V, min(4096 // BK, 32)), "num_warps": 4, "num_stages": 1}
    return {"BK": BK, "BV": block(V, 32 if BK == 256 else 64), "num_warps": 4, "num_stages": 2}
