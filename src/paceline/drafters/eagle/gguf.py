"""EAGLE-3 heads in GGUF files, presented as if they were stored the usual way.

Three things differ there: `d2t` holds the target's ids themselves, the rows of q and k are interleaved as in llama's files, and the
layers to read are boundaries. Quantised matrices are dequantised to float16: a head is small, and its rounding cannot change the output.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.errors import CheckpointError
from paceline.models.gguf.blocks import group_blocks
from paceline.models.gguf.file import GgufFile, open_gguf
from paceline.models.gguf.header import GgufTensor
from paceline.models.storage.tensor_file import FileTensor

ARCHITECTURE = "eagle3"
_PLAIN = {"F32": ("F32", "<f4"), "F16": ("F16", "<f2"), "BF16": ("BF16", "<u2"), "I64": ("I64", "<i8"), "I32": ("I32", "<i4")}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head", "ffn_norm": "layers.0.post_attention_layernorm"}
_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "target_hidden_size": "target_hidden_size",
    "norm_before_residual": "norm_before_residual",
    "extract_layers": "eagle_aux_hidden_state_layer_ids",
}


def open_gguf_head(path: Path) -> HeadFiles | None:
    """The head in a GGUF file, None where it holds something else.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = open_gguf(path)
    if file.metadata.get("general.architecture") != ARCHITECTURE:
        return None
    config = _config(file)
    tensors = {_plain_name(name): _tensor(tensor, config) for name, tensor in file.tensors.items()}
    if "d2t" in tensors:
        absolute = tensors["d2t"]
        tensors["d2t"] = FileTensor(absolute.shape, absolute.dtype, lambda: absolute.open() - np.arange(absolute.shape[0]))
    return HeadFiles(path, config, tensors, HeadKind.EAGLE3, (path,))


def _config(file: GgufFile) -> dict[str, Any]:
    """The metadata under the names of a config.json."""
    values: dict[str, Any] = {"general.architecture": ARCHITECTURE}
    for key, name in _KEYS.items():
        value = file.metadata.get(f"{ARCHITECTURE}.{key}")
        if value is not None:
            values[name] = list(value) if key == "extract_layers" and isinstance(value, Sequence) else value
    vocabulary = file.metadata.get(f"{ARCHITECTURE}.vocab_size")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if vocabulary is None and tokens is None:
        raise CheckpointError(f"{file.path} says neither {ARCHITECTURE}.vocab_size nor has it a vocabulary; download it again")
    return {**values, "vocab_size": len(tokens or ()) if vocabulary is None else vocabulary}


def _plain_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem:
        return name  # d2t
    if stem.startswith("blk."):
        layer, _, part = stem.removeprefix("blk.").partition(".")
        return f"layers.{layer}.{_PARTS.get(part, part)}.{kind}"
    return f"{_NAMES.get(stem, stem)}.{kind}"


def _tensor(stored: GgufTensor, config: dict[str, Any]) -> FileTensor:
    dtype, _ = _PLAIN.get(stored.block_type.name, ("F16", ""))
    part = stored.name.rsplit(".", 2)[-2] if "." in stored.name else ""
    heads = {"attn_q": config.get("num_attention_heads"), "attn_k": config.get("num_key_value_heads", config.get("num_attention_heads"))}
    return FileTensor(stored.shape, dtype, partial(_values, stored, heads.get(part)))


def _values(stored: GgufTensor, num_heads: int | None) -> NDArray[Any]:
    """The stored values, rows of rotated heads put back in order."""
    if stored.block_type.name in _PLAIN:
        values = stored.data.view(_PLAIN[stored.block_type.name][1]).reshape(stored.shape)
    else:
        rows = stored.data.reshape(stored.shape[0], -1)
        values = group_blocks(rows, stored.block_type, str(stored)).values().astype(np.float16)
    if num_heads is None or stored.shape[0] % (2 * num_heads):
        return values if values.flags.aligned else values.copy()
    order = np.arange(stored.shape[0]).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return values[order]
