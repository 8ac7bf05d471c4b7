"""Models of transformers whose tokens ranks share: logits and gradients are those of one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.ranks import on_ranks
from helpers.tiny import tiny
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._attention import _cp_options

from flacompose.distributed import context_parallel
from flacompose.integrations.transformers import enable
from flacompose.ops._parallel.ranks import Ranks, of_all

plain = F.scaled_dot_product_attention


def ring_of(mesh: DeviceMesh) -> object:
    """What stands in for PyTorch's attention across ranks, which has no kernels on a CPU."""
    ranks = Ranks(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size(), "cpu")

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: None = None, is_causal: bool = False, **options: object
    ) -> Tensor:
        assert attn_mask is None and is_causal
        k, v = (of_all(ranks, x).movedim(0, 2).flatten(2, 3) for x in (k, v))
        T, L = q.shape[2], k.shape[2]
        mask = torch.ones(L, L, dtype=torch.bool).tril()[T * ranks.rank :][:T]
        return plain(q, k, v, attn_mask=mask, **options)

    return attention


def models(mesh: DeviceMesh) -> None:
    rank, n = mesh.get_local_rank(), mesh.size()
    own = slice(8 * rank, 8 * rank + 8)
    for name, dtype in (
        ("lfm2", torch.float64), ("mamba2", torch.float64), ("minimax", torch.float32), ("qwen3_5", torch.float64),
        ("recurrent_gemma", torch.float64), ("rwkv", torch.float64), ("xlstm", torch.float64),
    ):  # fmt: skip
        torch.manual_seed(0)
        model, ids = tiny(name).to(dtype), torch.randint(3, 64, (2, 8 * n))
        logits = model(ids, use_cache=False).logits
        weights = torch.randn_like(logits)
        (logits * weights).sum().backward()
        expected = {path: p.grad for path, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        assert context_parallel(model, mesh) is model
        hybrid = name in ("lfm2", "minimax", "qwen3_5", "recurrent_gemma")
        if hybrid:
            with pytest.raises(ValueError, match="softmax attention must be computed across the ranks"):
                model(ids[:, own], use_cache=False)
        F.scaled_dot_product_attention = ring_of(mesh)
        if hybrid:
            _cp_options.enable_load_balance = True
            with pytest.raises(
                ValueError, match="context_parallel must keep the order of tokens, got its load"
            ):
                model(ids[:, own], use_cache=False)
        _cp_options.enable_load_balance = False
        try:
            found = model(ids[:, own], use_cache=False).logits
            (found * weights[:, own]).sum().backward()
        finally:
            F.scaled_dot_product_attention = plain
        copied = copy.deepcopy(model)  # which calls its own weights
        for p in copied.parameters():
            p.detach().zero_()
        F.scaled_dot_product_attention = ring_of(mesh)
        assert not bool(copied(ids[:, own], use_cache=False).logits.any()), name
        F.scaled_dot_product_attention = plain
        # Parts of these models are computed in float32, whatever the dtype of their weights.
        bounds = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found, logits[:, own], **bounds, msg=lambda text, at=name: f"{at}: {text}")
        for path, p in model.named_parameters():
            if path in expected:
                assert p.grad is not None
                dist.all_reduce(p.grad)
                error = (p.grad - expected[path]).norm() / expected[path].norm()
                assert error < 1e-5, (name, path, error)


def refusals(mesh: DeviceMesh) -> None:
    with pytest.raises(
        ValueError, match="call enable.. or accelerate.. first, got causal_conv1d_update of the Lfm2"
    ):
        context_parallel(tiny("lfm2"), mesh)
    with enable():
        with pytest.raises(ValueError, match="the ZayaCCAProjection at '.*', which mixes neighbours itself"):
            context_parallel(tiny("zaya"), mesh)
        eager = tiny("qwen3_5")
        eager.config._attn_implementation = "eager"
        with pytest.raises(ValueError, match="target must have attn_implementation='sdpa', got 'eager'"):
            context_parallel(eager, mesh)
        model = context_parallel(tiny("mamba2"), mesh)
        with pytest.raises(ValueError, match="a cache must not be given across ranks"):
            model(torch.ones(1, 4, dtype=torch.long), use_cache=True)


def both(mesh: DeviceMesh) -> None:
    refusals(mesh)
    with enable():
        models(mesh)


def test_models() -> None:
    on_ranks(2, both)
