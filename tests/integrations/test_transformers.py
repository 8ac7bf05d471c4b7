"""Every model that the integration knows, tiny and with random weights, is on flacompose what it is without."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial, update_wrapper
from importlib import import_module
from importlib.util import find_spec
from types import CodeType, MethodType
from typing import Any

import pytest
import torch
from helpers.capture import (
    EXPORTED,
    PACKAGED,
    InFloat64,
    Logits,
    Uncached,
    assert_exact,
    assert_one_compilation,
    cache_argument,
    cache_of,
    captured,
    double,
    exported,
    generated,
    ops_of,
    packaged,
    prompt,
)
from helpers.tiny import DOORS, TINY, tiny
from torch import nn

from flacompose import ops

transformers = pytest.importorskip("transformers", minversion="5.17")

from flacompose.integrations.modeling import xlstm  # noqa: E402
from flacompose.integrations.modeling.arguments import finder_of_caches  # noqa: E402
from flacompose.integrations.transformers import (  # noqa: E402
    FUNCTIONS,
    MODELS,
    accelerate,
    enable,
    join_projections,
    runs_on,
)
from flacompose.layers.fused_projections import fusible_paths  # noqa: E402

HERE = [name for name in MODELS if find_spec(f"transformers.models.{name}") is not None]
SELECTIVE = ["falcon_mamba", "jamba", "mamba", "zamba"]
MASKLESS = ["kimi_linear", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next"]
SSD_MODELS = ["bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"]
CLOSE = dict(atol=1e-4, rtol=1e-4)


def slow_but(*fast: str, names: list[str] = HERE) -> list:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture
def model(name: str, device: torch.device) -> nn.Module:
    return tiny(name).to(device)


def modeling(name: str):
    return import_module(f"transformers.models.{name}.modeling_{name}")


def on_flacompose(model: nn.Module) -> set[str]:
    """The ops that a model's layers run on, in which it must have at least one."""
    return {row.runs_on.removeprefix("flacompose.ops.") for row in runs_on(model) if not row.why}


def test_every_model_is_tested() -> None:
    assert sorted(TINY) == sorted(MODELS)


@pytest.mark.parametrize("name", HERE)
@torch.no_grad()
def test_logits(name: str, model: nn.Module) -> None:
    """Shorter than the convolution, as long as a chunk, one longer, and no multiple of anything."""
    prompts = [prompt(model, T, B) for T, B in ((1, 2), (3, 1), (64, 1), (65, 2), (165, 2))]
    reference = Logits(double(model))
    with InFloat64():
        theirs = [reference(ids) for ids in prompts]
    with enable():
        assert on_flacompose(model)
        for ids, expected in zip(prompts, theirs, strict=True):
            torch.testing.assert_close(Logits(model)(ids).double(), expected, **CLOSE)


@pytest.mark.parametrize("name", HERE)
def test_gradients(name: str, model: nn.Module) -> None:
    """Of every parameter, in training mode, where Mamba-2 would take the function that computes a block in one."""
    ids = prompt(model.train(), 65, batch=2)

    def gradients(model: nn.Module) -> list[torch.Tensor | None]:
        loss = Logits(model)(ids).square().mean()
        return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))

    reference = double(model)
    with InFloat64():
        theirs = gradients(reference)
    with enable():
        ours = gradients(model)
    assert sum(expected is not None for expected in theirs) > 10
    for (path, _), actual, expected in zip(model.named_parameters(), ours, theirs, strict=True):
        assert (actual is None) == (expected is None), path
        if expected is not None:
            # Sums of many terms, so what is lost is a part of the largest.
            limit = 1e-4 * float(expected.abs().max()) + 1e-7
            torch.testing.assert_close(
                actual.double(), expected, atol=limit, rtol=1e-4, msg=lambda m, p=path: f"{p}: {m}"
            )


# How many of the first tokens of each row are padding.
PADDING = [4, 0]


