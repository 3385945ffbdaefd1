"""GGUF's blocks laid out as panels by the kernels, without groups between: as fast as memory takes it."""

import numpy as np

from paceline.errors import CapacityError
from paceline.models.gguf.blocks import StoredBlocks, not_finite
from paceline.models.gguf.header import BLOCK_TYPES
from paceline.models.grouped import RUN, GroupedMatrix
from paceline.models.storage.mapped_files import drop_pages
from paceline.runtimes.native.aligned import Arena
from paceline.runtimes.native.library import kernels
from paceline.runtimes.native.panels import OUTPUTS, Panels, empty_panels, fill, flipped
from paceline.runtimes.native.records import BlocksRecord

_NUMBERS = {block_type.name: number for number, block_type in BLOCK_TYPES.items()}
_LARGE = 1 << 25  # bytes of a matrix whose pages are given back while it is laid out, not behind it
_EXPONENTS_OF_HALVES = (104, 143)  # of MXFP4: those whose scales 2^(e - 128) float16 has


def blocks_in_panels(blocks: StoredBlocks, num_threads: int, arena: Arena | None = None) -> Panels:
    """The panels that `in_panels` makes of their groups.

    Raises:
        CheckpointError: a scale is not finite.
        CapacityError: there is no memory.
    """
    (outputs, columns), example = blocks.shape, _example(blocks)
    panels = empty_panels(example, outputs, has_halves=_has_halves(blocks, example), arena=arena)
    raw = blocks.raw if blocks.raw.strides[1] == 1 else np.ascontiguousarray(blocks.raw)
    order = None if blocks.order is None else np.ascontiguousarray(blocks.order, np.int64)
    places = None if blocks.runs is None else np.argsort(blocks.runs).astype(np.int32)
    address = [None if array is None else array.ctypes.data for array in (raw, order, places)]
    sizes = outputs, columns, panels.zero_point, panels.block, flipped(example), raw.strides[0]
    record, library, to = BlocksRecord(_NUMBERS[blocks.block_type.name], panels.kind, *sizes, *address), kernels(), panels.data

    def fill_range(begin: int, end: int) -> None:
        wrong = library.paceline_lay_out_blocks(record, begin, end, to.shape[1], to.ctypes.data)
        if wrong >= 0:
            raise not_finite(blocks.where, wrong, wrong)
        if wrong == -2:
            raise CapacityError(f"{blocks.where} cannot be laid out: no memory is left; use a smaller model, or close other programs")
        assert wrong == -1  # the type is one of those that are read
        if order is None and raw.nbytes > _LARGE:
            drop_pages([raw[begin * OUTPUTS : end * OUTPUTS]])

    fill(panels, fill_range, num_threads)
    return panels


def bytes_in_panels(blocks: StoredBlocks) -> int:
    """What `blocks_in_panels` makes takes, at most; no weight is read."""
    example = _example(blocks)
    has_halves = blocks.block_type.name != "MXFP4" and _has_halves(blocks, example)  # MXFP4's scales would have to be looked at
    return empty_panels(example, blocks.shape[0], has_halves=has_halves).data.nbytes


def _example(blocks: StoredBlocks) -> GroupedMatrix:
    """Groups of one row of zeros: what all rows have in common."""
    zeros = np.zeros((1, blocks.raw.shape[1]), np.uint8)
    return StoredBlocks(zeros, blocks.block_type, blocks.where, runs=blocks.runs).groups()


def _has_halves(blocks: StoredBlocks, example: GroupedMatrix) -> bool:
    """Whether float16 holds the scales, and they can lie in pairs."""
    if blocks.shape[1] // RUN % 2 or example.group != RUN:
        return False
    if blocks.block_type.name == "MXFP4":
        exponents = (blocks.raw if blocks.order is None else blocks.raw[blocks.order])[:, :: blocks.block_type.num_bytes]
        return bool(_EXPONENTS_OF_HALVES[0] <= exponents.min() and exponents.max() <= _EXPONENTS_OF_HALVES[1])
    return blocks.block_type.num_items == RUN
