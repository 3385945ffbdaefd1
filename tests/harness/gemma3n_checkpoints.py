"""Tiny random checkpoints of Gemma 3n, with every switch on."""

from typing import Any

from harness.checkpoints import VOCAB_SIZE
from harness.gemma4_checkpoints import FULL, SLIDING, WINDOW

NUM_ROWS = VOCAB_SIZE - 7
"""Rows of the table of per-layer embeddings: as published, the last tokens of the vocabulary have none."""
GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL] * 3,
    "intermediate_size": [96, 96, 64, 96, 96, 128],
    "activation_sparsity_pattern": [0.9, 0.6, 0.3, 0.0, 0.0, 0.0],
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": NUM_ROWS,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
    "query_key_scale": 0.5,  # scores of normed queries and keys would be so large that rounding decides
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "default", "rope_theta": 1e3},
    },
}
