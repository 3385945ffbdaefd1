"""Tiny Gemma 4 assistants and targets written by transformers, with two fixes to its classes."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.gemma4_checkpoints import FULL, GEMMA4, SLIDING, WINDOW, write_gemma4

VOCAB_SIZE = 96
Change = Callable[[dict[str, Any]], object]  # of tensors, by name
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 4}
LAYERS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 4,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "rope_parameters": GEMMA4["rope_parameters"],
    "initializer_range": 0.15,
}


@contextmanager
def mended() -> Iterator[None]:
    """Context manager: fix transformers' key sharing where all layers, or none, share keys."""
    from transformers import Gemma4TextConfig, Gemma4UnifiedTextConfig

    def mending(real: Any) -> property:
        def modes(config: Any) -> list[str | None]:
            kinds, shared = config.layer_types, config.num_kv_shared_layers
            if shared == len(kinds):
                return ["reuse"] * len(kinds)
            if shared:
                return real.fget(config)
            last = {kind: index for index, kind in enumerate(kinds)}
            return ["store" if last[kind] == index else None for index, kind in enumerate(kinds)]

        return property(modes)

    with pytest.MonkeyPatch.context() as patch:
        for kind in (Gemma4TextConfig, Gemma4UnifiedTextConfig):
            patch.setattr(kind, "kv_sharing_modes", mending(kind.kv_sharing_modes))
        yield


