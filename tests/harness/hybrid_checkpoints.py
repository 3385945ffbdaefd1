"""Tiny networks with recurrent layers, for tests."""

from typing import Any

DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5-tied": ("qwen3_5_text", {**DELTA, "tie_word_embeddings": True, "linear_key_head_dim": 16, "linear_value_head_dim": 32}),
}
"""By a name: the family and values of its config."""
