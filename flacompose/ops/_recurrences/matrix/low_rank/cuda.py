"""Launches of diagonal plus low rank on CUDA, in float32, bfloat16 and float16, and their table.

    result                        condition                      kernel                               file
    Y, M, X and P of each chunk   always                         low_rank_product_kernel              kernels.py
    W_a, Q, W and b_write         always                         low_rank_factor_kernel               kernels.py
    z, gradients of products      gradients of vectors or gates  low_rank_product_gradient_kernel     gradients.py
    db, dk, a part of dgk         gradients of vectors or gates  low_rank_write_gradient_kernel       gradients.py
    dq, da, dgk                   gradients of vectors or gates  low_rank_read_gradient_kernel        gradients.py
    state passing, in delta_rule  forwards                       delta_state_passing_kernel           kernels.py
                                  backwards                      delta_backward_state_passing_kernel  kernels.py
                                  both directions, few programs  delta_both_directions_kernel         both_directions.py
                                  long rows                      delta_join_kernel                    kernels.py

With gates, all but `low_rank_product_gradient_kernel` and state passing are launched twice: first for the
chunks or tiles whose gates are factorisable (the sums over each half of a chunk, of 32 tokens, are above -45, and for
gradients each gate is above -8, or -4 in float32), then for the others. The kernels are the same on all
chips.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import launch_by_gates, operand, operand_by_token, tile_count
from flacompose.ops._launch.sequences import MatrixSequences
from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.matrix.channel_decay.cuda import CHUNK
from flacompose.ops._recurrences.matrix.delta_rule import launch_state_passing as state_passing
from flacompose.ops._recurrences.matrix.delta_rule.arguments import ChunkDecays, WYFactors
from flacompose.ops._recurrences.matrix.delta_rule.launch_state_passing import PassOperands, scratch
from flacompose.ops._recurrences.matrix.delta_rule.plan import plan_state_passing
from flacompose.ops._recurrences.matrix.inputs import Inputs
from flacompose.ops._recurrences.matrix.low_rank import plan
from flacompose.ops._recurrences.matrix.low_rank.gradients import (
    low_rank_product_gradient_kernel,
    low_rank_read_gradient_kernel,
    low_rank_write_gradient_kernel,
)
from flacompose.ops._recurrences.matrix.low_rank.kernels import (
    Factors,
    Products,
    Vectors,
    low_rank_factor_kernel,
    low_rank_product_kernel,
)

OF_KEYS = ("q", "k", "a", "b")


def chunk(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, H, V], final_state [N, H, K, V])``."""
    launches = _Launches(inputs)
    tokens = launches.tokens
    factors = launches.compute_factors()
    o, final_state = tokens.per_token(tokens.H, tokens.V, dtype=inputs.v.dtype), tokens.state(torch.float32)
    state_passing.forwards(factors, o=o, final=final_state)
    return tokens.batched(o), final_state


