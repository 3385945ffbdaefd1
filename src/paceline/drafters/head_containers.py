"""The files heads come in: which files of a directory hold the tensors, and which tensors each holds. Nothing in a file is run."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import BackendUnavailableError, CheckpointError, described
from paceline.installation import install_extra
from paceline.models.safetensors_file import StoredTensor, checkpoint_files, map_file, read_header, view_tensor
from paceline.small_files import INDEX_BYTES, read_json

if TYPE_CHECKING:
    import torch

METHOD_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.pt")
"""Files that hold a head and nothing else."""

ITEM_TYPES = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8", "BOOL": "|b1", "U8": "|u1", "I8": "|i1",
    "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8",
}  # fmt: skip
"""Types as safetensors calls them, and how numpy reads them; bf16 as the uint16 of its bits."""

_TORCH_TYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "bool": "BOOL", "uint8": "U8", "int8": "I8",
    "int16": "I16", "int32": "I32", "int64": "I64",
}  # fmt: skip
_NAMES_IN_AN_ERROR = 20


@dataclass(frozen=True, slots=True)
class HeadTensor:
    """One tensor of a head: its shape, its type as safetensors calls it, and how to open it (bf16 as the uint16 of its bits)."""

    shape: tuple[int, ...]
    dtype: str
    open: Callable[[], NDArray[Any]]


def files_of(directory: Path) -> tuple[Path, ...]:
    """The files of a directory that hold the head; safetensors before PyTorch's.

    Raises:
        CheckpointError: there are none, or an index names what is not there.
    """
    for name in METHOD_FILES:
        if (directory / name).is_file():
            return (directory / name,)
    if (directory / "model.safetensors").is_file() or (directory / "model.safetensors.index.json").is_file():
        return checkpoint_files(directory)
    if (directory / "pytorch_model.bin").is_file():
        return (directory / "pytorch_model.bin",)
    if (directory / "pytorch_model.bin.index.json").is_file():
        return _shards(directory / "pytorch_model.bin.index.json")
    others = sorted(directory.glob("*.safetensors"))
    if len(others) == 1:
        return (others[0],)
    looked_for = ", ".join((*METHOD_FILES, "model.safetensors", "pytorch_model.bin"))
    found = f"{len(others)} *.safetensors files" if others else "no weights"
    raise CheckpointError(f"{directory} holds {found}; expected config.json with {looked_for} or one *.safetensors: name a head or a model")


def read_tensors(path: Path) -> dict[str, HeadTensor]:
    """The tensors of one file, by their names in it.

    Raises:
        CheckpointError: it is damaged, or holds anything but tensors.
        BackendUnavailableError: it is PyTorch's, and torch is not installed.
    """
    if path.suffix != ".safetensors":
        return _torch_file(path)
    stored, file_bytes = read_header(path), map_file(path)
    return {name: HeadTensor(tensor.shape, tensor.dtype, partial(_view, tensor, file_bytes)) for name, tensor in stored.items()}


def listed(items: list[str]) -> str:
    """The items for an error, only the first ones if there are many."""
    rest = len(items) - _NAMES_IN_AN_ERROR
    count = f"{len(items)} tensor{'s' if len(items) > 1 else ''}"
    return f"{count}: {', '.join(items[:_NAMES_IN_AN_ERROR])}{f' and {rest} more' if rest > 0 else ''}"


def _shards(index: Path) -> tuple[Path, ...]:
    """The files an index of PyTorch shards names, which lie beside it."""
    weight_map = (read_json(index, INDEX_BYTES) or {}).get("weight_map")
    names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, Mapping) else []
    wrong = [name for name in names if Path(name).name != name or not name.endswith(".bin") or not (index.parent / name).is_file()]
    if wrong or not names:
        raise CheckpointError(f"{index} names {listed(wrong) if wrong else 'no files'}, expected *.bin files beside it; download it again")
    return tuple(index.parent / name for name in names)


def _view(stored: StoredTensor, file_bytes: NDArray[np.uint8]) -> NDArray[Any]:
    return view_tensor(stored, file_bytes, np.dtype(ITEM_TYPES[stored.dtype]))


def _torch_file(path: Path) -> dict[str, HeadTensor]:
    """The tensors of a PyTorch file: a dictionary of them and nothing else."""
    try:
        import torch
    except ImportError as error:
        raise BackendUnavailableError(
            f"{path} is a PyTorch file, which takes torch to read: {install_extra('torch')}, or use the head as safetensors"
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about files that are refused anyway
            try:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # the format before PyTorch 1.6 cannot be mapped
                content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling untrusted bytes may fail in any way
        raise CheckpointError(
            f"{path} cannot be read as a file of tensors ({described(error)}); use the head as safetensors, or download it again"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise CheckpointError(f"{path} holds more than tensors by name: it is no head's file, or a training checkpoint; export its weights")
    return {str(name): HeadTensor(tuple(tensor.shape), _torch_type(tensor), partial(_array, tensor)) for name, tensor in content.items()}


def _torch_type(tensor: "torch.Tensor") -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return _TORCH_TYPES.get(name, name)


def _array(tensor: "torch.Tensor") -> NDArray[Any]:
    import torch

    dense = tensor.detach().contiguous()
    return (dense.view(torch.uint16) if dense.dtype == torch.bfloat16 else dense).numpy()
