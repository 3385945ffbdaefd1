"""Drafts of pairs grown in the kernels: one call from the true pairs to the finished tree.

A proposal costs the host what it touches: behind a pass that read megabytes of weights every function and every array must be fetched into
the cache again. So numbers are packed at once, and the result is read at once.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.kv_cache.row_plan import TreeLayout
from paceline.models.config import WeightType
from paceline.models.mapped_files import MappedFiles
from paceline.models.weights import Tensor
from paceline.runtimes.base import FloatArray
from paceline.runtimes.head import DRAW
from paceline.runtimes.native.choosing import ChoiceMemory, layout_number
from paceline.runtimes.native.execution import Execution
from paceline.runtimes.native.library import WANTED, Growing
from paceline.runtimes.native.records import Pass

MOST_TRUE = 64
"""Pairs with the target's features that run at once."""

_KINDS = {WeightType.F32: 0, WeightType.F16: 1, WeightType.BF16: 2}  # as in kernels/native.h
_LEAST_BLOCKS = 64


class GrowerNetwork(NamedTuple):
    """A network, the buffers where it reads embeddings and features, and those where it leaves features and records."""

    execution: Execution
    embedding: int
    features: Sequence[int]
    feature_out: int
    ranked: int


class NativeGrower:
    """Grows drafts with two networks over one cache, which may be the same.

    Args:
        true, drafted: of pairs with the target's features, and with the head's own.
        embedding: the table.
        count: ranks of a record.
        count_passes: told how many passes ran.
        arrays: what the networks read.
    """

    most_true = MOST_TRUE

    def __init__(
        self,
        true: GrowerNetwork,
        drafted: GrowerNetwork,
        embedding: Tensor,
        count: int,
        count_passes: Callable[[int], None],
        arrays: Sequence[NDArray[Any]] = (),
    ) -> None:
        self._true, self._drafted, self._count_passes = true.execution, drafted.execution, count_passes
        self._grow = drafted.execution.kernels.paceline_grow
        self._arrays: dict[str, NDArray[Any]] = {"table": np.ascontiguousarray(embedding.array)}
        self._files = MappedFiles([self._arrays["table"], *arrays])
        self._cos, self._sin = (ctypes.c_void_p * 2)(), (ctypes.c_void_p * 2)()
        self._pass, self._size = Pass(num_ranges=1, cos=ctypes.addressof(self._cos), sin=ctypes.addressof(self._sin)), (0, 0)
        (feature,), true_width = drafted.features, true.execution.width(true.features[0])
        self._growing = Growing(
            true_program=true.execution.program, program=drafted.execution.program, one_pass=ctypes.pointer(self._pass),
            table=self._arrays["table"].ctypes.data, row_bytes=self._arrays["table"].strides[0], kind=_KINDS[embedding.weight_type],
            num_embedded=embedding.shape[0], embedding_width=drafted.execution.width(drafted.embedding),
            feature_width=drafted.execution.width(feature),
            embedding=drafted.embedding, feature=feature, feature_out=drafted.feature_out, ranked=drafted.ranked,
            record_floats=drafted.execution.width(drafted.ranked), count=count, true_embedding=true.embedding,
            true_inputs=len(true.features), true_width=true_width, true_feature_out=true.feature_out, true_ranked=true.ranked,
        )  # fmt: skip
        self._growing.true_feature[: len(true.features)] = true.features
        self._pairs: Sequence[tuple[FloatArray, FloatArray]] = ()
        self._reach(0)
        self._growing.num_ropes = len(self._pairs)
        self._choice = ChoiceMemory(self._growing.choice)
        self._features: FloatArray = self._named("features", MOST_TRUE * len(true.features) * true_width, np.float32).reshape(MOST_TRUE, -1)
        self._token_ids = self._named("token_ids", MOST_TRUE, np.int32)
        self._named("range", 6, np.int32)
        self._pass.ranges = self._growing.range
        self._block_table = self._placed("block_tables", np.zeros(_LEAST_BLOCKS, np.int32))
        true.execution.make_room(MOST_TRUE)
        self._argument = ctypes.pointer(self._growing)

    def grow(
        self,
        token_ids: Sequence[int],
        features: Sequence[FloatArray],
        block_table: Sequence[int],
        *,
        base: int,
        first_slot: int,
        width: int,
        depth: int,
        row_budget: int,
        max_depth: int,
        layout: TreeLayout,
        seed: int,
        sample_index: int,
        temperature: float,
    ) -> list[int]:
        num_true, num_blocks = len(token_ids), len(block_table)
        if self._size != (width, depth) or row_budget > self._choice.num_rows:
            self._make_room(width, depth, row_budget)
        self._reach(base + depth)
        if num_blocks > len(self._block_table):
            self._block_table = self._placed("block_tables", np.zeros(1 << (num_blocks - 1).bit_length(), np.int32))
        if len(features) == 1:
            self._features[:num_true] = features[0]
        else:
            self._features[:num_true] = np.concatenate(features)
        struct.pack_into(f"{num_true}i", self._token_ids.data, 0, *token_ids)
        struct.pack_into(f"{num_blocks}i", self._block_table.data, 0, *block_table)
        WANTED.pack_into(
            self._growing, 0, seed, sample_index, temperature, layout_number(layout), row_budget, max_depth, base, base - num_true,
            first_slot, 0,
        )  # fmt: skip
        self._files.check()
        self._grow(self._argument)
        self._count_passes(self._growing.num_passes)
        return self._choice.found()

    def _make_room(self, width: int, depth: int, row_budget: int) -> None:
        """For drafts of a shape."""
        self._size = width, depth
        growing, rows, nodes = self._growing, max(width * depth, MOST_TRUE), 1 + width + width * width * depth
        growing.width, growing.depth = width, depth
        self._choice.make_room(max(row_budget, depth + 1), nodes)
        self._drafted.make_room(rows)
        for name in ("frontier", "feature_rows"):
            self._named(name, width, np.int32)
        for name in ("row_of", "tokens", "parents", "first", "end"):
            self._named(name, nodes, np.int32)
        for name in ("probs", "reached"):
            self._named(name, nodes, np.float64)
        self._named("draws", width, DRAW)
        self._arrays["tokens"][0] = self._arrays["parents"][0] = -1
        for field in ("first", "end", "tokens", "probs"):
            setattr(growing.choice, field, getattr(growing, field))
        self._arrays["behind"] = np.arange(nodes, dtype=np.int32)
        growing.choice.behind = self._arrays["behind"].ctypes.data
        self._pass.masks = self._named("masks", rows * rows, np.uint8).ctypes.data
        self._pass.selected = self._named("selected", width, np.int32).ctypes.data
        self._placed("range_of_row", np.zeros(rows, np.int32))
        for index, pair in enumerate(self._pairs):
            growing.half = pair[0].shape[1]
            for side, (table, addresses) in enumerate(zip(pair, (self._cos, self._sin), strict=True)):
                angles = self._arrays[f"angles.{index}.{side}"] = np.empty((rows, table.shape[1]), np.float32)
                growing.angles[2 * index + side] = addresses[index] = angles.ctypes.data

    def _reach(self, position: int) -> None:
        """Name tables of rotary angles that hold `position`; others who use them may have let them grow as well."""
        tables = self._drafted.tables
        if tables is None:
            return
        tables.reach(position)
        if self._pairs is not tables.pairs:
            self._pairs = tables.pairs  # alive as long as they are named
            for index, pair in enumerate(self._pairs):
                for side, table in enumerate(pair):
                    self._growing.tables[2 * index + side] = table.ctypes.data

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
