"""The layer of RWKV7: the values that layers share, gates of any strength, first values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.truth import EVERY, assert_close, build, random_state, tensors, tokens_of
from torch import Tensor

from flacompose.layers import RWKV7Attention
from flacompose.models.feed_forward import RWKV7FeedForward

SMALL: dict[str, Any] = {"hidden_size": 24, "head_dim": 6, "num_hidden_layers": 3}


def perturbed(**arguments: Any) -> RWKV7Attention:
    layer = RWKV7Attention(**SMALL | arguments)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    return layer


@torch.no_grad()
def test_the_first_layer_gives_its_values() -> None:
    """Each token's own, with zeros at pads and past packed sequences; what it is given as such is not looked at."""
    layer = perturbed(layer_idx=0, value_dim=48)
    x = torch.randn(2, 5, 24)
    before = torch.cat([torch.zeros(2, 1, 24), x[:, :-1]], 1)
    expected = layer.v_proj(x + (before - x) * layer.x_v)
    y, _, v_first = layer(x, v_first="anything")
    assert y.shape == (2, 5, 24) and v_first.shape == (2, 5, 48)
    assert_close(v_first, expected, 1e-6)
    assert_close(layer(x, num_states=2)[2], expected, 1e-6)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 1, 1]])
    _, _, v_first = layer(x, attention_mask=mask)
    assert not v_first[mask == 0].any()
    for row in range(2):
        assert_close(v_first[row, mask[row] == 1], layer(x[row : row + 1, mask[row] == 1])[2][0], 1e-6)
    _, _, v_first = layer(x[:1], cu_seqlens=torch.tensor([0, 1, 3]))
    assert not v_first[:, 3:].any()
    assert_close(v_first[:, 1:3], layer(x[:1, 1:3])[2], 1e-6)


@torch.no_grad()
def test_the_other_layers_take_them() -> None:
    """Any float dtype will do, and the argument itself is the third result, whatever it holds at pads."""
    layer = perturbed(layer_idx=1)
    x, v_first = torch.randn(2, 5, 24), torch.randn(2, 5, 24)
    y, _, same = layer(x, v_first=v_first)
    assert same is v_first
    assert_close(layer(x, v_first=v_first.double())[0], y, 1e-6)
    assert layer(x, v_first=v_first.bfloat16())[0].dtype == torch.float32
    assert (layer(x, v_first=v_first + 1)[0] - y).norm() > 0.01 * y.norm()
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    y, _, _ = layer(x, v_first=v_first, attention_mask=mask)
    junk = v_first.masked_fill(mask[:, :, None] == 0, torch.nan)
    z, _, same = layer(x, v_first=junk, attention_mask=mask)
    assert torch.equal(y, z) and same is junk
    assert_close(y[:1, 2:], layer(x[:1, 2:], v_first=v_first[:1, 2:])[0], 1e-5)


@pytest.mark.parametrize(
    ("v_first", "error", "message"),
    [
        (None, ValueError, "must be given to a layer whose layer_idx is not 0: .*, got None"),
        ([1.0], TypeError, "must be a tensor, got list"),
        (torch.zeros(2, 5, 48).long(), TypeError, "must be float32, bfloat16, float16 or float64, got int64"),
        (torch.zeros(2, 5, 24), ValueError, r"must have shape \(2, 5, 48\), got \(2, 5, 24\)"),
        (torch.zeros(2, 4, 48), ValueError, r"must have shape \(2, 5, 48\), got \(2, 4, 48\)"),
        (torch.zeros(2, 5, 48, device="meta"), ValueError, "must be on cpu, got meta"),
    ],
)
@pytest.mark.parametrize("layer_idx", [None, 1])
def test_refused_values(layer_idx: int | None, v_first: Any, error: type[Exception], message: str) -> None:
    layer = RWKV7Attention(**SMALL, value_dim=48, layer_idx=layer_idx)
    with pytest.raises(error, match=f"^v_first {message}$"):
        layer(torch.ones(2, 5, 24), v_first=v_first)


