"""PyTorch for the RG-LRU, for every device without a Triton kernel.

    a_t = exp(g_t)        g_t = -8 softplus(a_param) sigmoid(r_t)
    h_t = a_t h_{t-1} + s_t sigmoid(i_t) x_t        s_t = sqrt(1 - a_t^2)        o_t = h_t

It is the elementwise scan of the log decays `g` and the weighted inputs, and the chain rule around its
gradients. Everything is functional and differentiable to any order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, inf

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.elementwise.rg_lru.inputs import Inputs
from flacompose.ops._recurrences.elementwise.scan import eager as scan
from flacompose.ops._recurrences.elementwise.scan import inputs as of_scan
from flacompose.ops._tensors.dtype import state_dtype
from flacompose.ops._tensors.packed import without_tail


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, D], final_state [N, D])``."""
    o, final_state = scan.forward(gated(inputs))
    return o.to(inputs.x.dtype), final_state


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    wants, gates = call.wants, _Gates(call.inputs)
    wanted = [wants("x", "r", "i", "a_param"), wants("r", "a_param"), wants("initial_state")]
    scanned = of_scan.SIGNATURE.backward_call(*gates.scanned(), call.do, call.arriving.final_state, wanted)
    found = scan.backward(scanned)
    if wants("x", "i"):
        dx = found["x"] * gates.strength * gates.i
    if wants("r", "a_param"):
        of_strength = torch.where(gates.kept, gates.u * (2 * gates.g).exp() / gates.root, 0)
        dg = found["g"] - found["x"] * of_strength
    return call.select(
        x=lambda: dx,
        r=lambda: (
            dg * (gates.rate * (gates.r * (1 - gates.r)))
        ),  # in this order: a rate may be the largest number
        i=lambda: dx * gates.x * (1 - gates.i),
        a_param=lambda: (dg * gates.r).sum((0, 1)) * (-8 * gates.a_param.sigmoid()),
        initial_state=found.get("initial_state"),
    )


def gated(inputs: Inputs) -> of_scan.Inputs:
    """The arguments of the equivalent elementwise scan, in the dtype of states."""
    return _Gates(inputs).scanned()


class _Gates:
    """The decays of one call, and the strengths of inputs, in the dtype of states."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        dtype = state_dtype(inputs.x.dtype)
        # Contiguous: the bits of a sum over tokens, and of some functions, depend on strides.
        x, r, i, self.a_param = (y.to(dtype).contiguous() for y in inputs[:4])
        self.x, r, i = without_tail(inputs.cu_seqlens, x, r, i)
        self.r, self.i = r.sigmoid(), i.sigmoid()
        self.reset = inputs.reset
        if self.reset is not None and self.reset.shape[2] > 1:
            self.reset = self.reset.repeat_interleave(x.shape[2] // self.reset.shape[2], 2)
        self.u = self.i * self.x
        # Above the threshold softplus returns its argument, which is exact from 40 on even in float64.
        self.rate = (-8 * F.softplus(self.a_param, threshold=40)).clamp(min=torch.finfo(dtype).min)
        self.g = self.rate * self.r
        # The square root's derivative at 0 is infinite. The derivative of the whole by r or a_param tends to
        # 0 where the decay tends to 1, so a root of 0 gets no gradient.
        square = -torch.expm1(2 * self.g)  # 1 - a^2, exact where a is nearly 1
        self.kept = square > 0
        self.root = torch.where(self.kept, square, 1).sqrt()
        self.strength = torch.where(self.kept, self.root, 0)
        if self.reset is not None:
            self.g = torch.where(self.reset, -inf, self.g)
            self.strength = torch.where(self.reset, 1, self.strength)

    def scanned(self) -> of_scan.Inputs:
        """The arguments of the equivalent elementwise scan."""
        given = self.inputs
        return of_scan.Inputs(self.strength * self.u, self.g, given.initial_state, given.cu_seqlens)
