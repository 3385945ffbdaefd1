"""Open the block drafter in a GGUF file, presented as if it were stored the usual way.

Three things differ in GGUF: `d2t` holds the target's ids themselves, `target_layers` holds boundaries, one more than the ids of layer
outputs, and a file without `attn_v` has normed keys as values. Quantised matrices stay quantised.

Source: llama.cpp `src/models/dflash.cpp` and its converters.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.block.config import GGUF_ARCHITECTURE, GGUF_KEYS, SELECTOR
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import block_kind
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.gguf.config import ROPE_TENSORS, read_rope_fields
from paceline.models.gguf.fields import GgufFields
from paceline.models.gguf.file import GgufFile, open_gguf, split_parts
from paceline.models.gguf.header import GgufTensor
from paceline.models.gguf.stored_tensor import UNQUANTIZED_TYPES, TensorSource, check_stored_shape
from paceline.models.storage.tensor_file import ITEM_TYPES, FileTensor

_PARTS = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_sinks.weight": "self_attn.attention_sink_bias",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
    **{f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"},
    **{
        f"{theirs}.{kind}": f"{ours}.{kind}"
        for kind in ("weight", "bias")
        for theirs, ours in (
            *((f"attn_{part}", f"self_attn.{part}_proj") for part in "qkv"),
            ("attn_output", "self_attn.o_proj"),
            *((f"ffn_{part}", f"mlp.{part}_proj") for part in ("gate", "up", "down")),
        )
    },
}
_NAMES = {
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    "selector_predecessor.weight": SELECTOR + "predecessor_codebook",
    "selector_successor.weight": SELECTOR + "successor_codebook",
    "selector_hidden.weight": SELECTOR + "hidden_projection.weight",
}
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}
_FACTORS = ("output_multiplier", "final_logit_softcapping", "input_embedding_scale", "attention_value_scale")
_CONFIDENCE = "confidence_head.proj.weight"


def open_gguf_block(path: Path) -> HeadFiles | None:
    """Open the block drafter in a GGUF file; None if the file holds something else.

    Raises:
        CheckpointError: the file is damaged, or a value is missing or impossible.
        IncompatibleDrafterError: it holds a drafter that is not supported.
    """
    file = open_gguf(path)
    if file.metadata.get("general.architecture") != GGUF_ARCHITECTURE:
        return None
    if any(name.startswith("hc_") or ".hc_" in name for name in file.tensors):
        raise IncompatibleDrafterError(f"{path} is a dspark drafter of DeepSeek V4, which is not supported: use another drafter")
    names = {_name(name): tensor for name, tensor in file.tensors.items() if name not in ROPE_TENSORS}
    if len(names) < len([name for name in file.tensors if name not in ROPE_TENSORS]):
        raise CheckpointError(f"{path} holds a tensor under two names: the file is damaged, download it again")
    tensors = {name: _file_tensor(name, tensor) for name, tensor in names.items()}
    quantised = {
        name: _quantised(tensor, tensors[name].shape) for name, tensor in names.items() if tensor.block_type.name not in ITEM_TYPES
    }
    config = _config(file, tensors)
    return HeadFiles(path, config, tensors, block_kind(_shapes(tensors)), split_parts(path), quantised)


def _shapes(tensors: Mapping[str, FileTensor]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _name(name: str) -> str:
    found = re.fullmatch(r"blk\.([0-9]{1,6})\.(.+)", name)
    return _NAMES.get(name, name) if found is None else f"layers.{int(found[1])}.{_PARTS.get(found[2], found[2])}"


def _quantised(tensor: GgufTensor, shape: tuple[int, ...]) -> TensorSource:
    source = TensorSource(tensor, shape)
    check_stored_shape(source, shape, tensor.shape)
    return source


def _file_tensor(name: str, tensor: GgufTensor) -> FileTensor:
    shape = (1, *tensor.shape) if name == _CONFIDENCE and len(tensor.shape) == 1 else tensor.shape
    if tensor.block_type.name not in ITEM_TYPES:
        return FileTensor(shape, tensor.block_type.name, partial(_refuse, tensor))
    values: Callable[[], NDArray[Any]] = partial(_values, tensor, shape)
    return FileTensor(shape, tensor.block_type.name, partial(_offsets, values) if name == "d2t" else values)


def _values(tensor: GgufTensor, shape: tuple[int, ...]) -> NDArray[Any]:
    values = tensor.data.view(np.dtype(ITEM_TYPES[tensor.block_type.name])).reshape(shape)
    return values if values.flags.aligned else values.copy()


def _offsets(values: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    ids = values()
    return ids - np.arange(len(ids)) if ids.ndim == 1 and ids.dtype.kind in "iu" else ids


def _refuse(tensor: GgufTensor) -> NDArray[Any]:
    types = ", ".join(UNQUANTIZED_TYPES)
    raise CheckpointError(f"{tensor} is of type {tensor.block_type.name}, expected one of {types}; download the file again")


def _config(file: GgufFile, tensors: Mapping[str, FileTensor]) -> dict[str, Any]:
    """Return the metadata under the names of a config.json."""
    fields = GgufFields(file)
    values: dict[str, Any] = {name: fields.count(key) for name, key in _SIZES.items()}
    num_layers, num_heads = values["num_hidden_layers"], values["num_attention_heads"]
    if num_layers > len(file.tensors):
        fields.raise_invalid("block_count", num_layers, f"at most as many as the file has tensors, {len(file.tensors)}")
    values["head_dim"] = fields.count("attention.key_length", max(1, values["hidden_size"] // num_heads))
    value_size = fields.architecture_value("attention.value_length")
    if value_size not in (None, values["head_dim"]):
        fields.raise_invalid("attention.value_length", value_size, f"the size of keys, {values['head_dim']}")
    _check_sections(fields)
    values["rms_norm_eps"] = fields.number("attention.layer_norm_rms_epsilon", 1e-6)
    values |= read_rope_fields(file, head_size=values["head_dim"], max_positions=values["max_position_embeddings"])
    windows = fields.read_sliding_window(num_layers)
    if windows["sliding_window"] is not None and "layer_types" not in windows:
        windows["layer_types"] = ["sliding_attention"] * num_layers
    values |= windows
    values["is_causal"] = fields.architecture_value(GGUF_KEYS["is_causal"]) or False
    for name in ("block_size", "sample_from_anchor", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", *_FACTORS):
        value = fields.architecture_value(GGUF_KEYS[name])
        if value is not None and not (value == 0 and name in _FACTORS):  # 0 = no factor
            values[name] = value
    mask, layers = fields.metadata_value("tokenizer.ggml.mask_token_id"), fields.architecture_value(GGUF_KEYS["target_layer_ids"])
    values["mask_token_id"] = fields.architecture_value("mask_token_id") if mask is None else mask
    if not isinstance(layers, list) or not layers or any(isinstance(one, bool) or not isinstance(one, int) for one in layers):
        fields.raise_invalid("target_layers", layers, "a list of layers of the target")
    values["target_layer_ids"] = [layer - 1 for layer in layers]
    hidden_size, confidence = values["hidden_size"], tensors.get(_CONFIDENCE)
    values["confidence_head_with_markov"] = confidence is not None and len(confidence.shape) == 2 and confidence.shape[1] > hidden_size
    return values


def _check_sections(fields: GgufFields) -> None:
    """Drafters of targets with multimodal rotation have sections of which only the first counts; it is plain rotation then."""
    sections = fields.architecture_value("rope.dimension_sections")
    if sections is not None and (not isinstance(sections, list) or any(section != 0 for section in sections[1:])):
        fields.raise_invalid("rope.dimension_sections", sections, "a single section that is not 0")
