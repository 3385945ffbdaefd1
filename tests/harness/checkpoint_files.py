"""The config and the tensors of a checkpoint directory: read, written and changed."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def read_values(directory: Path) -> dict[str, Any]:
    """The values of config.json."""
    values: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return values


def write_values(directory: Path, values: Mapping[str, Any]) -> Path:
    """Write config.json."""
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return directory


def change_config(directory: Path, **values: Any) -> Path:
    """Set values of config.json."""
    return write_values(directory, {**read_values(directory), **values})


def read_tensors(directory: Path) -> dict[str, NDArray[np.float32]]:
    """Every tensor of model.safetensors in float32."""
    from safetensors.torch import load_file

    return {name: tensor.float().numpy() for name, tensor in load_file(directory / "model.safetensors").items()}


def write_tensors(directory: Path, tensors: Mapping[str, NDArray[Any]], file: str = "model.safetensors") -> None:
    """Replace the tensors of a file."""
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, directory / file)


def edit_tensors(directory: Path, change: Callable[[dict[str, Any]], object], file: str = "model.safetensors") -> None:
    """Change the tensors of a file, each in its own type."""
    from safetensors.numpy import load_file

    tensors = {name: array.copy() for name, array in load_file(directory / file).items()}
    change(tensors)
    write_tensors(directory, tensors, file)


def blur_weights(directory: Path) -> Path:
    """Change all weights a little, so that a copy of a target is a draft model that is often right."""
    random = np.random.default_rng(6)

    def change(tensors: dict[str, Any]) -> None:
        for array in tensors.values():
            array += random.normal(0.0, 0.02, array.shape).astype(np.float32)

    edit_tensors(directory, change)
    return directory
