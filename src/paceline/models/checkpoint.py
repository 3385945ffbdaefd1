"""Open a checkpoint in either format: a Hugging Face directory or a GGUF file."""

import os
from pathlib import Path

from paceline.errors import CheckpointError
from paceline.models.config import ModelConfig, read_config
from paceline.models.gguf.config import gguf_config
from paceline.models.gguf.file import open_gguf, split_parts
from paceline.models.gguf.weights import GgufWeights
from paceline.models.storage.checkpoint_weights import CheckpointWeights
from paceline.models.storage.safetensors_file import checkpoint_files
from paceline.models.weights import Weights
from paceline.small_files import is_file


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file. All other checkpoints are directories."""
    return path.suffix.lower() == ".gguf" and not os.path.isdir(path)


def read_model_config(path: Path) -> ModelConfig:
    """Read the configuration of a checkpoint, without its weights.

    Raises:
        CheckpointError: The checkpoint cannot be read, or the model is not supported.
    """
    return gguf_config(open_gguf(path)) if is_gguf(path) else read_config(_require_directory(path))


def open_weights(path: Path, config: ModelConfig, *, regroup: bool = False, num_threads: int = 1) -> Weights:
    """Memory-map the weights of a checkpoint, by internal names.

    Args:
        config: the result of `read_model_config` for `path`.
        regroup: requantise matrices of a GGUF file to groups of 128 columns. This is faster, but changes values.
        num_threads: number of threads that convert quantised matrices.

    Raises:
        CheckpointError: A file is missing or damaged, or does not match `config`.
    """
    if is_gguf(path):
        return GgufWeights(open_gguf(path), config, regroup=regroup, num_threads=num_threads)
    return CheckpointWeights(_require_directory(path), config, num_threads=num_threads)


def weight_files(path: Path) -> tuple[Path, ...]:
    """Return the files that `open_weights` reads."""
    return split_parts(path) if is_gguf(path) else checkpoint_files(_require_directory(path))


def stored_bytes(path: Path) -> int:
    """Return the size in bytes of the files that `open_weights` reads."""
    return sum(file.stat().st_size for file in weight_files(path))


def stored_type(path: Path, weights: Weights, config: ModelConfig) -> str:
    """Return the quantisation of a GGUF file (its main block type if it names none), or a directory's quantised format or float type."""
    if not is_gguf(path):
        return weights.quantized_format or config.weight_type.value
    file = open_gguf(path)
    return file.file_type or file.main_block_type


def _require_directory(path: Path) -> Path:
    if is_file(path):
        raise CheckpointError(f"{path} is not a checkpoint: give a directory with config.json and model.safetensors, or a *.gguf file")
    return path
