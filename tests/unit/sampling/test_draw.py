import math

import numpy as np
import pytest

from paceline.sampling import draw as draw_module
from paceline.sampling.draw import _WIDE_ROW, _best_of_row, _race, draw
from paceline.sampling.noise import Purpose, exponential, noise_bits
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import Distribution, LogitsProcessor

ROWS = {
    "flat": lambda generator, size: np.zeros(size),
    "normal": lambda generator, size: generator.standard_normal(size) * 4.0,
    "far from zero": lambda generator, size: generator.standard_normal(size) + 50_000.0,
    "far below zero": lambda generator, size: generator.standard_normal(size) * 100.0 - 1e6,
    "one id left": lambda generator, size: np.where(np.arange(size) == 77, -3.0, -np.inf),
    "half banned": lambda generator, size: np.where(generator.random(size) < 0.5, -np.inf, generator.standard_normal(size)),
}


def noise(seed: int, sample_index: int, position: int, token_ids: np.ndarray | int) -> np.ndarray:
    return exponential(noise_bits(seed, sample_index, position, Purpose.TOKEN, token_ids))


def test_the_token_is_the_argmax_of_score_minus_log_noise():
    scores = np.random.default_rng(0).standard_normal(40).astype(np.float32)
    for position in range(50):
        everything = Distribution(scores, None, False)
        assert draw(everything, 9, 1, position) == np.argmax(scores - np.log(noise(9, 1, position, 40)))
        ids = np.array([2, 3, 17, 38])
        some = Distribution(scores[ids], ids, False)
        assert draw(some, 9, 1, position) == ids[np.argmax(scores[ids] - np.log(noise(9, 1, position, ids)))]


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


WIDE_ROWS = {
    "flat": lambda generator, size: generator.standard_normal(size) * 1.2,
    "nearly equal": lambda generator, size: generator.standard_normal(size) * 0.01,
    "equal": lambda generator, size: np.zeros(size),
    "few values": lambda generator, size: np.round(generator.standard_normal(size) * 8.0) / 8.0,
    "half banned": lambda generator, size: np.where(generator.random(size) < 0.5, -np.inf, generator.standard_normal(size)),
    "one stands out": lambda generator, size: np.where(np.arange(size) == 99, 9.0, generator.standard_normal(size)),
    "heavy tail": lambda generator, size: generator.standard_normal(size) * 2.2,
    "Zipf": lambda generator, size: -0.9 * np.log1p(generator.permutation(size)),
    "peaked": lambda generator, size: generator.standard_normal(size) * 5.0,
}
SAMPLED = {
    "top-p": {"top_p": 0.9},
    "small top-p": {"top_p": 0.05},
    "nearly all": {"top_p": 0.9999999},
    "top-k and top-p": {"top_k": 12_000, "top_p": 0.9},
    "top-p and min-p": {"top_p": 0.9, "min_p": 0.005},
    "all three": {"top_k": 9_000, "top_p": 0.7, "min_p": 0.003},
    "min-p": {"min_p": 0.05},
    "top-k": {"top_k": 40},
    "penalties": {"top_p": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.1, "logit_bias": {7: 3.0}},
    "bans": {"top_p": 0.9, "banned_token_ids": tuple(range(100, 200))},
}


