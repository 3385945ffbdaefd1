"""Parse the header of a GGUF file: metadata and a table of tensors.

Files are untrusted: every count and length is checked against the file's size before use. Metadata values are decoded on first use.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError

MAGIC = b"GGUF"
GGUF_VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16
"""Largest number of metadata keys, and of tensors."""
MAX_ARRAY_ITEMS = 1 << 21
"""Largest number of strings and nested arrays in all metadata together, and of numbers in one array."""
MAX_NESTING = 4
MAX_TEXT_BYTES = 64 << 20
"""Largest size of one string, or of all strings in one array."""
MAX_NAME_BYTES = 1024
"""Largest size of a metadata key or a tensor's name. Usual sizes are a few dozen bytes."""
MAX_DIMENSIONS = 4
_MIN_ENTRY_BYTES = 13  # bytes of the smallest metadata entry: an empty key, a type and a 1-byte value

_STRUCT_FORMATS_BY_VALUE_TYPE = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LENGTH_STRUCT = struct.Struct("<Q")
_BYTES_BY_VALUE_TYPE = {number: struct.calcsize(text) for number, text in _STRUCT_FORMATS_BY_VALUE_TYPE.items()} | {_BOOL: 1}


@dataclass(frozen=True, slots=True)
class BlockType:
    """A GGUF storage type: every `num_items` consecutive elements of a row take `num_bytes` bytes."""

    name: str
    num_items: int
    num_bytes: int


