"""The classes, names and parameters of transformers' modeling files on which the integration relies.

All tested versions have them. `difference` compares an untested version with them: the classes whose forwards are
replaced, the names that these forwards use, and the parameters of replaced functions. It detects names that are
renamed, moved or added. It does not detect a function that has changed under the same names.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any

CONVOLUTION = "causal_conv1d_fn causal_conv1d_update"
GATED_DELTA = f"{CONVOLUTION} torch_chunk_gated_delta_rule torch_recurrent_gated_delta_rule"
KDA = f"{CONVOLUTION} chunk_kimi_delta_attention recurrent_kimi_delta_attention"
SCAN = (
    f"{CONVOLUTION} mamba_selective_scan mamba_selective_state_update D activation conv1d conv_kernel_size in_proj "
    "out_proj ssm_state_size time_step_rank update_conv_state update_recurrent_state"
)
PROJECTED, NORMED = "x_proj dt_proj", "x_proj dt_proj b_layernorm c_layernorm dt_layernorm"
SSD = (
    f"{CONVOLUTION} mamba2_chunk_scan mamba2_selective_state_update mamba2_split_conv1d_scan_combined "
    "time_step_limit"
)
QKV, MLP = "q_proj k_proj v_proj", "gate_proj up_proj"
MASKED = "config create_causal_mask layer_types"
# For each file, the classes whose forwards are replaced, and the names that these forwards must use: replaced
# functions, attributes that a replacement changes or reads, and modules to which it passes bounds.
LAYERS: Mapping[str, Mapping[str, str]] = {
    "bailing_hybrid": {"BailingHybridDeltaAttention": KDA},
    "bamba": {"BambaMixer": SSD, "BambaModel": ""},
    "falcon_h1": {
        "FalconH1Mixer": f"{SSD} D activation conv1d conv_dim dt_bias head_dim in_proj intermediate_size "
        "mamba_rms_norm mup_vector n_groups norm num_heads out_proj ssm_in_multiplier ssm_state_size",
    },
    "falcon_mamba": {
        "FalconMambaMixer": f"{SCAN} {NORMED} mamba_inner_fn", "FalconMambaBlock": "mixer",
        "FalconMambaModel": "layers", "FalconMambaForCausalLM": "backbone",
    },
    "glm5_next": {"Glm5NextTextLinearAttention": KDA, "Glm5NextTextAttention": ""},
    "granitemoehybrid": {"GraniteMoeHybridMambaLayer": SSD},
    "inkling": {
        "InklingShortConvolution": CONVOLUTION, "InklingAttention": "k_sconv v_sconv",
        "InklingDecoderLayer": "attn_sconv mlp_sconv",
    },
    "inkling2": {
        "Inkling2ShortConvolution": CONVOLUTION, "Inkling2DynamicShortConvolution": "",
        "Inkling2FullAttention": "", "Inkling2SlidingAttention": "",
        "Inkling2FullDecoderLayer": "post_attention_convolution post_mlp_convolution",
        "Inkling2SlidingDecoderLayer": "post_attention_convolution post_mlp_convolution",
    },
    "jamba": {"JambaMambaMixer": f"{SCAN} {NORMED}", "JambaMambaDecoderLayer": "mamba"},
    "kimi_linear": {
        "KimiLinearDeltaAttention": KDA, "KimiLinearModel": MASKED,
        "KimiLinearAttention": "q_proj q_a_proj kv_a_proj_with_mqa", "KimiLinearMLP": MLP,
    },
    "lfm2": {"Lfm2ShortConv": CONVOLUTION, "Lfm2DecoderLayer": "conv"},
    "lfm2_moe": {"Lfm2MoeShortConv": CONVOLUTION, "Lfm2MoeDecoderLayer": "conv"},
    "lfm3": {"Lfm3ShortConv": CONVOLUTION},
    "mamba": {
        "MambaMixer": f"{SCAN} {PROJECTED} mamba_inner_fn", "MambaBlock": "mixer", "MambaModel": "layers",
        "MambaForCausalLM": "backbone",
    },
    "mamba2": {"Mamba2Mixer": SSD, "Mamba2ForCausalLM": "backbone"},
    "minimax": {
        "MiniMaxLightningAttention": "act_fn apply_mask_to_padding_states head_dim layer_idx norm num_attention_heads "
        "out_proj output_gate qkv_proj set_linear_cache slope_rate",
    },
    "nemotron_h": {"NemotronHMamba2Mixer": SSD},
    "olmo_hybrid": {"OlmoHybridGatedDeltaNet": GATED_DELTA, "OlmoHybridModel": MASKED},
    "qwen3_5": {
        "Qwen3_5GatedDeltaNet": GATED_DELTA, "Qwen3_5TextModel": MASKED, "Qwen3_5Attention": QKV,
        "Qwen3_5MLP": MLP,
    },
    "qwen3_5_moe": {"Qwen3_5MoeGatedDeltaNet": GATED_DELTA, "Qwen3_5MoeTextModel": MASKED},
    "qwen3_next": {
        "Qwen3NextGatedDeltaNet": GATED_DELTA, "Qwen3NextModel": MASKED, "Qwen3NextAttention": QKV,
        "Qwen3NextMLP": MLP,
    },
    "qwen4_exp": {"Qwen4ExpTextGatedDeltaNet": GATED_DELTA},
    "recurrent_gemma": {
        "RecurrentGemmaRecurrentBlock": "act_fn conv_1d linear_out linear_x linear_y rg_lru",
        "RecurrentGemmaForCausalLM": "model", "RecurrentGemmaModel": "layers",
    },
    "rwkv": {
        "RwkvSelfAttention": "extract_key_value layer_id output time_decay time_first",
        "RwkvFeedForward": "layer_id time_shift", "RwkvBlock": "attention feed_forward", "RwkvModel": "blocks",
        "RwkvForCausalLM": "rwkv",
    },
    "xlstm": {
        "xLSTMLayer": "mlstm_backend", "xLSTMBlock": "mlstm_layer", "xLSTMModel": "blocks config embeddings",
        "xLSTMForCausalLM": "config",
    },
    "zamba": {"ZambaMambaMixer": f"{SCAN} dt_proj_bias dt_proj_weight n_mamba_heads x_proj_weight"},
    "zamba2": {"Zamba2MambaMixer": SSD},
    "zaya": {
        "ZayaCCAProjection": "conv_kernel_size conv_qk_depthwise conv_qk_grouped v_proj_delayed",
        "ZayaAttention": "qkv_proj",
    },
}  # fmt: skip

# The names that forwards of layers use besides replaced functions. A forward with a recurrence of its own uses more.
NAMES = """
    A_log D F a_proj activation allow_neg_eigval append apply_mask_to_padding_states b_layernorm b_proj bias
    c_layernorm cat chunk chunk_size config contiguous conv conv1d conv_dim conv_idx conv_kernel_size
    conv_states dt_bias dt_layernorm dt_proj dt_proj_bias dt_proj_weight dtype exp expand
    fix_query_key_value_ordering float float32 forget_gate functional g_a_proj g_b_proj g_proj get
    get_conv_state get_recurrent_state has_previous_state hasattr head_dim head_k_dim head_v_dim in_proj
    in_proj_a in_proj_b in_proj_ba in_proj_qkv in_proj_qkvz in_proj_z intermediate_size is_recording_past k_proj
    key_dim layer_idx layers mamba_head_dim mamba_rms_norm math mup_vector n_groups n_mamba_heads nn norm
    num_heads num_k_heads num_v_heads o_norm o_proj out_proj pop q_proj qkv_dim range record_past
    recurrent_states repeat_interleave reshape rms_eps shape sigmoid silu softplus split sqrt squeeze
    ssm_in_multiplier ssm_state_size stack time_step_limit time_step_rank to torch training transpose unsqueeze
    update_conv_state update_recurrent_state use_associative_scan use_bias use_conv_bias use_mambapy v_proj
    value_dim variance_epsilon view weight x_proj x_proj_weight
