"""What a GGUF file calls what config.json would say, for errors about its metadata."""

import re

from paceline.errors import CheckpointError

_KEYS = {
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "top_k_experts": "expert_used_count",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "partial_rotary_factor": "rope.dimension_count",
    "rope_scaling": "rope.scaling.type",
    "rope_theta": "rope.freq_base",
    "backbone_hidden_size": "embedding_length_out",
    "centroid_intermediate_top_k": "centroid_top_k",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_value_head_dim": "ssm.inner_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_head": "ssm.inner_size",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_num_heads": "ssm.time_step_rank",
    "mamba_head_dim": "ssm.inner_size",
    "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "conv_kernel": "ssm.conv_kernel",
    "layers_block_type": "feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "conv_L_cache": "shortconv.l_cache",
    "num_dense_layers": "leading_dense_block_count",
}
_TERMS = re.compile(rf"\b({'|'.join(_KEYS)})\b")


def in_its_terms(error: CheckpointError, architecture: str) -> CheckpointError:
    """The error with the names that a file of this architecture has."""
    return CheckpointError(_TERMS.sub(lambda found: f"{architecture}.{_KEYS[found[0]]}", str(error)))
