"""Rotary tables cover any text length, whatever the model's trained length, and no bit depends on when they grew."""

import time
import tracemalloc
from ctypes import c_float, c_void_p
from pathlib import Path

import numpy as np
import pytest

from harness.checkpoints import write_checkpoint
from harness.model_configs import make_config
from harness.native_network import BUILT
from paceline import LLM, SamplingParams
from paceline.models.config import ModelConfig, WeightType
from paceline.models.rope import inverse_frequencies
from paceline.models.rope_config import RopeConfig, RopeType
from paceline.models.weights import Tensor, Weights
from paceline.runtimes.base import ForwardBatch, LogitsRows, RowRange
from paceline.runtimes.decoder import decoder
from paceline.runtimes.native.passes import PassRecord
from paceline.runtimes.native.rotary import MIN_POSITIONS, RotaryTables

ROPES = {
    "default": RopeConfig(),
    "yarn": RopeConfig(10000.0, RopeType.YARN, 4.0, 4096),
}
ABSURD = 10**8


def config_of(rope: RopeConfig, head_size: int = 64) -> ModelConfig:
    return make_config(rope=rope, head_size=head_size)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_extended_rotary_table_equals_one_built_at_once(rope: RopeConfig) -> None:
    config, last = config_of(rope), 80_000
    frequencies, factor = inverse_frequencies(rope, 64)
    angles = np.arange(last + 1, dtype=np.float32)[:, None] * frequencies[None, :]
    grown, at_once = RotaryTables(config, ABSURD), RotaryTables(config, ABSURD)
    at_once.extend_to(last)
    for position in (300, 301, 4097, 65_535, 65_536, last):  # from 71,477 on numpy computes otherwise
        grown.extend_to(position)
    for tables in (grown, at_once):
        ((cos, sin),) = tables.cos_sin
        assert np.array_equal(cos[: last + 1].view(np.int32), (np.cos(angles) * np.float32(factor)).view(np.int32))
        assert np.array_equal(sin[: last + 1].view(np.int32), (np.sin(angles) * np.float32(factor)).view(np.int32))


def test_rotary_table_grows_to_at_most_twice_the_requested_length() -> None:
    tracemalloc.start()
    tables = RotaryTables(config_of(RopeConfig()), ABSURD)
    assert len(tables.cos_sin[0][0]) == MIN_POSITIONS + 1
    tables.extend_to(5000)
    assert 5000 < len(tables.cos_sin[0][0]) <= 2 * 5000
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()
    before = tables.cos_sin
    tables.extend_to(4000)
    assert tables.cos_sin is before


@pytest.mark.parametrize("position", [-1, 1001, 2**31 - 1])
def test_rotary_position_beyond_the_context_is_an_index_error(position: int) -> None:
    tables = RotaryTables(config_of(RopeConfig()), 1000)
    tables.extend_to(1000)
    assert len(tables.cos_sin[0][0]) == 1001
    with pytest.raises(IndexError, match=f"position {position} is not in the range 0 to 1000"):
        tables.extend_to(position)
    RotaryTables(config_of(RopeConfig()), 2).extend_to(MIN_POSITIONS)  # measurements at load


@pytest.mark.skipif(not BUILT, reason="no native kernels for this machine")
def test_hidden_states_are_bit_equal_while_the_rotary_table_grows() -> None:
    from paceline.models.tensor_names import tensor_shapes
    from paceline.runtimes.native.network import NativeNetwork

    config = make_config(num_layers=2)
    random = np.random.default_rng(0)
    arrays = {name: random.normal(size=shape).astype(np.float32) for name, shape in tensor_shapes(config).items()}
    weights = Weights({name: Tensor(array, WeightType.F32, array.shape) for name, array in arrays.items()})

    def hidden(step: int, *, reached: int) -> np.ndarray:
        runtime = NativeNetwork(decoder(config), config, weights, num_threads=1, max_model_len=ABSURD)
        runtime._shared.tables.extend_to(reached)
        runtime.new_cache(34)
        table, rows = np.arange(1, 34, dtype=np.int32), []
        for start in range(0, 260 if step == 1 else 1024, step):
            positions = np.arange(start, start + step, dtype=np.int32)
            inputs, batch = {"token_ids": positions % config.vocab_size}, ForwardBatch(positions, (RowRange(0, step, start, table),))
            rows.append(runtime.forward(inputs, batch, LogitsRows(positions[:0])).hidden_states.copy())
        return np.concatenate(rows)

    expected = hidden(1024, reached=1023)
    for step in (1, 32, 1024):
        found = hidden(step, reached=0)
        assert np.array_equal(found.view(np.int32), expected[: len(found)].view(np.int32))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model made for 512 positions, and one of the same weights with a configured length of a hundred million."""
    modest = write_checkpoint(tmp_path_factory.mktemp("rotary") / "modest", "llama", num_hidden_layers=2)
    absurd = write_checkpoint(tmp_path_factory.mktemp("rotary") / "absurd", "llama", num_hidden_layers=2, max_position_embeddings=ABSURD)
    return modest, absurd


@pytest.mark.skipif(not BUILT, reason="no native kernels for this machine")
def test_model_with_a_context_of_100_million_tokens_loads(directories: tuple[Path, Path]) -> None:
    modest, absurd = directories
    texts: list[list[int]] = []
    for directory in (modest, absurd):
        start = time.perf_counter()
        llm = LLM(str(directory), backend="native", threads=2, kv_cache_gb=0.02, drafter=str(directory), offline=True)
        assert time.perf_counter() - start < 30.0
        texts.append(llm.generate([5, 6, 7], SamplingParams(max_tokens=300, ignore_eos=True))[0].token_ids)
    assert len(texts[0]) == 300
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "positions", [[7], [5, 6, 7], [0, 1, 2, 3], [7, 6, 5], [3, 4, 4], [250, 1, 2], [298, 299, 300, 301], [5000]], ids=str
)
@pytest.mark.skipif(not BUILT, reason="no compiled kernels for this machine")
def test_kernel_arguments_point_to_rotary_rows_of_the_positions(positions: list[int]) -> None:
    tables = RotaryTables(config_of(RopeConfig()), ABSURD)
    memory, count = PassRecord(tables), len(positions)
    at = np.array(positions, np.int32)
    for _ in range(2):
        memory.fill(ForwardBatch(at, (RowRange(0, count, 0, np.zeros(200, np.int32)),)), LogitsRows(np.zeros(0, np.int32)))
        for table, field in zip(tables.cos_sin[0], (memory.record.cos, memory.record.sin), strict=True):
            rows = (c_float * (count * 32)).from_address(c_void_p.from_address(field).value or 0)
            assert np.array_equal(np.array(rows).reshape(count, 32), table[at])


@pytest.mark.skipif(not BUILT, reason="no compiled kernels for this machine")
def test_rotary_rows_of_consecutive_positions_are_not_copied() -> None:
    tables = RotaryTables(config_of(RopeConfig()), ABSURD)
    memory = PassRecord(tables)
    for positions in ([9], [4, 5, 6]):
        batch = ForwardBatch(np.array(positions, np.int32), (RowRange(0, len(positions), 0, np.zeros(1, np.int32)),))
        memory.fill(batch, LogitsRows(np.zeros(0, np.int32)))
        assert c_void_p.from_address(memory.record.cos).value == tables.cos_sin[0][0][positions[0] :].ctypes.data
