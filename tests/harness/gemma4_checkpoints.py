"""Tiny random checkpoints of Gemma 4, with every switch on."""

from pathlib import Path
from typing import Any

from harness.checkpoints import VOCAB_SIZE, write_checkpoint

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = 16
GEMMA4: dict[str, Any] = {
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_hidden_layers": 8,
    "layer_types": [SLIDING, FULL] * 4,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
    "query_key_scale": 0.5,  # scores of normed queries and keys would be so large that rounding decides
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e3},
    },
}
"""As E2B: layers of two sizes, shared keys, inputs of layers."""
UNIFIED: dict[str, Any] = {
    name: value
    for name, value in GEMMA4.items()
    if name not in ("vocab_size_per_layer_input", "hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp")
}
"""As 12B: keys are values, nothing is shared."""

EXPERTS: dict[str, Any] = {**UNIFIED, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}
EXPERTS |= {"hidden_size_per_layer_input": 0, "layer_types": [SLIDING] * 3 + [FULL], "num_hidden_layers": 4, "query_key_scale": 0.5}
"""As 26B-A4B: experts beside every MLP."""


def write_gemma4(directory: Path, family: str = "gemma4_text", **changes: Any) -> Path:
    """A checkpoint with a tokenizer; see `write_checkpoint`."""
    return write_checkpoint(directory, family, **{**(GEMMA4 if family == "gemma4_text" else UNIFIED), **changes})
