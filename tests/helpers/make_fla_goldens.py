"""Write fla_goldens.json: logits of the language models of flash-linear-attention, by its own code.

    pip install --no-deps fla-core==0.6.0 flash-linear-attention==0.6.0 einops==0.8.2
    git clone https://github.com/state-spaces/mamba
    TRITON_INTERPRET=1 TORCHDYNAMO_DISABLE=1 python tests/helpers/make_fla_goldens.py mamba

The file was made on a CPU, with PyTorch 2.13.0, Triton 3.7.1 and transformers 5.17.0. There, Triton's interpreter runs
the peer's own kernels, all of them except those of FlashAttention, a package of its own for GPUs, whose function is
written below. The peer's recurrent kernels are used, token by token: three of its chunked ones do not run interpreted.
Its layer of RWKV7 takes the chunked one for 64 tokens or more whatever its mode is, so that it is replaced there.
Its layer of Mamba-3 refuses CPUs, and calls kernels of mamba-ssm: the references in the tests of mamba-ssm, which was
taken from its repository at commit e9594ce, stand in for them. Nothing else is replaced. Models of Mamba-2 have one
group, since its PyTorch code and its kernels pair several unlike.
"""

from __future__ import annotations

import json
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.fla_weights import tokens, weight

SIZES = {"vocab_size": 11, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 24}
HEADS = {"num_heads": 2}
RANKS = {"decay_low_rank_dim": 4, "gate_low_rank_dim": 6, "a_low_rank_dim": 5, "v_low_rank_dim": 3}
# By name: the model, and its config beside SIZES.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gla": ("GLA", HEADS),
    "gla varied": ("GLA", {"num_heads": 4, "num_kv_heads": 2, "expand_k": 1.0, "feature_map": "relu",
                   "use_short_conv": True, "conv_size": 3, "clamp_min": -0.1, "elementwise_affine": False,
                   "norm_eps": 0.1, "fuse_norm": False, "fuse_swiglu": False, "tie_word_embeddings": True,
                   "intermediate_size": None, "hidden_ratio": 1}),
    "gla ungated": ("GLA", HEADS | {"use_output_gate": False}),
    "gla hybrid": ("GLA", HEADS | {"attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True,
                   "rope_theta": 50.0}}),
    "gla wide": ("GLA", HEADS | {"expand_v": 20.0, "num_hidden_layers": 1}),  # 320 values
    "retnet": ("RetNet", HEADS),
    "retnet varied": ("RetNet", {"num_heads": 4, "num_kv_heads": 2, "expand_v": 1.0, "feature_map": "sigmoid",
                      "fuse_norm": False}),
    "retnet wide": ("RetNet", HEADS | {"expand_v": 20.0, "num_hidden_layers": 1}),
    "gsa": ("GSA", HEADS | {"num_slots": 8}),
    "gsa varied": ("GSA", HEADS | {"num_kv_heads": 1, "num_slots": 16, "use_short_conv": True, "feature_map": "t2r",
                   "norm_eps": 0.1} | {"gate_logit_normalizer": 2}),
    "gsa wide": ("GSA", HEADS | {"num_slots": 8, "exapnd_k": 20.0, "num_hidden_layers": 1}),  # 320 keys
    "rwkv6": ("RWKV6", HEADS | {"proj_low_rank_dim": 4, "gate_low_rank_dim": 6}),
    "rwkv6 varied": ("RWKV6", HEADS | {"proj_low_rank_dim": 4, "gate_low_rank_dim": 6, "expand_k": 1.0,
                     "norm_first": False, "norm_bias": False} | {"norm_eps": 0.1, "hidden_act": "relu",
                     "hidden_ratio": 0.75, "intermediate_size": None, "fuse_norm": False}),
    "rwkv6 wide": ("RWKV6", HEADS | {"proj_low_rank_dim": 4, "gate_low_rank_dim": 6, "expand_v": 20.0,
                   "num_hidden_layers": 1}),
    "rwkv7": ("RWKV7", {"head_dim": 16} | RANKS),
    "rwkv7 varied": ("RWKV7", {"head_dim": None, "num_heads": 4, "num_hidden_layers": 3} | RANKS | {"norm_first": False,
                     "norm_bias": False, "norm_eps": 0.1, "hidden_act": "relu", "hidden_ratio": 0.75,
                     "intermediate_size": None, "fuse_norm": False, "tie_word_embeddings": True}),
    "hgrn2": ("HGRN2", {"expand_ratio": 16}),
    "hgrn2 varied": ("HGRN2", {"num_heads": 4, "expand_ratio": None, "use_short_conv": True,
                     "use_lower_bound": False}),
    "hgrn2 hybrid": ("HGRN2", {"expand_ratio": 16, "num_hidden_layers": 3, "attn": {"layers": [1], "num_heads": 2}}),
    "delta_net": ("DeltaNet", HEADS),
    "delta_net varied": ("DeltaNet", HEADS | {"expand_v": 2.0, "use_gate": True, "use_short_conv": False,
                         "qk_norm": "sum", "qk_activation": "elu"}),
    "delta_net reversing": ("DeltaNet", HEADS | {"allow_neg_eigval": True, "use_beta": False}),
    "gated_deltanet": ("GatedDeltaNet", HEADS | {"head_dim": 8}),
    "gated_deltanet varied": ("GatedDeltaNet", HEADS | {"head_dim": 8, "num_v_heads": 4, "use_gate": False,
                              "use_short_conv": False, "allow_neg_eigval": True}),
    "gated_deltanet hybrid": ("GatedDeltaNet", HEADS | {"head_dim": 8, "output_gate_activation": "sigmoid",
                              "num_hidden_layers": 3} | {"attn": [{"layers": [0], "num_heads": 2, "window_size": 5},
                              {"layers": [2], "num_heads": 1}]}),
    "kda": ("KDA", HEADS | {"head_dim": 8}),
    "kda varied": ("KDA", HEADS | {"head_dim": 8, "num_v_heads": 4, "safe_gate": True, "lower_bound": -3.0,
                   "use_short_conv": False}),
    "mamba": ("Mamba", {"state_size": 8}),
    "mamba varied": ("Mamba", {"state_size": 5, "expand": 1.5, "dt_rank": 3, "conv_kernel": 3, "use_conv_bias": False,
                     "use_bias": True, "norm_eps": 0.1, "tie_word_embeddings": True}),
    "mamba2": ("Mamba2", {"state_size": 8, "head_dim": 16}),
    "mamba2 varied": ("Mamba2", {"state_size": 8, "head_dim": 8, "D_has_hdim": True, "norm_eps": 0.1, "use_bias": True,
                      "norm_before_gate": True, "dt_limit": (0.1, 0.9), "tie_word_embeddings": True}),
    "mamba3": ("Mamba3", {"state_size": 8, "head_dim": 16}),
    "mamba3 varied": ("Mamba3", {"state_size": 8, "head_dim": 8, "n_groups": 2, "rope_fraction": 1.0, "A_floor": 0.7,
                      "is_outproj_norm": True, "use_bias": True, "norm_eps": 0.1, "tie_word_embeddings": True}),
    "mamba3 mimo": ("Mamba3", {"state_size": 8, "head_dim": 16, "is_mimo": True, "mimo_rank": 2, "n_groups": 2,
                    "is_outproj_norm": True}),
    # As mamba-ssm has it, with several keys a token and an activation that the peer lacks.
    "mamba3 of mamba-ssm": ("Mamba3", {"state_size": 8, "head_dim": 16, "is_mimo": True, "mimo_rank": 3}
                            | {"A_activation": "heavy_tail"}),
    "comba": ("Comba", HEADS | {"head_dim": 8}),
    "comba varied": ("Comba", HEADS | {"head_dim": 8, "num_v_heads": 4, "expand_v": 1.0, "use_output_gate": False,
                     "use_short_conv": False} | {"use_output_correction": False, "use_inner_decay": False,
                     "correction_factor": 0.02}),
}  # fmt: skip
# More than 64 tokens, so that a chunk of flacompose ends among them; the logits of some are kept.
LENGTH, KEPT = 70, (0, 1, 33, 64, 69)
# A batch of two, the first row of which begins with pads.
PADDED, PADS = 12, 5


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """What FlashAttention computes, of ``[T, H, D]``, causal and in a window to the left."""
    assert causal
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    age = torch.arange(q.shape[0])[:, None] - torch.arange(q.shape[0])
    seen = (age >= 0) & (age <= window_size[0] if window_size[0] >= 0 else True)
    scores = torch.einsum("thd,shd->hts", q, k) / q.shape[2] ** 0.5
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return torch.stack([attend(*row, **options) for row in zip(q, k, v, strict=True)])


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> Tensor:
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    cut = cu_seqlens_q.tolist()
    rows = zip(cut, cut[1:], strict=False)
    return torch.cat([attend(q[a:b], k[a:b], v[a:b], **options) for a, b in rows])


