"""Read safetensors files. They contain the header's length in 8 bytes (little-endian), a JSON header, and the tensors' bytes.

Files are untrusted: every number in the header is checked against the file's size before use.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, shortened
from paceline.model_directory import SAFETENSORS, no_model_error
from paceline.small_files import INDEX_BYTES, is_file, json_object, open_regular_file, read_json, unreadable_error

MAX_DIMENSIONS = 8
_SHARD_NAME_PATTERN = re.compile(r"[^/\\\0]{1,200}\.safetensors")
_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
_ITEM_BYTES |= {"I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a tensor in a safetensors file: bytes `begin` up to but excluding `end`, from the start of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def checkpoint_files(directory: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a checkpoint: `model.safetensors`, or the shards in its index.

    Raises:
        CheckpointError: No file is found, or a shard in the index is missing.
    """
    single, index = (directory / name for name in SAFETENSORS)
    if is_file(single):
        return (single,)
    if is_file(index):
        return _shard_paths(index)
    raise no_model_error(directory)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the location of every tensor in a file, by name.

    Raises:
        CheckpointError: The file is truncated, or its header does not fit its size.
    """
    try:
        with open_regular_file(path) as file:
            file_size = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            limit = min(INDEX_BYTES, max(file_size - 8, 0))
            if file_size < 10 or not 2 <= header_bytes <= limit:
                raise CheckpointError(
                    f"{path} declares a header of {header_bytes} bytes, but at most {limit} are possible in a file of {file_size}: "
                    "it is truncated or no safetensors file; download it again"
                )
            header = json_object(file.read(header_bytes), f"{path}: the header")
    except OSError as error:
        raise unreadable_error(path, error) from error
    header.pop("__metadata__", None)
    tensors = {name: _parse_header_entry(path, name, entry, 8 + header_bytes, file_size) for name, entry in header.items()}
    _check_overlaps(path, tensors)
    return tensors


def view_tensor(tensor: StoredTensor, file_bytes: NDArray[np.uint8], item_type: "np.dtype[Any]") -> NDArray[Any]:
    """Return a view of a tensor in its mapped file, or a copy if it is not aligned for `item_type`.

    Raises:
        CheckpointError: The file has become shorter since its header was read.
    """
    if tensor.end > len(file_bytes):
        raise CheckpointError(f"{tensor.path} has {len(file_bytes)} bytes, less than when it was opened; download it again")
    array: NDArray[Any] = file_bytes[tensor.begin : tensor.end].view(item_type).reshape(tensor.shape)
    return array if array.flags.aligned else array.copy()


def has_tensor(directory: Path, ending: str) -> bool:
    """Return whether a checkpoint has a tensor whose name ends with `ending`."""
    return any(name.endswith(ending) for path in checkpoint_files(directory) for name in read_header(path))


def most_common_dtype(directory: Path, preferred: tuple[str, ...] = ()) -> str:
    """Return the type with the most bytes in a checkpoint. Types in `preferred` take precedence over all others."""
    num_bytes: Counter[str] = Counter()
    for path in checkpoint_files(directory):
        for tensor in read_header(path).values():
            num_bytes[tensor.dtype] += tensor.end - tensor.begin
    if not num_bytes:
        raise CheckpointError(f"{directory} holds safetensors files without a tensor; download the model again")
    return next((name for name, _ in num_bytes.most_common() if name in preferred), num_bytes.most_common(1)[0][0])


def _shard_paths(index: Path) -> tuple[Path, ...]:
    weight_map = (read_json(index, INDEX_BYTES) or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} is no index of safetensors shards: its weight_map is {shortened(weight_map)}; download it again")
    for name in weight_map.values():
        # A path instead of a file name could point outside the checkpoint.
        if not isinstance(name, str) or _SHARD_NAME_PATTERN.fullmatch(name) is None:
            raise CheckpointError(f"{index} names the shard {shortened(name)}, expected the name of a *.safetensors file next to it")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not is_file(index.parent / name)]
    if missing:
        raise CheckpointError(f"{index.parent} lacks {len(missing)} of {len(names)} shards: {', '.join(missing[:20])}; download them again")
    return tuple(index.parent / name for name in names)


def _parse_header_entry(path: Path, name: str, entry: object, data_start: int, file_size: int) -> StoredTensor:
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"{path}: header entry {name!r} is {shortened(entry)}, expected an object; download the file again")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _is_list_of_sizes(shape) or not _is_list_of_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: header entry {name!r} = {shortened(entry)} lacks a dtype, shape or data_offsets; download it again")
    if len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{path}: tensor {name!r} has {len(shape)} dimensions, expected at most {MAX_DIMENSIONS}; download it again")
    begin, end = data_start + offsets[0], data_start + offsets[1]
    if not begin <= end <= file_size:
        raise CheckpointError(f"{path}: tensor {name!r} is at bytes {begin} to {end} of {file_size}: truncated, download it again")
    num_items, item_bytes = math.prod(shape), _ITEM_BYTES.get(dtype)
    if item_bytes is not None and num_items * item_bytes != end - begin:
        raise CheckpointError(
            f"{path}: tensor {name!r} of type {dtype} and shape {list(shape)} needs {num_items * item_bytes} bytes "
            f"but has {end - begin}; download the file again"
        )
    return StoredTensor(path, dtype, tuple(shape), begin, end)


def _is_list_of_sizes(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_overlaps(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    in_order = sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    for (first_name, first), (second_name, second) in pairwise(in_order):
        if second.begin < first.end:
            raise CheckpointError(
                f"{path}: tensors {first_name!r} and {second_name!r} overlap at byte {second.begin} (the first ends at {first.end}); "
                "the file is damaged, download it again"
            )
