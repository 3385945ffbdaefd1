"""The top tokens of a row, and what truncation leaves of them, against the whole row."""

import numpy as np
import pytest

from paceline.sampling.draw import Distribution, draw
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.sampling.truncation import SUPPORT_TOP_N, support_of, top_n, top_probs

SETTINGS = [
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=0.5, min_p=0.2),
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(temperature=1.3, top_k=SUPPORT_TOP_N, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=40, min_p=0.05),
    SamplingParams(temperature=0.9, top_p=0.3),
]


@pytest.mark.parametrize("params", SETTINGS, ids=repr)
def test_draw_from_a_whole_support_equals_the_draw_from_the_row(params: SamplingParams, seed: int, large_counts: bool) -> None:
    random, num_known = np.random.default_rng(seed), 0
    for number in range(600 if large_counts else 60):
        row = random.normal(scale=random.uniform(0.5, 6.0), size=200).astype(np.float32)
        whole = LogitsProcessor(params, 200, [1]).process(row)
        scores = row / np.float32(params.temperature)
        order = np.argsort(-scores, kind="stable")[:SUPPORT_TOP_N]
        shares = np.exp(scores - scores.max())
        support = support_of(params, (shares[order] / shares.sum()).tolist())
        likely = int((whole.log_probs() > -np.inf).sum())
        assert support.num_kept <= likely
        if not support.includes_all_kept:
            continue
        num_known += 1
        assert support.num_kept == likely
        top = order[: support.num_kept].tolist()
        assert draw(Distribution(scores[top], np.array(top), greedy=False), 5, 0, number) == draw(whole, 5, 0, number)
    assert num_known > 10


def test_candidate_support_of_a_flat_row_is_incomplete() -> None:
    flat = [1.0 / 200] * SUPPORT_TOP_N
    assert not support_of(SamplingParams(temperature=1.0, top_p=0.9), flat).includes_all_kept
    assert not support_of(SamplingParams(temperature=1.0, top_k=40), flat).includes_all_kept
    assert support_of(SamplingParams(temperature=1.0, top_k=SUPPORT_TOP_N), flat).includes_all_kept
    assert support_of(SamplingParams(temperature=1.0, top_k=2), flat).num_kept == 2


@pytest.mark.parametrize("size", [3, 100, 8192, 8200, 20_011])
def test_top_n_equals_a_full_sort(size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    for spread in (0.1, 1.0, 3.0):
        scores = np.round(random.normal(0, spread, size), 1).astype(np.float32)  # ties
        scores[random.integers(0, size, size // 3)] = -np.inf
        before = scores.copy()
        for count in (0, 1, 2, 4, 6, 7, 10):
            expected = np.argsort(-scores, kind="stable")[:count]
            assert top_n(scores, count).tolist() == expected[scores[expected] > -np.inf].tolist()
        assert np.array_equal(scores, before)


@pytest.mark.parametrize("place", [0, 300, 8191, 8192, 8199])
def test_top_n_of_a_row_with_one_possible_token_lists_only_it(place: int) -> None:
    scores = np.full(8200, -np.inf, np.float32)
    scores[place] = 1.0
    assert top_n(scores, 4).tolist() == top_n(scores, 10).tolist() == [place]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0), *SETTINGS], ids=repr)
def test_top_probs_with_a_whole_support_equal_the_distribution(params: SamplingParams, seed: int) -> None:
    row = (np.random.default_rng(seed).normal(size=200) * 6.0).astype(np.float32)
    edited = LogitsProcessor(params, 200, [1]).edit_logits(row)
    whole = edited.distribution()
    ids = np.arange(200) if whole.token_ids is None else whole.token_ids
    expected = dict(zip(ids.tolist(), whole.probs().tolist(), strict=True))
    best, probs = top_probs(params, edited.scaled_logits(), 3)
    assert best.tolist() == sorted(expected, key=expected.__getitem__, reverse=True)[: len(best)]
    assert probs == pytest.approx([expected[token] for token in best.tolist()], rel=1e-4)
