import numpy as np
import pytest

from paceline.sampling.draw import _WIDE_ROW, _best_of_row, _race, draw, draw_rows
from paceline.sampling.noise import token_noise
from paceline.sampling.processors import Distribution

ROWS = {
    "flat": lambda generator, size: np.zeros(size),
    "normal": lambda generator, size: generator.standard_normal(size) * 4.0,
    "far from zero": lambda generator, size: generator.standard_normal(size) + 50_000.0,
    "far below zero": lambda generator, size: generator.standard_normal(size) * 100.0 - 1e6,
    "one id left": lambda generator, size: np.where(np.arange(size) == 77, -3.0, -np.inf),
    "half banned": lambda generator, size: np.where(generator.random(size) < 0.5, -np.inf, generator.standard_normal(size)),
}


def test_the_token_is_the_argmax_of_score_minus_log_noise():
    scores = np.random.default_rng(0).standard_normal(40).astype(np.float32)
    for position in range(50):
        everything = Distribution(scores, None, False)
        assert draw(everything, 9, 1, position) == np.argmax(scores - np.log(token_noise(9, 1, position, 40)))
        ids = np.array([2, 3, 17, 38])
        some = Distribution(scores[ids], ids, False)
        assert draw(some, 9, 1, position) == ids[np.argmax(scores[ids] - np.log(token_noise(9, 1, position, ids)))]


def test_listing_ids_or_leaving_others_at_minus_infinity_is_the_same_draw():
    generator = np.random.default_rng(1)
    for position in range(200):
        ids = np.sort(generator.choice(5_000, 300, replace=False))
        scores = generator.standard_normal(300).astype(np.float32)
        dense = np.full(5_000, -np.inf, np.float32)
        dense[ids] = scores
        assert draw(Distribution(scores, ids, False), 5, 0, position) == draw(Distribution(dense, None, False), 5, 0, position)


def test_a_greedy_distribution_takes_the_lowest_id_on_ties():
    scores = np.array([0, 5, 1, 5], np.float32)
    assert draw(Distribution(scores, None, True), 1, 0, 0) == 1
    assert draw(Distribution(scores, np.array([4, 8, 9, 11]), True), 1, 0, 0) == 8


@pytest.mark.parametrize("kind", ROWS)
def test_bounding_a_wide_row_first_finds_the_same_token(kind, seed, large_counts):
    generator = np.random.default_rng(seed)
    for size in (_WIDE_ROW, 5_000, 32_000):
        for _ in range(300 if large_counts else 30):
            scores = ROWS[kind](generator, size).astype(np.float32)
            bits = generator.integers(0, 2**32, size, dtype=np.uint32)
            assert _best_of_row(scores, bits) == int(np.argmax(_race(scores, bits)))


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(
    "patterns",
    [
        pytest.param([0, 2**32 - 1], id="both ends"),
        pytest.param([2**32 - 1, 2**32 - 2, 2**32 - 257], id="w rounds to 1 in float32"),
        pytest.param([0], id="all zero"),
        pytest.param([2**32 - 1], id="all ones"),
        pytest.param([0, 1, 2, 3], id="smallest"),
        pytest.param([2**31, 2**31 + 1, 2**31 - 1], id="equal in float32"),
    ],
)
def test_adversarial_bits_do_not_mislead_the_bound(kind, patterns):
    generator = np.random.default_rng(3)
    for share in (1.0, 0.01):
        for _ in range(10):
            scores = ROWS[kind](generator, _WIDE_ROW).astype(np.float32)
            bits = generator.integers(0, 2**32, len(scores), dtype=np.uint32)
            chosen = generator.random(len(scores)) < share
            bits[chosen] = generator.choice(np.array(patterns, np.uint32), int(chosen.sum()))
            assert _best_of_row(scores, bits) == int(np.argmax(_race(scores, bits)))


@pytest.mark.parametrize("most_bits", [1_000, 2**31])  # few bits: small w, where the bound is tight
def test_near_ties_are_decided_in_float64(most_bits):
    """Scores chosen so that every race value agrees to float32: the bound alone could not tell them apart."""
    generator = np.random.default_rng(4)
    for _ in range(50):
        bits = generator.integers(0, most_bits, _WIDE_ROW, dtype=np.uint32)
        scores = (7.0 - _race(np.zeros(_WIDE_ROW, np.float32), bits)).astype(np.float32)
        assert _best_of_row(scores, bits) == int(np.argmax(_race(scores, bits)))


@pytest.mark.parametrize("level", [50_000.0, -3_000_000.0])
def test_scores_far_from_zero_whose_bounds_round_coarsely_keep_the_winner(level):
    generator = np.random.default_rng(5)
    for _ in range(50):
        scores = np.full(_WIDE_ROW, level, np.float32)
        bits = generator.integers(1_000, 2_000, _WIDE_ROW, dtype=np.uint32)  # so small that the bound is tight
        assert _best_of_row(scores, bits) == int(np.argmax(_race(scores, bits)))


@pytest.mark.parametrize("width", [1, 5, 300, _WIDE_ROW + 100])
@pytest.mark.parametrize("listed", [True, False])
def test_rows_drawn_together_are_the_rows_drawn_alone(width, listed):
    generator = np.random.default_rng(width)
    num_rows = 300 if width < 1000 else 40
    scores = (generator.standard_normal((num_rows, width)) * 2.0).astype(np.float32)
    ids = np.sort(generator.permuted(np.broadcast_to(np.arange(4 * width), (num_rows, 4 * width)), axis=1)[:, :width], axis=1)
    seeds = generator.integers(0, 2**64, num_rows, dtype=np.uint64)
    samples = generator.integers(0, 4, num_rows)
    positions = generator.integers(0, 100_000, num_rows)
    together = draw_rows(scores, ids if listed else None, seeds, samples, positions)
    alone = [
        draw(Distribution(scores[row], ids[row] if listed else None, False), int(seeds[row]), int(samples[row]), int(positions[row]))
        for row in range(num_rows)
    ]
    assert together.tolist() == alone


def test_padding_never_wins():
    scores = np.array([[0.0, 0.0, -np.inf, -np.inf]] * 500, np.float32)
    ids = np.array([[3, 9, 9, 9]] * 500)
    tokens = draw_rows(scores, ids, np.arange(500, dtype=np.uint64), np.zeros(500, np.int64), np.zeros(500, np.int64))
    assert set(tokens.tolist()) == {3, 9}
