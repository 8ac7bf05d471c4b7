"""Simple GLA: both gates at once, and heads in groups that shards must not part."""

from __future__ import annotations

import pytest
import torch
from contract.accuracy import error
from contract.cases import NAMED
from contract.problems import draw
from helpers.ranks import check_sharded, on_two_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close

from flacompose.ops import chunk_simple_gla, fused_recurrent_simple_gla

FORMS = [chunk_simple_gla, fused_recurrent_simple_gla]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
BOTH = NAMED["fused_recurrent_simple_gla-g-g_gamma"]


@each_form
def test_gates_add(form, device: torch.device) -> None:
    """Both gates come in bfloat16, but their sum is float32."""
    tensors = draw(BOTH, device, torch.float32).tensors
    g, g_gamma = (tensors.pop(name).bfloat16() for name in ("g", "g_gamma"))
    actual = form(**tensors, g=g, g_gamma=g_gamma, output_final_state=True)
    expected = form(**tensors, g=g.float() + g_gamma.float(), output_final_state=True)
    for x, y in zip(actual, expected, strict=True):
        assert error(x, y) < 1e-5


def sharded(mesh: DeviceMesh) -> None:
    """All inputs sharded by heads on two ranks: the results of one, and still sharded where groups stay whole.

    A single head of queries and keys is that of every group, and whole on both ranks.
    """
    from torch.distributed.tensor import Replicate, Shard

    torch.manual_seed(0)
    names = ("q", "k", "v", "g")

    def run(*x: Tensor) -> tuple[Tensor, ...]:
        return chunk_simple_gla(**dict(zip(names, x, strict=True)))[:1]

    for H, HV, placement in ((2, 4, Shard(2)), (3, 3, Shard(2)), (3, 6, Replicate()), (1, 4, Shard(2))):
        size = {"B": 2, "T": 5, "H": H, "HV": HV, "K": 4, "V": 3}
        inputs = [torch.randn([size[axis] for axis in BOTH.axes[name]]) for name in names]
        assert check_sharded(mesh, run, inputs, [Shard(2)] * 4) == [placement], (H, HV)


def test_dtensor_never_parts_a_group() -> None:
    on_two_ranks(sharded)


@pytest.mark.parametrize("form", [chunk_simple_gla, fused_recurrent_simple_gla])
def test_a_later_key_that_overflows_with_an_earlier_query(form, device: torch.device) -> None:
    """The two never meet, so outputs and gradients are those of the recurrence, which are finite."""
    q, k, v, do = torch.ones(4, 1, 8, 1, 16, device=device)
    g = torch.zeros(1, 8, 1, device=device)
    q[:, :3], k[:, 7] = 1e20, 1e20
    do[:, 3:] = 0
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o, _ = form(*inputs, g, scale=1.0)
    assert_close(o[0, :3, 0, 0], torch.tensor([1.6e21, 3.2e21, 4.8e21], device=device))
    dq, dk, dv = torch.autograd.grad(o, inputs, do)
    assert_close(dq[0, :3, 0, 0], torch.tensor([16.0, 32.0, 48.0], device=device))
    assert_close(dk[0, :4, 0, 0], torch.tensor([4.8e21, 3.2e21, 1.6e21, 0], device=device))
    assert_close(dv[0, :4, 0, 0], torch.tensor([4.8e21, 3.2e21, 1.6e21, 0], device=device))
