"""Open the block drafter in a GGUF file, with tensors and config fields under the names of safetensors files.

GGUF differs in three ways. `d2t` contains target ids, not offsets. `target_layers` lists layer inputs, so its numbers are one larger than
those of layer outputs. If `attn_v` is missing, values are the normed keys. Quantised matrices stay quantised.

Source: llama.cpp `src/models/dflash.cpp` and its converters.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.drafters.block.config import GGUF_ARCHITECTURE, GGUF_KEY_BY_FIELD, SELECTOR_PREFIX
from paceline.drafters.head_files import GGUF_LAYER_MODULE_NAMES, HeadFiles, gguf_tensors
from paceline.drafters.head_kinds import detect_block_kind
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.gguf.config import ROPE_TENSORS, read_decoder_fields
from paceline.models.gguf.fields import GgufFields
from paceline.models.gguf.file import GgufFile, open_gguf, split_parts
from paceline.models.gguf.header import GgufTensor
from paceline.models.gguf.stored_tensor import TensorSource, check_stored_shape
from paceline.models.storage.tensor_file import FileTensor

_LAYER_TENSOR_NAMES = {
    "attn_sinks.weight": "self_attn.attention_sink_bias",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
    **{f"{gguf}.{kind}": f"{canonical}.{kind}" for kind in ("weight", "bias") for gguf, canonical in GGUF_LAYER_MODULE_NAMES.items()},
}
_TENSOR_NAMES = {
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    "selector_predecessor.weight": SELECTOR_PREFIX + "predecessor_codebook",
    "selector_successor.weight": SELECTOR_PREFIX + "successor_codebook",
    "selector_hidden.weight": SELECTOR_PREFIX + "hidden_projection.weight",
}
_OPTIONAL_FIELDS = ("block_size", "sample_from_anchor", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_ZERO_IF_ABSENT_FIELDS = ("output_multiplier", "final_logit_softcapping", "input_embedding_scale", "attention_value_scale")
"""Fields for which llama.cpp writes 0 if the model does not have them."""
_CONFIDENCE_TENSOR = "confidence_head.proj.weight"


def open_gguf_block(path: Path) -> HeadFiles | None:
    """Open the block drafter in a GGUF file; None if the file contains something else.

    Raises:
        CheckpointError: the file is damaged, or a metadata value is missing or impossible.
        IncompatibleDrafterError: the drafter in the file is not supported.
    """
    file = open_gguf(path)
    if file.metadata.get("general.architecture") != GGUF_ARCHITECTURE:
        return None
    if any(name.startswith("hc_") or ".hc_" in name for name in file.tensors):
        raise IncompatibleDrafterError(f"{path} is a dspark drafter of DeepSeek V4, which is not supported: use another drafter")
    stored = {_canonical_name(name): tensor for name, tensor in file.tensors.items() if name not in ROPE_TENSORS}
    if len(stored) < len([name for name in file.tensors if name not in ROPE_TENSORS]):
        raise CheckpointError(f"{path} holds a tensor under two names: the file is damaged, download it again")
    tensors, quantized = gguf_tensors({name: TensorSource(tensor, _tensor_shape(name, tensor)) for name, tensor in stored.items()})
    for source in quantized.values():
        check_stored_shape(source, source.shape, source.tensor.shape)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return HeadFiles(path, _read_config(file, tensors), tensors, detect_block_kind(shapes), split_parts(path), quantized)


def _canonical_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.([0-9]{1,6})\.(.+)", name)
    return _TENSOR_NAMES.get(name, name) if layer is None else f"layers.{int(layer[1])}.{_LAYER_TENSOR_NAMES.get(layer[2], layer[2])}"


def _tensor_shape(name: str, tensor: GgufTensor) -> tuple[int, ...]:
    return (1, *tensor.shape) if name == _CONFIDENCE_TENSOR and len(tensor.shape) == 1 else tensor.shape


def _read_config(file: GgufFile, tensors: Mapping[str, FileTensor]) -> dict[str, Any]:
    """Return the GGUF metadata as fields of a config.json."""
    fields, values = GgufFields(file), read_decoder_fields(file)
    num_layers = values["num_hidden_layers"]
    _check_rope_sections(fields)
    windows = fields.read_sliding_window(num_layers)
    if windows["sliding_window"] is not None and "layer_types" not in windows:
        windows["layer_types"] = ["sliding_attention"] * num_layers
    values |= windows
    values["is_causal"] = fields.architecture_value(GGUF_KEY_BY_FIELD["is_causal"]) or False
    for name in (*_OPTIONAL_FIELDS, *_ZERO_IF_ABSENT_FIELDS):
        value = fields.architecture_value(GGUF_KEY_BY_FIELD[name])
        if value is not None and not (value == 0 and name in _ZERO_IF_ABSENT_FIELDS):
            values[name] = value
    mask, layers = (fields.metadata_value("tokenizer.ggml.mask_token_id"), fields.architecture_value(GGUF_KEY_BY_FIELD["target_layer_ids"]))
    values["mask_token_id"] = fields.architecture_value("mask_token_id") if mask is None else mask
    if not isinstance(layers, list) or not layers or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in layers):
        fields.raise_invalid("target_layers", layers, "a list of layers of the target")
    values["target_layer_ids"] = [layer - 1 for layer in layers]
    hidden_size, confidence = values["hidden_size"], tensors.get(_CONFIDENCE_TENSOR)
    values["confidence_head_with_markov"] = confidence is not None and len(confidence.shape) == 2 and confidence.shape[1] > hidden_size
    return values


def _check_rope_sections(fields: GgufFields) -> None:
    """Check that only the first section of a multimodal rotary embedding (mrope) is not 0: the embedding is then equal to a plain one."""
    sections = fields.architecture_value("rope.dimension_sections")
    if sections is not None and (not isinstance(sections, list) or any(section != 0 for section in sections[1:])):
        fields.raise_invalid("rope.dimension_sections", sections, "a single section that is not 0")
