"""What modeling files call and are called with, where no model of the tests goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.17")

from flacompose.integrations.modeling import convolution, delta_rule, qwen3_next  # noqa: E402

ACTIVATIONS = {None: lambda x: x, "silu": F.silu, "swish": F.silu, "gelu": F.gelu}
B, D, W = 2, 5, 4


@pytest.fixture
def weights(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(D, W, device=device, requires_grad=True), torch.randn(
        D, device=device, requires_grad=True
    )


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [B, D, T]`` with nothing before it."""
    return F.conv1d(F.pad(x, (W - 1, 0)), weight[:, None], bias, groups=D)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("L", [3, 4, 6])
@pytest.mark.parametrize("has_bias", [True, False])
@torch.no_grad()
def test_steps(
    has_bias: bool,
    L: int,
    T: int,
    activation: str | None,
    weights: tuple[Tensor, Tensor],
    device: torch.device,
) -> None:
    """A state of as many tokens as a cache has, which is written to."""
    weight, bias = weights[0], weights[1] if has_bias else None
    x, state = torch.randn(B, D, T, device=device), torch.randn(B, D, L, device=device)
    history = torch.cat([state, x], -1)
    y = convolution.convolve_step(x, state, weight, bias, activation)
    expected = ACTIVATIONS[activation](convolved(history, weight, bias)[..., -T:])
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(state, history[..., -L:])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_numbers_of_sequences(
    has_bias: bool, activation: str | None, weights: tuple[Tensor, Tensor], device: torch.device
) -> None:
    """Two rows, packed unlike each other: values and gradients of one sequence after another."""
    weight, bias = weights[0], weights[1] if has_bias else None
    x = torch.randn(B, D, 9, device=device, requires_grad=True)
    lengths = [[2, 6, 1], [9]]
    index = torch.tensor([[0] * 2 + [1] * 6 + [2], [0] * 9], dtype=torch.int32, device=device)
    y = convolution.convolve(x, weight, bias, activation, seq_idx=index)
    rows = [
        torch.cat([convolved(part, weight, bias) for part in row[None].split(parts, -1)], -1)
        for row, parts in zip(x, lengths, strict=True)
    ]
    expected = ACTIVATIONS[activation](torch.cat(rows))
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    leaves = [x, weight, *([bias] if bias is not None else [])]
    w = torch.randn_like(y)
    for actual, truth in zip(
        torch.autograd.grad((y * w).sum(), leaves),
        torch.autograd.grad((expected * w).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(actual, truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_without_numbers(
    activation: str | None, weights: tuple[Tensor, Tensor], device: torch.device
) -> None:
    x = torch.randn(B, D, 9, device=device)
    y = convolution.convolve(x, *weights, activation=activation)
    torch.testing.assert_close(y, ACTIVATIONS[activation](convolved(x, *weights)), atol=1e-5, rtol=1e-5)


GIVEN = ("attention_mask", "position_ids", "cu_seq_lens_q", "cu_seqlens", "seq_idx")
WITH_MASKS = [
    *({"given": {key: torch.zeros(1)}} for key in GIVEN),
    {"given": {"past_key_values": transformers.DynamicCache()}},
    {"args": (None, torch.ones(1, 4))},
    {"compiling": False},
    {"exporting": True},
    {"attention": "eager"},
    {"is_causal": False},
]


@pytest.mark.parametrize("case", [{}, *WITH_MASKS], ids=str)
def test_what_is_compiled_without_a_mask(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole sequences alone, where softmax attention is PyTorch's and causal; an exported program is none."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: case.get("compiling", True))
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", case.get("exporting", False))
    config = SimpleNamespace(
        _attn_implementation=case.get("attention", "sdpa"),
        is_causal=case.get("is_causal", True),
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    )
    given = case.get("given", {})

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kwargs

    found = qwen3_next.qwen3_next_model_forward(forward)(
        SimpleNamespace(config=config), *case.get("args", ()), **given
    )
    assert found == (
        given if case else {"attention_mask": {"linear_attention": None, "full_attention": None}}
    )


@pytest.mark.parametrize("compiling", [True, False])
@pytest.mark.parametrize("of_g", [torch.float32, torch.bfloat16])
def test_gates_are_stacked(of_g: torch.dtype, compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the compiler makes one kernel of both, and neither is rounded for that."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    monkeypatch.setattr(delta_rule.op, "update", lambda *inputs: (inputs, None))
    q, g, beta = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, dtype=of_g), torch.randn(2, 1, 3)
    without_state: Any = dict(
        initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None
    )
    given, _ = delta_rule.step("g", q, q, q, g, beta, **without_state)
    inputs = delta_rule.op.Inputs(*given[:-1])
    found = inputs.beta, inputs.g
    assert all(map(torch.equal, found, (beta, g)))
    in_one = found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()
    assert in_one == (compiling and of_g == torch.float32)
