"""Launches of the Triton kernels: what CUDA runs, in float32, bfloat16 and float16."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from flacompose.ops._define import launch
from flacompose.ops._varlen import ChunkTable, chunk_table
from flacompose.ops.families import _launch
from flacompose.ops.families._compile import compile_ahead
from flacompose.ops.families._launch import block, given, operand, operand_dtype, segment_count, tile_count
from flacompose.ops.families.vector_decay import slots
from flacompose.ops.families.vector_decay.kernels import (
    gated_kernel,
    plain_kernel,
    score_kernel,
    state_kernel,
)

CHUNK = 64
LEVELS = CHUNK.bit_length() - 1


@compile_ahead
def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    gv: Tensor | None,
    u: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    softmax: bool,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """``(o [B, T, H, V], final_state [N, H, K, V])``."""
    if softmax:
        q = slots.softmax(q, operand_dtype(v))
    work = _Work(q, v, u, cu_seqlens, scale)
    o = work.per_token(v, torch.float32 if wide else None)
    q, k, v = operand(q), operand(k), operand(v)
    gk, gv, u, initial_state = given(gk), given(gv), given(u), given(initial_state)
    S, final_state = work.sweep(k, v, gk, gv, initial_state)
    if gv is None:
        work.plain(q, k, v, gk, u, S, o)
    else:
        work.gated(q, k, v, None, gk, gv, u, S, None, o)
    return o, final_state


@compile_ahead
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    gv: Tensor | None,
    u: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    softmax: bool,
    wide: bool,
    do: Tensor | None,
    d_final_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(dq, dk, dv, dgk, dgv, du, d_initial_state)``, empty for inputs that are absent."""
    logits = q
    if softmax:
        q = slots.softmax(q, operand_dtype(v))
    work = _Work(q, v, u, cu_seqlens, scale)
    absent = logits.new_empty(0)
    # Of probabilities in float32: it cancels, and may be larger than what float16 holds.
    dq = work.per_token(q, torch.float32 if softmax else None)
    dk, dv, dgk, dgv = (absent if x is None else work.per_token(x) for x in (k, v, gk, gv))
    u_dtype, state_dtype = (None if x is None else x.dtype for x in (u, initial_state))
    do = torch.zeros_like(v) if do is None else do
    q, k, v, do = operand(q), operand(k), operand(v), operand(do)
    gk, gv, u = given(gk), given(gv), given(u)
    initial_state, d_final_state = given(initial_state), given(d_final_state)

    S, _ = work.sweep(k, v, gk, gv, initial_state)
    dS, d_initial_state = work.sweep(q, do, gk, gv, d_final_state, reverse=True)
    mild_k = mild_v = du = None
    if gv is None:
        mild_k = work.plain(k, q, do, gk, u, dS, dv, reverse=True)
    if gk is None and u is None:
        mild_v = work.plain(do, v, k, gv, None, S, dq, transpose=True)
        work.plain(v, do, q, gv, None, dS, dk, reverse=True, transpose=True)
    if gv is not None:
        work.gated(q, k, v, do, gk, gv, u, S, dS, None, dv, dgv, mild=mild_v)
    if gk is not None or u is not None:
        # A bonus is weighed in where a gate is.
        gate, d_gate = (torch.zeros_like(k), torch.empty_like(k)) if gk is None else (gk, dgk)
        if u is not None:  # by chunk, and zeros where there is none
            du = q.new_zeros(work.padded_rows, *u.shape, dtype=torch.float32)
        work.gated(do, v, k, q, gv, gate, u, S, dS, dq, dk, d_gate, du, mild_k, transpose=True)
    return (
        slots.softmax_gradient(logits, dq) if softmax else dq,
        dk,
        dv,
        dgk,
        dgv,
        absent if du is None else du.sum(0).to(u_dtype),
        absent if state_dtype is None else d_initial_state.to(state_dtype),
    )


chunk.backward = backward


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    gv: Tensor | None,
    u: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    softmax: bool,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """``(o [B, T, H, V], final_state [N, H, K, V])``."""
    return _launch.recurrent(q, k, v, None, gk, gv, initial_state, cu_seqlens, scale, u, softmax, wide)


