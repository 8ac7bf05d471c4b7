"""A causal language model of transformers, captured: compiled, exported, packaged."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

EXPORTED = [3, 64, 65, 165, 2048]
PACKAGED = [100, 165, 384, 2048]


class Logits(nn.Module):
    """``[B, T]`` token ids to ``[B, T, vocabulary]``, without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False).logits


def prompt(model: nn.Module, length: int, batch: int = 1) -> Tensor:
    return torch.randint(model.config.get_text_config().vocab_size, (batch, length), device=model.device)


class InFloat64(TorchFunctionMode):
    """What a model converts to float32 becomes float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def double(model: nn.Module) -> nn.Module:
    """A copy in float64, to be called within `InFloat64`: what the model computes, without the errors of float32.

    Some models lose as much in float32 as a test allows, by an amount that depends on the processor.
    """
    model = copy.deepcopy(model).double()
    if hasattr(model, "set_experts_implementation"):
        # The default experts need a product that PyTorch does not have in float64.
        model.set_experts_implementation("batched_mm")
    return model


class Uncached:
    """What a model computes of whole sequences without a cache, in float64: the truth about a cache, which it has not.

    It is called where nothing is enabled.
    """

    def __init__(self, model: nn.Module) -> None:
        self.logits = Logits(double(model))

    @torch.no_grad()
    def __call__(self, ids: Tensor, padding: int = 0) -> Tensor:
        """``[B, T - padding, vocabulary]`` of ``[B, T]`` tokens, the first of which are left out, not masked."""
        with InFloat64():
            return self.logits(ids[:, padding:])


def cache_argument(module: nn.Module) -> str:
    """What the forward of a model or a layer calls a cache, in the transformers that is there."""
    takes = inspect.signature(module.forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params", "state") if name in takes)


def cache_of(out: Any) -> Any:
    return next(out[name] for name in ("cache", "past_key_values", "cache_params", "state") if name in out)


def captured(name: str, model: nn.Module) -> nn.Module:
    """The model, but for what PyTorch cannot capture in it, which is no recurrence."""
    if torch.cuda.is_available() and torch.__version__ < "2.12" and name != "mamba2":
        pytest.skip(
            "PyTorch 2.11 fails on CUDA: to lower the router's choice of experts in Inductor, and to export softmax "
            "attention, whose kernels ask for a length that 8 divides"
        )
    if hasattr(model, "set_experts_implementation"):
        # The default experts read values while they are traced.
        model.set_experts_implementation("batched_mm")
    if name == "rwkv":
        model(prompt(model, 1))  # its first call changes its weights
    if name in ("glm5_next", "qwen4_exp"):
        # Their sparse attention asks for 17 tokens, or reads how many blocks are complete.
        del next(m.layers for m in model.modules() if hasattr(m, "layers"))[1]
    return model


def generated(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Greedily, through the cache: tokens ``[B, T + 24]``, and the logits ``[24, B, vocabulary]`` they come from."""
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0,
        use_cache=True, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


def assert_one_compilation(model: nn.Module, lengths: Sequence[int], training: bool, **options: str) -> None:
    """One graph for all lengths, right at each at batch 1: logits, in training the gradient of every parameter.

    What follows Dynamo takes long, and sees the same models in an export, a package and in training.
    """
    eager = Logits(model)
    compiled = torch.compile(eager, fullgraph=True, dynamic=True, **(options or {"backend": "eager"}))
    parameters = [p for p in model.parameters() if p.requires_grad]

    def run(call: nn.Module, ids: Tensor) -> list[Tensor]:
        with torch.set_grad_enabled(training):
            logits = call(ids)
            return [logits, *(torch.autograd.grad(logits.square().mean(), parameters) if training else [])]

    for i, length in enumerate(lengths):
        ids = prompt(model, length)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            actual = run(compiled, ids)
        for a, b in zip(actual, run(eager, ids), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def exported(model: nn.Module, least: int = 2) -> ExportedProgram:
    """For `least` tokens or more."""
    T = Dim("T", min=least, max=8192)
    with torch.no_grad():
        return torch.export.export(Logits(model), (prompt(model, 37),), dynamic_shapes=({1: T},))


def ops_of(module: GraphModule) -> list[str]:
    """This library's ops in a graph."""
    return [str(n.target) for n in module.graph.nodes if str(n.target).startswith("flacompose.")]


@torch.no_grad()
def assert_exact(program: nn.Module, model: nn.Module, lengths: Sequence[int], limit: float = 1e-5) -> None:
    for length in lengths:
        ids = prompt(model, length)
        torch.testing.assert_close(program(ids), Logits(model)(ids), atol=limit, rtol=limit)


def packaged(model: nn.Module, folder: Path) -> nn.Module:
    path = torch._inductor.aoti_compile_and_package(exported(model), package_path=str(folder / "model.pt2"))
    return torch._inductor.aoti_load_package(path)
