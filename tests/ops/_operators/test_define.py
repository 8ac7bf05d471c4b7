"""The registration of operators, proved on the elementwise scan, beyond what the contract has of every op."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils._pytree import tree_leaves

from flacompose.ops._operators.define import _inductor_compiles
from flacompose.ops._recurrences.elementwise.scan.reference import scan as reference

# PyTorch copying its own tree specifications.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")
devices = pytest.mark.parametrize("device", ["cpu", *["cuda"] * torch.cuda.is_available()])
op = torch.ops.flacompose.scan_recurrent.default


def call(x: Tensor, g: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    return op(x, g, initial_state, None)


def inputs(T=5, dtype=torch.float64, device="cpu", B=2, D=6):
    generator = torch.Generator().manual_seed(T)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    tensors = draw(B, T, D), -draw(B, T, D).abs(), draw(B, D)
    return tuple(x.to(device, dtype) for x in tensors)


def loss(function):
    def of_both(*args):
        y, state = function(*args)
        return y.sin().sum() + state.cos().sum()

    return of_both


def run(code, *args, timeout=240):
    """Run ``code`` in a fresh process, which may import the package and this file."""
    tests = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent)))},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_torch_still_says_when_it_compiles():
    from torch._inductor.virtualized import V

    assert V.aot_compilation is False
    with V.set_aot_compilation(True):
        assert V.aot_compilation is True
    seen = []

    @torch.library.custom_op("flacompose_tests::copied", mutates_args=())
    def copied(x: Tensor) -> Tensor:
        return x.clone()

    @copied.register_fake
    def _(x):
        seen.append(_inductor_compiles(ahead_of_time=False))
        return torch.empty_like(x)

    for backend in ("aot_eager", "inductor"):
        with torch._functorch.config.patch(enable_autograd_cache=False):  # what it finds is not traced
            torch.compile(lambda x: copied(x) + 1, backend=backend)(torch.ones(3))
        torch.compiler.reset()
        assert any(seen) == (backend == "inductor")
    assert not _inductor_compiles(ahead_of_time=False)


# Derivatives


def test_gradchecks():
    args = [x.requires_grad_() for x in inputs(T=3)]
    batched = dict(check_batched_grad=True)
    assert gradcheck(call, args, check_forward_ad=True, check_batched_forward_grad=True, **batched)
    assert gradgradcheck(call, args, check_fwd_over_rev=True, **batched)


def test_only_inputs_are_saved():
    x, g, h = (x.requires_grad_() for x in inputs())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda t: None):
        call(x, g, h)
    assert set(saved) == {t.data_ptr() for t in (x, g, h)} and len(saved) == 3


argnums = (0, 1, 2)
OLD_TORCH = torch.__version__ < "2.12"
TRANSFORMS = {
    "grad": lambda f: torch.func.grad(f, argnums),
    "jacrev": lambda f: torch.func.jacrev(f, argnums),
    "jacfwd": lambda f: torch.func.jacfwd(f, argnums),
    "hessian": lambda f: torch.func.hessian(f, argnums),
    "forward_forward": lambda f: torch.func.jacfwd(torch.func.jacfwd(f, argnums), argnums),
    "reverse_reverse": lambda f: torch.func.jacrev(torch.func.jacrev(f, argnums), argnums),
    "reverse_forward": lambda f: torch.func.jacrev(torch.func.jacfwd(f, argnums), argnums),
    "third": lambda f: torch.func.jacfwd(torch.func.jacrev(torch.func.jacfwd(f))),
    "per_sample": lambda f: torch.func.vmap(torch.func.grad(f, argnums)),
    "grad_of_vmap": lambda f: torch.func.grad(lambda *a: torch.func.vmap(f)(*a).sum(), argnums),
    "jvp": lambda f: lambda *a: torch.func.jvp(f, a, tuple(x.cos() for x in a)),
}


@devices
@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func(name, device):
    args = inputs(T=3, B=1, D=2, device=device)
    if name in ("per_sample", "grad_of_vmap"):
        args = tuple(torch.stack([x, x.roll(1, 1), x / 2]) for x in args)
    actual, expected = (tree_leaves(TRANSFORMS[name](loss(op))(*args)) for op in (call, reference))
    torch.testing.assert_close(actual, expected)
    assert all(x.abs().max() > 0 for x in expected)


@pytest.mark.parametrize(
    "through", [lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")]
)
def test_forward_mode_outside_torch_func(through):
    x, g, h = inputs()

    def tangents(x, t):
        with forward_ad.dual_level():
            y, state = call(forward_ad.make_dual(x, t), g, h)
            return forward_ad.unpack_dual(y).tangent, forward_ad.unpack_dual(state).tangent

    expected = torch.func.jvp(lambda x: reference(x, g, h), (x,), (x.cos(),))[1]
    torch.testing.assert_close(through(tangents)(x, x.cos()), expected)


@devices
def test_forward_mode_over_a_gradient(device):
    x, g, h = inputs(device=device)

    def tangent(function):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(g, g.cos())
            leaf = x.detach().requires_grad_()
            return forward_ad.unpack_dual(torch.autograd.grad(loss(function)(leaf, dual, h), leaf)[0]).tangent

    torch.testing.assert_close(tangent(call), tangent(reference))


# vmap


@devices
@pytest.mark.parametrize(
    "in_dims", [(0, 0, 0), (1, 3, 2), (0, None, None), (None, 2, None), (None, None, -1)]
)
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_vmap(in_dims, chunk_size, device):
    args = [
        x if d is None else torch.stack([x, x / 2, x / 3], d) for x, d in zip(inputs(device=device), in_dims)
    ]
    actual, expected = (
        torch.vmap(f, in_dims=in_dims, chunk_size=chunk_size)(*args) for f in (call, reference)
    )  # fmt: skip
    torch.testing.assert_close(actual, expected)

    def backward(op):
        return lambda *a: torch.func.vjp(op, *a)[1](reference(*a))

    actual, expected = (torch.vmap(backward(f), in_dims=in_dims)(*args) for f in (call, reference))
    torch.testing.assert_close(actual, expected)


def test_vmap_of_vmap_and_of_absent_inputs():
    x = torch.stack([inputs()[0]] * 4).unflatten(0, (2, 2)) * torch.arange(1, 5).view(2, 2, 1, 1, 1)
    both = [torch.vmap(torch.vmap(lambda x, f=f: f(x, -x.abs(), None)))(x) for f in (call, reference)]
    torch.testing.assert_close(*both)


def test_vmap_refuses_a_batch_of_cu_seqlens():
    x, g, _ = inputs(B=1)
    h = torch.randn(2, 6, dtype=torch.float64)
    with pytest.raises(
        ValueError, match="cu_seqlens must not be mapped by vmap over flacompose::scan_recurrent"
    ):
        torch.vmap(lambda cu: op(x, g, h, cu))(torch.tensor([[0, 2, 5], [0, 3, 5]]))
    many = torch.stack([x, x / 2])
    cu = torch.tensor([0, 2, 5])
    y, _ = torch.vmap(lambda x: op(x, g, h, cu))(many)
    torch.testing.assert_close(y[1], op(x / 2, g, h, cu)[0])


# Capture, where the contract has what is captured of every op


def test_autocast_within_others():
    """Under torch.func and in a compiled graph the cast is that of a plain call."""
    x, g, h = inputs(dtype=torch.float32)
    seen = []

    def f(x, g, h):
        y, state = call(x, g, h)
        seen.append((y.dtype, state.dtype))
        return y, state

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.func.grad(loss(f))(x, g, h)
        y, state = compiled(x, g, h)
        torch.testing.assert_close((y, state), call(x, g, h))
    assert (y.dtype, state.dtype) == seen[0] == (torch.bfloat16, torch.float32)


@devices
@pytest.mark.parametrize("name", ["grad", "per_sample", "grad_of_vmap", "jvp", "hessian"])
def test_compiled_torch_func(name, device):
    if name == "hessian" and OLD_TORCH:
        pytest.skip("the compiler of PyTorch 2.11 does not trace torch.func.hessian")
    torch.compiler.reset()
    args = inputs(T=3, B=1, D=2, device=device)
    if name in ("per_sample", "grad_of_vmap"):
        args = tuple(torch.stack([x, x / 2]) for x in args)
    compiled = torch.compile(lambda *a: TRANSFORMS[name](loss(call))(*a), fullgraph=True, backend="aot_eager")
    expected = TRANSFORMS[name](loss(reference))(*args)
    torch.testing.assert_close(tree_leaves(compiled(*args)), tree_leaves(expected))


class Module(torch.nn.Module):
    def forward(self, x, g, h):
        y, state = call(x.sin(), g, h)
        y, state = call(y, g, state)
        return y.cos(), state


def nodes(program):
    return sum(node.target is op for node in program.graph.nodes)


@devices
def test_strict_export_keeps_one_node(device):
    T = torch.export.Dim("T", min=2, max=2**20)
    shapes = dict(x={1: T}, g={1: T}, h=None)
    args = inputs(8, torch.float32, device)
    program = torch.export.export(Module(), args, dynamic_shapes=shapes, strict=True)
    decomposed = program.run_decompositions()
    assert nodes(program) == nodes(decomposed) == 2
    for T in (2, 3, 63, 64, 65, 165):
        args = inputs(T, torch.float32, device)
        expected = Module()(*args)
        torch.testing.assert_close(program.module()(*args), expected)
        torch.testing.assert_close(decomposed.module()(*args), expected)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    ("dtype", "compiler", "T", "kernels"),
    [
        (torch.float32, "AOTInductor", 8, 2),
        (torch.float32, "Inductor", 8, 0),
        (torch.float32, "Inductor", 1, 2),
        (torch.float32, "another", 1, 0),
        (torch.float64, "AOTInductor", 8, 0),
        (torch.float64, "Inductor", 1, 0),
    ],
)
def test_on_cuda_a_graph_has_the_node_or_its_kernels(dtype, compiler, T, kernels):
    """All of them in what is compiled ahead of time, and those of one launch in what Inductor compiles."""
    from torch._functorch.aot_autograd import aot_export_module
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # no GPU is needed to trace for one
        args = tuple(torch.empty_like(x, dtype=dtype, device="cuda") for x in inputs(T))
        program = torch.export.export(Module(), args)
        assert nodes(program) == nodes(program.run_decompositions()) == 2
        with V.set_aot_compilation(compiler == "AOTInductor"), ExitStack() as compiling:
            if compiler != "another":
                compiling.enter_context(V.set_fake_mode(mode))
            graph, _ = aot_export_module(program.module(), list(args), trace_joint=False)
    launches = sum("triton_kernel_wrapper" in str(node.target) for node in graph.graph.nodes)
    assert (launches, nodes(graph)) == (kernels, 2 - kernels)


# FSDP


@pytest.mark.parametrize("compiled", [False, True])
def test_fsdp(compiled):
    if compiled and OLD_TORCH:
        pytest.skip("compiled FSDP2 over gloo fails in PyTorch 2.11")
    code = """
        import sys, torch
        from helpers.ranks import on_two_ranks
        from ops._operators.test_define import call

        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.x, self.g = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

            def forward(self, u):
                return call(self.x(u), -self.g(u).exp(), None)[0]

        def worker(mesh, compiled):
            from torch.distributed.fsdp import fully_shard

            torch.manual_seed(0)
            plain = Layer()
            torch.manual_seed(0)
            model = torch.nn.Sequential(Layer())
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
            if compiled:
                model = torch.compile(model, backend="aot_eager")
            u = torch.randn(2, 4, 6)
            for m in (plain, model):
                m(u).square().sum().backward()
            for p, q in zip(plain.parameters(), model.parameters()):
                torch.testing.assert_close(q.grad.full_tensor(), p.grad)

        on_two_ranks(worker, sys.argv[1] == "True", start_method="fork")
    """
    run(code, compiled)


@pytest.mark.parametrize("compiled", [False, True])
def test_placements_that_do_not_fit(compiled):
    """Inputs that are placed unlike one another, and rows of packed sequences, which no batch is."""
    code = """
        import sys, torch
        from helpers.ranks import check_sharded, on_two_ranks
        from ops._operators.test_define import call, inputs, op

        def worker(mesh, compiled):
            from torch.distributed.tensor import Replicate, Shard, distribute_tensor

            run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
            check_sharded(mesh, run, inputs(B=4), [Shard(2), Replicate(), Shard(1)], call)
            if not compiled:
                x, g, _ = inputs(B=1)
                x, g = (distribute_tensor(y, mesh, [Shard(0)]) for y in (x, g))
                cu = distribute_tensor(torch.tensor([0, 2, 5]), mesh, [Replicate()])
                y, _ = op(x, g, None, cu)
                assert y.placements != (Shard(0),)
                torch.testing.assert_close(y.full_tensor(), op(*inputs(B=1)[:2], None, torch.tensor([0, 2, 5]))[0])

        on_two_ranks(worker, sys.argv[1] == "True", start_method="fork")
    """
    run(code, compiled)
