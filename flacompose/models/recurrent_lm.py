"""A language model of recurrent layers."""

from __future__ import annotations

import builtins
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flacompose._errors import TypeError, ValueError
from flacompose._peer import explained
from flacompose._torch import catching, is_exporting
from flacompose.layers import RMSNorm, RWKV7Attention, _check
from flacompose.layers.forget_gate import ForgetGateLayer
from flacompose.layers.initialization import with_initializers
from flacompose.layers.layout import distributed_like, layout, rows_of, take, tokens_of
from flacompose.layers.recurrent import StatefulLayer, factory_of
from flacompose.layers.state import RecurrentState, RecurrentStates, StateError, kind_of
from flacompose.models import sampling, speculative
from flacompose.models.config import RecurrentConfig
from flacompose.models.decoder import Decoder, check_decoder
from flacompose.models.feed_forward import RWKV6FeedForward, RWKV7FeedForward, SwiGLU
from flacompose.models.hub import import_mixin, is_of_hub
from flacompose.models.softmax_attention import SoftmaxAttention
from flacompose.ops._arguments.intermediate_states import MAX_STATES
from flacompose.ops._parallel.ranks import Ranks, bounds_of_rank, check_device, shared
from flacompose.ops._parallel.token_shift import last_of
from flacompose.ops._tensors.packed import bounds

States = tuple[RecurrentState, ...]
NewStates = States | tuple[RecurrentStates, ...]


class Block(nn.Module):
    """A layer and perhaps a feed-forward network, each after a norm and in a residual connection."""

    def __init__(self, config: RecurrentConfig, layer_idx: int, **factory: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.attn_norm = _norm(config, **factory)
        attention = config.attention(layer_idx)
        self.attn: StatefulLayer
        if attention is None:
            options = config.layer_arguments(layer_idx)
            if issubclass(config.layer_class, RWKV7Attention):
                options["num_hidden_layers"] = config.num_hidden_layers
                # The first layer of RWKV7 makes `v_first` for all other layers.
                if all(config.attention(i) is not None for i in range(layer_idx)):
                    options["layer_idx"] = 0
            self.attn = cast(Any, config.layer_class)(**options, **factory)
        else:
            self.attn = SoftmaxAttention(size, **attention, **factory)
        self.mlp: SwiGLU | RWKV6FeedForward | RWKV7FeedForward | None = None
        if config.intermediate_size is not None:
            self.mlp_norm = _norm(config, **factory)
            self.mlp = _feed_forward(config, config.intermediate_size, layer_idx, **factory)

    def stateful(self) -> list[StatefulLayer]:
        """The modules with a state, in the order of their calls."""
        return [self.attn, self.mlp] if isinstance(self.mlp, StatefulLayer) else [self.attn]

    def forward(
        self,
        x: Tensor,
        states: Sequence[RecurrentState | None],
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        num_states: int | None,
        lower_bound: Tensor | None,
        v_first: Tensor | None,
        gradient_checkpointing: bool,
    ) -> tuple[Tensor, NewStates, Tensor | None]:
        """The output, a new state for each of `stateful`, and the `v_first` for the following blocks."""
        arguments = x, states, attention_mask, cu_seqlens, num_states, lower_bound, v_first
        # Inside the block, since FSDP2 wraps blocks, and so gathers parameters once for a whole backward.
        if gradient_checkpointing and torch.is_grad_enabled() and not is_exporting():
            return checkpoint(self._compute, *arguments, use_reentrant=False)
        return self._compute(*arguments)

    def _compute(
        self,
        x: Tensor,
        states: Sequence[RecurrentState | None],
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        num_states: int | None,
        lower_bound: Tensor | None,
        v_first: Tensor | None,
    ) -> tuple[Tensor, NewStates, Tensor | None]:
        tokens: Any = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens, "num_states": num_states}
        rows = rows_of(x)
        normed = tokens_of(self.attn_norm(rows), x)
        if isinstance(self.attn, RWKV7Attention):
            y, state, v_first = self.attn(normed, states[0], **tokens, v_first=v_first)
        else:
            bound: Any = {} if lower_bound is None else {"lower_bound": lower_bound}
            y, state = self.attn(normed, states[0], **tokens, **bound)
        rows = rows + rows_of(y)
        if self.mlp is None:
            return tokens_of(rows, x), (state,), v_first
        normed = self.mlp_norm(rows)
        if not isinstance(self.mlp, StatefulLayer):
            return tokens_of(rows + self.mlp(normed), x), (state,), v_first
        y, shift = self.mlp(tokens_of(normed, x), states[1], **tokens)
        return tokens_of(rows + rows_of(y), x), (state, shift), v_first


