"""A model with an assistant, and going back to a state by hand: the tokens are those of one token at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.fla_weights import tokens
from helpers.goldens import loaded
from torch import Tensor
from torch._dynamo.utils import counters

from flacompose.layers import RecurrentStates
from flacompose.models import RecurrentLM
from flacompose.ops._composed import logsumexp

from .test_recurrent_lm import HYBRIDS, MODELS, VOCAB, close, small

each_model = pytest.mark.parametrize("name", [*MODELS, *HYBRIDS])


class Erring(RecurrentLM):
    """A model that chooses the least likely token after some tokens, or after all."""

    always = False

    def forward(self, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        logits, state = super().forward(input_ids, *args, **options)
        if logits.ndim == 2:
            wrong = (input_ids[:, -1] % 3 == 0) | self.always
            logits = torch.where(wrong[:, None], -logits, logits)
        return logits, state


def erring(model: RecurrentLM, always: bool = False) -> RecurrentLM:
    assistant = Erring(model.config).to(next(model.parameters()))
    assistant.load_state_dict(model.state_dict())
    assistant.always = always
    return assistant


def calls(model: RecurrentLM) -> list[Tensor]:
    """What the model is given from now on."""
    read: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    return read


@each_model
@torch.no_grad()
def test_states_are_those_of_shorter_calls(name: str, device: torch.device) -> None:
    model, ids = loaded(name).to(device), tokens(3, 12, VOCAB).to(device)
    logits, states = model(ids, num_states=4)
    close(logits, model(ids)[0])
    assert all(type(s) is RecurrentStates for s in states)
    last, _ = model(ids, num_states=2, last_only=True)
    close(last, logits[:, -1])
    index = torch.tensor([3, 0, 2], device=device)
    after, _ = model(ids[:, :3], tuple(s.at(index) for s in states))
    for row in range(3):
        text = torch.cat([ids[row, : 9 + int(index[row])], ids[row, :3]])[None]
        close(after[row], model(text)[0][0, -3:])
    close(
        model(ids[:, :3], tuple(s.at(-4) for s in states))[0],
        model(torch.cat([ids[:, :9], ids[:, :3]], 1))[0][:, 9:],
    )


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *((name, 4) for name in (*MODELS, *HYBRIDS)),
        ("rwkv6", 1),
        ("gla hybrid", 1),
        ("gla", 15),
        ("gla hybrid", 15),
    ],
)
@torch.no_grad()
def test_tokens_are_those_of_the_model(name: str, number: int, device: torch.device) -> None:
    """Whatever the assistant proposes; rows accept unlike numbers of tokens. In float64, where nothing is a tie."""
    model = loaded(name).to(device).double()
    ids = tokens(4, 7, VOCAB).to(device)
    expected = model.generate(ids, 21)
    other = loaded("gla").to(device).double()
    for assistant in (model, erring(model), other):
        actual = model.generate(ids, 21, assistant=assistant, num_assistant_tokens=number)
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["gla", "rwkv6", *HYBRIDS])
@torch.no_grad()
def test_calls(name: str, device: torch.device) -> None:
    """An assistant that is always right saves all calls but one in `number` + 1; one that never is, saves none."""
    model, ids = loaded(name).to(device).double(), tokens(2, 5, VOCAB).to(device)
    read = calls(model)
    model.generate(ids, 17, assistant=loaded(name).to(device).double(), num_assistant_tokens=3)
    assert [x.shape[1] for x in read] == [5, 4, 4, 4, 4]
    read.clear()
    model.generate(ids, 17, assistant=erring(model, always=True), num_assistant_tokens=3)
    assert [x.shape[1] for x in read] == [5, *[4] * 16]


@pytest.mark.parametrize("name", ["gla", "gsa varied", *HYBRIDS])
@torch.no_grad()
def test_ends(name: str, device: torch.device) -> None:
    """A row that has ended is filled up; when all have, there are no more tokens."""
    model, ids = loaded(name).to(device).double(), tokens(3, 5, VOCAB).to(device)
    endless = model.generate(ids, 12)
    lengths = set()
    for end in [[int(t)] for t in endless.unique()[:4]] + [endless.unique().tolist(), endless[:, 3].tolist()]:
        expected = model.generate(ids, 12, eos_token_id=end)
        lengths.add(expected.shape[1])
        for assistant in (model, erring(model)):
            actual = model.generate(ids, 12, eos_token_id=end, assistant=assistant, num_assistant_tokens=3)
            assert torch.equal(actual, expected)
    assert len(lengths) > 1


@pytest.mark.parametrize("name", ["retnet", "rwkv6", *HYBRIDS])
@torch.no_grad()
def test_padded_prompts(name: str, device: torch.device) -> None:
    model, ids = loaded(name).to(device).double(), tokens(3, 8, VOCAB).to(device)
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, 3] = 0, 0
    expected = model.generate(ids, 9, attention_mask=mask)
    actual = model.generate(ids, 9, attention_mask=mask, assistant=erring(model), num_assistant_tokens=2)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("new", [1, 2, 5])
@torch.no_grad()
def test_few_tokens(new: int) -> None:
    model, ids = loaded("gla").double(), tokens(2, 5, VOCAB)
    actual = model.generate(ids, new, assistant=model, num_assistant_tokens=8)
    assert torch.equal(actual, model.generate(ids, new))


@torch.no_grad()
def test_compilations(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three graphs for each model, of a prompt, a token and several tokens, whatever B and T.

    The example in docs/how-to/speculative.md compiles one row too, which has graphs of its own. For the
    compiler all states are alike, whether they come from a prompt, from a step or from `at`.
    """
    monkeypatch.setattr(logsumexp, "LEVELS", 5)  # of which a graph has as many times its code
    torch._dynamo.reset()
    delta = {"layer": "GatedDeltaNet", "layer_options": {"num_heads": 2, "head_dim": 8, "expand_v": 1}}
    attn = [{"layers": [1], "num_heads": 2}]
    model = small(layer="ABCAttention", attn=attn).to(device).double()
    assistant = small(**delta, num_hidden_layers=1).to(device).double()
    plain = copy.deepcopy(model)
    for compiled in (model, assistant):
        compiled.compile(fullgraph=True, dynamic=True, backend="eager")
    counters.clear()

    def generate(B: int, T: int) -> None:
        ids = tokens(B, T, VOCAB).to(device)
        assert torch.equal(model.generate(ids, 9, assistant=assistant), plain.generate(ids, 9))

    for B, T in ((3, 9), (2, 13), (6, 4)):
        generate(B, T)
    assert counters["stats"]["unique_graphs"] == 5  # the model itself reads no single token
    model.generate(tokens(4, 6, VOCAB).to(device), 3)
    assert counters["stats"]["unique_graphs"] == 6


