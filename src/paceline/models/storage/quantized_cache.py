"""Disk cache of quantised matrices, so that a model is quantised only once. Each pair of model and settings has one safetensors file.

The total size of the files is limited; the least recently used files are removed first.

A file is written under a temporary name, synced and renamed, so a file under its final name is complete. The header,
which model and settings determine, and the checksum (XXH3) are checked when a file is opened. A damaged file is replaced.
"""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from paceline.config import QuantOptions, weights_cache_bytes
from paceline.errors import CheckpointError
from paceline.models.grouped import GroupedMatrix
from paceline.models.quantize import QuantizationScheme, quantization_schemes, quantize_tensor
from paceline.models.storage.mapped_files import map_file
from paceline.models.weights import AnyTensor, GroupedTensor, LazyWeights, TensorInfo, Weights
from paceline.small_files import unreadable_error

CACHE_FOLDER = "quantised"
"""Name of the folder with the files, in the cache directory."""

FORMAT_VERSION = 3  # of the file format and of the rounding in quantize.py; part of the cache key
_ALIGNMENT_BYTES = 64
_TEMPORARY_PREFIX = ".partial-"
_MAX_TEMPORARY_FILE_AGE_S = 24 * 3600.0
_CHECKSUM_BYTES = 16
_NUM_SAMPLED_ROWS = 16  # of each tensor, for the cache key
_BYTES_PER_SAMPLED_ROW = 512
_Schemes = Mapping[str, QuantizationScheme]


@dataclass(frozen=True, slots=True)
class _FileLayout:
    """The expected layout of a file: its header, the byte range of each array by name, and the offset of the checksum at its end."""

    header: bytes
    arrays: Mapping[str, slice]
    checksum_offset: int

    @property
    def num_file_bytes(self) -> int:
        return self.checksum_offset + _CHECKSUM_BYTES


def quantized_weights(
    weights: Weights,
    options: QuantOptions,
    cache_directory: Path | None,
    *,
    files: Sequence[Path] = (),
    num_threads: int = 1,
    notices: list[str] | None = None,
) -> Weights:
    """Return weights with quantised matrices from the cache. If they are not in it, they are quantised and stored first.

    Args:
        cache_directory: None = no cache: each matrix is quantised on first use and kept in memory.
        files: the files that `weights` were read from. The cache key then depends on their sizes, modification times and samples of every
            tensor. Without files the key depends on every byte of the tensors, which takes longer.
        notices: list to which a message is appended if the cache cannot be written.

    Raises:
        CheckpointError: A weight is NaN, infinite or beyond 1e37, or one of `files` can no longer be read.
    """
    schemes = quantization_schemes(weights, options)
    if not schemes:
        return weights

    def quantize(name: str) -> GroupedTensor:
        """Return the quantised tensor, and free the memory of the original."""
        tensor = weights[name]
        try:
            quantized = quantize_tensor(name, tensor, schemes[name], num_threads=num_threads)
        except CheckpointError as error:
            where = f"{files[0] if len(files) == 1 else files[0].parent}: " if files else ""
            raise CheckpointError(f"{where}{error}") from error
        weights.free_tensor(name)
        return quantized

    limit = weights_cache_bytes()
    if cache_directory is not None and limit:
        key = _cache_key(weights, options, schemes, files)
        layout = _file_layout(weights, schemes, key)
        path = cache_directory / CACHE_FOLDER / f"{key}.safetensors"
        try:
            found = _read_file(path, layout, weights, schemes)
            if found is None:
                _evict_until_fits(path.parent, layout.num_file_bytes, limit)
                _write_file(path, layout, schemes, quantize)
                found = _read_file(path, layout, weights, schemes)
            if found is not None:
                _update_access_time(path)
                return QuantizedWeights(weights, found.__getitem__, schemes)
            problem = "the written file cannot be read"
        except OSError as error:
            problem = str(error)
        if notices is not None:
            notices.append(f"the quantised weights could not be stored in {path.parent} ({problem}): they are only in memory")
    return QuantizedWeights(weights, quantize, schemes)


class QuantizedWeights(LazyWeights):
    """Weights that are quantised on first use.

    Args:
        weights: weights before quantisation.
        quantize: function that returns the quantised tensor of a name in `schemes`.
        schemes: how each tensor is quantised. Other tensors are those of `weights`.
    """

    def __init__(self, weights: Weights, quantize: Callable[[str], AnyTensor], schemes: _Schemes) -> None:
        super().__init__(weights, lambda name: quantize(name) if name in schemes else weights[name])
        self._weights, self._schemes = weights, schemes

    def read_rows(self, name: str, row_indices: NDArray[np.int32]) -> NDArray[np.float32]:
        return super().read_rows(name, row_indices) if name in self._schemes else self._weights.read_rows(name, row_indices)

    def free_tensor(self, name: str) -> None:
        super().free_tensor(name)
        self._weights.free_tensor(name)

    def tensor_info(self, name: str) -> TensorInfo:
        info, scheme = self._weights.tensor_info(name), self._schemes.get(name)
        return info if scheme is None else replace(info, bits=scheme.bits, nbytes=scheme.nbytes(info.shape))


def _cache_key(weights: Weights, options: QuantOptions, schemes: _Schemes, files: Sequence[Path]) -> str:
    digest = hashlib.sha256(repr((FORMAT_VERSION, astuple(options), sorted(schemes))).encode())
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise unreadable_error(path, error) from error
        digest.update(repr((status.st_size, status.st_mtime_ns)).encode())
    for name in schemes:
        info = weights.tensor_info(name)
        digest.update(repr((name, info.shape, info.weight_type)).encode())
        for array in weights.source_arrays(name):
            digest.update(_sample_rows(array) if files else xxh3_128_digest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data))
        weights.free_tensor(name)
    return digest.hexdigest()[:40]


