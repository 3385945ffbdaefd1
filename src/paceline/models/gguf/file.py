"""Open GGUF files as memory maps. A model is in one file, or split into several parts, each with a header and tensors."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, shortened
from paceline.models.gguf.header import GgufTensor, HeaderReader, Metadata
from paceline.models.storage.mapped_files import map_file
from paceline.small_files import is_file, unreadable_error

MAX_SPLITS = 1024
_SPLIT_NAME_PATTERN = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

_FILE_TYPES = (
    *("F32", "F16", "Q4_0", "Q4_1", None, None, None, "Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M"),
    *("Q5_K_S", "Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS", "Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ3_M", "IQ2_S"),
    *("IQ2_M", "IQ4_XS", "IQ1_M", "BF16"),
)
"""Names of the values 0, 1, … of `general.file_type`; None = no longer used. Source: llama.cpp's include/llama.h, `llama_ftype`."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file, or all parts of a split file. `metadata` comes from the first part; `tensors` has those of all parts, by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def file_type(self) -> str | None:
        """Return llama.cpp's name of the quantisation, such as "Q4_K_M"; None = the metadata do not contain it."""
        number = self.metadata.get("general.file_type")
        return _FILE_TYPES[number] if isinstance(number, int) and 0 <= number < len(_FILE_TYPES) else None

    @property
    def main_block_type(self) -> str:
        """Return the name of the block type that has the most bytes in the file."""
        bytes_by_type: Counter[str] = Counter()
        for tensor in self.tensors.values():
            bytes_by_type[tensor.block_type.name] += tensor.data.nbytes
        return max(bytes_by_type, key=bytes_by_type.__getitem__, default="no tensors")


def open_gguf(path: Path) -> GgufFile:
    """Map a GGUF file and read its header. Any part of a split file (`name-00001-of-00003.gguf`) opens all parts.

    Raises:
        CheckpointError: A part is missing or truncated, or a header does not fit the size of its file.
    """
    parts = split_parts(path)
    first = _open_part(parts[0])
    tensors = dict(first.tensors)
    for part in parts[1:]:
        part_tensors = _open_part(part).tensors
        duplicates = sorted(set(part_tensors) & set(tensors))
        if duplicates:
            raise CheckpointError(
                f"{part} holds tensor {duplicates[0]!r} a second time; the parts are of different models, download them again"
            )
        tensors.update(part_tensors)
    declared = first.metadata.get("split.tensors.count", len(tensors))
    if len(parts) > 1 and declared != len(tensors):
        raise CheckpointError(
            f"{parts[0]} declares {shortened(declared)} tensors in {len(parts)} parts, they hold {len(tensors)}; download them again"
        )
    if len(parts) == 1 and first.metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{path} is one of {shortened(first.metadata['split.count'])} parts but is not named name-00001-of-0000N.gguf; "
            "restore the names of the parts"
        )
    return GgufFile(parts[0], first.metadata, tensors)


def split_parts(path: Path) -> tuple[Path, ...]:
    """Return the paths of all parts of a split file in order, or only `path` for any other file.

    Raises:
        CheckpointError: A part is missing.
    """
    match = _SPLIT_NAME_PATTERN.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MAX_SPLITS:
        raise CheckpointError(
            f"{path} names part {match['number']} of {match['count']}; expected 1 to the number of parts, at most {MAX_SPLITS}"
        )
    parts = tuple(path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1))
    missing = [part.name for part in parts if not is_file(part)]
    if missing:
        raise CheckpointError(f"{path.parent} lacks {len(missing)} of {count} parts: {', '.join(missing[:20])}; download them again")
    return parts


def _open_part(path: Path) -> GgufFile:
    try:
        file_bytes = map_file(path)
    except OSError as error:
        raise unreadable_error(path, error) from error
    if len(file_bytes) < 24:
        raise CheckpointError(f"{path} has {len(file_bytes)} bytes, a GGUF file has at least 24: truncated, download it again")
    header = HeaderReader(path, file_bytes)
    num_tensors, num_keys = header.read_counts()
    metadata = Metadata(header, header.read_metadata_positions(num_keys))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment > 1 << 20 or alignment & (alignment - 1):
        header.raise_damaged(f"general.alignment is {shortened(alignment)}, expected a power of two up to {1 << 20}")
    return GgufFile(path, metadata, header.read_tensors(num_tensors, alignment))
