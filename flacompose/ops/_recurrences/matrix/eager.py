"""The linear recurrence with a matrix state in PyTorch: one token, or a walk over chunks that all schemes share.

The walk takes cache blocks of a few chunks, one after the other, so that their tensors stay in the cache, and
passes the state from chunk to chunk. The backward goes forwards over the blocks, for the states, and then
backwards. It keeps the tensors of all blocks, which both passes need, and frees those of a block after its
gradients. A scheme's `CacheBlock` has the equations of one block's tokens.
"""

from __future__ import annotations

from torch import Tensor

from flacompose.ops._operators.signature import BackwardCall, Gradients
from flacompose.ops._recurrences.chunks import Chunks, StatePassing
from flacompose.ops._recurrences.matrix.cache_block import CacheBlock
from flacompose.ops._recurrences.matrix.channel_decay.eager import ChannelDecay
from flacompose.ops._recurrences.matrix.delta_rule.eager import DeltaRule
from flacompose.ops._recurrences.matrix.head_decay.eager import HeadDecay
from flacompose.ops._recurrences.matrix.inputs import NORM_EPS, SIGNATURE, Inputs, scheme
from flacompose.ops._recurrences.matrix.low_rank.eager import LowRank
from flacompose.ops._recurrences.matrix.token import token
from flacompose.ops._tensors.dtype import upcast

SCHEMES: dict[str, type[CacheBlock]] = {
    "channel_decay": ChannelDecay,
    "delta_rule": DeltaRule,
    "head_decay": HeadDecay,
    "low_rank": LowRank,
}


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [B, T, HV, V], final_state [N, HV, K, V])``."""
    rule = SCHEMES[scheme(inputs)]
    if inputs.q.shape[1] == 1 and inputs.cu_seqlens is None:
        return token(**inputs._asdict())
    chunks, cut = _cut(inputs)
    passing = StatePassing(chunks, _start(chunks, inputs, inputs.initial_state))
    dtype = chunks.dtype if inputs.full_precision else inputs.v.dtype
    outputs = []
    for piece in cut:
        block = rule(inputs, piece)
        outputs.append(block.compute_outputs(*block.compute_states(passing)).flatten(1, 2).to(dtype))
    # `end` may be a view. A caller would be compiled once for states that are views, and once for others.
    return chunks.join(*outputs), passing.end().clone()


def backward(call: BackwardCall[Inputs]) -> Gradients:
    """The gradients that `call` wants."""
    inputs, wants, do = call.inputs, call.wants, call.do
    rule, (chunks, cut) = SCHEMES[scheme(inputs)], _cut(inputs)
    blocks = [rule(inputs, piece) for piece in cut]
    states: list[tuple[Tensor, ...]] = [()] * len(blocks)
    if wants(*rule.of_states):
        forwards = StatePassing(chunks, _start(chunks, inputs, inputs.initial_state))
        states = [block.compute_states(forwards) for block in blocks]
    backwards = StatePassing(chunks, _start(chunks, inputs, call.arriving.final_state), reverse=True)
    parts: dict[str, list[Tensor]] = {}
    while blocks:
        block = blocks.pop()  # so that its tensors are freed after its gradients
        for name, dx in block.compute_gradients(wants, block.split(do), states.pop(), backwards).items():
            parts.setdefault(name, []).append(dx.flatten(1, 2))
    made: Gradients = {}
    for name, dx_parts in parts.items():
        dx = chunks.join(*dx_parts[::-1])
        of_tokens = "T" in SIGNATURE.axes[name].split()  # the gradient of a parameter is a sum over tokens
        made[name] = (dx if of_tokens else dx.sum((0, 1))).reshape(getattr(inputs, name).shape)
    return call.select(**made, initial_state=lambda: backwards.end().clone())


def _cut(inputs: Inputs) -> tuple[Chunks, list[Chunks]]:
    """The chunks of all tokens, and of each cache block. The largest tensor is of pairs, of vectors or of states."""
    chunks, K, (B, _, HV, V) = Chunks(inputs.q, inputs.cu_seqlens), inputs.k.shape[-1], inputs.v.shape
    return chunks, chunks.cache_blocks(B * HV * max(chunks.size * max(chunks.size, K, V), K * V))


def _start(chunks: Chunks, inputs: Inputs, x: Tensor | None) -> Tensor:
    """The state, or backwards its gradient, that state passing starts from, ``[N, HV, K, V]``; zeros for None."""
    k, v = inputs.k, inputs.v
    if x is None:
        return v.new_zeros(chunks.N, v.shape[2], k.shape[-1], v.shape[-1], dtype=chunks.dtype)
    return x.to(chunks.dtype)


def update(inputs: Inputs, normalize: int) -> tuple[Tensor, Tensor]:
    """The form "update": `forward`, after dividing queries and keys by their norms if `normalize`."""
    if normalize:
        inputs = inputs._replace(q=normalized(inputs.q), k=normalized(inputs.k))
    return forward(inputs)


def normalized(x: Tensor) -> Tensor:
    """``x [..., K]`` divided by the root of `NORM_EPS` and the sum of its squares, in the dtype of `x`."""
    wide = upcast(x)
    return (wide * (wide.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()).to(x.dtype)
