"""Registration of operators, one node for every part of PyTorch, from a schema and functions in PyTorch.

This is the only file that uses ``torch.library``. `derivatives` and `sharding` say how an operator is
differentiated, mapped, cast and distributed.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from flacompose._errors import ValueError
from flacompose._torch import (
    FakeTensor,
    FunctionalTensor,
    FunctionalTensorMode,
    OpOverload,
    triton_ops_to_kernels,
)
from flacompose.ops._launch.chip import chip_of, is_here, runs_kernels, warn_of_eager
from flacompose.ops._launch.launch import launching_by
from flacompose.ops._operators.derivatives import derivative_kernels, vmap_rule_of
from flacompose.ops._operators.flops import count_flops
from flacompose.ops._operators.schema import axis_position, names_of
from flacompose.ops._operators.sharding import shardings_of, unregistered
from flacompose.ops._tensors.packed import check_bounds

# A collected Library takes its registrations with it.
LIBRARY = torch.library.Library("flacompose", "FRAGMENT")

# Other devices, on which PyTorch computes the operators: their dispatch keys, and their names in warnings.
DEVICES_WITHOUT_KERNELS = {"XPU": "an XPU", "MPS": "MPS"}


def define_op(
    name: str,
    schema: str,
    *,
    eager: Callable[..., tuple[Tensor, ...]],
    fake: Callable[..., tuple[Tensor, ...]],
    triton: Callable[[], Callable[..., tuple[Tensor, ...]]] | None = None,
    one_launch: Callable[..., bool] | None = None,
    backward: OpOverload | None = None,
    axes: Mapping[str, str],
    autocast: Mapping[str, str | None] = MappingProxyType({}),
    flops: Callable[..., int] | None = None,
) -> OpOverload:
    """Register ``flacompose::name`` and return its overload, the fastest way to call it.

    Args:
        name: the operator's name.
        schema: arguments and returns, every one named, no defaults, the first argument a ``Tensor``, the returns a
            tuple of ``Tensor``. An operator with one return gives that alone, and its functions a tuple of one.
        eager: the implementation in PyTorch, on every device: functional (no in-place operation), differentiable to
            any order. Second derivatives and forward-mode derivatives are derivatives of it.
        fake: shapes, dtypes, devices and strides of the outputs.
        triton: returns the implementation for CUDA, which computes every dtype but float64. It is called at the first
            use where Triton is installed, and may import Triton. The implementation launches its kernels through
            `launch`. GPUs that the kernels do not run on, which are NVIDIA's before Ampere and all others, compute
            `eager`, and a warning says so once.
        one_launch: tells whether the implementation launches at most one kernel for these arguments. Inductor then gets
            that kernel, and the operations of PyTorch before and after it, instead of the operator.
        backward: the operator of the gradient. It takes the arguments of this one, then the gradient of each output
            (``Tensor?``), and last ``bool[] output_mask``, which says for each of its own returns whether it is
            wanted. It returns the gradient of argument ``x`` as ``dx`` or ``d_x``, of shape ``(0,)`` where that is
            not wanted or ``x`` is absent. Without it, the gradient is that of ``eager``.
        axes: the names of the axes of each tensor argument and result, as ``B T H K``; a gradient has those of its
            tensor. Places along ``H``, ``HV`` or ``D`` do not depend on each other: ``vmap`` folds its dimension into
            that axis, and ``DTensor`` may be sharded along it. ``B`` or ``N`` is the batch, along which ``DTensor``
            may be sharded as well. A tensor without a batch axis is the same for all rows, and its gradient is a sum
            over them. Tensors that join rows (``cu_seqlens``) are left out: when one is given, the batch is not
            sharded.
        autocast: the arguments that autocast casts. Each has the name of a ``bool`` argument that exempts it where it
            is true, or None. All other arguments keep their dtype.
        flops: formula for ``FlopCounterMode``, from the arguments with shapes for tensors, and ``out_shape``.

    Returns:
        ``torch.ops.flacompose.<name>.default``.

    Raises:
        ValueError: from the operator, when ``vmap`` maps an argument that has no head dimension.
    """
    LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    packet = getattr(torch.ops.flacompose, name)
    heads = {x: axis_position(names, ("H", "HV", "D")) for x, names in axes.items()}
    batch = {x: axis_position(names, ("B", "N")) for x, names in axes.items()}
    op: OpOverload = packet.default
    returned = _returned_by(op)

    LIBRARY.impl(name, returned(eager), "CompositeExplicitAutograd")
    LIBRARY.impl(name, returned(_with_bounds_checked(op, eager)), "CPU")
    torch.library.register_fake(op, returned(fake), lib=LIBRARY)
    if triton is not None:
        if find_spec("triton") is not None and torch.version.hip is None:
            _implement_cuda(op, returned(eager), lambda: returned(triton()), one_launch)
        else:
            gpu = "a GPU of AMD" if torch.version.hip is not None else "a GPU where Triton is not installed"
            LIBRARY.impl(name, _with_warning(returned(eager), gpu), "CUDA")
        for key, device in DEVICES_WITHOUT_KERNELS.items():
            LIBRARY.impl(name, _with_warning(returned(eager), device), key)
    unregistered.append((op, shardings_of(op, heads, batch)))
    kernels = derivative_kernels(op, eager, fake, backward, vmap_rule_of(op, heads), autocast)
    for key, kernel in kernels.items():
        LIBRARY.impl(name, kernel, key)
    if flops is not None:
        count_flops(packet, flops)
    return op


def _returned_by(op: OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper of functions that return a tuple, whose results PyTorch accepts as those of `op`."""
    if len(op._schema.returns) > 1:
        return lambda function: function
    return lambda function: lambda *args: function(*args)[0]


