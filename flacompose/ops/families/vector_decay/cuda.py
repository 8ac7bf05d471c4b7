"""Launches of the Triton kernels: what CUDA runs, in float32, bfloat16 and float16."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from flacompose.ops._define import launch
from flacompose.ops.families import _launch
from flacompose.ops.families._compile import compile_ahead
from flacompose.ops.families._launch import block, none_as_empty, operand, operand_dtype, tile_count
from flacompose.ops.families._sequences import Sequences
from flacompose.ops.families.vector_decay import slots
from flacompose.ops.families.vector_decay.inputs import Inputs
from flacompose.ops.families.vector_decay.kernels import (
    C,
    gated_kernel,
    plain_kernel,
    score_kernel,
    state_kernel,
)

CHUNK = C.value


@compile_ahead
def chunk(*args: Any) -> tuple[Tensor, Tensor]:
    """``(o [B, T, H, V], final_state [N, H, K, V])``."""
    q, k, v, gk, gv, u, initial_state, cu_seqlens, scale, softmax, full_precision = Inputs(*args)
    if softmax:
        q = slots.softmax(q, operand_dtype(v))
    chunks = _Launches(q, v, u, cu_seqlens, scale)
    o = chunks.per_token(*v.shape[2:], dtype=torch.float32 if full_precision else v.dtype)
    final_state = chunks.state(torch.float32)
    q, k, v, initial_state = operand(q), operand(k), operand(v), operand(initial_state)
    gk, gv, u = operand(gk), operand(gv), operand(u)
    S = chunks.states(k, v, gk, gv, initial_state, final_state)
    if gv is None:
        chunks.plain(q, k, v, gk, u, S, o)
    else:
        chunks.gated(q, k, v, None, gk, gv, u, S, None, read=o)
    return chunks.batched(o), final_state


@compile_ahead
def backward(*args: Any) -> tuple[Tensor, ...]:
    """``(dq, dk, dv, dgk, dgv, du, d_initial_state)``, empty where `output_mask` does not want them."""
    inputs, (do, d_final_state, output_mask) = Inputs(*args[:-3]), args[-3:]
    q, k, v, gk, gv, u, initial_state, cu_seqlens, scale, softmax, full_precision = inputs
    logits = q
    if softmax:
        q = slots.softmax(q, operand_dtype(v))
    chunks = _Launches(q, v, u, cu_seqlens, scale)
    tokens = zip((q, k, v, gk, gv), output_mask)
    dq, dk, dv, dgk, dgv = (
        # The gradient of probabilities is float32: its terms cancel, and may be larger than float16 can hold.
        chunks.per_token(*x.shape[2:], dtype=torch.float32 if softmax and x is q else x.dtype)
        if x is not None and wanted
        else None
        for x, wanted in tokens
    )
    du, d_initial_state, u_dtype = None, None, None if u is None else u.dtype
    if u is not None and output_mask[5]:
        # By chunk, and zeros where there is none.
        du = q.new_zeros(chunks.chunks + 1, *u.shape, dtype=torch.float32)
    if initial_state is not None and output_mask[6]:
        d_initial_state = chunks.state(initial_state.dtype)
    do = torch.zeros_like(v) if do is None else do
    q, k, v, do = operand(q), operand(k), operand(v), operand(do)
    gk, gv, u = operand(gk), operand(gv), operand(u)

    S = dS = mild_k = mild_v = None
    of_gates = dgk is not None or dgv is not None
    if dq is not None or of_gates:
        S = chunks.states(k, v, gk, gv, operand(initial_state))
    stored = dk is not None or dv is not None or of_gates
    if stored or d_initial_state is not None:
        final = operand(d_final_state)
        dS = chunks.states(q, do, gk, gv, final, d_initial_state, stored=stored, reverse=True)
    if gv is None and dv is not None:
        mild_k = chunks.plain(k, q, do, gk, u, dS, dv, reverse=True)
    if gk is None and u is None:
        if dq is not None:
            mild_v = chunks.plain(do, v, k, gv, None, S, dq, transpose=True)
        if dk is not None:
            mild_v = chunks.plain(v, do, q, gv, None, dS, dk, reverse=True, transpose=True)
    if gv is not None:
        chunks.gated(q, k, v, do, gk, gv, u, S, dS, write=dv, dg2=dgv, mild=mild_v)
    if gk is not None or u is not None:
        outputs = {"read": dq, "write": dk, "dg2": dgk, "du": du}
        chunks.gated(do, v, k, q, gv, gk, u, S, dS, mild=mild_k, transpose=True, **outputs)

    dq, dk, dv, dgk, dgv = (None if x is None else chunks.batched(x) for x in (dq, dk, dv, dgk, dgv))
    if softmax and dq is not None:
        dq = slots.softmax_gradient(logits, dq)
    if du is not None:
        du = du.sum(0).to(u_dtype)
    return none_as_empty(logits, dq, dk, dv, dgk, dgv, du, d_initial_state)


chunk.backward = backward


def recurrent(*args: Any) -> tuple[Tensor, Tensor]:
    """``(o [B, T, H, V], final_state [N, H, K, V])``."""
    q, k, v, gk, gv, u, initial_state, cu_seqlens, scale, softmax, full_precision = Inputs(*args)
    gates = {"gk": gk, "gv": gv, "u": u}
    return _launch.recurrent(
        q, k, v, initial_state, cu_seqlens, scale, softmax=softmax, full_precision=full_precision, **gates
    )


class _Launches(Sequences):
    """The launches of one call, and what they have in common."""

    def __init__(
        self, q: Tensor, v: Tensor, u: Tensor | None, cu_seqlens: Tensor | None, scale: float
    ) -> None:
        super().__init__(q, cu_seqlens, CHUNK)
        self.H, self.K = q.shape[2:]
        self.V = v.shape[3]
        self.bfloat16 = q.dtype == torch.bfloat16
        self.arguments |= {
            "scale": scale,
            "H": self.H,
            "READ_BEFORE": u is not None,
            "DOT": tl.bfloat16 if self.bfloat16 else tl.float32,
        }

    def state(self, dtype: torch.dtype) -> Tensor:
        return self.per_sequence(self.H, self.K, self.V, dtype=dtype)

    def axes(self, transpose: bool) -> dict[str, int]:
        """Sizes and strides in a state of the axis that is contracted and of the one that is written."""
        K, V = self.K, self.V
        D1, D2, stride1, stride2 = (V, K, 1, V) if transpose else (K, V, V, 1)
        return {"D1": D1, "D2": D2, "stride1": stride1, "stride2": stride2}

    def states(
        self,
        a: Tensor,
        x: Tensor,
        gk: Tensor | None,
        gv: Tensor | None,
        initial: Tensor | None,
        final: Tensor | None = None,
        stored: bool = True,
        reverse: bool = False,
    ) -> Tensor | None:
        """The state before each chunk, ``[chunks, H, K, V]``, if `stored`; with `reverse`, backwards in time.

        Fills `final`, if it is given.
        """
        H, K, V = self.H, self.K, self.V
        config = state_config(self.bfloat16, K, V, gk is not None)
        tiles = tile_count(K, config["BK"]) * tile_count(V, config["BV"])
        SEGMENTS, split = self.segments(self.chunks_of_row, H * tiles)
        dtype = torch.bfloat16 if self.bfloat16 else torch.float32
        states = self.per_chunk(H, K, V, dtype=dtype) if stored else None
        ends: dict[str, Tensor | None] = dict.fromkeys(("segment_state", "segment_gk", "segment_gv"))
        if split:
            ends["segment_state"] = self.per_segment(SEGMENTS, H, K, V)
            ends["segment_gk"] = None if gk is None else self.per_segment(SEGMENTS, H, K)
            ends["segment_gv"] = None if gv is None else self.per_segment(SEGMENTS, H, V)
        for find_ends in (True, False) if split else (False,):
            launch(
                state_kernel,
                (tiles * SEGMENTS * self.N * H,),
                a=a,
                x=x,
                gk=gk,
                gv=gv,
                initial=initial,
                **ends,
                states=None if find_ends else states,
                final=None if find_ends else final,
                **self.arguments,
                K=K,
                V=V,
                SEGMENTS=SEGMENTS,
                SPLIT=split,
                ENDS=find_ends,
                REVERSE=reverse,
                **config,
            )
        return states

    def score(
        self, a: Tensor, b: Tensor, g: Tensor | None, u: Tensor | None, mild: Tensor | None = None
    ) -> Tensor:
        """``P[t, s] = scale * a_t . b_s`` within each chunk, decayed by `g`, or for ``s = t`` weighted by `u`.

        Nothing for the chunks that are ``mild [chunks, H]``.
        """
        D = a.shape[-1]
        P = self.per_chunk(self.H, CHUNK, CHUNK)
        launch(
            score_kernel,
            (self.chunks * self.H,),
            a=a,
            b=b,
            g=g,
            u=u,
            P=P,
            mild=mild,
            **self.arguments,
            D=D,
            **score_config(self.bfloat16, D),
        )
        return P

    def plain(
        self,
        a: Tensor,
        b: Tensor,
        x: Tensor,
        g: Tensor | None,
        u: Tensor | None,
        S: Tensor | None,
        out: Tensor,
        reverse: bool = False,
        transpose: bool = False,
    ) -> Tensor | None:
        """Fill `out` along the value axis or, with `transpose`, along the key axis; `g` and `u` are of the other.

        Returns which chunks of `g` are mild.
        """
        axes = self.axes(transpose)
        config = plain_config(self.bfloat16, axes["D1"], axes["D2"])
        mild = None if g is None else self.per_chunk(self.H, dtype=torch.int8)
        for only_mild in (True,) if g is None else (True, False):
            launch(
                plain_kernel,
                (tile_count(axes["D2"], config["BD2"]) * self.chunks * self.H,),
                a=a,
                b=b,
                x=x,
                g=g,
                u=u,
                S=S,
                out=out,
                mild=mild,
                **self.arguments,
                **axes,
                MILD=only_mild,
                REVERSE=reverse,
                **config,
            )
        return mild

    def gated(
        self,
        a: Tensor,
        b: Tensor,
        x: Tensor,
        y: Tensor | None,
        g1: Tensor | None,
        g2: Tensor | None,
        u: Tensor | None,
        S: Tensor | None,
        dS: Tensor | None,
        read: Tensor | None = None,
        write: Tensor | None = None,
        dg2: Tensor | None = None,
        du: Tensor | None = None,
        mild: Tensor | None = None,
        transpose: bool = False,
    ) -> None:
        """Fill what is given of `read`, `write`, `dg2` and `du`.

        Along the value axis or, with `transpose`, along the key axis, that of `u`. `mild` is what `plain` has found of
        `g2`; without it, each tile finds out for itself.
        """
        writes, reads = write is not None or dg2 is not None, read is not None or dg2 is not None
        if not (writes or reads or du is not None):
            return
        if g2 is None:  # beside a bonus
            g2 = torch.zeros_like(x)
        axes = self.axes(transpose)
        config = gated_config(self.bfloat16, axes["D1"], axes["D2"])
        tiles = tile_count(axes["D2"], config["BD2"])
        # Where only reads are wanted and one tile holds the whole axis, the kernel makes P itself for chunks whose
        # gates are mild. The tile sees all gates of a chunk, so `mild` tells `score` which whole chunks to leave out.
        fused = not writes and g1 is None and u is None and isinstance(tiles, int) and tiles == 1
        P = None if fused else self.score(a, b, g1, None if transpose else u)
        known = mild is not None
        if mild is None:
            mild = self.per_chunk(self.H, tiles, dtype=torch.int8)
        for only_mild in (True, False):
            if fused and not only_mild:
                P = self.score(a, b, None, None, mild)
            launch(
                gated_kernel,
                (tiles * self.chunks * self.H,),
                P=P,
                a=a,
                b=b,
                x=x,
                y=y,
                g1=g1,
                g2=g2,
                u=u if transpose else None,
                S=S if reads else None,
                dS=dS if writes else None,
                read=read,
                write=write,
                dg2=dg2,
                du=du,
                mild=mild,
                **self.arguments,
                **axes,
                MILD=only_mild,
                KNOWN=known,
                **config,
            )


def state_config(bfloat16: bool, K: int, V: int, has_gk: bool) -> dict[str, int]:
    """Block sizes of the state, warps and pipeline stages.

    Gates are worked on once for each tile of the other axis, which is therefore cut least.
    """
    if not bfloat16:
        return {"BK": block(K, 32), "BV": block(V, 32), "num_warps": 4, "num_stages": 2}
    BK, BV = (_cut(K), block(V, 128)) if has_gk else (block(K, 128), _cut(V))
    return {"BK": BK, "BV": BV, "num_warps": 4, "num_stages": 3}


def _cut(D: int) -> int:
    return block(D, 64 if D > 64 else 32)


def score_config(bfloat16: bool, D: int) -> dict[str, int]:
    """Block size of the contracted axis, warps and pipeline stages."""
    return {"BD": block(D, 64 if bfloat16 else 32), "num_warps": 4, "num_stages": 1 if bfloat16 else 2}


def plain_config(bfloat16: bool, D1: int, D2: int) -> dict[str, int]:
    """Block sizes of the contracted and the other axis, warps and pipeline stages."""
    BD2, stages = (block(D2, 128), 3) if bfloat16 else (block(D2, 32), 2)
    return {"BD1": block(D1, 32), "BD2": BD2, "num_warps": 4, "num_stages": stages}


def gated_config(bfloat16: bool, D1: int, D2: int) -> dict[str, int]:
    """As `plain_config`. Triton 3.6 miscompiles narrower tiles in bfloat16 on Hopper."""
    BD1, BD2 = (64, 64) if bfloat16 else (block(D1, 32), block(D2, 32))
    return {"BD1": BD1, "BD2": BD2, "num_warps": 4, "num_stages": 2}