def padded(model: nn.Module, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A row with padding on the left, one without, and their mask."""
    ids = prompt(model, length, batch=2)
    mask = (torch.arange(length) >= torch.tensor(PADDING)[:, None]).long()
    return ids, mask.to(model.device)


@pytest.mark.parametrize("name", HERE)
def test_generation(name: str, model: nn.Module) -> None:
    """Greedy, of a prompt, and of a batch with padding on the left: what is uncached is of each row alone."""
    with enable():
        whole, batch = generated(model, prompt(model, 70)), generated(model, *padded(model, 9))
    truth = Uncached(model)
    for (tokens, logits), padding in (whole, [0]), (batch, PADDING):
        for row, first in enumerate(padding):
            expected = truth(tokens[row : row + 1], first)[0, -25:-1]
            torch.testing.assert_close(logits[:, row].double(), expected, **CLOSE)
            assert torch.equal(tokens[row, -24:], expected.argmax(-1))


@pytest.mark.parametrize("name", HERE)
def test_gradients_through_a_cache(name: str, model: nn.Module) -> None:
    """Of later tokens, in pieces of several and of one, with gradients of the tokens that are cached and without.

    No token occurs twice, so what the later ones give the rows of their embeddings is the same in both."""
    ids, first = torch.randperm(64, device=model.device)[:18].view(2, 9), 4
    weight = model.get_input_embeddings().weight

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return logits[:, first:].square().mean()

    def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
        limit = 1e-4 * float(expected.abs().max()) + 1e-7
        torch.testing.assert_close(actual.double(), expected, atol=limit, rtol=1e-4)

    reference, later = double(model), ids[:, first:]
    with InFloat64():
        truth = torch.autograd.grad(
            loss(Logits(reference)(ids)), list(reference.parameters()), allow_unused=True
        )
    with enable():
        whole = loss(in_pieces(model, ids, [first, 3, 1, 1]))
        of_whole = torch.autograd.grad(whole, list(model.parameters()), allow_unused=True)
        part = loss(in_pieces(model, ids, [first, 3, 1, 1], constant=True))
        (of_part,) = torch.autograd.grad(part, weight)
    for p, actual, expected in zip(model.parameters(), of_whole, truth, strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            assert_equal(actual, expected)
        if p is weight:
            assert_equal(of_part[later], expected[later])


@pytest.mark.parametrize("name", ["xlstm"])
def test_states_are_not_rounded(name: str, model: nn.Module) -> None:
    """In half precision, a rounded maximum would scale what is kept at its scale."""
    with enable():
        out = copy.deepcopy(model).bfloat16()(prompt(model, 9), use_cache=True)
    states = cache_of(out).rnn_state.values()
    assert {part.dtype for state in states for part in state} == {torch.float32}


def in_pieces(
    model: nn.Module,
    ids: torch.Tensor,
    pieces: list[int],
    mask: torch.Tensor | None = None,
    constant: bool = False,
) -> torch.Tensor:
    """The logits of pieces of these lengths, one after another through a cache, the first `constant` or not."""
    cache, logits, end = None, [], 0
    for piece in ids.split(pieces, 1):
        end += piece.shape[1]
        given = {} if mask is None else {"attention_mask": mask[:, :end]}
        with torch.no_grad() if constant and cache is None else contextlib.nullcontext():
            out = model(piece, use_cache=True, **{cache_argument(model): cache}, **given)
        cache = cache_of(out)
        logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("name", HERE)
def test_beams(name: str, model: nn.Module) -> None:
    """Beam search reorders the states in the cache. The score of what it finds is that of each row alone."""
    ids, mask = padded(model, 9)
    with enable():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=12, do_sample=False, num_beams=3, eos_token_id=None,
            pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    truth = Uncached(model)
    for row, first in enumerate(PADDING):
        found = out.sequences[row : row + 1]
        scores = truth(found, first)[0, -13:-1].log_softmax(-1).gather(1, found[0, -12:, None])
        torch.testing.assert_close(out.sequences_scores[row].double(), scores.mean(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [*DOORS, "inkling"])
@torch.no_grad()
def test_taken_back(name: str, model: nn.Module) -> None:
    """Where tokens are taken back out of a cache, all is what it is without one, or refused.

    Where there is no recurrence it can be done, by `Cache.crop`, which assisted generation calls. From a recurrent
    state no token can be taken back.
    """
    ids = prompt(model, 20)
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, eos_token_id=None)
    argument = cache_argument(model)

    def cropped(recorded: bool, remove: int) -> torch.Tensor:
        cache = cache_of(model(ids[:, :9], use_cache=True))
        if recorded:
            cache.activate_past_recording()
            # The second piece is a step, in Kimi Linear by `causal_conv1d_update`.
            for piece in ids[:, 9:11], ids[:, 11:12]:
                model(piece, use_cache=True, **{argument: cache})
        cache.crop(-remove)
        end = 12 if recorded else 9
        return model(ids[:, end - remove :], use_cache=True, **{argument: cache}).logits

    def outcome(call: Callable[[], torch.Tensor]) -> torch.Tensor | str:
        try:
            return call()
        except (RuntimeError, ValueError) as e:
            return str(e)

    with enable():
        assisted = [
            outcome(lambda: model.generate(ids, **options, prompt_lookup_num_tokens=3)),
            outcome(lambda: model.generate(ids, **options, assistant_model=copy.deepcopy(model))),
        ]
        crops = [outcome(partial(cropped, recorded, k)) for recorded in (False, True) for k in (0, 1, 2)]
    truth = Uncached(model)
    refused = sum(isinstance(found, str) for found in [*assisted, *crops])
    # Without a recurrence, a crop of what was not recorded.
    assert refused == (3 if RUNS_ON[name] == SHORT else 8)
    for tokens in assisted:
        if not isinstance(tokens, str):
            assert torch.equal(tokens[:, -10:], truth(tokens)[:, -11:-1].argmax(-1))
    for logits in crops:
        if not isinstance(logits, str):
            torch.testing.assert_close(logits.double(), truth(ids)[:, -logits.shape[1] :], **CLOSE)


@pytest.mark.parametrize("name", HERE)
@torch.no_grad()
def test_continued(name: str, model: nn.Module) -> None:
    """A prompt in pieces, through the cache, without and with padding on the left, and without `position_ids`."""
    pieces = [6, 62, 1, 3, 6]
    ids, mask = padded(model, sum(pieces))
    with enable():
        whole = in_pieces(model, ids, pieces)
    with accelerate(model):
        batch = in_pieces(model, ids, pieces, mask)
    truth = Uncached(model)
    torch.testing.assert_close(whole.double(), truth(ids), **CLOSE)
    for row, first in enumerate(PADDING):
        torch.testing.assert_close(
            batch[row : row + 1, first:].double(), truth(ids[row : row + 1], first), **CLOSE
        )


# Sizes for which the states that transformers makes would not fit its layers.
SIZES = [
    ("xlstm", dict(qk_dim_factor=0.5, v_dim_factor=1.0)),
    ("xlstm", dict(num_heads=3, qk_dim_factor=1.5, v_dim_factor=0.75)),
    ("rwkv", dict(attention_hidden_size=48)),
]


def sized(name: str, sizes: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    kind, options = TINY[name]
    monkeypatch.setitem(TINY, name, (kind, options | sizes))
    return tiny(name)


@pytest.mark.parametrize("name,sizes", SIZES, ids=str)
def test_sizes_of_states(
    name: str, sizes: dict[str, float], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of the layers, in training, where xLSTM makes a cache unasked, and in pieces."""
    model = sized(name, sizes, monkeypatch).to(device)
    ids = prompt(model, 9, batch=2)
    truth = Uncached(model)
    with enable():
        assert model.train()(ids, labels=ids).loss.requires_grad
        actual = in_pieces(model.eval(), ids, [5, 1, 3])
    torch.testing.assert_close(actual.double(), truth(ids), **CLOSE)


def test_a_cache_of_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of transformers' own cache of xLSTM, whose sizes it rounds up."""
    model = sized(*SIZES[0], monkeypatch)
    cache = modeling("xlstm").xLSTMCache(model.config, 1, torch.float32)
    expected = r"cache of an xLSTM must have states of shape \(1, 4, 4, 8\) here, got \(1, 4, 16, 16\)"
    with enable(), pytest.raises(ValueError, match=expected):
        model(prompt(model, 3), **{cache_argument(model): cache})


@pytest.mark.parametrize("name", ["recurrent_gemma", "rwkv", "xlstm"])
@torch.no_grad()
def test_a_cache_is_made_while_compiling(name: str, model: nn.Module) -> None:
    """Unasked, as the configuration says."""
    ids = prompt(captured(name, model), 9)
    with enable():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(ids).logits, Logits(model)(ids), **CLOSE)