def kept_by_full_sort(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The ids that top-k, top-p and min-p leave by definition; scores are already divided by the temperature."""
    ranked = np.lexsort((np.arange(len(scores)), -scores))
    if 0 < params.top_k < len(scores):
        ranked = ranked[(scores[ranked] >= scores[ranked[params.top_k - 1]]) & (scores[ranked] > -np.inf)]
    weights = np.exp(scores - scores.max())
    if params.top_p < 1.0:
        mass = np.cumsum(weights[ranked], dtype=np.float64)
        ranked = ranked[np.concatenate([[0.0], mass[:-1]]) < params.top_p * float(weights[np.sort(ranked)].sum())]
    return np.sort(ranked[weights[ranked] >= np.float32(params.min_p)])


def best_of(kept: np.ndarray, scores: np.ndarray, seed: int, position: int) -> int:
    return int(kept[np.argmax(scores[kept] - np.log(noise(seed, 0, position, kept)))])


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("kind", WIDE_ROWS)
def test_the_token_of_a_wide_row_is_that_of_a_full_sort(kind, name, seed, large_counts):
    generator = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.7, **SAMPLED[name])
    plain = SamplingParams(
        temperature=0.7, **{key: value for key, value in SAMPLED[name].items() if key not in ("top_k", "top_p", "min_p")}
    )
    sizes = (32_000, 150_000) if large_counts or name == "top-p" else (32_000,)
    for size in sizes:
        logits = WIDE_ROWS[kind](generator, size).astype(np.float32)
        processors = [LogitsProcessor(one, size, [1, 2, 3]) for one in (params, plain)]
        row, whole = (processor.process(logits, [5, 6]) for processor in processors)
        kept = kept_by_full_sort(whole.scores, params)
        for position in range(200 if large_counts else 8):
            assert draw(row, seed, 0, position) == best_of(kept, whole.scores, seed, position)


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("kind", WIDE_ROWS)
def test_a_nucleus_left_undone_and_one_listed_give_the_same_token_and_the_same_probabilities(kind, name):
    logits = WIDE_ROWS[kind](np.random.default_rng(8), 9_000).astype(np.float32)
    row = LogitsProcessor(SamplingParams(temperature=0.7, **SAMPLED[name]), 9_000, [1]).process(logits)
    listed = row.restricted()
    assert listed.nucleus is None
    dense = [np.zeros(9_000) for _ in range(2)]
    for one, probs in zip((row, listed), dense, strict=True):
        probs[slice(None) if one.token_ids is None else one.token_ids] = one.probs()
        assert probs.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(dense[0], dense[1], rtol=1e-12)
    drawn = [draw(row, 3, 0, position) for position in range(20)]
    assert drawn == [draw(listed, 3, 0, position) for position in range(20)]
    assert np.all(dense[0][drawn] > 0.0)


@pytest.mark.parametrize("num_rivals", [0.001, 0.5, 1e6])
def test_how_many_rivals_are_looked_at_does_not_change_the_token(num_rivals, monkeypatch):
    """With too few, nearly every draw has to widen its reach; with too many, rivals beyond the reach are evaluated."""
    monkeypatch.setattr(draw_module, "_NUM_RIVALS", num_rivals)
    params = SamplingParams(temperature=0.7, top_p=0.4)
    for kind in ("flat", "equal", "few values"):
        logits = WIDE_ROWS[kind](np.random.default_rng(9), 9_000).astype(np.float32)
        row = LogitsProcessor(params, 9_000, ()).process(logits)
        assert row.nucleus is not None
        kept = kept_by_full_sort(row.scores, params)
        for position in range(40):
            assert draw(row, 4, 0, position) == best_of(kept, row.scores, 4, position)


def test_a_rival_beyond_the_reach_does_not_hide_a_better_id_that_is_no_rival(monkeypatch):
    """Rivals are told by w, races by E >= w: with w = 0.89 the first id is one, and loses to the second, which with w = 0.46 is none."""
    scores = np.full(9_000, math.log(0.5), np.float32)
    scores[0] = 0.0
    row = LogitsProcessor(SamplingParams(temperature=1.0, top_p=0.9), 9_000, ()).process(scores)
    assert row.nucleus is not None
    bits = np.full(9_000, 2**32 - 1, np.uint32)
    bits[:2] = 0.89 * 2**32, 0.46 * 2**32
    monkeypatch.setattr(draw_module, "_NUM_RIVALS", 0.9 * row.nucleus.wanted)
    monkeypatch.setattr(draw_module, "bits_by_run", lambda key, ids: iter([(0, bits)]))
    assert draw(row, 1, 0, 0) == np.argmax(_race(scores, bits)) == 1


@pytest.mark.parametrize("patterns", [[0], [2**32 - 1], [0, 2**32 - 1], [5, 6], [2**32 - 1, 2**32 - 257]])
@pytest.mark.parametrize("kind", ["flat", "equal", "half banned"])
def test_adversarial_bits_do_not_mislead_a_draw_from_an_undone_nucleus(kind, patterns, monkeypatch):
    generator = np.random.default_rng(10)
    logits = WIDE_ROWS[kind](generator, 9_000).astype(np.float32)
    row = LogitsProcessor(SamplingParams(temperature=1.0, top_p=0.6), 9_000, ()).process(logits)
    assert row.nucleus is not None
    kept = row.nucleus.positions()
    for share in (1.0, 0.3, 0.001):
        bits = generator.integers(0, 2**32, 9_000, dtype=np.uint32)
        chosen = generator.random(9_000) < share
        bits[chosen] = generator.choice(np.array(patterns, np.uint32), int(chosen.sum()))
        monkeypatch.setattr(draw_module, "bits_by_run", lambda key, ids, bits=bits: iter([(0, bits)]))
        assert draw(row, 1, 0, 0) == kept[np.argmax(_race(row.scores[kept], bits[kept]))]


def test_an_undone_nucleus_of_listed_ids_uses_the_noise_of_their_ids():
    logits = (np.random.default_rng(11).standard_normal(32_000) * 1.2).astype(np.float32)
    row = LogitsProcessor(SamplingParams(temperature=1.0, top_k=20_000, top_p=0.9), 32_000, ()).process(logits)
    assert row.nucleus is not None
    assert len(row.token_ids) == 20_000
    kept = row.nucleus.positions()
    for position in range(20):
        bits = noise_bits(2, 0, position, 0, row.token_ids)
        assert draw(row, 2, 0, position) == row.token_ids[kept[np.argmax(_race(row.scores[kept], bits[kept]))]]
