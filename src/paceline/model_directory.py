"""Errors for a directory without a model. They explain, from its file names, what the directory contains and what to use instead."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, first_names, shortened
from paceline.small_files import check_regular_file, read_json, unreadable_error

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
"""Each directory with safetensors of a model contains one of these files."""

_ADAPTER = "adapter_config.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def list_directory(directory: Path) -> list[str]:
    """Return the names of the files and folders in a directory, sorted.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    try:
        return sorted(os.listdir(directory))
    except (OSError, ValueError) as error:
        raise unreadable_error(directory, error) from error


def no_model_error(directory: Path) -> CheckpointError:
    """Return the error for a directory without safetensors and GGUF files.

    Raises:
        CheckpointError: the directory cannot be read, or what has the name of a safetensors file is no regular file.
    """
    names = list_directory(directory)
    for name in set(SAFETENSORS) & set(names):
        check_regular_file(directory / name)
    adapter = read_json(directory / _ADAPTER) if _ADAPTER in names else None
    return no_model_among_error(names, directory, adapter=adapter)


def no_model_among_error(names: Sequence[str], source: object, *, adapter: Mapping[str, Any] | None = None) -> CheckpointError:
    """Return the error for a list of file names without safetensors and GGUF files.

    Args:
        source: the directory or the model on the Hub that contains the files, for the error text.
        adapter: content of adapter_config.json, if it was read.
    """
    names = [name for name in names if not name.startswith(".")]
    suffixes = {os.path.splitext(name)[1] for name in names}
    if not names:
        return CheckpointError(f"{source} holds no files; give a directory with config.json and model.safetensors, or a *.gguf file")
    if _ADAPTER in names:
        kind, base = (adapter or {}).get("peft_type", "LORA"), (adapter or {}).get("base_model_name_or_path")
        return CheckpointError(
            f"{source} holds {'a LoRA adapter' if kind == 'LORA' else f'an adapter of type {shortened(kind)}'} for "
            f"{shortened(base) if base else 'another model'}, not a model: give that as the model, and this directory as --adapter "
            "NAME=DIR or --merge-adapter DIR"
        )
    if ".npz" in suffixes:
        return CheckpointError(
            f"{source} holds an MLX model (*.npz), which is read on Apple's MLX only; use the model it was made from, or a GGUF file of it"
        )
    if suffixes & set(_PICKLED) and ".safetensors" not in suffixes:
        return CheckpointError(
            f"{source} holds PyTorch *.bin weights only, which may run code when read; convert them: load the model with "
            "transformers and save it again with save_pretrained(), which writes model.safetensors"
        )
    return CheckpointError(
        f"{source} holds neither {' nor '.join(SAFETENSORS)}, and no *.gguf file, only {first_names(names)}; download the model again"
    )
