"""Every launch of every recurrence, recorded without a GPU, and compiled for one that need not be there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource

from flacompose.ops._launch import sequences
from flacompose.ops._launch.chip import ADA, AMPERE, BLACKWELL, HOPPER, Chip
from flacompose.ops._launch.launch import launching_by
from flacompose.ops._recurrences.elementwise.cumulative_angle import cuda as turns
from flacompose.ops._recurrences.elementwise.rg_lru import cuda as rg_lru
from flacompose.ops._recurrences.elementwise.rwkv4 import cuda as rwkv4
from flacompose.ops._recurrences.elementwise.scan import cuda as scan
from flacompose.ops._recurrences.elementwise.selective_scan import cuda as selective_scan
from flacompose.ops._recurrences.elementwise.stabilizer import cuda as stabilizer
from flacompose.ops._recurrences.fused.gated_skip import cuda as gated_skip
from flacompose.ops._recurrences.fused.mamba3 import cuda as mamba3
from flacompose.ops._recurrences.fused.mlstm import cuda as mlstm
from flacompose.ops._recurrences.fused.normalizer import cuda as normalizer
from flacompose.ops._recurrences.fused.rotary import cuda as rotation
from flacompose.ops._recurrences.fused.slot_attention import cuda as slot_attention
from flacompose.ops._recurrences.fused.ssd import cuda as ssd
from flacompose.ops._recurrences.matrix import cuda as matrix
from flacompose.ops._recurrences.matrix.inputs import SIGNATURE, Inputs
from flacompose.ops._recurrences.short_conv import cuda as short_conv
from helpers.operators import flat

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.bool: "*i1",
    torch.float64: "*fp64",
    torch.int64: "*i64",
}
# By compute capability. What a program may have there is in the CUDA programming guide.
CHIPS = {80: AMPERE, 86: ADA, 89: ADA, 90: HOPPER, 100: BLACKWELL, 120: ADA}
TENSOR_MEMORY = 512  # columns that a program may have, where there are any
Size = int | torch.SymInt
OPTIONS = ("num_warps", "num_stages", "maxnreg")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# Of keys and values, those at which a configuration changes, and some that are no powers of two.
SIZES = (
    (16, 16),
    (32, 32),
    (64, 64),
    (80, 48),
    (128, 64),
    (64, 128),
    (128, 128),
    (96, 200),
    (192, 192),
    (256, 16),
    (16, 256),
    (256, 128),
    (128, 256),
    (256, 256),
    (320, 512),
    (512, 320),
    (384, 384),
    (512, 512),
)
# Rows of the third are cut into segments, and those of the second where there are warm starts.
LENGTHS = (130, 64 * 70, 64 * 260)


@dataclass(frozen=True)
class Launch:
    """A kernel, and what Triton compiles it for: not the numbers and the memory that it is given, but their types."""

    module: str
    name: str
    signature: tuple[tuple[str, Any], ...]  # of a tuple, the types of its fields
    constants: tuple[tuple[tuple[int, ...], Any], ...]  # by their paths, as Triton calls places in tuples
    aligned: tuple[tuple[int, ...], ...]
    options: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, kernel: Any, *args: Any, **kwargs: Any) -> Launch:
        options = tuple((name, kwargs.pop(name)) for name in OPTIONS if name in kwargs)
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        signature: list[Any] = []
        constants: list[Any] = []
        aligned: list[Any] = []
        for i, parameter in enumerate(kernel.params):
            value = arguments[parameter.name]
            if parameter.is_constexpr:
                constants.append(((i,), value))
                signature.append((parameter.name, "constexpr"))
            else:
                type_of = _type_of(value, not parameter.do_not_specialize, (i,), constants, aligned)
                signature.append((parameter.name, type_of))
        return cls(
            kernel.fn.__module__, kernel.fn.__name__, *map(tuple, (signature, constants, aligned)), options
        )

    @property
    def source(self) -> ASTSource:
        kernel = getattr(import_module(self.module), self.name)
        source = GluonASTSource if kernel.is_gluon() else ASTSource
        attributes = {path: [["tt.divisibility", 16]] for path in self.aligned}
        return source(kernel, dict(self.signature), dict(self.constants), attributes)

    @property
    def given(self) -> dict[str, Any]:
        """The constants by the names of their parameters, or of their fields in tuples."""
        found: dict[str, Any] = {}
        for (i, *path), value in self.constants:
            name, type_of = self.signature[i]
            found |= (
                {type_of._fields[path[0]] if path else name: value}
                if not isinstance(value, tuple)
                else value._asdict()
            )
        return found

    def compile(self, capability: int) -> Any:
        """Its machine code for a GPU of this compute capability, and what Triton knows of it then."""
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(self.source, target=target, options=dict(self.options))

    def memory(self, capability: int) -> dict[str, Any]:
        """What Triton knows of it once it is LLVM's IR, the memory that it takes above all: half of a compilation."""
        backend, options, module = self._begin(capability)
        metadata: dict[str, Any] = {"target": backend.target, **vars(options)}
        stages: dict[str, Any] = {}
        backend.add_stages(stages, options, self.source.language)
        for name in ("ttir", "ttgir", "llir"):
            if name in stages:  # Gluon begins with the second
                module = stages[name](module, metadata)
        return metadata

    def parse(self, capability: int) -> Any:
        """The kernel in Triton's own IR, the first step of its compilation, which takes a fraction of the time."""
        return self._begin(capability)[2]

    def _begin(self, capability: int) -> tuple[Any, Any, Any]:
        """Triton's backend, its options, and the kernel in Triton's own IR."""
        target, context = GPUTarget("cuda", capability, 32), ir.context()
        backend = make_backend(target)
        ir.load_dialects(context)
        backend.load_dialects(context)
        options = backend.parse_options(dict(self.options))
        functions = backend.get_codegen_implementation(options)
        module = self.source.make_ir(target, options, functions, backend.get_module_map(), context)
        return backend, options, module

    def excess(self, capability: int) -> str | None:
        """What it wants and cannot have there, or None if it fits."""
        memory, limit = self.memory(capability), CHIPS[capability].shared_memory
        if memory["shared"] > limit:
            return f"{memory['shared']} bytes of shared memory, of {limit}"
        if memory.get("tmem_size", 0) > TENSOR_MEMORY:
            return f"{memory['tmem_size']} columns of tensor memory, of {TENSOR_MEMORY}"
        return None

    def __str__(self) -> str:
        constants = {name: x for name, x in self.given.items() if x is not None}
        return f"{self.name} {constants} {dict(self.options)}"