@pytest.mark.parametrize("fuse_norm", [False, True])
@pytest.mark.parametrize("logits", [-1e4, -100.0, 30.0, 1e4])
def test_gates_of_any_strength(logits: float, fuse_norm: bool, device: torch.device) -> None:
    """No decay, rate or share of the first values makes a NaN, nor does a key of zeros, and nor in any gradient."""
    for T in (1, 5, 70):
        layer = build(EVERY["rwkv7"] | {"fuse_norm": fuse_norm}, device=device)
        with torch.no_grad():
            for lora in (layer.w_lora, layer.a_lora, layer.v_lora):
                lora.lora[2].bias.fill_(logits)
            layer.k_k[:6] = 0  # of the first head
        x = tokens_of(layer, 1, T).requires_grad_()
        state = random_state(layer, 1)
        leaves = [t.requires_grad_() for t in tensors(state)]
        y, new = layer(x, state)
        results = [y, *tensors(new)]
        parameters = {name: p for name, p in layer.named_parameters() if name != "k_k"}
        gradients = torch.autograd.grad(sum(t.sum() for t in results), [x, *leaves, *parameters.values()])
        assert all(t.isfinite().all() for t in (*results, *gradients))


@pytest.mark.parametrize(("allowed", "least"), [(False, -0.46), (True, -1.0)])
@torch.no_grad()
def test_eigenvalues(allowed: bool, least: float) -> None:
    """Of what a token does to the state: they never leave their bounds, and come near to them."""
    layer, K = perturbed(layer_idx=0, allow_neg_eigval=allowed).double(), 6
    for i, (rate, decay) in enumerate([(8.0, -8.0), (8.0, 8.0), (-8.0, -8.0), (0.0, 0.0)]):
        layer.a_lora.lora[2].bias.fill_(rate)
        layer.w_lora.lora[2].bias.fill_(decay)
        # Row j begins with the unit vector j as the keys of each head, and the last row with zeros.
        state = layer.init_state(K + 1)
        state.recurrent[:K] = torch.eye(K).double()[:, None, :, None]
        _, new, _ = layer(torch.randn(1, 1, 24).double().expand(K + 1, -1, -1), state)
        transition = (new.recurrent[:K] - new.recurrent[K:])[..., 0].permute(1, 2, 0)
        eigenvalues = torch.linalg.eigvals(transition)
        assert eigenvalues.imag.abs().max() < 1e-9
        assert least < eigenvalues.real.min() and eigenvalues.real.max() < 1
        if i == (0 if allowed else 1):  # a rate of nearly 1, without decay and with the strongest
            assert eigenvalues.real.min() < least + 0.02


@pytest.mark.parametrize("index", [0, 1, 2])
def test_first_values(index: int) -> None:
    """First values are those of the peer, channel by channel, and let a first token change the state."""
    D, K, L = 64, 16, 3
    layer = RWKV7Attention(hidden_size=D, head_dim=K, layer_idx=index, num_hidden_layers=L)
    feed_forward = RWKV7FeedForward(D, 96, layer_idx=index, num_hidden_layers=L)
    values, x_k = layer.state_dict(), feed_forward.x_k.tolist()
    depth, rest = index / (L - 1), 1 - index / L
    powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
    for n in range(D):
        linear = n / (D - 1) - 0.5
        zigzag = (n % K - (K - 1) / 2) / ((K - 1) / 2)
        zigzag *= abs(zigzag)
        expected = {f"x_{name}": 1 - (n / D) ** (power * rest) for name, power in powers.items()} | {
            "k_k": 0.71 - 0.1 * linear,
            "k_a": 1.02,
            "r_k": -0.04,
            "w_lora.lora.2.bias": -6 + 6 * (n / (D - 1)) ** (1 + depth**0.3) + 0.5 + 2.5 * zigzag,
            "a_lora.lora.2.bias": -0.19 + 0.3 * zigzag + 0.4 * linear,
            "g_norm.weight": ((index + 1) / L) ** 0.7,
            "g_norm.bias": 0.0,
        }
        if index:
            expected["v_lora.lora.2.bias"] = 0.73 - 0.4 * linear
        for name, value in expected.items():
            assert float(values[name].flatten()[n]) == pytest.approx(value, abs=1e-5), name
        assert x_k[n] == pytest.approx(1 - (n / D) ** rest**4, abs=1e-5)

    def orthogonal(weight: Tensor, gain: float) -> None:
        w = weight.detach().double()
        products = w @ w.T if w.shape[0] < w.shape[1] else w.T @ w
        torch.testing.assert_close(products, gain**2 * torch.eye(len(products)).double(), atol=1e-5, rtol=0)

    for name, gain in (("r_proj", 1.0), ("k_proj", 0.1), ("v_proj", 1.0)):
        orthogonal(layer.get_submodule(name).weight, gain)
    orthogonal(feed_forward.key.weight, 1.0)
    for lora in (layer.w_lora, layer.a_lora, layer.g_lora, *([layer.v_lora] if index else [])):
        assert not lora.lora[0].weight.any()
        up = lora.lora[2].weight
        orthogonal(up, 0.1 * max(up.shape[1] / D, 1) ** 0.5)
    assert layer.g_lora.lora[2].bias is None
    assert not layer.o_proj.weight.any() and not feed_forward.value.weight.any()
    with torch.no_grad():
        _, state, _ = layer(torch.ones(1, 1, D), v_first=torch.ones(1, 1, D))
    assert state.recurrent.any()


