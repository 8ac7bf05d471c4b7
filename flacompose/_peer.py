"""Hints in errors for names and arguments that flash-linear-attention has and flacompose does not have.

A valid call costs only a comparison of its keywords.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import NoReturn, ParamSpec, TypeVar

import torch

from flacompose._torch import leave_uncompiled, report_from_trace

P = ParamSpec("P")
Result = TypeVar("Result")

_LAYOUT = "leave it out; states are [N, H, K, V] here, so pass and keep state.transpose(-1, -2)"
_HOST = "leave it out; no bounds are copied to the host"
_STATE = "pass state=, the second result of the call before"
_MEMORY = "leave it out; only the inputs are kept for the backward pass"
_SIZE = "leave it out; chunks have a fixed size"
_STRENGTH = "leave it out; gates of any strength are computed without it"
_KERNELS = "leave it out; it chooses among kernels of flash-linear-attention"
_PAIRS = "leave it out; the matrix of all pairs of tokens is never computed"
# The replacement of an argument, by its name, or by a function or class and the name.
KEYWORDS = {
    "state_v_first": _LAYOUT,
    "transpose_state_layout": _LAYOUT,
    "cu_seqlens_cpu": _HOST,
    "chunk_indices": _HOST,
    "offsets": "its name is cu_seqlens",
    "seq_idx": "pass the bounds of the sequences as cu_seqlens",
    "head_first": "leave it out; inputs are [B, T, H, D], so pass x.transpose(1, 2) of one that has its heads first",
    "reverse": "leave it out; to go backwards in time, pass x.flip(1) of each input and flip the output",
    "chunk_size": _SIZE,
    "checkpoint_level": _MEMORY,
    "disable_recompute": _MEMORY,
    "safe_gate": _STRENGTH,
    "lower_bound": _STRENGTH,
    "return_intermediate_states": "output_states of the recurrent form returns the states after the last few tokens",
    "use_graph": _KERNELS,
    "max_num_seqs": _KERNELS,
    "backend": _KERNELS,
    "cp_context": "flacompose.distributed.context_parallel makes a function or a module that shares out the tokens",
    "fused_recurrent_gated_delta_rule.gk": "leave it out if it is None; fused_recurrent_kda has decays of channels, "
    "and linear_recurrence has these beside g",
    "fused_recurrent_gated_delta_rule.gv": "leave it out if it is None; no delta rule here decays values",
    "fused_recurrent_rwkv4.state": "pass initial_state=tuple(state.squeeze(2).unbind(1))",
    "residual": "add it to the output",
    "past_key_values": _STATE,
    "cache": _STATE,
    "use_cache": "leave it out; the new state is always the second result",
    "output_attentions": _PAIRS,
    "ShortConvolution.mask": "pass lengths=, the number of tokens of each row, whose pads are at its end",
    "ShortConvolution.output_final_state": "leave it out; the new state is always the second result",
    "RMSNorm.bias": "leave it out; torch.nn.LayerNorm has a bias",
    "prenorm": "add the residual before the norm, and keep the sum",
    "residual_in_fp32": "add the residual before the norm, in the dtype that it shall have",
    "inputs_embeds": "pass input_ids; embeddings is a module of the model",
    "labels": "the loss is F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())",
    "logits_to_keep": "pass last_only=True for the logits of the last token alone",
    "output_hidden_states": "leave it out; a forward hook on model.layers sees them",
    "return_dict": "leave it out; the results are (logits, state)",
    "num_items_in_batch": "leave it out; no loss is computed",
    "do_sample": "leave it out; a temperature above 0 samples",
    "max_length": "pass max_new_tokens=, which does not count the prompt",
}
# Functions whose order of arguments differs: the last argument before the difference, and the next arguments in
# flash-linear-attention.
_OF_LAYERS = "hidden_states", "attention_mask, past_key_values, use_cache"
ORDERS = {
    "causal_conv1d": ("bias", "residual, initial_state"),
    "chunk_abc": ("s", "initial_state, output_final_state"),
    "chunk_comba": ("cu_seqlens", "cu_seqlens_cpu"),
    "chunk_gated_delta_rule": ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel, allow_neg_eigval"),
    "chunk_gdn2": ("use_gate_in_kernel", "cu_seqlens, cu_seqlens_cpu"),
    "chunk_gla": ("output_final_state", "state_v_first, cu_seqlens"),
    "chunk_gsa": ("output_final_state", "checkpoint_level, cu_seqlens"),
    "chunk_kda": ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel, allow_neg_eigval"),
    "chunk_simple_gla": ("output_final_state", "state_v_first, cu_seqlens"),
    "fused_recurrent_comba": ("k", "p, v"),
    "fused_recurrent_dplr_delta_rule": ("output_final_state", "reverse, cu_seqlens"),
    "fused_recurrent_gated_delta_rule": ("g", "gk, gv, beta, scale"),
    "fused_recurrent_gdn2": ("w", "A_log, dt_bias, scale"),
    "fused_recurrent_gla": ("output_final_state", "reverse, state_v_first, cu_seqlens"),
    "fused_recurrent_gsa": ("output_final_state", "reverse, cu_seqlens"),
    "fused_recurrent_kda": ("beta", "A_log, dt_bias, scale"),
    "fused_recurrent_lightning_attn": ("output_final_state", "reverse, cu_seqlens"),
    "fused_recurrent_linear_attn": ("output_final_state", "reverse, normalize, cu_seqlens"),
    "fused_recurrent_retention": ("output_final_state", "reverse, state_v_first, cu_seqlens"),
    "fused_recurrent_rwkv4": ("v", "state"),
    "fused_recurrent_rwkv6": ("output_final_state", "reverse, cu_seqlens"),
    "fused_recurrent_simple_gla": ("output_final_state", "reverse, state_v_first, cu_seqlens"),
    "StatefulLayer.forward": _OF_LAYERS,
    "ForgetGateLayer.forward": _OF_LAYERS,
    "RWKV7Attention.forward": _OF_LAYERS,
    "ShortConvolution.forward": ("x", "residual, mask, cache"),
    "ShortConvolution.__init__": ("activation", "backend, device, dtype"),
    "RMSNorm.__init__": ("elementwise_affine", "bias, eps"),
    "GatedRMSNorm.__init__": ("eps", "activation, device"),
    "RecurrentLM.forward": ("input_ids", "attention_mask, inputs_embeds, past_key_values"),
}
# The replacement of a function or a package.
_MAP = "use chunk_linear_attn of mapped keys and queries, as the layer {} does"
NAMES = {
    "chunk_gdn": "use chunk_gated_delta_rule, the same function",
    "fused_recurrent_gdn": "use fused_recurrent_gated_delta_rule, the same function",
    "chunk_lightnet": "use chunk_gla, as the layer LightNetAttention does",
    "fused_recurrent_lightnet": "use fused_recurrent_gla, as the layer LightNetAttention does",
    "fused_mul_recurrent_rwkv7": "use fused_recurrent_rwkv7(r, w, k, v, -kk, kk * a)",
    "fused_chunk_based": _MAP.format("BasedLinearAttention"),
    "parallel_based": _MAP.format("BasedLinearAttention"),
    "parallel_rebased": _MAP.format("ReBasedLinearAttention"),
    "causal_conv1d_fn": "use causal_conv1d, whose inputs are [B, T, D]",
    "causal_conv1d_update": "use causal_conv1d, which returns the new state",
    "mamba3_mimo": "its name is mamba3_mimo_combined",
    "FusedRMSNormGated": "its name is GatedRMSNorm, of flacompose.layers",
    "load_fla": "it is in flacompose.integrations.fla",
    "modules": "ShortConvolution, RMSNorm and GatedRMSNorm are in flacompose.layers; in the place of other fused "
    "norms, losses and multilayer perceptrons write PyTorch, which torch.compile fuses",
}


def explained(function: Callable[P, Result]) -> Callable[P, Result]:
    """`function`, whose errors name the replacement of an argument of flash-linear-attention."""
    name, parameters = function.__qualname__, list(signature(function).parameters)
    known = frozenset(parameters)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        if not known.issuperset(kwargs):
            _refuse(name, parameters, [keyword for keyword in kwargs if keyword not in known])
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if not torch.compiler.is_compiling():
                _compare_orders(error, name, parameters, len(args))
            raise

    # Dynamo must not compile this wrapper, or calls by keyword and by position would need different graphs. It
    # identifies functions by their code, so each wrapper has its own.
    code = call.__code__.replace(co_name=function.__name__)  # type: ignore[attr-defined]
    leave_uncompiled(code)
    call.__code__ = code  # type: ignore[attr-defined]
    return call


def _refuse(name: str, parameters: list[str], keywords: list[str]) -> None:
    """Raise an error if one of the unknown `keywords` is of flash-linear-attention or is misspelt.

    Without it the call itself would raise an error, whose message Dynamo would put last.
    """
    owner = name.split(".")[0]
    for keyword in keywords:
        words = KEYWORDS.get(f"{owner}.{keyword}", KEYWORDS.get(keyword))
        if words is None and (similar := _similar(keyword, parameters)):
            words = f"is it {similar}?"
        message = f"{name}() got an unexpected keyword argument '{keyword}'" + (f": {words}" if words else "")
        if torch.compiler.is_dynamo_compiling():
            report_from_trace("TypeError", message)
        if words:
            raise TypeError(message)


def _compare_orders(error: Exception, name: str, parameters: list[str], given: int) -> None:
    """Add the order in flash-linear-attention to an `error` about an argument that was given by position."""
    if name not in ORDERS or len(error.args) != 1:
        return
    last, theirs = ORDERS[name]
    same = parameters.index(last) + 1
    ours = parameters[same : same + theirs.count(",") + 1]
    message = str(error)
    of_one = (
        message.split(" ")[0] in parameters[same:given]
    )  # the argument itself, not a part such as "state[0]"
    if given > same and (of_one or "positional argument" in message):
        error.args = (
            f"{error}. Arguments after {last} are {theirs} in flash-linear-attention, and {', '.join(ours)} here: "
            "give them by keyword",
        )


def absent_from(module: str) -> Callable[[str], NoReturn]:
    """``__getattr__`` of a `module`, whose errors name the replacement of a name of flash-linear-attention."""

    def __getattr__(name: str) -> NoReturn:
        words = None if name.startswith("_") else _words(module, name)
        text = f"module {module!r} has no attribute {name!r}" + (f": {words}" if words else "")
        # `from module import name` shows the message of an ImportError, but not of an AttributeError, after
        # which it looks for a submodule.
        importing = sys._getframe(1).f_code.co_name == "_handle_fromlist"
        if words and importing and find_spec(f"{module}.{name}") is None:
            error = ImportError(text, name=module)
            vars(error)["name_from"] = name  # Python finds a similar name by it
            raise error
        raise AttributeError(text, name=name, obj=sys.modules[module])

    return __getattr__


def _similar(name: str, names: Iterable[str]) -> str:
    """The `names` that differ from `name` by a letter or two, as "a or b"."""
    apart = {x: (len(x) + len(name)) * (1 - SequenceMatcher(None, x, name).ratio()) for x in names}
    return " or ".join(x for x in sorted(apart, key=lambda x: apart[x]) if apart[x] < 2.5)


def _words(module: str, name: str) -> str | None:
    if name in NAMES:
        return NAMES[name]
    if re.search("(Config|Model|ForCausalLM)$", name):
        return (
            "all models are a RecurrentLM of flacompose.models, and load_fla of flacompose.integrations.fla makes one "
            "of a checkpoint"
        )
    for package in ("flacompose.ops", "flacompose.layers", "flacompose.models"):
        if name in import_module(package).__all__:
            return f"it is in {package}"
    if module == "flacompose":
        return None
    public = sys.modules[module].__all__
    chunk = re.sub("^(fused_chunk|parallel)_", "chunk_", name)
    if chunk != name and chunk in public:
        return f"use {chunk}, the same function"
    if similar := _similar(name, public):
        return f"is it {similar}?"
    return (
        "the page on coverage of the documentation lists what flash-linear-attention has, and what of it is here; the "
        "rest can be imported from fla in the same program"
    )
