"""Tiny assistants of Gemma 4 beside tiny targets, written by transformers, whose classes need two mends to be built."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.gemma4_checkpoints import FULL, GEMMA4, SLIDING, WINDOW, write_gemma4

VOCAB_SIZE = 96
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
    """Within, transformers knows who shares keys where all layers do, and where none does."""
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


def edit_tensors(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a checkpoint's tensors, each in its own type."""
    from safetensors.numpy import load_file, save_file

    tensors = {name: array.copy() for name, array in load_file(directory / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def write_right_pair(folder: Path, *, sharpness: float = 0.5, **changes: Any) -> tuple[Path, Path, list[int]]:
    """A target that says the successor of every token, its assistant, which knows that, and the successors.

    Both compute the same logits: their layers add nothing, so that what is said follows from the last token's embedding alone.
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
