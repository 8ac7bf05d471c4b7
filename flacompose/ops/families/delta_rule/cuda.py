"""Launches of the Triton kernels: what CUDA runs, in float32, bfloat16 and float16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flacompose.ops._chip import Chip
from flacompose.ops._launching import launch, launches_into_graph
from flacompose.ops.families import _hopper, _launch
from flacompose.ops.families._launch import block, launch_by_gates, operand, tile_count
from flacompose.ops.families._signature import BackwardCall, Gradients
from flacompose.ops.families.delta_rule.channel_kernels import (
    channel_kernel,
    channel_pair_kernel,
    pair_gradient_kernel,
)
from flacompose.ops.families.delta_rule.gradients import add_heads_kernel, gradient_kernel
from flacompose.ops.families.delta_rule.inputs import NORM_EPS, Inputs
from flacompose.ops.families.delta_rule.inverse_sweeps import InverseSweeps
from flacompose.ops.families.delta_rule.kernels import pair_kernel
from flacompose.ops.families.delta_rule.stored_pairs import (
    decayed_pair_gradient_kernel,
    gradient_from_pairs_kernel,
)
from flacompose.ops.families.scalar_decay import cuda as scalar_decay
from flacompose.ops.families.vector_decay import cuda as vector_decay


def chunk(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    return _Launches(inputs, forward=True).chunk(inputs.v.dtype)


def ends(inputs: Inputs) -> tuple[Tensor, ...]:
    """``(end [N, HV, K, V], matrix [N, HV, K, K])``."""
    return _Launches(inputs._replace(initial_state=None)).map()


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    wants, inputs = call.wants, call.inputs
    of_channels = inputs.gk is not None
    by_writes = wants("k", "a", "beta", "g", "gk")
    by_reads = by_writes or wants("q")
    by_states = by_writes or (of_channels and by_reads)
    rule = _Launches(inputs, with_r=by_reads)
    do, d_final_state = operand(call.do), operand(call.arriving.final_state)
    start = call.wanted_input("initial_state")
    d_initial_state = None if start is None else rule.state(start.dtype)
    is_joint = by_writes and rule.has_joint_kernel(do)
    reverses = by_states or wants("v", "initial_state")
    both_ways = by_reads and reverses and rule.sweeps_at_once and not is_joint
    r = S = dS = dv = None
    made: dict[str, Tensor] = {}
    if by_reads:
        r = rule.scratch(rule.HV, rule.V)
        S = rule.per_chunk_state()
    if by_reads and not both_ways:
        rule.sweep(r=r, states=S)
        rule.factors["Y"] = None  # gives its memory back for what follows
    if is_joint:
        assert r is not None and S is not None
        outputs, d_sums, d_total = rule.reverse_gradients(do, d_final_state, r, S, d_initial_state)
        made["v"] = rule.batched(r)
        S = None  # gives its memory back for the sums that follow
        made |= rule.added_up(rule.of_key_heads(outputs)) | rule.gate_gradient(d_sums, d_total, wants("g"))
        return call.made(**made, initial_state=d_initial_state)
    if reverses:
        dS = rule.per_chunk_state() if by_states else None
        dv = rule.place_of_dv(both_ways)
        made["v"] = rule.batched(dv)
        backwards = {"dv": dv, "d_states": dS, "d_initial": d_initial_state}
        if both_ways:
            rule.sweep_both_ways(do, d_final_state, r=r, states=S, **backwards)
        else:
            rule.reverse(do, d_final_state, **backwards)
    rule.free_sweep_memory()
    if by_reads and of_channels:
        made |= rule.channel_gradients(do, r, dv, S, dS, gates=wants("g", "gk"))
    elif by_reads:
        made |= rule.gradients(do, r, dv, S, dS, gates=wants("g"))
    return call.made(**made, initial_state=d_initial_state)


def recurrent(inputs: Inputs, count: int | None = None, stride: int | None = None) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``, or ``[N, count, HV, K, V]`` with `count` and `stride`."""
    return _launch.recurrent(**inputs._asdict(), delta_rule=True, count=count, stride=stride)


