"""The next token, from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from flacompose._errors import ValueError
from flacompose.layers import _check


def check(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Check the arguments of `next_token`."""
    _check.not_negative("temperature", temperature)
    if top_k is not None:
        _check.count("top_k", top_k)
    if top_p is not None:
        _check.positive("top_p", top_p)
        if top_p > 1:
            raise ValueError(f"top_p must be at most 1, got {top_p}")
    for name, value in (("top_k", top_k), ("top_p", top_p)):
        if value is not None and temperature == 0:
            raise ValueError(f"{name} must not be given at temperature 0, where the likeliest token is taken")


def next_token(
    logits: Tensor,  # [B, vocab_size]
    temperature: float,  # 0 for the likeliest token
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw a token for each row, ``[B]``, int64, from the `top_k` likeliest and the fewest that sum to `top_p`."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float()
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # The largest logit becomes 0, so that no quotient is +inf. A temperature below the bound could be 0 in float32, or
    # have an infinite reciprocal. At the bound, only the largest logits have any probability.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(torch.float32).tiny)
    probabilities = logits.softmax(-1)
    if top_p is not None:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # so the first token is always kept
        probabilities = torch.zeros_like(ordered).scatter(-1, order, ordered.where(before < top_p, 0))
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
