"""Kernels are compiled ahead of their launches, those of the backward with the forward's; also without a GPU."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import get_ident
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

triton = pytest.importorskip("triton")

from helpers.launches import matrix_calls, other_calls  # noqa: E402
from helpers.operators import signature_of  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia import driver as nvidia  # noqa: E402
from triton.backends.nvidia.driver import CudaDriver  # noqa: E402
from triton.runtime import driver  # noqa: E402

from flacompose.ops._launch import build, operands, row_split, warm_up  # noqa: E402
from flacompose.ops._launch.launch import launch, launching_by  # noqa: E402
from flacompose.ops._recurrences.elementwise.scan import cuda as scan  # noqa: E402
from flacompose.ops._recurrences.elementwise.stabilizer import cuda as stabilizer  # noqa: E402
from flacompose.ops._recurrences.forms import on_cuda  # noqa: E402
from flacompose.ops._recurrences.matrix import cuda as matrix  # noqa: E402
from flacompose.ops._recurrences.matrix.channel_decay import cuda as channel_decay  # noqa: E402
from flacompose.ops._recurrences.matrix.channel_decay import slots  # noqa: E402
from flacompose.ops._recurrences.matrix.head_decay import cuda as head_decay  # noqa: E402
from flacompose.ops._recurrences.matrix.inputs import Inputs  # noqa: E402

RECURRENCES = head_decay, scan, channel_decay
LAUNCHING = *RECURRENCES, slots, stabilizer, row_split, operands
KERNELS = {x for module in LAUNCHING for x in vars(module).values() if isinstance(x, triton.JITFunction)}

each_recurrence = pytest.mark.parametrize("recurrence", RECURRENCES, ids=["scalar", "scan", "vector"])
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="takes the place of the driver")


class Hopper(CudaDriver):
    """Compiles for GPUs that are not there."""

    device = 0

    def __init__(self) -> None:
        pass

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class OnHopper(Tensor):
    is_cuda = True


Compiled = list[tuple[str, bool]]
"""Every kernel that is compiled, what other tests have compiled too, and whether ahead of its launch."""


def ahead(recurrence: ModuleType, form: str) -> warm_up.compile_ahead:
    """What compiles the kernels of a form, or of the "backward", ahead of their launches."""
    module = recurrence if recurrence in (scan, stabilizer) else matrix
    return on_cuda(module.__name__.rpartition(".")[0], form, signature_of(module)).implementation


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    kernels: Compiled = []
    pools: list[ThreadPoolExecutor] = []

    class Pool(warm_up._Pool):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            pools.append(self)

    def note(fn: Any, is_manual_warmup: bool, **_: Any) -> None:
        kernels.append((fn.name, is_manual_warmup and warm_up.launching.launcher is not None))

    def launch(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        """Does of a launch what needs no GPU."""
        if warm_up.launching.launcher is None:
            kernel.warmup(*args, grid=grid, **kwargs)
        else:
            warm_up.launching.launcher(kernel, grid, *args, **kwargs)

    for kernel in KERNELS:
        kernel.device_caches.clear()
    for recurrence in RECURRENCES:
        for form in ("chunk", "backward"):
            ahead(recurrence, form).ready.clear()
            ahead(recurrence, form).started.clear()
    if not torch.cuda.is_available():
        for module in LAUNCHING:
            monkeypatch.setattr(module, "launch", launch)
        monkeypatch.setattr(driver, "_active", Hopper())
        monkeypatch.setattr(triton.compiler.CompiledKernel, "run", None)
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    monkeypatch.setattr(warm_up, "_Pool", Pool)
    yield kernels
    for started in pools:  # what is left compiles for the driver that this test put in place
        started.shutdown(cancel_futures=True)
    for kernel in KERNELS:
        kernel.device_caches.clear()


def arguments(recurrence: ModuleType, requires_grad: bool = True) -> tuple[Any, ...]:
    q, k, v, g = torch.zeros(4, 1, 70, 2, 24, dtype=torch.float16)
    if torch.cuda.is_available():
        q, k, v, g = q.cuda(), k.cuda(), v.cuda(), g.cuda()
    else:
        q = q.as_subclass(OnHopper)
    q, k, v, g = (x.detach().requires_grad_(requires_grad) for x in (q, k, v, g))
    if recurrence is scan:
        return q[:, :, 0], g[:, :, 0], None, None
    if recurrence is head_decay:
        return (*Inputs(q, k, v, g[..., 0]),)
    return (*Inputs(q, k, v, gk=g),)


def gradients(recurrence: ModuleType) -> int:
    """The number of arguments that have gradients."""
    return len(signature_of(recurrence).differentiable)


def backward(
    recurrence: ModuleType, args: tuple[Any, ...], do: Tensor | None, d_final_state: Tensor | None = None
) -> None:
    """The gradients of all inputs."""
    mask = [x is not None for x in args[: gradients(recurrence)]]
    ahead(recurrence, "backward")(*args, do, d_final_state, mask)


@each_recurrence
def test_the_backward_with_the_forward(recurrence: ModuleType, compiled: Compiled) -> None:
    args = arguments(recurrence)
    o, _ = ahead(recurrence, "chunk")(*args)
    forward = len(compiled)
    assert forward > 1
    backward(recurrence, args, o)
    assert forward == len(compiled)
    backward(
        recurrence, args, None, o.new_zeros(1, 2, 24, 24) if recurrence is not scan else o.new_zeros(1, 24)
    )
    assert forward < len(compiled)
    assert all(ahead for _, ahead in compiled)


def test_an_op_of_three_results(compiled: Compiled) -> None:
    """Its backward, which starts with the forward, is given the gradient of the first and of no other."""
    x, g, *others = arguments(scan)
    assert len(ahead(stabilizer, "forward")(x, g, *others)) == 3
    assert [ahead for _, ahead in compiled] == [True]


@each_recurrence
def test_the_forward_alone_where_there_is_no_gradient(recurrence: ModuleType, compiled: Compiled) -> None:
    args = arguments(recurrence, requires_grad=False)
    o, _ = ahead(recurrence, "chunk")(*args)
    forward = len(compiled)
    backward(recurrence, args, o)
    assert 0 < forward < len(compiled)
    assert all(ahead for _, ahead in compiled)


def of_sums(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(1), x.sum((0, 1)), x.sum(-1), x.mT.sum(2), x.sum_to_size((3, 1))


def of_other_sums(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(), x.sum(()), x.sum(1, keepdim=True), x.bool().sum(0), x.int().sum(0)


@pytest.mark.parametrize("implementation", [of_sums, of_other_sums])
def test_sums_without_sympy(implementation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the shapes and dtypes of PyTorch's, and most of them do not import SymPy, as PyTorch's do."""
    x = torch.empty(4, 3, 5, dtype=torch.bfloat16, device="meta")
    expected = [(y.shape, y.stride(), y.dtype, y.device) for y in implementation(x)]
    if implementation is of_sums:
        monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
    with warm_up._compiling_in_threads() as mode:
        _, results = warm_up.compile_ahead(implementation, 1).start(mode, (x,))
    assert [(y.shape, y.stride(), y.dtype, y.device) for y in results] == expected