"""
# The names in the forward of MiniMax's layer, which is replaced completely.
MINIMAX_NAMES = """
    F act_fn append apply_mask_to_padding_states block_size cat device diagonal_decay dtype exp get_linear_cache
    head_dim key_decay layer_idx matmul min norm num_attention_heads out_proj output_gate qkv_proj query_decay
    range reshape set_linear_cache shape sigmoid slope_rate split to torch transpose zeros
"""
XLSTM_NAMES = """
    ValueError fgate_preact gate_soft_cap igate_preact ifgate_preact k multihead_norm ndim ogate_act_fn ogate_preact q
    qk_dim qkv_opreact soft_cap tensor_split v v_dim weight_mode
"""

# The names that the forwards of some layers use, by class.
OF_ONE = {
    "MiniMaxLightningAttention": MINIMAX_NAMES,
    "RecurrentGemmaRecurrentBlock": f"{NAMES} conv1d_state conv1d_width device hidden_size lru_width pad sum zeros",
    "RwkvSelfAttention": "rwkv_linear_attention tuple",
    "ZayaCCAProjection": f"{NAMES} hidden_size mean new_zeros num_key_value_groups pad repeat_kv v_proj_current",
    "xLSTMLayer": f"{NAMES} {XLSTM_NAMES}",
}

# The parameters of replaced forwards and functions. If a release renames a parameter, and still accepts the old name,
# the new name is not in the list.
FORWARD = """
    self hidden hidden_states input_states x state position_ids cache past_key_values cache_params cache_offset
    use_cache attention_mask conv_mask seq_idx dynamic_input position_embeddings kwargs input_ids inputs_embeds labels
    logits_to_keep output_attentions output_hidden_states return_dict prev_topk_indices relative_distance
    key_hidden_states value_hidden_states block_states
