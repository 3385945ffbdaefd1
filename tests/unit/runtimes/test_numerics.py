"""The test at load, on networks made to fail it: what a row depends on is planted, and must be found."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoints import write_checkpoint
from harness.model_configs import make_config
from harness.native_network import BUILT
from paceline.errors import CheckpointError
from paceline.kv_cache.cache import KVCache
from paceline.models.config import WeightType
from paceline.models.rope_config import RopeConfig
from paceline.runtimes import load as load_module
from paceline.runtimes.base import Capabilities, ForwardBatch, ForwardOutput, IntArray, LogitsRows, Numerics
from paceline.runtimes.load import RuntimeOptions, load_network
from paceline.runtimes.numerics import measure_numerics
from paceline.runtimes.profile_cache import FILE_NAME, ProfileCache

CONFIG = make_config(
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
Fault = Callable[[ForwardBatch], float]

FAULTS: dict[str, tuple[Fault, Numerics]] = {
    "nothing": (lambda batch: 0.0, Numerics.EXACT),
    "lone rows": (lambda batch: min(item.num_rows for item in batch.ranges) == 1, Numerics.FAST),
    "the number of rows": (lambda batch: len(batch.positions), Numerics.FAST),
    "the number of sequences": (lambda batch: len(batch.ranges), Numerics.FAST),
    "passes of many rows": (lambda batch: len(batch.positions) > 14, Numerics.FAST),
    "rows in front": (lambda batch: float(batch.positions[0]), Numerics.FAST),
}


class FakeRuntime:
    """Logits that follow from a row's token and position, plus a last-bit fault that follows from the pass."""

    def __init__(self, fault: Fault, *, execution_key: str = "1", shift: float = 0.0) -> None:
        self.config = CONFIG
        self.execution_key = execution_key
        self.capabilities = Capabilities(Numerics.FAST, "cpu", WeightType.F32)
        self.num_passes = 0
        self._fault = fault
        self._shift = shift

    def new_cache(self, num_blocks: int) -> KVCache:
        return KVCache([], num_blocks)

    def forward(self, inputs: Mapping[str, IntArray], batch: ForwardBatch, wanted: LogitsRows) -> ForwardOutput:
        self.num_passes += 1
        base = np.sin(inputs["token_ids"] + 100.0 * batch.positions)[:, None] + np.arange(CONFIG.vocab_size)
        logits = (base * (1 + 1e-6 * float(self._fault(batch))) + self._shift).astype(np.float32)
        return ForwardOutput({"logits": logits[wanted.rows]})


@pytest.mark.parametrize("name", FAULTS)
def test_numerics_test_finds_logits_that_depend_on_other_rows(name: str) -> None:
    fault, expected = FAULTS[name]
    assert measure_numerics(FakeRuntime(fault), ProfileCache(None)) is expected


def test_numerics_test_result_is_cached_per_kernel_library(tmp_path: Path) -> None:
    def find(version: str, fault: str) -> tuple[Numerics, bool]:
        """What was found, and whether by a test."""
        runtime = FakeRuntime(FAULTS[fault][0], execution_key=version)
        return measure_numerics(runtime, ProfileCache(tmp_path)), runtime.num_passes > 0

    assert find("1", "nothing") == (Numerics.EXACT, True)
    assert find("1", "nothing") == (Numerics.EXACT, False)
    assert find("2", "the number of rows") == (Numerics.FAST, True)
    assert find("2", "the number of rows") == (Numerics.FAST, False)


@pytest.mark.parametrize("answer", ["17", '"sometimes"', "null", "[]", "{}", "true"])
def test_invalid_cached_numerics_result_is_measured_again(answer: str, tmp_path: Path) -> None:
    def find() -> bool:
        runtime = FakeRuntime(FAULTS["nothing"][0])
        assert measure_numerics(runtime, ProfileCache(tmp_path)) is Numerics.EXACT
        return runtime.num_passes > 0

    assert find()
    file = tmp_path / FILE_NAME
    file.write_text(file.read_text().replace('"exact"', answer))
    assert find()
    assert not find()


def test_nan_logits_in_the_numerics_test_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="NaN"):
        measure_numerics(FakeRuntime(FAULTS["nothing"][0], shift=np.nan), ProfileCache(tmp_path))
    assert not (tmp_path / FILE_NAME).exists()


def test_nan_in_vocabulary_padding_is_ignored_by_the_numerics_test() -> None:
    """Rows of the vocabulary that belong to no token may hold anything."""

    class Padded(FakeRuntime):
        def forward(self, *arguments: Any) -> ForwardOutput:
            output = super().forward(*arguments)
            output.logits[:, -3:] = np.nan
            return output

    assert measure_numerics(Padded(FAULTS["nothing"][0]), ProfileCache(None)) is Numerics.EXACT


@pytest.mark.skipif(not BUILT, reason="no native kernels for this machine")
@pytest.mark.parametrize(
    ("wanted", "found", "expected"),
    [
        (Numerics.EXACT, Numerics.EXACT, Numerics.EXACT),
        (Numerics.EXACT, Numerics.FAST, Numerics.FAST),
        (Numerics.FAST, Numerics.EXACT, Numerics.FAST),
    ],
)
def test_numerics_notice_matches_the_measured_result(
    wanted: Numerics, found: Numerics, expected: Numerics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    monkeypatch.setattr(load_module, "measure_numerics", lambda *_: found)
    loaded = load_network(directory, RuntimeOptions(numerics=wanted, backend="native"))
    assert loaded.network.capabilities.numerics is expected
    assert any("numerics is fast" in notice for notice in loaded.notices) is (wanted is not expected)