class _Work:
    """How the chunks of one call are laid out, and the launches over them."""

    def __init__(
        self, q: Tensor, v: Tensor, u: Tensor | None, cu_seqlens: Tensor | None, scale: float
    ) -> None:
        B, self.T, self.H, self.K = q.shape
        self.V = v.shape[-1]
        self.scale = scale
        self.table: ChunkTable | None = None
        self.NT = (self.T + CHUNK - 1) // CHUNK
        if cu_seqlens is None:
            self.N, self.rows = B, B * self.NT
        else:
            self.N = cu_seqlens.shape[0] - 1
            self.table = chunk_table(cu_seqlens, self.T, CHUNK)
            self.rows = self.table.start.shape[0]
        # Of buffers: a leading dimension that may be 1 is a guard on the length when it is symbolic.
        self.padded_rows = self.rows + 1
        self.bfloat16 = q.dtype == torch.bfloat16
        self.state_dtype = torch.bfloat16 if self.bfloat16 else torch.float32
        self.flags = {
            "READ_BEFORE": u is not None,
            "PACKED": self.table is not None,
            "DOT": tl.bfloat16 if self.bfloat16 else tl.float32,
            "C": CHUNK,
        }

    def per_token(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An output like `x`; tokens in no sequence are written by nobody."""
        new = x.new_empty if self.table is None else x.new_zeros
        return new(x.shape, dtype=dtype)

    def sweep(
        self,
        a: Tensor,
        x: Tensor,
        gk: Tensor | None,
        gv: Tensor | None,
        initial: Tensor | None,
        reverse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """States before each chunk, ``[rows, H, K, V]``, and the final ones; with `reverse`, backwards in time."""
        N, H, K, V = self.N, self.H, self.K, self.V
        BK, BV, warps, stages = state_config(self.bfloat16, K, V, gk is not None)
        tiles = tile_count(K, BK) * tile_count(V, BV)
        programs = H * tiles if self.table is None else H * tiles * N
        segments = segment_count(self.NT, programs)
        states = a.new_empty(self.padded_rows, H, K, V, dtype=self.state_dtype)
        final = a.new_empty(N, H, K, V, dtype=torch.float32)
        segment_state = segment_gk = segment_gv = None
        split = not (isinstance(segments, int) and segments == 1)
        arguments = {
            "SPLIT": split,
            "BK": BK,
            "BV": BV,
            "HAS_GK": gk is not None,
            "HAS_GV": gv is not None,
            "HAS_INITIAL": initial is not None,
            "REVERSE": reverse,
            **self.flags,
            "num_warps": warps,
            "num_stages": stages,
        }

        def run(whole: bool) -> None:
            launch(
                state_kernel,
                (N * H * tiles * segments,),
                a,
                x,
                gk,
                gv,
                initial,
                segment_state,
                segment_gk,
                segment_gv,
                states,
                final,
                *self._table("start", "end", "first", "last"),
                self.scale,
                self.T,
                self.NT,
                N,
                H,
                K,
                V,
                segments,
                WHOLE=whole,
                **arguments,
            )

        if split:
            # Longer by one, as `padded_rows` are.
            segment_state = final.new_empty(segments + 1, N, H, K, V)
            segment_gk = None if gk is None else final.new_empty(segments + 1, N, H, K)
            segment_gv = None if gv is None else final.new_empty(segments + 1, N, H, V)
            run(whole=False)
        run(whole=True)
        return states, final

    def score(
        self, a: Tensor, b: Tensor, g: Tensor | None, u: Tensor | None, mild: Tensor | None = None
    ) -> Tensor:
        """``P[t, s] = scale * a_t . b_s`` within each chunk, decayed by `g`, or for ``s = t`` weighted by `u`.

        Nothing for the chunks that are ``mild [rows, H]``.
        """
        D = a.shape[-1]
        BD, warps, stages = score_config(self.bfloat16, D)
        P = a.new_empty(self.padded_rows, self.H, CHUNK, CHUNK, dtype=torch.float32)
        launch(
            score_kernel,
            (self.rows * self.H,),
            a,
            b,
            g,
            u,
            P,
            mild,
            *self._table("start", "end"),
            self.scale,
            self.T,
            self.NT,
            self.H,
            D,
            LEVELS=LEVELS,
            BD=BD,
            HAS_G=g is not None,
            **self.flags,
            num_warps=warps,
            num_stages=stages,
        )
        return P

    def plain(
        self,
        a: Tensor,
        b: Tensor,
        x: Tensor,
        g: Tensor | None,
        u: Tensor | None,
        S: Tensor,
        out: Tensor,
        reverse: bool = False,
        transpose: bool = False,
    ) -> Tensor | None:
        """Fill `out` along the value axis or, with `transpose`, along the key axis; `g` and `u` are of the other.

        Returns which chunks of `g` are mild.
        """
        D1, D2, strides = self._axes(transpose)
        BD1, BD2, warps, stages = plain_config(self.bfloat16, D1, D2)
        mild = None if g is None else x.new_empty(self.padded_rows, self.H, dtype=torch.int8)

        for only_mild in (True,) if g is None else (True, False):
            launch(
                plain_kernel,
                (self.rows * self.H * tile_count(D2, BD2),),
                a,
                b,
                x,
                g,
                u,
                S,
                out,
                mild,
                *self._table("start", "end"),
                self.scale,
                self.T,
                self.NT,
                self.H,
                D1,
                D2,
                *strides,
                LEVELS=LEVELS,
                BD1=BD1,
                BD2=BD2,
                HAS_G=g is not None,
                MILD=only_mild,
                REVERSE=reverse,
                **self.flags,
                num_warps=warps,
                num_stages=stages,
            )
        return mild

    def gated(
        self,
        a: Tensor,
        b: Tensor,
        x: Tensor,
        y: Tensor | None,
        g1: Tensor | None,
        g2: Tensor,
        u: Tensor | None,
        S: Tensor,
        dS: Tensor | None,
        read: Tensor | None,
        write: Tensor | None = None,
        gate: Tensor | None = None,
        du: Tensor | None = None,
        mild: Tensor | None = None,
        transpose: bool = False,
    ) -> None:
        """Fill what is given of `read`, `write`, `gate` and `du`.

        Along the value axis or, with `transpose`, along the key axis, that of `u`. `mild` is what `plain` has found of
        `g2`; without it, each tile finds out for itself.
        """
        D1, D2, strides = self._axes(transpose)
        BD1, BD2, warps, stages = gated_config(self.bfloat16, D1, D2)
        tiles = tile_count(D2, BD2)
        # Where its gates are mild, the one tile of an axis that is only read along makes P for itself. What it finds
        # mild is then of whole chunks, as `score` takes it.
        fused = write is None and g1 is None and u is None and isinstance(tiles, int) and tiles == 1
        P = None if fused else self.score(a, b, g1, None if transpose else u)
        known = mild is not None
        if not known:
            mild = x.new_empty(self.padded_rows, self.H, tiles, dtype=torch.int8)
        for only_mild in (True, False):
            if fused and not only_mild:
                P = self.score(a, b, None, None, mild)
            launch(
                gated_kernel,
                (self.rows * self.H * tiles,),
                P,
                a,
                b,
                x,
                y,
                g1,
                g2,
                u if transpose else None,
                S,
                dS,
                read,
                write,
                gate,
                du,
                mild,
                *self._table("start", "end"),
                self.scale,
                self.T,
                self.NT,
                self.H,
                D1,
                D2,
                *strides,
                LEVELS=LEVELS,
                BD1=BD1,
                BD2=BD2,
                HAS_G1=g1 is not None,
                MILD=only_mild,
                KNOWN=known,
                WRITE=write is not None,
                **self.flags,
                num_warps=warps,
                num_stages=stages,
            )

    def _axes(self, transpose: bool) -> tuple[int, int, tuple[int, int]]:
        """Sizes and strides in a state of the axis that is contracted and of the other."""
        return (self.V, self.K, (1, self.V)) if transpose else (self.K, self.V, (self.V, 1))

    def _table(self, *columns: str) -> list[Tensor | None]:
        return [None if self.table is None else getattr(self.table, c) for c in columns]


def state_config(bfloat16: bool, K: int, V: int, has_gk: bool) -> tuple[int, int, int, int]:
    """Block sizes of the state, warps and pipeline stages.

    Gates are worked on once for each tile of the other axis, which is therefore cut least.
    """
    if not bfloat16:
        return block(K, 32), block(V, 32), 4, 2
    if has_gk:
        return _cut(K), block(V, 128), 4, 3
    return block(K, 128), _cut(V), 4, 3


def _cut(D: int) -> int:
    return block(D, 64 if D > 64 else 32)


def score_config(bfloat16: bool, D: int) -> tuple[int, int, int]:
    """Block size of the contracted axis, warps and pipeline stages."""
    return (block(D, 64), 4, 1) if bfloat16 else (block(D, 32), 4, 2)


def plain_config(bfloat16: bool, D1: int, D2: int) -> tuple[int, int, int, int]:
    """Block sizes of the contracted and the other axis, warps and pipeline stages."""
    return (block(D1, 32), block(D2, 128), 4, 3) if bfloat16 else (block(D1, 32), block(D2, 32), 4, 2)


def gated_config(bfloat16: bool, D1: int, D2: int) -> tuple[int, int, int, int]:
    """As `plain_config`. Triton 3.6 miscompiles narrower tiles in bfloat16 on Hopper."""
    return (64, 64, 4, 2) if bfloat16 else (block(D1, 32), block(D2, 32), 4, 2)
