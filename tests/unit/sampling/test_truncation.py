"""Top-k, top-p and min-p against one full sort by definition: the same ids, not nearly the same."""

import numpy as np
import pytest

from paceline.sampling.truncation import truncate

ROWS = {
    "normal": lambda generator, size: generator.standard_normal(size) * 3.0,
    "peaked": lambda generator, size: generator.standard_normal(size) - 4.0 * np.log1p(generator.permutation(size)),
    "flat": lambda generator, size: generator.standard_normal(size) * 0.1,
    "Zipf": lambda generator, size: -0.9 * np.log1p(generator.permutation(size)),
    "few values": lambda generator, size: np.round(generator.standard_normal(size) * 8.0) / 8.0,
    "tied": lambda generator, size: generator.integers(-6, 3, size),
    "equal": lambda generator, size: np.zeros(size),
    "signed zeros": lambda generator, size: np.where(generator.random(size) < 0.5, 0.0, -0.0) - (generator.random(size) < 0.3),
    "mostly banned": lambda generator, size: np.where(generator.random(size) < 0.9, -np.inf, generator.standard_normal(size)),
    "huge": lambda generator, size: generator.standard_normal(size) * 1e6,
}


def by_definition(scores: np.ndarray, top_k: int, top_p: float, min_p: float) -> list[int]:
    ranked = np.lexsort((np.arange(len(scores)), -scores))
    if 0 < top_k < len(scores):
        ranked = ranked[(scores[ranked] >= scores[ranked[top_k - 1]]) & (scores[ranked] > -np.inf)]
    weights = np.exp(scores - scores.max())
    if top_p < 1.0:
        mass = np.cumsum(weights[ranked], dtype=np.float64)
        before = np.concatenate([[0.0], mass[:-1]])
        ranked = ranked[before < top_p * float(weights[np.sort(ranked)].sum())]
    return np.sort(ranked[weights[ranked] >= np.float32(min_p)]).tolist()


@pytest.mark.parametrize("kind", ROWS)
def test_truncate_keeps_the_ids_of_a_full_sort(kind, seed, large_counts):
    generator = np.random.default_rng(seed)
    for size, count in ((1, 5), (2, 20), (40, 200), (700, 100), (9_000, 15 if large_counts else 4)):
        for _ in range(count * (5 if large_counts else 1)):
            scores = ROWS[kind](generator, size).astype(np.float32)
            scores[generator.integers(size)] = max(0.0, scores.max())  # one finite score at least
            top_k = int(generator.choice([0, 1, 3, 50, size]))
            top_p = float(generator.choice([1.0, 1.0 - 2.0**-53, 0.999999, 0.95, 0.5, 1e-9, generator.random() * 0.99 + 0.01]))
            min_p = float(generator.choice([0.0, 0.0, 0.05, 1.0]))
            kept = truncate(scores, scores.max(), top_k=top_k, top_p=top_p, min_p=min_p)
            ids = list(range(size)) if kept is None else kept.tolist()
            assert ids == by_definition(scores, top_k, top_p, min_p), (size, top_k, top_p, min_p)


def test_ties_with_the_kth_score_are_kept_by_top_k():
    scores = np.array([1, 3, 2, 2, 2, 0], np.float32)
    assert truncate(scores, scores.max(), top_k=2, top_p=1.0, min_p=0.0).tolist() == [1, 2, 3, 4]


def test_top_p_keeps_the_lowest_ids_of_ties():
    scores = np.zeros(10, np.float32)
    assert truncate(scores, scores.max(), top_k=0, top_p=0.25, min_p=0.0).tolist() == [0, 1, 2]
    scores = np.array([0, 2, 0, 2, 2, 0], np.float32)
    assert truncate(scores, scores.max(), top_k=0, top_p=0.5, min_p=0.0).tolist() == [1, 3]


def test_tiny_top_p_keeps_top_logit_when_float32_probs_are_equal():
    scores = np.array([-1e-9, 0.0, -1e-9], np.float32)
    assert truncate(scores, scores.max(), top_k=0, top_p=1e-6, min_p=0.0).tolist() == [1]


def test_top_p_is_relative_to_the_mass_left_by_top_k():
    scores = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # Of the two best, the first holds 4/7 = 0.571 of the mass.
    assert truncate(scores, scores.max(), top_k=2, top_p=0.57, min_p=0.0).tolist() == [0]
    assert truncate(scores, scores.max(), top_k=0, top_p=0.57, min_p=0.0).tolist() == [0, 1]


def test_truncate_without_limits_returns_none():
    scores = np.zeros(10, np.float32)
    assert truncate(scores, scores.max(), top_k=0, top_p=1.0, min_p=0.0) is None
    assert truncate(scores, scores.max(), top_k=10, top_p=1.0, min_p=0.0) is None


@pytest.mark.parametrize("size", [32_000, 150_000])
@pytest.mark.parametrize("kind", ROWS)
def test_truncate_of_wide_rows_keeps_the_ids_of_a_full_sort(kind, size, large_counts):
    generator = np.random.default_rng(size)
    mixtures = [(0, 0.9, 0.0), (0, 0.3, 0.0), (size // 3, 0.8, 0.0), (0, 0.95, 0.02), (0, 1.0 - 2.0**-53, 0.0), (50, 1e-6, 0.0)]
    for top_k, top_p, min_p in mixtures if large_counts or size < 100_000 else mixtures[:1]:
        scores = ROWS[kind](generator, size).astype(np.float32)
        kept = truncate(scores, scores.max(), top_k=top_k, top_p=top_p, min_p=min_p)
        assert kept.tolist() == by_definition(scores, top_k, top_p, min_p), (top_k, top_p, min_p)
