"""Which rows of a pass have which adapter."""

from collections.abc import Container

import numpy as np
from numpy.typing import NDArray

from paceline.runtimes.base import ForwardBatch, RowRange


def rows_by_adapter(batch: ForwardBatch) -> dict[int, NDArray[np.int32]]:
    """The rows of each adapter that any has, ascending, by its number; empty where none has one."""
    ranges: dict[int, list[NDArray[np.int32]]] = {}
    for item in batch.ranges:
        if item.adapter:
            ranges.setdefault(item.adapter, []).append(np.arange(item.start, item.start + item.num_rows, dtype=np.int32))
    return {number: np.concatenate(own) for number, own in ranges.items()}


def part_of(batch: ForwardBatch, adapters: Container[int]) -> tuple[ForwardBatch, NDArray[np.int32]]:
    """The rows of these adapters as a pass of their own, and their numbers in `batch`, ascending."""
    ranges, rows, start = list[RowRange](), [np.zeros(0, np.int32)], 0
    for item in batch.ranges:
        if item.adapter in adapters:
            ranges.append(item._replace(start=start))
            rows.append(np.arange(item.start, item.start + item.num_rows, dtype=np.int32))
            start += item.num_rows
    numbers = np.concatenate(rows)
    return ForwardBatch(batch.positions[numbers], tuple(ranges)), numbers
