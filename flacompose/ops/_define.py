"""Registration of operators: the one file that talks to ``torch.library``.

:func:`define_op` turns a schema and pure-PyTorch functions into an operator that every part of PyTorch takes as one
node. :func:`launch` launches a Triton kernel from an implementation, in eager and while it is traced.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from importlib.util import find_spec
from itertools import combinations
from math import prod
from operator import itemgetter
from pathlib import Path
from threading import local
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from flacompose._torch import (
    AUTOCAST_KEYS,
    AutoDispatchBelowAutograd,
    ExcludeDispatchKeyGuard,
    FakeTensor,
    FunctionalTensor,
    FunctionalTensorMode,
    OpOverload,
    any_requires_grad,
    are_functorch_transforms_active,
    custom_function_call,
    forward_mode_is_on,
    set_fwd_grad_enabled,
    triton_ops_to_kernels,
    unpack_dual,
    unset_fake_temporarily,
)
from flacompose.ops._chip import chip_of, is_here, runs_kernels, warn_of_eager

# A collected Library takes its registrations with it.
LIBRARY = torch.library.Library("flacompose", "FRAGMENT")

AUTOCAST_DEVICES = ("cpu", "cuda")
FUNCTORCH_KEY = "FuncTorchDynamicLayerFrontMode"

# Other devices, on which PyTorch computes the operators: their dispatch keys, and what a warning calls them.
DEVICES_WITHOUT_KERNELS = {"XPU": "an XPU", "MPS": "MPS"}

outside_fake_mode = unset_fake_temporarily  # a context in which new tensors are real, even in a trace
vjp: Callable[..., Any] = torch.func.vjp


def always_true(condition: bool | torch.SymBool) -> bool:
    """Whether `condition` holds whatever its symbols stand for; asking adds no guard."""
    # By identity, since to isinstance under torch.compile a condition on symbols is a bool as well.
    if condition is True or condition is False:
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return statically_known_true(condition)


def violated(condition: bool | torch.SymBool) -> bool:
    """Whether `condition` on sizes is false.

    On a size that a graph leaves open, the answer is that for the size at hand, which then guards the graph. Where only
    the data know a size, the answer is no, and the graph asserts the condition when it runs.
    """
    if condition is True or condition is False:
        return not condition
    if isinstance(condition, Tensor):  # as sizes are under torch.jit.trace
        return not bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true  # slow to import

    if guard_or_false(condition):
        return False
    if not guard_or_true(condition):
        return True
    torch._check(condition)
    return False


def autocast_on(device: torch.device) -> bool:
    """Whether autocast is on for `device`. PyTorch raises an error when it is asked about a device without autocast."""
    return device.type in AUTOCAST_DEVICES and torch.is_autocast_enabled(device.type)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast casts to, or None where it is off."""
    return torch.get_autocast_dtype(device.type) if autocast_on(device) else None


class _Launching(local):
    """What launches kernels for this thread, called with the kernel, its grid and its arguments; None is Triton."""

    launcher: Callable[..., None] | None = None


launching = _Launching()


