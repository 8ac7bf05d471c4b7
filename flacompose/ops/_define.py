"""Registration of operators: the one file that talks to ``torch.library``.

:func:`define_op` turns a schema and pure-PyTorch functions into an operator that every part of PyTorch takes as one
node. :func:`launch` launches a Triton kernel from an implementation, in eager and while it is traced.

The private names of PyTorch that ops use are all in this file: those imported or resolved at the top, the dispatch
keys, and those of symbolic shapes.
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
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _any_requires_grad,
    _are_functorch_transforms_active,
    _AutoDispatchBelowAutograd,
    _ExcludeDispatchKeyGuard,
)
from torch._functorch.autograd_function import custom_function_call
from torch._library.triton import triton_ops_to_kernels
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch._VF import _unpack_dual
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils.flop_counter import register_flop_formula

from flacompose.ops._chip import chip_of, is_here, runs_kernels, warn_of_eager

# Read at call time; touched here so that a release of PyTorch without them fails at import.
_ = forward_ad._current_level

# A collected Library takes its registrations with it.
LIBRARY = torch.library.Library("flacompose", "FRAGMENT")

AUTOCAST_DEVICES = ("cpu", "cuda")
AUTOCAST_KEYS = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)
FUNCTORCH_KEY = "FuncTorchDynamicLayerFrontMode"

# Their dispatch keys, and what the warning calls them that PyTorch computes there.
DEVICES_WITHOUT_KERNELS = {"XPU": "an XPU", "MPS": "MPS"}

outside_fake_mode = unset_fake_temporarily  # where new tensors are real ones, also while a graph is traced
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
    """Whether autocast is on; only devices that have it may be asked."""
    return device.type in AUTOCAST_DEVICES and torch.is_autocast_enabled(device.type)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast casts to, or None where it is off."""
    return torch.get_autocast_dtype(device.type) if autocast_on(device) else None


class _Launching(local):
    """How this thread launches kernels; None is Triton's own way."""

    how: Callable[..., None] | None = None


launching = _Launching()


