"""Drafts grown in the kernels: one call for all passes behind the first, so that their time on the host is that of one."""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.models.config import WeightType
from paceline.models.weights import Tensor
from paceline.runtimes.head import DRAW, GrownNodes, Growth
from paceline.runtimes.native.execution import Execution
from paceline.runtimes.native.library import Growing, Pass

_KINDS = {WeightType.F32: 0, WeightType.F16: 1, WeightType.BF16: 2}  # as in kernels/native.h
_LEAST_BLOCKS = 64


class GrowerBuffers(NamedTuple):
    """Where the network reads embeddings and features, and where it leaves features and records."""

    embedding: int
    feature: int
    feature_out: int
    ranked: int


class NativeGrower:
    """Grows drafts with the network of one execution.

    Args:
        embedding: the table.
        count: ranks of a record.
        count_passes: told how many passes ran.
    """

    def __init__(
        self, execution: Execution, buffers: GrowerBuffers, embedding: Tensor, count: int, count_passes: Callable[[int], None]
    ) -> None:
        self._execution, self._count_passes = execution, count_passes
        self._arrays: dict[str, NDArray[Any]] = {"table": np.ascontiguousarray(embedding.array)}
        self._pass, self._size = Pass(num_ranges=1), (0, 0)
        feature_width = execution.width(buffers.feature)
        self._growing = Growing(
            program=execution.program, one_pass=ctypes.pointer(self._pass), table=self._arrays["table"].ctypes.data,
            row_bytes=self._arrays["table"].strides[0], kind=_KINDS[embedding.weight_type], num_embedded=embedding.shape[0],
            embedding_width=execution.width(buffers.embedding), feature_width=feature_width, count=count,
            num_ropes=len(execution.angles), record_floats=execution.width(buffers.ranked), **buffers._asdict(),
        )  # fmt: skip
        self._record = self._named("record", 2 + 2 * count, np.float32)
        self._feature = self._named("root_feature", feature_width, np.float32)
        self._named("range", 6, np.int32)
        self._pass.ranges = self._growing.range
        self._block_table = self._placed("block_tables", np.zeros(_LEAST_BLOCKS, np.int32))
        self._argument = ctypes.pointer(self._growing)

    def grow(self, growth: Growth) -> GrownNodes:
        growing, num_blocks = self._growing, len(growth.block_table)
        if self._size != (growth.width, growth.depth):
            self._make_room(growth.width, growth.depth)
        if num_blocks > len(self._block_table):
            self._block_table = self._placed("block_tables", np.zeros(1 << (num_blocks - 1).bit_length(), np.int32))
        self._block_table[:num_blocks] = growth.block_table
        self._record[:], self._feature[:] = growth.record, growth.feature
        growing.base, growing.first_slot, growing.temperature = growth.base, growth.first_slot, 0.0
        if growth.keys is not None:
            self._keys[:], growing.temperature = growth.keys, growth.temperature
        self._execution.kernels.paceline_grow(self._argument)
        self._count_passes(growing.num_passes)
        count = growing.num_nodes
        return GrownNodes(self._tokens[:count].tolist(), self._parents[:count].tolist(), self._probs[:count].tolist())

    def _make_room(self, width: int, depth: int) -> None:
        """For drafts of a shape."""
        self._size = width, depth
        growing, rows, nodes = self._growing, width * depth, 1 + width + width * width * depth
        growing.width, growing.depth = width, depth
        self._execution.make_room(rows)
        for name in ("frontier", "feature_rows"):
            self._named(name, width, np.int32)
        for name, dtype in (("row_of", np.int32), ("reached", np.float64)):
            self._named(name, nodes, dtype)
        self._named("draws", width, DRAW)
        self._tokens, self._parents = self._named("tokens", nodes, np.int32), self._named("parents", nodes, np.int32)
        self._probs, self._keys = self._named("probs", nodes, np.float64), self._named("keys", depth, np.uint64)
        self._tokens[0] = self._parents[0] = -1
        self._probs[0] = 1.0
        self._pass.masks = self._named("masks", rows * rows, np.uint8).ctypes.data
        self._pass.selected = self._named("selected", width, np.int32).ctypes.data
        self._placed("range_of_row", np.zeros(rows, np.int32))
        for index, pair in enumerate(self._execution.angles):
            growing.half = pair[0].shape[1]
            for side, (table, field) in enumerate(zip(pair, (self._pass.cos, self._pass.sin), strict=True)):
                angles = self._arrays[f"angles.{index}.{side}"] = np.empty((rows, table.shape[1]), np.float32)
                growing.tables[2 * index + side] = table.ctypes.data
                growing.angles[2 * index + side] = field[index] = angles.ctypes.data

    def _named(self, field: str, size: int, dtype: Any) -> NDArray[Any]:
        """New memory for a field of the record."""
        array = self._arrays[field] = np.zeros(size, dtype)
        setattr(self._growing, field, array.ctypes.data)
        return array

    def _placed(self, field: str, array: NDArray[Any]) -> NDArray[Any]:
        """An array for a field of the pass."""
        self._arrays[f"pass.{field}"] = array
        setattr(self._pass, field, array.ctypes.data)
        return array
