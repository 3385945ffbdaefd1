"""Tiny mixtures of experts, for tests."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness import gemma4_checkpoints
from harness.checkpoint_files import read_tensors, write_tensors

GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
SMALL = {"moe_intermediate_size": 32, "num_experts_per_tok": 3}
ERNIE = {"moe_intermediate_size": 32, "moe_num_experts": 6, "moe_k": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "q_lora_rank": None,
    "n_routed_experts": 12,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
NOT_OF_YOUTU = (*SMALL, "n_routed_experts", "first_k_dense_replace")
"""It has no experts, but is a case of latent attention."""
GROUPS = {"n_group": 4, "topk_group": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "mixtral-window": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 1, "sliding_window": 16, "tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {**SMALL, "num_experts": 6, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]}),
    "qwen2_moe-window": (
        "qwen2_moe",
        {
            **SMALL,
            "num_experts": 6,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 3,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {**SMALL, "num_experts": 20, "norm_topk_prob": True}),
    "qwen3_moe-sparse": ("qwen3_moe", {**SMALL, "num_experts": 6, "decoder_sparse_step": 2, "attention_bias": True}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "ernie4_5_moe": ("ernie4_5_moe", {**ERNIE, "moe_layer_end_index": 2, "num_hidden_layers": 4}),
    "ernie4_5_moe-interval": ("ernie4_5_moe", {**ERNIE, "moe_layer_interval": 2, "moe_num_shared_experts": 0}),
    "glm4_moe": ("glm4_moe", {**SMALL, "n_routed_experts": 6, "attention_bias": True, "routed_scaling_factor": 1.5}),
    "glm4_moe-groups": (
        "glm4_moe",
        {
            **SMALL,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": True,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
        },
    ),
    "deepseek_v2": ("deepseek_v2", {**LATENT, **GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, **GROUPS, "q_lora_rank": 48, "norm_topk_prob": True, "rms_norm_eps": 1e-2}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            **LATENT,
            "q_lora_rank": 48,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "youtu": ("youtu", {**{name: LATENT[name] for name in LATENT if name not in NOT_OF_YOUTU}, "q_lora_rank": 48}),
    "gpt_oss-window": (
        "gpt_oss",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 16, "rope_parameters": GPT_OSS_ROPE, "swiglu_limit": 0.5},
    ),
    "qwen2_moe-plain": ("qwen2_moe", {**SMALL, "num_experts": 6, "shared_expert_intermediate_size": 48}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 16, "rope_parameters": GPT_OSS_ROPE}),
    "gemma4-window": ("gemma4_text", gemma4_checkpoints.EXPERTS),
}
"""By a name: the family and values of its config; those that end in -window have one of 16 tokens."""

OF_CONVERTERS = ["mixtral", "qwen2_moe-plain", "qwen3_moe", "olmoe", "glm4_moe", "glm4_moe-groups", "gpt_oss", "gemma4-window"]
OF_CONVERTERS += ["ernie4_5_moe-interval", "deepseek_v2", "deepseek_v3", "youtu"]
"""Those whose configs GGUF metadata has room for."""


def in_stacks(directory: Path, to: Path) -> Path:
    """The same checkpoint with the experts of a layer in two stacks, under the names of transformers' modules."""
    shutil.copytree(directory, to)
    write_tensors(to, stack_experts(read_tensors(directory)))
    return to


def stack_experts(tensors: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Tensors with the experts of a layer in two stacks: gates with ups, and downs."""
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    found, stacks = dict[str, NDArray[np.float32]](), dict[str, dict[int, dict[str, NDArray[np.float32]]]]()
    for name, tensor in tensors.items():
        plain = name.replace("block_sparse_moe", "mlp")
        prefix, _, rest = plain.partition(".experts.")
        if rest:
            expert, part, _ = rest.split(".")
            stacks.setdefault(prefix, {}).setdefault(int(expert), {})[names.get(part, part)] = tensor
        else:
            found[plain] = tensor
    for prefix, stack in stacks.items():
        own = [stack[expert] for expert in sorted(stack)]
        found[f"{prefix}.experts.gate_up_proj"] = np.stack([np.concatenate([one["gate_proj"], one["up_proj"]]) for one in own])
        found[f"{prefix}.experts.down_proj"] = np.stack([one["down_proj"] for one in own])
    return found
