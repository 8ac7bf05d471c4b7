"""Tiny models of transformers with random weights: one of every architecture that the integration knows."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

LAYERS = ["linear_attention", "full_attention"]
ATTENTION = dict(num_attention_heads=4, num_key_value_heads=2)
GATED_DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    num_hidden_layers=2, layer_types=LAYERS, head_dim=8, **ATTENTION,
)  # fmt: skip
EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
)
LATENT = dict(
    kv_lora_rank=16, qk_nope_head_dim=8, v_head_dim=8, moe_intermediate_size=16, num_hidden_layers=2,
    linear_num_heads=4, linear_head_dim=8, num_attention_heads=4, num_key_value_heads=4,
    mlp_layer_types=["dense", "sparse"],
)  # fmt: skip
MAMBA = dict(num_hidden_layers=2, state_size=8)
MAMBA2 = dict(
    mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8, mamba_chunk_size=32, num_hidden_layers=2,
    **ATTENTION,
)  # fmt: skip
SHORT = dict(num_hidden_layers=2, layer_types=["conv", "full_attention"], **ATTENTION)

# The class, and what its configuration has beside what all have.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "bailing_hybrid": (
        "BailingHybridForCausalLM",
        dict(
            num_hidden_layers=2, layer_types=LAYERS, mlp_layer_types=["dense", "sparse"], num_attention_heads=4,
            num_key_value_heads=4, head_dim=8, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
            moe_intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        ),
    ),
    "bamba": ("BambaForCausalLM", dict(MAMBA2, attn_layer_indices=[1])),
    "falcon_h1": ("FalconH1ForCausalLM", dict(MAMBA2, mamba_d_ssm=64)),
    "falcon_mamba": ("FalconMambaForCausalLM", MAMBA),
    "glm5_next": (
        "Glm5NextForConditionalGeneration",
        dict(
            LATENT, layer_types=["linear_attention", "deepseek_sparse_attention"], q_lora_rank=16, n_routed_experts=4,
            num_experts_per_tok=2, index_head_dim=8, index_n_heads=2, hc_mult=2,
        ),
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        dict(MAMBA2, layer_types=["mamba", "attention"], num_local_experts=4, shared_intermediate_size=16),
    ),
    "inkling": (
        "InklingForCausalLM",
        dict(
            ATTENTION, num_hidden_layers=2, head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=2,
            swa_head_dim=8, d_rel=4, rel_extent=16, layer_types=["hybrid_sliding", "hybrid"],
            mlp_layer_types=["dense", "sparse"], moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
            sliding_window_size=32, logits_mup_width_multiplier=1.0, route_scale=1.0,
        ),
    ),
    "inkling2": (
        "Inkling2ForCausalLM",
        dict(
            ATTENTION, num_hidden_layers=2, head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=2,
            swa_head_dim=8, d_rel=4, rel_extent=16, layer_types=["hybrid_sliding", "hybrid"], unpadded_vocab_size=64,
            moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, sliding_window_size=32,
            route_scale=1.0, n_layers_per_attn_res_block=2,
        ),
    ),
    "jamba": (
        "JambaForCausalLM",
        dict(
            ATTENTION, num_hidden_layers=2, mamba_d_state=8, mamba_dt_rank=4, num_experts=4, num_experts_per_tok=2,
            attn_layer_period=2, attn_layer_offset=1,
        ),
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        dict(LATENT, layer_types=LAYERS, qk_rope_head_dim=8, num_experts=4, num_experts_per_token=2),
    ),
    "lfm2": ("Lfm2ForCausalLM", dict(SHORT, block_auto_adjust_ff_dim=False)),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        dict(SHORT, num_dense_layers=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    ),
    "lfm3": ("Lfm3ForCausalLM", dict(SHORT, head_dim=8)),
    "mamba": ("MambaForCausalLM", MAMBA),
    "mamba2": ("Mamba2ForCausalLM", dict(MAMBA, num_heads=4, head_dim=16, n_groups=2, chunk_size=32)),
    "minimax": (
        "MiniMaxForCausalLM",
        dict(
            ATTENTION, num_hidden_layers=2, head_dim=8, num_local_experts=4, block_size=64,
            layer_types=LAYERS,
        ),
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        dict(
            ATTENTION, layers_block_type=["mamba", "attention", "moe", "mlp"], head_dim=8, ssm_state_size=8,
            mamba_num_heads=4, mamba_head_dim=16, n_groups=2, chunk_size=32, n_routed_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=16, moe_shared_expert_intermediate_size=16,
        ),
    ),
    "olmo_hybrid": ("OlmoHybridForCausalLM", GATED_DELTA),
    "qwen3_5": ("Qwen3_5ForCausalLM", GATED_DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", dict(GATED_DELTA, **EXPERTS)),
    "qwen3_next": ("Qwen3NextForCausalLM", dict(GATED_DELTA, **EXPERTS)),
    "qwen4_exp": (
        "Qwen4ExpForCausalLM",
        dict(
            GATED_DELTA, **EXPERTS, layer_types=["linear_attention", "qwen_sparse_attention"], hc_count=2, hc_lowrank=8,
            indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=64, indexer_compress_ratio=4,
        ),
    ),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        dict(ATTENTION, num_hidden_layers=2, block_types=["recurrent", "attention"], attention_window_size=32),
    ),
    "rwkv": ("RwkvForCausalLM", dict(num_hidden_layers=2, rescale_every=1)),
    # The cache rounds the sizes of all heads together to multiples of 64, and the layers do not. With a smaller
    # `norm_eps` the norm of each head would hide what it is divided by.
    "xlstm": (
        "xLSTMForCausalLM",
        dict(num_hidden_layers=2, num_heads=4, qk_dim_factor=2.0, v_dim_factor=2.0, norm_eps=0.1),
    ),
    "zamba": (
        "ZambaForCausalLM",
        dict(
            num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=3, mamba_d_state=8, mamba_dt_rank=4,
            layers_block_type=["mamba", "hybrid", "hybrid"], n_mamba_heads=2,
        ),
    ),
    "zaya": (
        "ZayaForCausalLM",
        dict(
            ATTENTION, num_hidden_layers=2, head_dim=8, layer_types=["hybrid_sliding", "hybrid"], sliding_window=32,
            moe_intermediate_size=16, num_experts=4, router_hidden_size=16, cca_time0=3, cca_time1=3,
        ),
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        dict(
            num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2, mamba_d_state=8, n_mamba_heads=4,
            mamba_ngroups=2, chunk_size=32, layers_block_type=["mamba", "hybrid"],
        ),
    ),
}  # fmt: skip

# One of each kind of recurrence.
DOORS = ["kimi_linear", "lfm2", "mamba2", "minimax", "qwen3_next"]

# Without an intermediate size of their own, since theirs is that of the recurrence.
OF_EXPANSION = ("falcon_mamba", "mamba", "mamba2")


def tiny(name: str) -> nn.Module:
    """The model of that name, in evaluation mode. Its weights are large enough for the recurrence to matter."""
    kind, options = TINY[name]
    modeling = import_module(f"transformers.models.{name}.modeling_{name}")
    model_class = getattr(modeling, kind)
    config_class = model_class.config_class
    options = dict(
        vocab_size=64, hidden_size=32, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **options,
    )  # fmt: skip
    if name not in OF_EXPANSION:
        options["intermediate_size"] = 48
    if "text_config" in config_class.sub_configs:
        text = config_class.sub_configs["text_config"]
        if kind.endswith("ForCausalLM"):
            config = text(**options)
        else:
            vision = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32)
            config = config_class(text_config=options, vision_config=vision)
    else:
        config = config_class(**options)
    model = model_class(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            # Biases of zeros and weights of ones would hide what is left out.
            if bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            if path.endswith("igate_preact.bias"):
                parameter.add_(8)  # xLSTM begins with exp(-10), with which its denominator would be exp(-m)
        if name == "rwkv":
            model.get_input_embeddings().weight.mul_(1e4)  # they would be next to zeros
    return model
