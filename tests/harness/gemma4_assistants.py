"""Tiny Gemma 4 assistants and targets written by transformers, with two fixes to its classes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoint_files import edit_tensors, read_values
from harness.gemma4_checkpoints import FULL, GEMMA4, SLIDING, WINDOW, write_gemma4
from harness.gguf_checkpoints import add_tensor, add_values, finish, tensor_names, write_gemma4_sizes, write_sizes

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


_OWN_NAMES = {
    "pre_projection.weight": "nextn.pre_projection.weight",
    "post_projection.weight": "nextn.post_projection.weight",
    "masked_embedding.centroids.weight": "masked_embd_centroids.weight",
    "masked_embedding.token_ordering": "masked_embd_ordering",
}


def without(*names: str) -> Change:
    """Leave tensors out."""
    return lambda tensors: [tensors.pop(name) for name in names]


def changed(name: str, function: Callable[[Any], Any]) -> Change:
    """Replace a tensor, or one that was not there (None), by a function of it."""
    return lambda tensors: tensors.update({name: function(tensors.get(name))})


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

    config, writer = read_values(directory), gguf.GGUFWriter(path, architecture)
    text = {**config["text_config"], "bos_token_id": None, "eos_token_id": None}
    write_sizes(writer, text)
    write_gemma4_sizes(writer, text)
    own = {"embedding_length_out": config["backbone_hidden_size"], "nextn_predict_layers": text["num_hidden_layers"]}
    if config["use_ordered_embeddings"]:
        own["centroid_top_k"] = config["centroid_intermediate_top_k"]
    add_values(writer, {f"{architecture}.{key}": value for key, value in {**own, **(metadata or {})}.items()})
    in_file = tensor_names("gemma4", text["num_hidden_layers"])
    arrays = {_OWN_NAMES.get(name) or str(in_file(name)): array for name, array in load_file(directory / "model.safetensors").items()}
    arrays = {name + ".weight" if name.endswith("layer_output_scale") else name: array for name, array in arrays.items()}
    if change is not None:
        change(arrays)
    for name, array in arrays.items():
        stored_as = (names or {}).get(name, name)
        if array.dtype != np.float32:
            writer.add_tensor(stored_as, array.astype(np.int32))
        else:
            add_tensor(writer, stored_as, array, types if array.ndim == 2 and array.shape[1] % 32 == 0 else "F32")
    return finish(writer, path)


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
