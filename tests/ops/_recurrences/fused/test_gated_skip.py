"""The gated skip by itself: values, gradients together and alone, tokens in no sequence, and who computes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from contract.graphs import op_nodes, recorded
from helpers.ranks import BATCH, HEADS, check_sharded, on_two_ranks, placement
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close

from flacompose.ops._recurrences.fused.gated_skip.op import SIGNATURE, gated_skip, operator

Form = Callable[..., Tensor]
GIVEN = ["D w z", "D z", "w z", "D w", "z"]
LENGTH = 70  # of the sequence in a packed row, after which 3 tokens are in none
AXES = SIGNATURE.axes


def truth(y: Tensor, x: Tensor, D: Tensor | None, w: Tensor | None, z: Tensor | None) -> Tensor:
    o = y
    o = o if D is None else o + D * x
    o = o if w is None else o + w[..., None] * x
    return o if z is None else o * F.silu(z)


def draw(
    given: str, P: int, per_channel: bool, dtype: torch.dtype, device: torch.device, B: int = 2, T: int = 73
) -> dict[str, Tensor | None]:
    """`D` and `w` are float32 beside half precision, and `z` is a part of something wider."""
    sizes = {"B": B, "T": T, "H": 2, "P": P, "E": P if per_channel else 1}
    found: dict[str, Tensor | None] = dict.fromkeys("yxDwz")
    for name in ("y", "x", *given.split()):
        wide = torch.float32 if name in "Dw" and dtype.itemsize == 2 else dtype
        found[name] = torch.randn([sizes[axis] for axis in AXES[name].split()], device=device).to(wide)
    if found["z"] is not None:
        found["z"] = torch.cat([found["z"], found["z"]], -1).unflatten(-1, (2, P))[..., 0, :]
    return found


def assert_right(
    form: Form,
    dtype: torch.dtype,
    rtol: float,
    device: torch.device,
    given: str,
    P: int,
    per_channel: bool,
    packed: bool,
) -> None:
    """`form` gives the values and gradients of the equation, also one gradient alone, and zeros for tokens in no
    sequence, whatever these hold."""
    tensors = draw(given, P, per_channel, dtype, device, B=1 if packed else 2)
    do = torch.randn(tensors["x"].shape, device=device).to(dtype)
    last = LENGTH if packed else None
    cu_seqlens = torch.tensor([0, 4, 4, LENGTH], device=device) if packed else None
    if packed:
        for name, u in (*tensors.items(), ("do", do)):
            if u is not None and name != "D":
                u[:, LENGTH:] = torch.nan
    leaves = {name: u.requires_grad_() for name, u in tensors.items() if u is not None}
    wanted = [name for name in leaves if name != "x" or given != "z"]
    o = form(*tensors.values(), cu_seqlens)
    gradients = torch.autograd.grad(o, [leaves[name] for name in wanted], do)
    for name, gradient in zip(wanted, gradients, strict=True):
        alone = {n: u if n == name or u is None else u.detach() for n, u in tensors.items()}
        (again,) = torch.autograd.grad(form(*alone.values(), cu_seqlens), leaves[name], do)
        # On a GPU a gradient made alone has a specialization of its own, in which other products and sums are fused.
        assert (again - gradient).norm() <= (rtol * gradient.norm() if again.is_cuda else 0), name

    exact = {name: u.detach().double().requires_grad_() for name, u in leaves.items()}
    cut = {name: u if name == "D" else u[:, :last] for name, u in exact.items()}
    expected = truth(*(cut.get(name) for name in tensors))
    d_expected = torch.autograd.grad(expected, [exact[name] for name in wanted], do[:, :last].double())
    assert o.dtype == dtype and o.shape == tensors["x"].shape
    for name, found, right in zip(("o", *wanted), (o, *gradients), (expected, *d_expected), strict=True):
        if packed and name != "D":
            assert not found[:, LENGTH:].any(), name
            found, right = found[:, :LENGTH], right[:, :LENGTH]
        assert (found - right).norm() <= rtol * right.norm(), name


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("given", GIVEN)
def test_values_and_gradients(given: str, packed: bool, device: torch.device) -> None:
    """Results are rounded once to the dtype of their inputs."""
    P, per_channel = {"D w z": (80, False), "D z": (64, True)}.get(given, (6, False))
    for form in (operator, gated_skip):
        assert_right(form, torch.float64, 1e-14, device, given, P, per_channel, packed)
        assert_right(form, torch.float32, 1e-6, device, given, P, per_channel, packed)
        assert_right(form, torch.bfloat16, 2**-8, device, given, P, per_channel, packed)
        assert_right(form, torch.float16, 2**-11, device, given, P, per_channel, packed)


@pytest.mark.parametrize("given", ["D w z", "z"])
def test_the_operator_is_a_good_one(given: str, device: torch.device) -> None:
    """It has one result, of whose kind there is no other operator here."""
    for bounds in (None, [0, 3, 5]):
        tensors = draw(given, 6, False, torch.float32, device, B=1, T=5)
        leaves = [None if u is None else u.requires_grad_() for u in tensors.values()]
        cu_seqlens = None if bounds is None else torch.tensor(bounds, device=device)
        torch.library.opcheck(operator, (*leaves, cu_seqlens))


def test_transforms(device: torch.device) -> None:
    """Those of `torch.func` are those of the plain function, second derivatives too."""
    tensors = tuple(draw("D w z", 6, True, torch.float64, device, T=3).values())
    tangents = tuple(map(torch.randn_like, tensors))
    both = partial(operator, cu_seqlens=None), truth
    assert_close(*(torch.func.jvp(form, tensors, tangents) for form in both))
    assert_close(
        *(torch.func.vmap(form)(*(torch.stack(pair) for pair in zip(tensors, tangents))) for form in both)
    )
    assert torch.autograd.gradgradcheck(both[0], [u.requires_grad_() for u in tensors], fast_mode=True)


def check_ranks(mesh: DeviceMesh) -> None:
    tensors = draw("D w z", 6, False, torch.float64, torch.device("cpu"), T=3)
    for split in (BATCH, HEADS):
        placements = [placement(AXES[name].split(), split) for name in tensors]
        outputs = check_sharded(mesh, lambda *u: (operator(*u, None),), list(tensors.values()), placements)
        assert outputs == [placement(AXES["o"].split(), split)]


def test_distributed() -> None:
    on_two_ranks(check_ranks)


def test_graphs_get_plain_operations() -> None:
    """On CUDA a call is one operator. A graph, which a compiler fuses, has none."""

    class Module(torch.nn.Module):
        def forward(self, *args: Tensor) -> Tensor:
            return gated_skip(*args)

    tensors = draw("D w z", 6, False, torch.float32, torch.device("cpu"), T=3)
    with FakeTensorMode(allow_non_fake_inputs=True):  # no GPU is needed to trace for one
        args = tuple(torch.empty_like(u, device="cuda") for u in tensors.values())
        with recorded() as calls:
            gated_skip(*args)
            gated_skip(*args[:2])
        assert [op for op, *_ in calls] == [operator]
        assert op_nodes(torch.export.export(Module(), args).graph_module) == []