def test_which_ops_import_sympy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first calls of these wait for it: they compute more than sums, the last only from initial states.

    So do those of packed rows, and of KDA where two heads of values share one of keys.
    """
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
    importing = set()
    with torch.device("meta"), launching_by(lambda kernel, grid, /, *args, **kwargs: None):
        for call in (*matrix_calls(torch.bfloat16, 128, 128, 130), *other_calls(torch.bfloat16, 130)):
            if not call.op.endswith("_ends"):  # of rows that ranks share
                try:
                    with warm_up._SumsOfMetaTensors():
                        call()
                except ImportError:
                    importing.add(call.op)
    assert importing == {"selective_scan_forward", "selective_scan_backward", "slot_attention_backward"}


@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
@each_recurrence
def test_begun_while_a_graph_is_compiled(recurrence: ModuleType, dynamic: bool, compiled: Compiled) -> None:
    args = arguments(recurrence, requires_grad=False)
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes) as mode:
        mask = [True] * gradients(recurrence)
        fake = [mode.from_tensor(x, static_shapes=not dynamic) if isinstance(x, Tensor) else x for x in args]
        assert any(isinstance(n, torch.SymInt) for n in fake[0].shape) == dynamic
        ahead(recurrence, "chunk").begin(fake)
        ahead(recurrence, "backward").begin([*fake, fake[0], None, mask])
    begun = len(compiled)
    assert begun > 1
    assert not shapes.guards
    o, _ = ahead(recurrence, "chunk")(*args)
    ahead(recurrence, "backward")(*args, o, None, mask)
    assert begun == len(compiled)


def test_the_backward_after_an_evaluation(compiled: Compiled) -> None:
    ahead(channel_decay, "chunk")(*arguments(channel_decay, requires_grad=False))
    evaluation = len(compiled)
    args = arguments(channel_decay)
    o, _ = ahead(channel_decay, "chunk")(*args)
    forward = len(compiled)
    assert evaluation < forward
    backward(channel_decay, args, o)
    assert forward == len(compiled)


def test_once_a_kind(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Any] = []
    prepare = warm_up.compile_ahead.prepare
    monkeypatch.setattr(
        warm_up.compile_ahead, "prepare", lambda self, *a: (prepared.append(self), prepare(self, *a))
    )
    args = arguments(channel_decay)
    for _ in range(2):
        o, _ = ahead(channel_decay, "chunk")(*args)
        backward(channel_decay, args, o)
    assert prepared == [ahead(channel_decay, "chunk"), ahead(channel_decay, "backward")]
    assert not ahead(channel_decay, "backward").started
    ahead(channel_decay, "chunk").ready.clear()
    ahead(channel_decay, "chunk")(*args)  # with gradients for which all is there
    assert not ahead(channel_decay, "backward").started


@pytest.mark.parametrize("other", ["dtype", "head size", "absent gate", "option", "length"])
def test_another_kind(other: str, compiled: Compiled) -> None:
    """Of which other kernels are launched, and compiled ahead."""
    inputs = Inputs(*arguments(channel_decay))
    ahead(channel_decay, "chunk")(*inputs)
    before = len(compiled)
    q, k, v, gk = inputs.q, inputs.k, inputs.v, inputs.gk
    assert gk is not None
    if other == "dtype":
        new = {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16(), "gk": gk.bfloat16()}
    elif other == "head size":
        new = {name: getattr(inputs, name)[..., :9].contiguous() for name in ("q", "k", "gk")}
    elif other == "absent gate":
        new = {"gk": None}
    elif other == "length":  # with segments, between which other kernels go
        new = {name: getattr(inputs, name).repeat(1, 200, 1, 1) for name in ("q", "k", "v", "gk")}
    else:
        new = {"softmax": True}
    ahead(channel_decay, "chunk")(*inputs._replace(**new))
    assert before < len(compiled)
    assert all(ahead for _, ahead in compiled)


def test_another_number_of_sequences() -> None:
    """In a row of as many tokens, which is then cut into other segments."""
    assert warm_up._kind(torch.zeros(2)) != warm_up._kind(torch.zeros(1001))


def test_no_launch_compiles_another_length(compiled: Compiled) -> None:
    # Triton 3.6 would compile kernels of the backward again that are compiled and not loaded yet.
    args = arguments(scan, requires_grad=not hasattr(nvidia, "make_launcher"))
    ahead(scan, "chunk")(*args)
    before = len(compiled)
    ahead(scan, "chunk")(*(x if x is None else x[:, :9].contiguous() for x in args))
    assert before == len(compiled)


@no_gpu
def test_all_are_loaded_before_one_is_launched(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    launch = channel_decay.launch

    def noted_launch(*args: Any, **kwargs: Any) -> None:
        if warm_up.launching.launcher is None:
            events.append("launch")
        launch(*args, **kwargs)

    for module in (channel_decay, operands):
        monkeypatch.setattr(module, "launch", noted_launch)
    monkeypatch.setattr(triton.compiler.CompiledKernel, "run", property(lambda _: events.append("load")))
    ahead(channel_decay, "chunk")(*arguments(channel_decay))
    assert events == sorted(events, reverse=True)
    assert events.count("load") == events.count("launch")


@no_gpu
def test_each_device_has_its_own(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is loaded on one device does not run on another."""
    args = arguments(channel_decay)
    kind = warm_up.compile_ahead.kind
    monkeypatch.setattr(
        warm_up.compile_ahead,
        "kind",
        lambda self, _, args: kind(self, torch.device("cuda", Hopper.device), args),
    )
    ahead(channel_decay, "chunk")(*args)
    monkeypatch.setattr(Hopper, "device", 1)
    ahead(channel_decay, "chunk")(*args)
    caches = channel_decay.channel_decay_state_passing_kernel.device_caches
    first, second = ({*caches[device][0].values()} for device in (0, 1))
    assert len(first) == len(second) > 0 and not first & second
    assert all(ahead for _, ahead in compiled)