def _type_of(
    value: Any, specialized: bool, path: tuple[int, ...], constants: list[Any], aligned: list[Any]
) -> Any:
    """The type of an argument as Triton writes it, for a tuple one of types; adds its path where it belongs."""
    if isinstance(value, tuple):  # Triton specializes all numbers in tuples
        return type(value)(*(_type_of(x, True, (*path, i), constants, aligned) for i, x in enumerate(value)))
    specialized = specialized and type(value) is int
    if value is None or (specialized and value == 1):
        constants.append((path, value))
        return "constexpr"
    if isinstance(value, Tensor) or (specialized and value % 16 == 0):
        aligned.append(path)
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


@contextmanager
def tables_of(chip: Chip) -> Iterator[None]:
    """Within it, launches are configured for `chip`, whatever the device of their tensors is."""
    chip_of, sequences.chip_of = sequences.chip_of, lambda device: chip
    try:
        yield
    finally:
        sequences.chip_of = chip_of


class Call(NamedTuple):
    """A call of what an operator launches: a function of its recurrence, the operator's name, and the arguments."""

    at: str
    function: Any
    op: str
    args: tuple[Any, ...]

    def __call__(self) -> Any:
        """Launch its kernels, and compile none ahead of that."""
        return self.function(*self.args)

    def traced(self) -> Any:
        """What a graph is told of the results."""
        results = getattr(torch.ops.flacompose, self.op)(*self.args)
        return (results,) if isinstance(results, Tensor) else results


def recorded(calls: Iterable[Call]) -> dict[Launch, str]:
    """What is launched by `calls`, each with the description of the first call that launches it."""
    found: dict[Launch, str] = {}
    with torch.device("meta"):
        for call in calls:

            def record(kernel: Any, grid: Any, *args: Any, _at: str = call.at, **kwargs: Any) -> None:
                found.setdefault(Launch.of(kernel, *args, **kwargs), _at)

            with launching_by(record):
                call()
    return found


new = torch.empty  # on the device of the context, "meta" but for tensors of symbolic sizes


def _masks(names: str, *wanted: str) -> Iterator[list[bool]]:
    """Which gradients are wanted: all, and each of these combinations."""
    for want in (names, *wanted):
        yield [name in want.split() for name in names.split()]


def _calls(
    at: str, recurrence: Any, args: tuple[Any, ...], do: Tensor, masks: Iterable[list[bool]], *states: Tensor
) -> Iterator[Call]:
    """All forms of a recurrence, and its backward for each of `masks`, where gradients of `do` and `states` arrive."""
    name = recurrence.__name__.split(".")[-2]
    for form, more in ("forward", ()), ("chunk", ()), ("recurrent", ()), ("steps", (3, 1)), ("ends", ()):
        if hasattr(recurrence, form):
            yield Call(at, flat(recurrence, form), f"{name}_{form}", (*args, *more))
    for mask in masks:
        yield Call(at, flat(recurrence, "backward"), f"{name}_backward", (*args, do, *states, mask))


