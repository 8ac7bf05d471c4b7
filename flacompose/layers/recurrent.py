"""What all layers share: a state that goes in and comes out, and how its tokens lie."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from flacompose.layers import _check
from flacompose.layers.layout import Layout, layout
from flacompose.layers.state import RecurrentState, StateShapes
from flacompose.ops._define import autocast_on


class RecurrentLayer(nn.Module):
    """A layer around one recurrence, whose op has a chunked form and a recurrent one."""

    chunk_modes: ClassVar[tuple[str, ...]] = ()  # what else the peer calls chunks
    state_shapes: StateShapes

    def __init__(self, hidden_size: int, mode: str = "chunk") -> None:
        super().__init__()
        if mode in self.chunk_modes:
            raise ValueError(f"mode {mode!r} is no op of its own: use 'chunk', the same function")
        if mode not in ("chunk", "fused_recurrent"):
            raise ValueError(f"mode must be 'chunk' or 'fused_recurrent', got {mode!r}")
        _check.count("hidden_size", hidden_size)
        self.hidden_size = hidden_size
        self.mode = mode

    @property
    def _weight(self) -> Tensor:
        """That of a projection, whose dtype and device the layer has."""
        raise NotImplementedError

    def init_state(self, batch_size: int) -> RecurrentState:
        """The state before the first token of `batch_size` sequences, on the device of the parameters.

        It is zeros, but a running logsumexp, the normaliser of ABC and of LightNet, is -inf. The recurrent state and
        the normaliser are float32 (float64 in a float64 layer). The states of convolutions and token shifts have the
        dtype that projections have, that of autocast where it is on, so that a compiled layer meets one dtype in every
        call.

        Raises:
            ValueError: If `batch_size` is below 0.
            TypeError: If it is no int.
        """
        _check.integer("batch_size", batch_size)
        _check.not_negative("batch_size", batch_size)
        return self.state_shapes.zeros(batch_size, self._weight)

    def _enter(
        self,
        hidden_states: Tensor,
        state: RecurrentState | None,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Layout, Tensor]:
        """Check the arguments of a call; where its tokens lie, and those tokens."""
        tokens = layout(hidden_states, self.hidden_size, attention_mask, cu_seqlens)
        _check.same_dtype("hidden_states", hidden_states, self._weight, autocast_on(hidden_states.device))
        if state is not None:
            N = hidden_states.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            self.state_shapes.check(state, N, hidden_states)
        return tokens, tokens.enter(hidden_states)

    def _recurrent(self, x: Tensor) -> bool:
        """Whether the recurrent form of the op computes ``x [B, T, D]``, as it does every single token."""
        return self.mode == "fused_recurrent" or statically_known_true(x.shape[1] == 1)