steps = recurrent


def update(inputs: Inputs, normalize: int) -> tuple[Tensor, Tensor]:
    """`recurrent`, which in a graph writes the new state where the old one was. It may divide by norms first."""
    eps = NORM_EPS if normalize else None
    return _launch.recurrent(
        **inputs._asdict(), delta_rule=True, norm_eps=eps, in_place=launches_into_graph()
    )


def _gates_of_channels(g: Tensor | None, gk: Tensor) -> Tensor:
    """``gk [B, T, HV, K]`` with ``g [B, T, HV]`` added, if it is given too."""
    return gk if g is None else gk.float() + g.unsqueeze(-1)


# The most heads of values that share keys for which kernels for Hopper add up the gradients of queries, keys and `a`.
# They round each sum to the dtype of the inputs, and with more heads these roundings would exceed the kernels' own
# error.
LARGEST_GROUP = 4
# How many programs of the kernel of `hopper_reverse` a chip of Hopper runs at a time, by the size of heads.
AT_ONCE = {64: 264, 128: 132}
ADDED = 2048  # sums of gradients of heads for a program


class _Launches(InverseSweeps):
    """The launches of one call, and what they have in common."""

    def __init__(self, inputs: Inputs, with_r: bool = False, forward: bool = False) -> None:
        q, k, v, beta, g, gk, a, initial_state, cu_seqlens, scale, read_before = inputs
        if read_before and gk is not None:
            raise ValueError(
                "read_before needs gates of heads, got gates of channels: their kernels read after the decay"
            )
        C = chunk_size(q.dtype == torch.bfloat16, gk is not None)
        super().__init__(q, v, initial_state, cu_seqlens, scale, C)
        self.q, self.k, self.beta = map(operand, (q, k, beta))
        self.a = operand(a)
        # The inputs that kernels for Hopper copy, whose memory may begin anywhere.
        self.of_keys = tuple(x for x in (self.q, self.k, self.a) if x is not None)
        if gk is not None:
            gk, g = _gates_of_channels(g, gk), None
        self.gk = operand(gk)
        # Without gates, reads before and after the decay are the same.
        self.read_before = read_before and g is not None
        if g is not None:
            self.gates["sums"], self.gates["rest"] = scalar_decay.sum_gates(self, operand(g), None)
        # What kernels take of each token, and the heads of these.
        self.vectors = {"q": self.q, "k": self.k, "beta": self.beta, "H": q.shape[2]}
        self.takes_inverses = (
            forward
            and self.gk is None
            and self.reads_with_key
            and _hopper.takes(self.chip, (*self.of_keys, self.v), self.K, self.V)
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
        """Fill the `products` that sweeps take, where gates are of heads, or where there are none."""
        self.HK = self.q.shape[2]
        self.factors |= {"q": self.q, "k": self.k if self.a is None else self.a}
        if self.gates["sums"] is not None and self.reads_with_key:
            self.bound_growth(tile_count(self.V, 64))
        grid = (self.chunks * self.HV,)
        gates = {"sums": self.gates["sums"], "growth": self.growth}
        arguments = dict(
            **self.vectors, **products, **gates, **self.arguments, **self.reading, K=self.K, C=self.C
        )
        if _hopper.takes(self.chip, self.of_keys, self.K):
            from flacompose.ops.families.delta_rule import hopper_pairs

            del arguments["DOT"]
            launch(hopper_pairs.pair_kernel, grid, **arguments, num_warps=4, maxnreg=168)
        else:
            config = pair_config(self.bfloat16)
            launch(pair_kernel, grid, **arguments, rest=self.gates["rest"], **config)

    @property
    def reads_with_key(self) -> bool:
        """Whether what is replaced is read as in the gated delta rule, by the key, and after the decay.

        The `growth` of chunks bounds that rule alone.
        """
        return self.a is None and not self.read_before

    @property
    def reading(self) -> dict[str, Any]:
        """What the kernels for gates of heads are told of that."""
        return {"a": self.a, "READ_BEFORE": self.read_before}

    def channel_pairs(self, products: dict[str, Tensor | None]) -> None:
        """Fill the `products` and the vectors that sweeps take, where gates are of channels."""
        read = {name: self.scratch(self.HV, self.K) for name in ("q", "k")}
        self.factors |= read
        self.gates["total"] = self.per_chunk(self.HV, self.K)
        launch_by_gates(
            channel_pair_kernel,
            self.chunks * self.HV,
            self.vectors,
            {"a": self.a, "gk": self.gk},
            products,
            {"q_read": read["q"], "k_read": read["k"], "total": self.gates["total"]},
            {"mild": self.per_chunk(self.HV, dtype=torch.int8)},
            self.arguments,
            {"K": self.K},
            channel_pair_config(self.chip, self.bfloat16, self.K),
        )

    def gradients(
        self,
        do: Tensor,
        r: Tensor | None,
        dv: Tensor | None,
        S: Tensor | None,
        dS: Tensor | None,
        gates: bool,
    ) -> dict[str, Tensor]:
        """The gradients of queries and, with `dS`, keys, `a`, `beta` and, if wanted, gates of heads, by their names."""
        H, HV = self.q.shape[2], self.HV
        gates_of_heads = {name: self.gates[name] for name in ("sums", "rest")}
        sizes = {"V": self.V, "C": self.C}
        products: dict[str, Tensor | None] = {}
        kernel, config = gradient_kernel, gradient_config(self.bfloat16, self.V)
        on_hopper = (
            dS is not None
            and HV // H <= LARGEST_GROUP
            and _hopper.takes(self.chip, (*self.of_keys, do), self.K, self.V)
        )
        if on_hopper:
            config = {"BK": 64, "num_warps": 4}
        elif stores_pairs(self.bfloat16, self.K):
            kernel, config = gradient_from_pairs_kernel, gradient_from_pairs_config(self.bfloat16)
            products = self.pair_gradients(
                r=r, do=do, dv=None if dS is None else dv, **gates_of_heads, **sizes
            )
        tiles = tile_count(self.K, config["BK"])
        outputs = self.of_tiles(tiles, H if on_hopper else HV)
        # The sums always, so that the bits of other gradients do not depend on whether those of gates are wanted.
        d_sums, d_total = self.of_sums(tiles)
        if dS is None:  # queries alone
            outputs, d_sums, d_total = dict.fromkeys(outputs) | {"dq": outputs["dq"]}, None, None
        of_values = {"r": r, "do": do, "dv": dv, "states": S, "d_states": dS}
        of_gates = {"sums": self.gates["sums"], "d_sums": d_sums, "d_total": d_total}
        arguments = dict(
            **self.vectors,
            **of_values,
            **outputs,
            **of_gates,
            **self.arguments,
            **self.reading,
            **sizes,
            **config,
            K=self.K,
        )
        if on_hopper:
            from flacompose.ops.families.delta_rule import hopper_gradients

            del arguments["DOT"]
            # One of the heads of values that share keys after the other: each adds to what was stored before.
            for i in range(HV // H):
                grid = (tiles * self.chunks * H,)
                launch(hopper_gradients.gradient_kernel, grid, **arguments, of_group=i, ADDS=i > 0)
        else:
            grid = (tiles * self.chunks * HV,)
            launch(kernel, grid, **arguments, **products, rest=self.gates["rest"])
        return self.added_up(outputs) | self.gate_gradient(d_sums, d_total, gates)

    def of_sums(self, tiles: int) -> tuple[Tensor | None, Tensor | None]:
        """Memory for the gradients of sums of gates, as `gate_gradient` takes them."""
        if self.gates["sums"] is None:
            return None, None
        return self.per_chunk(3 * tiles, self.HV, self.C), self.per_chunk(self.HV, self.K)

    def gate_gradient(self, d_sums: Tensor | None, d_total: Tensor | None, wanted: bool) -> dict[str, Tensor]:
        """The gradient of gates of heads, by its name, if it is `wanted`."""
        if not wanted:
            return {}
        assert d_sums is not None and d_total is not None
        tiles = d_sums.shape[1] // 3
        return {"g": scalar_decay.gate_gradient(self, d_sums, (tiles,) * 3, d_total, 1.0, torch.float32)}

    def has_joint_kernel(self, do: Tensor) -> bool:
        """Whether one kernel sweeps backwards in time and makes the gradients of queries and keys.

        Each of its programs goes through a whole segment, so it is faster only if hardly any multiprocessor waits for
        others in the end. That is not known of packed sequences, which may be of any lengths. Where heads share keys
        it takes less memory than the two kernels, and at times a few per cent longer. All results are those of the two
        kernels to the bit, so the choice may depend on the batch size.
        """
        programs = self.N * self.HV * self.parts
        if self.gk is not None or not self.reads_with_key or self.restarts > 1 or self.cu_seqlens is not None:
            return False
        if self.K != self.V or self.HV > LARGEST_GROUP * self.q.shape[2] or not isinstance(programs, int):
            return False
        if not _hopper.takes(self.chip, (*self.of_keys, do), self.K):
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
        """`reverse` and `gradients` in one kernel, where `has_joint_kernel` says so, which fills `r` with dv.

        It returns the gradients of queries, keys and `beta` of each head of values, and what `gate_gradient` takes.
        """
        from flacompose.ops.families.delta_rule import hopper_reverse

        HV, tiles = self.HV, self.K // 64
        starts = self.reverse_starts(do, d_final)
        # A program has read W and r of a chunk when it stores dq and dv in their place.
        dq = self.factors["W"]
        assert dq is not None
        outputs = {"dq": dq, "dk": self.per_token(HV, self.K, dtype=self.dtype)}
        outputs["dbeta"] = self.per_token(tiles, HV, dtype=torch.float32)
        d_sums, d_total = self.of_sums(tiles)
        launch(
            hopper_reverse.reverse_gradient_kernel,
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

    def of_key_heads(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """`outputs` of `reverse_gradients`, those of queries and keys added up over the heads that share keys.

        Each sum is rounded as where `hopper_gradients` adds to what the head before has stored.
        """
        H = self.q.shape[2]
        if self.HV == H:
            return outputs
        added = {}
        for name in ("dq", "dk"):
            added[name] = sums = self.per_token(H, self.K, dtype=self.dtype)
            sizes = {"size": sums.numel(), "GROUP": self.HV // H, "K": self.K, "BLOCK": ADDED}
            grid = (tile_count(sums.numel(), ADDED),)
            launch(add_heads_kernel, grid, x=outputs[name], sums=sums, **sizes, num_warps=4)
        return outputs | added

    def pair_gradients(self, **arguments: Any) -> dict[str, Tensor | None]:
        """The gradients of the products of queries and keys with keys, as `gradient_from_pairs_kernel` takes them."""
        HV = self.HV
        products = {
            "pairs": self.per_chunk(HV, 2, 2 if self.bfloat16 else 1, self.C, self.C, dtype=self.dtype),
            "diagonal": self.per_chunk(HV, self.C),
            "of_before": self.per_chunk(HV, self.C) if self.read_before else None,
        }
        launch(
            decayed_pair_gradient_kernel,
            (self.chunks * HV,),
            **arguments,
            **products,
            **self.arguments,
            READ_BEFORE=self.read_before,
            **pair_gradient_config(self.bfloat16),
        )
        return products

    def channel_gradients(
        self,
        do: Tensor,
        r: Tensor | None,
        dv: Tensor | None,
        S: Tensor | None,
        dS: Tensor | None,
        gates: bool,
    ) -> dict[str, Tensor]:
        """The gradients of queries, keys, `a`, `beta` and, if wanted, of the gates of channels, by their names."""
        assert self.gk is not None
        HV = self.HV
        products = {"pairs": self.per_chunk(HV, 2, self.C, self.C), "diagonal": self.per_chunk(HV, self.C)}
        of_values = {"r": r, "do": do, "dv": dv, "V": self.V}
        on_hopper = _hopper.takes(self.chip, (*self.of_keys, do), self.K, self.V)
        if not on_hopper:
            config = pair_gradient_config(self.bfloat16)
            launch(
                pair_gradient_kernel, (self.chunks * HV,), **of_values, **products, **self.arguments, **config
            )
        config = channel_config(self.chip, self.bfloat16)
        parts = tile_count(self.K, config["BK"])
        outputs = self.of_tiles(parts, HV)
        dgk = self.per_token(HV, self.K, dtype=self.gk.dtype) if gates else None
        given = {"a": self.a, "gk": self.gk, "states": S, "d_states": dS}
        of_gates = {"dgk": dgk, "mild": self.per_chunk(HV, parts, dtype=torch.int8)}
        arguments = dict(
            **self.vectors,
            **given,
            **of_values,
            **products,
            **outputs,
            **of_gates,
            **self.arguments,
            K=self.K,
        )
        programs = parts * self.chunks * HV
        if on_hopper:
            from flacompose.ops.families.delta_rule import hopper_channels

            taken = {name: x for name, x in arguments.items() if name != "DOT"}
            launch(hopper_channels.channel_kernel, (programs,), **taken, BK=config["BK"], num_warps=4)
            launch(channel_kernel, (programs,), **arguments, **config, MILD=False)
        else:
            launch_by_gates(channel_kernel, programs, arguments, config)
        made = self.added_up(outputs)
        if dgk is not None:
            made["gk"] = self.batched(dgk)
            made["g"] = made["gk"].sum(-1)
        return made

    def of_tiles(self, tiles: int, heads: int) -> dict[str, Any]:
        """Memory for dq, dk and da, of this many `heads`, and for dbeta, as `added_up` takes them."""
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


def chunk_size(bfloat16: bool, of_channels: bool) -> int:
    """Tokens of a chunk. Where gates are of channels, chunks are those of vector decay."""
    return vector_decay.CHUNK if of_channels else 64 if bfloat16 else 32


# Tiles of products in bfloat16 are 64 wide at least: Triton 3.6 miscompiles narrower ones on Hopper.


def pair_config(bfloat16: bool) -> dict[str, int]:
    """Block size of the contracted axis, warps, pipeline stages and, for three programs at a time, registers."""
    if not bfloat16:
        return {"BK": 32, "num_warps": 4, "num_stages": 1}
    return {"BK": 128, "num_warps": 4, "num_stages": 1, "maxnreg": 168}


def channel_pair_config(chip: Chip, bfloat16: bool, K: int) -> dict[str, int]:
    """Block size of the contracted axis, whether the keys that write are kept for their product, warps and stages.

    They wait for it in shared memory and take 512 bytes for each channel. In bfloat16, those of more than 128 channels
    leave no room for a second program on a multiprocessor. In float32 there are 65 KiB of other factors beside them.
    """
    BK, keep = 64 if K > 128 else max(block(K, 128), 64), K <= 128
    if not bfloat16:
        BK = 32
        keep = 65 * 1024 + 512 * BK * tile_count(K, BK) <= chip.shared_memory
    return {"BK": BK, "KEEP": keep, "num_warps": 4, "num_stages": 1}


def gradient_config(bfloat16: bool, V: int) -> dict[str, int]:
    """Block sizes of the key axis and of the value axis, which is contracted, warps and pipeline stages."""
    if not bfloat16:
        return {"BK": 32, "BV": 32, "num_warps": 4, "num_stages": 1}
    return {"BK": 64, "BV": max(block(V, 128), 64), "num_warps": 4, "num_stages": 1}


def stores_pairs(bfloat16: bool, K: int) -> bool:
    """Whether the gradients of pairs are stored once for all tiles of the key axis, or computed again by each tile."""
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
