"""Launches of the Triton kernels: what CUDA runs, in float32, bfloat16 and float16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launching import launch
from flacompose.ops.families import _launch
from flacompose.ops.families._launch import operand, tile_count
from flacompose.ops.families._signature import BackwardCall, Gradients
from flacompose.ops.families.delta_rule.sweeps import Sweeps
from flacompose.ops.families.low_rank.gradients import (
    pair_gradient_kernel,
    read_gradient_kernel,
    write_gradient_kernel,
)
from flacompose.ops.families.low_rank.inputs import Inputs
from flacompose.ops.families.low_rank.kernels import factor_kernel, pair_kernel
from flacompose.ops.families.vector_decay.cuda import CHUNK

OF_KEYS = ("q", "k", "a", "b")


def chunk(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, H, V], final_state [N, H, K, V])``."""
    return _Launches(inputs, backward=False).chunk(inputs.v.dtype)


def ends(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(end [N, H, K, V], matrix [N, H, K, K])``."""
    return _Launches(inputs._replace(initial_state=None), backward=False).map()


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    of_vectors = call.wants(*OF_KEYS, "gk")
    rule = _Launches(call.inputs, backward=of_vectors)
    do, d_final_state = operand(call.do), operand(call.arriving.final_state)
    start = call.wanted_input("initial_state")
    d_initial_state = None if start is None else rule.state(start.dtype)
    dv = rule.per_token(rule.HV, rule.V, dtype=rule.dtype)
    if not of_vectors:
        rule.reverse(do, d_final_state, dv=dv, d_initial=d_initial_state)
        return call.made(v=rule.batched(dv), initial_state=d_initial_state)
    u, du, S, dS = (
        *(rule.scratch(rule.HV, rule.V) for _ in range(2)),
        *(rule.per_chunk_state() for _ in range(2)),
    )
    rule.sweep(r=u, states=S)
    rule.reverse(do, d_final_state, dv=dv, du=du, d_states=dS, d_initial=d_initial_state)
    made = rule.gradients(do, u, du, S, dS, gates=call.wants("gk"))
    return call.made(**made, v=rule.batched(dv), initial_state=d_initial_state)


def recurrent(inputs: Inputs, count: int | None = None, stride: int | None = None) -> tuple[Tensor, Tensor]:
    """``(o [B, T, H, V], final_state [N, H, K, V])``, or ``[N, count, H, K, V]`` with `count` and `stride`."""
    return _launch.recurrent(**inputs._asdict(), count=count, stride=stride)


steps = recurrent


class _Launches(Sweeps):
    """The launches of one call, and what they have in common."""

    def __init__(self, inputs: Inputs, backward: bool) -> None:
        q, k, v, a, b, gk, initial_state, cu_seqlens, scale, read_before = inputs
        super().__init__(q, v, initial_state, cu_seqlens, scale, CHUNK)
        H, C = self.HV, self.C
        self.vectors: dict[str, Tensor | None] = {
            name: operand(x) for name, x in zip((*OF_KEYS, "gk"), (q, k, a, b, gk))
        }
        self.values = operand(v)
        # What all kernels of this family take.
        self.common = {name: x for name, x in self.arguments.items() if name not in ("HV", "C", "scale")}
        self.common["H"] = H
        self.read_before = read_before and gk is not None
        tiles = tile_count(self.K, factor_config(self.bfloat16)["BK"])
        P, Y, M, X = (self.per_chunk(H, C, C, dtype=self.dtype) for _ in range(4))
        parts: dict[str, Tensor | None] = {"Y": Y, "M": M, "X": X}
        for name, x in (("Y", Y), ("M", M), ("X", X)):
            parts[f"{name}_rest"] = torch.empty_like(x) if self.bfloat16 else None
        made = {name: self.scratch(H, self.K) for name in ("Q", "W_a", "W", "b_write")}
        # Without gates the vectors are what they are.
        self.at_middle = {f"{name}_middle": self.vectors[name] for name in OF_KEYS}
        middle: dict[str, Tensor | None] = dict.fromkeys(self.at_middle)
        mild = self.mild_gradient = None
        if gk is not None:
            mild, self.gates["total"] = self.per_chunk(H, dtype=torch.int8), self.per_chunk(H, self.K)
            if backward:
                middle = self.at_middle = {name: self.scratch(H, self.K) for name in middle}
                self.mild_gradient = self.per_chunk(H, tiles, dtype=torch.int8)
        arguments = {**self.vectors, **parts, "mild": mild, **self.common, "READ_BEFORE": self.read_before}
        given = {"P": P, "scale": scale, **arguments, **pair_config(self.bfloat16, self.K)}
        self.launch_by_gates(pair_kernel, self.chunks * H, given, gk is not None)
        arguments |= {**made, **middle, "total": self.gates["total"], "mild_gradient": self.mild_gradient}
        given = {**arguments, **factor_config(self.bfloat16)}
        self.launch_by_gates(factor_kernel, tiles * self.chunks * H, given, gk is not None)
        self.scale, self.pairs = scale, {"Y": Y, "X": X}
        self.factors |= {"q": made["Q"], "k": made["W_a"], "W": made["W"], "b": made["b_write"]}
        self.factors |= {"P": P, "Y": M}
        self.arguments |= {"HK": H, "SEGMENTS": self.row.count}

    def gradients(
        self, do: Tensor, u: Tensor, du: Tensor, S: Tensor, dS: Tensor, gates: bool
    ) -> dict[str, Tensor]:
        """The gradients of all vectors and, if wanted, of gates, by the names of the inputs."""
        self.free_sweep_memory()
        H, K, C = self.HV, self.K, self.C
        of_values = {"u": u, "v": self.values, "do": do, "z": self.scratch(H, self.V)}
        products = {
            "pairs": self.per_chunk(H, 6 if self.bfloat16 else 4, C, C, dtype=self.dtype),
            "diagonal": self.per_chunk(H, 2, C),
        }
        arguments: dict[str, Any] = {**self.common, "V": self.V}
        del arguments["K"]
        given = {**of_values, "du": du, **products, **arguments, "scale": self.scale}
        config = pair_gradient_config(self.bfloat16)
        launch(pair_gradient_kernel, (2 * self.chunks * H,), **self.pairs, **given, **config)
        self.pairs.clear()
        config = gradient_config(self.bfloat16, self.V)
        tiles = tile_count(K, config["BK"])
        made = {name: self.per_token(H, K, dtype=self.dtype) for name in OF_KEYS}
        of_writes = None
        if gates:
            gk = self.vectors["gk"]
            assert gk is not None
            made["gk"] = self.per_token(H, K, dtype=gk.dtype)
            of_writes = torch.empty(*self.tokens, H, K, dtype=torch.float32, device=self.device)
        outputs = {f"d{name}": made.get(name) for name in (*OF_KEYS, "gk")}
        arguments |= {**self.vectors, **self.at_middle, **products, "K": K, "READ_BEFORE": self.read_before}
        arguments |= {"mild": self.mild_gradient, "states": S, "of_writes": of_writes}
        for kernel, more, filled in (
            (write_gradient_kernel, {"u": u, "v": self.values, "d_states": dS}, ("db", "dk")),
            (read_gradient_kernel, {"do": do, "z": of_values["z"], "scale": self.scale}, ("dq", "da", "dgk")),
        ):
            given = {**more, **{name: outputs[name] for name in filled}, **arguments, **config}
            self.launch_by_gates(kernel, tiles * self.chunks * H, given, arguments["gk"] is not None)
        return {name: self.batched(x) for name, x in made.items()}


# Tiles of products in bfloat16 are 64 wide at least: Triton 3.6 miscompiles narrower ones on Hopper.


def pair_config(bfloat16: bool, K: int) -> dict[str, int]:
    """Block size of the contracted axis, warps, stages, and registers for three programs where one block is all."""
    if not bfloat16:
        return {"BK": 32, "num_warps": 4, "num_stages": 1}
    if K <= 64:
        return {"BK": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 168}
    return {"BK": 64, "num_warps": 4, "num_stages": 3}


def factor_config(bfloat16: bool) -> dict[str, int]:
    """Block size of the key axis, that of `gradient_config`, warps, stages, and registers for three programs."""
    if not bfloat16:
        return {"BK": 32, "num_warps": 4, "num_stages": 1}
    return {"BK": 64, "num_warps": 4, "num_stages": 1, "maxnreg": 168}


def pair_gradient_config(bfloat16: bool) -> dict[str, int]:
    """Block size of the contracted axis, warps and pipeline stages."""
    return {"BV": 128 if bfloat16 else 32, "num_warps": 4, "num_stages": 1}


def gradient_config(bfloat16: bool, V: int) -> dict[str, int]:
    """Block sizes of the key axis and of the value axis, which is contracted, warps and pipeline stages."""
    B = 64 if bfloat16 else 32
    return {"BK": B, "BV": B, "num_warps": 4, "num_stages": 2 if bfloat16 and V <= 64 else 3}
