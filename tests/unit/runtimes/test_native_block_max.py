"""The largest logit of each block: kept by the product that makes the logits, read by the path sampler, never used for other rows."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from harness.model_configs import make_config
from harness.native_network import BUILT, Network, make_batch, open_kernels, plain_tensor
from paceline.kv_cache.cache import CachedSequence
from paceline.models.adapters.adapter import LowRankUpdate
from paceline.models.adapters.network_adapter import LM_HEAD, NetworkAdapter
from paceline.models.quantize import quantize_matrix
from paceline.models.tensor_names import tensor_shapes
from paceline.models.weights import AnyTensor, GroupedTensor, Tensor, Weights, WeightType
from paceline.runtimes.base import FloatArray, ForwardOutput, RowRange, assemble_pass
from paceline.runtimes.decoder import decoder
from paceline.runtimes.native import path_sampler as path_sampler_module
from paceline.runtimes.native.adapters import NativeAdapter
from paceline.runtimes.native.library import BLOCK_COLUMNS, kernels_path
from paceline.runtimes.native.network import NativeNetwork
from paceline.runtimes.native.path_sampler import CompiledBatchPathSampler
from paceline.sampling.draw import draw
from paceline.sampling.params import SamplingParams
from paceline.sampling.path_sampler import LogitsView, PathRequest, SampledPath
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import verify
from unit.runtimes.test_native_path_sampler import EDITS, SAMPLING, SHAPES, rows_of, sampler_of

pytestmark = pytest.mark.skipif(kernels_path() is None, reason="no native kernels for this machine")

COLUMNS = 96


def block_max_of(logits: FloatArray) -> FloatArray:
    """By definition: NaN if a value is NaN."""
    return np.stack([logits[:, begin : begin + BLOCK_COLUMNS].max(1) for begin in range(0, logits.shape[1], BLOCK_COLUMNS)], 1)


def head(form: str, outputs: int, **options: Any) -> Network:
    values = np.random.default_rng(3).standard_normal((outputs, COLUMNS)).astype(np.float32)
    tensors: Mapping[str, AnyTensor] = {"lm_head.weight": plain_tensor(values)}
    if form != "f32":
        tensors = {"lm_head.weight": GroupedTensor(quantize_matrix(values, bits=int(form[-1]), group_size=32))}

    def build(blocks: Any, inputs: Any) -> Any:
        logits = blocks.lm_head(inputs[0], "lm_head")
        return [logits, blocks.record_block_max(logits)]

    return Network([COLUMNS], build, tensors=tensors, packed=form != "f32", **options)


@pytest.mark.parametrize("level", BUILT)
@pytest.mark.parametrize("form", ["f32", "int8", "int4"])
@pytest.mark.parametrize("outputs", [192, 5, 1000])
def test_block_max_is_the_maximum_of_each_block_of_logits(form: str, outputs: int, level: str, seed: int) -> None:
    network, random = head(form, outputs, num_threads=3, level=level), np.random.default_rng(seed)
    for num_rows in (1, 2, 5, 17):
        x = random.standard_normal((num_rows, COLUMNS)).astype(np.float32)
        logits, block_max = network(x)
        assert np.array_equal(block_max, block_max_of(logits)), num_rows
        x[-1] = np.nan
        logits, block_max = network(x)
        assert np.isnan(block_max[-1]).all()
        assert np.array_equal(block_max, block_max_of(logits), equal_nan=True), num_rows


def test_block_max_includes_adapter_logits(seed: int) -> None:
    random = np.random.default_rng(seed)
    low = LowRankUpdate(*(random.standard_normal(shape).astype(np.float32) for shape in ((4, COLUMNS), (1000, 4))))
    adapters = {1: NativeAdapter(NetworkAdapter({LM_HEAD: low}, {}, {}))}
    network, x = head("f32", 1000, adapters=adapters), random.standard_normal((2, COLUMNS)).astype(np.float32)
    table = np.arange(4, dtype=np.int32)
    logits, block_max = network(x, batch=make_batch([RowRange(0, 1, 0, table), RowRange(1, 1, 0, table, adapter_number=1)]))
    assert not np.array_equal(logits[1], network(x)[0][1])
    assert np.array_equal(block_max, block_max_of(logits))


def passed(**fields: Any) -> ForwardOutput:
    config, random = make_config(num_layers=1, vocab_size=700, **fields), np.random.default_rng(1)
    weights = {name: random.normal(size=shape).astype(np.float32) for name, shape in tensor_shapes(config).items()}
    tensors = {name: Tensor(array, WeightType.F32, array.shape) for name, array in weights.items()}
    network = NativeNetwork(decoder(config), config, Weights(tensors), num_threads=1, max_model_len=64)
    cache = network.new_cache(2)
    plans = [cache.reserve_rows(cache.new_sequence(), range(-1, count - 1)) for count in (3, 2)]
    output = network.forward(*assemble_pass(plans, [[1, 2, 3], [4, 5]], [range(3), [1]]))
    assert output.block_max is None or np.array_equal(output.block_max, block_max_of(output.logits))
    return output


def test_block_max_is_dropped_if_logits_change_after_the_product() -> None:
    assert passed().block_max is not None
    assert passed(logit_soft_cap=5.0).block_max is None


def sample(logits: FloatArray, block_max: FloatArray | None, params: SamplingParams, tree: DraftTree, index: int) -> SampledPath | None:
    sampler = sampler_of(CompiledBatchPathSampler(logits.shape[1]), params)
    request = PathRequest(sampler, tree.token_ids, tree.parents, index, 0, 7)
    return sampler.batch_sampler.sample([request], LogitsView(logits, block_max))[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_sampled_with_block_max_equal_the_reference_sampler(shape: str, pytestconfig: pytest.Config) -> None:
    seed, decided = pytestconfig.getoption("--seed"), 0
    count = 200 if pytestconfig.getoption("--large-counts") else 6
    for vocab in (190, 3_001, 20_000):
        wide = rows_of(shape, count, vocab + 400, seed)
        wide[:, vocab:] = 9_000.0  # padding of a vocabulary, which is larger than all
        for given in (*SAMPLING, {"temperature": 1.0, "top_p": 0.02}, {"temperature": 3.0, "top_k": 300, "top_p": 0.7, "min_p": 1e-4}):
            params = SamplingParams(**given)
            processor = LogitsProcessor(params, vocab, [])
            for index, row in enumerate(wide):
                path = sample(row[None, :vocab], block_max_of(wide[index, None]), params, DraftTree.root_only(3), index)
                assert sample(row[None, :vocab], None, params, DraftTree.root_only(3), index) == path
                if path is not None:
                    decided += 1
                    assert path == ([draw(processor.process(row[:vocab]), index, 0, 7)], []), (vocab, given)
    assert decided > 20 * count


@pytest.mark.parametrize("level", BUILT)
def test_sampling_with_block_max_is_equal_on_every_instruction_set(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.concatenate([rows_of(shape, 2, 3_001, 5) for shape in SHAPES])
    each = [(row[None], SamplingParams(**given), index) for index, row in enumerate(rows) for given in SAMPLING]

    def drawn() -> list[Any]:
        return [sample(row, block_max_of(row), params, DraftTree.root_only(3), index) for row, params, index in each]

    expected = drawn()
    monkeypatch.setattr(path_sampler_module, "kernels", lambda: open_kernels(level))
    assert drawn() == expected


def test_tree_rows_have_their_own_block_max() -> None:
    logits = rows_of("steep", 3, 5_000, 2)
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, top_p=0.9)):
        right = [draw(LogitsProcessor(params, 5_000, []).process(row), 1, 0, 7 + depth) for depth, row in enumerate(logits)]
        tree = DraftTree.chain(3, right[:2], "one")
        assert sample(logits, block_max_of(logits), params, tree, 1) == (right, [1, 2])
        wide = np.repeat(block_max_of(logits), 2, 0)
        assert sample(logits, wide[::2], params, tree, 1) == (right, [1, 2])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_sampling_with_block_max_reports_a_damaged_row(value: float) -> None:
    logits = rows_of("steep", 1, 5_000, 2)
    logits[0, 4_000] = value
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, top_p=0.9)):
        assert sample(logits, block_max_of(logits), params, DraftTree.root_only(3), 1) is None


def test_block_max_decides_which_blocks_are_read() -> None:
    logits, params = rows_of("steep", 1, 5_000, 2), SamplingParams(temperature=0.0)
    block_max, best = block_max_of(logits), int(logits[0].argmax())
    other = 0 if best >= BLOCK_COLUMNS else 5 * BLOCK_COLUMNS
    logits[0, other + 3] = 1e6  # which the block maxima do not include
    assert sample(logits, block_max, params, DraftTree.root_only(3), 1) == ([best], [])
    logits[0, best] -= 1.0  # the row is another one, which is seen
    assert sample(logits, block_max, params, DraftTree.root_only(3), 1) is None


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: "-".join(edit))
@pytest.mark.parametrize("given", SAMPLING[:3], ids=str)
def test_edited_row_is_sampled_without_block_max(edit: dict[str, Any], given: dict[str, Any]) -> None:
    vocab, params = 3_000, SamplingParams(**given, **edit)
    sampler = sampler_of(CompiledBatchPathSampler(vocab), params)
    for index, row in enumerate(rows_of("steep", 8, vocab, 3)):
        row[:12] += 9.0  # those that are edited
        processor = LogitsProcessor(params, vocab, [1, 2, 3, 2], path_sampler=sampler)
        processor.commit(4, 5, 1)
        request = Request([1, 2, 3, 2, 4, 5, 1], 4, params, processor, CachedSequence(), index, 0, 99)
        tree = DraftTree.root_only(1)
        assert processor.path_sampler is None
        [token] = verify(tree, row[None], request).token_ids
        assert token == draw(processor.process(row), index, 0, len(request.token_ids))
