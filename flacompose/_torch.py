"""The private names of PyTorch that this package uses, except for ``_inductor.py``, which is slow to import.

PyTorch may move or remove a private name in any release. The import of this package then fails here, with an error that
names the tested releases. No other file imports a private name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar

import torch

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

TESTED = "2.11 to 2.14"


@contextmanager
def private_names() -> Iterator[None]:
    """Turn a failed import of a private name into an error that names the tested releases."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"flacompose is tested with PyTorch {TESTED}, and PyTorch {torch.__version__} lacks a private name that it "
            f"uses ({error}); please install a tested release of PyTorch, or a newer flacompose"
        ) from error


with private_names():
    from torch import _C, _VF
    from torch._C import DispatchKey, DispatchKeySet
    from torch._C._dynamo import eval_frame
    from torch._functorch.autograd_function import custom_function_call as custom_function_call
    from torch._library.triton import triton_ops_to_kernels as triton_ops_to_kernels
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
    from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
    from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode
    from torch.autograd import forward_ad
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    _SKIPPED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    any_requires_grad = _C._any_requires_grad
    are_functorch_transforms_active = _C._are_functorch_transforms_active
    set_fwd_grad_enabled = forward_ad._set_fwd_grad_enabled
    unpack_dual = _VF._unpack_dual
    AutoDispatchBelowAutograd = _C._AutoDispatchBelowAutograd
    ExcludeDispatchKeyGuard = _C._ExcludeDispatchKeyGuard
    assert_async = torch._assert_async
    collectives = torch.ops._c10d_functional
    # Used where they are needed, and read here so that the import of this package fails in a release without them.
    _ = forward_ad._current_level, pytree._register_namedtuple, torch.compiler._is_exporting_flag
    if torch.distributed.is_available():
        collectives.all_gather_into_tensor, collectives.reduce_scatter_tensor, collectives.wait_tensor  # noqa: B018

AUTOCAST_KEYS = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)


def assume_constant_result(function: AnyFunction) -> AnyFunction:
    """Like `torch.compiler.assume_constant_result`, which would import all of Dynamo.

    A release of Dynamo that ignores the mark traces the function, and guards on its result.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def leave_uncompiled(code: CodeType) -> None:
    """Have Dynamo skip this code at the start of a compiled call, and compile the functions that it calls.

    Like `torch._dynamo.eval_frame.skip_code`, which would import all of Dynamo.
    """
    eval_frame.set_code_exec_strategy(code, _SKIPPED)


# For functions that catch errors of their callees and raise others: by their code, the names of the caught errors.
catching: dict[CodeType, tuple[str, ...]] = {}


def report_from_trace(error: str, message: str) -> None:
    """Have Dynamo, which traces this call, report an error that begins with these arguments."""
    with private_names():
        from torch._dynamo.comptime import comptime  # slow to import; already imported while Dynamo traces

    comptime(_report)


def _report(trace: Any) -> None:
    """Raise the error of untraceable code, unless a traced function will catch the reported error.

    Dynamo calls it with the locals of `report_from_trace`. With ``fullgraph=True`` the error reaches the user.
    Otherwise Dynamo runs the code untraced, which then raises its own error.
    """
    with private_names():
        from torch._dynamo.exc import Unsupported

    error, message = (
        _traced(trace.get_local(x)._i_will_not_complain_if_bc_breaks_VariableTracker())
        for x in ("error", "message")
    )
    frame = trace._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    while frame is not None:
        if error in catching.get(frame.f_code, ()):
            return
        frame = frame.parent
    raise Unsupported(f"{error}: {message}")


def _traced(x: Any) -> Any:
    """The value of Dynamo's variable `x`: a constant, the number behind a symbol, a tuple or a string."""
    x = x.realize()
    if x.is_python_constant():
        return x.as_python_constant()
    if hasattr(x, "sym_num"):
        try:
            return torch.fx.experimental.symbolic_shapes.guard_scalar(x.sym_num)
        except RuntimeError:  # it depends on data
            return x.sym_num
    if hasattr(x, "format_string"):
        named = {name: _traced(y) for name, y in x.sym_kwargs.items()}
        return x.format_string.format(*map(_traced, x.sym_args), **named)
    return tuple(map(_traced, x.items))


def is_exporting() -> bool:
    """Whether a program is being exported. In PyTorch 2.11 it is True in every traced graph."""
    return torch.compiler._is_exporting_flag


def forward_mode_is_on() -> bool:
    """Whether a level of forward-mode differentiation has been entered."""
    return forward_ad._current_level >= 0


def sdpa_is_plain() -> bool:
    """Whether `scaled_dot_product_attention` is PyTorch's own, and not replaced by one across ranks."""
    return torch.nn.functional.scaled_dot_product_attention is _C._nn.scaled_dot_product_attention


def reorders_tokens() -> bool:
    """Whether PyTorch's `context_parallel` would give ranks pieces of a row that are not contiguous."""
    with private_names():
        from torch.distributed.tensor.experimental._attention import _cp_options  # slow to import

    return bool(_cp_options.enable_load_balance)
