"""Speculative decoding, https://arxiv.org/abs/2211.17192, at temperature 0.

A small model proposes tokens, and the model checks them in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Model = Callable[..., tuple[Tensor, Any]]  # a RecurrentLM


def generate(
    model: Model,
    assistant: Model,
    input_ids: Tensor,
    max_new_tokens: int,
    num_assistant_tokens: int,
    ends: Sequence[int],
    attention_mask: Tensor | None,
) -> Tensor:
    """The tokens that `generate` of `model` would choose at temperature 0, with proposals of `assistant`.

    In each round the model reads the last known token and the proposed tokens, and returns its state after each of
    them. Every row continues from the state after its last correct token.
    """
    logits, state = model(input_ids, attention_mask=attention_mask, last_only=True)
    _, ahead = assistant(input_ids, attention_mask=attention_mask, last_only=True)
    n = num_assistant_tokens + 1
    token = logits.argmax(-1)  # [B], the last known token, which neither model has read
    place = torch.arange(n, device=token.device)
    # Places after the first `count` hold proposals of the last round, which the next round overwrites.
    tokens = torch.cat([token[:, None], token.new_zeros(token.shape[0], max_new_tokens + n - 1)], 1)
    count = torch.ones_like(token)
    while not _complete(tokens, count, max_new_tokens, ends):
        read = _proposed(assistant, ahead, token, num_assistant_tokens)  # [B, n]
        logits, states = model(read, state, num_states=n)
        following = logits.argmax(-1)  # [B, n]
        right = (
            (following[:, :-1] == read[:, 1:]).long().cumprod(1).sum(1)
        )  # [B], the number of correct proposals
        _, states_ahead = assistant(read, ahead, num_states=n)
        state, ahead = (tuple(s.at(right) for s in given) for given in (states, states_ahead))
        # A complete row continues to write, after the wanted tokens.
        tokens = tokens.scatter(1, count.clamp(max=max_new_tokens)[:, None] + place, following)
        token, count = following.gather(1, right[:, None]).squeeze(1), count + right + 1
    return _until_the_end(tokens[:, :max_new_tokens], ends)


def _proposed(assistant: Model, state: Any, token: Tensor, number: int) -> Tensor:
    """``[B, 1 + number]``: `token` and the proposed tokens. The state after them is dropped."""
    read = [token]
    for _ in range(number):
        logits, state = assistant(read[-1][:, None], state, last_only=True)
        read.append(logits.argmax(-1))
    return torch.stack(read, 1)


def _is_end(tokens: Tensor, ends: Sequence[int]) -> Tensor:
    return torch.stack([tokens == end for end in ends]).any(0)


def _complete(tokens: Tensor, count: Tensor, wanted: int, ends: Sequence[int]) -> bool:
    """Whether every row has all its tokens. It reads one value on the host."""
    complete = count >= wanted
    if ends:
        known = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
        complete = complete | (_is_end(tokens, ends) & known).any(1)
    return bool(complete.all())


def _until_the_end(tokens: Tensor, ends: Sequence[int]) -> Tensor:
    """The rows up to their ends, filled with the first of `ends` to the length of the longest row."""
    if not ends:
        return tokens.clone()
    end = _is_end(tokens, ends).long()
    ended = end.cumsum(1) - end > 0  # after the first end
    return tokens.masked_fill(ended, ends[0])[:, : int((~ended).sum(1).max())]
