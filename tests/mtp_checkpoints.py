"""Tiny MTP modules inside plain dense models, in the two layouts that exist, and one that must guess perfectly."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from checkpoints import VOCAB_SIZE
from medusa_checkpoints import edit

Arrays = dict[str, NDArray[Any]]
LAYOUTS = ("mtp", "extra_layer")
_NAMES = {
    "mtp": {
        "fc": "mtp.fc",
        "norm_e": "mtp.pre_fc_norm_embedding",
        "norm_h": "mtp.pre_fc_norm_hidden",
        "norm": "mtp.norm",
        "layer": "mtp.layers.0",
    },
    "extra_layer": {
        "fc": "model.layers.{last}.eh_proj",
        "norm_e": "model.layers.{last}.enorm",
        "norm_h": "model.layers.{last}.hnorm",
        "norm": "model.layers.{last}.shared_head.norm",
        "layer": "model.layers.{last}",
        "lm_head": "model.layers.{last}.shared_head.head",
        "embed": "model.layers.{last}.embed_tokens",
    },
}


def random_module(
    *, hidden: int = 64, inner: int = 96, num_heads: int = 4, num_kv_heads: int = 2, head_size: int = 16, seed: int = 0
) -> Arrays:
    """`fc`, `norm_e`, `norm_h`, `norm`, and the tensors of a qwen3 layer by their names behind `layer.`; norm weights as they multiply."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return random.normal(0, 0.2, (rows, columns)).astype(np.float32)

    def norm(size: int) -> NDArray[np.float32]:
        return random.uniform(0.5, 1.5, size).astype(np.float32)

    return {
        "fc": matrix(hidden, 2 * hidden),
        "norm_e": norm(hidden),
        "norm_h": norm(hidden),
        "norm": norm(hidden),
        "layer.input_layernorm": norm(hidden),
        "layer.post_attention_layernorm": norm(hidden),
        "layer.self_attn.q_proj": matrix(num_heads * head_size, hidden),
        "layer.self_attn.k_proj": matrix(num_kv_heads * head_size, hidden),
        "layer.self_attn.v_proj": matrix(num_kv_heads * head_size, hidden),
        "layer.self_attn.o_proj": matrix(hidden, num_heads * head_size),
        "layer.self_attn.q_norm": norm(head_size),
        "layer.self_attn.k_norm": norm(head_size),
        "layer.mlp.gate_proj": matrix(inner, hidden),
        "layer.mlp.up_proj": matrix(inner, hidden),
        "layer.mlp.down_proj": matrix(hidden, inner),
    }


def add_module(directory: Path, layout: str, arrays: Arrays, *, num_layers: int, **own: NDArray[np.float32]) -> Path:
    """Store a module in the model that lies in `directory`; `own`: its copies `lm_head` and `embed` ("extra_layer" alone has room)."""

    def change(tensors: Arrays) -> None:
        for name, array in {**arrays, **own}.items():
            part, _, rest = name.partition(".")
            stored = _NAMES[layout][part].format(last=num_layers) + (f".{rest}" if rest else "") + ".weight"
            is_norm = "norm" in name
            tensors[stored] = array - 1.0 if is_norm and layout == "mtp" else array

    edit(directory / "model.safetensors", change)
    return directory


def perfect_module(*, hidden: int = 128, is_swapped: bool = False) -> Arrays:
    """A module for the successor target: it passes the pair's token on, and the target's matrix reads the successor off.

    Args:
        is_swapped: pass the feature on instead, as a module does whose halves are swapped: it then says the token that was last.
    """
    arrays = random_module(hidden=hidden, seed=3)
    passed = np.zeros((hidden, 2 * hidden), np.float32)
    passed[:, hidden * is_swapped : hidden * (1 + is_swapped)] = np.eye(hidden)
    arrays["fc"] = passed
    for name in ("norm_e", "norm_h", "norm"):
        arrays[name] = np.ones(hidden, np.float32)
    for name in ("layer.self_attn.o_proj", "layer.mlp.down_proj"):
        arrays[name] = np.zeros_like(arrays[name])
    return arrays


def random_matrix(seed: int, hidden: int = 64) -> NDArray[np.float32]:
    """[V, hidden], for a module's own embedding or vocabulary matrix."""
    return np.random.default_rng(seed).normal(0, 0.3, (VOCAB_SIZE, hidden)).astype(np.float32)
