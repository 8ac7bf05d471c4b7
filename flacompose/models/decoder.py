"""Decoding with a compiled step, recorded as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from flacompose._errors import TypeError, ValueError
from flacompose._torch import pytree
from flacompose.layers import _check
from flacompose.ops._arguments.require import kind

_WARM_UPS = 3  # calls before a CUDA graph is recorded; the first one compiles


class Decoder:
    """One decoding step of a model, compiled and, on a GPU, recorded as a CUDA graph.

    It holds the state, which each call replaces. A call copies the tokens into the graph, replays it and returns copies
    of the outputs, so returned tensors never change.

    The model may be a [RecurrentLM][flacompose.models.RecurrentLM] without softmax attention, a layer, or any function
    of tokens and state that ``torch.compile`` takes with ``fullgraph=True``. Such a function may also choose the token.

    Mind the following:

    - It compiles, and tunes kernels, for the shape of its tokens. On a CPU this happens at the first call. On a GPU the
      constructor calls, compiles and records the model. This does not change later random numbers, but it changes
      buffers that the model writes to.
    - On a GPU the graph reads the memory that the parameters had when the decoder was made. It sees values that are
      written into them. Do not replace, move or convert parameters: the graph would read freed memory. Later changes
      of the model's mode or of autocast have no effect.
    - Use a decoder in one thread and on one stream. Decoders cannot be copied, pickled, traced or compiled, and take no
      sharded tensors.

    Args:
        model: ``model(tokens, state)`` returns ``(outputs, state)``. The new state has the structure, the shapes and
            the dtypes of the old one, and `outputs` is a tensor or a pytree of tensors.
        tokens: Example tokens of one call, such as token ids ``[B, 1]``, or ``[B, 1, hidden_size]`` for a layer.
        state: The first state, a pytree of tensors on the device of the tokens: from `init_state`, or from a call of
            the model with the prompt.
        options: Options for Inductor, as in ``torch.compile``, besides the decoder's own options. These are
            ``coordinate_descent_tuning``, no ``comprehensive_padding``, and a ``post_grad_custom_pre_pass`` by which
            kernels overwrite the state that they read, unless `options` or Inductor's configuration has such a pass.
            Default: none.

    Raises:
        TypeError: If `model` cannot be called or does not return two results, `tokens` is no tensor, `state` or
            `outputs` hold something other than plain tensors, or `options` is no mapping.
        RuntimeError: If PyTorch does not know an option.
        ValueError: If the model returns a state with another structure, shape, dtype or device, like softmax attention,
            whose state grows with every token, or if a tensor of `state` is not on the device of the tokens.
    """

    def __init__(
        self,
        model: Callable[[Tensor, Any], tuple[Any, Any]],
        tokens: Tensor,
        state: Any,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(model):
            raise TypeError(f"model must be a module or a function, got {kind(model)}")
        _check_tensor("tokens", tokens)
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(f"options must be a mapping, got {kind(options)}")
        structure = pytree.tree_structure(state)
        named = _named("state", state)
        for name, x in named.items():
            _check_tensor(name, x)
            _check.same_device(name, x, tokens)
        self._model = model
        self._structure, self._names = structure, list(named)

        from flacompose._inductor import config
        from flacompose.models.states_in_place import StatesInPlace, replaceable  # which import Inductor

        inductor: dict[str, Any] = {
            "coordinate_descent_tuning": True,
            # PyTorch 2.11 would pad the output of fused projections, and copy queries, keys and values out of it.
            "comprehensive_padding": False,
            # A pass in Inductor's configuration has precedence.
            "post_grad_custom_pre_pass": config.post_grad_custom_pre_pass or StatesInPlace(),
            **(options or {}),
        }
        in_place = isinstance(inductor["post_grad_custom_pre_pass"], StatesInPlace)

        def step(tokens: Tensor, state: list[Tensor]) -> tuple[Any, list[Tensor]]:
            if in_place:
                state = [replaceable(x) for x in state]
            outputs, new = model(tokens, pytree.tree_unflatten(state, structure))
            return outputs, pytree.tree_leaves(new)

        # PyTorch limits the number of compilations of a code object, so each decoder has its own.
        step.__code__ = step.__code__.replace()
        self._compiled = torch.compile(step, fullgraph=True, dynamic=False, options=inductor)
        self._graph: torch.cuda.CUDAGraph | None = None
        devices = [tokens.device] if tokens.is_cuda else []
        with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices):
            self._tokens = tokens.detach().clone()
            self._state = [x.detach().clone(memory_format=torch.contiguous_format) for x in named.values()]
            self._check(model)
            if tokens.is_cuda:
                with torch.cuda.device(tokens.device):
                    self._record()
        self.load(state)

    def __call__(self, tokens: Tensor) -> Any:
        """Compute one step, and replace the state.

        Args:
            tokens: Tokens of the shape, dtype and device of the example.

        Returns:
            The outputs of the model.

        Raises:
            TypeError: If `tokens` is no tensor, or has another dtype.
            ValueError: If its shape or device differs.
        """
        _check_like("tokens", tokens, self._tokens)
        with torch.inference_mode(False), torch.no_grad():
            self._tokens.copy_(tokens)
            if self._graph is None:
                outputs = self._step()
            else:
                self._graph.replay()
                outputs = self._outputs
            return pytree.tree_map(torch.clone, outputs)

    @property
    def state(self) -> Any:
        """A copy of the state after the last token."""
        return pytree.tree_unflatten([x.clone() for x in self._state], self._structure)

    def load(self, state: Any) -> None:
        """Replace the state by a copy of `state`.

        Raises:
            TypeError: If `state` holds something other than tensors, or a dtype differs from the example.
            ValueError: If its structure, a shape or a device differs from the example.
        """
        _check_structure("state must be", state, self._structure, self._names)
        named = _named("state", state)
        for old, (name, x) in zip(self._state, named.items(), strict=True):
            _check_like(name, x, old)
        with torch.inference_mode(False), torch.no_grad():
            for old, x in zip(self._state, named.values(), strict=True):
                old.copy_(x)

    def _step(self) -> Any:
        """Compute one step, and replace the state. The returned outputs do not share memory with it."""
        outputs, new = self._compiled(self._tokens, self._state)
        held = {x.untyped_storage().data_ptr() for x in (self._tokens, *self._state)}

        def apart(x: Tensor) -> Tensor:
            return x.clone() if x.untyped_storage().data_ptr() in held else x

        outputs = pytree.tree_map(apart, outputs)
        for name, old, x in zip(self._names, self._state, new, strict=True):
            _check_kept(name, x, old)
        # A state that a kernel has written in place needs no copy. New states that otherwise share memory with old
        # states are cloned before any old state is overwritten.
        moved = {i: apart(x) for i, x in enumerate(new) if not x.is_set_to(self._state[i])}
        if moved:
            torch._foreach_copy_([self._state[i] for i in moved], list(moved.values()))
        return outputs

    def _check(self, model: Callable[[Tensor, Any], tuple[Any, Any]]) -> None:
        """Call the model once, and check that it returns outputs and a new state like the old one."""
        result = model(self._tokens, pytree.tree_unflatten(self._state, self._structure))
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise TypeError(f"model must return (outputs, state), got {kind(result)}")
        outputs, new = result
        for name, x in _named("outputs of model", outputs).items():
            _check_tensor(name, x)
        _check_structure("model must return as state", new, self._structure, self._names)
        for old, (name, x) in zip(self._state, _named("state", new).items(), strict=True):
            _check_kept(name, x, old)

    def _record(self) -> None:
        # A stream of its own, since PyTorch's default may be of another device, the first that captured.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._step()
            graph = torch.cuda.CUDAGraph()
            # With "thread_local", other threads may allocate memory during the capture.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._outputs = self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = graph

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a Decoder cannot be copied or pickled: make another one of the model and decoder.state"
        )


def check_decoder(decoder: Any, model: nn.Module, input_ids: Tensor) -> None:
    """Check that `decoder` is of this model, for one token per row of `input_ids`."""
    if not isinstance(decoder, Decoder):
        raise TypeError(f"decoder must be a Decoder, got {type(decoder).__name__}")
    made_of, tokens = decoder._model, decoder._tokens
    if getattr(made_of, "_orig_mod", made_of) is not model:
        other = "another model" if isinstance(made_of, type(model)) else kind(made_of)
        raise ValueError(f"decoder must be made of this model, but was made of {other}")
    _check.indices("input_ids", input_ids)
    shape = (input_ids.shape[0], 1)
    if tokens.shape != shape or tokens.dtype != torch.int64:
        raise ValueError(
            f"decoder must be made for tokens of shape {shape} in torch.int64, but was made for "
            f"{tuple(tokens.shape)} in {tokens.dtype}"
        )
    _check.same_device("decoder", tokens, input_ids)


def _named(name: str, tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their paths, such as ``state[0].recurrent``."""
    return {name + pytree.keystr(path): x for path, x in pytree.tree_flatten_with_path(tree)[0]}


