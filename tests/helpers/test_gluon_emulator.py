"""What is wrong in a kernel shows when the emulator runs it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flacompose.ops._tiles.hopper import copy, make_visible, reinterpret, row_layout, store, wait_for_copies
from helpers.gluon_emulator import run


@gluon.jit
def product_kernel(
    a, b, out, WAITS: gl.constexpr, FENCES: gl.constexpr, KEEPS: gl.constexpr, LATER: gl.constexpr
):
    """``out = a @ b^T`` for 64 by 64 numbers in bfloat16, and what may be left out."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    a_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    b_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    copy(a_s, a, 64, 64)
    copy(b_s, b, 64, 64)
    commit_group()
    if WAITS:
        wait_for_copies(0)
    else:
        make_visible()
    a_s.store(a_s.load(L))
    if FENCES:
        make_visible()
    out_ = warpgroup_mma(a_s, b_s.permute((1, 0)), gl.zeros([64, 64], gl.float32, L), is_async=True)
    if not KEEPS:
        a_s.store(gl.zeros([64, 64], gl.bfloat16, L))
    store(out, warpgroup_mma_wait(LATER, [out_]), 64, 64)


def product(
    WAITS: bool = True, FENCES: bool = True, KEEPS: bool = True, LATER: int = 0
) -> tuple[Tensor, Tensor]:
    a, b = torch.randn(2, 64, 64, dtype=torch.bfloat16)
    out = torch.empty(64, 64)
    run(product_kernel, (1,), a, b, out, WAITS=WAITS, FENCES=FENCES, KEEPS=KEEPS, LATER=LATER)
    return out, a.float() @ b.float().T


def test_product() -> None:
    out, expected = product()
    assert torch.equal(out, expected)


def test_waits() -> None:
    assert product(WAITS=False)[0].isnan().all()
    assert product(LATER=1)[0].isnan().all()


def test_fences() -> None:
    with pytest.raises(RuntimeError, match="without a fence"):
        product(FENCES=False)


def test_operands_are_kept() -> None:
    with pytest.raises(RuntimeError, match="might read it"):
        product(KEEPS=False)


@gluon.jit
def layout_kernel(x, out, OTHER: gl.constexpr):
    """What is stored in one layout is read in another one."""
    L: gl.constexpr = row_layout(64, 4)
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    x_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], rows)
    copy(x_s, x, 64, 64)
    commit_group()
    wait_for_copies(0)
    store(out, reinterpret(x_s, gl.bfloat16, [64, 64], OTHER).load(L), 64, 64)


def test_layouts() -> None:
    x, out = torch.randn(64, 64, dtype=torch.bfloat16), torch.empty(64, 64, dtype=torch.bfloat16)
    run(layout_kernel, (1,), x, out, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    assert torch.equal(out, x)
    run(layout_kernel, (1,), x, out, gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    assert torch.equal(out, x.T)
    run(layout_kernel, (1,), x, out, gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16))
    # 16 bytes at a time change places in each row but every eighth.
    moved = [(out[i] != x[i]).any().item() for i in range(64)]
    assert moved == [i % 8 != 0 for i in range(64)]
    assert torch.equal(out[1].view(4, 2, 8).flip(1).flatten(), x[1])


@triton.jit
def sum_kernel(x, out, size, BLOCK: tl.constexpr, MASK: tl.constexpr, TO: tl.constexpr):
    """The sum of `x`, and the number of the program, in the element of `out` that is `TO` times this number."""
    i = tl.arange(0, BLOCK)
    sum_ = tl.sum(tl.where(i < size, tl.load(x + i, mask=i < size if MASK else None), 0.0), 0)
    tl.store(out + tl.program_id(0) * TO, sum_ + tl.program_id(0))


@pytest.mark.parametrize("BLOCK", [8, 16])
def test_accesses(BLOCK: int) -> None:
    x, out = torch.arange(6.0), torch.zeros(2)
    run(sum_kernel, (2,), x, out, 6, BLOCK, True, 1)
    assert out.tolist() == [15.0, 16.0]
    with pytest.raises(IndexError, match=f"elements 0 to {BLOCK - 1} of the 6"):
        run(sum_kernel, (2,), x, out, 6, BLOCK, False, 1)
    with pytest.raises(RuntimeError, match="different numbers in one element"):
        run(sum_kernel, (2,), x, out, 6, BLOCK, True, 0)


@triton.jit
def next_kernel(x):
    tl.store(x + tl.program_id(0) + 1, tl.load(x + tl.program_id(0)))


def test_programs_do_not_read_each_other() -> None:
    run(next_kernel, (1,), torch.zeros(2))
    with pytest.raises(RuntimeError, match="what another program"):
        run(next_kernel, (2,), torch.zeros(3))


@triton.jit
def masked_kernel(x, out):
    tl.store(out, tl.load(x, mask=False))


def test_what_is_masked_is_no_number() -> None:
    out = torch.zeros(1)
    run(masked_kernel, (1,), torch.zeros(1), out)
    assert out.isnan().all()