class RecurrentLM(nn.Module):
    """A language model of one of flacompose's layers, or a hybrid of it and softmax attention.

    The model consists of embeddings, blocks, a norm and a projection to logits. Each block is a layer and a
    feed-forward network, each after a norm and in a residual connection, or, as in Mamba, a layer alone. The state of
    the model is a tuple of `RecurrentState`: one for each block, or two with the channel mixing of RWKV6 or RWKV7,
    which has a state too. With layers of RWKV7, the values of the first go to all other layers of RWKV7 within a call.

    Like its layers, the model compiles with ``fullgraph=True`` and exports at any length.

    Args:
        config: The sizes and layers of the model.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default; float32 for some parameters of layers.

    Raises:
        ValueError: From a layer, if one of its arguments is wrong.
        TypeError: If `config` is no `RecurrentConfig`, or `dtype` no float dtype, or from a layer.
    """

    # The ranks that share the tokens, which `context_parallel` sets.
    ranks: Ranks | None = None

    def __init__(
        self,
        config: RecurrentConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, RecurrentConfig):
            raise TypeError(f"config must be a RecurrentConfig, got {type(config).__name__}")
        self.config = config
        factory = factory_of(device, dtype)
        # Small, since tied embeddings are the projection to logits too.
        self.embeddings = with_initializers(
            nn.Embedding(config.vocab_size, config.hidden_size, **factory),
            weight=partial(nn.init.normal_, std=0.02),
        )
        if config.norm_embeddings:
            self.embeddings_norm = _norm(config, **factory)
        self.layers = nn.ModuleList(Block(config, i, **factory) for i in range(config.num_hidden_layers))
        self.norm = _norm(config, **factory)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **factory)
        gated = [b.attn for b in self._blocks() if isinstance(b.attn, ForgetGateLayer)]
        if config.use_lower_bound and gated:
            shape = config.num_hidden_layers, gated[0].gate_channels
            self.lower_bounds = nn.Parameter(torch.empty(shape, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters of the layer itself."""
        if hasattr(self, "lower_bounds"):
            nn.init.zeros_(self.lower_bounds)

    def init_state(
        self,
        batch_size: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> States:
        """The state before the first token of `batch_size` sequences, from ``init_state`` of each layer."""
        return tuple(layer.init_state(batch_size, device=device, dtype=dtype) for layer in self._stateful())

    if TYPE_CHECKING:  # nn.Module says nothing of the types of a call

        @overload
        def __call__(
            self,
            input_ids: Tensor,
            state: Sequence[RecurrentState] | None = None,
            *,
            attention_mask: Tensor | None = None,
            cu_seqlens: Tensor | None = None,
            last_only: bool = False,
            num_states: None = None,
        ) -> tuple[Tensor, States]: ...

        @overload
        def __call__(
            self,
            input_ids: Tensor,
            state: Sequence[RecurrentState] | None = None,
            *,
            attention_mask: Tensor | None = None,
            cu_seqlens: Tensor | None = None,
            last_only: bool = False,
            num_states: int,
        ) -> tuple[Tensor, tuple[RecurrentStates, ...]]: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @explained
    def forward(
        self,
        input_ids: Tensor,
        state: Sequence[RecurrentState] | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        last_only: bool = False,
        num_states: int | None = None,
    ) -> tuple[Tensor, NewStates]:
        """Go through ``T`` tokens from `state`.

        Text may be split over several calls that pass the state on. The results are those of a single call.

        Args:
            input_ids: ``[B, T]``, int64 or int32.
            state: A state from `init_state` or an earlier call, for ``N`` sequences: the ``B`` rows or the packed
                sequences. It is not changed. Default: the state of `init_state`.
            attention_mask: ``[B, T]``, bool or integers, 0 for pads and anything else for tokens. Pads may be anywhere
                in a row. Of a longer mask the last ``T`` columns are used. Logits at pads are arbitrary. Default: no
                pads.
            cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B``
                is then 1. Logits past ``cu_seqlens[-1]`` are arbitrary. Softmax attention then keeps no keys and
                values: `state` must come from `init_state`, and no later call can continue from the returned state.
                Default: one sequence per row.
            last_only: Whether to return only the logits of the last token of each sequence, which saves memory. Logits
                of a sequence without tokens are arbitrary.
            num_states: Number ``n`` of states to return, after each of the last ``n`` tokens of each row: from 1 to 16,
                and at most ``T``. It is for calls of a few tokens, some of which may be rejected later. Not with
                `attention_mask` or `cu_seqlens`. Default: the state after the last token alone.

        Returns:
            ``(logits, state)``: `logits` is ``[B, T, vocab_size]``, or ``[N, vocab_size]`` with `last_only`; `state` is
            new, that after the last tokens, or with `num_states` a tuple of
            [RecurrentStates][flacompose.layers.RecurrentStates].

        Raises:
            ValueError: If a shape or the length of `state` is wrong, `attention_mask` comes with `cu_seqlens`, a model
                with softmax attention would continue from or with packed sequences, or `num_states` is out of range or
                not allowed.
            TypeError: If `input_ids` are neither int64 nor int32, or another argument has the wrong type.
            IndexError: From PyTorch on a CPU, if a token is not below `vocab_size`.
        """
        _check.indices("input_ids", input_ids)
        # Across ranks, a rank may have no tokens.
        sizes = input_ids.shape if self.ranks is None else input_ids.shape[:1]
        if input_ids.ndim != 2 or _check.is_empty(sizes):
            raise ValueError(f"input_ids must have shape [B, T], none 0, got {tuple(input_ids.shape)}")
        if self.ranks is not None:
            check_device(self.ranks, "input_ids", input_ids)
        _check.flags(last_only=last_only)
        old = self._checked(state)
        x = self.embeddings(input_ids)
        if self.config.norm_embeddings:
            x = self.embeddings_norm(x)

        new: list[Any] = []
        v_first = None
        try:
            for block, lower_bound in zip(self._blocks(), self._lower_bounds(), strict=True):
                n = len(block.stateful())
                given = old[len(new) : len(new) + n]
                x, states, v_first = block(
                    x, given, attention_mask, cu_seqlens, num_states, lower_bound, v_first,
                    self.config.gradient_checkpointing,
                )  # fmt: skip
                new.extend(states)
        except StateError as error:
            raise self._naming_the_entry(error) from None
        if last_only and self.ranks is not None:
            x = _last_of_ranks(self.ranks, x, attention_mask, cu_seqlens)
        elif last_only:
            x = _last(x, attention_mask, cu_seqlens)
        return self._logits(self.norm(x)), tuple(new)

    @explained
    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        attention_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        assistant: RecurrentLM | None = None,
        num_assistant_tokens: int = 4,
        decoder: Decoder | None = None,
    ) -> Tensor:
        """Read the prompts in one call, then generate token by token.

        A model that was compiled in place, by ``model.compile(...)``, generates with compiled code.

        Args:
            input_ids: The prompts, ``[B, T]``, int64 or int32.
            max_new_tokens: Number of tokens to generate, at least 1.
            temperature: At 0 the likeliest token is chosen. Above 0, tokens are drawn from the softmax of the logits
                divided by the temperature.
            top_k: Draw from this many of the likeliest tokens, and from tokens as likely as the last of them. Default:
                all.
            top_p: Draw from the fewest likeliest tokens whose probabilities sum to it, above 0, at most 1. Default:
                all.
            eos_token_id: A token, or several, that ends a row. The rest of the row is filled with it, or with the first
                of several. Generation stops when all rows have ended. This reads one value on the host per token.
                Default: none.
            attention_mask: ``[B, T]``, 0 for pads of prompts, anywhere in a row. Every row must have a token. Default:
                no pads.
            generator: Generator of random numbers. Default: PyTorch's.
            assistant: A smaller model with the same vocabulary, for [speculative decoding](how-to/speculative.md). It
                proposes tokens, which this model reads in one call and keeps as far as it would have chosen them. So
                the tokens are the same, found in fewer calls. Only at temperature 0. It reads one value on the host per
                such call. Default: none.
            num_assistant_tokens: Number of tokens that the assistant proposes at a time, from 1 to 15.
            decoder: A [Decoder][flacompose.models.Decoder] of this model for tokens ``[B, 1]``, int64, for the steps
                after the prompts. It may have been used before. Its state afterwards does not include the last new
                token. Not with an assistant. Default: the model computes the steps.

        Returns:
            The new tokens, without the prompts, ``[B, max_new_tokens]`` or fewer, int64.

        Raises:
            ValueError: If an argument has a wrong value.
            TypeError: If an argument has the wrong type.
        """
        if self.ranks is not None:
            raise ValueError(
                "generate must be called on a model of one process, got one whose tokens are shared out among ranks"
            )
        _check.count("max_new_tokens", max_new_tokens)
        sampling.check(temperature, top_k, top_p)
        ends = None if eos_token_id is None else self._ends(eos_token_id)
        if assistant is not None:
            if decoder is not None:
                raise ValueError(
                    "decoder must not be given with an assistant, whose tokens are read several at a time"
                )
            self._check_assistant(assistant, num_assistant_tokens, temperature)
            return speculative.generate(
                self, assistant, input_ids, max_new_tokens, num_assistant_tokens, ends or (), attention_mask
            )
        if decoder is not None:
            check_decoder(decoder, self, input_ids)
        logits, state = self(input_ids, None, attention_mask=attention_mask, last_only=True)
        if decoder is not None:
            decoder.load(state)
        done, tokens = None, []
        while True:
            token = sampling.next_token(logits, temperature, top_k, top_p, generator)
            if ends is not None:
                token = token if done is None else token.masked_fill(done, ends[0])
                done = torch.stack([token == end for end in ends]).any(0)
            tokens.append(token)
            if len(tokens) == max_new_tokens or (done is not None and bool(done.all())):
                return torch.stack(tokens, dim=1)
            if decoder is None:
                logits, state = self(token[:, None], state, last_only=True)
            else:
                logits = decoder(token[:, None])[:, -1]

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Save the model in a folder for `from_pretrained`, through the model mixin of huggingface_hub.

        The folder gets ``config.json`` with the arguments of the `RecurrentConfig`, ``model.safetensors`` and, unless
        it has one, a model card ``README.md``. The packages huggingface_hub and safetensors are needed.

        Args:
            save_directory: The folder, which is created if it is missing. Its files of these names are replaced.

        Raises:
            ImportError: If one of the packages is not installed.
            ValueError: If a parameter is on the meta device, or sharded. Use ``torch.distributed.checkpoint`` for
                sharded ones.
            TypeError: If `save_directory` is no path, or JSON cannot represent ``layer_options``.
        """
        _check_path("save_directory", save_directory)
        import_mixin("save_pretrained").Saved(self).save_pretrained(save_directory, config=self.config)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Push model using flacompose",
        private: bool | None = None,
        token: str | None = None,
        branch: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Upload the files of `save_pretrained` to the Hugging Face Hub.

        Args:
            repo_id: The repository, "organisation/name", which is created if it is missing.
            commit_message: Message of the commit.
            private: Whether a new repository is private. Default: the setting of the organisation.
            token: Access token. Default: the token of ``hf auth login``.
            branch: The branch that gets the commit. Default: "main".
            create_pr: Whether the commit becomes a pull request.

        Returns:
            The URL of the commit.

        Raises:
            ImportError: As in `save_pretrained`, and so are ValueError and TypeError.
            Exception: Any error of huggingface_hub.
        """
        saved = import_mixin("push_to_hub").Saved(self)
        return saved.push_to_hub(
            repo_id,
            config=self.config,
            commit_message=commit_message,
            private=private,
            token=token,
            branch=branch,
            create_pr=create_pr,
        )

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
    ) -> RecurrentLM:
        """Load a model that `save_pretrained` or `push_to_hub` has saved.

        Args:
            name: A folder or, if no folder has this name, a repository of the Hugging Face Hub, "organisation/name".
            device: Device of the parameters. Default: the CPU.
            dtype: Dtype of the parameters. Default: the saved dtype of each.
            revision: A branch, a tag or a commit of the repository. Default: "main".
            token: Access token, or False for none. Default: the token of ``hf auth login``.
            cache_dir: Folder of downloads. Default: the cache of huggingface_hub.
            force_download: Whether to download files again that are in the cache.
            local_files_only: Whether to use only files that are in the cache.

        Raises:
            ImportError: If huggingface_hub or safetensors is not installed.
            FileNotFoundError: If there is no such folder or repository, or a file in it is missing.
            ValueError: If ``config.json`` holds anything but arguments of `RecurrentConfig`, a file cannot be read, or
                `revision` is given with a folder.
            TypeError: If `name` is no path.
            RuntimeError: From PyTorch, which names all parameters that are missing, unexpected or of another shape.
        """
        _check_path("name", name)
        _check.optional_float_dtype(dtype)
        if not os.path.isdir(name) and not is_of_hub(name):
            raise FileNotFoundError(
                f"name must be a folder or a repository of the Hub, organisation/name, got {os.fspath(name)!r}"
            )
        if revision is not None and not is_of_hub(name):
            raise ValueError(f"revision must be None with a folder, got {revision!r} with {os.fspath(name)}")
        return import_mixin("from_pretrained").load(
            cls,
            os.fspath(name),
            device=device,
            dtype=dtype,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
        )

    def _check_assistant(self, assistant: Any, num_assistant_tokens: int, temperature: float) -> None:
        if not isinstance(assistant, RecurrentLM):
            place = ": compile it in place, by assistant.compile()" if hasattr(assistant, "_orig_mod") else ""
            raise TypeError(f"assistant must be a RecurrentLM, got {type(assistant).__name__}{place}")
        if assistant.config.vocab_size != self.config.vocab_size:
            raise ValueError(
                f"assistant must have the vocab_size of the model, {self.config.vocab_size}, "
                f"got {assistant.config.vocab_size}"
            )
        if temperature != 0:
            raise ValueError(f"temperature must be 0 with an assistant, got {temperature}")
        _check.integer("num_assistant_tokens", num_assistant_tokens)
        if not 1 <= num_assistant_tokens < MAX_STATES:
            raise ValueError(
                f"num_assistant_tokens must be from 1 to {MAX_STATES - 1}, got {num_assistant_tokens}"
            )

    def _ends(self, eos_token_id: int | Sequence[int]) -> tuple[int, ...]:
        ends = tuple(eos_token_id) if isinstance(eos_token_id, (tuple, list)) else (eos_token_id,)
        for end in ends:
            _check.integer("eos_token_id", end)
            if not 0 <= end < self.config.vocab_size:
                raise ValueError(
                    f"eos_token_id must be below vocab_size = {self.config.vocab_size}, got {end}"
                )
        if not ends:
            raise ValueError("eos_token_id must hold at least one token, got none")
        return cast("tuple[int, ...]", ends)

    def _blocks(self) -> list[Block]:
        return cast("list[Block]", list(self.layers))

    def _stateful(self) -> list[StatefulLayer]:
        return [layer for block in self._blocks() for layer in block.stateful()]

    def _checked(self, state: Sequence[RecurrentState] | None) -> Sequence[RecurrentState | None]:
        """`state`, or None for each entry. Layers check the entries."""
        layers = self._stateful()
        if state is None:
            return [None] * len(layers)
        one = isinstance(state, (RecurrentState, RecurrentStates))  # tuples of the parts of one state
        if one or not isinstance(state, (tuple, list)) or len(state) != len(layers):
            kind = f"a {type(state).__name__}" if one else type(state).__name__
            got = len(state) if isinstance(state, (tuple, list)) and not one else kind
            raise ValueError(f"state must be a tuple of {len(layers)} RecurrentState, got {got}")
        for i, part in enumerate(state):
            if not isinstance(part, RecurrentState):
                raise TypeError(f"state[{i}] must be a RecurrentState, got {kind_of(part)}")
        return state

    def _naming_the_entry(self, error: StateError) -> Exception:
        """The `error` of a layer, with the entry of the model's state instead of "state" in the message."""
        message, shapes = error.args
        kind = TypeError if isinstance(error, builtins.TypeError) else ValueError
        for i, layer in enumerate(self._stateful()):
            if layer.state_shapes is shapes:
                return kind(message.replace("state", f"state[{i}]", 1))
        return error

    def _lower_bounds(self) -> list[Tensor | None]:
        """The lower bounds of the forget gates of each block: a cumulative softmax over the blocks, 0 in the first."""
        if not hasattr(self, "lower_bounds"):
            return [None] * len(self.layers)
        parts = self.lower_bounds.softmax(
            0, dtype=torch.promote_types(self.lower_bounds.dtype, torch.float32)
        )
        recurrent = [isinstance(block.attn, ForgetGateLayer) for block in self._blocks()]
        rising = parts.cumsum(0) - parts[0]
        # Indexed one by one, since `unbind` of a DTensor has no gradient if a block does not use its bound.
        return [rising[i] if r else None for i, r in enumerate(recurrent)]

    def _logits(self, x: Tensor) -> Tensor:
        if self.config.tie_word_embeddings:
            return F.linear(x, self.embeddings.weight)
        return self.lm_head(x)


def _check_path(name: str, path: object) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, got {type(path).__name__}")


def _feed_forward(
    config: RecurrentConfig, intermediate_size: int, layer_idx: int, **factory: Any
) -> SwiGLU | RWKV6FeedForward | RWKV7FeedForward:
    sizes, act = (config.hidden_size, intermediate_size), config.feed_forward_act
    if config.feed_forward == "swiglu":
        return SwiGLU(*sizes, **factory)
    if config.feed_forward == "rwkv6":
        return RWKV6FeedForward(*sizes, act, **factory)
    return RWKV7FeedForward(*sizes, act, layer_idx, config.num_hidden_layers, **factory)


def _norm(config: RecurrentConfig, **factory: Any) -> nn.Module:
    if config.norm == "rms":
        return RMSNorm(config.hidden_size, True, config.norm_eps, **factory)
    return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias, **factory)


catching[RecurrentLM.forward.__code__] = ("StateError",)


def _last(x: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The last token of each sequence of ``x [B, T, D]``, ``[N, D]``."""
    T = x.shape[1]
    if cu_seqlens is not None:
        return x[0, (bounds(cu_seqlens, T)[1:] - 1).clamp(min=0)]
    if attention_mask is None:
        return x[:, -1]
    is_token = distributed_like(x, attention_mask)[:, attention_mask.shape[1] - T :] != 0
    index = (is_token * distributed_like(x, torch.arange(T, device=x.device))).amax(1, keepdim=True)  # [B, 1]
    return take(x, index).squeeze(1)


def _last_of_ranks(
    ranks: Ranks, x: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """`_last` on every rank, of sequences whose tokens the ranks share."""
    with shared(ranks):
        cu_seqlens = bounds_of_rank(ranks, cu_seqlens, x.shape[1])
        tokens = layout(x, x.shape[2], attention_mask, cu_seqlens)
        return last_of(tokens.enter(x), None, tokens.lengths, cu_seqlens, None)