# fmt: off
BLOCK_TYPES: Mapping[int, BlockType] = {
    number: BlockType(name, num_items, num_bytes)
    for number, name, num_items, num_bytes in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2), (28, "F64", 1, 8),
        (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8),
        (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136), (29, "IQ1_M", 256, 56),
        (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18),
    )
}
# fmt: on


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a GGUF file. `data` is a view of its bytes. `shape` is in numpy's order, which is the reverse of the file's."""

    path: Path
    name: str
    block_type: BlockType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def __str__(self) -> str:
        return f"{self.path}: tensor {self.name!r}"


class Metadata(Mapping[str, Any]):
    """Metadata values by key: int, float, bool, str or list. A value is decoded only when it is read, because vocabularies are long."""

    def __init__(self, header: "HeaderReader", positions: Mapping[str, tuple[int, int]]) -> None:
        self._header = header
        self._positions = positions

    def __getitem__(self, key: str) -> Any:
        value_type, start = self._positions[key]
        return self._header.read_value_at(start, value_type, key)

    def __contains__(self, key: object) -> bool:
        return key in self._positions

    def __iter__(self) -> Iterator[str]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)


class HeaderReader:
    """Reads a header sequentially. The read position never passes the end of the file."""

    def __init__(self, path: Path, file_bytes: NDArray[np.uint8]) -> None:
        self._path = path
        self._bytes = file_bytes
        self._view = file_bytes.data
        self._position = 0
        self._array_items_left = MAX_ARRAY_ITEMS

    def raise_damaged(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {problem}; the file is damaged, download it again")

    def read_counts(self) -> tuple[int, int]:
        """Read the number of tensors and of metadata keys."""
        magic = bytes(self._view[:4])
        if magic != MAGIC:
            raise CheckpointError(f"{self._path} begins with {magic!r} instead of {MAGIC!r}: it is not a GGUF file, use another file")
        self._position = 4
        version = self._read_number("<I", "the version")
        if version not in GGUF_VERSIONS:
            raise CheckpointError(
                f"{self._path} is GGUF version {version}, supported are {GGUF_VERSIONS[0]} and {GGUF_VERSIONS[1]}, little-endian; "
                "get a newer conversion of the model"
            )
        counts = self._read_number("<Q", "the number of tensors"), self._read_number("<Q", "the number of metadata keys")
        limit = min(MAX_ENTRIES, len(self._bytes) // _MIN_ENTRY_BYTES)
        for field_name, count in zip(("tensors", "metadata keys"), counts, strict=True):
            if count > limit:
                self.raise_damaged(f"{count} {field_name} in a file of {len(self._bytes)} bytes, at most {limit} are possible")
        return counts

    def read_metadata_positions(self, count: int) -> dict[str, tuple[int, int]]:
        """Read `count` metadata entries and return the type and byte position of each value, by key."""
        positions: dict[str, tuple[int, int]] = {}
        for _ in range(count):
            key = self._read_text("a metadata key", MAX_NAME_BYTES)
            if key in positions:
                self.raise_damaged(f"metadata key {key!r} appears twice")
            value_type = self._read_number("<I", key)
            positions[key] = value_type, self._position
            self._skip_value(value_type, key)
        return positions

    def read_tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        """Read `count` entries of the tensor table and return the tensors by name."""
        table = [self._read_tensor_entry() for _ in range(count)]
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        byte_ranges: list[tuple[int, int, str]] = []
        for name, shape, block_type, offset in table:
            if name in tensors:
                self.raise_damaged(f"tensor {name!r} appears twice")
            if offset % alignment:
                self.raise_damaged(f"tensor {name!r} is at offset {offset}, which is no multiple of the alignment {alignment}")
            begin = data_start + offset
            end = begin + math.prod(shape) // block_type.num_items * block_type.num_bytes
            if end > len(self._bytes):
                self.raise_damaged(
                    f"tensor {name!r} of type {block_type.name} and shape {list(shape)} is at bytes {begin} to {end} of {len(self._bytes)}"
                )
            tensors[name] = GgufTensor(self._path, name, block_type, shape, self._bytes[begin:end])
            byte_ranges.append((begin, end, name))
        for (_, end, first), (begin, _, second) in pairwise(sorted(byte_ranges)):
            if begin < end:
                self.raise_damaged(f"tensors {first!r} and {second!r} overlap at byte {begin} (the first ends at {end})")
        return tensors

    def read_value_at(self, start: int, value_type: int, key: str) -> Any:
        """Return the metadata value of type `value_type` at byte `start`, without moving the read position."""
        previous, self._position = self._position, start
        try:
            return self._read_value(value_type, key)
        finally:
            self._position = previous

    def _read_tensor_entry(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        name = self._read_text("a tensor's name", MAX_NAME_BYTES)
        num_dimensions = self._read_number("<I", name)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self.raise_damaged(f"tensor {name!r} has {num_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._read_number("<Q", name) for _ in range(num_dimensions))[::-1]
        number = self._read_number("<I", name)
        offset = self._read_number("<Q", name)
        block_type = BLOCK_TYPES.get(number)
        if block_type is None:
            raise CheckpointError(f"{self._path}: tensor {name!r} is of unknown type {number}; use a file with another quantisation")
        if 0 in shape or shape[-1] % block_type.num_items:
            self.raise_damaged(
                f"tensor {name!r} has shape {list(shape)}; every size must be at least 1, "
                f"and rows of type {block_type.name} a multiple of {block_type.num_items}"
            )
        return name, shape, block_type, offset

    def _skip_bytes(self, num_bytes: int, field_name: str) -> int:
        """Advance the read position by `num_bytes` and return the previous position."""
        start = self._position
        if num_bytes > len(self._bytes) - start:
            self.raise_damaged(f"{field_name!r} at byte {start} needs {num_bytes} bytes of a file of {len(self._bytes)}")
        self._position = start + num_bytes
        return start

    def _read_number(self, struct_format: str, field_name: str) -> Any:
        return struct.unpack_from(struct_format, self._view, self._skip_bytes(struct.calcsize(struct_format), field_name))[0]

    def _read_text(self, field_name: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
        num_bytes = self._read_number("<Q", field_name)
        if num_bytes > max_bytes:
            self.raise_damaged(f"{field_name!r} at byte {self._position} has {num_bytes} bytes, at most {max_bytes} are possible")
        start = self._skip_bytes(num_bytes, field_name)
        return self._decode_text(start, self._position, field_name)

    def _string_spans(self, count: int, field_name: str) -> Iterator[tuple[int, int]]:
        """Yield start and end of each of `count` strings. The loop calls no other method, because vocabularies are long."""
        view, position = self._view, self._position
        last = min(len(self._bytes), position + MAX_TEXT_BYTES) - _LENGTH_STRUCT.size
        for _ in range(count):
            if position > last:
                self.raise_damaged(
                    f"the strings of {field_name!r} reach byte {position + _LENGTH_STRUCT.size} of a file of {len(self._bytes)}, "
                    f"all of them may have {MAX_TEXT_BYTES}"
                )
            start = position + _LENGTH_STRUCT.size
            position = start + _LENGTH_STRUCT.unpack_from(view, position)[0]
            yield start, position
        self._position = position
        self._skip_bytes(0, field_name)

    def _decode_text(self, start: int, end: int, field_name: str) -> str:
        try:
            return str(self._view[start:end], "utf-8")
        except UnicodeDecodeError as error:
            self.raise_damaged(f"{field_name!r} at byte {start} is not UTF-8 text ({error.reason})")

    def _read_array_header(self, field_name: str, depth: int) -> tuple[int, int]:
        """Read the element type and the length of an array."""
        if depth >= MAX_NESTING:
            self.raise_damaged(f"{field_name!r} nests arrays more than {MAX_NESTING} deep")
        return self._read_number("<I", field_name), self._read_number("<Q", field_name)

    def _skip_value(self, value_type: int, field_name: str, depth: int = 0) -> None:
        if value_type == _STRING:
            self._skip_bytes(self._read_number("<Q", field_name), field_name)
        elif value_type == _ARRAY:
            element, count = self._read_array_header(field_name, depth)
            if element in _BYTES_BY_VALUE_TYPE:
                self._skip_bytes(count * _BYTES_BY_VALUE_TYPE[element], field_name)
                return
            self._array_items_left -= count
            if self._array_items_left < 0:
                self.raise_damaged(f"{field_name!r} has an array of {count} entries, {MAX_ARRAY_ITEMS} in all metadata are possible")
            if element == _STRING:
                for _ in self._string_spans(count, field_name):
                    pass
                return
            for _ in range(count):
                self._skip_value(element, field_name, depth + 1)
        else:
            self._skip_bytes(self._value_bytes(value_type, field_name), field_name)

    def _read_value(self, value_type: int, field_name: str, depth: int = 0) -> Any:
        if value_type == _STRING:
            return self._read_text(field_name)
        if value_type == _ARRAY:
            element, count = self._read_array_header(field_name, depth)
            if element in _STRUCT_FORMATS_BY_VALUE_TYPE:
                if count > MAX_ARRAY_ITEMS:
                    self.raise_damaged(f"{field_name!r} has an array of {count} numbers, at most {MAX_ARRAY_ITEMS} are possible")
                start = self._skip_bytes(count * _BYTES_BY_VALUE_TYPE[element], field_name)
                return self._bytes[start : self._position].view(np.dtype(_STRUCT_FORMATS_BY_VALUE_TYPE[element])).tolist()
            if element == _STRING:
                return [self._decode_text(start, end, field_name) for start, end in self._string_spans(count, field_name)]
            return [self._read_value(element, field_name, depth + 1) for _ in range(count)]
        if value_type == _BOOL:
            return self._read_number("<B", field_name) != 0
        self._value_bytes(value_type, field_name)
        return self._read_number(_STRUCT_FORMATS_BY_VALUE_TYPE[value_type], field_name)

    def _value_bytes(self, value_type: int, field_name: str) -> int:
        if value_type not in _BYTES_BY_VALUE_TYPE:
            self.raise_damaged(f"{field_name!r} has a value of type {value_type}, expected 0 to 12")
        return _BYTES_BY_VALUE_TYPE[value_type]
