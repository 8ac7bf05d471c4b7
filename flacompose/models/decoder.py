"""Decoding by a compiled step that is recorded as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flacompose.layers import _check

_WARM_UPS = 3  # calls before a CUDA graph is recorded: the first compiles


class Decoder:
    """A model's step from token to token, compiled, and on a GPU recorded as a CUDA graph.

    It keeps the state in memory of its own, which each call of the model reads and replaces. A call copies the tokens
    in, replays the graph and returns copies of the outputs, so that nothing that was returned changes later.

    The model may be a [RecurrentLM][flacompose.models.RecurrentLM] without softmax attention, a layer, or any function
    of tokens and state that ``torch.compile`` takes with ``fullgraph=True``. If the function also chooses the token,
    that is part of the graph too.

    The graph reads the model's parameters where they were when the decoder was made: values that are written into
    them count, and parameters that are replaced do not.

    Args:
        model: ``model(tokens, state)`` returns ``(outputs, state)``. The new state has the structure, the shapes and
            the dtypes of the old one, and `outputs` is a tensor or a pytree of tensors.
        tokens: An example of what one call reads, as ``[B, 1]`` of token ids, or ``[B, 1, hidden_size]`` for a layer.
        state: The state to begin with, a pytree of tensors: as a call of the model with the prompt returned it.
        options: Options for Inductor, as ``torch.compile`` takes them. They are added to those of the decoder, which
            are ``coordinate_descent_tuning``, and, unless `options` has ``post_grad_custom_pre_pass``, that kernels
            write a state where they read it. Default: none.

    Raises:
        TypeError: If `tokens` is no tensor, or `state` holds something else than tensors.
        ValueError: If the model returns a state of another structure, or with another shape, dtype or device: that of
            softmax attention grows with every token.
    """

    def __init__(
        self,
        model: Callable[[Tensor, Any], tuple[Any, Any]],
        tokens: Tensor,
        state: Any,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(tokens, Tensor):
            raise TypeError(f"tokens must be a tensor, got {type(tokens).__name__}")
        leaves, self._structure = pytree.tree_flatten(state)
        _check_tensors(leaves)
        self._tokens = tokens.detach().clone()
        self._state = [x.detach().clone(memory_format=torch.contiguous_format) for x in leaves]
        self._check(model)

        def step(tokens: Tensor, state: list[Tensor]) -> tuple[Any, list[Tensor]]:
            outputs, new = model(tokens, pytree.tree_unflatten(state, self._structure))
            return outputs, pytree.tree_leaves(new)

        from flacompose.models.states_in_place import StatesInPlace  # which imports Inductor

        defaults: dict[str, Any] = {
            "coordinate_descent_tuning": True,
            "post_grad_custom_pre_pass": StatesInPlace(),
        }
        # PyTorch counts compilations by the code object, and refuses more than a few: each decoder has its own.
        step.__code__ = step.__code__.replace()
        self._compiled = torch.compile(
            step, fullgraph=True, dynamic=False, options={**defaults, **(options or {})}
        )
        self._graph: torch.cuda.CUDAGraph | None = None
        if tokens.is_cuda:
            with torch.cuda.device(tokens.device):
                self._record()
        self.load(state)

    def __call__(self, tokens: Tensor) -> Any:
        """Go one step on from the state that is held.

        Args:
            tokens: Of the shape, the dtype and the device of the example.

        Returns:
            The outputs of the model.

        Raises:
            TypeError: If `tokens` is no tensor, or of another dtype.
            ValueError: If its shape or its device is another.
        """
        _check_like("tokens", tokens, self._tokens)
        with torch.no_grad():
            self._tokens.copy_(tokens)
            if self._graph is None:
                return self._step()
            self._graph.replay()
            return pytree.tree_map(torch.clone, self._outputs)

    @property
    def state(self) -> Any:
        """A copy of the state that is held, that after the last token."""
        return pytree.tree_unflatten([x.clone() for x in self._state], self._structure)

    def load(self, state: Any) -> None:
        """Go on from `state`, a copy of which is held.

        Raises:
            TypeError: If `state` holds something else than tensors, or a dtype is another than that of the example.
            ValueError: If its structure, or a shape or device, is another.
        """
        leaves, structure = pytree.tree_flatten(state)
        _check_tensors(leaves)
        if structure != self._structure:
            raise ValueError("state must have the structure of the state that the decoder was made with")
        for i, (old, x) in enumerate(zip(self._state, leaves, strict=True)):
            _check_like(f"state: tensor {i}", x, old)
        with torch.no_grad():
            for old, x in zip(self._state, leaves, strict=True):
                old.copy_(x)

    def _step(self) -> Any:
        """Go one step on from the state that is held. Returns the outputs, in memory that is not the state's."""
        outputs, new = self._compiled(self._tokens, self._state)
        held = {x.untyped_storage().data_ptr() for x in (self._tokens, *self._state)}

        def apart(x: Tensor) -> Tensor:
            return x.clone() if x.untyped_storage().data_ptr() in held else x

        outputs = pytree.tree_map(apart, outputs)
        # What a kernel has written where it belongs stays. What is part of the old state is copied from there before
        # any of it is replaced.
        moved = {i: apart(x) for i, x in enumerate(new) if not x.is_set_to(self._state[i])}
        if moved:
            torch._foreach_copy_([self._state[i] for i in moved], list(moved.values()))
        return outputs

    @torch.no_grad()
    def _check(self, model: Callable[[Tensor, Any], tuple[Any, Any]]) -> None:
        """Call the model once, and see whether the new state is like the old one."""
        state = pytree.tree_unflatten(self._state, self._structure)
        _, new = model(self._tokens, state)
        leaves, structure = pytree.tree_flatten(new)
        if structure != self._structure:
            raise ValueError("model must return a state of the structure that it is given, got another")
        for i, (old, x) in enumerate(zip(self._state, leaves, strict=True)):
            if _kind(x) != _kind(old):
                raise ValueError(
                    f"model must return a state like the one it is given, got for tensor {i} of it {_kind(x)} "
                    f"instead of {_kind(old)}; the state of softmax attention grows with every token"
                )

    @torch.no_grad()
    def _record(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._outputs = self._step()
        self._graph = graph


def _kind(x: Any) -> str:
    return f"{tuple(x.shape)}, {x.dtype} on {x.device}" if isinstance(x, Tensor) else type(x).__name__


def _check_tensors(leaves: list[Any]) -> None:
    for i, x in enumerate(leaves):
        if not isinstance(x, Tensor):
            raise TypeError(f"state must hold tensors alone, got {type(x).__name__} as its leaf {i}")


def _check_like(name: str, x: Any, example: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dtype != example.dtype:
        raise TypeError(f"{name} must be {example.dtype}, as the decoder was made with, got {x.dtype}")
    if x.shape != example.shape:
        raise ValueError(
            f"{name} must have shape {tuple(example.shape)}, as the decoder was made with, got {tuple(x.shape)}"
        )
    _check.same_device(name, x, example)