@pytest.mark.parametrize("name", ["recurrent_gemma"])
def test_prefill_in_chunks(name: str, model: nn.Module) -> None:
    """`generate` takes the cache of each chunk from what the model returns, where that of transformers has none."""
    ids, mask = padded(model, 9)
    with enable():
        chunked, whole = (
            model.generate(
                ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None, prefill_chunk_size=n
            )
            for n in (4, None)
        )  # fmt: skip
    assert torch.equal(chunked, whole)


def limited(model: nn.Module) -> None:
    """Set limits of time steps, and weights with which most steps are outside, and tell in the logits."""
    for layer in recurrent(model):
        layer.time_step_limit = (0.5, 0.6)
        layer.in_proj.weight.mul_(8)
        layer.out_proj.weight.mul_(8)


@pytest.mark.parametrize(
    "name,options", [*((name, {}) for name in SSD_MODELS), ("falcon_h1", {"mamba_rms_norm": True})], ids=str
)
@torch.no_grad()
def test_limited_steps(
    name: str, options: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time step of a single token is kept within the same limits as those of several."""
    model = sized(name, options, monkeypatch).to(device)
    limited(model)
    ids = prompt(model, 9, batch=2)
    with enable():
        actual = in_pieces(model, ids, [6, 1, 1, 1])
    torch.testing.assert_close(actual.double(), Uncached(model)(ids), **CLOSE)


@pytest.mark.parametrize("name", ["falcon_h1", "mamba", "zamba"])
@torch.no_grad()
def test_offloaded(name: str, model: nn.Module, device: torch.device) -> None:
    """Weights that accelerate loads for a call are there where a layer reads them without one."""
    accelerate_library = pytest.importorskip("accelerate")
    if name == "falcon_h1":
        limited(model)
    ids = prompt(model, 9, batch=2)
    truth = Uncached(model)(ids)
    with enable():
        accelerate_library.cpu_offload(model, execution_device=device)
        torch.testing.assert_close(in_pieces(model, ids, [5, 3, 1]).double(), truth, **CLOSE)


@pytest.mark.parametrize("name", ["minimax"])
@torch.no_grad()
def test_rows_of_a_cache(name: str, model: nn.Module) -> None:
    """Rows are repeated and selected in the states of all layers, the last of which has softmax attention."""
    ids, argument = prompt(model, 9, batch=2), cache_argument(model)
    rows = torch.tensor([3, 0, 1], device=ids.device)
    with enable():
        cache = cache_of(model(ids[:, :7], use_cache=True))
        cache.batch_repeat_interleave(2)
        repeated = model(ids[:, 7:8].repeat_interleave(2, 0), use_cache=True, **{argument: cache}).logits
        cache.batch_select_indices(rows)
        selected = model(ids[rows // 2, 8:], use_cache=True, **{argument: cache}).logits
    truth = Uncached(model)(ids)
    torch.testing.assert_close(repeated.double(), truth[:, 7:8].repeat_interleave(2, 0), **CLOSE)
    torch.testing.assert_close(selected.double(), truth[rows // 2, 8:], **CLOSE)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "minimax"])
@torch.no_grad()
def test_a_cache_is_found_once(name: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer looks through its arguments once, with what was imported when its forward was made."""
    made, found = [], []

    def counted() -> Callable:
        find = finder_of_caches()
        made.append(find)

        def counting(*given: object) -> object:
            found.append(find(*given))
            return found[-1]

        return counting

    monkeypatch.setattr("flacompose.integrations.modeling.forward.finder_of_caches", counted)
    ids = prompt(model, 3)
    with enable():
        before = len(made)
        cache = cache_of(model(ids, use_cache=True))
        found.clear()
        model(ids[:, :1], use_cache=True, **{cache_argument(model): cache})
        assert before == len(made) > 0
        assert len(found) == len(recurrent(model)) and all(x is cache for x in found)


@pytest.mark.parametrize("name", ["minimax"])
@torch.no_grad()
def test_a_cache_of_transformers(name: str, model: nn.Module) -> None:
    """MiniMax's state is in another place of a cache that transformers has filled, which miscounts its tokens."""
    ids = prompt(model, 9)
    cache = cache_of(model(ids, use_cache=True))
    with enable(), pytest.raises(ValueError, match="the cache must have been filled on this library's ops"):
        model(ids[:, :1], use_cache=True, **{cache_argument(model): cache})


@pytest.mark.parametrize("name", HERE)
@torch.no_grad()
def test_accelerate(name: str, model: nn.Module) -> None:
    """One model: another keeps its forwards, and a copy of the one is as it is."""
    other = copy.deepcopy(model)
    ids = prompt(model, 65)
    expected = Logits(model)(ids)
    before = {(module, key): value for module, key, value in bound(name)}
    with accelerate(model):
        assert on_flacompose(model) and not on_flacompose(other)
        assert all("forward" not in vars(module) for module in other.modules())
        torch.testing.assert_close(Logits(model)(ids), expected, **CLOSE)
        assert torch.equal(Logits(other)(ids), expected)
        assert on_flacompose(copy.deepcopy(model)) == on_flacompose(model)
        with pytest.raises(
            ValueError, match="model must have the forwards of its classes, got an accelerated "
        ):
            accelerate(model)
    assert not on_flacompose(model)
    assert torch.equal(Logits(model)(ids), expected)
    assert all(value is before[module, key] for module, key, value in bound(name))


def bound(name: str):
    """What a modeling file has by the names that are replaced, and the forwards of its classes."""
    module = modeling(name)
    for key in FUNCTIONS:
        if key in vars(module):
            yield module, key, vars(module)[key]
    for value in list(vars(module).values()):
        if inspect.isclass(value) and "forward" in vars(value):
            yield value, "forward", vars(value)["forward"]


@pytest.mark.parametrize("name", HERE)
def test_disabled(name: str) -> None:
    """The very same objects, after handles in any order, twice, and after an error."""
    before = {(holder, key): value for holder, key, value in bound(name)}

    def changed() -> bool:
        return any(value is not before[holder, key] for holder, key, value in bound(name))

    first, second = enable(), enable()
    assert changed()
    first.disable()
    first.disable()
    assert changed()
    second.disable()
    assert not changed()
    with enable(), enable():
        assert changed()
    assert not changed()
    with pytest.raises(KeyError), enable():
        raise KeyError
    assert not changed()


def test_threads() -> None:
    """One thread at a time changes modeling files."""
    module = import_module("flacompose.integrations.transformers")
    with ThreadPoolExecutor(1) as pool:
        with module._lock:
            enabling = pool.submit(enable)
            assert not wait([enabling], timeout=0.5).done
            assert not module._enabled and not module._originals
        handle = enabling.result(timeout=60)
        assert module._enabled == [handle]
        with module._lock:
            disabling = pool.submit(handle.disable)
            assert not wait([disabling], timeout=0.5).done
            assert module._enabled == [handle] and module._originals
        disabling.result(timeout=60)
    assert not module._enabled and not module._originals


@pytest.mark.parametrize("name", slow_but("minimax", "mamba2", names=DOORS))
@torch.no_grad()
def test_compiled_before(name: str, model: nn.Module) -> None:
    """What is compiled follows `enable` and `disable`, whichever it was compiled under."""
    ids, ran = prompt(model, 9), []

    def backend(graph: torch.fx.GraphModule, _: list) -> Callable:
        def run(*args: object) -> object:
            ran.append(bool(ops_of(graph)))
            return graph.forward(*args)

        return run

    def on_ops() -> bool:
        ran.clear()
        compiled(ids)
        return any(ran)

    for _ in "plain first", "enabled first":
        torch.compiler.reset()
        compiled = torch.compile(Logits(captured(name, model)), backend=backend)
        assert not on_ops()
        with enable():
            assert on_ops()
        assert not on_ops()
        torch.compiler.reset()
        with enable():
            assert on_ops()
        assert not on_ops()


@torch.no_grad()
def test_rwkv(device: torch.device) -> None:
    """Its mask may come by position, and it is not exported before its first call, which changes its weights."""
    model = tiny("rwkv").to(device)
    ids, mask = padded(model, 9)
    with enable():
        with pytest.raises(ValueError, match="model must have been called once before it is exported"):
            exported(model)
        by_name = model(ids, attention_mask=mask, use_cache=False).logits
        assert torch.equal(model(ids, mask, use_cache=False).logits, by_name)
        assert not torch.equal(model(ids, use_cache=False).logits, by_name)
        assert copy.deepcopy(model).half()(ids, mask).logits.isfinite().all()  # pads have the least of keys
        unscaled = tiny("rwkv").to(device)
        unscaled.config.rescale_every = 0
        assert_exact(exported(unscaled).module(), unscaled, [3])


def hook(layer: nn.Module) -> None:
    """Wrap a layer's forward as accelerate's hooks do."""
    forward = layer.forward

    def hooked(module: nn.Module, *args: object, **kwargs: object) -> object:
        return forward(*args, **kwargs)

    layer.forward = update_wrapper(partial(hooked, layer), forward)


@pytest.mark.parametrize("name", DOORS)
@torch.no_grad()
def test_hooks(name: str, model: nn.Module) -> None:
    """Forwards that are wrapped before `enable` and after it, and after `accelerate`."""
    ids = prompt(model, 65)
    expected = Logits(model)(ids)
    early, late, one = (copy.deepcopy(model) for _ in range(3))
    for layer in recurrent(early):
        hook(layer)
    with enable():
        for layer in recurrent(late):
            hook(layer)
        assert on_flacompose(late) == on_flacompose(model)
        if name == "minimax":  # its recurrence is in the forward itself
            assert {row.why for row in runs_on(early)} == {"its forward was bound before enable()"}
        else:
            assert on_flacompose(early) == on_flacompose(model)
        torch.testing.assert_close(Logits(early)(ids), expected, **CLOSE)
        torch.testing.assert_close(Logits(late)(ids), expected, **CLOSE)
    assert not on_flacompose(early) and not on_flacompose(late)
    assert torch.equal(Logits(late)(ids), expected)

    handle = accelerate(one)
    before = [vars(layer).get("forward") for layer in recurrent(one)]
    for layer in recurrent(one):
        hook(layer)
    with pytest.raises(ValueError, match="got one that has been wrapped since in a"):
        handle.disable()
    assert on_flacompose(one)
    torch.testing.assert_close(Logits(one)(ids), expected, **CLOSE)
    for layer, forward in zip(recurrent(one), before, strict=True):
        vars(layer).pop("forward")
        assert forward is None
    handle.disable()
    assert not on_flacompose(one) and torch.equal(Logits(one)(ids), expected)


@pytest.mark.parametrize("name", DOORS)
@torch.no_grad()
def test_copies_and_pickles(name: str, model: nn.Module) -> None:
    """They are accelerated, and have weights of their own."""
    ids = prompt(model, 65)
    with accelerate(model):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        others = [copy.deepcopy(model), torch.load(file, weights_only=False)]
        layer = recurrent(model)[0]
        shallow = [copy.copy(layer), layer._replicate_for_data_parallel()]
        assert all(x.forward.__self__ is x and on_flacompose(x) for x in shallow)
    for other in others:
        assert on_flacompose(other) and not on_flacompose(model)
        torch.testing.assert_close(Logits(other)(ids), Logits(model)(ids), **CLOSE)
        parameter = next(recurrent(other)[0].parameters())
        parameter.mul_(-1.5)
        assert (Logits(other)(ids) - Logits(model)(ids)).abs().max() > 1e-3


@pytest.mark.parametrize("name", DOORS)
@torch.no_grad()
def test_forwards_of_other_classes(name: str, model: nn.Module) -> None:
    """A class derived from a layer's, whose forward calls that of the layer."""
    ids = prompt(model, 65)
    expected = Logits(model)(ids)
    layer = recurrent(model)[0]
    (path, *_) = (row.layer for row in runs_on(model))
    calls = []

    class Derived(type(layer)):
        def forward(self, *args: object, **kwargs: object) -> object:
            calls.append(enabled)
            return super().forward(*args, **kwargs)

    layer.__class__ = Derived
    for enabled in False, True:
        with enable() if enabled else contextlib.nullcontext():
            (row,) = (row for row in runs_on(model) if row.layer == path)
            assert (row.kind, row.function) == ("Derived", "forward") and row.runs_on.endswith(
                "Derived.forward"
            )
            assert row.why == f"a forward of its own, not {Derived.__mro__[1].__name__}'s"
            torch.testing.assert_close(Logits(model)(ids), expected, **CLOSE)
    assert calls == [False, True]
    with pytest.raises(
        ValueError, match="model must have the forwards of its classes, got another one in a Derived"
    ):
        accelerate(model)


SHORT = {"causal_conv1d"}
GATED_DELTA = SHORT | {"chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"}
KDA = SHORT | {"chunk_kda", "fused_recurrent_kda"}
SSD = SHORT | {"mamba_chunk_scan_combined", "selective_state_update"}
RUNS_ON = {
    "minimax": {"chunk_simple_gla"},
    "recurrent_gemma": {"chunk_rg_lru"},
    "rwkv": {"chunk_rwkv4"},
    "xlstm": {"chunk_mlstm"},
    **dict.fromkeys(["inkling", "inkling2", "lfm2", "lfm2_moe", "lfm3", "zaya"], SHORT),
    **dict.fromkeys(SELECTIVE, SHORT | {"selective_scan_fn", "selective_state_update"}),
    **dict.fromkeys(["olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp"], GATED_DELTA),
    **dict.fromkeys(["bailing_hybrid", "glm5_next", "kimi_linear"], KDA),
    **dict.fromkeys(SSD_MODELS, SSD),
}


@pytest.mark.parametrize("name", HERE)
def test_runs_on(name: str, model: nn.Module) -> None:
    rows = runs_on(model)
    assert rows and all(row.why and not row.runs_on.startswith("flacompose.") for row in rows)
    with enable():
        assert on_flacompose(model) == RUNS_ON[name]
        for row in runs_on(model):
            assert type(model.get_submodule(row.layer)).__name__ == row.kind
            assert not row.why and hasattr(ops, row.runs_on.removeprefix("flacompose.ops."))
    assert runs_on(model) == rows


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
@torch.no_grad()
def test_use_kernels(name: str, model: nn.Module) -> None:
    """`use_kernels=True` leaves a layer with the forward that its class had then, or with that of a kernel."""
    ids, layer = prompt(model, 9), recurrent(model)[0]
    expected = Logits(model)(ids)
    with enable():
        layer.forward = own = MethodType(type(layer).forward, layer)
        torch.testing.assert_close(Logits(model)(ids), expected, **CLOSE)
        assert on_flacompose(model) == RUNS_ON[name]
    assert torch.equal(Logits(model)(ids), expected) and not on_flacompose(model)
    with enable():
        torch.testing.assert_close(Logits(model)(ids), expected, **CLOSE)

    layer.forward = own = MethodType(type(layer).forward, layer)
    with accelerate(model):
        torch.testing.assert_close(Logits(model)(ids), expected, **CLOSE)
        assert on_flacompose(model) == RUNS_ON[name]
    assert layer.forward is own

    layer.forward = MethodType(of_a_kernel, layer)
    with enable():
        here = f"{of_a_kernel.__module__}.of_a_kernel"
        assert {row.runs_on for row in runs_on(model)} == {here} and all(row.why for row in runs_on(model))
    with pytest.raises(ValueError, match="model must have the forwards of its classes"):
        accelerate(model)


def of_a_kernel(self: nn.Module, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    return hidden_states


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="model must contain a recurrent layer of transformers .*got Linear"):
        accelerate(nn.Linear(2, 2))
    assert runs_on(nn.Linear(2, 2)) == []
    for call in accelerate, runs_on:
        with pytest.raises(TypeError, match="model must be a torch.nn.Module, got NoneType"):
            call(None)
    monkeypatch.setattr("transformers.__version__", "5.16.1")
    with pytest.raises(ImportError, match="transformers must be of version 5.17 or newer, got 5.16"):
        enable()


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transformers that is there is newer than the newest one that is tested."""
    monkeypatch.setattr("flacompose.integrations.transformers.NEWEST", (5, 16))


NEWER = r"transformers 5.\d+ is newer than 5.16, the newest version that is tested"


@pytest.mark.usefixtures("newer")
def test_a_newer_version() -> None:
    """It is taken as it is, and told, if all that is replaced has the names of the tested ones."""
    models = [tiny(name) for name in DOORS]
    with pytest.warns(UserWarning, match=f"{NEWER}, and has the same names in what is replaced"):
        handle = enable()
    with handle:
        assert all(on_flacompose(model) == RUNS_ON[name] for name, model in zip(DOORS, models, strict=True))
    with pytest.warns(UserWarning, match=NEWER), accelerate(models[0]):
        assert on_flacompose(models[0])


def renamed(forward: Callable, old: str, new: str) -> CodeType:
    """The code of a forward of transformers that uses another name."""
    code = inspect.unwrap(forward).__code__
    assert old in code.co_names + code.co_varnames
    names, variables = (
        tuple(new if name == old else name for name in names) for names in (code.co_names, code.co_varnames)
    )
    return code.replace(co_names=names, co_varnames=variables)


def with_an_argument(hidden_states, conv_state, weight, bias, activation, reverse):
    raise NotImplementedError


# A class, a name that its forward uses, what it uses instead, and how that is told.
CHANGES = [
    (
        "MambaMixer",
        "mamba_selective_scan",
        "cumsum",
        "MambaMixer.forward does not use 'mamba_selective_scan'",
    ),
    ("MambaMixer", "A_log", "cumsum", "MambaMixer.forward uses 'cumsum'"),
    ("MambaMixer", "attention_mask", "reset_mask", "MambaMixer.forward takes 'reset_mask'"),
    ("MambaBlock", "mixer", "layer", "MambaBlock.forward does not use 'mixer'"),
    ("MambaModel", "use_cache", "caching", "MambaModel.forward takes 'caching'"),
    ("MambaRMSNorm", "rsqrt", "causal_conv1d_fn", "a new class MambaRMSNorm, whose forward calls"),
    ("MambaModel", None, None, "no class MambaModel with a forward"),
    ("causal_conv1d_update", None, None, "causal_conv1d_update takes .*reverse"),
    (
        "MiniMaxLightningAttention", "slope_rate", "slopes",
        "MiniMaxLightningAttention.forward does not use 'slope_rate'",
    ),
]  # fmt: skip


@pytest.mark.parametrize("owner,old,new,told", CHANGES, ids=[change[-1] for change in CHANGES])
@pytest.mark.usefixtures("newer")
def test_a_newer_version_with_other_names(
    owner: str, old: str | None, new: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models of that file stay as transformers has them, and are refused by `accelerate`."""
    name = "minimax" if owner.startswith("MiniMax") else "mamba"
    file, model, other = modeling(name), tiny(name), tiny("mamba2")
    if owner == "causal_conv1d_update":
        monkeypatch.setattr(file, owner, with_an_argument)
    elif old is None:
        monkeypatch.delattr(file, owner)
    else:
        forward = vars(file)[owner].forward
        monkeypatch.setattr(inspect.unwrap(forward), "__code__", renamed(forward, old, new))
    told = rf"modeling_{name} of transformers 5.\d+: {told}"
    with pytest.warns(UserWarning, match=f"{NEWER}. .* stay as they are: .*{told}"):
        handle = enable()
    with handle:
        assert not on_flacompose(model) and all(re.search(told, row.why) for row in runs_on(model))
        assert on_flacompose(other) == RUNS_ON["mamba2"]
    with pytest.raises(ImportError, match=f"transformers must be of a version up to 5.16 here: .*{told}"):
        accelerate(model)


@pytest.mark.parametrize("name", ["olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp"])
@pytest.mark.parametrize("replace", [lambda model: enable(), accelerate], ids=["enable", "accelerate"])
@torch.no_grad()
def test_groups_are_not_repeated(
    name: str, model: nn.Module, replace: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op gets the two key heads of four value heads, in prompts and steps."""
    heads = []
    op = import_module("flacompose.ops._recurrences.matrix.op")

    def counted(form: Callable, *args: Any) -> Any:
        heads.append(tuple(x.shape[2] for x in args[:3]))
        return form(*args)

    for form in "chunk", "update":
        monkeypatch.setattr(op, form, partial(counted, getattr(op, form)))
    with replace(model):
        generated(model, prompt(model, 9))
    assert len(heads) == 24 and set(heads) == {(2, 2, 4)}


# Layers that take two arguments by position after their input.
POSITIONAL = ("minimax", "recurrent_gemma", "rwkv")
# Layers that return a state beside their output.
PAIRS = (*POSITIONAL, "xlstm")

# Packed sequences: none shorter than the convolution, one of them, as long as a chunk, longer than one.
LENGTHS = [5, 1, 64, 2, 70]


def bounds(device: torch.device) -> torch.Tensor:
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    return ends.to(torch.int32).to(device)


def recurrent(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that are over this library's ops, each once."""
    return [model.get_submodule(path) for path in dict.fromkeys(row.layer for row in runs_on(model))]


@pytest.mark.parametrize("name", HERE)
def test_packed(name: str, model: nn.Module, device: torch.device) -> None:
    """A recurrent layer: outputs and gradients as of one sequence after another."""
    layer = recurrent(model)[0]
    width = layer.conv1d.in_channels if name.startswith("inkling") else 32
    x = torch.randn(1, sum(LENGTHS), width, device=device, requires_grad=True)

    def run(x: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        if name == "zaya":  # queries, keys and values
            return torch.cat([y.flatten(2) for y in layer(x, None, **given)], -1)
        y = layer(x, *((None, None) if name in POSITIONAL else ()), **given)
        return y[0] if name in PAIRS else y

    def gradients(y: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad((y * w).sum(), [x, *layer.parameters()]))

    with enable():
        y = run(x, cu_seq_lens_q=bounds(device))
        w = torch.randn_like(y)
        expected = torch.cat([run(part) for part in x.split(LENGTHS, 1)], 1)
        torch.testing.assert_close(y, expected, **CLOSE)
        for actual, of_loop in zip(gradients(y), gradients(expected), strict=True):
            torch.testing.assert_close(actual, of_loop, atol=1e-4 * float(of_loop.abs().max()), rtol=1e-4)


def batch(model: nn.Module) -> dict[str, torch.Tensor]:
    collator = transformers.DataCollatorWithFlattening(
        return_tensors="pt", return_flash_attn_kwargs=True, return_seq_idx=True
    )
    features = [{"input_ids": prompt(model, T)[0].tolist()} for T in LENGTHS]
    flat = collator(features)
    return {
        k: v.to(model.device) if isinstance(v, torch.Tensor) else v for k, v in flat.items() if k != "labels"
    }


# Their softmax attention mixes sequences, that of Granite hybrid on a CPU. Their recurrent layers do not.
MIXED = ["glm5_next", "granitemoehybrid"]


@pytest.mark.parametrize("replace", [lambda model: enable(), accelerate], ids=["enable", "accelerate"])
@pytest.mark.parametrize("name", [name for name in HERE if name not in (*MIXED, "inkling2")])
@torch.no_grad()
def test_packed_model(name: str, model: nn.Module, replace: Callable) -> None:
    """What transformers' collator makes, down through all modules. Without this library they mix the sequences."""
    packed = batch(model)

    def difference() -> torch.Tensor:
        parts = [Logits(model)(ids) for ids in packed["input_ids"].split(LENGTHS, 1)]
        return (model(**packed, use_cache=False).logits - torch.cat(parts, 1)).abs().max()

    try:
        assert difference() > 0.1
    except ValueError as error:  # newer releases of transformers refuse them
        assert "can't keep packed sequences apart" in str(error)
    with replace(model):
        assert difference() < 1e-4


MIXING = {"glm5_next": "Glm5NextTextAttention", "inkling2": "Inkling2DynamicShortConvolution"}


@pytest.mark.parametrize("name", [name for name in MIXING if name in HERE])
@torch.no_grad()
def test_packed_without_an_op(name: str, model: nn.Module) -> None:
    """Sparse attention, and a convolution with weights for each token, which are no ops of this library."""
    expected = f"cu_seq_lens_q must not be given to a {MIXING[name]}, which cannot keep sequences apart"
    with enable(), pytest.raises(ValueError, match=expected):
        model(**batch(model), use_cache=False)


@pytest.mark.parametrize("name", ["mamba", "recurrent_gemma", "xlstm"])
@torch.no_grad()
def test_hidden_states(name: str, model: nn.Module) -> None:
    """They are recorded, each once, also where a model passes bounds on."""
    options = dict(input_ids=prompt(model, 9), use_cache=False, output_hidden_states=True)
    one = torch.tensor([0, 9], dtype=torch.int32, device=model.device)
    with enable():
        for _ in range(2):
            actual = model(**options, cu_seq_lens_q=one).hidden_states
    for ours, expected in zip(actual, model(**options).hidden_states, strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE)


@pytest.mark.parametrize("name", ["xlstm"])
@torch.no_grad()
def test_pads_in_between(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without softmax attention or a convolution they may be anywhere: nothing is forgotten at them."""
    monkeypatch.setitem(TINY[name][1], "eps", 0.1)  # of a size that tells
    model = tiny(name).to(device)
    ids = prompt(model, 9)
    mask = torch.ones_like(ids)
    mask[:, 3:7] = 0
    with enable():
        logits = model(ids, attention_mask=mask, use_cache=False).logits
    tokens = mask[0].bool()
    torch.testing.assert_close(logits[:, tokens].double(), Uncached(model)(ids[:, tokens]), **CLOSE)


@pytest.mark.parametrize("name", ["recurrent_gemma"])
def test_pads_after_a_token(name: str, model: nn.Module) -> None:
    """They leave the state of the recurrence as it is, also right after the first token, which begins anew."""
    ids = prompt(model, 4)
    mask = torch.tensor([[1, 0, 0, 0]], device=model.device)

    def states(ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        cache = transformers.DynamicCache(config=model.config)
        model(ids, attention_mask=mask, use_cache=True, **{cache_argument(model): cache})
        return [layer.recurrent_states[0] for layer in cache.layers if hasattr(layer, "recurrent_states")]

    with enable(), torch.no_grad():
        actual, expected = states(ids, mask), states(ids[:, :1], mask[:, :1])
    assert expected
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


@pytest.mark.parametrize("name", ["xlstm"])
def test_no_pieces(name: str, model: nn.Module) -> None:
    """Transformers takes a long sequence in pieces, without gradients. Here it is as a short one, pads included."""
    ids, mask = padded(model, 9)

    def gradient() -> torch.Tensor:
        loss = model(ids, attention_mask=mask).logits[:, 4:].square().mean()
        return torch.autograd.grad(loss, model.get_input_embeddings().weight)[0]

    with enable():
        expected = gradient()
        model.config.max_inference_chunksize = 4
        torch.testing.assert_close(gradient(), expected)
        assert hasattr(cache_of(model(ids)), "reorder_cache")


def test_xlstm_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers takes the blocks of the package xlstm, they are told nothing that they do not know."""
    monkeypatch.setattr(modeling("xlstm"), "external_xlstm", True)
    assert xlstm.xlstm_model_forward(nn.Module.forward) is nn.Module.forward


@pytest.mark.parametrize("name", ["mamba", "xlstm"])
def test_checkpoints(name: str, model: nn.Module) -> None:
    """A layer that passes bounds on is still computed again in the backward, where gradients are checkpointed."""
    model.train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # its newer name
    ids, weight, counts, gradients = prompt(model, 9), model.get_input_embeddings().weight, [], []
    for enabled in False, True:
        with enable() if enabled else contextlib.nullcontext():
            calls = []
            hook = recurrent(model)[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
            gradients += torch.autograd.grad(model(ids).logits.square().mean(), weight)
            hook.remove()
            counts.append(len(calls))
    assert counts == [2, 2]
    torch.testing.assert_close(*gradients, **CLOSE)


@pytest.mark.parametrize("name", ["mamba", "inkling", "jamba"])
@torch.no_grad()
def test_packed_model_compiled(name: str, model: nn.Module) -> None:
    """The bounds go down the same way where they are traced."""
    packed = batch(captured(name, model))
    with enable():
        expected = model(**packed, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(**packed, use_cache=False).logits, expected, **CLOSE)


@pytest.mark.parametrize(
    "name", slow_but("kimi_linear", "qwen3_next", names=[name for name in HERE if name in MASKLESS])
)
@torch.no_grad()
def test_whole_sequences_are_compiled_without_a_mask(name: str, model: nn.Module) -> None:
    """As they are computed without the compiler; `test_modeling` has what is compiled with one."""
    masks: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: list) -> Callable:
        attention = torch.nn.functional.scaled_dot_product_attention
        nodes = graph.graph.find_nodes(op="call_function", target=attention)
        masks.extend((n.kwargs["attn_mask"], n.kwargs["is_causal"]) for n in nodes)
        return graph.forward

    ids = prompt(captured(name, model), 9, batch=2)
    with enable():
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        torch.testing.assert_close(
            compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, **CLOSE
        )
    assert masks == [(None, True)]


@pytest.mark.parametrize("name", slow_but("qwen3_next", names=["kimi_linear", "qwen3_5", "qwen3_next"]))
def test_joined_projections(name: str, model: nn.Module) -> None:
    """The model computes what it did, gradients of the joint weights included; not enabled, it says what is missing.

    Where a projection cannot be joined, nothing is changed."""
    ids = prompt(model, 9, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    names = [name for name, _ in model.named_parameters()]

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(ids, attention_mask=mask).logits[mask > 0].square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    before = [set(vars(m)) for m in model.modules()]
    *_, projection = (m for name, m in model.named_modules() if name.endswith("k_proj"))
    hook = projection.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="k_proj must have no hooks"):
        join_projections(model)
    hook.remove()
    assert [set(vars(m)) for m in model.modules()] == before
    with enable():
        expected, tokens = gradients(), generated(model, ids, mask)
        join_projections(model)
        join_projections(model)  # again, which changes nothing
        found = gradients()
        torch.testing.assert_close(generated(model, ids, mask), tokens)
    for path, layer in model.named_modules():
        if joint := getattr(layer, "joint_sizes", ()):
            old = [expected[f"{path}.{child}.weight"] for child in fusible_paths(layer)]
            new = found[f"{path}.joint_proj.weight"]
            torch.testing.assert_close(new[: sum(map(len, old))], torch.cat(old), **CLOSE)
            assert sum(joint) % 8 == 0 and not any(
                f"{path}.{child}.weight" in found for child in layer.fusible
            )
    unjoined = set(names) & set(found)
    torch.testing.assert_close({x: found[x] for x in unjoined}, {x: expected[x] for x in unjoined}, **CLOSE)
    with pytest.raises(TypeError, match="must be called with the parts"):
        model(ids)
    with pytest.raises(RuntimeError, match="save_pretrained must be called before join_projections"):
        model.save_pretrained("nowhere")
    with pytest.raises(ValueError, match="whose projections can be joined, got a? ?Linear"):
        join_projections(nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["lfm2", "lfm2_moe"])
def test_packed_by_index(name: str, model: nn.Module, device: torch.device) -> None:
    """The layers whose convolution gets the numbers of sequences, and no bounds."""
    layer = recurrent(model)[0]
    x = torch.randn(1, sum(LENGTHS), 32, device=device)
    index = torch.arange(len(LENGTHS), device=device).repeat_interleave(torch.tensor(LENGTHS, device=device))
    with enable():
        y = layer(x, seq_idx=index[None].to(torch.int32))
        torch.testing.assert_close(y, torch.cat([layer(part) for part in x.split(LENGTHS, 1)], 1), **CLOSE)


@pytest.mark.parametrize("name", HERE)
def test_packed_with_a_cache(name: str, model: nn.Module) -> None:
    """A cache has no row for each sequence, and puts tokens in front of those that bounds tell apart."""
    packed, cache = batch(model), transformers.DynamicCache(config=model.config)
    layer = recurrent(model)[0]
    x = torch.randn(1, sum(LENGTHS), 32, device=model.device)
    argument = cache_argument(model if name == "recurrent_gemma" else layer)
    given: dict = {argument: cache}
    if name == "xlstm":  # its layers get the states
        given = {"state": tuple(torch.zeros(1, 4, *sizes) for sizes in ((16, 16), (16,), (1,)))}
    positional = (None, None) if name in POSITIONAL and argument != "state" else ()
    with enable():
        with pytest.raises(ValueError, match="cu_seq_lens_q must come without a cache"):
            model(**packed, use_cache=True)
        with pytest.raises(ValueError, match="cu_seq_lens_q must come without a cache"):
            layer(x, *positional, **given, cu_seq_lens_q=bounds(model.device))
    assert not any(cache.has_previous_state(i) for i in range(len(cache.layers)) if cache.is_linear[i])


@pytest.mark.parametrize("length", [2, 142])
@pytest.mark.parametrize("name", ["lfm2"])
def test_packed_by_index_with_a_cache(name: str, length: int, model: nn.Module) -> None:
    """Two tokens, which transformers pads to the length of the convolution, and more."""
    ids = prompt(model, length)
    with enable(), pytest.raises(ValueError, match="seq_idx must come without a cache"):
        model(ids, seq_idx=torch.zeros_like(ids), use_cache=True)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "zamba"])
def test_index_without_bounds(name: str, model: nn.Module) -> None:
    ids = prompt(model, 9)
    with enable(), pytest.raises(ValueError, match="seq_idx must come with cu_seq_lens_q"):
        model(ids, seq_idx=torch.zeros_like(ids), use_cache=False)


@pytest.mark.parametrize("name", slow_but("kimi_linear", "mamba2"))
def test_compile(name: str, model: nn.Module) -> None:
    """Without a break, in one graph for all lengths. `test_compile_training` has MiniMax."""
    with enable():
        assert_one_compilation(captured(name, model), [70, 2, 65, 384], training=False)


@pytest.mark.parametrize("name", slow_but("minimax", "qwen3_next", names=DOORS))
def test_accelerated_is_captured(name: str, model: nn.Module) -> None:
    """Compiled in one graph, and exported, on the ops."""
    model = captured(name, model)
    with accelerate(model):
        assert_one_compilation(model, [70, 3, 165], training=False)
        program = exported(model)
        assert ops_of(program.graph_module)
        assert_exact(program.module(), model, [3, 165])


@pytest.mark.parametrize("name", slow_but("mamba2", "minimax", names=DOORS))
def test_compile_training(name: str, model: nn.Module) -> None:
    with enable():
        # What follows Dynamo gets the parts of a graph one by one: it is enough to see it train one of the models, and
        # in the mode "lite" PyTorch does what Inductor would generate code for.
        options = {"mode": "lite"} if name == "mamba2" else {}
        assert_one_compilation(captured(name, model), [70, 2, 65, 165], True, **options)


# Qwen3-Next is exported in docs/how-to/transformers.md.
@pytest.mark.parametrize("name", slow_but("mamba2", "minimax"))
def test_export(name: str, model: nn.Module) -> None:
    """Once, for lengths it has not seen, with an op for each layer, which stays after the model is as it was."""
    with enable():
        program = exported(captured(name, model), least=3 if name == "zaya" else 2)
        recurrences = [op for op in ops_of(program.graph_module) if "short_conv" not in op]
        assert bool(recurrences) == (RUNS_ON[name] != SHORT)
        assert_exact(program.module(), model, EXPORTED)
    with torch.no_grad():
        ids = prompt(model, 70)
        torch.testing.assert_close(program.module()(ids), Logits(model)(ids), **CLOSE)


@pytest.mark.parametrize("name", slow_but("minimax", names=["mamba2", "minimax"]))
def test_export_without(name: str, model: nn.Module) -> None:
    """With their loops over chunks and blocks, whose number is then a constant."""
    with pytest.raises(torch._dynamo.exc.UserError, match="Constraints violated"):
        exported(captured(name, model))


# A step of Mamba-2's decoding is packaged by test_decoding.
@pytest.mark.parametrize("name", slow_but("minimax", names=DOORS))
@pytest.mark.usefixtures("aoti_packages_load")
def test_aotinductor(name: str, model: nn.Module, tmp_path) -> None:
    del next(m.layers for m in model.modules() if hasattr(m, "layers"))[1:]  # the recurrence is in the first
    with enable():
        package = packaged(captured(name, model), tmp_path)
        # Inductor adds in another order, which changes logits of the others by as much as flacompose's order does.
        limit = 1e-5 if name in ("mamba2", "minimax") else 1e-4
        assert_exact(package, model, PACKAGED, limit=limit)
