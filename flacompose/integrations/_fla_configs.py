"""Keys of flash-linear-attention's configs that have no effect on logits."""

from __future__ import annotations

WITHOUT_EFFECT = frozenset(
    # kernels, losses, initialization, and lengths that nothing depends on
    """
    fuse_norm fuse_swiglu fuse_cross_entropy fuse_linear_cross_entropy use_l2warp initializer_range
    max_position_embeddings use_cache
    A_init_range chunk_size conv_init dt_init_floor dt_init_scheme dt_max dt_min dt_scale rescale_prenorm_residual
    residual_in_fp32
    """.split()
    # optional parts of older versions: their parameters in a checkpoint tell whether a model has them
    + """
    conv_size gate_low_rank_dim norm_first share_conv_kernel use_gk use_glu use_gv use_norm use_output_gate
    use_output_norm use_short_conv
    """.split()
    # options that models of Comba pass to no layer: all have a correction and an inner decay
    + "correction_factor use_inner_decay use_output_correction".split()
    # keys that every config of transformers may hold, in its versions 4 and 5
    + """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention architectures
    auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size
    eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
    is_decoder is_encoder_decoder label2id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
    num_beams num_labels num_return_sequences output_attentions output_hidden_states output_scores pad_token_id
    prefix problem_type pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class
    top_k top_p torch_dtype torchscript transformers_version typical_p use_bfloat16
    """.split()
)
