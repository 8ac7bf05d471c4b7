"""Launches of state passing for the recurrences that erase, with long rows cut into segments.

The transition of a segment is an affine map of the state: `ends` are the states that segments reach from
zero, and `transitions` the matrices by which they multiply any other state. Joined, they give the state
before each segment, `starts`. From these, all segments are processed at the same time, forwards or backwards
in time.

To compute the transitions takes two more passes, which pay off only for rows of many segments. Shorter rows
are cut only where the state decays to zero in all heads. A segment then has a warm start: it begins at the
state that the last chunks before it reach from zero.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flacompose.ops._launch.chip import HOPPER, Chip
from flacompose.ops._launch.launch import launch, launches_into_graph
from flacompose.ops._launch.operands import block, operand, operand_by_token, tile_count
from flacompose.ops._launch.row_split import Segments, Sweep
from flacompose.ops._launch.sequences import MatrixSequences
from flacompose.ops._recurrences.matrix.delta_rule.both_directions import delta_both_directions_kernel
from flacompose.ops._recurrences.matrix.delta_rule.kernels import (
    ASKED,
    HEADS,
    delta_backward_state_passing_kernel,
    delta_join_kernel,
    delta_state_passing_kernel,
)


class Sweeps(MatrixSequences):
    """State passing of one call, in both directions.

    It takes these `factors`, which `kernels` explains: the query and key factors "q" and "k", which read the
    state and have `HK` heads; the keys "W", which write values; in the low-rank recurrence the keys "b",
    which write the reads of "k"; and the products "P" and "Y" of tokens in a chunk. The `gates` are "sums"
    and "rest" for gates of heads, and "total" for gates of channels. `growth` is the log-norm bound of each
    chunk, if the recurrence has one. With `read_before`, "k" reads a state before the gate of a head decays
    it.
    """

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float,
        C: int,
    ) -> None:
        super().__init__(q, v, cu_seqlens, scale, C)
        self.HK = self.HV = self.arguments.pop("H")
        self.arguments["HV"] = self.HV
        self.v, self.v_token = operand_by_token(v)
        self.initial = operand(initial_state)
        # The states before segments take two more passes, so two or three segments would gain nothing.
        self.row = Segments(self, self.chunks_of_row, 4 * self.HV, (self.HV, self.K, self.V), least=4)
        self.transitions: Tensor | None = None
        self.gates: dict[str, Tensor | None] = dict.fromkeys(("sums", "rest", "total"))
        self.factors: dict[str, Tensor | None] = dict.fromkeys(("q", "k", "W", "b", "P", "Y"))
        self.growth: Tensor | None = None
        self.restarts = 1  # the number of segments of a row with warm starts
        self.read_before = False

    def bound_growth(self, tiles: int) -> None:
        """Allocate the log-norm bounds of chunks, if passes leave out chunks or have warm starts.

        `tiles` is how many programs share the value axis of a state where programs are few.
        """
        # Not in a graph: its compiler would copy memory that is filled segment by segment.
        if not self.row.split and not launches_into_graph():
            self.restarts = restart_count(self.chunks_of_row, self.N * self.HV * tiles)
        if self.row.split or self.restarts > 1:
            self.growth = self.per_chunk(self.HV)

    def chunk(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``(o [B, T, HV, V], final_state [N, HV, K, V])``, the former of this `dtype`."""
        o, final_state = self.per_token(self.HV, self.V, dtype=dtype), self.state(torch.float32)
        self.sweep(o=o, final=final_state)
        return self.batched(o), final_state

    def scratch(self, *shape: int) -> Tensor:
        """Memory for a factor of products, for each token of a sequence."""
        return torch.empty(*self.tokens, *shape, dtype=self.dtype, device=self.device)

    def free_sweep_memory(self) -> None:
        """Free the memory that only state passing needs."""
        self.factors.clear()
        self.transitions = None

    def sweep(self, **tensors: Tensor | None) -> None:
        """Pass states forwards in time: fill `o`, `r`, `states` and `final`, if given."""
        sweep: Sweep = partial(self._sweep, v=self.v)
        sweep(initial=self.starts(), **tensors)

    def starts(self) -> Tensor | None:
        """The states before segments, at which state passing forwards in time starts."""
        sweep: Sweep = partial(self._sweep, v=self.v)
        if self.restarts > 1:
            starts = self.per_segment(self.restarts, self.HV, self.K, self.V)
            fill(starts[0], self.initial)
            sweep(ends=starts[1:])
            return starts
        return self.row.starts(sweep, self.initial, join=self._join)

    def map(self) -> tuple[Tensor, Tensor]:
        """The transition of each sequence: ``(end [N, HV, K, V], matrix [N, HV, K, K])``, `end` from zero."""
        self.restarts = 1  # the matrix of the transition is a product over all chunks
        end, matrix = self.state(torch.float32), self.per_sequence(self.HV, self.K, self.K)
        self.sweep(final=end)
        eye = torch.eye(self.K, dtype=torch.float32, device=self.device).repeat(self.N, self.HV, 1, 1)
        self._sweep(V=self.K, initial=self._join(None, eye) if self.row.split else eye, final=matrix)
        return end, matrix

    def _sweep(self, V: int | None = None, IDENTITY: bool = False, **tensors: Tensor | None) -> None:
        V = self.V if V is None else V
        given: dict[str, Tensor | None] = dict.fromkeys(("v", "initial", "o", "r", "states", "ends", "final"))
        given |= tensors
        factors = dict(self.factors)
        for factor, output in (("P", "o"), ("Y", "r")):  # each is needed for one output only
            if given[output] is None:
                factors[factor] = None
        grid, config = self.sweep_launch(V)
        sizes = {"v_token": self.v_token, "V": V, "IDENTITY": IDENTITY}
        shared = self._of_sweeps(given["ends"])
        launch(
            delta_state_passing_kernel, grid, **given, **factors, **self.gates, **shared, **sizes, **config
        )

    def reverse(self, do: Tensor, d_final: Tensor | None, **tensors: Tensor | None) -> None:
        """Pass gradients backwards in time: fill `dv`, `du`, `d_states` and `d_initial`, if given."""
        self._reverse(do, d_final=self.reverse_starts(do, d_final), **tensors)

    def reverse_starts(self, do: Tensor, d_final: Tensor | None) -> Tensor | None:
        """The gradients of the states after segments, at which state passing backwards in time starts."""
        sweep = partial(self._reverse, do)
        if self.restarts > 1:
            of_segments = self.per_segment(self.restarts, self.HV, self.K, self.V)
            fill(of_segments[self.restarts], d_final)
            sweep(ends=of_segments)
            return of_segments[1:]
        return self.row.starts(sweep, d_final, join=partial(self._join, reverse=True))

    def sweep_both_ways(self, do: Tensor, d_final: Tensor | None, **tensors: Tensor | None) -> None:
        """`sweep`, for `r` and `states`, and `reverse` at the same time."""
        outputs: dict[str, Tensor | None] = dict.fromkeys(("dv", "du", "d_states", "d_initial"))
        starts = {"initial": self.starts(), "d_final": self.reverse_starts(do, d_final)}
        (programs,), config = self.sweep_launch(self.V)
        launch(
            delta_both_directions_kernel,
            (programs, 2),
            v=self.v,
            do=do,
            **(outputs | tensors),
            **starts,
            **self.factors,
            **self.gates,
            **self._of_sweeps(None),
            v_token=self.v_token,
            V=self.V,
            **config,
        )

    def place_of_dv(self, both_ways: bool) -> Tensor:
        """Memory for the gradients of values, if possible that of the matrices W.

        It is possible if each program of `reverse` reads the whole W of its head, and stores as much. When it
        stores the gradients of a chunk, all its threads have waited for the chunk's W, which nothing reads
        afterwards. With `both_ways`, W is read forwards in time at the same time, so the gradients need
        memory of their own.
        """
        _, config = self.sweep_launch(self.V)
        alone = not both_ways and config["BV"] >= self.V == self.K
        # Tokens outside packed sequences have gradients of zero, and a graph copies the tensors that its
        # kernels change.
        if alone and self.cu_seqlens is None and not launches_into_graph():
            assert self.factors["W"] is not None
            return self.factors["W"]
        return self.per_token(self.HV, self.V, dtype=self.dtype)

    @property
    def sweeps_at_once(self) -> bool:
        """Whether both directions run in one launch, because the programs of one would not fill a chip."""
        return are_few(self.parts * self.N * self.HV, self.V)

    def _reverse(self, do: Tensor, **tensors: Tensor | None) -> None:
        given: dict[str, Tensor | None] = dict.fromkeys(
            ("d_final", "dv", "du", "d_states", "ends", "d_initial")
        )
        given |= tensors
        factors = {name: x for name, x in self.factors.items() if name != "Y"}
        grid, config = self.sweep_launch(self.V)
        shared = self._of_sweeps(given["ends"])
        launch(
            delta_backward_state_passing_kernel,
            grid,
            do=do,
            **given,
            **factors,
            **self.gates,
            **shared,
            V=self.V,
            **config,
        )

    def _of_sweeps(self, ends: Tensor | None) -> dict[str, Any]:
        """The arguments that both directions share. Passes for `ends` use the log-norm bound."""
        sizes = {"HK": self.HK, "SEGMENTS": self.parts, "K": self.K, "C": self.C}
        restarts = self.restarts > 1
        growth = self.growth if restarts or ends is not None else None
        return dict(**self.arguments, **sizes, growth=growth, RESTARTS=restarts, READ_BEFORE=self.read_before)

    @property
    def parts(self) -> int:
        """The number of segments of a row, with warm starts or joined by their transitions."""
        return self.restarts if self.restarts > 1 else self.row.count

    def _join(self, ends: Tensor | None, initial: Tensor | None, reverse: bool = False) -> Tensor:
        """The state before each segment or, with `reverse`, the gradient of the state after it.

        Without `ends`, the states reached from zero are zero, and `initial` has `K` values.
        """
        if self.transitions is None:  # backwards in time the transposed matrices apply
            self.transitions = self.per_segment(self.row.count, self.HV, self.K, self.K)
            self._sweep(ends=self.transitions, V=self.K, IDENTITY=True)
        V = self.K if ends is None else self.V
        starts = self.per_segment(self.row.count, self.HV, self.K, V)
        config = join_config(self.chip, self.bfloat16, self.K)
        tensors = {"transitions": self.transitions, "ends": ends, "initial": initial, "starts": starts}
        others = ("HK", "scale", "growth", "RESTARTS", "READ_BEFORE")
        arguments = {name: x for name, x in self._of_sweeps(None).items() if name not in others}
        grid = (tile_count(V, config["BV"]) * self.HV * self.N,)
        launch(delta_join_kernel, grid, **tensors, **arguments, V=V, REVERSE=reverse, **config)
        return starts

    def sweep_launch(self, V: int) -> tuple[tuple[int], dict[str, int]]:
        """The grid of state passing with `V` values, and its configuration."""
        states = self.parts * self.N * self.HV
        low_rank = self.factors["b"] is not None
        config = sweep_config(self.chip, self.bfloat16, self.K, V, states, low_rank)
        return (tile_count(V, config["BV"]) * states,), config


