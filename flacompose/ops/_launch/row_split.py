"""Segments of a long row: their transitions are joined, and then all segments are processed at the same time.

A segment maps the state as a token and a chunk do: ``S_end = decay * S_start + end``. So a long row takes
three steps.

- State passing, started at zero, computes the `ends` of all segments and the sums of their gates.
- These transitions are joined to the state before each segment.
- State passing, started at these states, computes the results.

Backwards in time the decay of a segment is the same, and segments are counted from the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from flacompose.ops._launch.launch import launch
from flacompose.ops._launch.operands import tile_count
from flacompose.ops._launch.sequences import Sequences, per_segment
from flacompose.ops._tiles.join import decay_join_kernel

BLOCK = 256  # numbers of a state per program
PassStates = Callable[..., None]


class Segments:
    """The segments of each of the `sequences`, as many as `Sequences.segments` returns.

    Args:
        units: the number of units of a row, mostly chunks.
        programs: the number of programs of a segment.
        state: the shape of a state, ``(H, K, V)``, or without its first axes.
        gates: the parameter names of the sums of gates in state passing: of `g`, gates of heads,
            ``[count, N, H]``; of `gk` and `gv`, gates of channels of keys, ``[count, N, H, K]``, and of
            values, ``[count, N, H, V]``.
        rates: ``[K, V]``, factors of the sums of gates.
    """

    def __init__(
        self,
        sequences: Sequences,
        units: int,
        programs: int,
        state: tuple[int, ...],
        gates: Mapping[str, str] = MappingProxyType({}),
        rates: Tensor | None = None,
    ) -> None:
        # `sequences` is not kept, since it may hold this object: a reference cycle keeps the memory of all
        # its tensors until Python's garbage collector runs.
        self.N, self.device = sequences.N, sequences.device
        self.state, self.gates, self.rates = state, gates, rates
        self.count, self.split = sequences.segments(units, programs)

    def starts(
        self, pass_states: PassStates, initial: Tensor | None, sums: dict[str, Tensor] | None = None
    ) -> Tensor | None:
        """The state before each segment, ``[count, N, *state]``, from that before the first, zero if it is None.

        `pass_states` is called with `ends` and the sums of gates, and fills them, except for the last segment.
        """
        initial = None if initial is None else initial.contiguous()
        if not self.split:
            return initial
        ends = self._memory(*self.state)
        sums = self.sums() if sums is None else sums
        pass_states(ends=ends, **sums)
        return self._decayed(ends, initial, sums)

    def _decayed(self, states: Tensor, initial: Tensor | None, sums: dict[str, Tensor]) -> Tensor:
        """The states before segments, which overwrite `states`, the ends of segments."""
        H, K, V = ((1, 1) + self.state)[-3:]
        gates = {gate: sums.get(self.gates.get(gate, "")) for gate in ("g", "gk", "gv")}
        sizes = {"N": self.N, "H": H, "SEGMENTS": self.count, "K": K, "V": V, "BLOCK": BLOCK, "num_warps": 2}
        tensors = {"states": states, **gates, "rates": self.rates, "initial": initial}
        launch(decay_join_kernel, (tile_count(K * V, BLOCK) * self.N * H,), **tensors, **sizes)
        return states

    def map(self, pass_states: PassStates) -> tuple[Tensor, ...]:
        """The transition of each whole sequence: its `end`, ``[N, *state]``, and the sums of its gates."""
        end = torch.empty(self.N, *self.state, dtype=torch.float32, device=self.device)
        sums = self.sums()
        pass_states(initial=self.starts(pass_states, None, sums), final=end, **sums)
        return end, *(x[: self.count].sum(0) for x in sums.values())

    def sums(self) -> dict[str, Tensor]:
        """Memory for the sums of each segment's gates."""
        *H, V = self.state
        shapes = {"g": H[:-1], "gk": H, "gv": [*H[:-1], V]}
        return {x: self._memory(*shapes[gate]) for gate, x in self.gates.items()}

    def _memory(self, *shape: int) -> Tensor:
        """Memory for ``[count, N, *shape]``."""
        return per_segment(self.count, self.N, *shape, device=self.device)
