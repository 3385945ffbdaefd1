"""Tiny networks with recurrent layers, for tests."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
EXPERTS: dict[str, Any] = {**DELTA, "moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2}
EXPERTS |= {"shared_expert_intermediate_size": 48}
SHORT: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "tie_word_embeddings": True}
MAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.4,
    "logits_scaling": 1.5,
    "shared_intermediate_size": 48,
    "num_local_experts": 0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5-tied": ("qwen3_5_text", {**DELTA, "tie_word_embeddings": True, "linear_key_head_dim": 24, "linear_value_head_dim": 32}),
    "qwen3_5-moe": ("qwen3_5_moe_text", EXPERTS),
    "qwen3_next": ("qwen3_next", {**EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": False}),
    "lfm2": ("lfm2", {**SHORT, "block_auto_adjust_ff_dim": False}),
    "lfm2-biased": ("lfm2", {**SHORT, "conv_bias": True, "conv_L_cache": 4, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3}),
    "lfm2-moe": (
        "lfm2_moe",
        {
            **SHORT,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "granite": ("granitemoehybrid", MAMBA),
    "granite-rope": ("granitemoehybrid", {**MAMBA, "position_embedding_type": "rope", "mamba_proj_bias": True, "mamba_conv_bias": False}),
    "granite-moe": ("granitemoehybrid", {**MAMBA, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32}),
}
"""By a name: the family and values of its config."""


@contextmanager
def row_by_row() -> Iterator[None]:
    """Lets transformers compute every row by the recurrence. The chunks it takes for prompts are the same function, but round more."""
    with ExitStack() as stack:
        for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
            module = import_module(f"transformers.models.{name}.modeling_{name}")
            stack.enter_context(patch.object(module, "torch_chunk_gated_delta_rule", module.torch_recurrent_gated_delta_rule))
        yield