def ends(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(end [N, H, K, V], matrix [N, H, K, K])``."""
    return state_passing.transition(_Launches(inputs._replace(initial_state=None)).compute_factors())


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    wants_vectors = call.wants(*OF_KEYS, "gk")
    launches = _Launches(call.inputs)
    tokens = launches.tokens
    factors = launches.compute_factors(backward=wants_vectors)
    do, d_final_state = operand(call.do), operand(call.arriving.final_state)
    start = call.wanted_input("initial_state")
    d_initial_state = None if start is None else tokens.state(start.dtype)
    dv = tokens.per_token(tokens.H, tokens.V, dtype=tokens.dtype)
    if not wants_vectors:
        state_passing.backwards(factors, do, d_final_state, dv=dv, d_initial=d_initial_state)
        return call.select(v=tokens.batched(dv), initial_state=d_initial_state)
    u, du = scratch(tokens, tokens.V), scratch(tokens, tokens.V)
    S, dS = tokens.per_chunk_state(), tokens.per_chunk_state()
    backwards = {"dv": dv, "du": du, "d_states": dS, "d_initial": d_initial_state}
    if factors.plan.has_few_programs:
        state_passing.both_directions(factors, do, d_final_state, r=u, states=S, **backwards)
    else:
        state_passing.forwards(factors, r=u, states=S)
        state_passing.backwards(factors, do, d_final_state, **backwards)
    del factors  # which only state passing needs
    gradients = launches.compute_gradients(do, u, du, S, dS, gates=call.wants("gk"))
    return call.select(**gradients, v=tokens.batched(dv), initial_state=d_initial_state)


class _Launches:
    """The launches of one call except for state passing."""

    def __init__(self, inputs: Inputs) -> None:
        self.tokens = tokens = MatrixSequences(inputs.q, inputs.v, inputs.cu_seqlens, inputs.scale, CHUNK)
        self.scale = inputs.scale
        self.vectors = Vectors(*(operand(getattr(inputs, name)) for name in Vectors._fields))
        self.values = operand(inputs.v)
        self.v_by_token, self.initial = operand_by_token(inputs.v), operand(inputs.initial_state)
        self.gated = inputs.gk is not None
        # Without gates, reads before and after the decay are the same.
        self.order = {"READ_BEFORE": inputs.read_before and self.gated}
        self.common = {**tokens.positions, "H": tokens.H, "DOT": tokens.arguments["DOT"]}
        # Without gates the vectors decayed to the chunk's middle are the vectors themselves.
        self.at_middle = self.vectors._replace(gk=None)
        self.factorisable_tiles: Tensor | None = None

    def compute_factors(self, backward: bool = False) -> PassOperands:
        """The operands of state passing and, for the `backward`, the vectors of the gradient kernels."""
        tokens = self.tokens
        P, *stored = (tokens.per_chunk(tokens.H, tokens.C, tokens.C, dtype=tokens.dtype) for _ in range(4))
        products = Products(*stored, *(x.new_empty(x.shape) if tokens.bfloat16 else None for x in stored))
        marks = tokens.per_chunk(tokens.H, dtype=torch.int8) if self.gated else None
        tensors: dict[str, Any] = {"vectors": self.vectors, "products": products}
        tensors |= {"factorisable_chunks": marks, "K": tokens.K}
        launch_by_gates(
            low_rank_product_kernel,
            tokens.chunks * tokens.H,
            {**tensors, "P": P, "scale": self.scale},
            self.order,
            self.common,
            plan.pair_config(tokens.bfloat16, tokens.K),
            gated=self.gated,
        )
        factors = Factors(*(scratch(tokens, tokens.K) for _ in Factors._fields))
        self.pairs: dict[str, Tensor] = {"Y": products.Y, "X": products.X}
        config = plan.factor_config(tokens.bfloat16)
        tiles = tile_count(tokens.K, config["BK"])
        at_middle = Vectors(*[None] * 4)
        decay = tokens.per_chunk(tokens.H, tokens.K) if self.gated else None
        if self.gated and backward:
            at_middle = self.at_middle = Vectors(*(scratch(tokens, tokens.K) for _ in OF_KEYS))
            self.factorisable_tiles = tokens.per_chunk(tokens.H, tiles, dtype=torch.int8)
        tensors |= {"factors": factors, "at_middle": at_middle, "factorisable_tiles": self.factorisable_tiles}
        launch_by_gates(
            low_rank_factor_kernel,
            tiles * tokens.chunks * tokens.H,
            {**tensors, "chunk_decay": decay},
            self.order,
            self.common,
            config,
            gated=self.gated,
        )
        passing, (v, v_token) = plan_state_passing(tokens, low_rank=True), self.v_by_token
        wy = WYFactors(factors.Q, factors.W_a, factors.W, factors.b_write, P, products.M)
        return PassOperands(tokens, passing, v, v_token, self.initial, wy, ChunkDecays(chunk_decay=decay))

    def compute_gradients(
        self, do: Tensor, u: Tensor, du: Tensor, S: Tensor, dS: Tensor, gates: bool
    ) -> dict[str, Tensor]:
        """The gradients of all vectors and, if wanted, of gates, by the names of the inputs."""
        tokens = self.tokens
        H, K, C = tokens.H, tokens.K, tokens.C
        z = scratch(tokens, tokens.V)
        parts = 2 if tokens.bfloat16 else 1  # parts of the gradients of the pairs of `a`
        products = {
            "pairs": tokens.per_chunk(H, 2 + 2 * parts, C, C, dtype=tokens.dtype),
            "diagonal": tokens.per_chunk(H, 2, C),
        }
        launch(
            low_rank_product_gradient_kernel,
            (2 * tokens.chunks * H,),
            **self.pairs,
            u=u,
            v=self.values,
            do=do,
            du=du,
            z=z,
            **products,
            **self.common,
            V=tokens.V,
            scale=self.scale,
            **plan.pair_gradient_config(tokens.bfloat16),
        )
        self.pairs.clear()
        config = plan.gradient_config(tokens.chip, tokens.bfloat16, tokens.V)
        tiles = tile_count(K, config["BK"])
        gradients = {name: tokens.per_token(H, K, dtype=tokens.dtype) for name in OF_KEYS}
        dgk_part = None
        if gates:
            gk = self.vectors.gk
            assert gk is not None
            gradients["gk"] = tokens.per_token(H, K, dtype=gk.dtype)
            dgk_part = torch.empty(*tokens.tokens, H, K, dtype=torch.float32, device=tokens.device)
        for kernel, more, filled in (
            (low_rank_write_gradient_kernel, {"u": u, "v": self.values, "d_states": dS}, ("b", "k")),
            (low_rank_read_gradient_kernel, {"do": do, "z": z, "scale": self.scale}, ("q", "a", "gk")),
        ):
            launch_by_gates(
                kernel,
                tiles * tokens.chunks * H,
                {"vectors": self.vectors, "at_middle": self.at_middle},
                {"factorisable_tiles": self.factorisable_tiles},
                more,
                products,
                {"states": S, "dgk_part": dgk_part},
                {f"d{name}": gradients.get(name) for name in filled},
                {"K": K, "V": tokens.V},
                self.order,
                self.common,
                config,
                gated=self.gated,
            )
        return {name: tokens.batched(x) for name, x in gradients.items()}
