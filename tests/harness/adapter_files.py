"""LoRA adapters as files, written from their definition and without PEFT."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from paceline.models.config import ModelConfig

Floats = NDArray[np.float32]
SETTINGS: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "bias": "none"}


def write_adapter(directory: Path, tensors: Mapping[str, NDArray[Any]], **settings: Any) -> Path:
    """A directory as PEFT's save_pretrained() makes it.

    Args:
        tensors: by their names after `base_model.model.`.
        settings: values of adapter_config.json that differ from `SETTINGS`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    found = {f"base_model.model.{name}": np.ascontiguousarray(values) for name, values in tensors.items()}
    save_file(found, directory / "adapter_model.safetensors")
    return directory


def low_rank(rng: np.random.Generator, module: str, shape: tuple[int, int], rank: int = 4) -> dict[str, Floats]:
    """The two matrices of a module with outputs and columns of `shape`."""
    outputs, columns = shape
    down, up = rng.normal(0, 0.1, (rank, columns)), rng.normal(0, 0.1, (outputs, rank))
    return {f"{module}.lora_A.weight": down.astype(np.float32), f"{module}.lora_B.weight": up.astype(np.float32)}


def added(tensors: Mapping[str, NDArray[Any]], module: str, scale: float = 6 / 4) -> NDArray[np.float64]:
    """What the two matrices of a module add to its weight."""
    down, up = (tensors[f"{module}.{part}.weight"].astype(np.float64) for part in ("lora_A", "lora_B"))
    product: NDArray[np.float64] = scale * (up @ down)
    return product


def write_adapter_of(config: ModelConfig, directory: Path, *, seed: int) -> Path:
    """One for the queries of every layer of a model, that makes other tokens likely."""
    rng, tensors = np.random.default_rng(seed), dict[str, Floats]()
    for layer in range(config.num_layers):
        shape = (config.layers[layer].attention.query_size, config.hidden_size)
        tensors |= {name: 10 * one for name, one in low_rank(rng, f"model.layers.{layer}.self_attn.q_proj", shape).items()}
    return write_adapter(directory, tensors)