@no_gpu
@pytest.mark.parametrize("form", ["chunk", "backward"])
def test_a_failure_leaves_nothing(form: str, compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of the backward ahead of it: the next call of the forward starts both again."""
    args = arguments(channel_decay)
    with monkeypatch.context() as broken:
        broken.setattr(ahead(channel_decay, form), "implementation", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ahead(channel_decay, "chunk")(*args)
    o, _ = ahead(channel_decay, "chunk")(*args)
    forward = len(compiled)
    backward(channel_decay, args, o)
    assert forward == len(compiled)


@pytest.mark.parametrize("called", [False, True], ids=["of a kernel", "of a function that it calls"])
@pytest.mark.parametrize("failures", [1, 4, 5])
def test_parsing_that_fails_among_threads_is_tried_again(failures: int, called: bool) -> None:
    results = iter([SystemError("AST constructor recursion depth mismatch")] * failures + ["kernel"])

    def compile_kernel() -> str:
        result = next(results)
        if isinstance(result, SystemError):
            if called:
                raise RuntimeError("at 74:36") from result
            raise result
        return result

    with warm_up._Pool(1) as pool:
        future = pool.submit(compile_kernel)
        if failures < warm_up.ATTEMPTS:
            assert future.result() == "kernel"
        else:  # something else is wrong
            with pytest.raises(RuntimeError if called else SystemError):
                future.result()


def test_parsing_that_fails_beside_threads_is_tried_again() -> None:
    """In the thread that launches, which reads a kernel while others compile those before."""
    results = iter([SystemError("AST constructor recursion depth mismatch"), "kernel"])

    class Kernel:
        def warmup(self, x: Tensor, grid: tuple[int]) -> str:
            if isinstance(result := next(results), SystemError):
                raise result
            return result

    def implementation(x: Tensor) -> Tensor:
        launch(Kernel(), (1,), x)
        return x

    with warm_up._compiling_in_threads() as mode:
        kernels, _ = warm_up.compile_ahead(implementation, 1).start(mode, (torch.ones(2),))
    assert kernels == ["kernel"]


def test_one_thread_loads() -> None:
    loaded_in = []

    class Kernel:
        @property
        def run(self) -> None:
            loaded_in.append(get_ident())

    with ThreadPoolExecutor() as pool:
        futures = [future_kernel(pool.submit(Kernel)) for _ in range(9)]
        futures[1].result()
        failed = future_kernel(pool.submit(Kernel))
        futures[1].future = failed.future = None  # as since Triton 3.9
        warm_up._load([Kernel(), *futures, futures[0], failed])
    assert loaded_in == [get_ident()] * 10


def future_kernel(future: Future[Any]) -> triton.FutureKernel:
    *callbacks, _ = list(inspect.signature(triton.FutureKernel).parameters)
    return triton.FutureKernel(*[lambda _: None for _ in callbacks], future)


@pytest.mark.skipif(
    not torch.cuda.is_available() or not hasattr(nvidia, "make_launcher"), reason="a GPU and Triton 3.6"
)
def test_launchers_are_built_with_their_kernels(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which this thread finds when it loads the kernels."""
    built = []
    build_in = triton.runtime.build._build

    def noted(name: str, *others: Any) -> Any:
        if name == build.NAME:
            built.append(get_ident())
        return build_in(name, *others)

    monkeypatch.setattr(triton.runtime.build, "_build", noted)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ahead(scan, "chunk")(*arguments(scan))
    assert built and get_ident() not in built


def test_a_call_within_the_load_of_another(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a signal's handler that evaluates a model."""
    load = warm_up._load

    def interrupted(kernels: list[Any]) -> None:
        monkeypatch.setattr(warm_up, "_load", load)
        ahead(scan, "chunk")(*arguments(scan))
        load(kernels)

    monkeypatch.setattr(warm_up, "_load", interrupted)
    ahead(channel_decay, "chunk")(*arguments(channel_decay))
    assert all(ahead for _, ahead in compiled)
