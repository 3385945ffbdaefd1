"""Walks drawn by the kernels give the tokens that rows processed and drawn from one by one give."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.runtimes.native.library import kernels_path
from paceline.runtimes.native.walks import CompiledWalks
from paceline.sampling.draw import draw
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.sampling.walker import DrawnRows
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


def walk(logits: Rows, tree: DraftTree, params: SamplingParams, *, seed: int = 1, sample_index: int = 0, position: int = 7) -> Any:
    walks = CompiledWalks(logits.shape[1])
    walker = walks.walker(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    return walker.walk(logits, tree.token_ids, tree.parents, seed=seed, sample_index=sample_index, position=position)


@pytest.mark.parametrize("given", [{"top_p": 0.3}, {"top_p": 0.5, "top_k": 20}, {"top_p": 0.4, "min_p": 0.1}], ids=str)
def test_logits_that_are_equal_only_behind_the_temperature_are_ties(given: dict[str, Any]) -> None:
    """Denormal ones: what is between two of them is gone when they are divided."""
    params = SamplingParams(temperature=5.0, **given)
    processor = LogitsProcessor(params, 64, [])
    for seed in range(300):
        row = np.random.default_rng(seed).normal(size=64).astype(np.float32) * np.float32(1e-45)
        tokens, _, is_whole = walk(row[None], DraftTree.root_only(3), params, seed=seed)
        assert not is_whole or tokens == [draw(processor.process(row), seed, 0, 7)], seed


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_the_definition(shape: str, pytestconfig: pytest.Config) -> None:
    count = 400 if pytestconfig.getoption("--large-counts") else 8
    for vocab in (97, 4096, 32_001):
        logits = rows_of(shape, count, vocab, pytestconfig.getoption("--seed"))
        for given in SAMPLING:
            params, decided = SamplingParams(**given), 0
            processor = LogitsProcessor(params, vocab, [])
            for index, row in enumerate(logits):
                key = {"seed": 2**63 + index, "sample_index": index % 3, "position": 11 * index}
                tokens, nodes, is_whole = walk(row[None], DraftTree.root_only(3), params, **key)
                assert nodes == []
                if is_whole:
                    decided += 1
                    assert tokens == [draw(processor.process(row), key["seed"], key["sample_index"], key["position"])], (vocab, given)
                else:
                    assert tokens == []
            few = "top_k" in given and vocab < 64 * given["top_k"]  # left to the definition
            assert decided >= 0.75 * count or few or shape in ("ties", "far from zero", "bfloat16"), (vocab, given, decided)


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
def test_a_walk_goes_along_the_tree_as_far_as_a_node_holds_the_token(given: dict[str, Any]) -> None:
    params, logits = SamplingParams(**given), rows_of("steep", 8, 2048, 5)
    right: Sequence[int] = [draw(LogitsProcessor(params, 2048, []).process(logits[node]), 1, 0, 7 + node) for node in range(8)]
    wrong = [(token + 1) % 2048 for token in right]
    trees = [
        DraftTree.chain(3, right[:7], "one"),
        DraftTree.chain(3, [*right[:2], wrong[2], *right[3:7]], "one"),
        DraftTree.chain(3, wrong[:7], "one"),
        DraftTree.grow(3, [wrong[0], right[0], wrong[1], 17, right[2]], [0, 0, 1, 2, 2], "one"),
    ]
    for tree in trees:
        tokens, nodes, is_whole = walk(logits[: len(tree.token_ids)], tree, params)
        assert is_whole
        assert (tokens, nodes) == definition(logits, tree, params)
    assert len(walk(logits, trees[0], params)[0]) == 8


def test_rows_of_a_wider_matrix_are_read_where_they_lie() -> None:
    params, wide = SamplingParams(temperature=0.7, top_p=0.9), rows_of("steep", 6, 2100, 8)
    wide[:, 2048:] = 50.0  # padding rows of a vocabulary
    wide[1::2] = np.nan
    logits = wide[::2, :2048]
    tree = DraftTree.chain(3, [draw(LogitsProcessor(params, 2048, []).process(logits[0]), 1, 0, 7), 5], "one")
    assert walk(logits, tree, params)[:2] == definition(logits, tree, params)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1, 2047, 2048])
def test_a_row_without_a_token_is_left_to_the_definition_which_says_so(value: float, place: int) -> None:
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        logits = rows_of("steep", 2, 2049, 4)
        logits[1, place] = value
        [first] = walk(logits[:1], DraftTree.root_only(3), params)[0]
        assert walk(logits, DraftTree.chain(3, [first], "one"), params) == ([first], [1], False)
        logits[0] = -np.inf
        assert walk(logits, DraftTree.chain(3, [first], "one"), params) == ([], [], False)


def test_equal_logits_at_the_border_of_the_nucleus_are_left_to_the_definition() -> None:
    logits = np.full((1, 2048), -30.0, np.float32)
    logits[0, :10] = 1.0  # ten of the same weight, five of which top-p 0.5 keeps
    decided = [walk(logits, DraftTree.root_only(3), SamplingParams(temperature=1.0, top_p=0.5), seed=seed)[2] for seed in range(20)]
    assert not any(decided)


def test_a_token_whose_place_sums_of_another_order_could_change_is_left_to_the_definition() -> None:
    logits = np.full((1, 2048), -200.0, np.float32)
    logits[0, :2] = 0.0, -1.0
    params = SamplingParams(temperature=1.0, top_p=1.0 / (1.0 + np.exp(-1.0)))  # the weight before the second is what is wanted
    found = [walk(logits, DraftTree.root_only(3), params, seed=seed) for seed in range(50)]
    assert {tuple(tokens) for tokens, _, is_whole in found if is_whole} == {(0,)}
    assert 5 < sum(not is_whole for _, _, is_whole in found) < 25


@pytest.mark.parametrize("num_threads", [1, 3])
def test_walks_of_several_requests_are_those_of_each(num_threads: int) -> None:
    vocab = 70_000  # enough for other threads to be woken
    walks, random, asked, blocks = CompiledWalks(vocab, num_threads), np.random.default_rng(4), list[Any](), list[Rows]()
    for index in range(11):
        params = SamplingParams(**SAMPLING[index % 5])
        size = int(random.integers(1, 5))
        logits = rows_of("flat" if index % 3 else "steep", size, vocab, index)
        right = [draw(LogitsProcessor(params, vocab, []).process(row), index, 0, 7 + node) for node, row in enumerate(logits)]
        tree = DraftTree.chain(3, [token + (node == 2) for node, token in enumerate(right[: size - 1])], "one")
        walker = walks.walker(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        asked.append((walker, tree.token_ids, tree.parents, index, 0, 7, sum(map(len, blocks))))
        blocks.append(logits)
    blocks[4][0] = np.nan
    rows = np.concatenate(blocks)
    one_by_one = [
        walker.walk(rows[first:], token_ids, parents, seed=seed, sample_index=sample, position=position)
        for walker, token_ids, parents, seed, sample, position, first in asked
    ]
    for count in (11, 1, 5):
        for address in (0, rows.ctypes.data):
            assert walks.walk_each(asked[:count], DrawnRows(rows, None, address)) == one_by_one[:count]
    assert sum(is_whole for _, _, is_whole in one_by_one) == 10
    assert max(len(nodes) for _, nodes, _ in one_by_one) > 1
    assert walks.walk_each([], DrawnRows(rows)) == []


def test_no_walk_begins_where_rows_are_such_as_the_kernels_do_not_read() -> None:
    walks, rows = CompiledWalks(64), rows_of("flat", 2, 64, 1)
    walker, rest = walks.walker(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0), ((3,), (-1,), 1, 0, 7, 0)
    assert [is_whole for _, _, is_whole in walks.walk_each([(walker, *rest)] * 2, DrawnRows(rows))] == [True, True]
    for odd in (rows[:, ::2], rows[:, :32], rows.astype(np.float64)):
        assert walks.walk_each([(walker, *rest)] * 2, DrawnRows(odd)) == [((), (), False)] * 2  # type: ignore[arg-type]


EDITS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 2.0}, {"presence_penalty": 1.0, "frequency_penalty": 2.0}, {"logit_bias": {5: 3.0, 9: -100.0}},
    {"banned_token_ids": (3, 4, 5)}, {"no_repeat_ngram_size": 2}, {"bad_words": ((1, 2), (7,))},
    {"min_tokens": 9, "stop_token_ids": (8, 11)},
)  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: "-".join(edit))
def test_a_row_that_is_edited_gives_the_token_of_the_definition(edit: dict[str, Any], pytestconfig: pytest.Config) -> None:
    vocab, decided = 3_000, 0
    for given in SAMPLING[:6]:
        params = SamplingParams(**given, **edit)
        walker = CompiledWalks(vocab).walker(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        processor = LogitsProcessor(params, vocab, [1, 2, 3, 2], walker=walker)
        processor.commit_all([4, 5, 1])
        for index, row in enumerate(rows_of("steep", 12, vocab, pytestconfig.getoption("--seed"))):
            row[:12] += 9.0  # those that are edited
            best = int(row.argmax())
            before, path = row.copy(), [best, 1, best][: index % 4]
            token = processor.draw_edited(row, path, seed=index, sample_index=0, position=11)
            assert np.array_equal(row, before)
            if token is not None:
                decided += 1
                assert token == draw(processor.process(row, path), index, 0, 11)
    assert decided > 40


def test_an_edited_row_from_which_nothing_can_be_drawn_is_left_to_what_says_so() -> None:
    walker = CompiledWalks(64).walker(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    processor = LogitsProcessor(SamplingParams(temperature=1.0, banned_token_ids=tuple(range(64))), 64, [1], walker=walker)
    row = rows_of("flat", 1, 64, 1)[0]
    assert processor.draw_edited(row, (), seed=1, sample_index=0, position=3) is None
    row[5] = np.nan
    processor = LogitsProcessor(SamplingParams(temperature=1.0, repetition_penalty=1.1), 64, [1], walker=walker)
    assert processor.draw_edited(row, (), seed=1, sample_index=0, position=3) is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_damaged_row_is_left_to_what_says_so_also_where_the_token_is_banned(value: float) -> None:
    params, row = SamplingParams(temperature=0.0), np.zeros(97, np.float32)
    row[7] = value
    walker = CompiledWalks(97).walker(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    processor = LogitsProcessor(params, 97, [1], bad_word_ids=[[7]], walker=walker)
    assert processor.draw_edited(row, (), seed=0, sample_index=0, position=1) is None


def test_rows_that_a_custom_processor_edits_are_given_to_it_once() -> None:
    seen: list[int] = []

    def note(token_ids: Any, logits: Any) -> Any:
        seen.append(len(token_ids))
        return logits

    walker = CompiledWalks(64).walker(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    processor = LogitsProcessor(SamplingParams(temperature=1.0, processors=(note,)), 64, [1], walker=walker)
    assert processor.draw_edited(rows_of("flat", 1, 64, 1)[0], (), seed=1, sample_index=0, position=3) is None
    assert seen == []


def test_whoever_edits_rows_has_no_walker() -> None:
    walker = CompiledWalks(64).walker(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    for params in (SamplingParams(repetition_penalty=1.1), SamplingParams(logit_bias={3: 1.0}), SamplingParams(banned_token_ids=(5,))):
        assert LogitsProcessor(params, 64, [1, 2], walker=walker).walker is None
    processor = LogitsProcessor(SamplingParams(min_tokens=1, stop_token_ids=(3,)), 64, [1, 2], walker=walker)
    assert processor.walker is None
    processor.commit(4)
    assert processor.walker is walker