def restart_count(chunks: int, programs: int) -> int:
    """The number of segments of a row of `chunks` with warm starts, if `programs` process all rows uncut.

    The segments are as many as fill a large chip, and have at least twice the `ASKED` chunks. A row is cut
    only if the programs, and so the heads of a row, are at most `HEADS`. Unlike the number of segments that
    are joined by their transitions, it may depend on the batch size: a finite state below 2^43 that decays to
    zero changes no bit of the results, wherever a segment starts. Only a warm start drops a larger state.
    The number is 1 for sizes that the compiler does not know.
    """
    if not isinstance(chunks, int) or not isinstance(programs, int):
        return 1
    return max(1, min(chunks // (2 * ASKED.value), 2 * HEADS.value // programs))


def are_few(states: int, V: int) -> bool:
    """Whether `states` of `V` values are at most 128 tiles of 64 values, about one for each multiprocessor.

    False for sizes that the compiler does not know.
    """
    return isinstance(states, int) and states * tile_count(V, 64) <= 128


def fill(state: Tensor, given: Tensor | None) -> None:
    """Write the `given` state, zero if there is none."""
    if given is None:
        state.zero_()
    else:
        state.copy_(given)


def wide_warps(chip: Chip, K: int) -> int:
    """The warps of a program that holds a state of more than 128 keys.

    Such a state does not fit in tensor memory. Triton does not use tensor memory where a program has 16
    warps.
    """
    return 16 if chip.has_tensor_memory and K > 128 else 8


def sweep_config(
    chip: Chip, bfloat16: bool, K: int, V: int, states: int, low_rank: bool = False
) -> dict[str, int]:
    """Block sizes of the contracted axis and of the other, warps and stages.

    A program has all blocks of the contracted axis. Where there are enough `states` for all multiprocessors,
    and no tensor memory, two groups of four warps share the operands that they load.
    """
    if not bfloat16:
        return {
            "BK": block(K, 128 if K <= 128 else 64),
            "BV": 16 if K > 128 else 32,
            "num_warps": 4,
            "num_stages": 1,
        }
    # Two parts of 256 keys do not fit in the registers beside the operands of a chunk.
    BK = 128 if K > 256 else block(K, 256)
    # Hopper multiplies operands in registers, which suffice for 256 keys if one part of 64 is rounded at a
    # time.
    if K > 256 or (K > 128 and chip.capability != HOPPER.capability):
        return {"BK": BK, "BV": 64, "num_warps": wide_warps(chip, K), "num_stages": 1}
    # Tensor memory has no room for the state of programs with 128 values and keys.
    BV = 64 if V <= 64 or chip.has_tensor_memory or are_few(states, V) else 128
    # The fourth key factor of the low-rank recurrence leaves no room for a second stage beside larger heads.
    stages = 1 if low_rank and (K > 128 or (chip.is_small and K > 64)) else 2
    # The operands of a part of 128 keys do not fit in the registers of four warps.
    BK = 64 if K > 128 or BV == 64 else max(BK, 64)
    return {"BK": BK, "BV": BV, "num_warps": BV // 16, "num_stages": stages}


def join_config(chip: Chip, bfloat16: bool, K: int) -> dict[str, int]:
    """Block sizes of the keys, of the values, and of the keys where contracted; warps and stages."""
    BK = block(K, 256)
    if bfloat16:
        return {"BK": max(BK, 64), "BV": 64, "BD": 64, "num_warps": wide_warps(chip, K), "num_stages": 1}
    return {"BK": BK, "BV": 16, "BD": 16, "num_warps": 8, "num_stages": 1}