def _sample_rows(array: NDArray[Any]) -> bytes:
    """Return the first bytes of some evenly spaced rows."""
    rows = np.unique(np.linspace(0, len(array) - 1, _NUM_SAMPLED_ROWS).astype(np.int64))
    return b"".join(np.ascontiguousarray(array[row]).tobytes()[:_BYTES_PER_SAMPLED_ROW] for row in rows)


def _file_layout(weights: Weights, schemes: _Schemes, key: str) -> _FileLayout:
    header_entries: dict[str, Any] = {"__metadata__": {"format": f"paceline quantised {FORMAT_VERSION}", "key": key}}
    byte_ranges: dict[str, slice] = {}
    offset = 0
    for name, scheme in schemes.items():
        rows, columns = weights.tensor_info(name).shape
        codes = ("I8" if scheme.bits == 8 else "U8", [rows, columns * scheme.bits // 8], rows * columns * scheme.bits // 8)
        groups = columns // scheme.group_size
        for part, (kind, shape, num_bytes) in {"codes": codes, "scales": ("F32", [rows, groups], rows * groups * 4)}.items():
            end = offset + num_bytes
            byte_ranges[f"{name}.{part}"] = slice(offset, end)
            header_entries[f"{name}.{part}"] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
            offset = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            if offset > end:  # safetensors allows no gaps, so the padding is stored as a tensor
                header_entries[f"padding.{end}"] = {"dtype": "U8", "shape": [offset - end], "data_offsets": [end, offset]}
    header_entries["checksum"] = {"dtype": "U8", "shape": [_CHECKSUM_BYTES], "data_offsets": [offset, offset + _CHECKSUM_BYTES]}
    text = json.dumps(header_entries).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT_BYTES)
    header = len(text).to_bytes(8, "little") + text
    start = len(header)
    arrays = {name: slice(start + part.start, start + part.stop) for name, part in byte_ranges.items()}
    return _FileLayout(header, arrays, start + offset)


def _write_file(path: Path, layout: _FileLayout, names: Iterable[str], quantize: Callable[[str], GroupedTensor]) -> None:
    """Quantise all matrices into a temporary file, and then rename the file to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_old_temporary_files(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_TEMPORARY_PREFIX)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(layout.header)
            for name in names:
                matrix = quantize(name).matrix
                for part, array in (("codes", matrix.codes), ("scales", matrix.scales)):
                    file.write(bytes(layout.arrays[f"{name}.{part}"].start - file.tell()))
                    file.write(array.reshape(-1).view(np.uint8).data)
            file.write(bytes(layout.checksum_offset - file.tell()))
            file.flush()
            file.write(xxh3_128_digest(map_file(Path(temporary))[len(layout.header) :].data))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _read_file(path: Path, layout: _FileLayout, weights: Weights, schemes: _Schemes) -> dict[str, GroupedTensor] | None:
    """Return the matrices in a cache file, by name; None if the file is missing or damaged, or has another layout."""
    try:
        content = map_file(path)
    except (FileNotFoundError, CheckpointError):
        return None
    if len(content) != layout.num_file_bytes or content[: len(layout.header)].tobytes() != layout.header:
        return None
    if content[layout.checksum_offset :].tobytes() != xxh3_128_digest(content[len(layout.header) : layout.checksum_offset].data):
        return None
    tensors: dict[str, GroupedTensor] = {}
    for name, scheme in schemes.items():
        info = weights.tensor_info(name)
        codes, scales = (content[layout.arrays[f"{name}.{part}"]].reshape(info.shape[0], -1) for part in ("codes", "scales"))
        matrix = GroupedMatrix(codes.view(scheme.code_type), scales.view("<f4"), None, scheme.bits, scheme.zero_point)
        tensors[name] = GroupedTensor(matrix, info.weight_type)
    return tensors


def cached_bytes(directory: Path) -> int:
    """Return the total size in bytes of all files in the cache."""
    return sum(size for _, size, _ in _cached_files(directory / CACHE_FOLDER))


def _cached_files(folder: Path) -> list[tuple[float, int, Path]]:
    """Return time of last use, size and path of each cached file, least recently used first."""
    found = []
    for path in folder.glob("*.safetensors"):
        with suppress(OSError):  # another process may have removed the file
            status = path.stat()
            found.append((status.st_atime, status.st_size, path))
    return sorted(found)


def _evict_until_fits(folder: Path, size: int, limit: int) -> None:
    """Remove least recently used files until a file of `size` bytes fits. Processes that have mapped a file can still read it.

    Raises:
        OSError: `size` exceeds `limit`.
    """
    if size > limit:
        raise OSError(f"{size / 1e9:.3g} GB are more than the {limit / 1e9:.3g} GB that PACELINE_CACHE_GB allows")
    files = _cached_files(folder)
    total = size + sum(file_size for _, file_size, _ in files)
    for _, file_size, path in files:
        if total <= limit:
            return
        with suppress(OSError):
            path.unlink()
        total -= file_size


def _update_access_time(path: Path) -> None:
    with suppress(OSError):  # the file may be removed by another process, or belong to another user
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _remove_old_temporary_files(directory: Path) -> None:
    """Remove temporary files of killed processes: all that are older than a day."""
    for temporary in directory.glob(f"{_TEMPORARY_PREFIX}*"):
        with suppress(OSError):
            if time.time() - temporary.stat().st_mtime > _MAX_TEMPORARY_FILE_AGE_S:
                temporary.unlink()
