"""Read the tensors of a safetensors or PyTorch file. Pickled code in a PyTorch file is not run."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import BackendUnavailableError, CheckpointError, shortened, summarize_error
from paceline.installation import install_command
from paceline.models.storage.mapped_files import map_file
from paceline.models.storage.safetensors_file import StoredTensor, read_header, view_tensor

if TYPE_CHECKING:
    import torch

ITEM_TYPES = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8", "BOOL": "|b1", "U8": "|u1", "I8": "|i1",
    "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8",
}  # fmt: skip
"""numpy types by the type names of safetensors. bf16, which numpy lacks, is read as uint16."""

_TORCH_TYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "bool": "BOOL", "uint8": "U8", "int8": "I8",
    "int16": "I16", "int32": "I32", "int64": "I64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file: shape, type as safetensors names it, and a function that returns the values (bf16 as uint16)."""

    shape: tuple[int, ...]
    dtype: str
    read_values: Callable[[], NDArray[Any]]


def read_tensors(path: Path, file_kind: str) -> dict[str, FileTensor]:
    """Return the tensors of a file, by name, without reading their values.

    Args:
        file_kind: "head" or "adapter", for errors.

    Raises:
        CheckpointError: The file is damaged, or holds anything but tensors.
        BackendUnavailableError: The file is a PyTorch file, and torch is not installed.
    """
    if path.suffix != ".safetensors":
        return _read_flat_torch_file(path, file_kind)
    stored, file_bytes = read_header(path), map_file(path)
    end = max((tensor.end for tensor in stored.values()), default=len(file_bytes))
    if end < len(file_bytes):
        raise CheckpointError(
            f"{path} holds {len(file_bytes) - end} bytes after its last tensor, which is invalid; download the {file_kind} again"
        )
    return {name: FileTensor(tensor.shape, tensor.dtype, partial(_open_tensor, tensor, file_bytes)) for name, tensor in stored.items()}


def _open_tensor(stored: StoredTensor, file_bytes: NDArray[np.uint8]) -> NDArray[Any]:
    return view_tensor(stored, file_bytes, np.dtype(ITEM_TYPES[stored.dtype]))


def _read_flat_torch_file(path: Path, file_kind: str) -> dict[str, FileTensor]:
    """Return the tensors of a PyTorch file, which must contain a dictionary with only tensors as values."""
    content = read_torch_file(path, file_kind)
    import torch

    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise CheckpointError(f"{path} must hold only tensors by name: it is no {file_kind}, or a training checkpoint; export its weights")
    for name, one in content.items():
        if one.layout is not torch.strided or one.device.type != "cpu":
            raise CheckpointError(f"{path}: tensor {shortened(name)} is not a dense tensor with values; use the {file_kind} as safetensors")
    return {str(name): FileTensor(tuple(one.shape), _safetensors_type(one), partial(_to_numpy, one)) for name, one in content.items()}


def read_torch_file(path: Path, file_kind: str) -> Any:
    """Return the contents of a PyTorch file, which may hold only tensors and plain values.

    Args:
        file_kind: "head" or "adapter", for errors.

    Raises:
        CheckpointError: The file is damaged, or holds objects of other types.
        BackendUnavailableError: torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise BackendUnavailableError(
            f"{path} is a PyTorch file, which needs torch: {install_command('torch')}, or use the {file_kind} as safetensors"
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the checks below and those of callers replace torch's warnings
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # torch cannot map files that torch before 1.6 wrote
                return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling untrusted bytes can raise any exception
        raise CheckpointError(
            f"{path} cannot be read as a file of tensors ({summarize_error(error)}); use safetensors, or download the {file_kind} again"
        ) from error


def _safetensors_type(tensor: "torch.Tensor") -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return _TORCH_TYPES.get(name, name)


def _to_numpy(tensor: "torch.Tensor") -> NDArray[Any]:
    import torch

    dense = tensor.detach().contiguous()
    return (dense.view(torch.uint16) if dense.dtype == torch.bfloat16 else dense).numpy()
