import numpy as np
import pytest

from paceline.sampling.draw import Distribution, draw
from paceline.sampling.noise import Purpose, exponential, noise_bits
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor


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
