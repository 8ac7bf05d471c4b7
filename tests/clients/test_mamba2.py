"""Mamba-2 of transformers, with the scan and the step of flacompose in place of its own."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from flacompose.ops import mamba_chunk_scan_combined, selective_state_update

from .capture import (
    EXPORTED,
    PACKAGED,
    assert_continued,
    assert_exact,
    assert_one_compilation,
    assert_same_generation,
    assert_same_logits,
    exported,
    ops,
    packaged,
)

transformers = pytest.importorskip("transformers", minversion="5.17")
modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")


def scan(
    hidden_states, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, dt_softplus=False,
    dt_limit=(0.0, float("inf")), return_final_states=False,
):  # fmt: skip
    """`mamba2_chunk_scan`, a prompt or its continuation."""
    return mamba_chunk_scan_combined(
        hidden_states, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, dt_softplus, tuple(dt_limit),
        return_final_states,
    )  # fmt: skip


def step(state, hidden_states, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False):
    """`mamba2_selective_state_update`, one token, which writes to the state in the cache."""
    y, new = selective_state_update(state, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)
    state.copy_(new)
    return y


@pytest.fixture
def model(device):
    config = transformers.Mamba2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=16, state_size=8, n_groups=2,
        chunk_size=64,
    )  # fmt: skip
    return transformers.Mamba2ForCausalLM(config).to(device).eval()


def on_flacompose(monkeypatch):
    monkeypatch.setattr(modeling, "mamba2_chunk_scan", scan)
    monkeypatch.setattr(modeling, "mamba2_selective_state_update", step)


def test_logits(model, monkeypatch):
    assert_same_logits(model, partial(on_flacompose, monkeypatch))


def test_continued(model, monkeypatch):
    assert_continued(model, partial(on_flacompose, monkeypatch), "cache_params")


def test_generation(model, monkeypatch):
    assert_same_generation(model, partial(on_flacompose, monkeypatch))


def test_compile(model, monkeypatch):
    on_flacompose(monkeypatch)
    assert_one_compilation(model, [70, 2, 3, 64, 165, 384], training=False)


def convolution(hidden_states, weight, bias=None, activation=None):
    """`causal_conv1d_fn` in shifted products."""
    T, W = hidden_states.shape[-1], weight.shape[-1]
    past = torch.nn.functional.pad(hidden_states, (W - 1, 0))
    y = sum(past[..., w : w + T] * weight[:, w, None] for w in range(W)) + bias[:, None]
    return transformers.activations.ACT2FN[activation](y)


def test_compile_training(model, monkeypatch):
    """Without their `conv1d`, whose gradient Inductor compiles for one length, and for batch 1 not at all."""
    on_flacompose(monkeypatch)
    monkeypatch.setattr(modeling, "causal_conv1d_fn", convolution)
    assert_one_compilation(model, [70, 2, 3, 64, 165], training=True)


def test_export(model, monkeypatch):
    with pytest.raises(torch._dynamo.exc.UserError, match="Constraints violated"):
        exported(model)  # with their scan: the number of chunks is a constant
    on_flacompose(monkeypatch)
    program = exported(model)
    assert ops(program.graph_module) == ["flacompose.scalar_decay_chunk.default"]
    assert_exact(program.module(), model, EXPORTED)


@pytest.mark.usefixtures("aoti_packages_load")
def test_aotinductor(model, monkeypatch, tmp_path):
    on_flacompose(monkeypatch)
    assert_exact(packaged(model, tmp_path), model, PACKAGED)
