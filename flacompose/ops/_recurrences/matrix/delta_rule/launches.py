"""Launches that compute the WY factors of one call, which state passing takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launch import hopper
from flacompose.ops._launch.chip import Chip
from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import block, launch_by_gates, operand, tile_count
from flacompose.ops._recurrences.matrix.channel_decay import cuda as channel_decay
from flacompose.ops._recurrences.matrix.delta_rule.channel_kernels import delta_channel_factor_kernel
from flacompose.ops._recurrences.matrix.delta_rule.kernels import delta_factor_kernel
from flacompose.ops._recurrences.matrix.delta_rule.state_passing_from_inverses import InverseSweeps
from flacompose.ops._recurrences.matrix.head_decay import cuda as head_decay
from flacompose.ops._recurrences.matrix.inputs import Inputs


class Launches(InverseSweeps):
    """The WY factors of one call, in the form that its chip and its gates ask for."""

    def __init__(self, inputs: Inputs, with_r: bool = False, forward: bool = False) -> None:
        q, k, v, beta, g, gk, a = (getattr(inputs, x) for x in ("q", "k", "v", "beta", "g", "gk", "a"))
        initial_state, cu_seqlens, scale, read_before = (
            inputs.initial_state,
            inputs.cu_seqlens,
            inputs.scale,
            inputs.read_before,
        )
        if read_before and gk is not None:
            raise ValueError(
                "read_before needs gates of heads, got gates of channels: their kernels read after the decay"
            )
        C = chunk_size(q.dtype == torch.bfloat16, gk is not None)
        super().__init__(q, v, initial_state, cu_seqlens, scale, C)
        self.q, self.k, self.beta = map(operand, (q, k, beta))
        self.a = operand(a)
        # Kernels for Hopper copy these inputs, and require that their memory is aligned.
        self.of_keys = tuple(x for x in (self.q, self.k, self.a) if x is not None)
        if gk is not None:
            gk, g = _gates_of_channels(g, gk), None
        self.gk = operand(gk)
        # Without gates, reads before and after the decay are the same.
        self.read_before = read_before and g is not None
        if g is not None:
            self.gates["sums"], self.gates["rest"] = head_decay.sum_gates(self, operand(g), None)
        self.vectors = {"q": self.q, "k": self.k, "beta": self.beta, "H": q.shape[2]}
        self.takes_inverses = (
            forward
            and self.gk is None
            and self.reads_with_key
            and hopper.takes(self.chip, (*self.of_keys, self.v), self.K, self.V)
            and self.v_token % 8 == 0
        )
        if self.takes_inverses:
            self.inverses()
            return
        products = {
            "W": self.scratch(self.HV, self.K),
            "P": self.per_chunk(self.HV, self.C, self.C, dtype=self.dtype),
            "Y": self.per_chunk(self.HV, self.C, self.C) if with_r else None,
        }
        self.factors |= products
        if self.gk is None:
            self.head_pairs(products)
        else:
            self.channel_pairs(products)

    def head_pairs(self, products: dict[str, Tensor | None]) -> None:
        """Fill the WY factors, `products`, where gates are of heads, or where there are none."""
        self.HK = self.q.shape[2]
        self.factors |= {"q": self.q, "k": self.k if self.a is None else self.a}
        if self.gates["sums"] is not None and self.reads_with_key:
            self.bound_growth(tile_count(self.V, 64))
        grid = (self.chunks * self.HV,)
        gates = {"sums": self.gates["sums"], "growth": self.growth}
        arguments = dict(
            **self.vectors, **products, **gates, **self.arguments, **self.reading, K=self.K, C=self.C
        )
        if hopper.takes(self.chip, self.of_keys, self.K):
            from flacompose.ops._recurrences.matrix.delta_rule.hopper.head_factors import (
                hopper_head_factor_kernel,
            )

            del arguments["DOT"]
            launch(hopper_head_factor_kernel, grid, **arguments, num_warps=4, maxnreg=168)
        else:
            config = pair_config(self.bfloat16)
            launch(delta_factor_kernel, grid, **arguments, rest=self.gates["rest"], **config)

    @property
    def reads_with_key(self) -> bool:
        """Whether the error is that of the gated delta rule: read by the key, after the decay.

        The log-norm bounds of chunks, `growth`, are computed for this rule only.
        """
        return self.a is None and not self.read_before

    @property
    def reading(self) -> dict[str, Any]:
        """The arguments of kernels for gates of heads that say how the error is read."""
        return {"a": self.a, "READ_BEFORE": self.read_before}

    def channel_pairs(self, products: dict[str, Tensor | None]) -> None:
        """Fill the WY factors, `products`, and the decayed queries and keys, where gates are of channels.

        Chunks with factorisable gates are computed first. The kernel marks them in `mild_chunks`, and the
        other chunks are computed by the second launch.
        """
        read = {name: self.scratch(self.HV, self.K) for name in ("q", "k")}
        self.factors |= read
        self.gates["total"] = self.per_chunk(self.HV, self.K)
        config = channel_pair_config(self.chip, self.bfloat16, self.K)
        self.mild_chunks = self.per_chunk(self.HV, dtype=torch.int8)
        programs = self.chunks * self.HV
        arguments = dict(
            **self.vectors,
            **products,
            **self.arguments,
            a=self.a,
            gk=self.gk,
            q_read=read["q"],
            k_read=read["k"],
            total=self.gates["total"],
            mild=self.mild_chunks,
            K=self.K,
        )
        # Wider tiles of gates that are not factorisable spill three times as many registers.
        strong = {"BK": min(config["BK"], 64)}
        if hopper.takes(self.chip, self.of_keys, self.K):
            from flacompose.ops._recurrences.matrix.delta_rule.hopper.channel_factors import (
                hopper_channel_factor_kernel,
            )

            taken = {name: x for name, x in arguments.items() if name != "DOT"}
            launch(hopper_channel_factor_kernel, (programs,), **taken, num_warps=4)
            config |= strong | {"MILD": False, "IN_BLOCKS": False}
            launch(delta_channel_factor_kernel, (programs,), **arguments, **config)
        else:
            config |= {"IN_BLOCKS": True}
            launch_by_gates(delta_channel_factor_kernel, programs, arguments, config, strong=strong)


def _gates_of_channels(g: Tensor | None, gk: Tensor) -> Tensor:
    """``gk [B, T, HV, K]`` with ``g [B, T, HV]`` added, if it is given too."""
    return gk if g is None else gk.float() + g.unsqueeze(-1)


def chunk_size(bfloat16: bool, of_channels: bool) -> int:
    """Tokens of a chunk. With gates of channels, the chunks are those of channel decay."""
    return channel_decay.CHUNK if of_channels else 64 if bfloat16 else 32


# Tiles of products in bfloat16 are 64 wide at least: Triton 3.6 miscompiles narrower ones on Hopper.


def pair_config(bfloat16: bool) -> dict[str, int]:
    """Block size of the contracted axis, warps, pipeline stages and, for three programs at a time, registers."""
    if not bfloat16:
        return {"BK": 32, "num_warps": 4, "num_stages": 1}
    return {"BK": 128, "num_warps": 4, "num_stages": 1, "maxnreg": 168}


def channel_pair_config(chip: Chip, bfloat16: bool, K: int) -> dict[str, int]:
    """Block size of the contracted axis, whether writing keys are kept for W, warps and stages.

    They are kept in shared memory and take 512 bytes for each channel. In bfloat16, more than 128 channels of
    them leave no room for a second program on a multiprocessor. In float32 there are 65 KiB of other factors
    beside them.
    """
    BK, keep = 64 if K > 128 else max(block(K, 128), 64), K <= 128
    if not bfloat16:
        BK = 32
        keep = 65 * 1024 + 512 * BK * tile_count(K, BK) <= chip.shared_memory
    return {"BK": BK, "KEEP": keep, "num_warps": 4, "num_stages": 1}
