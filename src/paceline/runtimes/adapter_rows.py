"""Which rows of a pass have which adapter."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


class ScalingPart(NamedTuple):
    """The rows of a pass that have X-LoRA adapters, as the scaling pass in front of it.

    Attributes:
        inputs, batch: of the scaling pass. Rows whose scalings are 0 in it have no adapter there.
        rows: of each adapter there, by its number.
        scaled: the adapters whose scalings are not 0 there.
    """

    inputs: Mapping[str, NDArray[Any]]
    batch: ForwardBatch
    rows: Mapping[int, NDArray[np.int32]]
    scaled: Sequence[int]

    @classmethod
    def of(cls, inputs: Mapping[str, NDArray[Any]], batch: ForwardBatch, pass_scalings: Mapping[int, float]) -> "ScalingPart":
        """What has to run in front of a pass.

        Args:
            inputs, batch: of the whole pass.
            pass_scalings: of each X-LoRA adapter in it, by its number.
        """
        scaled = [number for number, scaling in pass_scalings.items() if scaling != 0.0]
        ranges, taken, rows, start = list[RowRange](), list[NDArray[np.int32]](), dict[int, list[NDArray[np.int32]]](), 0
        for item in batch.ranges:
            if item.adapter in pass_scalings:
                ranges.append(item._replace(start=start, adapter=item.adapter if item.adapter in scaled else 0))
                taken.append(np.arange(item.start, item.start + item.num_rows, dtype=np.int32))
                rows.setdefault(item.adapter, []).append(np.arange(start, start + item.num_rows, dtype=np.int32))
                start += item.num_rows
        numbers = np.concatenate(taken)
        return cls(
            {name: values[numbers] for name, values in inputs.items()},
            ForwardBatch(batch.positions[numbers], tuple(ranges)),
            {number: np.concatenate(own) for number, own in rows.items()},
            scaled,
        )
