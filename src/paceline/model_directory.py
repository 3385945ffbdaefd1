"""Tells from a directory's files what it holds instead of a model we can read, so that the user knows what to get."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, shortened
from paceline.small_files import read_json, unreadable

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
"""One of these is in every directory with a model's safetensors."""

_ADAPTER = "adapter_config.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_NAMES_IN_AN_ERROR = 10


def names_in(directory: Path) -> list[str]:
    """Names of the entries of a directory, sorted.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return sorted(os.listdir(directory))
    except (OSError, ValueError) as error:
        raise unreadable(directory, error) from error


def without_model(directory: Path) -> CheckpointError:
    """The error for a directory without safetensors and GGUF files; it tells what the directory is.

    Raises:
        CheckpointError: it cannot be read.
    """
    names = names_in(directory)
    adapter = read_json(directory / _ADAPTER) if _ADAPTER in names else None
    return no_model_among(names, directory, adapter=adapter)


def no_model_among(names: Sequence[str], place: object, *, adapter: Mapping[str, Any] | None = None) -> CheckpointError:
    """The error for files without safetensors and GGUF files among them; it tells what they are.

    Args:
        place: what holds them.
        adapter: what adapter_config.json holds.
    """
    names = [name for name in names if not name.startswith(".")]
    suffixes = {os.path.splitext(name)[1] for name in names}
    if not names:
        return CheckpointError(f"{place} holds no files; give a directory with config.json and model.safetensors, or a *.gguf file")
    if _ADAPTER in names:
        kind, base = (adapter or {}).get("peft_type", "LORA"), (adapter or {}).get("base_model_name_or_path")
        return CheckpointError(
            f"{place} holds {'a LoRA adapter' if kind == 'LORA' else f'an adapter of type {shortened(kind)}'} for "
            f"{shortened(base) if base else 'another model'}, not a model: give that as the model, and this directory as --adapter "
            "NAME=DIR or --merge-adapter DIR"
        )
    if ".npz" in suffixes:
        return CheckpointError(
            f"{place} holds an MLX model (*.npz), which is read on Apple's MLX only; use the model it was made from, or a GGUF file of it"
        )
    if suffixes & set(_PICKLED) and ".safetensors" not in suffixes:
        return CheckpointError(
            f"{place} holds PyTorch *.bin weights only, which may run code when read; convert them: load the model with "
            "transformers and save it again with save_pretrained(), which writes model.safetensors"
        )
    return CheckpointError(
        f"{place} holds neither {' nor '.join(SAFETENSORS)}, and no *.gguf file, only {_listed(names)}; download the model again"
    )


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _NAMES_IN_AN_ERROR
    return ", ".join(names[:_NAMES_IN_AN_ERROR]) + (f" and {rest} more" if rest > 0 else "")