def test_first_values_without_a_place() -> None:
    """They are those of the only layer of a model; sizes of 1, and values of another size, have some too."""

    def values(**arguments: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return RWKV7Attention(hidden_size=24, head_dim=6, **arguments).state_dict()

    only = values(layer_idx=0, num_hidden_layers=1)
    torch.testing.assert_close(values(layer_idx=0), only, rtol=0, atol=0)
    for arguments in ({}, {"layer_idx": 2}, {"num_hidden_layers": 5}):
        found = values(**arguments)
        alike = {name for name in only if "lora.2.weight" not in name}  # which are drawn in another order
        torch.testing.assert_close(
            *({name: x[name] for name in alike} for x in (found, only)), rtol=0, atol=0
        )
        assert found["v_lora.lora.2.bias"].any()
    wide = values(layer_idx=1, num_hidden_layers=3, value_dim=48)["v_lora.lora.2.bias"]
    torch.testing.assert_close(wide, torch.linspace(0.93, 0.53, 48))
    for one in (
        RWKV7Attention(hidden_size=4, head_dim=1),
        RWKV7Attention(hidden_size=1, head_dim=1),
        RWKV7FeedForward(1, 1),
    ):
        assert all(p.isfinite().all() for p in one.parameters())


def test_ranks() -> None:
    """As the peer computes them."""
    for hidden_size, head_dim, ranks in (
        (512, 32, (32, 128, 32, 32)),
        (768, 64, (64, 128, 64, 32)),
        (1024, 64, (64, 160, 64, 64)),
        (2560, 64, (128, 256, 128, 96)),
        (4096, 128, (320, 320, 320, 224)),
    ):
        layer = RWKV7Attention(hidden_size=hidden_size, head_dim=head_dim, device="meta")
        assert ranks == (
            layer.decay_low_rank_dim,
            layer.gate_low_rank_dim,
            layer.a_low_rank_dim,
            layer.v_low_rank_dim,
        )


def test_packed_rows_in_code_that_is_generated() -> None:
    """What a compiler makes of the shift and of what is computed before it, in one piece, is what eager code does."""
    part, mix = RWKV7FeedForward(24, 8), torch.randn(24, 24)
    torch.nn.init.normal_(part.value.weight)
    bounds = torch.tensor([0, 4, 4, 9, 30])

    def results(x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.nn.functional.rms_norm(x @ mix, (24,))
        y, state = part(x, cu_seqlens=bounds)
        return x + y, state.shift

    x = torch.randn(1, 33, 24, requires_grad=True)
    found = []
    for call in (torch.compile(results, fullgraph=True), results):
        y, shift = call(x)
        found.append(
            (y, shift, *torch.autograd.grad(y.square().sum() + shift.sum(), [x, *part.parameters()]))
        )
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected, 1e-5)