def launch(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
    """Launch a Triton kernel: ``kernel[grid](*args, **kwargs)``, recorded in the graph when the caller is traced.

    ``wrap_triton`` costs about fifteen times a plain launch, so eager calls do without it.
    """
    if launching.how is None:
        kernel[grid](*args, **kwargs)
    else:
        launching.how(kernel, grid, *args, **kwargs)


def launches_into_graph() -> bool:
    """Whether the kernels that this thread launches become parts of a graph."""
    return launching.how is _record


def _record(kernel: Any, grid: Any, *args: Any, maxnreg: int | None = None, **kwargs: Any) -> None:
    # Inductor refuses `maxnreg`, the limit of registers, which changes how fast a kernel is and no result.
    torch.library.wrap_triton(kernel)[grid](*args, **kwargs)


@contextmanager
def launching_by(how: Callable[..., None]) -> Iterator[None]:
    """Within it, `how` is called with what this thread launches."""
    previous, launching.how = launching.how, how
    try:
        yield
    finally:
        launching.how = previous


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
        triton: gives the implementation on CUDA, float64 excepted, where Triton is installed; it is called at the first
            use, and may import Triton. The implementation launches its kernels through :func:`launch`. GPUs on which
            no kernels run, of NVIDIA before Ampere and of others, compute `eager`, and a warning says so once.
        one_launch: whether the implementation launches one kernel at most for these arguments. Inductor then gets that
            kernel, and what is PyTorch beside it, in place of the operator.
        backward: the operator of the gradient. It takes the arguments of this one, then the gradient of each output
            (``Tensor?``), and last ``bool[] output_mask``, which says for each of its own returns whether it is
            wanted. It returns the gradient of argument ``x`` as ``dx`` or ``d_x``, of shape ``(0,)`` where that is
            not wanted or ``x`` is absent. Without it, the gradient is that of ``eager``.
        axes: the names of the axes of each tensor argument and result, as ``B T H K``; a gradient has those of its
            tensor. Along ``H``, ``HV`` or ``D`` the operator is independent: ``vmap`` is laid along it, and
            ``DTensor`` may be sharded along it. ``B`` or ``N`` is the batch, along which ``DTensor`` may be sharded
            as well. All rows share a tensor without a batch axis, whose gradient is a sum over them. Tensors that
            join rows (``cu_seqlens``) are left out: when one is given, the batch is not sharded.
        autocast: the arguments, never absent, that autocast casts, each with the name of a ``bool`` argument which,
            where it is true, exempts it, or None. The others are computed with as they come.
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
            of = "a GPU of AMD" if torch.version.hip is not None else "a GPU where Triton is not installed"
            LIBRARY.impl(name, _with_warning(eager, of), "CUDA")
        for key, of in DEVICES_WITHOUT_KERNELS.items():
            LIBRARY.impl(name, _with_warning(eager, of), key)
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
    """Whether Inductor is compiling the graph that is traced, or with `ahead_of_time`, AOTInductor."""
    virtualized = sys.modules.get("torch._inductor.virtualized")  # slow to import, and imported if it is
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
        # The operator stays one node to the end, which compiles fastest. Only AOTInductor, whose packages run without
        # Python, gets its kernels in the graph, and Inductor what is one kernel, which it launches faster than it calls
        # an operator. `eager` has no trace at a symbolic length: it loops over chunks.
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
    """In the place of the kernel of an operator: all code of the operators.

    The compiler's cache on disk knows a graph by the names of its operators, and by the source of those kernels that
    PyTorch has noted of them. It keeps what `functionalize` has made of an operator, which other code makes otherwise.
    """

    __name__ = "flacompose"

    @staticmethod
    def fn() -> None:
        """PyTorch also reads the source of what a kernel calls, which is nothing."""

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
    """Kernels at the Autograd, functorch and autocast keys.

    Both of the first two run one ``autograd.Function``. Every transform of ``torch.func`` unwinds it by the rules that
    PyTorch has for such functions; ``register_autograd`` has no entry there, and raises or gives zero tangents.
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
            with _AutoDispatchBelowAutograd():
                return op(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            saved = pick(inputs)
            ctx.save_for_backward(*saved)
            # A compiled graph enters its levels of forward mode unseen.
            traced = isinstance(inputs[0], FunctionalTensor)
            if traced or forward_ad._current_level >= 0 or _are_functorch_transforms_active():
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
                # Of DTensors, all gradients are computed: PyTorch notes the placements of a call's results, and uses
                # them for a later call with another mask, since it does not tell calls apart by a list of bools.
                distributed = hasattr(args[0], "device_mesh")
                mask = [args[i] is not None and (distributed or ctx.needs_input_grad[i]) for i in gradients]
                positions, found = gradients, _without_gradient(backward_op, [*args, *grads, mask])
            else:
                positions = [i for i in tensors if args[i] is not None and args[i].is_floating_point()]
                with _ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
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
            args = [_unpack_dual(x, level=0)[0] if isinstance(x, Tensor) else x for x in args]
            positions = [i for i in tensors if tangents[i] is not None]
            primals = [args[i] for i in positions]
            with _set_fwd_grad_enabled(True):
                cotangents = tuple(torch.zeros_like(o) for o in fake(*args))
                # The pullback is linear in the cotangents; its transpose is the pushforward.
                _, push = vjp(lambda *w: vjp(at(args, positions), *primals)[1](w), *cotangents)
                return push(tuple(tangents[i] for i in positions))

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            return vmap_rule(info.batch_size, in_dims, args)

    Function.__name__ = Function.__qualname__ = op._opname
    # Function.apply binds a signature at each call, for functorch; outside it, the C++ apply below does.
    apply = super(torch.autograd.Function, Function).apply
    is_grad_enabled = torch.is_grad_enabled

    def autograd_kernel(*args: Any) -> Any:
        if type(args[0]) is not Tensor:
            # Importing torch.distributed.tensor takes half as long as importing torch, so not at definition.
            if "torch.distributed.tensor" in sys.modules:
                _register_sharding(op, shardings)
            return apply(*args)
        if (is_grad_enabled() and _any_requires_grad(*args)) or forward_ad._current_level >= 0:
            return apply(*args)
        with _AutoDispatchBelowAutograd():
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
            with _ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
                return custom_function_call(Function, *cast_for(device.type, args))
        return custom_function_call(Function, *args)

    def autocast_kernel(device: str, *args: Any) -> Any:
        with _ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
            return op(*cast_for(device, args))

    LIBRARY.impl(op._opname, autograd_kernel, "Autograd")
    LIBRARY.impl(op._opname, functorch_kernel, FUNCTORCH_KEY)
    for device in AUTOCAST_DEVICES:
        LIBRARY.impl(op._opname, partial(autocast_kernel, device), f"Autocast{device.upper()}")


def _without_gradient(op: OpOverload, args: Sequence[Any]) -> Any:
    """`op`, past its Autograd kernel where that would only pass the call on."""
    forward_mode = forward_ad._current_level >= 0 or _are_functorch_transforms_active()
    if torch.is_grad_enabled() or type(args[0]) is not Tensor or forward_mode:
        return op(*args)
    with _AutoDispatchBelowAutograd():
        return op(*args)


def _vmap_rule(op: OpOverload, heads: Mapping[str, int | None]) -> Callable[..., Any]:
    """The mapped dimension, folded into the heads: ``[..., H, ...]`` becomes ``[..., M*H, ...]``."""
    arguments, returns = _names(op._schema.arguments), _names(op._schema.returns)

    def rule(size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> Any:
        folded = list(args)
        for i, (name, x, in_dim) in enumerate(zip(arguments, args, in_dims)):
            dim = heads.get(primal_of(name, heads))
            if dim is None and isinstance(in_dim, int):  # a list of bools has a list
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
        # What all heads share is whole on every rank, and its gradient a sum over ranks.
        shared = {primal for x, primal, dim in split if dim is not None and x.shape[dim] == 1}
        own = [(x, dim) for x, primal, dim in split if primal not in shared]
        if own and _same_shards(own):
            choices.append({**heads, **dict.fromkeys(shared)})
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
    """Whether the shards of every tensor along its dimension go together: of groups, those that are even."""
    sizes = {spec.shape[dim] for spec, dim in split}
    if len(sizes) == 1:
        return True
    mesh = split[0][0].mesh.shape
    counts = [prod(axes) for n in range(1, len(mesh) + 1) for axes in combinations(mesh, n)]
    # PyTorch never cuts a dimension into more shards than it has elements.
    return all(size % count == 0 for count in counts if count <= min(sizes) for size in sizes)


@cache
def _register_sharding(op: OpOverload, shardings: Callable[..., Any]) -> None:
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(op)(shardings)
