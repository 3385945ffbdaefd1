"""Paths sampled by the kernels hold the tokens that the definition draws row by row."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.runtimes.native.library import kernels_path
from paceline.runtimes.native.path_sampler import CompiledBatchPathSampler, CompiledPathSampler
from paceline.sampling.draw import draw
from paceline.sampling.params import SamplingParams
from paceline.sampling.path_sampler import LogitsView, PathRequest, SampledPath, sample_row
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.tree import DraftTree

pytestmark = pytest.mark.skipif(kernels_path() is None, reason="no kernels for this machine")

Rows = NDArray[np.float32]
SHAPES: dict[str, Callable[[Rows, Any], Rows]] = {
    "flat": lambda x, random: x * 0.5,
    "steep": lambda x, random: x * 3.0,
    "heavy tail": lambda x, random: -np.abs(x) - np.log1p(random.permuted(np.tile(np.arange(x.shape[1]), (len(x), 1)), axis=1)),
    "peaked": lambda x, random: np.where(np.arange(x.shape[1]) < 4, x + 12.0, x),
    "ties": lambda x, random: np.round(x * 2.0),
    "bfloat16": lambda x, random: ((x * 4.0).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
    "half forbidden": lambda x, random: np.where(np.arange(x.shape[1]) % 2, x * 3.0, -np.inf),
    "far from zero": lambda x, random: x * 2.0 + 4000.0,
}
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_k": 50},
    {"temperature": 0.01, "top_p": 0.5},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.95}, {"temperature": 0.9, "top_p": 0.3},
    {"temperature": 1.0, "top_p": 0.99, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 0.02}, {"temperature": 2.0, "top_p": 0.5}, {"temperature": 0.5, "top_k": 1},
    {"temperature": 0.8, "top_p": 0.999}, {"temperature": 1.0, "top_k": 100_000},
)  # fmt: skip


def rows_of(shape: str, count: int, vocab: int, seed: int) -> Rows:
    random = np.random.default_rng(seed)
    return np.asarray(SHAPES[shape](random.normal(size=(count, vocab)).astype(np.float32), random), np.float32)


def sampler_of(batch: CompiledBatchPathSampler, params: SamplingParams) -> CompiledPathSampler:
    return batch.path_sampler(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)


def sample(
    logits: Rows, tree: DraftTree, params: SamplingParams, *, seed: int = 1, sample_index: int = 0, position: int = 7
) -> SampledPath | None:
    sampler = sampler_of(CompiledBatchPathSampler(logits.shape[1]), params)
    request = PathRequest(sampler, tree.token_ids, tree.parents, seed, sample_index, position)
    return sampler.batch_sampler.sample([request], LogitsView(logits))[0]


@pytest.mark.parametrize("given", [{"top_p": 0.3}, {"top_p": 0.5, "top_k": 20}, {"top_p": 0.4, "min_p": 0.1}], ids=str)
def test_path_sampler_treats_logits_equal_after_temperature_as_ties(given: dict[str, Any]) -> None:
    """Denormal ones: what is between two of them is gone when they are divided."""
    params = SamplingParams(temperature=5.0, **given)
    processor = LogitsProcessor(params, 64, [])
    for seed in range(300):
        row = np.random.default_rng(seed).normal(size=64).astype(np.float32) * np.float32(1e-45)
        path = sample(row[None], DraftTree.root_only(3), params, seed=seed)
        assert path is None or path == ([draw(processor.process(row), seed, 0, 7)], []), seed


@pytest.mark.parametrize("shape", SHAPES)
def test_path_sampler_tokens_equal_the_reference_sampler(shape: str, pytestconfig: pytest.Config) -> None:
    count = 400 if pytestconfig.getoption("--large-counts") else 8
    for vocab in (97, 4096, 32_001):
        logits = rows_of(shape, count, vocab, pytestconfig.getoption("--seed"))
        for given in SAMPLING:
            params, decided = SamplingParams(**given), 0
            processor = LogitsProcessor(params, vocab, [])
            for index, row in enumerate(logits):
                key = {"seed": 2**63 + index, "sample_index": index % 3, "position": 11 * index}
                path = sample(row[None], DraftTree.root_only(3), params, **key)
                if path is not None:
                    decided += 1
                    assert path == ([draw(processor.process(row), *key.values())], []), (vocab, given)
            assert decided >= 0.75 * count or shape in ("ties", "far from zero", "bfloat16"), (vocab, given, decided)


def definition(logits: Rows, tree: DraftTree, params: SamplingParams) -> tuple[list[int], list[int]]:
    processor, node, tokens, nodes = LogitsProcessor(params, logits.shape[1], []), 0, list[int](), list[int]()
    while True:
        tokens.append(draw(processor.process(logits[node]), 1, 0, 7 + len(nodes)))
        child = tree.child(node, tokens[-1])
        if child is None:
            return tokens, nodes
        nodes.append(child)
        node = child


@pytest.mark.parametrize("given", SAMPLING[:3], ids=str)
def test_path_sampler_follows_the_tree_while_nodes_hold_the_token(given: dict[str, Any]) -> None:
    params, logits = SamplingParams(**given), rows_of("steep", 8, 2048, 5)
    right: Sequence[int] = [draw(LogitsProcessor(params, 2048, []).process(logits[node]), 1, 0, 7 + node) for node in range(8)]
    wrong = [(token + 1) % 2048 for token in right]
    trees = [
        DraftTree.chain(3, right[:7], "one"),
        DraftTree.chain(3, [*right[:2], wrong[2], *right[3:7]], "one"),
        DraftTree.chain(3, wrong[:7], "one"),
        DraftTree.from_nodes(3, [wrong[0], right[0], wrong[1], 17, right[2]], [0, 0, 1, 2, 2], "one"),
    ]
    for tree in trees:
        assert sample(logits[: len(tree.token_ids)], tree, params) == definition(logits, tree, params)
    assert sample(logits, trees[0], params) == (right, list(range(1, 8)))


def test_path_sampler_reads_strided_rows() -> None:
    params, wide = SamplingParams(temperature=0.7, top_p=0.9), rows_of("steep", 6, 2100, 8)
    wide[:, 2048:] = 50.0  # padding rows of a vocabulary
    wide[1::2] = np.nan
    logits = wide[::2, :2048]
    tree = DraftTree.chain(3, [draw(LogitsProcessor(params, 2048, []).process(logits[0]), 1, 0, 7), 5], "one")
    assert sample(logits, tree, params) == definition(logits, tree, params)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1, 2047, 2048])
def test_path_with_a_damaged_row_uses_the_reference_sampler(value: float, place: int) -> None:
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        logits = rows_of("steep", 2, 2049, 4)
        logits[1, place] = value
        path = sample(logits[:1], DraftTree.root_only(3), params)
        assert path is not None
        tree = DraftTree.chain(3, path.token_ids, "one")
        assert sample(logits, tree, params) is None
        logits[:] = -np.inf
        assert sample(logits, tree, params) is None


def test_ties_at_the_top_p_border_use_the_reference_sampler() -> None:
    logits = np.full((1, 2048), -30.0, np.float32)
    logits[0, :10] = 1.0  # ten of the same weight, five of which top-p 0.5 keeps
    params = SamplingParams(temperature=1.0, top_p=0.5)
    assert not any(sample(logits, DraftTree.root_only(3), params, seed=seed) for seed in range(20))


def test_token_within_rounding_of_top_p_uses_the_reference_sampler() -> None:
    logits = np.full((1, 2048), -200.0, np.float32)
    logits[0, :2] = 0.0, -1.0
    params = SamplingParams(temperature=1.0, top_p=1.0 / (1.0 + np.exp(-1.0)))  # the weight before the second is what is wanted
    paths = [sample(logits, DraftTree.root_only(3), params, seed=seed) for seed in range(50)]
    assert {tuple(path.token_ids) for path in paths if path is not None} == {(0,)}
    assert 5 < paths.count(None) < 25


@pytest.mark.parametrize("num_threads", [1, 3])
def test_path_sampler_batch_equals_paths_sampled_alone(num_threads: int) -> None:
    vocab = 70_000  # enough for other threads to be woken
    batch, random = CompiledBatchPathSampler(vocab, num_threads), np.random.default_rng(4)
    requests, blocks = list[PathRequest](), list[Rows]()
    for index in range(11):
        params = SamplingParams(**SAMPLING[index % 5])
        size = int(random.integers(1, 5))
        logits = rows_of("flat" if index % 3 else "steep", size, vocab, index)
        right = [draw(LogitsProcessor(params, vocab, []).process(row), index, 0, 7 + node) for node, row in enumerate(logits)]
        tree = DraftTree.chain(3, [token + (node == 2) for node, token in enumerate(right[: size - 1])], "one")
        requests.append(PathRequest(sampler_of(batch, params), tree.token_ids, tree.parents, index, 0, 7, sum(map(len, blocks))))
        blocks.append(logits)
    blocks[4][0] = np.nan
    rows = np.concatenate(blocks)
    alone = [batch.sample([one._replace(first_row=0)], LogitsView(rows[one.first_row :]))[0] for one in requests]
    for count in (11, 1, 5):
        assert batch.sample(requests[:count], LogitsView(rows)) == alone[:count]
    assert alone.count(None) == 1
    assert max(len(path.nodes) for path in alone if path is not None) > 1
    assert batch.sample([], LogitsView(rows)) == []


def test_unreadable_rows_use_the_reference_sampler() -> None:
    batch, rows = CompiledBatchPathSampler(64), rows_of("flat", 2, 64, 1)
    request = PathRequest(sampler_of(batch, SamplingParams()), (3,), (-1,), 1, 0, 7)
    assert None not in batch.sample([request] * 2, LogitsView(rows))
    for odd in (rows[:, ::2], rows[:, :32], rows.astype(np.float64)):
        assert batch.sample([request] * 2, LogitsView(odd)) == [None] * 2  # type: ignore[arg-type]


EDITS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 2.0}, {"presence_penalty": 1.0, "frequency_penalty": 2.0}, {"logit_bias": {5: 3.0, 9: -100.0}},
    {"banned_token_ids": (3, 4, 5)}, {"no_repeat_ngram_size": 2}, {"bad_words": ((1, 2), (7,))},
    {"min_tokens": 9, "stop_token_ids": (8, 11)},
)  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: "-".join(edit))
def test_path_sampler_of_edited_rows_equals_the_reference_sampler(edit: dict[str, Any], pytestconfig: pytest.Config) -> None:
    vocab, decided = 3_000, 0
    for given in SAMPLING[:6]:
        params = SamplingParams(**given, **edit)
        sampler = sampler_of(CompiledBatchPathSampler(vocab), params)
        processor = LogitsProcessor(params, vocab, [1, 2, 3, 2], path_sampler=sampler)
        processor.commit(4, 5, 1)
        for index, row in enumerate(rows_of("steep", 12, vocab, pytestconfig.getoption("--seed"))):
            row[:12] += 9.0  # those that are edited
            best = int(row.argmax())
            before, path = row.copy(), [best, 1, best][: index % 4]
            edited = processor.edit_logits(row, path)
            assert edited.draw(index, 0, 11) == draw(processor.process(row, path), index, 0, 11)
            assert np.array_equal(row, before)
            decided += sample_row(sampler, edited.logits, index, 0, 11) is not None
    assert decided > 40


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_damaged_logit_is_reported_even_if_its_token_is_banned(value: float) -> None:
    params, row = SamplingParams(temperature=0.0), np.zeros(97, np.float32)
    row[7] = value
    processor = LogitsProcessor(params, 97, [1], bad_word_ids=[[7]], path_sampler=sampler_of(CompiledBatchPathSampler(97), params))
    with pytest.raises(CheckpointError):
        processor.edit_logits(row)


def test_custom_processor_is_called_once_per_row() -> None:
    seen: list[int] = []

    def note(token_ids: Any, logits: Any) -> Any:
        seen.append(len(token_ids))
        return logits

    params = SamplingParams(temperature=1.0, processors=(note,))
    processor = LogitsProcessor(params, 64, [1], path_sampler=sampler_of(CompiledBatchPathSampler(64), params))
    row = rows_of("flat", 1, 64, 1)[0]
    assert processor.edit_logits(row).draw(1, 0, 3) == draw(LogitsProcessor(SamplingParams(temperature=1.0), 64, [1]).process(row), 1, 0, 3)
    assert seen == [1]


def test_request_that_edits_logits_has_no_path_sampler() -> None:
    sampler = sampler_of(CompiledBatchPathSampler(64), SamplingParams())
    for params in (SamplingParams(repetition_penalty=1.1), SamplingParams(logit_bias={3: 1.0}), SamplingParams(banned_token_ids=(5,))):
        assert LogitsProcessor(params, 64, [1, 2], path_sampler=sampler).path_sampler is None
    processor = LogitsProcessor(SamplingParams(min_tokens=1, stop_token_ids=(3,)), 64, [1, 2], path_sampler=sampler)
    assert processor.path_sampler is None
    processor.commit(4)
    assert processor.path_sampler is sampler
