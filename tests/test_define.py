"""The registration of operators, proved on a toy recurrence: ``h_t = exp(g_t) h_{t-1} + x_t``, ``y_t = scale h_t``."""

from __future__ import annotations

import math
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

from flacompose.ops._define import _inductor_compiles, define_op
from flacompose.ops._launching import launch

# PyTorch copying its own tree specifications.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")
CUDA, TRITON = torch.cuda.is_available(), find_spec("triton") is not None
devices = pytest.mark.parametrize("device", ["cpu", *["cuda"] * CUDA])

# The toy family: x [B,T,H,D], g [B,T,H,D] or None, state [B,H,D], cu_seqlens [N+1] or None (a start clears the state).


def decays(x: Tensor, g: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    a = torch.ones_like(x, dtype=dtype) if g is None else g.to(dtype).exp()
    if cu_seqlens is not None:
        starts = (torch.arange(x.shape[1], device=x.device)[:, None] == cu_seqlens[:-1]).any(1)
        a = a * (~starts)[:, None, None]
    return a


def states(x, a, initial_state):
    h = torch.zeros_like(a[:, 0]) if initial_state is None else initial_state.to(a.dtype)
    hs = [h]
    for t in range(x.shape[1]):
        hs.append(a[:, t] * hs[-1] + x[:, t].to(a.dtype))
    return torch.stack(hs, 1)


masks = []  # what the backward was asked for


def scan(x, g, initial_state, cu_seqlens, scale):
    h = states(x, decays(x, g, cu_seqlens), initial_state)
    return (scale * h[:, 1:]).to(x.dtype), h[:, -1].clone()


def scan_backward(x, g, initial_state, cu_seqlens, scale, dy, d_final_state, output_mask):
    a = decays(x, g, cu_seqlens)
    dy = torch.zeros_like(a) if dy is None else scale * dy.to(a.dtype)
    dh = torch.zeros_like(a[:, 0]) if d_final_state is None else d_final_state.to(a.dtype)
    dx = []
    for t in reversed(range(x.shape[1])):
        dh = dh + dy[:, t]
        dx.insert(0, dh)
        dh = a[:, t] * dh
    dx = torch.stack(dx, 1)
    masks.append(output_mask)
    found = dx, states(x, a, initial_state)[:, :-1] * a * dx, dh.contiguous()
    wanted = zip((x, g, initial_state), found, output_mask)
    return tuple(d.to(i.dtype) if mask else x.new_empty(0) for i, d, mask in wanted)


def scan_fake(x, g, initial_state, cu_seqlens, scale):
    B, T, H, D = x.shape
    return x.new_empty(B, T, H, D), x.new_empty(B, H, D, dtype=torch.promote_types(x.dtype, torch.float32))


def scan_backward_fake(x, g, initial_state, cu_seqlens, scale, dy, d_final_state, output_mask):
    wanted = zip((x, g, initial_state), output_mask)
    return tuple(i.new_empty(i.shape) if mask else x.new_empty(0) for i, mask in wanted)


if TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def scan_kernel(
        x, g, h0, cu, y, hT, scale, T, HD, N, G: tl.constexpr, H0: tl.constexpr, CU: tl.constexpr
    ):
        """One program per state element."""
        i = tl.program_id(0)
        row = (i // HD) * T * HD + i % HD
        h = tl.load(h0 + i).to(tl.float32) if H0 else 0.0
        for t in range(T):
            a = tl.exp(tl.load(g + row).to(tl.float32)) if G else 1.0
            if CU:
                for n in range(N):
                    a = tl.where(tl.load(cu + n) == t, 0.0, a)
            h = a * h + tl.load(x + row).to(tl.float32)
            tl.store(y + row, scale * h)
            row += HD
        tl.store(hT + i, h)


def scan_triton(x, g, initial_state, cu_seqlens, scale):
    x, g, initial_state = (i if i is None else i.contiguous() for i in (x, g, initial_state))
    y, final_state = scan_fake(x, g, initial_state, cu_seqlens, scale)
    B, T, H, D = x.shape
    N = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    flags = dict(G=g is not None, H0=initial_state is not None, CU=cu_seqlens is not None)
    launch(
        scan_kernel,
        (B * H * D,),
        x,
        g,
        initial_state,
        cu_seqlens,
        y,
        final_state,
        scale,
        T,
        H * D,
        N,
        **flags,
    )
    return y, final_state


ARGUMENTS = "Tensor x, Tensor? g, Tensor? initial_state, Tensor? cu_seqlens, float scale"
AXES = dict.fromkeys(("x", "g", "y"), "B T H D") | dict.fromkeys(("initial_state", "final_state"), "N H D")

toy_backward = define_op(
    "toy_backward",
    f"({ARGUMENTS}, Tensor? dy, Tensor? d_final_state, bool[] output_mask)"
    " -> (Tensor dx, Tensor dg, Tensor d_initial_state)",
    eager=scan_backward,
    fake=scan_backward_fake,
    axes=AXES,
    flops=lambda x, *_, **__: 4 * math.prod(x),
)
toy = define_op(
    "toy_chunk",
    f"({ARGUMENTS}) -> (Tensor y, Tensor final_state)",
    eager=scan,
    fake=scan_fake,
    triton=lambda: scan_triton,
    one_launch=lambda x, *_: x.shape[1] == 1,
    backward=toy_backward,
    axes=AXES,
    autocast={"x": None},
    flops=lambda x, *_, **__: 2 * math.prod(x),
)


def inputs(T=5, dtype=torch.float64, device="cpu", B=2, H=2, D=3):
    generator = torch.Generator().manual_seed(T)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    tensors = draw(B, T, H, D), -draw(B, T, H, D).abs(), draw(B, H, D)
    return tuple(x.to(device, dtype) for x in tensors)


def reference(x, g, h, scale=0.5):
    """The recurrence, for PyTorch's own derivatives."""
    return scan(x, g, h, None, scale)


def call(x, g, h, scale=0.5):
    return toy(x, g, h, None, scale)


def loss(op, y=True, state=True):
    def function(*args):
        outputs = op(*args)
        return y * outputs[0].sin().sum() + state * outputs[1].cos().sum()

    return function


def grads(function, *args):
    leaves = [x.detach().requires_grad_() for x in args if x is not None]
    values = iter(leaves)
    value = function(*(None if x is None else next(values) for x in args))
    return torch.autograd.grad(value, leaves)


def run(code, *args, timeout=240):
    """Run ``code`` in a fresh process, which may import the package and this file."""
    tests = Path(__file__).parent
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


@devices
@pytest.mark.parametrize("present", [(1, 1, 1), (1, 0, 0), (1, 1, 0), (1, 0, 1)])
@pytest.mark.parametrize("y,state", [(1, 1), (1, 0), (0, 1)])
def test_gradients(present, y, state, device):
    args = [x if p else None for x, p in zip(inputs(device=device), present)]
    expected = grads(loss(reference, y, state), *args)
    outputs = {(1, 1): lambda o: o[0].sin().sum() + o[1].cos().sum(), (1, 0): lambda o: o[0].sin().sum()}
    one = outputs.get(
        (y, state), lambda o: o[1].cos().sum()
    )  # a gradient that never arrives, not one of zeros
    torch.testing.assert_close(grads(lambda *a: one(toy(*a, None, 0.5)), *args), expected)


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)])
def test_gradients_are_asked_for_only_where_an_input_needs_one(wanted):
    args = [x.requires_grad_(bool(w)) for x, w in zip(inputs(), wanted)]
    masks.clear()
    call(*args)[0].sum().backward()
    assert [list(map(bool, mask)) for mask in masks] == [list(map(bool, wanted))]
    expected = grads(loss(lambda *a: reference(*a)), *args)
    leaves = [x for x in args if x.requires_grad]
    actual = torch.autograd.grad(loss(call)(*args), leaves)
    torch.testing.assert_close(actual, tuple(e for e, w in zip(expected, wanted) if w))


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
    args = inputs(T=3, B=1, H=1, D=2, device=device)
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

    def tangent(op):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(g, g.cos())
            leaf = x.detach().requires_grad_()
            return forward_ad.unpack_dual(torch.autograd.grad(loss(op)(leaf, dual, h), leaf)[0]).tangent

    torch.testing.assert_close(tangent(call), tangent(reference))


