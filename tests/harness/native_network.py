"""A few native blocks, recorded as a network is, run on inputs that a test gives."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
import pytest

from harness.model_configs import make_config
from paceline.models.config import ModelConfig, WeightType
from paceline.models.rope_config import RopeConfig
from paceline.models.weights import AnyTensor, Tensor, Weights
from paceline.runtimes.base import FloatArray, ForwardBatch, LogitsRows, RowRange
from paceline.runtimes.logits_summary import RowSampling
from paceline.runtimes.native import execution, library, packed_weights
from paceline.runtimes.native.adapters import NativeAdapter
from paceline.runtimes.native.execution import Execution
from paceline.runtimes.native.program import NativeOps, Value
from paceline.runtimes.native.records import MAX_OPERATION_PHASES, LinearOperation, Packing, RowSelection
from paceline.runtimes.native.rotary import RotaryTables
from paceline.runtimes.native.weights import NativeWeights

Build = Callable[[NativeOps, list[Value]], Sequence[Value]]
BUILT = [level for level in library.supported_levels() if library.library_path(level).is_file()]


@cache
def open_kernels(level: str) -> ctypes.CDLL:
    """The library that was built for an instruction set this machine has.

    Every second one reads panels in the way that the fastest one does not, one or several at once, so that both are tested anywhere.
    """
    opened = library.open_kernels(library.library_path(level))
    is_one_stream_best = ctypes.c_int.in_dll(opened, "is_one_stream_best")
    is_one_stream_best.value ^= BUILT.index(level) % 2
    return opened


def native_config(
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 16,
    hidden_size: int = 64,
    rotated_fraction: float = 1.0,
    soft_cap: float | None = None,
) -> ModelConfig:
    return make_config(
        hidden_size=hidden_size, num_heads=heads, num_kv_heads=kv_heads, head_size=head_size,
        rope=RopeConfig(rotated_fraction=rotated_fraction), attention={"soft_cap": soft_cap},
    )  # fmt: skip


class Network:
    """Runs what `build` records from inputs of `widths`; every value has a buffer of its own.

    Args:
        level: of the kernels; None = those this machine would use.
        compute_type: type of computation.
        packed: whether rows are rounded to bytes in front of matrices in groups.
        tables: of rotary angles; None = those of the config.
        adapters: that rows may have, by number; None = none.
    """

    def __init__(
        self,
        widths: Sequence[int],
        build: Build,
        *,
        config: ModelConfig | None = None,
        tensors: Mapping[str, AnyTensor] | None = None,
        num_threads: int = 1,
        max_slots: int = 256,
        level: str | None = None,
        compute_type: WeightType = WeightType.F32,
        packed: bool = False,
        tables: RotaryTables | None = None,
        adapters: Mapping[int, NativeAdapter] | None = None,
    ) -> None:
        config = config or native_config()
        with pytest.MonkeyPatch.context() as patch:
            if level is not None:
                patch.setattr(packed_weights, "kernels", lambda: open_kernels(level))
            weights = NativeWeights(Weights(tensors or {}), compute_type, packed={} if packed else None)
            self._blocks = NativeOps(config, weights, supports_adapters=adapters is not None)
            self._inputs = [self._blocks.new_value(width) for width in widths]
            self._results = build(self._blocks, self._inputs)
        widths = [value.width for value in self._blocks.values]
        with pytest.MonkeyPatch.context() as patch:
            if level is not None:
                patch.setattr(execution, "kernels", lambda: open_kernels(level))
            tables = tables or RotaryTables(config, max_slots)
            self.execution = Execution(self._blocks, widths, num_threads=num_threads, tables=tables, adapters=adapters)

    @property
    def packings(self) -> list[Packing]:
        """How each product takes its rows."""
        return [Packing(operation.packing) for operation in self._blocks.operations if isinstance(operation, LinearOperation)]

    def __call__(
        self, *inputs: FloatArray, batch: tuple[ForwardBatch, LogitsRows] | None = None, draws: RowSampling | None = None
    ) -> list[FloatArray]:
        """The results of one pass, as copies."""
        num_rows = len(inputs[0])
        self.execution.reserve_rows(num_rows)
        for value, rows in zip(self._inputs, inputs, strict=True):
            self.execution.buffer_rows(value.index, num_rows)[...] = rows
        described, wanted = batch or make_batch([RowRange(0, num_rows, 0, np.arange(16, dtype=np.int32))])
        self.execution.run(described, wanted._replace(sampling=draws))
        rows_of = {RowSelection.ALL: num_rows, RowSelection.LOGITS: len(wanted.rows)}
        widths = [self._blocks.result_width(value) for value in self._results]
        return [
            self.execution.buffer_rows(one.index, rows_of[one.rows])[:, :width].copy()
            for one, width in zip(self._results, widths, strict=True)
        ]


def make_batch(
    ranges: Sequence[RowRange], wanted: Sequence[int] = (), positions: Sequence[int] | None = None
) -> tuple[ForwardBatch, LogitsRows]:
    """Rows whose positions play no part where nothing is turned."""
    rows = np.zeros(sum(item.num_rows for item in ranges), np.int32)
    return ForwardBatch(rows if positions is None else np.array(positions, np.int32), tuple(ranges)), LogitsRows(np.array(wanted, np.int32))


def plain_tensor(values: FloatArray) -> Tensor:
    return Tensor(values, WeightType.F32, values.shape)


def count_claimed_pieces(execution: Execution, index: int, phase: int) -> int:
    """How many pieces of a phase of an operation all threads claimed in the last pass (kernels/work.h)."""
    counts = execution._claims[:, MAX_OPERATION_PHASES * index + phase]
    return int((counts & 0xFFFFFFFF).sum() + (counts >> 32).sum())
