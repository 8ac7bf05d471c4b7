"""Tensor parallelism: ranks share the heads of every layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from flacompose._torch import pytree
from flacompose.layers import Mamba, Mamba2, ShortConvolution
from flacompose.layers.fused_projections import FusesProjections
from flacompose.layers.griffin import RGLRUGates
from flacompose.layers.recurrent import StatefulLayer
from flacompose.models import RecurrentLM
from flacompose.models.feed_forward import SwiGLU
from flacompose.models.softmax_attention import SoftmaxAttention

# Projections to heads: each rank computes its own heads. Of a low-rank pair, this is the second projection.
_TO_HEADS = (
    "q_proj", "k_proj", "v_proj", "g_proj", "f_proj", "i_proj", "s_proj", "a_proj", "b_proj", "w_proj", "gk_proj",
    "f_proj.1", "g_proj.1", "gk_proj.1",
    "qkv_proj", "output_gate",  # lightning attention
    "r_proj.linear", "k_proj.linear", "v_proj.linear", "g_proj.linear", "w_proj.linear.lora.2",  # RWKV6
    "linear_x", "linear_y",  # Griffin
    "dt_proj",  # Mamba
    "r_proj", "w_lora.lora.2", "v_lora.lora.2", "a_lora.lora.2", "g_lora.lora.2",  # RWKV7
    "q", "k", "v", "ogate_preact", "igate_preact", "fgate_preact",  # mLSTM
    "gate_proj", "up_proj", "key.linear", "key",  # feed-forward networks, sharded by channels
)  # fmt: skip
# Projections from heads: each rank multiplies its own heads, and the ranks sum the products.
_FROM_HEADS = ("o_proj", "out_proj", "linear_out", "x_proj", "down_proj", "value")
# Projections with outputs that are not ordered by heads, or that every rank needs: computed in parts, and gathered.
_GATHERED = ("in_proj", "receptance.linear")
# Parameters of a layer itself whose first dimension is heads, or channels of heads.
_OF_HEADS = (
    "A_log", "dt_bias", "D", "decay", "bonus", "k_k", "k_a", "r_k",
    "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o",  # Mamba-3
)  # fmt: skip


def tensor_parallel_plan(module: nn.Module) -> dict[str, ParallelStyle]:
    """The plan for ``torch.distributed.tensor.parallel.parallelize_module`` to shard `module` by heads.

    ``parallelize_module(module, mesh, tensor_parallel_plan(module))`` changes `module` in place. Call it as before,
    with the same plain tensors on every rank. Outputs and gradients are the same. All parameters become DTensors:
    parameters of heads are sharded, other parameters are replicated. New states are DTensors that are sharded by heads.

    - Projections to heads are ``ColwiseParallel``, projections from heads to the output ``RowwiseParallel``. Of a
      low-rank pair only the second projection is sharded.
    - Short convolutions, decay rates and biases of each head, and norms over all heads are sharded like the heads. A
      norm of each head and a feature map have one weight for all heads, and are replicated.
    - In a `RecurrentLM` the feed-forward networks, the embeddings and the projection to logits are sharded too.

    The number of heads, `num_v_heads` where a layer has it and else `num_heads`, must be a multiple of the number of
    ranks. Otherwise ``parallelize_module`` raises a ValueError before this plan has changed anything. `num_kv_heads`,
    `num_heads` beside `num_v_heads`, groups, and the steps of a gated delta product may have any number: the ranks
    gather tensors that they cannot shard. Then every rank computes the complete recurrence in `GatedSlotAttention`,
    whose states have the heads of keys. The plan needs PyTorch 2.13: in 2.11, DTensor has wrong gradients of the
    layers. Use ``torch.no_grad()``: in ``torch.inference_mode()``, where DTensor computes wrong results, a parallel
    module raises an error. ``torch.compile`` is not supported.

    Args:
        module: A layer, a `RecurrentLM`, or a module that contains them and otherwise works with DTensors.

    Returns:
        The plan: a style for each submodule that needs one, by path, and for ``""``, the module itself, a style that
        turns other parameters and inputs into DTensors and outputs into plain tensors. It is for one mesh dimension.

    Raises:
        TypeError: If `module` is no module.
        ValueError: If `module` contains no layer of flacompose, or softmax attention, for which DTensor has no rule on
            the CPU, or a layer that [join_projections][flacompose.layers.join_projections] has changed.
        RuntimeError: If PyTorch is older than 2.13.
    """
    if torch.__version__ < "2.13":
        raise RuntimeError(f"tensor_parallel_plan needs PyTorch 2.13 or later, got {torch.__version__}")
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    plan: dict[str, ParallelStyle] = {}
    layers = {path: part for path, part in module.named_modules() if isinstance(part, StatefulLayer)}
    own: tuple[str, ...] = ()
    for path, part in module.named_modules():
        if isinstance(part, SoftmaxAttention):
            raise ValueError(f"module must contain no softmax attention, got some at {path or 'its root'!r}")
        if isinstance(part, FusesProjections) and part.joint_sizes:
            raise ValueError(
                "module must contain no layer that join_projections has changed, since the rows of a joint "
                "projection are not ordered by heads: share out the heads of a model that is not joined, "
                f"got a joined {type(part).__name__} at {path or 'its root'!r}"
            )
        for name, style in _styles(part):
            plan[f"{path}.{name}" if path else name] = style
        if isinstance(part, StatefulLayer):
            names = tuple(name for name, _ in part.named_parameters(recurse=False) if name in _OF_HEADS)
            if path and names:
                plan[path] = _Sharded(names)
            elif names:
                own = names
    if not layers:
        raise ValueError(f"module must contain a layer of flacompose, got {type(module).__name__}")
    first = next(iter(plan))
    return plan | {first: _Checked(plan[first], layers), "": _Root(own)}


def _styles(part: nn.Module) -> Iterable[tuple[str, ParallelStyle]]:
    """The path and the style of each submodule of `part` that needs a style."""
    if isinstance(part, RecurrentLM):
        yield "embeddings", ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
        if hasattr(part, "lm_head"):
            yield "lm_head", ColwiseParallel(use_local_output=False)
    elif isinstance(part, (StatefulLayer, SwiGLU)):
        modules = dict(part.named_modules())
        channels = next(modules[name].in_features for name in _FROM_HEADS if name in modules)
        for name, m in modules.items():
            weight = getattr(m, "weight", None)
            if isinstance(m, nn.Linear) and name in _FROM_HEADS:
                yield name, RowwiseParallel(use_local_output=False)
            elif isinstance(m, nn.Linear) and name in _GATHERED:
                yield name, ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
            elif isinstance(m, nn.Linear) and name in _TO_HEADS:
                yield name, ColwiseParallel(use_local_output=False)
            # Mamba and Mamba2 gather the channels of their convolutions.
            elif isinstance(m, ShortConvolution) and not isinstance(part, (Mamba, Mamba2)):
                yield name, _Sharded()
            elif isinstance(m, RGLRUGates):
                yield name, _Sharded()
            elif isinstance(m, (nn.RMSNorm, nn.GroupNorm)) and weight is not None and len(weight) == channels:
                yield name, _Sharded()


class _Checked(ParallelStyle):
    """The first style of a plan. It checks first that the ranks can shard the heads of all `layers`."""

    def __init__(self, style: ParallelStyle, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.style, self.layers = style, layers

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise ValueError(
                f"device_mesh must have one dimension, such as mesh['tp'] of a larger one, got {device_mesh.ndim}"
            )
        ranks = device_mesh.size()
        for path, layer in self.layers.items():
            argument = "num_v_heads" if hasattr(layer, "num_v_heads") else "num_heads"
            # Layers without heads are sharded by channels, whose number ranks need not divide.
            heads = getattr(layer, argument, 0)
            if heads % ranks != 0:
                raise ValueError(
                    f"{argument} must be a multiple of the number of ranks = {ranks}, "
                    f"got {heads} in the {type(layer).__name__} at {path or 'its root'!r}"
                )
        self.style.src_data_rank = self.src_data_rank
        return self.style._apply(module, device_mesh)


class _Sharded(ParallelStyle):
    """Shard the parameters of a module itself, all or the given names, along their first dimension."""

    def __init__(self, names: tuple[str, ...] | None = None) -> None:
        super().__init__()
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, p in list(module.named_parameters(recurse=False)):
            if self.names is None or name in self.names:
                shard = distribute_tensor(p, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
                module.register_parameter(name, nn.Parameter(shard, requires_grad=p.requires_grad))
        return module


class _Root(_Sharded):
    """The style of the module of a plan. Parameters without a style, and outputs, are the same on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        distribute_module(module, device_mesh)
        module.register_forward_pre_hook(partial(_enter, device_mesh), with_kwargs=True)
        module.register_forward_hook(partial(_leave, device_mesh))
        return module


def _enter(mesh: DeviceMesh, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The arguments, with plain tensors, the same on every rank, as replicated DTensors."""
    if torch.is_inference_mode_enabled():
        # There PyTorch would split views of DTensors wrongly, and ignore the sharding of ops.
        raise RuntimeError(
            f"a {type(module).__name__} that tensor_parallel_plan has sharded must be called outside of "
            "torch.inference_mode(), got a call in it: use torch.no_grad()"
        )
    replicated = [Replicate()] * mesh.ndim

    def entered(x: Any) -> Any:
        plain = isinstance(x, Tensor) and not isinstance(x, DTensor)
        return DTensor.from_local(x, mesh, replicated, run_check=False) if plain else x

    return pytree.tree_map(entered, (args, kwargs))


def _leave(mesh: DeviceMesh, module: nn.Module, args: Any, output: Any) -> Any:
    """Outputs as plain tensors. States stay DTensors that are sharded by heads."""
    replicated = [Replicate()] * mesh.ndim
    y, *state = output if isinstance(output, tuple) else (output,)
    y = y.redistribute(mesh, replicated).to_local() if isinstance(y, DTensor) else y
    return (y, *state) if isinstance(output, tuple) else y