def chunk_rwkv7(
    safe_gate: bool, lower_bound: float, chunk_size: int, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """The peer's recurrent kernel of RWKV7: what says how its chunked one computes has no use in it."""
    from fla.ops.rwkv7 import fused_recurrent_rwkv7

    return fused_recurrent_rwkv7(**arguments)


def mamba3_siso(ssm: dict[str, Any], chunk_size: int, return_final_states: bool, **inputs: Any) -> Tensor:
    """What mamba-ssm's kernel returns, from its reference token by token, which rounds less than that of chunks."""
    assert not return_final_states
    return torch.cat([ssm["mamba3_siso_step_ref"](**part)[0] for part in sequences(**inputs)], 1)


def mamba3_mimo(ssm: dict[str, Any], dtype: torch.dtype, return_state: bool, **inputs: Any) -> Tensor:
    """Likewise of several keys a token, each sequence as one chunk: the other reference pairs channels differently."""
    assert not return_state
    lower = "Q K V Q_bias K_bias MIMO_V MIMO_Z MIMO_Out Angles DT Trap Z".split()
    parts = []
    for part in sequences(**inputs):
        part |= {name.lower(): part.pop(name) for name in lower}
        sums, out = part.pop("ADT").cumsum(-1), part.pop("mimo_out")
        part["angles"] = (part["angles"].tanh() * part["dt"].mT.unsqueeze(-1) * torch.pi).cumsum(1)
        part |= {"dA_cs": sums, "dA_cs_rev": sums[..., -1:] - sums, "chunk_size": sums.shape[-1]}
        o, _, _ = ssm["mamba3_MIMO_chunk_ref"](**part, mimo_o=out, contract_mimo_out=out is not None)
        parts.append(o)
    return torch.cat(parts, 1)


def sequences(cu_seqlens: Tensor | None, **inputs: Any) -> list[dict[str, Any]]:
    """The inputs of Mamba-3 of each sequence."""
    axes = {"Q": 1, "K": 1, "V": 1, "Z": 1, "Angles": 1, "ADT": 2, "DT": 2, "Trap": 2}
    cut = [0, inputs["V"].shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    of_tokens = {name: axis for name, axis in axes.items() if inputs[name] is not None}
    return [
        inputs | {name: inputs[name].narrow(axis, a, b - a) for name, axis in of_tokens.items()}
        for a, b in zip(cut, cut[1:], strict=False)
    ]


def forward_of_mamba3(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None, past_key_values: None, **options: Any
) -> tuple[Tensor, None, None]:
    """The peer's `forward` of Mamba-3 without a cache, on any device."""
    from fla.layers.utils import repad_hidden_states, unpad_hidden_states

    B, T, _ = hidden_states.shape
    x, places, cu_seqlens = unpad_hidden_states(hidden_states, None, attention_mask, T)
    o, _ = self.cuda_kernels_forward(x, cu_seqlens=cu_seqlens)
    return repad_hidden_states(o, places, B, T), None, None


def of_mamba_ssm(folder: Path) -> dict[str, Any]:
    """What its module and its tests of Mamba-3 define. The kernels that these import are never called."""
    kernels = (
        "mamba3.mamba3_siso_combined mamba3.mamba3_siso_step mamba3.mamba3_mimo_rotary_step layernorm_gated"
    )
    stubs = {f"mamba_ssm.ops.triton.{name}": MagicMock() for name in kernels.split()}
    sys.modules.update(stubs)
    files = "mamba_ssm/modules/mamba3.py tests/ops/triton/test_mamba3_siso.py tests/ops/tilelang/test_mamba3_mimo.py"
    found = [runpy.run_path(str(folder / file)) for file in files.split()]
    for name in stubs:
        del sys.modules[name]
    return found[0] | found[1] | found[2]


def peer(mamba_ssm: Path) -> Any:
    """The peer's models, whose kernels take their first configuration: the interpreter can time none."""
    from triton.runtime import autotuner

    init = autotuner.Autotuner.__init__

    def first(self: Any, fn: Any, arg_names: Any, configs: list, *args: Any, **options: Any) -> None:
        init(self, fn, arg_names, configs[:1], *args, **options | {"do_bench": lambda *_, **__: 0.0})

    autotuner.Autotuner.__init__ = first
    import fla
    import fla.models
    from fla.layers import attn, mamba3, rwkv7

    rwkv7.chunk_rwkv7 = chunk_rwkv7
    attn.flash_attn_func, attn.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    ssm = of_mamba_ssm(mamba_ssm)
    mamba3.mamba3_siso_combined = partial(mamba3_siso, ssm)
    mamba3.mamba3_mimo_combined = partial(mamba3_mimo, ssm)
    mamba3.Mamba3.forward = forward_of_mamba3
    mamba3.heavy_tail = ssm["heavy_tail_activation"]
    assert fla.__version__ == "0.6.0", fla.__version__
    return fla.models


@torch.no_grad()
def golden(models: Any, kind: str, given: dict[str, Any]) -> dict[str, Any]:
    config = getattr(models, f"{kind}Config")(**SIZES | {"fuse_cross_entropy": False} | given)
    model = getattr(models, f"{kind}ForCausalLM")(config).eval()
    for module in model.modules():
        if hasattr(module, "mode"):
            module.mode = "fused_recurrent"
        if given.get("A_activation") == "heavy_tail" and hasattr(module, "A_floor"):
            module._compute_a = partial(heavy_tailed, module.A_floor)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    # A tied head is listed as well, and is the embeddings.
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    values = {name: weight(name, shape) for name, shape in shapes.items() if name not in tied}
    values |= dict.fromkeys(tied, next(x for name, x in values.items() if name.endswith("embeddings.weight")))
    model.load_state_dict(values)

    # All but what transformers adds by itself and has no effect.
    saved = {key: value for key, value in config.to_dict().items() if key not in ("id2label", "label2id")}
    logits = model(tokens(1, LENGTH, config.vocab_size), use_cache=False).logits[0, list(KEPT)]
    mask = torch.ones(2, PADDED, dtype=torch.int64)
    mask[0, :PADS] = 0
    ids = tokens(2, PADDED, config.vocab_size)
    padded = model(ids, attention_mask=mask, use_cache=False).logits[:, [PADS, -1]]
    return {"config": saved, "shapes": shapes, "logits": rounded(logits), "padded": rounded(padded)}


def heavy_tailed(floor: float, A: Tensor) -> Tensor:
    from fla.layers import mamba3

    return (-mamba3.heavy_tail(A)).clamp(max=-floor)


def rounded(x: Tensor) -> Any:
    return x.tolist() if x.ndim == 0 else [rounded(y) if y.ndim else float(f"{y.item():.7g}") for y in x]


def main() -> None:
    models = peer(Path(sys.argv[1]))
    goldens = {}
    for name, (kind, given) in CASES.items():
        goldens[name] = golden(models, kind, given)
        print(name, flush=True)
    lines = [
        f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in goldens.items()
    ]
    path = Path(__file__).with_name("fla_goldens.json")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
