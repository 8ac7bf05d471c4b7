"""Launches of the Triton kernel: what CUDA runs, in float32, bfloat16 and float16."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose.ops._launching import launch
from flacompose.ops.families._launch import block, tile_count
from flacompose.ops.families._segments import join
from flacompose.ops.families._sequences import Sequences
from flacompose.ops.families._signature import BackwardCall, Gradients
from flacompose.ops.families.scan.inputs import Inputs
from flacompose.ops.families.scan.kernels import scan_kernel

# Tokens of a tile, a divisor of `UNIT`, and pipeline stages: of a scan, of one that finds segments' ends, and by token.
SCAN_CONFIG, END_CONFIG, TOKEN_CONFIG = (8, 4), (16, 1), (1, 1)


def chunk(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D])``."""
    x, g, initial_state, cu_seqlens = inputs
    return _Launches(x, cu_seqlens).forward(x, g, initial_state)


def recurrent(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D])``."""
    x, g, initial_state, cu_seqlens = inputs
    return _Launches(x, cu_seqlens, by_token=True).forward(x, g, initial_state)


def steps(inputs: Inputs, count: int, stride: int) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], states [N, count, D])``."""
    x, g, initial_state, cu_seqlens = inputs
    return _Launches(x, cu_seqlens, by_token=True).forward(x, g, initial_state, count, stride)


def ends(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(end [N, D], sum_g [N, D])``."""
    scan = _Launches(inputs.x, inputs.cu_seqlens)
    end, sum_g = scan.per_sequence(scan.D), scan.per_segment(scan.SEGMENTS, scan.D)
    scan(inputs.x.contiguous(), inputs.g.contiguous(), None, final=end, sum_g=sum_g)
    return end, sum_g[:-1].sum(0)


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    x, g, initial_state, cu_seqlens = call.inputs
    scan = _Launches(x, cu_seqlens)
    dx = scan.per_token(scan.D, dtype=x.dtype) if call.wants("x") else None
    start = call.wanted_input("initial_state")
    d_initial_state = None if start is None else scan.per_sequence(scan.D, dtype=start.dtype)
    dg = decayed = None
    g = g.contiguous()
    if call.wants("g"):
        dg = scan.per_token(scan.D, dtype=g.dtype)
        # The decayed states are in `dg` until it overwrites them, unless it is float16, whose range does not reach
        # down to what strong gates leave of them.
        decayed = dg if g.dtype != torch.float16 else scan.per_token(scan.D, dtype=torch.float32)
        scan(x.contiguous(), g, initial_state, out=decayed, only_decayed=True)
    decayed = None if decayed is dg else decayed
    do = call.do.contiguous()
    scan(do, g, call.arriving.final_state, decayed, out=dx, dg=dg, final=d_initial_state, reverse=True)
    dx, dg = (None if y is None else scan.batched(y) for y in (dx, dg))
    return call.made(x=dx, g=dg, initial_state=d_initial_state)


class _Launches(Sequences):
    """The launches of one call."""

    def __init__(self, x: Tensor, cu_seqlens: Tensor | None, by_token: bool = False) -> None:
        super().__init__(x, cu_seqlens)
        self.D = x.shape[2]
        self.by_token = by_token
        self.BD = block(self.D, 256 if by_token else 64)
        self.tiles = tile_count(self.D, self.BD)
        # A segment has 2,048 tokens at least, and so 64 times 32.
        self.SEGMENTS, self.split = (1, False) if by_token else self.segments(self.T // 32, self.tiles)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        initial_state: Tensor | None,
        count: int | None = None,
        stride: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        o = self.per_token(self.D, dtype=x.dtype)
        final_state = self.per_sequence(*([] if count is None else [count]), self.D)
        self(
            x.contiguous(),
            g.contiguous(),
            initial_state,
            out=o,
            final=final_state,
            count=count,
            stride=stride,
        )
        return self.batched(o), final_state

    def __call__(
        self,
        x: Tensor,
        g: Tensor,
        initial: Tensor | None,
        decayed: Tensor | None = None,
        out: Tensor | None = None,
        dg: Tensor | None = None,
        sum_g: Tensor | None = None,
        final: Tensor | None = None,
        only_decayed: bool = False,
        reverse: bool = False,
        count: int | None = None,
        stride: int | None = None,
    ) -> None:
        """Fill what is given of `out`, `dg`, `sum_g` and `final` from the state `initial`.

        With `reverse`, backwards in time, where `x` is the gradient of h; only this fills `dg`. With `only_decayed`,
        `out` is the decayed state before each token, instead of h. With `count` and `stride`, of a sweep by token,
        `final` is that many states.
        """
        absent = ("initial", "decayed_h", "out", "dg", "ends", "sum_g", "final")

        def sweep(
            config: tuple[int, int] = END_CONFIG, DECAYED: bool = False, **tensors: Tensor | None
        ) -> None:
            C, stages = config
            launch(
                scan_kernel,
                (self.N * self.tiles * self.SEGMENTS,),
                x=x,
                g=g,
                **(dict.fromkeys(absent) | tensors),
                **self.arguments,
                SEGMENTS=self.SEGMENTS,
                D=self.D,
                count=count,
                stride=stride,
                C=C,
                BD=self.BD,
                STAGES=stages,
                DECAYED=DECAYED,
                REVERSE=reverse,
                num_warps=1,
            )

        initial = None if initial is None else initial.contiguous()
        if self.split:
            ends = self.per_segment(self.SEGMENTS, 1, self.D, 1)
            gates = self.per_segment(self.SEGMENTS, self.D) if sum_g is None else sum_g
            sweep(ends=ends, sum_g=gates)
            initial = join(ends, initial, gk=gates)
        outputs = {"decayed_h": decayed, "out": out, "dg": dg, "sum_g": sum_g, "final": final}
        config = TOKEN_CONFIG if self.by_token else SCAN_CONFIG
        sweep(config, only_decayed, initial=initial, **outputs)