# vmap


@devices
@pytest.mark.parametrize(
    "in_dims", [(0, 0, 0), (1, 3, 2), (0, None, None), (None, 4, None), (None, None, -1)]
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
    x = torch.stack([inputs()[0]] * 4).unflatten(0, (2, 2)) * torch.arange(1, 5).view(2, 2, 1, 1, 1, 1)
    both = [torch.vmap(torch.vmap(lambda x, f=f: f(x, None, None)))(x) for f in (call, reference)]
    torch.testing.assert_close(*both)
    both = [
        torch.vmap(torch.func.grad(loss(lambda x, f=f: f(x, None, None))))(x[0]) for f in (call, reference)
    ]
    torch.testing.assert_close(*both)


def test_vmap_refuses_a_batch_of_cu_seqlens():
    x, g, h = inputs(B=1)
    with pytest.raises(ValueError, match="cu_seqlens must not be mapped by vmap over flacompose::toy_chunk"):
        torch.vmap(lambda cu: toy(x, g, h, cu, 1.0))(torch.tensor([[0, 2, 5], [0, 3, 5]]))
    many = torch.stack([x, x / 2])
    cu = torch.tensor([0, 2, 5])
    y, _ = torch.vmap(lambda x: toy(x, g, h, cu, 1.0))(many)
    torch.testing.assert_close(y[1], scan(x / 2, g, h, cu, 1.0)[0])


# Autocast


@devices
@pytest.mark.parametrize(
    "through", [lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")]
)
def test_autocast(through, device):
    x, g, h = (t.requires_grad_() for t in inputs(dtype=torch.float32, device=device))
    seen = []

    def f(x, g, h):
        y, state = call(x, g, h)
        seen.append((y.dtype, state.dtype))
        return y, state

    with torch.autocast(device, dtype=torch.bfloat16):
        y, state = through(call)(x, g, h)
        torch.func.grad(loss(f))(x.detach(), g.detach(), h.detach())
        assert call(x.double(), g, h)[0].dtype is torch.float64
    assert (y.dtype, state.dtype) == seen[0] == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(state, scan(x.bfloat16(), g, h, None, 0.5)[1])
    (y.float().sum() + state.sum()).backward()
    assert x.grad.dtype is g.grad.dtype is h.grad.dtype is torch.float32


# Capture


@devices
def test_opcheck(device):
    x, g, h = inputs(device=device)
    x, g, h, dy, dh = (t.detach().requires_grad_() for t in (x, g, h, x.sin(), h.cos()))
    cu = torch.tensor([0, 2, 5], device=device)
    for op, args in (
        (toy, (x, g, h, None, 0.5)),
        (toy, (x, None, None, None, 0.5)),
        (toy, (x, g, h, cu, 0.5)),
        (toy_backward, (x, g, h, None, 0.5, dy, dh, [True, True, True])),
        (toy_backward, (x, g, h, None, 0.5, dy, dh, [False, True, False])),
        (toy_backward, (x, None, None, None, 0.5, dy, None, [True, False, False])),
    ):
        torch.library.opcheck(op, args)


@devices
@pytest.mark.parametrize("name", ["grad", "per_sample", "grad_of_vmap", "jvp", "hessian"])
def test_compiled_torch_func(name, device):
    if name == "hessian" and OLD_TORCH:
        pytest.skip("the compiler of PyTorch 2.11 does not trace torch.func.hessian")
    torch.compiler.reset()
    args = inputs(T=3, B=1, H=1, D=2, device=device)
    if name in ("per_sample", "grad_of_vmap"):
        args = tuple(torch.stack([x, x / 2]) for x in args)
    compiled = torch.compile(lambda *a: TRANSFORMS[name](loss(call))(*a), fullgraph=True, backend="aot_eager")
    expected = TRANSFORMS[name](loss(reference))(*args)
    torch.testing.assert_close(tree_leaves(compiled(*args)), tree_leaves(expected))


class Module(torch.nn.Module):
    def forward(self, x, g, h):
        y, state = call(x.sin(), g, h)
        y, state = call(y, None, state)
        return y.cos(), state


def nodes(program):
    return sum(node.target is toy for node in program.graph.nodes)


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


@pytest.mark.skipif(not TRITON, reason="needs Triton")
@pytest.mark.parametrize(
    "dtype,compiler,T,kernels",
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


@pytest.mark.skipif(not (CUDA and TRITON), reason="needs a CUDA device and Triton")
def test_triton_runs_in_eager():
    x, g, h = inputs(dtype=torch.float32, device="cuda")
    for cu in (None, torch.tensor([0, 2, 5], device="cuda")):
        for args in ((x, g, h, cu, 0.5), (x.transpose(0, 2), None, None, cu, 0.5)):
            torch.testing.assert_close(toy(*args), scan_triton(*args), rtol=0, atol=0)
            torch.testing.assert_close(toy(*args), scan(*args))


# DTensor


@pytest.mark.parametrize("compiled", [False, True])
def test_dtensor_and_fsdp(compiled):
    if compiled and OLD_TORCH:
        pytest.skip("compiled FSDP2 over gloo fails in PyTorch 2.11")
    code = """
        import sys, torch
        from ranks import on_two_ranks
        from test_define import call, grads, inputs, loss, toy, toy_backward

        def worker(mesh, compiled):
            from torch.distributed.fsdp import fully_shard
            from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

            args = inputs(B=4, H=4)
            run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
            layouts = ((0, 0, 0), 0), ((2, 2, 1), 2), ((None,) * 3, None), ((2, None, 1), 2)
            for dims, placed in layouts[3:] if compiled else layouts:  # the contract compiles the others
                places = [Replicate() if d is None else Shard(d) for d in dims]
                sharded = [distribute_tensor(x, mesh, [p]).requires_grad_() for x, p in zip(args, places)]
                y, state = run(*sharded)
                if not compiled:
                    assert y.placements == (Replicate() if placed is None else Shard(placed),), y.placements
                (y.sin().sum() + state.cos().sum()).backward()
                expected = grads(loss(call), *args)
                for x, e in zip(sharded, expected):
                    torch.testing.assert_close(x.grad.full_tensor(), e)
            if not compiled:  # joined rows: not by batch; absent inputs: no gradient to place
                x = distribute_tensor(args[0], mesh, [Shard(0)]).requires_grad_()
                cu = distribute_tensor(torch.tensor([0, 2, 5]), mesh, [Replicate()])
                y, _ = toy(x, None, None, cu, 0.5)
                assert y.placements != (Shard(0),)
                y.sum().backward()
                torch.testing.assert_close(y.full_tensor(), toy(args[0], None, None, torch.tensor([0, 2, 5]), 0.5)[0])

            class Layer(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.x, self.g = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

                def forward(self, u):
                    return call(self.x(u), -self.g(u).exp(), None)[0]

            torch.manual_seed(0)
            plain = Layer()
            torch.manual_seed(0)
            model = torch.nn.Sequential(Layer())
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
            if compiled:
                model = torch.compile(model, backend="aot_eager")
            u = torch.randn(2, 4, 2, 3)
            for m in (plain, model):
                m(u).square().sum().backward()
            for p, q in zip(plain.parameters(), model.parameters()):
                torch.testing.assert_close(q.grad.full_tensor(), p.grad)

        on_two_ranks(worker, sys.argv[1] == "True", start_method="fork")
    """
    run(code, compiled)
