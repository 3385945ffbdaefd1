"""Which rows of a pass have which adapter."""

import numpy as np
from numpy.typing import NDArray

from paceline.runtimes.base import ForwardBatch


def rows_by_adapter(batch: ForwardBatch) -> dict[int, NDArray[np.int32]]:
    """The rows of each adapter that any has, ascending, by its number; empty where none has one."""
    ranges: dict[int, list[NDArray[np.int32]]] = {}
    for item in batch.ranges:
        if item.adapter:
            ranges.setdefault(item.adapter, []).append(np.arange(item.start, item.start + item.num_rows, dtype=np.int32))
    return {number: np.concatenate(own) for number, own in ranges.items()}