def write_target(directory: Path, *, is_unified: bool = False, **changes: Any) -> Path:
    """A target whose vocabulary can be cut into clusters."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE}
    if not is_unified:
        sizes["vocab_size_per_layer_input"] = VOCAB_SIZE
    return write_gemma4(directory, "gemma4_unified_text" if is_unified else "gemma4_text", **{**sizes, **changes})


def write_assistant(directory: Path, *, is_unified: bool = False, seed: int = 0, hidden_size: int = 64, **changes: Any) -> Path:
    """A random assistant.

    Args:
        hidden_size: of the target.
        changes: of the config: `text_config` for that of the layers.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**LAYERS, **changes.pop("text_config", {})}
    if not is_unified:
        values |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    kind = "gemma4_unified" if is_unified else "gemma4"
    with mended(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text = AutoConfig.for_model(f"{kind}_text", **values)
        config = AutoConfig.for_model(f"{kind}_assistant", text_config=text, backbone_hidden_size=hidden_size, **changes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.startswith(("pre_projection", "post_projection", "masked_embedding")):
                torch.nn.init.normal_(parameter, std=0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                torch.nn.init.uniform_(buffer, 0.6, 1.4)
            elif name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(VOCAB_SIZE))
        model.save_pretrained(directory)
    return directory


def without(*names: str) -> Change:
    """Leave tensors out."""
    return lambda tensors: [tensors.pop(name) for name in names]


def changed(name: str, function: Callable[[Any], Any]) -> Change:
    """Replace a tensor, or one that was not there (None), by a function of it."""
    return lambda tensors: tensors.update({name: function(tensors.get(name))})


def edit_tensors(directory: Path, change: Change) -> None:
    """Change a checkpoint's tensors, each in its own type."""
    from safetensors.numpy import load_file, save_file

    tensors = {name: array.copy() for name, array in load_file(directory / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def write_gguf_assistant(
    directory: Path,
    path: Path,
    types: str = "F32",
    *,
    architecture: str = "gemma4-assistant",
    metadata: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    change: Change | None = None,
) -> Path:
    """An assistant's directory as a GGUF file, as llama.cpp's converter writes it, with its clusters if it has some.

    Args:
        types: the block type of matrices whose rows are whole blocks.
        metadata: in addition to or instead of the other values, without the architecture; None leaves one out.
        names: other names of tensors, by the usual ones.
        change: what is done to the arrays, by their names in the file.
    """
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_gguf_values(config), **(metadata or {})}.items():
        _add(writer, f"{architecture}.{key}", value)
    arrays = {_gguf_name(name): array for name, array in load_file(directory / "model.safetensors").items()}
    if "masked_embd_ordering" in arrays:
        arrays["masked_embd_ordering"] = arrays["masked_embd_ordering"].astype(np.int32)
    rope = config["text_config"]["rope_parameters"][FULL]
    pairs = config["text_config"]["per_layer_config"]["3"]["head_dim"] // 2
    turned = int(rope["partial_rotary_factor"] * pairs)
    arrays["rope_freqs.weight"] = np.array([1.0] * turned + [1e30] * (pairs - turned), np.float32)
    if change is not None:
        change(arrays)
    for name, array in arrays.items():
        in_file = (names or {}).get(name, name)
        if array.dtype != np.float32:
            writer.add_tensor(in_file, array)
            continue
        kind = gguf.GGMLQuantizationType[types if array.ndim == 2 and array.shape[1] % 32 == 0 else "F32"]
        writer.add_tensor(in_file, gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_values(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config["text_config"]
    (whole,) = {own["head_dim"] for own in text["per_layer_config"].values()}
    heads = [text["per_layer_config"].get(str(layer), {}) for layer in range(text["num_hidden_layers"])]
    values = {
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "embedding_length_out": config["backbone_hidden_size"],
        "block_count": text["num_hidden_layers"],
        "nextn_predict_layers": text["num_hidden_layers"],
        "feed_forward_length": text["intermediate_size"],
        "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": [own.get("num_key_value_heads", text["num_key_value_heads"]) for own in heads],
        "attention.key_length": whole,
        "attention.value_length": whole,
        "attention.key_length_swa": text["head_dim"],
        "attention.value_length_swa": text["head_dim"],
        "attention.layer_norm_rms_epsilon": text["rms_norm_eps"],
        "attention.sliding_window": text["sliding_window"],
        "attention.sliding_window_pattern": [kind == SLIDING for kind in text["layer_types"]],
        "attention.shared_kv_layers": text["num_kv_shared_layers"],
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count": whole,
        "rope.dimension_count_swa": text["head_dim"],
        "rope.freq_base": text["rope_parameters"][FULL]["rope_theta"],
        "rope.freq_base_swa": text["rope_parameters"][SLIDING]["rope_theta"],
    }
    return {**values, "centroid_top_k": config["centroid_intermediate_top_k"]} if config["use_ordered_embeddings"] else values


_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "pre_projection.weight": "nextn.pre_projection.weight",
    "post_projection.weight": "nextn.post_projection.weight",
    "masked_embedding.centroids.weight": "masked_embd_centroids.weight",
    "masked_embedding.token_ordering": "masked_embd_ordering",
}
_GGUF_PARTS = {
    "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "post_attention_norm",
    "pre_feedforward_layernorm.weight": "ffn_norm",
    "post_feedforward_layernorm.weight": "post_ffw_norm",
    "self_attn.q_proj.weight": "attn_q",
    "self_attn.o_proj.weight": "attn_output",
    "self_attn.q_norm.weight": "attn_q_norm",
    "mlp.gate_proj.weight": "ffn_gate",
    "mlp.up_proj.weight": "ffn_up",
    "mlp.down_proj.weight": "ffn_down",
    "layer_scalar": "layer_output_scale",
}


def _gguf_name(name: str) -> str:
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_GGUF_PARTS[part]}.weight"


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    if value is not None:
        kinds[type(value)](key, value)


def write_right_pair(folder: Path, *, sharpness: float = 0.5, **changes: Any) -> tuple[Path, Path, list[int]]:
    """A target that generates the successor of every token, its assistant, which drafts the same, and the successors.

    Both compute the same logits: their layers add nothing, so that the output follows from the last token's embedding alone.
    """
    target = write_target(folder / "target", tie_word_embeddings=False, final_logit_softcapping=None)
    layers = {"hidden_size": 64, "intermediate_size": 48}
    assistant = write_assistant(folder / "assistant", text_config=layers, **changes)
    random = np.random.default_rng(11)
    embedding = random.normal(size=(VOCAB_SIZE, 64)).astype(np.float32)
    cycle = random.permutation(VOCAB_SIZE)
    successor = np.empty(VOCAB_SIZE, np.int64)
    successor[cycle] = np.roll(cycle, -1)
    head = np.empty_like(embedding)
    head[successor] = embedding * np.float32(sharpness)

    def silence(arrays: dict[str, Any]) -> None:
        for name, array in arrays.items():
            if name.endswith(("o_proj.weight", "down_proj.weight", "per_layer_projection.weight")):
                array[...] = 0
            elif name.endswith("layer_scalar") or name == "model.norm.weight":
                array[...] = 1

    def of_target(arrays: dict[str, Any]) -> None:
        silence(arrays)
        arrays["model.embed_tokens.weight"], arrays["lm_head.weight"] = embedding, head

    def of_assistant(arrays: dict[str, Any]) -> None:
        silence(arrays)
        arrays["model.embed_tokens.weight"] = head
        arrays["pre_projection.weight"] = np.eye(64, 128, dtype=np.float32)
        if "masked_embedding.centroids.weight" in arrays:  # a cluster is known by its most outspoken member, and there are few others
            order = arrays["masked_embedding.token_ordering"].reshape(len(arrays["masked_embedding.centroids.weight"]), -1)
            arrays["masked_embedding.centroids.weight"] = head[order].sum(axis=1)

    edit_tensors(target, of_target)
    edit_tensors(assistant, of_assistant)
    return target, assistant, successor.tolist()
