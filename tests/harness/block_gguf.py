"""Block drafters as GGUF files, the way llama.cpp's converters write them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.eagle_checkpoints import Tensors
from harness.gguf_checkpoints import add_values, finish, random_blocks

_PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "attention_conv.kernel_projection": "attn_conv_proj", "mlp_conv.kernel_projection": "ffn_conv_proj",
}  # fmt: skip
_NAMES = {
    "hidden_norm": "enc.output_norm", "norm": "output_norm", "embed_tokens": "token_embd", "lm_head": "output", "fc": "fc",
    "markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2", "confidence_head.proj": "conf_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
}  # fmt: skip
_WHOLE = {
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}
_BASES = {"attention_conv.base_kernel": "attn_conv_base", "mlp_conv.base_kernel": "ffn_conv_base"}
_SIZES = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
}  # fmt: skip
_FLOATS = {
    "logit_scale": "output_multiplier", "final_logit_softcapping": "final_logit_softcapping", "embedding_scale": "input_embedding_scale",
    "attention.value_scale": "attention_value_scale",
}  # fmt: skip


def write_gguf_block(
    path: Path, config: Mapping[str, Any], tensors: Tensors, matrix_type: str = "F32", *, metadata: Mapping[str, Any] | None = None
) -> Tensors:
    """Write a drafter; return its tensors with the values that the file holds.

    Args:
        config: of the drafter, with all sizes of its layers; sliding layers must specify whether they are causal.
        matrix_type: of matrices whose rows fill its blocks; types that the gguf package cannot make become random blocks.
        metadata: integers, strings, booleans and lists of the architecture, in place of those from the config.
    """
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    writer, held = gguf.GGUFWriter(path, "dflash"), dict(tensors)
    _write_metadata(writer, {**config, **config.get("dflash_config", {})}, dict(metadata or {}))
    kind = gguf.GGMLQuantizationType[matrix_type]
    items = gguf.GGML_QUANT_SIZES[kind][0]
    for name, values in tensors.items():
        array = values.numpy()
        if name == "d2t":
            writer.add_tensor("d2t", array + np.arange(len(array)))
        elif array.ndim == 2 and array.shape[1] % items == 0 and matrix_type != "F32":
            rows = _quantised(array, matrix_type)
            held[name] = torch.from_numpy(gguf.quants.dequantize(rows, kind).astype(np.float32))
            writer.add_tensor(_name_in_file(name), rows, raw_dtype=kind)
        else:
            writer.add_tensor(_name_in_file(name), np.ascontiguousarray(array))
    finish(writer, path)
    return held


def _quantised(array: Any, matrix_type: str) -> Any:
    import gguf

    if matrix_type.endswith("_K"):
        return random_blocks(np.random.default_rng(array.shape[0]), matrix_type, *array.shape, 0.003)
    return gguf.quants.quantize(np.ascontiguousarray(array), gguf.GGMLQuantizationType[matrix_type])


def _name_in_file(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    if name.startswith("layers."):
        _, layer, part = name.split(".", 2)
        if part in _BASES:
            return f"blk.{layer}.{_BASES[part]}"
        if part == "self_attn.attention_sink_bias":
            return f"blk.{layer}.attn_sinks.weight"
        stem, kind = part.rsplit(".", 1)
        return f"blk.{layer}.{_PARTS[stem]}.{kind}"
    stem, kind = name.rsplit(".", 1)
    return f"{_NAMES.get(stem, stem)}.{kind}"


def _write_metadata(writer: Any, values: Mapping[str, Any], given: dict[str, Any]) -> None:
    own: dict[str, Any] = {key: values[name] for key, name in _SIZES.items()}
    own |= {"block_size": values["block_size"], "target_layers": [layer + 1 for layer in values["target_layer_ids"]]}
    own |= {key: values[key] for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k") if key in values}
    own |= {key: float(values[name]) for key, name in _FLOATS.items() if name in values}
    own |= {"attention.layer_norm_rms_epsilon": values["rms_norm_eps"], "rope.freq_base": values["rope_theta"]}
    own["attention.causal"] = bool(values.get("is_causal", values.get("causal", False)))
    if "sample_from_anchor" in values:
        own["sample_from_anchor"] = values["sample_from_anchor"]
    if "layer_types" in values:
        own["attention.sliding_window"] = values["sliding_window"]
        own["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in values["layer_types"]]
    writer.add_uint32("tokenizer.ggml.mask_token_id", given.pop("mask_token_id", values["mask_token_id"]))
    add_values(writer, {f"dflash.{key}": value for key, value in {**own, **given}.items()})
