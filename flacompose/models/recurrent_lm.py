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
from flacompose.layers.layout import distributed_like, layout, take
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
    """A layer and a feed-forward network, if there is one, each after a norm and beside a residual connection."""

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
                # The first layer of RWKV7 makes the values that the others mix in.
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
        """Its modules that have a state, in the order in which they are called."""
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
        """Its output, a new state for each of `stateful`, and the `v_first` of the blocks that follow."""
        arguments = x, states, attention_mask, cu_seqlens, num_states, lower_bound, v_first
        # Inside the block, so that FSDP2, which wraps blocks, gathers its parameters once for all of its backward.
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
        if isinstance(self.attn, RWKV7Attention):
            y, state, v_first = self.attn(self.attn_norm(x), states[0], **tokens, v_first=v_first)
        else:
            bound: Any = {} if lower_bound is None else {"lower_bound": lower_bound}
            y, state = self.attn(self.attn_norm(x), states[0], **tokens, **bound)
        x = x + y
        if self.mlp is None:
            return x, (state,), v_first
        if not isinstance(self.mlp, StatefulLayer):
            return x + self.mlp(self.mlp_norm(x)), (state,), v_first
        y, shift = self.mlp(self.mlp_norm(x), states[1], **tokens)
        return x + y, (state, shift), v_first


