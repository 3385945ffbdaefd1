"""The test at load, on networks made to fail it: what a row depends on is planted, and must be found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import CheckpointError
from paceline.kv_cache.paged import KVCache
from paceline.kv_cache.row_plan import TreeLayout
from paceline.models.config import ModelConfig, RopeConfig, WeightType
from paceline.runtimes.base import Capabilities, ForwardBatch, ForwardOutput, Numerics
from paceline.runtimes.facts import FILE_NAME, MeasuredFacts
from paceline.runtimes.numerics import RowPadding, find_padding, settle_numerics

CONFIG = ModelConfig(
    family="fake",
    vocab_size=50,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_size=8,
    norm_eps=1e-6,
    max_positions=128,
    rope=RopeConfig(),
    weight_type=WeightType.F32,
)
Fault = Callable[[RowPadding, ForwardBatch], float]


def lone_rows_unless_padded(*paddings: RowPadding) -> Fault:
    return lambda padding, batch: 0.0 if padding in paddings else min(item.num_rows for item in batch.ranges) == 1


FAULTS: dict[str, tuple[Fault, RowPadding | None]] = {
    "nothing": (lambda padding, batch: 0.0, RowPadding.ATTENTION),
    "lone rows, not if padded in attention": (lone_rows_unless_padded(RowPadding.ATTENTION), RowPadding.ATTENTION),
    "lone rows, not if padded as a whole": (lone_rows_unless_padded(RowPadding.WHOLE_ROW), RowPadding.WHOLE_ROW),
    "padding itself": (lambda padding, batch: padding is not RowPadding.NONE and len(batch.token_ids) > 1, RowPadding.NONE),
    "the number of rows": (lambda padding, batch: len(batch.token_ids), None),
    "the number of sequences": (lambda padding, batch: len(batch.ranges), None),
    "passes of many rows": (lambda padding, batch: len(batch.token_ids) > 14, None),
    "rows in front": (lambda padding, batch: float(batch.token_ids[0]), None),
}


class FakeRuntime:
    """Logits that follow from a row's token and position, plus a last-bit fault that follows from the pass."""

    def __init__(self, fault: Fault, *, version: str = "1", shift: float = 0.0) -> None:
        self.config = CONFIG
        self.collect_layers: tuple[int, ...] = ()
        self.version = version
        self.padding: RowPadding | None = None
        self.capabilities = Capabilities(Numerics.FAST, TreeLayout.MASK, "cpu", WeightType.F32)
        self.num_passes = 0
        self._fault = fault
        self._shift = shift

    def set_numerics(self, padding: RowPadding, numerics: Numerics) -> None:
        self.padding = padding
        self.capabilities = Capabilities(numerics, TreeLayout.PATHS, "cpu", WeightType.F32)

    def new_cache(self, num_blocks: int) -> KVCache:
        return KVCache(np.zeros((2, num_blocks, 1, 32, 8), np.float32))

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.num_passes += 1
        assert self.padding is not None
        base = np.sin(batch.token_ids + 100.0 * batch.positions)[:, None] + np.arange(CONFIG.vocab_size)
        logits = (base * (1 + 1e-6 * float(self._fault(self.padding, batch))) + self._shift).astype(np.float32)
        return ForwardOutput(logits[batch.logits_rows], logits)


@pytest.mark.parametrize("name", FAULTS)
def test_the_cheapest_padding_that_holds_is_found(name: str) -> None:
    fault, expected = FAULTS[name]
    assert find_padding(FakeRuntime(fault)) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAULTS)
def test_what_holds_is_set_and_what_does_not_is_said(name: str, tmp_path: Path) -> None:
    fault, expected = FAULTS[name]
    runtime = FakeRuntime(fault)
    notice = settle_numerics(runtime, Numerics.EXACT, MeasuredFacts(tmp_path))  # type: ignore[arg-type]
    if expected is None:
        assert notice is not None
        assert "numerics is fast" in notice
    else:
        assert notice is None
    assert runtime.padding is (expected or RowPadding.NONE)
    assert runtime.capabilities.numerics is (Numerics.FAST if expected is None else Numerics.EXACT)


def test_an_answer_is_remembered_until_the_library_changes(tmp_path: Path) -> None:
    def settle(version: str = "1", fault: str = "nothing") -> tuple[str | None, FakeRuntime]:
        runtime = FakeRuntime(FAULTS[fault][0], version=version)
        return settle_numerics(runtime, Numerics.EXACT, MeasuredFacts(tmp_path)), runtime  # type: ignore[arg-type]

    assert settle()[1].num_passes > 0
    notice, runtime = settle()
    assert (notice, runtime.num_passes, runtime.padding, runtime.capabilities.numerics) == (None, 0, RowPadding.ATTENTION, Numerics.EXACT)
    notice, runtime = settle("2", "the number of rows")
    assert notice is not None
    assert runtime.num_passes > 0
    notice, runtime = settle("2", "the number of rows")
    assert notice is not None
    assert runtime.num_passes == 0


def test_fast_numerics_need_no_test() -> None:
    runtime = FakeRuntime(FAULTS["the number of rows"][0])
    assert settle_numerics(runtime, Numerics.FAST, MeasuredFacts(None)) is None  # type: ignore[arg-type]
    assert (runtime.num_passes, runtime.padding, runtime.capabilities.numerics) == (0, RowPadding.NONE, Numerics.FAST)


def test_a_graph_whose_bits_differ_from_the_canonical_one_is_not_exact() -> None:
    exact = FAULTS["nothing"][0]
    same = find_padding(FakeRuntime(exact), lambda: FakeRuntime(exact))  # type: ignore[arg-type, return-value]
    assert same is RowPadding.ATTENTION
    other = find_padding(FakeRuntime(exact), lambda: FakeRuntime(exact, shift=1e-5))  # type: ignore[arg-type, return-value]
    assert other is None


@pytest.mark.parametrize("answer", ["17", '"sometimes"', "null", "[]", "{}", "true"])
def test_a_remembered_answer_that_makes_no_sense_is_measured_again(answer: str, tmp_path: Path) -> None:
    def settle() -> FakeRuntime:
        runtime = FakeRuntime(FAULTS["nothing"][0])
        settle_numerics(runtime, Numerics.EXACT, MeasuredFacts(tmp_path))  # type: ignore[arg-type]
        return runtime

    settle()
    file = tmp_path / FILE_NAME
    file.write_text(file.read_text().replace('"attention"', answer))
    runtime = settle()
    assert runtime.num_passes > 0
    assert runtime.padding is RowPadding.ATTENTION
    assert settle().num_passes == 0


def test_nan_is_an_error_and_no_answer(tmp_path: Path) -> None:
    facts = MeasuredFacts(tmp_path)
    with pytest.raises(CheckpointError, match="NaN"):
        settle_numerics(FakeRuntime(FAULTS["nothing"][0], shift=np.nan), Numerics.EXACT, facts)  # type: ignore[arg-type]
    assert not (tmp_path / FILE_NAME).exists()


def test_nan_in_padding_columns_is_no_difference() -> None:
    """Rows of the vocabulary that belong to no token may hold anything."""

    class Padded(FakeRuntime):
        def forward(self, batch: ForwardBatch) -> Any:
            output = super().forward(batch)
            output.logits[:, -3:] = np.nan
            return output

    assert find_padding(Padded(FAULTS["nothing"][0])) is RowPadding.ATTENTION  # type: ignore[arg-type]
