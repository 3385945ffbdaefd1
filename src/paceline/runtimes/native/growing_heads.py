"""Trees of heads that read one feature, in the kernels: one call from the feature to the finished tree."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.kv_cache.row_plan import TreeLayout
from paceline.models.mapped_files import MappedFiles
from paceline.runtimes.base import FloatArray
from paceline.runtimes.head import DRAW
from paceline.runtimes.native.choosing import ChoiceMemory, layout_number
from paceline.runtimes.native.execution import Execution
from paceline.runtimes.native.library import WANTED, Heads
from paceline.runtimes.native.records import Pass


class LastNetwork(NamedTuple):
    """The network that ranks the rows of all heads, the buffer it reads and the one with its records."""

    execution: Execution
    hidden: int
    ranked: int


class NativeHeadsGrower:
    """Grows trees with a network of as many heads as they are deep.

    Args:
        feature: the buffer it reads.
        results: by head, the buffer with its records, or with what `last` takes.
        count: ranks of a record.
        count_passes: told how many passes ran.
        files: what the networks read.
        last: None = the heads rank their own rows.
    """

    def __init__(
        self,
        execution: Execution,
        feature: int,
        results: Sequence[int],
        count: int,
        count_passes: Callable[[int], None],
        files: MappedFiles,
        last: LastNetwork | None,
    ) -> None:
        depth = len(results)
        self.num_ranks, self._depth, self._count_passes, self._num_passes = count, depth, count_passes, 1 if last is None else 2
        self._files = files
        self._networks = execution, last  # alive as long as their programs
        self._grow = execution.kernels.paceline_grow_heads
        firsts, behind = np.arange(depth, dtype=np.int32) * count, np.arange(1, depth + 1, dtype=np.int32).repeat(count)
        self._feature = np.zeros(execution.width(feature), np.float32)
        self._least, self._tokens = np.zeros(depth), np.zeros(depth * count, np.int32)
        self._arrays: dict[str, NDArray[Any]] = {
            "draws": np.zeros(depth, DRAW), "feature": self._feature, "least": self._least, "tokens": self._tokens, "first": firsts,
            "end": firsts.copy(), "probs": np.zeros(depth * count), "outs": np.array(results, np.int32),
        }  # fmt: skip
        addresses = {field: array.ctypes.data for field, array in self._arrays.items()}
        self._pass, self._behind = Pass(), behind
        self._heads = Heads(
            program=execution.program, one_pass=ctypes.pointer(self._pass), heads=depth, width=execution.width(feature), feature_in=feature,
            record_floats=execution.width(results[0]) if last is None else last.execution.width(last.ranked), count=count, **addresses,
        )  # fmt: skip
        if last is not None:
            last.execution.make_room(depth)
            self._heads.lm_head, self._heads.hidden, self._heads.ranked = last.execution.program, last.hidden, last.ranked
        choice = self._heads.choice
        choice.behind = behind.ctypes.data
        for field in ("first", "end", "tokens", "probs"):
            setattr(choice, field, addresses[field])
        self._choice = ChoiceMemory(choice)
        self._argument = ctypes.pointer(self._heads)

    def grow(
        self,
        feature: FloatArray,
        least: Sequence[float],
        *,
        ranks: int,
        position: int,
        row_budget: int,
        layout: TreeLayout,
        seed: int,
        sample_index: int,
        temperature: float,
    ) -> tuple[list[int], list[int]]:
        heads, depth = self._heads, self._depth
        if row_budget > self._choice.num_rows:
            self._choice.make_room(row_budget, row_budget * self.num_ranks)
        self._feature[:] = feature
        if least:
            self._least[:] = least
        WANTED.pack_into(
            heads, 0, seed, sample_index, temperature, layout_number(layout), row_budget, depth, position, position, 0, ranks
        )  # fmt: skip
        self._files.check()
        self._grow(self._argument)
        self._count_passes(self._num_passes)
        return self._choice.found(), self._tokens.data[: heads.num_asked * self.num_ranks].tolist()