def test_errors() -> None:
    model, ids = small(), tokens(2, 5, VOCAB)
    for options, kind, message in [
        ({"assistant": "gpt"}, TypeError, "assistant must be a RecurrentLM, got str$"),
        ({"assistant": torch.compile(small())}, TypeError,
         r"got OptimizedModule: compile it in place, by assistant.compile\(\)"),
        ({"assistant": small(vocab_size=12)}, ValueError, "assistant must have the vocab_size of the model, 11"),
        ({"temperature": 1.0}, ValueError, "temperature must be 0 with an assistant, got 1.0"),
        ({"num_assistant_tokens": 0}, ValueError, "num_assistant_tokens must be from 1 to 15, got 0"),
        ({"num_assistant_tokens": 16}, ValueError, "num_assistant_tokens must be from 1 to 15, got 16"),
        ({"num_assistant_tokens": 2.0}, TypeError, "num_assistant_tokens must be an int, got float"),
    ]:  # fmt: skip
        with pytest.raises(kind, match=message):
            model.generate(ids, 3, **{"assistant": model, **options})
    _, states = model(ids, num_states=2)
    with pytest.raises(
        TypeError, match=r"state\[0\] must be a RecurrentState, got RecurrentStates, .* at\(index\)"
    ):
        model(ids, states)
    with pytest.raises(ValueError, match="num_states must be at most the number of tokens T = 5, got 6"):
        model(ids, num_states=6)
    with pytest.raises(ValueError, match="num_states must not be given with attention_mask"):
        model(ids, num_states=2, attention_mask=torch.ones_like(ids))