def launch(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
    """Launch a Triton kernel: ``kernel[grid](*args, **kwargs)``, recorded in the graph when the caller is traced.

    ``wrap_triton`` costs about fifteen times a plain launch, so eager calls do without it.
    """
    if launching.launcher is None:
        kernel[grid](*args, **kwargs)
    else:
        launching.launcher(kernel, grid, *args, **kwargs)


def launches_into_graph() -> bool:
    """Whether the kernels that this thread launches become parts of a graph."""
    return launching.launcher is _record


def _record(kernel: Any, grid: Any, *args: Any, maxnreg: int | None = None, **kwargs: Any) -> None:
    # Inductor refuses `maxnreg`, the limit of registers, which changes how fast a kernel is and no result.
    torch.library.wrap_triton(kernel)[grid](*args, **kwargs)


@contextmanager
def launching_by(launcher: Callable[..., None]) -> Iterator[None]:
    """Within it, each call of `launch` in this thread calls `launcher` instead of Triton."""
    previous, launching.launcher = launching.launcher, launcher
    try:
        yield
    finally:
        launching.launcher = previous


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
            tuple of ``Tensor``.
        eager: the implementation in PyTorch, on every device: functional (no in-place operation), differentiable to
            any order. Second derivatives and forward-mode derivatives are derivatives of it.
        fake: shapes, dtypes, devices and strides of the outputs.
        triton: returns the implementation for CUDA, which computes every dtype but float64. It is called at the first
            use where Triton is installed, and may import Triton. The implementation launches its kernels through
            :func:`launch`. GPUs that the kernels do not run on, which are NVIDIA's before Ampere and all others,
            compute `eager`, and a warning says so once.
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
        autocast: the arguments that autocast casts, none of which may be absent. Each has the name of a ``bool``
            argument that exempts it where it is true, or None. All other arguments keep their dtype.
        flops: formula for ``FlopCounterMode``, from the arguments with shapes for tensors, and ``out_shape``.

    Returns:
        ``torch.ops.flacompose.<name>.default``.

    Raises:
        ValueError: from the operator, when ``vmap`` maps an argument that has no head dimension.
    """
    LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    packet = getattr(torch.ops.flacompose, name)
    heads = {x: _position(names, ("H", "HV", "D")) for x, names in axes.items()}
    batch = {x: _position(names, ("B", "N")) for x, names in axes.items()}
    op: OpOverload = packet.default

    LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(op, fake, lib=LIBRARY)
    if triton is not None:
        if find_spec("triton") is not None and torch.version.hip is None:
            _implement_cuda(op, eager, triton, one_launch)
        else:
            gpu = "a GPU of AMD" if torch.version.hip is not None else "a GPU where Triton is not installed"
            LIBRARY.impl(name, _with_warning(eager, gpu), "CUDA")
        for key, device in DEVICES_WITHOUT_KERNELS.items():
            LIBRARY.impl(name, _with_warning(eager, device), key)
    _differentiate(op, eager, fake, backward, _vmap_rule(op, heads), autocast, _shardings(op, heads, batch))
    if flops is not None:
        register_flop_formula(packet)(flops)
    return op


def _names(values: Any) -> tuple[str, ...]:
    return tuple(value.name for value in values)


def _tensors(op: OpOverload) -> tuple[int, ...]:
    """Positions of the tensor arguments."""
    return tuple(
        i for i, a in enumerate(op._schema.arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")
    )


def _with_values(args: Sequence[Any], positions: Iterable[int], values: Iterable[Any]) -> list[Any]:
    """``args`` with these ``values`` at these ``positions``."""
    result = list(args)
    for i, value in zip(positions, values):
        result[i] = value
    return result


def _position(axes: str, names: Sequence[str]) -> int | None:
    """Where the axis with one of these names is among `axes`, or None."""
    return next((i for i, axis in enumerate(axes.split()) if axis in names), None)


def _unwanted(op: OpOverload, args: Sequence[Any]) -> set[str]:
    """The returns of a backward that its ``output_mask`` leaves out."""
    arguments = _names(op._schema.arguments)
    if "output_mask" not in arguments:
        return set()
    mask = args[arguments.index("output_mask")]
    return {name for name, wanted in zip(_names(op._schema.returns), mask) if not wanted}


def primal_of(name: str, names: Any) -> str:
    """The name whose gradient ``name`` is (``x`` for ``dx`` and ``d_x``), or ``name`` itself."""
    return next((x for x in (name, name.removeprefix("d_"), name.removeprefix("d")) if x in names), name)


# Implementations


def _inductor_compiles(ahead_of_time: bool) -> bool:
    """Whether the graph that is being traced will be compiled by Inductor or, with `ahead_of_time`, by AOTInductor."""
    # Importing this is slow, and where Inductor compiles, it has been imported.
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
        # The operator stays one node until code is generated, which compiles fastest. The graph gets its kernels in two
        # cases: for AOTInductor, whose packages run without Python, and for Inductor where there is one kernel, which
        # it launches faster than it calls an operator. `eager` has no trace at a symbolic length: it loops over chunks.
        x = args[0]
        launches = _inductor_compiles(ahead_of_time=True) or (
            one_launch is not None and one_launch(*args) and _inductor_compiles(ahead_of_time=False)
        )
        if not launches or not x.is_cuda or x.dtype is torch.float64 or not _runs_kernels(x.device):
            return mode.__torch_dispatch__(op, types, args, kwargs)
        if any(t is not Tensor and not issubclass(t, (FakeTensor, FunctionalTensor)) for t in types):
            return NotImplemented
        with mode, launching_by(_record):
            return load()(*args, **kwargs)

    LIBRARY.impl(op._opname, cuda, "CUDA")
    torch.library.register_torch_dispatch(op, FunctionalTensorMode, functionalize, lib=LIBRARY)
    if one_launch is not None:
        triton_ops_to_kernels[op._name] = [_SOURCES]


def _runs_kernels(device: torch.device) -> bool:
    """Whether the kernels run on this GPU; in a trace for one that is not here, they do."""
    return not is_here(device) or runs_kernels(device.index)


def _explain(error: Exception, op: OpOverload, x: Tensor) -> None:
    """Where Triton has found that a kernel does not fit on the GPU, say so in the user's terms."""
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
    """`eager` for a device that has no kernels, which a warning says once."""

    def implementation(*args: Any) -> Any:
        warn_of_eager(device)
        return eager(*args)

    return implementation


class _Sources:
    """What stands for the Triton kernel of an operator, so that its "source" is a hash of all code of the operators.

    PyTorch's cache of compiled graphs, on disk, knows a graph by the names of its operators, and by the source of the
    Triton kernels that were noted for these. What it holds contains what `functionalize` has made of an operator, which
    this code decides. So a graph has to be compiled again when the code has changed.
    """

    __name__ = "flacompose"

    @staticmethod
    def fn() -> None:
        """PyTorch also reads the source of the functions that a kernel calls. This one calls none."""

    @cached_property
    def src(self) -> str:
        files = sorted(Path(__file__).parent.rglob("*.py"))
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


_SOURCES = _Sources()


# Derivatives, vmap and autocast


def _differentiate(
    op: OpOverload,
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    backward_op: OpOverload | None,
    vmap_rule: Callable[..., Any],
    autocast: Mapping[str, str | None],
    shardings: Callable[..., Any],
) -> None:
    """Register what the operator does at the Autograd, functorch and autocast dispatch keys.

    The first two run one ``autograd.Function``, to which every transform of ``torch.func`` applies the rules that
    PyTorch has for such functions. An operator of ``register_autograd`` has nothing at the functorch key: transforms of
    it raise errors, or give zero tangents.
    """
    arguments = _names(op._schema.arguments)
    tensors = _tensors(op)
    pick = itemgetter(*tensors) if len(tensors) > 1 else lambda args: (args[tensors[0]],)
    cast = tuple(
        (arguments.index(x), None if exempt is None else arguments.index(exempt))
        for x, exempt in autocast.items()
    )
    if backward_op is not None:
        gradients = [arguments.index(primal_of(x, arguments)) for x in _names(backward_op._schema.returns)]

    def at(args: list[Any], positions: list[int]) -> Callable[..., Any]:
        """``eager`` as a function of the arguments at ``positions``."""
        return lambda *values: eager(*_with_values(args, positions, values))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            with AutoDispatchBelowAutograd():
                return op(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            saved = pick(inputs)
            ctx.save_for_backward(*saved)
            # The levels of forward mode that a compiled graph enters are not seen while it is traced.
            traced = isinstance(inputs[0], FunctionalTensor)
            if traced or forward_mode_is_on() or are_functorch_transforms_active():
                ctx.save_for_forward(*saved)
            ctx.constants = [None if i in tensors else x for i, x in enumerate(inputs)]
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            args = _with_values(ctx.constants, tensors, ctx.saved_tensors)
            nothing: list[Tensor | None] = [None] * len(args)
            if all(g is None for g in grads):
                return tuple(nothing)
            if backward_op is not None:
                # For DTensors all gradients are computed: PyTorch caches the placements of a call's results, and would
                # use them for a later call with another mask, since a list of bools is no part of the cache's key.
                distributed = hasattr(args[0], "device_mesh")
                mask = [args[i] is not None and (distributed or ctx.needs_input_grad[i]) for i in gradients]
                positions, found = gradients, _without_gradient(backward_op, [*args, *grads, mask])
            else:
                positions = [i for i in tensors if args[i] is not None and args[i].is_floating_point()]
                with ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
                    outputs, pullback = vjp(at(args, positions), *(args[i] for i in positions))
                    found = pullback(
                        tuple(torch.zeros_like(o) if g is None else g for o, g in zip(outputs, grads))
                    )
            wanted = [g if ctx.needs_input_grad[i] else None for i, g in zip(positions, found)]
            return tuple(_with_values(nothing, positions, wanted))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            args = _with_values(ctx.constants, tensors, ctx.saved_tensors)
            # Forward mode is off here, and the saved tensors are dual: a tangent of an outer jvp would be lost.
            args = [unpack_dual(x, level=0)[0] if isinstance(x, Tensor) else x for x in args]
            positions = [i for i in tensors if tangents[i] is not None]
            primals = [args[i] for i in positions]
            with set_fwd_grad_enabled(True):
                cotangents = tuple(torch.zeros_like(o) for o in fake(*args))
                # The pullback is linear in the cotangents; its transpose is the pushforward.
                _, push = vjp(lambda *w: vjp(at(args, positions), *primals)[1](w), *cotangents)
                return push(tuple(tangents[i] for i in positions))

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            return vmap_rule(info.batch_size, in_dims, args)

    Function.__name__ = Function.__qualname__ = op._opname
    # Function.apply binds the signature at each call, which only functorch needs. Elsewhere the C++ apply is enough.
    apply = super(torch.autograd.Function, Function).apply
    is_grad_enabled = torch.is_grad_enabled

    def autograd_kernel(*args: Any) -> Any:
        if type(args[0]) is not Tensor:
            # Importing torch.distributed.tensor takes half as long as importing torch, so not at definition.
            if "torch.distributed.tensor" in sys.modules:
                _register_sharding(op, shardings)
            return apply(*args)
        if (is_grad_enabled() and any_requires_grad(*args)) or forward_mode_is_on():
            return apply(*args)
        with AutoDispatchBelowAutograd():
            return op(*args)

    def cast_for(device: str, args: Any) -> list[Any]:
        dtype = torch.get_autocast_dtype(device)
        args = list(args)
        for i, exempt in cast:
            if args[i].dtype is not torch.float64 and (exempt is None or not args[exempt]):
                args[i] = args[i].to(dtype)
        return args

    def functorch_kernel(*args: Any) -> Any:
        device = args[0].device
        if autocast_on(device):
            with ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
                return custom_function_call(Function, *cast_for(device.type, args))
        return custom_function_call(Function, *args)

    def autocast_kernel(device: str, *args: Any) -> Any:
        with ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
            return op(*cast_for(device, args))

    LIBRARY.impl(op._opname, autograd_kernel, "Autograd")
    LIBRARY.impl(op._opname, functorch_kernel, FUNCTORCH_KEY)
    for device in AUTOCAST_DEVICES:
        LIBRARY.impl(op._opname, partial(autocast_kernel, device), f"Autocast{device.upper()}")


def _without_gradient(op: OpOverload, args: Sequence[Any]) -> Any:
    """Call `op`, without its Autograd kernel where that would only pass the call on."""
    forward_mode = forward_mode_is_on() or are_functorch_transforms_active()
    if torch.is_grad_enabled() or type(args[0]) is not Tensor or forward_mode:
        return op(*args)
    with AutoDispatchBelowAutograd():
        return op(*args)


def _vmap_rule(op: OpOverload, heads: Mapping[str, int | None]) -> Callable[..., Any]:
    """The rule that folds the dimension of ``vmap`` into the heads: ``[..., H, ...]`` becomes ``[..., M*H, ...]``."""
    arguments, returns = _names(op._schema.arguments), _names(op._schema.returns)

    def rule(size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> Any:
        folded = list(args)
        for i, (name, x, in_dim) in enumerate(zip(arguments, args, in_dims)):
            dim = heads.get(primal_of(name, heads))
            if dim is None and isinstance(in_dim, int):  # for a list of bools, in_dim is a list
                raise ValueError(
                    f"{name} must not be mapped by vmap over flacompose::{op._opname}, got a batch of it"
                )
            if dim is not None and x is not None:
                x = x.expand(size, *x.shape).movedim(0, dim) if in_dim is None else x.movedim(in_dim, dim)
                folded[i] = x.flatten(dim, dim + 1)
        absent = {name for name, x in zip(arguments, args) if x is None}
        unwanted = _unwanted(op, args)
        outputs, out_dims = [], []
        for name, y in zip(returns, op(*folded)):
            empty = name in unwanted or primal_of(name, arguments) in absent
            dim = None if empty else heads[primal_of(name, heads)]
            outputs.append(y if dim is None else y.unflatten(dim, (size, y.shape[dim] // size)))
            out_dims.append(dim)
        return tuple(outputs), tuple(out_dims)

    return rule


# DTensor


def _shardings(
    op: OpOverload, heads: Mapping[str, int | None], batch: Mapping[str, int | None]
) -> Callable[..., Any]:
    """Placements that need no communication: all replicated, sharded by heads, sharded by batch."""
    arguments, returns = _names(op._schema.arguments), _names(op._schema.returns)
    tensors = {arguments[i] for i in _tensors(op)}

    def rule(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        present = {name for name, x in zip(arguments, args) if name in tensors and x is not None}
        absent = (tensors - present) | _unwanted(op, args)

        def placement(name: str, dims: Mapping[str, int | None]) -> Any:
            primal = primal_of(name, dims)
            if name in absent or primal in absent or primal not in dims:
                return Replicate()
            dim = dims[primal]
            if dim is not None:
                return Shard(dim)
            return Replicate() if name == primal else Partial()

        choices: list[Mapping[str, int | None]] = [{}]
        primals = [(x, primal_of(name, heads)) for name, x in zip(arguments, args) if name in present]
        split = [(x, primal, heads[primal]) for x, primal in primals if primal in heads]
        # A tensor with a single head, which all others read, is replicated, and its gradient is a sum over ranks.
        single_head = {primal for x, primal, dim in split if dim is not None and x.shape[dim] == 1}
        own = [(x, dim) for x, primal, dim in split if primal not in single_head]
        if own and _same_shards(own):
            choices.append({**heads, **dict.fromkeys(single_head)})
        if all(primal_of(name, batch) in batch for name in present):
            choices.append(batch)
        return [
            (
                [placement(x, dims) for x in returns],
                [placement(x, dims) if x in present else None for x in arguments],
            )
            for dims in choices
        ]

    return rule


def _same_shards(split: Sequence[tuple[Any, int | None]]) -> bool:
    """Whether each rank gets matching shards of all tensors: heads that come in groups have to be cut evenly."""
    sizes = {spec.shape[dim] for spec, dim in split}
    if len(sizes) == 1:
        return True
    mesh = split[0][0].mesh.shape
    shard_counts = [prod(axes) for n in range(1, len(mesh) + 1) for axes in combinations(mesh, n)]
    # PyTorch never cuts a dimension into more shards than it has elements.
    return all(size % count == 0 for count in shard_counts if count <= min(sizes) for size in sizes)


@cache
def _register_sharding(op: OpOverload, shardings: Callable[..., Any]) -> None:
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(op)(shardings)
