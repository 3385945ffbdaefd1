"""Weights and draft vocabulary of an EAGLE head, read from safetensors, PyTorch or GGUF files and renamed to the names of `network.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.eagle.config import (
    FIRST_NORM_TENSOR,
    LAST_NORM_TENSOR,
    TENSOR_NAME_ALIASES,
    EagleConfig,
    config_fields,
    disables_final_norm,
    has_nested_config,
)
from paceline.drafters.head_files import (
    GGUF_LAYER_MODULE_NAMES,
    HeadFiles,
    Shapes,
    gguf_tensors,
    layer_tensors,
    read_target_ids,
    read_token_map,
    rename_module,
)
from paceline.drafters.head_kinds import HeadKind
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.config import ModelConfig
from paceline.models.gguf.file import GgufFile, open_gguf
from paceline.models.gguf.header import GgufTensor
from paceline.models.gguf.stored_tensor import TensorSource
from paceline.models.weights import AnyTensor, Tensor, Weights, as_float32, half_split_order

_MASK_FEATURE_TENSOR = "mask_hidden"
_INTERNAL_MODULE_NAMES = {
    "embed_tokens": "embedding",
    "norm": "final_norm",
    "embedding_layernorm": "embedding_norm",
    "hidden_states_layernorm": "feature_norm",
}

_GGUF_ARCHITECTURE = "eagle3"
_GGUF_LAYER_MODULE_NAMES = {"attn_norm_2": "hidden_norm", **GGUF_LAYER_MODULE_NAMES}
_GGUF_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head", "ffn_norm": "layers.0.post_attention_layernorm"}
_CONFIG_FIELD_BY_GGUF_KEY = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "context_length": "max_position_embeddings", "rope.freq_base": "rope_theta",
    "target_hidden_size": "target_hidden_size", "norm_before_residual": "norm_before_residual",
    "extract_layers": "eagle_aux_hidden_state_layer_ids",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EagleCheckpoint:
    config: EagleConfig
    weights: Weights  # weights by the names of `network.py`; embedding and lm_head are missing if the head uses the target's
    num_embedded_ids: int  # number of rows of the embedding; token ids from this number on have no embedding
    target_ids: NDArray[np.int64] | None  # [Vd] target id of each draft id, ascending; None = draft ids are target ids
    mask_feature: NDArray[np.float32] | None = None  # [F] P-EAGLE: learned feature for the positions whose feature is not known yet


def open_eagle_checkpoint(files: HeadFiles, config: EagleConfig, target: ModelConfig) -> EagleCheckpoint:
    """Open the weights and the draft vocabulary of an EAGLE head.

    Raises:
        CheckpointError: tensors are missing, unknown, or of the wrong shape; the error lists all of them.
        IncompatibleDrafterError: the head has another vocabulary than the target, or its mask token has no embedding.
    """
    files = files.with_canonical_names(TENSOR_NAME_ALIASES)
    names, required, optional = _tensor_shapes(files, config, target)
    files.check_shapes(required, optional)
    used = [name for name in (*required, *optional) if name in files.tensors]
    id_tables = ("token_map",) if config.is_eagle1 else ("d2t", "t2d")
    files.check_all_used([*used, *id_tables], ignored=lambda name: _is_ignored_tensor(files, name))
    tensors: dict[str, AnyTensor] = {
        names.get(name) or rename_module(name, _INTERNAL_MODULE_NAMES): files.matrix(name) for name in used if name != _MASK_FEATURE_TENSOR
    }
    mask = as_float32(files.weight(_MASK_FEATURE_TENSOR)).reshape(-1) if _MASK_FEATURE_TENSOR in used else None
    ids = read_target_ids(files, config.layers.vocab_size, target)
    if "token_map" in files.tensors:
        ids, row_order = read_token_map(files, target.vocab_size)
        tensors["lm_head.weight"] = _select_lm_head_rows(files, files.weight("lm_head.weight"), ids, row_order)
    num_embedded_ids = tensors["embedding.weight"].shape[0] if config.has_own_embedding else target.vocab_size
    if config.mask_token_id is not None and config.mask_token_id >= num_embedded_ids:
        raise IncompatibleDrafterError(
            f"{files.path}: the mask_token_id is {config.mask_token_id}, embeddings end at {num_embedded_ids}: the head was made for "
            "another model, or --drafter-options mask_token_id=ID is wrong"
        )
    return EagleCheckpoint(config, Weights(tensors), num_embedded_ids, ids, mask)


def check_embedding_rows(files: HeadFiles, num_embedded_ids: int, num_tokenizer_ids: int) -> None:
    """Check that a head has an embedding for each token of the target's tokenizer. Ids that pad the vocabulary need none.

    Raises:
        IncompatibleDrafterError: the embedding has too few rows.
    """
    if num_embedded_ids < num_tokenizer_ids:
        raise IncompatibleDrafterError(
            f"the {files.kind.value} head {files.path} has embeddings of {num_embedded_ids} token ids, the target's tokenizer has "
            f"{num_tokenizer_ids}: it was made for another model"
        )


def _is_ignored_tensor(files: HeadFiles, name: str) -> bool:
    """Return whether a tensor is one that heads are known to contain but not to use.

    speculators files contain copies of target tensors (`verifier_*`). Files in vLLM's format contain norms that the config turns off.
    SpecForge files may contain a final norm that is not applied.
    """
    if name == LAST_NORM_TENSOR and disables_final_norm(files, config_fields(files)):
        return True
    disabled = (FIRST_NORM_TENSOR, LAST_NORM_TENSOR) if files.kind is HeadKind.EAGLE and has_nested_config(files) else ()
    return name.startswith("verifier_") or name in disabled


def _tensor_shapes(files: HeadFiles, config: EagleConfig, target: ModelConfig) -> tuple[dict[str, str], Shapes, Shapes]:
    """Return internal names of the layers' tensors, the shapes of required tensors, and the shapes of optional tensors."""
    layers, is_eagle1 = config.layers, config.is_eagle1
    hidden, width = layers.hidden_size, config.feature_size
    names, required, optional = layer_tensors(layers)
    if not is_eagle1:  # the first layer reads [embedding, feature]
        for name in (f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"):
            required[name] = required[name][0], 2 * hidden
    if not (config.has_input_norm if is_eagle1 else config.has_embedding_norm):
        del required[FIRST_NORM_TENSOR]
    if is_eagle1 or config.has_fc:
        required["fc.weight"], optional["fc.bias"] = (hidden, 2 * hidden if is_eagle1 else width), (hidden,)
    norms = {
        "embedding_layernorm.weight": is_eagle1 and config.has_embedding_norm,
        "hidden_states_layernorm.weight": config.has_feature_norm,
        "layers.0.hidden_norm.weight": not is_eagle1,
        LAST_NORM_TENSOR: config.has_final_norm,
    }
    required |= {name: (hidden,) for name, is_used in norms.items() if is_used}
    if config.has_concat_norm:
        required["input_norm.weight"] = (width,)
    if config.has_boundary_norms:
        required |= {f"fc_norm.{index}.weight": (config.target_hidden_size,) for index in range(len(config.layer_boundaries))}
    if config.kind is HeadKind.PEAGLE:
        stored = files.tensors.get(_MASK_FEATURE_TENSOR)
        required[_MASK_FEATURE_TENSOR] = stored.shape if stored is not None and prod(stored.shape) == width else (1, 1, width)
    if config.has_own_embedding:
        required["embed_tokens.weight"] = (files.num_rows("embed_tokens.weight"), hidden)
    has_other_vocab = layers.vocab_size != target.vocab_size or hidden != target.hidden_size
    has_lm_head = "token_map" in files.tensors or config.has_own_lm_head or (has_other_vocab and not is_eagle1)
    if has_lm_head:
        num_rows = files.num_rows("lm_head.weight") if "token_map" in files.tensors else 0
        required["lm_head.weight"] = (num_rows or layers.vocab_size, hidden)
    return names, required, optional


def _select_lm_head_rows(files: HeadFiles, lm_head: Tensor, ids: NDArray[np.int64], row_order: NDArray[np.int64]) -> Tensor:
    """Return the lm_head rows of `ids`. The file has rows of these ids only, or of all. `ids`, `row_order`: see `read_token_map`."""
    if lm_head.shape[0] != len(ids) and lm_head.shape[0] <= int(ids[-1]):
        raise CheckpointError(
            f"{files.path}: token_map has {len(ids)} ids for {lm_head.shape[0]} rows of lm_head.weight; download it again"
        )
    rows = row_order if lm_head.shape[0] == len(ids) else ids
    return Tensor(lm_head.array[rows], lm_head.weight_type, (len(ids), lm_head.shape[1]))


def open_gguf_eagle(path: Path) -> HeadFiles | None:
    """Open the EAGLE-3 head in a GGUF file, with tensors and config fields as in safetensors files; None if it contains something else.

    GGUF differs in three ways. `d2t` contains target ids, not offsets. The rows of the query and key projections are interleaved, for
    rotary embeddings that rotate pairs of adjacent values. `extract_layers` lists layer inputs. Quantised matrices stay quantised.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = open_gguf(path)
    if file.metadata.get("general.architecture") != _GGUF_ARCHITECTURE:
        return None
    config = _read_gguf_config(file)
    tensors, quantized = gguf_tensors({_canonical_name(name): _tensor_source(tensor, config) for name, tensor in file.tensors.items()})
    return HeadFiles(path, config, tensors, HeadKind.EAGLE3, (path,), quantized)


def _read_gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the GGUF metadata as fields of a config.json."""
    values: dict[str, Any] = {"general.architecture": _GGUF_ARCHITECTURE}
    for key, name in _CONFIG_FIELD_BY_GGUF_KEY.items():
        value = file.metadata.get(f"{_GGUF_ARCHITECTURE}.{key}")
        if value is not None:
            values[name] = list(value) if key == "extract_layers" and isinstance(value, Sequence) else value
    vocabulary = file.metadata.get(f"{_GGUF_ARCHITECTURE}.vocab_size")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if vocabulary is None and tokens is None:
        raise CheckpointError(f"{file.path} has neither {_GGUF_ARCHITECTURE}.vocab_size nor a vocabulary; download it again")
    return {**values, "vocab_size": len(tokens or ()) if vocabulary is None else vocabulary}


def _canonical_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem:
        return name  # a tensor without module, such as d2t
    if stem.startswith("blk."):
        layer, _, part = stem.removeprefix("blk.").partition(".")
        return f"layers.{layer}.{_GGUF_LAYER_MODULE_NAMES.get(part, part)}.{kind}"
    return f"{_GGUF_NAMES.get(stem, stem)}.{kind}"


def _tensor_source(tensor: GgufTensor, config: dict[str, Any]) -> TensorSource:
    """Return a tensor with the order in which to read its rows: query and key rows are interleaved in GGUF files."""
    part = tensor.name.rsplit(".", 2)[-2] if "." in tensor.name else ""
    heads = {"attn_q": config.get("num_attention_heads"), "attn_k": config.get("num_key_value_heads", config.get("num_attention_heads"))}
    num_heads = heads.get(part)
    if not isinstance(num_heads, int) or num_heads < 1 or tensor.shape[0] % (2 * num_heads):  # an invalid config is rejected later
        return TensorSource(tensor, tensor.shape)
    size = tensor.shape[0] // num_heads
    return TensorSource(tensor, tensor.shape, row_order=partial(half_split_order, tensor.shape[0], size, size))