class RecurrentLM(nn.Module):
    """A language model of one of flacompose's layers, or a hybrid of it and softmax attention.

    Each block is a layer and a feed-forward network, each after a norm and beside a residual connection, or a layer
    alone, as in Mamba; embeddings are before the blocks, a norm and a projection to logits after them. The state of the
    model is a tuple of its layers' states, `RecurrentState`: one for each block, or two with the channel mixing of
    RWKV6 or RWKV7, which has one too.
    With layers of RWKV7, the values of the first of them go to all others within a call; softmax attention before or
    between them passes these values on.

    The model compiles with ``fullgraph=True`` and exports at any length, as its layers do.

    Args:
        config: The sizes and layers of the model.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Default: PyTorch's default; float32 for those that layers keep so.

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
        # Small, as they give the logits too where they are tied.
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
        """The state before the first token of `batch_size` sequences; as ``init_state`` of each layer makes it."""
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

        Text given in pieces, each with the state that the piece before returned, gives what the whole gives.

        Args:
            input_ids: ``[B, T]``, int64 or int32.
            state: What `init_state` or a call returned, for ``N`` sequences, ``B`` or those packed.
                It is not written to. Default: the start.
            attention_mask: ``[B, T]``, bool or integers, 0 for pads, wherever they are in a row, anything else for
                tokens; of a longer one the last ``T`` columns count. Logits at pads mean nothing. Default: no pads.
            cu_seqlens: Bounds of ``N`` sequences packed along ``T``, ``[N + 1]`` from 0 upwards, int32 or int64; ``B``
                is then 1. Logits past ``cu_seqlens[-1]`` mean nothing. With softmax attention, which then keeps no keys
                and values, no call can go on from the state that is returned, and `state` must be that of `init_state`.
                Default: a sequence a row.
            last_only: Whether the logits are those of the last token of each sequence alone, which spares the memory of
                the others; those of a sequence without tokens mean nothing.
            num_states: How many states to return, those after each of the last ``n`` tokens of each row: from 1 to 16,
                and at most ``T``. For calls of a few tokens, some of which may have to be taken back. Not with
                `attention_mask` or `cu_seqlens`. Default: the state after the last token alone.

        Returns:
            ``(logits, state)``: `logits` is ``[B, T, vocab_size]``, or ``[N, vocab_size]`` with `last_only`; `state` is
            new, that after the last tokens, or with `num_states` a tuple of
            [RecurrentStates][flacompose.layers.RecurrentStates].

        Raises:
            ValueError: If a shape is wrong, `state` has not one entry for each layer, `attention_mask` comes with
                `cu_seqlens`, a model with softmax attention goes on from or to packed sequences, or `num_states` is not
                as said.
            TypeError: If `input_ids` are neither int64 nor int32, or another argument has the wrong type.
            IndexError: From PyTorch on a CPU, if a token is not below `vocab_size`.
        """
        _check.indices("input_ids", input_ids)
        # A rank may have none of the tokens that ranks share.
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
        """Read the prompts in one call, then go on token by token: each one step of the recurrences.

        A model that is compiled in place, by ``model.compile(...)``, generates compiled.

        Args:
            input_ids: The prompts, ``[B, T]``, int64 or int32.
            max_new_tokens: How many tokens follow, at least 1.
            temperature: 0 takes the likeliest token each time; above it, tokens are drawn from the softmax of the
                logits divided by it.
            top_k: Draw from so many of the likeliest tokens, and from those as likely as the last of them.
                Default: all.
            top_p: Draw from the fewest of the likeliest tokens whose probabilities sum to it, above 0, at most 1.
                Default: all.
            eos_token_id: A token, or several, that ends a row, which is then filled with it, or with the first of them;
                when all rows have ended, generation stops. This reads one value on the host for each token.
                Default: none.
            attention_mask: ``[B, T]``, 0 for pads of prompts, wherever they are in a row. Every row must have a token.
                Default: no pads.
            generator: What draws tokens. Default: PyTorch's.
            assistant: A smaller model of the same tokens, which proposes some that this model then reads in one call.
                Those that it would not have chosen are taken back, so the tokens are the same, found in fewer calls:
                see [Decode speculatively](how-to/speculative.md). At temperature 0 alone. It reads one value on the
                host for each such call. Default: none.
            num_assistant_tokens: How many tokens it proposes at a time, from 1 to 15.
            decoder: A [Decoder][flacompose.models.Decoder] of this model for tokens ``[B, 1]``, int64, which makes the
                steps after the prompts. It may have been used before. Afterwards it holds the state in which the last
                new token has not been read. Not with an assistant. Default: the model makes them.

        Returns:
            The new tokens, without the prompts, ``[B, max_new_tokens]`` or fewer, int64.

        Raises:
            ValueError: If an argument has a wrong value.
            TypeError: If one has the wrong type.
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
        """Save the model in a folder, through the model mixin of huggingface_hub, as `from_pretrained` loads it.

        The folder gets ``config.json``, the arguments of the `RecurrentConfig`, ``model.safetensors``, and, unless it
        has one, ``README.md``, a model card. It needs the packages huggingface_hub and safetensors.

        Args:
            save_directory: The folder, which is made if it is missing. Files of these names in it are replaced.

        Raises:
            ImportError: If one of the packages is not installed.
            ValueError: If a parameter is on the meta device, or sharded: ``torch.distributed.checkpoint`` saves those.
            TypeError: If `save_directory` is no path, or ``layer_options`` hold what JSON does not.
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
        """Upload what `save_pretrained` saves to the Hugging Face Hub.

        Args:
            repo_id: The repository, "organisation/name", which is made if it is missing.
            commit_message: Of the commit.
            private: Whether a new repository is private. Default: as the organisation has it.
            token: What shows who you are. Default: that of ``hf auth login``.
            branch: The branch that gets the commit. Default: "main".
            create_pr: Whether the commit becomes a pull request.

        Returns:
            The URL of the commit.

        Raises:
            ImportError: As `save_pretrained`; likewise ValueError and TypeError.
            Exception: What huggingface_hub raises.
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
            name: A folder, or, if there is none of this name, a repository of the Hugging Face Hub,
                "organisation/name".
            device: Where the parameters shall be. Default: the CPU.
            dtype: As that of the constructor. Default: as they were saved, each.
            revision: A branch, a tag or a commit of the repository. Default: "main".
            token: What shows who you are, or False for nothing. Default: that of ``hf auth login``.
            cache_dir: Where downloads are kept. Default: where huggingface_hub keeps all of them.
            force_download: Whether to download again what is kept.
            local_files_only: Whether to take only what is kept.

        Raises:
            ImportError: If huggingface_hub or safetensors is not installed.
            FileNotFoundError: If there is no such folder or repository, or a file in it is missing.
            ValueError: If ``config.json`` holds something else than arguments of `RecurrentConfig`, a file cannot be
                read, or `revision` is given with a folder.
            TypeError: If `name` is no path.
            RuntimeError: From PyTorch, if parameters are missing, have other shapes, or are too many: all are named.
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
        """`state`, or None for each entry of one; layers check the parts of their own."""
        layers = self._stateful()
        if state is None:
            return [None] * len(layers)
        one = isinstance(state, (RecurrentState, RecurrentStates))  # which are tuples too, of their parts
        if one or not isinstance(state, (tuple, list)) or len(state) != len(layers):
            kind = f"a {type(state).__name__}" if one else type(state).__name__
            got = len(state) if isinstance(state, (tuple, list)) and not one else kind
            raise ValueError(f"state must be a tuple of {len(layers)} RecurrentState, got {got}")
        for i, part in enumerate(state):
            if not isinstance(part, RecurrentState):
                raise TypeError(f"state[{i}] must be a RecurrentState, got {kind_of(part)}")
        return state

    def _naming_the_entry(self, error: StateError) -> Exception:
        """The `error` of a layer, with the name of an entry of the model's state in place of "state"."""
        message, shapes = error.args
        kind = TypeError if isinstance(error, builtins.TypeError) else ValueError
        for i, layer in enumerate(self._stateful()):
            if layer.state_shapes is shapes:
                return kind(message.replace("state", f"state[{i}]", 1))
        return error

    def _lower_bounds(self) -> list[Tensor | None]:
        """The lower bounds of each block's forget gates: a cumulative softmax over the blocks, 0 in the first."""
        if not hasattr(self, "lower_bounds"):
            return [None] * len(self.layers)
        parts = self.lower_bounds.softmax(
            0, dtype=torch.promote_types(self.lower_bounds.dtype, torch.float32)
        )
        recurrent = [isinstance(block.attn, ForgetGateLayer) for block in self._blocks()]
        rising = parts.cumsum(0) - parts[0]
        # By index: iterating unbinds them, and DTensor has no gradient of that where a block leaves its own unused.
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
    """The last token of each sequence in ``x [B, T, D]``, ``[N, D]``."""
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
    """`_last` of sequences that the ranks share, on each of them."""
    with shared(ranks):
        cu_seqlens = bounds_of_rank(ranks, cu_seqlens, x.shape[1])
        tokens = layout(x, x.shape[2], attention_mask, cu_seqlens)
        return last_of(tokens.enter(x), None, tokens.lengths, cu_seqlens, None)