def _check_tensor(name: str, x: Any) -> None:
    if type(x) not in (Tensor, nn.Parameter):
        raise TypeError(f"{name} must be a plain tensor, got {kind(x)}")


def _check_structure(what: str, state: Any, structure: pytree.TreeSpec, names: list[str]) -> None:
    if pytree.tree_structure(state) != structure:
        got = list(_named("state", state))
        order = "; the order of their keys counts" if sorted(got) == sorted(names) and got != names else ""
        raise ValueError(
            f"{what} what the decoder was made with, a pytree of {', '.join(names) or 'nothing'}, "
            f"got {kind(state)}: {', '.join(got) or 'nothing'}{order}"
        )


def _check_kept(name: str, x: Any, old: Tensor) -> None:
    _check_tensor(f"{name}, as model returns it,", x)
    expected, got = ((tuple(t.shape), t.dtype, t.device) for t in (old, x))
    if expected != got:
        grows = "; the state of softmax attention grows with every token" if x.shape != old.shape else ""
        raise ValueError(
            "model must return a state like the one it is given: {} must be {}, {} on {}, ".format(
                name, *expected
            )
            + "got {}, {} on {}".format(*got)
            + grows
        )


def _check_like(name: str, x: Any, example: Tensor) -> None:
    _check_tensor(name, x)
    if x.dtype != example.dtype:
        raise TypeError(f"{name} must be {example.dtype}, as the decoder was made with, got {x.dtype}")
    if x.shape != example.shape:
        raise ValueError(
            f"{name} must have shape {tuple(example.shape)}, as the decoder was made with, got {tuple(x.shape)}"
        )
    _check.same_device(name, x, example)
