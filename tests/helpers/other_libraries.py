"""The models beside the libraries that transformers would otherwise call: a process that has them on its path.

    python -m helpers.other_libraries FILE {with,without} NAME ...

The libraries are stand-ins which raise when they are called. They are found as the real ones are: by transformers, when
a modeling file is imported, whatever the device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flacompose.integrations.transformers import accelerate, enable, runs_on
from helpers.capture import Logits, generated, prompt
from helpers.tiny import tiny

# The functions of each module that transformers looks for: the distribution, its version, and where they are.
LIBRARIES: dict[tuple[str, str], dict[str, list[str]]] = {
    ("flash-linear-attention", "0.5.0"): {"fla.ops.gated_delta_rule": ["chunk_gated_delta_rule",
     "fused_recurrent_gated_delta_rule"], "fla.ops.kda": ["chunk_kda", "fused_recurrent_kda"]},
    ("mamba-ssm", "2.3.0"): {"mamba_ssm.ops.selective_scan_interface": ["mamba_inner_fn", "selective_scan_fn"],
     "mamba_ssm.ops.triton.selective_state_update": ["selective_state_update"],
     "mamba_ssm.ops.triton.ssd_combined": ["mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"]},
    ("causal-conv1d", "1.6.0"): {"causal_conv1d": ["causal_conv1d_fn", "causal_conv1d_update"]},
}  # fmt: skip

# What `kernels` makes of a decorated function. transformers imports the other names, and calls none of them.
KERNELS = """
from torch import nn

def use_kernel_forward_from_hub(layer_name):
    def decorator(decorated):
        if isinstance(decorated, type):
            decorated.kernel_layer_name = layer_name
            return decorated

        class Func(nn.Module):
            kernel_layer_name = layer_name

            def forward(self, *args, **kwargs):
                return func(*args, **kwargs)

        func = decorated
        return Func()

    return decorator

def use_kernelized_func(*functions):
    assert all(isinstance(function, nn.Module) for function in functions)
    return lambda cls: cls

CUDAProperties = Device = LayerRepository = LocalLayerRepository = Mode = register_kernel_mapping = None
replace_kernel_forward_from_hub = use_kernel_mapping = get_kernel = kernelize = None
KernelizeFallback = ROCMProperties = None  # of newer releases
"""


def write_libraries(folder: Path) -> None:
    """The stand-ins, importable from `folder`: flash-linear-attention, mamba-ssm, causal-conv1d.

    That of `kernels` is in a folder beside it, for a process without the real one.
    """
    for (distribution, version), modules in LIBRARIES.items():
        _distribution(folder, distribution, version)
        for module, functions in modules.items():
            path = folder.joinpath(*module.split("."))
            path.mkdir(parents=True)
            for package in [path, *path.parents]:
                if package == folder:
                    break
                (package / "__init__.py").touch()
            (path / "__init__.py").write_text("".join(_raising(module, name) for name in functions))
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    (folder / "stand_in" / "kernels").mkdir(parents=True)
    (folder / "stand_in" / "kernels" / "__init__.py").write_text(KERNELS)
    _distribution(folder / "stand_in", "kernels", KERNELS_MIN_VERSION)


def _distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _raising(module: str, name: str) -> str:
    return f"def {name}(*args, **kwargs):\n    raise RuntimeError('the stand-in of {module}.{name} was called')\n\n"


def computed(model: nn.Module) -> dict[str, torch.Tensor]:
    """Logits, tokens of `generate`, and gradients in training mode, where Mamba would take a fused block."""
    torch.manual_seed(1)
    ids = prompt(model, 70)
    with torch.no_grad():
        logits = Logits(model)(ids)
    tokens, steps = generated(model, ids)
    loss = Logits(model.train())(ids).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    model.eval()
    return {
        "logits": logits, "tokens": tokens, "steps": steps,
        "gradients": torch.cat([g.flatten() for g in gradients if g is not None]),
    }  # fmt: skip


def error(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as e:
        return str(e)
    return ""


def outcomes(name: str) -> dict[str, Any]:
    """What one model runs on and computes: as it is, enabled, accelerated, and as it is again."""
    torch.manual_seed(0)
    model = tiny(name)
    ids = prompt(model, 9)

    def as_it_is() -> dict[str, Any]:
        with torch.no_grad():
            return {"runs_on": runs_on(model), "error": error(lambda: Logits(model)(ids))}

    before = as_it_is()
    with enable():
        enabled = {"runs_on": runs_on(model), **computed(model)}
        if name == "mamba2":
            compiled = torch.compile(Logits(model), fullgraph=True, dynamic=True, backend="eager")
            with torch.no_grad():
                enabled["compiled"] = compiled(ids)
    between = as_it_is()
    with accelerate(model):
        accelerated = {"runs_on": runs_on(model), **computed(model)}
    return {"as it is": [before, between, as_it_is()], "replaced": [enabled, accelerated]}


def main(file: str, kernels: str, *names: str) -> None:
    if kernels == "without":
        sys.modules["kernels"] = None  # type: ignore[assignment]
    elif find_spec("kernels") is None:
        sys.path.append(str(Path(file).parent / "stand_in"))
    from transformers.models.mamba2 import modeling_mamba2

    bound = modeling_mamba2.mamba2_chunk_scan
    torch.save(
        {"modules": isinstance(bound, nn.Module), "models": {name: outcomes(name) for name in names}}, file
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
