"""Every kernel variant compiles for a GPU, also where there is none: the interpreter checks no types."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from flacompose.ops.families.vector_decay import cuda  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.float64: "*fp64",
    torch.int64: "*i64",
}
SHARED_MEMORY = 232448  # bytes a program may have on the chip


def compile_only(kernel, grid, *args, **kwargs) -> None:
    """In the place of a launch."""
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
    arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None or (value == 1 if isinstance(value, int) else False):
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    assert triton.compile(source, target=HOPPER, options=options).metadata.shared <= SHARED_MEMORY


GATES = [(), ("gk",), ("gv",), ("gk", "gv")]


@pytest.mark.parametrize("gates", GATES, ids="-".join)
@pytest.mark.parametrize(
    "dtype, gate_dtype, K, V, read_before, packed",
    [
        (torch.bfloat16, torch.bfloat16, 128, 128, False, False),
        (torch.bfloat16, torch.float32, 40, 200, True, True),
        (torch.float16, torch.float16, 64, 64, False, True),
        (torch.float32, torch.float64, 256, 16, True, False),
    ],
)
def test_compiles(
    gates, dtype, gate_dtype, K, V, read_before, packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "launch", compile_only)
    B, T, H, N = 1, 130, 3, 2
    q, k = torch.zeros(2, B, T, H, K, dtype=dtype)
    v = torch.zeros(B, T, H, V, dtype=dtype)
    gk = torch.zeros(B, T, H, K, dtype=gate_dtype) if "gk" in gates else None
    gv = torch.zeros(B, T, H, V, dtype=gate_dtype) if "gv" in gates else None
    cu_seqlens = torch.tensor([0, 70, T]) if packed else None
    state = torch.zeros(N if packed else B, H, K, V)
    args = (q, k, v, gk, gv, state, cu_seqlens, 1.0, read_before)
    cuda.chunk(*args)
    cuda.recurrent(*args)
    cuda.backward(*args, v, state)


@pytest.mark.parametrize("gates", GATES, ids="-".join)
@pytest.mark.parametrize("N", [None, 1, 5], ids=["rows", "one", "five"])
def test_launches_at_every_length(gates, N, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced at a symbolic length and number of sequences, the launches ask nothing about them."""
    monkeypatch.setattr(cuda, "launch", lambda *_, **__: None)
    env = ShapeEnv()

    def symbol(name: str, hint: int) -> torch.SymInt:
        source = ConstantSource(name)
        created = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        return env.create_symintnode(created, hint=hint, source=source)

    with FakeTensorMode(shape_env=env):
        T = symbol("T", 65)
        q, k, v, g = (torch.empty(1, T, 2, 16) for _ in range(4))
        cu_seqlens = None if N is None else torch.empty(symbol("N", N + 1), dtype=torch.int64)
        state = torch.empty(1 if cu_seqlens is None else cu_seqlens.shape[0] - 1, 2, 16, 16)
        gk, gv = (g if name in gates else None for name in ("gk", "gv"))
        args = (q, k, v, gk, gv, state, cu_seqlens, 1.0, False)
        cuda.chunk(*args)
        cuda.recurrent(*args)
        cuda.backward(*args, v, state)
    assert [guard.expr for guard in env.guards] == []
