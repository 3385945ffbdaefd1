"""The CPU runtime's parts: its tables, its outputs, how lone rows are repeated, and what memory it lets go."""

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from paceline.errors import CapacityError
from paceline.kv_cache.block_pool import SCRATCH_BLOCK
from paceline.kv_cache.row_plan import TreeLayout
from paceline.models.config import WeightType, read_config
from paceline.models.weights import Weights, as_float32
from paceline.runtimes.base import ForwardBatch, Numerics, RowRange, assemble
from paceline.runtimes.numerics import RowPadding

pytest.importorskip("openvino")

from paceline.runtimes.openvino import runtime as runtime_module
from paceline.runtimes.openvino.attention import attention_inputs
from paceline.runtimes.openvino.graph import computable
from paceline.runtimes.openvino.runtime import OpenVINORuntime, repeat_lone_rows
from paceline.runtimes.openvino.weights import GraphWeights
from paceline.runtimes.rounding import to_bf16

TYPES = [WeightType.F32, WeightType.BF16]


@pytest.fixture(scope="module", params=["untied", "tied"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tied = request.param == "tied"
    return write_checkpoint(
        tmp_path_factory.mktemp(request.param), "qwen2", dtype="bfloat16", num_hidden_layers=2, tie_word_embeddings=tied
    )


def open_runtime(directory: Path, *, wanted: WeightType = WeightType.F32, collect_layers: Sequence[int] = ()) -> OpenVINORuntime:
    config = read_config(directory)
    return OpenVINORuntime(
        config,
        Weights.open(directory, config),
        weight_type=computable(wanted),
        num_threads=2,
        max_context=256,
        collect_layers=collect_layers,
        round_to=wanted,
    )


def run(runtime: OpenVINORuntime, token_ids: Sequence[int], sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden states of every row, run in passes of `sizes` rows."""
    cache = runtime.new_cache(8)
    sequence = cache.new_sequence()
    logits, hidden, start = [], [], 0
    for size in sizes:
        plan = cache.reserve(sequence, range(-1, size - 1))
        output = runtime.forward(assemble([plan], [token_ids[start : start + size]], [range(size)]))
        logits.append(output.logits.copy())
        hidden.append(output.hidden_states.copy())
        cache.keep_path(sequence, size - 1)
        start += size
    return np.concatenate(logits), np.concatenate(hidden)


@pytest.mark.parametrize("wanted", TYPES)
def test_embedding_and_head_alone_are_the_graphs_own(directory: Path, wanted: WeightType, seed: int) -> None:
    runtime = open_runtime(directory, wanted=wanted, collect_layers=(0,))
    token_ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, 20, dtype=np.int32)
    cache = runtime.new_cache(2)
    plan = cache.reserve(cache.new_sequence(), range(-1, 19))
    output = runtime.forward(assemble([plan], [token_ids.tolist()], [range(20)]))
    assert output.collected_hidden_states is not None
    stored = as_float32(Weights.open(directory, runtime.config)["embedding.weight"])
    assert np.array_equal(runtime.embed(token_ids), stored[token_ids])
    close = 1e-5 if runtime.capabilities.weight_type is WeightType.F32 else 0.05
    assert np.allclose(output.collected_hidden_states[0], stored[token_ids], atol=close)
    logits = runtime.lm_head(output.hidden_states)
    assert logits.shape == (20, VOCAB_SIZE)
    assert logits.dtype == np.float32
    assert np.allclose(logits, output.logits, atol=close * np.abs(output.logits).max())
    assert runtime.lm_head(output.hidden_states[:1]).shape == (1, VOCAB_SIZE)


def test_boundaries_come_in_the_order_asked_for_and_the_last_becomes_the_hidden_states(directory: Path) -> None:
    runtime = open_runtime(directory, collect_layers=(2, 0, 1))
    cache = runtime.new_cache(4)
    plans = [cache.reserve(cache.new_sequence(), range(-1, count - 1)) for count in (3, 1)]
    output = runtime.forward(assemble(plans, [[5, 6, 7], [8]], [[2], [0]]))
    collected = output.collected_hidden_states
    assert collected is not None
    assert collected.shape == (3, 4, 64)
    assert output.hidden_states.shape == (4, 64)
    assert output.logits.shape == (2, VOCAB_SIZE)
    assert np.allclose(collected[1], runtime.embed(np.array([5, 6, 7, 8])), atol=1e-5)
    scale = 1.0 / np.sqrt((collected[0] ** 2).mean(axis=1, keepdims=True) + runtime.config.norm_eps)
    norm = as_float32(Weights.open(directory, runtime.config)["final_norm.weight"])
    assert np.allclose(collected[0] * scale * norm, output.hidden_states, atol=1e-4)
    assert not np.allclose(collected[2], collected[1])


@pytest.mark.parametrize("wanted", TYPES)
def test_rows_padded_in_attention_and_as_a_whole_are_the_same_rows(directory: Path, wanted: WeightType, seed: int) -> None:
    """To the bit where either is exact, otherwise but for rounding; lone rows cross a block border."""
    runtime = open_runtime(directory, wanted=wanted, collect_layers=(1,))
    token_ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, 70).tolist()
    results = []
    for padding, sizes in ((RowPadding.ATTENTION, [30, *[1] * 6, 34]), (RowPadding.WHOLE_ROW, [30, *[1] * 6, 34]), (RowPadding.NONE, [70])):
        runtime.set_numerics(padding, Numerics.EXACT)
        results.append(run(runtime, token_ids, sizes))
    close = 1e-4 if runtime.capabilities.weight_type is WeightType.F32 else 0.1
    for logits, hidden in results[1:]:
        assert logits.shape == (70, VOCAB_SIZE)
        assert np.allclose(logits, results[0][0], atol=close * np.abs(logits).max())
        assert np.allclose(hidden, results[0][1], atol=close * np.abs(hidden).max())


def test_lone_rows_are_doubled_and_nothing_else_is() -> None:
    table = np.array([3], np.int32)
    batch = ForwardBatch(
        token_ids=np.array([10, 11, 12, 13, 14], np.int32),
        positions=np.array([31, 0, 1, 40, 5], np.int32),
        ranges=(
            RowRange(0, 1, 31, table),
            RowRange(1, 2, 0, table),
            RowRange(3, 1, 40, np.array([1, 2], np.int32)),
            RowRange(4, 1, 5, table),
        ),
        logits_rows=np.array([4, 0, 2], np.int32),
    )
    padded, kept = repeat_lone_rows(batch)
    assert padded.token_ids.tolist() == [10, 10, 11, 12, 13, 13, 14, 14]
    assert padded.positions.tolist() == [31, 31, 0, 1, 40, 40, 5, 5]
    assert [(item.start, item.num_rows, item.cached_len) for item in padded.ranges] == [(0, 2, 31), (2, 2, 0), (4, 2, 40), (6, 2, 5)]
    assert [item.block_table.tolist() for item in padded.ranges] == [[3, SCRATCH_BLOCK], [3], [1, 2], [3]]
    assert padded.token_ids[kept].tolist() == batch.token_ids.tolist()
    assert padded.token_ids[padded.logits_rows].tolist() == batch.token_ids[batch.logits_rows].tolist()
    inputs = attention_inputs(batch, repeat_lone_rows=True)
    assert inputs["attention_rows"].tolist() == [0, 0, 1, 2, 3, 3, 4, 4]
    assert inputs["row_of_attention"].tolist() == [0, 2, 3, 4, 6]
    assert inputs["block_indices"].tolist() == [3, SCRATCH_BLOCK, 3, 1, 2, 3]
    assert inputs["subsequence_begins"].tolist() == [0, 2, 4, 6, 8]
    assert int(inputs["max_context_len"]) == 42
    alone = attention_inputs(batch, repeat_lone_rows=False)
    assert alone["attention_rows"].tolist() == alone["row_of_attention"].tolist() == [0, 1, 2, 3, 4]


def test_the_source_of_every_converted_matrix_is_let_go(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 weights computed in f32 are copies: kept, they would triple the memory."""
    sources: list[weakref.ref[np.ndarray]] = []
    real = GraphWeights._converted

    def remembered(self: GraphWeights, tensor: object) -> np.ndarray:
        array = real(self, tensor)  # type: ignore[arg-type]
        sources.append(weakref.ref(array))
        return array

    monkeypatch.setattr(GraphWeights, "_converted", remembered)
    runtime = open_runtime(directory)
    gc.collect()
    assert len(sources) == 2 * 7 + 1
    assert [source() for source in sources] == [None] * 15
    assert np.isfinite(run(runtime, [5, 6, 7], [2, 1])[0]).all()


def test_a_cache_that_does_not_fit_in_memory_is_a_capacity_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = open_runtime(directory)

    def no_memory(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(runtime_module.np, "zeros", no_memory)
    with pytest.raises(CapacityError, match="lower cache_gb"):
        runtime.new_cache(2)


def test_exact_numerics_lay_trees_out_as_paths_and_fast_ones_as_a_mask(directory: Path) -> None:
    runtime = open_runtime(directory)
    for numerics, layout in ((Numerics.EXACT, TreeLayout.PATHS), (Numerics.FAST, TreeLayout.MASK)):
        runtime.set_numerics(RowPadding.ATTENTION, numerics)
        assert runtime.new_cache(2).layout is layout


def test_what_is_measured_belongs_to_a_graph_and_a_number_of_threads(directory: Path) -> None:
    runtime, twin, collecting = open_runtime(directory), open_runtime(directory), open_runtime(directory, collect_layers=(1,))
    assert runtime.version == twin.version != collecting.version
    assert runtime.graph_digest in runtime.version
    assert "2 threads" in runtime.version


def test_bf16_is_rounded_to_nearest_even() -> None:
    torch = pytest.importorskip("torch")
    values = np.concatenate([np.random.default_rng(0).normal(size=2000), [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 3.3e38]]).astype(
        np.float32
    )
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bf16(values), expected)