def _calls_of_matrix(at: str, masks: Iterable[str], state: Tensor, **given: Any) -> Iterator[Call]:
    """All forms of a recurrence with a matrix state, and its backward where all gradients are wanted or a mask's."""
    inputs = Inputs(**given, initial_state=state)
    erases = inputs.delta_rule or inputs.b is not None
    forms = ("chunk", ()), ("recurrent", ()), ("steps", (3, 1)), ("matrix_ends" if erases else "ends", ())
    for form, more in (*forms, *([("update", (1,))] if inputs.delta_rule else [])):
        if not (form == "ends" and inputs.g_gamma is not None):
            yield Call(at, flat(matrix, form), f"matrix_recurrence_{form}", (*inputs, *more))
    for names in ("", *masks):
        wanted = names.split() or SIGNATURE.differentiable
        mask = [x in wanted and getattr(inputs, x) is not None for x in SIGNATURE.differentiable]
        call = (*inputs, inputs.v, state, mask)
        yield Call(at, flat(matrix, "backward"), "matrix_recurrence_backward", call)


def _described(dtype: torch.dtype, T: Size, bounds: Size | None, *sizes: str) -> str:
    name = str(dtype).removeprefix("torch.")
    return " ".join([name, *sizes, f"T={T}", *([] if bounds is None else ["packed"])])


