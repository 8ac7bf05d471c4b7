"""Launches of the gradients of one call, without those of state passing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flacompose.ops._launch import hopper
from flacompose.ops._launch.chip import Chip
from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import block, launch_by_gates, tile_count
from flacompose.ops._recurrences.matrix.delta_rule.channel_kernels import (
    delta_channel_gradient_kernel,
    delta_channel_product_gradient_kernel,
)
from flacompose.ops._recurrences.matrix.delta_rule.gradients import (
    delta_add_heads_kernel,
    delta_head_gradient_kernel,
)
from flacompose.ops._recurrences.matrix.delta_rule.launches import Launches
from flacompose.ops._recurrences.matrix.delta_rule.stored_products import (
    delta_stored_product_gradient_kernel,
    delta_stored_product_kernel,
)
from flacompose.ops._recurrences.matrix.head_decay import cuda as head_decay

# The most heads of values that share keys for which kernels for Hopper add up the gradients of queries, keys
# and `a`. Each sum is rounded to the dtype of the inputs, and with more heads these roundings would exceed
# the kernels' own error.
LARGEST_GROUP = 4
# How many programs of `hopper_backward_kernel` a Hopper chip runs at a time, by the size of heads.
AT_ONCE = {64: 264, 128: 132}
ADDED = 2048  # sums over heads that a program of `delta_add_heads_kernel` computes


class Swept(NamedTuple):
    """The operands of the gradients of chunks, by the kernels' parameter names; None if unwanted."""

    do: Tensor
    r: Tensor | None
    dv: Tensor | None
    states: Tensor | None
    d_states: Tensor | None


