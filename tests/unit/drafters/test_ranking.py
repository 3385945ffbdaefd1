"""The best of a row, found without sorting it."""

import numpy as np
import pytest

from paceline.drafters.pairs.ranking import best_scores


@pytest.mark.parametrize("size", [3, 100, 8192, 8200, 20_011])
def test_the_largest_scores_are_found(size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    for spread in (0.1, 1.0, 3.0):
        scores = np.round(random.normal(0, spread, size), 1).astype(np.float32)  # ties
        scores[random.integers(0, size, size // 3)] = -np.inf
        before = scores.copy()
        for count in (1, 2, 4, 6, 7, 10):
            expected = np.argsort(-scores, kind="stable")[:count]
            assert best_scores(scores, count).tolist() == expected[scores[expected] > -np.inf].tolist() or size < 10
        assert np.array_equal(scores, before)


@pytest.mark.parametrize("place", [0, 300, 8191, 8192, 8199])
def test_what_is_not_allowed_is_no_guess(place: int) -> None:
    scores = np.full(8200, -np.inf, np.float32)
    scores[place] = 1.0
    assert best_scores(scores, 4).tolist() == [place]
    assert best_scores(scores, 10)[0] == place