def matrix_calls(dtype: torch.dtype, K: int, V: int, T: Size, bounds: Size | None = None) -> Iterator[Call]:
    """The recurrences whose state is a matrix, with every gate that they take.

    Of packed sequences there are as many `bounds` as ``cu_seqlens`` has numbers.
    """
    B, H = 1, 2
    at = _described(dtype, T, bounds, f"K={K}", f"V={V}")
    cu_seqlens = None if bounds is None else new(bounds, dtype=torch.int64)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    q, k, gk = (new(B, T, H, K, dtype=dtype) for _ in range(3))
    state = new(N, H, K, V)

    # Of groups, some results are float32 instead, and the gradients of gates of heads are made for several at once.
    # At the sizes of Mamba-2 there are many heads in a group.
    for groups in (1, 2) if K == V and K in (64, 256) else (1, 32) if (K, V) == (128, 64) else (1,):
        HV = H * groups
        v, g, beta = new(B, T, HV, V, dtype=dtype), new(B, T, HV), new(B, T, HV)
        states = new(N, HV, K, V)
        for gates in ("", "g_gamma", "g", "g g_gamma", "g beta", "beta"):
            given = {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens}
            given |= {x: y for x, y in (("g", g), ("g_gamma", new(HV)), ("beta", beta)) if x in gates.split()}
            masks = "q", "k", "v", "q k v", "g"
            yield from _calls_of_matrix(f"head_decay {gates} groups={groups} {at}", masks, states, **given)
        for options in ("", "D z dt_bias", "D") if K <= 256 else ():
            D, z, bias = (x if name in options else None for name, x in (("D", g), ("z", v), ("dt_bias", g)))
            D, bias = (None if x is None else new(HV, *E) for x, E in ((D, (1,)), (bias, ())))
            args = v, g, new(HV), q, k, D, z, bias, states, cu_seqlens, bias is not None, 0.0, 1.0
            masks = _masks("x dt A B C D z dt_bias initial_state", "x B C", "dt", "z", "D")
            masks = [[want and x is not None for want, x in zip(mask, args)] for mask in masks]
            yield from _calls(f"ssd {options} groups={groups} {at}", ssd, args, v, filter(any, masks), states)
        if groups > 2:
            continue
        args = q, k, v, g, beta, g, new(N, HV, K), cu_seqlens, 1.0, 0.0
        masks = _masks("q k x g beta floor initial_state", "q", "x", "q k x")
        yield from _calls(f"normalizer groups={groups} {at}", normalizer, args, v, masks, new(N, HV, K))
        for gates in ("", "a", "g", "g a", "g before", "g a before", "gk", "gk a"):
            given = {"q": q, "k": k, "v": v, "beta": beta, "cu_seqlens": cu_seqlens, "delta_rule": True}
            given |= {x: y for x, y in (("g", g), ("gk", new(B, T, HV, K)), ("a", k)) if x in gates.split()}
            masks, given["read_before"] = ("q", "k", "v", "q k v"), "before" in gates
            yield from _calls_of_matrix(f"delta_rule {gates} groups={groups} {at}", masks, states, **given)
    if K == V and K in (64, 128) and bounds is None and isinstance(T, int):
        # So many programs that one kernel makes all gradients.
        for groups, gated in product((1, 2), (False, True)):
            q_, v_ = new(120, T, H, K, dtype=dtype), new(120, T, H * groups, V, dtype=dtype)
            gate = new(120, T, H * groups)
            inputs = Inputs(q_, q_, v_, gate if gated else None, beta=gate, delta_rule=True)
            mask = [getattr(inputs, x) is not None for x in SIGNATURE.differentiable]
            described = f"delta_rule, many rows, {'g ' if gated else ''}groups={groups} {at}"
            args = *inputs, v_, None, mask
            yield Call(described, flat(matrix, "backward"), "matrix_recurrence_backward", args)

    for R, halves in ((1, False), (4, True)):
        qs, v, bias = new(B, T, R, 1, K, dtype=dtype), new(B, T, H, V, dtype=dtype), new(H, R, K)
        states = new(N, R, H, K), new(N, H, V)
        args = qs, qs, v, bias, bias, new(B, T, H, K // 2), *states, cu_seqlens, halves
        described = f"rotation R={R} {at}"
        yield Call(described, flat(rotation, "forward"), "rotary_forward", args)
        d_turned, d_products = new(B, T, R, H, K, dtype=dtype), new(B, T, H, R, R)
        for arriving in (d_turned, d_turned, v, d_products, *states), (None, d_turned, v, None, None, None):
            given = *args, *arriving, [True] * 8
            yield Call(described, flat(rotation, "backward"), "rotary_backward", given)

    v = new(B, T, H, V, dtype=dtype)
    for gates, read_before in (("", True), ("gk", True), ("gk", False)):
        given = {
            "q": q,
            "k": k,
            "v": v,
            "a": k,
            "b": k,
            "gk": gk if gates else None,
            "cu_seqlens": cu_seqlens,
        }
        described, masks = f"low_rank {gates} {read_before} {at}", ("q k v a b", "v")
        yield from _calls_of_matrix(described, masks, state, **given, read_before=read_before)
    u = new(H, K)
    gate_dtypes = (dtype, torch.float64 if dtype == torch.float32 else torch.float32)
    gated = (
        ("gk", {}),
        ("gv", {}),
        ("gk gv", {}),
        ("gk u", {}),
        ("gk", {"softmax": True}),
        ("gv", {"full_precision": True}),
    )
    for (gates, options), gate_dtype in product(gated, gate_dtypes):
        gated_by = {"gk": gk.to(gate_dtype), "gv": new(B, T, H, V, dtype=gate_dtype), "u": u}
        given = {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens, **options}
        given |= {x: y for x, y in gated_by.items() if x in gates.split()}
        described, masks = (
            f"channel_decay {gates} {' '.join(options)} {at} {gate_dtype} gates",
            ("q", "k", "v", "q k v"),
        )
        yield from _calls_of_matrix(described, masks, state, **given)

    # One token has one kernel, whatever the others have. The slots are as many as the values.
    for G in (1, 2) if bounds is None else ():
        one = [new(1, 1, H, *size, dtype=dtype) for size in ((G, K), (K,), (V,), (V,))]
        states = state, new(1, H, V, V)
        for gate_dtype, given in product(gate_dtypes, (states, (None, None))):
            args = *one, new(1, 1, H, V, dtype=gate_dtype), *given, 1.0
            from_states = "" if given[0] is None else "from states "
            described = f"slot_attention {from_states}groups={G} {at} {gate_dtype} gates"
            yield Call(described, flat(slot_attention, "token"), "slot_attention_token", args)
            masks = _masks("q k v s g initial_k initial_v", *(x for x in ("q", "s", "g") if K == V == 64))
            do, d_states = new(1, 1, H, G, V, dtype=dtype), (None, None)
            for mask in masks if given[0] is not None else ():
                given_back = *args, do, *d_states, mask
                yield Call(described, flat(slot_attention, "backward"), "slot_attention_backward", given_back)

    if bounds is None:
        one = [new(1, 1, H, size, dtype=dtype) for size in (K, K, V)]
        gate, states = new(1, 1, H), (new(1, H, K, V), new(1, H, K), new(1, H))
        for given in (states, (None, None, None)):
            from_states = "" if given[0] is None else "from states "
            args = *one, gate, gate, *given, 1.0, 0.0
            yield Call(f"mlstm {from_states}{at}", flat(mlstm, "token"), "mlstm_token", args)
        given = one[2], *[gate] * 3, *[new(H, K)] * 2, new(1, 1, 1, K // 2, dtype=dtype), new(1, H, K // 2)
        for values_first, skip in product((False, True), ((None, None), (new(H), one[2]))):
            states = new(1, H, V, K) if values_first else new(1, H, K, V), new(1, H, K), new(1, H, V)
            args = *one[:2], *given, *states, *skip, values_first
            yield Call(f"mamba3 {values_first} {at}", flat(mamba3, "token"), "mamba3_token", args)


def other_calls(dtype: torch.dtype, T: Size, bounds: Size | None = None) -> Iterator[Call]:
    """The recurrences whose state is no matrix."""
    at = _described(dtype, T, bounds)
    cu_seqlens = None if bounds is None else new(bounds, dtype=torch.int64)
    rows = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    H, P = 2, 80
    x, w = new(1, T, H, P, dtype=dtype), new(1, T, H)
    for D, own, z in (
        (new(H), w, x),
        (new(H), None, x),
        (new(H, P), None, None),
        (None, w, x),
        (None, None, x),
    ):
        D = D if D is None else D.view(H, -1)
        args = x, x, D, own, z, cu_seqlens
        yield Call(f"gated_skip {at}", flat(gated_skip, "forward"), "gated_skip_forward", args)
        for mask in _masks("y x D w z", "D", "z", "y x"):
            mask = [want and u is not None for want, u in zip(mask, args)]
            if not any(mask):
                continue
            yield Call(
                f"gated_skip {at}", flat(gated_skip, "backward"), "gated_skip_backward", (*args, x, mask)
            )
    for D in (40, 2048):
        x, g = new(2, 1, T, D, dtype=dtype)
        args = x, g, new(rows, D), cu_seqlens
        yield from _calls(f"scan D={D} {at}", scan, args, x, _masks("x g initial_state", "x"), new(rows, D))
        for reset in (None, new(1, T, 1, dtype=torch.bool)) if D == 40 else (None,):
            gated = x, x, x, new(D), new(rows, D), reset, cu_seqlens
            masks, given = _masks("x r i a_param initial_state", "x"), "" if reset is None else " reset"
            yield from _calls(f"rg_lru{given} D={D} {at}", rg_lru, gated, x, masks, new(rows, D))
        for H in (1, D // 8):
            turning = new(1, T, H, 8, dtype=dtype), new(1, T, D // 8), new(rows, D // 8, 8), cu_seqlens
            do, masks = new(1, T, D // 8, 8), _masks("x dt initial_state", "x")
            yield from _calls(f"turns H={H} of {D // 8} {at}", turns, turning, do, masks, turning[2])
        yield Call(f"stabilizer D={D} {at}", flat(stabilizer, "forward"), "stabilizer_forward", args)
        states = [new(rows, D) for _ in range(3)]
        args = x, g, new(D), new(D), *states, cu_seqlens
        masks = _masks("v k w u initial_a initial_b initial_m", "v", "k", "w", "u", "initial_a")
        yield from _calls(f"rwkv4 D={D} {at}", rwkv4, args, x, masks, *states)
        for W in (2, 4, 8):
            state = new(rows, D, W)
            args = x, new(D, W), new(D), state, cu_seqlens, True
            masks = _masks("x weight bias initial_state")
            yield from _calls(f"short_conv D={D} W={W} {at}", short_conv, args, x, masks, state)
        for S in (1, 16, 200):
            B, state = new(1, T, 1, S, dtype=dtype), new(rows, D, S)
            masks = list(_masks("x dt A B C D z dt_bias initial_state", "x"))
            for around in (new(D), x, new(D)), (None, None, None):
                args = x, g, new(D, S), B, B, *around, state, cu_seqlens, around[0] is not None
                given = [[want and y is not None for want, y in zip(mask, args)] for mask in masks]
                yield from _calls(f"selective_scan D={D} S={S} {at}", selective_scan, args, x, given, state)


def every_call(
    dtypes: Iterable[torch.dtype] = DTYPES, sizes: Iterable[tuple[int, int]] = SIZES
) -> Iterator[Call]:
    for dtype, T in product(dtypes, LENGTHS):
        for K, V in sizes:
            yield from matrix_calls(dtype, K, V, T)
        yield from other_calls(dtype, T)
    for dtype in dtypes:
        # Packing adds a few scalars to each kernel, the same at every size, and a token nothing to those above.
        yield from matrix_calls(dtype, 64, 64, LENGTHS[0], bounds=3)
        yield from other_calls(dtype, LENGTHS[0], bounds=3)
        yield from other_calls(dtype, 1)