class GradientLaunches(Launches):
    """The gradients of queries, keys, `a`, `beta` and gates of each chunk, from the stored states."""

    def gradients(self, swept: Swept, gates: bool) -> dict[str, Tensor]:
        """The gradients of queries and, with `d_states`, of keys, `a`, `beta` and wanted gates."""
        H, HV = self.q.shape[2], self.HV
        gates_of_heads = {name: self.gates[name] for name in ("sums", "rest")}
        sizes = {"V": self.V, "C": self.C}
        products: dict[str, Tensor | None] = {}
        kernel, config = delta_head_gradient_kernel, gradient_config(self.bfloat16, self.V)
        on_hopper = (
            swept.d_states is not None
            and HV // H <= LARGEST_GROUP
            and hopper.takes(self.chip, (*self.of_keys, swept.do), self.K, self.V)
        )
        if on_hopper:
            config = {"BK": 64, "num_warps": 4}
        elif stores_pairs(self.bfloat16, self.K):
            kernel, config = delta_stored_product_gradient_kernel, gradient_from_pairs_config(self.bfloat16)
            dv = None if swept.d_states is None else swept.dv
            products = self.pair_gradients(r=swept.r, do=swept.do, dv=dv, **gates_of_heads, **sizes)
        tiles = tile_count(self.K, config["BK"])
        outputs = self.of_tiles(tiles, H if on_hopper else HV)
        # Always allocated, so that the bits of other gradients do not depend on whether those of gates are
        # wanted.
        d_sums, d_total = self.of_sums(tiles)
        if swept.d_states is None:  # queries alone
            outputs, d_sums, d_total = dict.fromkeys(outputs) | {"dq": outputs["dq"]}, None, None
        of_gates = {"sums": self.gates["sums"], "d_sums": d_sums, "d_total": d_total}
        arguments = dict(
            **self.vectors,
            **swept._asdict(),
            **outputs,
            **of_gates,
            **self.arguments,
            **self.reading,
            **sizes,
            **config,
            K=self.K,
        )
        if on_hopper:
            from flacompose.ops._recurrences.matrix.delta_rule.hopper.head_gradients import (
                hopper_head_gradient_kernel,
            )

            del arguments["DOT"]
            # Heads of values that share keys are processed one after the other: each adds to the stored sum
            # of those before.
            for i in range(HV // H):
                grid = (tiles * self.chunks * H,)
                launch(
                    hopper_head_gradient_kernel,
                    grid,
                    **arguments,
                    of_group=i,
                    ADDS=i > 0,
                )
        else:
            grid = (tiles * self.chunks * HV,)
            launch(kernel, grid, **arguments, **products, rest=self.gates["rest"])
        return self.added_up(outputs) | self.gate_gradient(d_sums, d_total, gates)

    def of_sums(self, tiles: int) -> tuple[Tensor | None, Tensor | None]:
        """Memory for the gradients of sums of gates, in the layout of `gate_gradient`."""
        if self.gates["sums"] is None:
            return None, None
        return self.per_chunk(3 * tiles, self.HV, self.C), self.per_chunk(self.HV, self.K)

    def gate_gradient(self, d_sums: Tensor | None, d_total: Tensor | None, wanted: bool) -> dict[str, Tensor]:
        """The gradient of gates of heads, by its name, if it is `wanted`."""
        if not wanted:
            return {}
        assert d_sums is not None and d_total is not None
        tiles = d_sums.shape[1] // 3
        return {"g": head_decay.gate_gradient(self, d_sums, (tiles,) * 3, d_total, 1.0, torch.float32)}

    def has_joint_kernel(self, do: Tensor) -> bool:
        """Whether one kernel passes the state's gradient and computes the gradients of queries and keys.

        Each of its programs processes a whole segment, so it is faster only if hardly any multiprocessor is
        idle at the end. Packed sequences may have any lengths, so this is unknown for them. Where heads share
        keys it takes less memory than the two kernels, and at times a few per cent longer. All results equal
        those of the two kernels to the bit, so the choice may depend on the batch size.
        """
        programs = self.N * self.HV * self.parts
        if self.gk is not None or not self.reads_with_key or self.restarts > 1 or self.cu_seqlens is not None:
            return False
        if self.K != self.V or self.HV > LARGEST_GROUP * self.q.shape[2] or not isinstance(programs, int):
            return False
        if not hopper.takes(self.chip, (*self.of_keys, do), self.K):
            return False
        at_once = AT_ONCE[self.K]
        return programs >= 0.9 * at_once * tile_count(programs, at_once)

    def reverse_gradients(
        self,
        do: Tensor,
        d_final: Tensor | None,
        r: Tensor,
        S: Tensor,
        d_initial: Tensor | None,
    ) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:
        """`reverse` and `gradients` in one kernel, if `has_joint_kernel`. It overwrites `r` with dv.

        It returns the gradients of queries, keys and `beta` of each head of values, and the operands of
        `gate_gradient`.
        """
        from flacompose.ops._recurrences.matrix.delta_rule.hopper.backward import hopper_backward_kernel

        HV, tiles = self.HV, self.K // 64
        starts = self.reverse_starts(do, d_final)
        # A program has read W and r of a chunk when it stores dq and dv in their place.
        dq = self.factors["W"]
        assert dq is not None
        outputs = {"dq": dq, "dk": self.per_token(HV, self.K, dtype=self.dtype)}
        outputs["dbeta"] = self.per_token(tiles, HV, dtype=torch.float32)
        d_sums, d_total = self.of_sums(tiles)
        launch(
            hopper_backward_kernel,
            (self.parts * self.N * HV,),
            q=self.q,
            k=self.k,
            beta=self.beta,
            **{name: self.factors[name] for name in ("W", "P")},
            **outputs,
            T=self.T,
            N=self.N,
            sums=self.gates["sums"],
            r=r,
            do=do,
            states=S,
            d_final=starts,
            dv=r,
            d_sums=d_sums,
            d_total=d_total,
            d_initial=d_initial,
            scale=self.arguments["scale"],
            HV=HV,
            SEGMENTS=self.parts,
            GROUP=HV // self.q.shape[2],
            D=self.K,
            C=self.C,
            num_warps=self.K // 16,
        )
        self.free_sweep_memory()
        return outputs, d_sums, d_total

    def of_key_heads(self, outputs: dict[str, Tensor], wants: Callable[..., bool]) -> dict[str, Tensor]:
        """`outputs` of `reverse_gradients`, added up over the heads that share keys.

        Only the gradients of queries and keys that the call `wants` are returned. Each sum is rounded as in
        `hopper/head_gradients`, which adds to the stored sum of the heads before.
        """
        H, added = self.q.shape[2], {"dbeta": outputs["dbeta"]}
        if self.HV == H:
            return outputs
        for name in filter(wants, ("q", "k")):
            sums = self.per_token(H, self.K, dtype=self.dtype)
            sizes = {"size": sums.numel(), "GROUP": self.HV // H, "K": self.K, "BLOCK": ADDED}
            grid = (tile_count(sums.numel(), ADDED),)
            launch(delta_add_heads_kernel, grid, x=outputs[f"d{name}"], sums=sums, **sizes, num_warps=4)
            added[f"d{name}"] = sums
        return added

    def pair_gradients(self, **arguments: Any) -> dict[str, Tensor | None]:
        """The gradients of the products of queries and keys with keys, for `delta_stored_product_gradient_kernel`."""
        HV = self.HV
        products = {
            "pairs": self.per_chunk(HV, 2, 2 if self.bfloat16 else 1, self.C, self.C, dtype=self.dtype),
            "diagonal": self.per_chunk(HV, self.C),
            "of_before": self.per_chunk(HV, self.C) if self.read_before else None,
        }
        launch(
            delta_stored_product_kernel,
            (self.chunks * HV,),
            **arguments,
            **products,
            **self.arguments,
            READ_BEFORE=self.read_before,
            **pair_gradient_config(self.bfloat16),
        )
        return products

    def channel_gradients(self, swept: Swept, gates: bool) -> dict[str, Tensor]:
        """The gradients of queries, keys, `a`, `beta` and, with `gates`, of gates of channels.

        The table of `channel_kernels` says which kernel computes which chunks and tiles.
        """
        assert self.gk is not None
        HV = self.HV
        products = {"pairs": self.per_chunk(HV, 2, self.C, self.C), "diagonal": self.per_chunk(HV, self.C)}
        of_values = {"r": swept.r, "do": swept.do, "dv": swept.dv, "V": self.V}
        config = channel_config(self.chip, self.bfloat16)
        parts = tile_count(self.K, config["BK"])
        outputs = self.of_tiles(parts, HV)
        dgk = self.per_token(HV, self.K, dtype=self.gk.dtype) if gates else None
        given = {"a": self.a, "gk": self.gk, "states": swept.states, "d_states": swept.d_states}
        arguments = dict(**self.vectors, **given, **of_values, **outputs, **self.arguments, dgk=dgk, K=self.K)
        of_tiles = {**products, "mild": self.per_chunk(HV, parts, dtype=torch.int8)}
        programs = parts * self.chunks * HV
        if hopper.takes(self.chip, (*self.of_keys, swept.do), self.K, self.V):
            from flacompose.ops._recurrences.matrix.delta_rule.hopper.channel_block_gradients import (
                hopper_channel_block_gradient_kernel,
            )
            from flacompose.ops._recurrences.matrix.delta_rule.hopper.channel_gradients import (
                hopper_channel_gradient_kernel,
            )

            taken = {name: x for name, x in arguments.items() if name != "DOT"}
            taken |= {"mild_chunks": self.mild_chunks, "BK": config["BK"], "num_warps": 4}
            launch(hopper_channel_gradient_kernel, (programs,), **taken)
            launch(
                hopper_channel_block_gradient_kernel,
                (programs,),
                **taken,
                **of_tiles,
            )
            launch(delta_channel_gradient_kernel, (programs,), **arguments, **of_tiles, **config, MILD=False)
        else:
            of_pairs = pair_gradient_config(self.bfloat16)
            grid = (self.chunks * HV,)
            launch(
                delta_channel_product_gradient_kernel,
                grid,
                **of_values,
                **products,
                **self.arguments,
                **of_pairs,
            )
            launch_by_gates(delta_channel_gradient_kernel, programs, arguments, of_tiles, config)
        made = self.added_up(outputs)
        if dgk is not None:
            made["gk"] = self.batched(dgk)
        return made

    def of_tiles(self, tiles: int, heads: int) -> dict[str, Any]:
        """Memory for dq, dk and da, with this many `heads`, and for dbeta, in the layout of `added_up`."""
        outputs: dict[str, Any] = {
            name: None if x is None else self.per_token(heads, self.K, dtype=self.dtype)
            for name, x in (("dq", self.q), ("dk", self.k), ("da", self.a))
        }
        return outputs | {"dbeta": self.per_token(tiles, self.HV, dtype=torch.float32)}

    def added_up(self, outputs: dict[str, Any]) -> dict[str, Tensor]:
        """The gradients of queries, keys, `a` and `beta`: sums over heads of values, and over tiles of the key axis."""
        H, made = self.q.shape[2], {}
        for name, x in outputs.items():
            if x is None:
                continue
            x = self.batched(x)
            if name == "dbeta":
                x = x.squeeze(2) if x.shape[2] == 1 else x.sum(2)
            elif x.shape[2] != H:
                x = x.unflatten(2, (H, -1))
                # PyTorch's sum of two takes twice as long as an addition.
                x = x[:, :, :, 0] + x[:, :, :, 1] if self.HV == 2 * H else x.sum(3)
            made[name.removeprefix("d")] = x
        return made


# Tiles of products in bfloat16 are 64 wide at least: Triton 3.6 miscompiles narrower ones on Hopper.


def gradient_config(bfloat16: bool, V: int) -> dict[str, int]:
    """Block sizes of the key axis and of the value axis, which is contracted, warps and pipeline stages."""
    if not bfloat16:
        return {"BK": 32, "BV": 32, "num_warps": 4, "num_stages": 1}
    return {"BK": 64, "BV": max(block(V, 128), 64), "num_warps": 4, "num_stages": 1}


def stores_pairs(bfloat16: bool, K: int) -> bool:
    """Whether gradients of pairs are stored once for all tiles of keys, not computed by each tile."""
    return K > (128 if bfloat16 else 32)


def gradient_from_pairs_config(bfloat16: bool) -> dict[str, int]:
    """As `gradient_config`, where gradients of pairs are stored."""
    B = 64 if bfloat16 else 32
    return {"BK": B, "BV": B, "num_warps": 4, "num_stages": 2}


def pair_gradient_config(bfloat16: bool) -> dict[str, int]:
    """Block size of the contracted axis, warps and pipeline stages."""
    return {"BV": 64 if bfloat16 else 32, "num_warps": 4, "num_stages": 2}


def channel_config(chip: Chip, bfloat16: bool) -> dict[str, int]:
    """Block sizes of the key axis and of the value axis, which is contracted, warps and pipeline stages."""
    B = 64 if bfloat16 else 32
    # On a small chip Triton 3.7 makes two stages fit in float32, and Triton 3.8 does not, by 1 KiB.
    stages = 3 if not chip.is_small else 2 if bfloat16 else 1
    return {"BK": B, "BV": B, "num_warps": 4, "num_stages": stages}