"""
PARAMETERS: Mapping[str, str] = {
    "causal_conv1d_fn": "hidden_states weight bias activation kwargs",
    "causal_conv1d_update": "hidden_states conv_state weight bias activation",
    "chunk_kimi_delta_attention": (
        "query key value g beta chunk_size initial_state output_final_state use_qk_l2norm_in_kernel kwargs"
    ),
    "recurrent_kimi_delta_attention": (
        "query key value g beta initial_state output_final_state use_qk_l2norm_in_kernel kwargs"
    ),
    "mamba2_chunk_scan": (
        "hidden_states dt A B C chunk_size D dt_bias initial_states dt_softplus dt_limit return_final_states "
        "kwargs"
    ),
    "mamba2_selective_state_update": "state hidden_states dt A B C D dt_bias dt_softplus z kwargs",
    "mamba2_split_conv1d_scan_combined": (
        "zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size initial_states dt_limit return_final_states "
        "activation rmsnorm_weight rmsnorm_eps outproj_weight outproj_bias headdim ngroups norm_before_gate "
        "kwargs"
    ),
    "mamba_selective_scan": (
        "hidden_states dt A B C D z delta_bias delta_softplus return_last_state use_mambapy "
        "use_associative_scan kwargs"
    ),
    "mamba_selective_state_update": "state hidden_states dt A B C D dt_bias dt_softplus z kwargs",
    "mamba_inner_fn": (
        "xz conv1d_weight conv1d_bias x_proj_weight delta_proj_weight out_proj_weight out_proj_bias A B C D "
        "delta_bias delta_softplus b_rms_weight c_rms_weight dt_rms_weight b_c_dt_rms_eps kwargs"
    ),
    "torch_chunk_gated_delta_rule": (
        "query key value g beta chunk_size initial_state output_final_state use_qk_l2norm_in_kernel kwargs"
    ),
    "torch_recurrent_gated_delta_rule": (
        "query key value g beta initial_state output_final_state use_qk_l2norm_in_kernel kwargs"
    ),
}


def difference(module: ModuleType, layers: Mapping[str, bool], functions: Mapping[str, Any]) -> str:
    """The first difference between a modeling file and the tested versions; an empty string if there is none.

    Args:
        module: The modeling file.
        layers: The classes whose forwards are replaced. The value is True for a layer with a recurrence or convolution,
            and False for a module around one.
        functions: The replaced functions, by name.
    """
    return next(_differences(module, layers, functions), "")


def _differences(
    module: ModuleType, layers: Mapping[str, bool], functions: Mapping[str, Any]
) -> Iterator[str]:
    expected = LAYERS[module.__name__.split(".")[-2]]
    for name in expected:
        if name not in layers:
            yield f"no class {name} with a forward that calls what is replaced"
    for name, is_layer in layers.items():
        if name not in expected:
            yield f"a new class {name}, whose forward calls what is replaced"
            continue
        forward: Any = inspect.unwrap(vars(vars(module)[name])["forward"])
        used = set(_names(forward.__code__))
        for missing in set(expected[name].split()) - used:
            yield f"{name}.forward does not use {missing!r}"
        if is_layer:
            known = OF_ONE.get(name, NAMES).split()
            for new in sorted(used - {*known, *expected[name].split()}):
                yield f"{name}.forward uses {new!r}"
        for new in inspect.signature(forward).parameters.keys() - set(FORWARD.split()):
            yield f"{name}.forward takes {new!r}"
    for name, function in functions.items():
        parameters = list(inspect.signature(function).parameters)
        if parameters != PARAMETERS[name].split():
            yield f"{name} takes ({', '.join(parameters)}) and not ({', '.join(PARAMETERS[name].split())})"


def _names(code: CodeType) -> Iterator[str]:
    """The globals and attributes that a function and its inner functions use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