def _with_bounds_checked(op: OpOverload, eager: Callable[..., Any]) -> Callable[..., Any]:
    """`eager` for the CPU, which refuses wrong values of `cu_seqlens` and calls without tokens.

    A backward gets the bounds of its forward, which has checked them.
    """
    names = names_of(op._schema.arguments)
    if "cu_seqlens" not in names[1:] or "output_mask" in names:
        return eager
    at = names.index("cu_seqlens")

    def implementation(*args: Any) -> Any:
        if args[at] is not None:
            check_bounds(args[at], args[0].shape[1])
        try:
            return eager(*args)
        except (IndexError, RuntimeError) as error:
            if args[0].numel() > 0:
                raise
            # Public functions refuse this, but exported programs do not call them.
            shape = tuple(args[0].shape)
            raise ValueError(f"{names[0]} must have no empty dimension, got {shape}") from error

    return implementation


def _inductor_compiles(ahead_of_time: bool) -> bool:
    """Whether Inductor or, with `ahead_of_time`, AOTInductor will compile the graph that is being traced."""
    # Importing this is slow; if Inductor compiles, it has been imported.
    virtualized = sys.modules.get("torch._inductor.virtualized")
    if virtualized is None:
        return False
    if ahead_of_time:
        return virtualized.V.aot_compilation
    return not isinstance(virtualized.V.get_fake_mode(), virtualized.NullHandler)


def _implement_cuda(
    op: OpOverload,
    eager: Callable[..., Any],
    triton: Callable[[], Any],
    one_launch: Callable[..., bool] | None,
) -> None:
    current_device, float64 = torch.cuda.current_device, torch.float64
    load = cache(triton)

    @cache
    def implementation(device: int) -> Callable[..., Any]:
        return load() if runs_kernels(device) else eager

    def cuda(*args: Any) -> Any:
        x = args[0]
        device = x.get_device()
        if device != current_device():
            with torch.cuda.device(x.device):  # Triton launches on the current one
                return cuda(*args)
        if x.dtype is float64:
            return eager(*args)
        try:
            return implementation(device)(*args)
        except Exception as error:
            _explain(error, op, x)
            raise

    def functionalize(mode: Any, op: OpOverload, types: Any, args: Any, kwargs: Any) -> Any:
        # The operator stays one node until code is generated, which compiles fastest. The graph gets its
        # kernels in two cases: for AOTInductor, whose packages run without Python, and for Inductor if there
        # is only one kernel, which it launches faster than it calls an operator. `eager` cannot be traced at
        # a symbolic length: it loops over chunks.
        x = args[0]
        launches = _inductor_compiles(ahead_of_time=True) or (
            one_launch is not None and one_launch(*args) and _inductor_compiles(ahead_of_time=False)
        )
        if not launches or not x.is_cuda or x.dtype is torch.float64 or not _runs_kernels(x.device):
            return mode.__torch_dispatch__(op, types, args, kwargs)
        if any(t is not Tensor and not issubclass(t, (FakeTensor, FunctionalTensor)) for t in types):
            return NotImplemented
        with mode, launching_by(_record, into_graph=True):
            return load()(*args, **kwargs)

    LIBRARY.impl(op._opname, cuda, "CUDA")
    torch.library.register_torch_dispatch(op, FunctionalTensorMode, functionalize, lib=LIBRARY)
    if one_launch is not None:
        triton_ops_to_kernels[op._name] = [_SOURCES]


def _record(kernel: Any, grid: Any, *args: Any, maxnreg: int | None = None, **kwargs: Any) -> None:
    """Launch a kernel into the graph that is being traced."""
    # Inductor refuses `maxnreg`, the limit of registers, which changes the speed of a kernel and no result.
    torch.library.wrap_triton(kernel)[grid](*args, **kwargs)


def _runs_kernels(device: torch.device) -> bool:
    """Whether the kernels run on this GPU; in a trace for one that is not here, they do."""
    return not is_here(device) or runs_kernels(device.index)


def _explain(error: Exception, op: OpOverload, x: Tensor) -> None:
    """If Triton has found that a kernel does not fit on the GPU, say so in the user's terms."""
    from triton.runtime.errors import OutOfResources

    if isinstance(error, OutOfResources):
        chip = chip_of(x.device)
        raise RuntimeError(
            f"a kernel of {op} for {x.dtype} does not fit on the {torch.cuda.get_device_name(x.device)}, of compute "
            f"capability {chip.capability / 10} with {chip.shared_memory} bytes of shared memory for a program: it "
            f"wants {error.required} of {error.limit} ({error.name}); smaller heads may fit, and in torch.float64 "
            "PyTorch computes the operator"
        ) from None


def _with_warning(eager: Callable[..., Any], device: str) -> Callable[..., Any]:
    """`eager` for a device without kernels, about which it warns once."""

    def implementation(*args: Any) -> Any:
        warn_of_eager(device)
        return eager(*args)

    return implementation


class _Sources:
    """A stand-in for the Triton kernel of an operator, whose "source" is a hash of all code of the operators.

    PyTorch's cache of compiled graphs, on disk, identifies a graph by the names of its operators, and by the
    source of the Triton kernels registered for these. A cached graph contains the output of `functionalize`
    for an operator, which depends on this code. So a graph must be compiled again when the code has changed.
    """

    __name__ = "flacompose"

    @staticmethod
    def fn() -> None:
        """PyTorch also reads the source of the functions that a kernel calls. This one calls none."""

    @cached_property
    def src(self) -> str:
        files = sorted(Path(__file__).parents[1].rglob("*.py"))  # all of `ops`
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


_SOURCES = _Sources()
