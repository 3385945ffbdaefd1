"""Tiny networks with recurrent layers, for tests."""

import math
from collections.abc import Callable, Iterator
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
LFM3: dict[str, Any] = {
    **SHORT,
    "num_hidden_layers": 6,
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv", "sliding_attention", "conv"],
    "sliding_window": 16,
}
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
NEMOTRON: dict[str, Any] = {
    "num_hidden_layers": None,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "linear_attention", "mlp"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
}
OLMO: dict[str, Any] = {**DELTA, "rope_parameters": {"rope_type": "default", "rope_theta": None}, "rms_norm_eps": 0.1}
FALCON: dict[str, Any] = {
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
}
FALCON_FACTORS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.7,
    "ssm_multipliers": [0.6, 1.4, 0.7, 1.3, 0.5],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.8,
    "mlp_multipliers": [1.6, 0.5],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5-tied": ("qwen3_5_text", {**DELTA, "tie_word_embeddings": True, "linear_key_head_dim": 24, "linear_value_head_dim": 32}),
    # of other seeds a state comes so close to zero in front of its norm that transformers' own rounding is 1e-4
    "qwen3_5-moe": ("qwen3_5_moe_text", {**EXPERTS, "seed": 4}),
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
    "lfm3": ("lfm3", LFM3),
    "lfm3-plain": ("lfm3", {**LFM3, "use_sandwich_norm": False, "use_attention_gate": False, "attention_bias": True, "conv_bias": True}),
    "granite": ("granitemoehybrid", MAMBA),
    "granite-rope": (
        "granitemoehybrid",
        {**MAMBA, "position_embedding_type": "rope", "mamba_proj_bias": True, "mamba_conv_bias": False, "time_step_limit": [0.3, 0.6]},
    ),
    "granite-moe": ("granitemoehybrid", {**MAMBA, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32}),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "nemotron_h-moe": (
        "nemotron_h",
        {
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 48,
            "routed_scaling_factor": 1.5,
            "use_bias": True,
        },
    ),
    "olmo_hybrid": ("olmo_hybrid", OLMO),
    "olmo_hybrid-rope": (
        "olmo_hybrid",
        {
            "num_hidden_layers": 4,
            "attention_bias": True,
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "falcon_h1": ("falcon_h1", {**FALCON, **FALCON_FACTORS}),
    "falcon_h1-normed": (
        "falcon_h1",
        {**FALCON, **FALCON_FACTORS, "mamba_rms_norm": True, "mlp_bias": True, "time_step_limit": [0.3, 0.6]},
    ),
    "falcon_h1-normed-last": ("falcon_h1", {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_conv_bias": False}),
}
"""By a name: the family and values of its config."""


@contextmanager
def row_by_row() -> Iterator[None]:
    """Lets transformers compute every row by the recurrence. The chunks it takes for prompts are the same function, but round more."""
    with ExitStack() as stack:
        for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"):
            module = import_module(f"transformers.models.{name}.modeling_{name}")
            stack.enter_context(patch.object(module, "torch_chunk_gated_delta_rule", module.torch_recurrent_gated_delta_rule))
        mixer = import_module("transformers.models.nemotron_h.modeling_nemotron_h").NemotronHMamba2Mixer
        stack.enter_context(patch.object(mixer, "__init__", _without_floor(mixer.__init__)))
        yield


def _without_floor(make: Callable[..., None]) -> Callable[..., None]:
    """Nemotron-H's mixers as they compute single rows: for prompts alone there is a floor under their steps."""

    def made(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        self.time_step_limit = (0.0, math.inf)

    return made
