"""Probabilities over all ids or a few, against plain arrays over all of them."""

import numpy as np
import pytest

from harness.scripted_target import chi_square_p_value, textbook_probs
from paceline.sampling.noise import Purpose, step_uniform
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.sampling.residual import TokenProbs, acceptance_ratio, block_threshold, draw_distinct, excess, residual

VOCAB_SIZE = 9


def _random_probs(generator: np.random.Generator) -> tuple[TokenProbs, np.ndarray]:
    """Probabilities in either form, and the same as an array over all ids."""
    dense = generator.random(VOCAB_SIZE) * (generator.random(VOCAB_SIZE) < 0.6)
    if not dense.any():
        dense[int(generator.integers(VOCAB_SIZE))] = 1.0
    dense /= dense.sum()
    if generator.random() < 0.5:
        return TokenProbs(dense.copy()), dense
    listed = np.flatnonzero((dense > 0) | (generator.random(VOCAB_SIZE) < 0.2))
    return TokenProbs(dense[listed], listed), dense


def _dense(probs: TokenProbs) -> np.ndarray:
    values = np.zeros(VOCAB_SIZE)
    values[slice(None) if probs.token_ids is None else probs.token_ids] = probs.probs
    return values


def test_listed_and_dense_token_probs_give_the_same_results(seed):
    generator = np.random.default_rng(seed)
    for _ in range(500):
        (target, target_values), (draft, draft_values) = _random_probs(generator), _random_probs(generator)
        share = float(generator.random())
        token = int(generator.choice(np.flatnonzero(draft_values)))
        assert [draft.prob(one) for one in range(VOCAB_SIZE)] == draft_values.tolist()
        assert acceptance_ratio(target, draft, token) == target_values[token] / draft_values[token]
        left = np.maximum(share * target_values - draft_values, 0.0)
        weights = excess(target, draft, share)
        np.testing.assert_array_equal(_dense(TokenProbs(weights, target.token_ids)), left)
        assert block_threshold(share, weights) == pytest.approx(left.sum() / (left.sum() + 1 - share))
        wanted = left / left.sum() if left.any() else target_values
        np.testing.assert_allclose(_dense(residual(target, weights)), wanted, rtol=1e-12)
        others = draft_values.copy()
        others[token] = 0.0
        rest = draft.without_token(token)
        assert (rest is None) == (not others.any())
        if rest is not None:
            np.testing.assert_allclose(_dense(rest), others / others.sum(), rtol=1e-12)
        for size in range(VOCAB_SIZE + 1):
            assert draft.is_within(size) == (not draft_values[size:].any())


def test_probs_of_ids_outside_a_distribution_are_zero():
    short, long = TokenProbs(np.array([0.5, 0.5])), TokenProbs(np.array([0.1, 0.2, 0.3, 0.4]))
    assert short.probs_at_ids_of(long).tolist() == [0.5, 0.5, 0.0, 0.0]
    assert long.probs_at_ids_of(short).tolist() == [0.1, 0.2]
    assert short.probs_at_ids_of(TokenProbs(np.array([0.5, 0.5]), np.array([1, 3]))).tolist() == [0.5, 0.0]
    assert short.prob(3) == acceptance_ratio(long, short, 3) == 0


def test_ratio_to_a_denormal_probability_is_infinite_without_a_warning():
    draft, target = TokenProbs(np.array([5e-324, 1.0])), TokenProbs(np.array([1.0, 0.0]))
    with np.errstate(all="raise"):
        assert [acceptance_ratio(target, draft, token) for token in (0, 1)] == [np.inf, 0.0]
        assert acceptance_ratio(TokenProbs(np.array([0.0, 1.0])), draft, 0) == 0.0


def test_block_threshold_of_equal_distributions_is_one():
    same = TokenProbs(np.array([0.25, 0.75]))
    assert block_threshold(1, excess(same, same)) == 1
    assert block_threshold(0, excess(same, same, 0)) == 0


def test_residual_of_equal_distributions_is_the_target():
    same = TokenProbs(np.array([0.25, 0.75]))
    assert residual(same, excess(same, same)) is same


@pytest.mark.parametrize("uniform", [2.0**-49, 0.3, 1.0 - 2.0**-49])
def test_token_at_never_returns_a_token_of_probability_0(uniform, seed):
    generator = np.random.default_rng(seed)
    for _ in range(300):
        probs, values = _random_probs(generator)
        assert values[probs.token_at_quantile(uniform)] > 0.0


def test_token_at_random_quantile_follows_the_distribution(seed):
    """From logits through the processors and the noise: what drafts are drawn by and what replaces a refused one."""
    params = SamplingParams(temperature=0.8, top_p=0.9)
    logits = np.random.default_rng(4).normal(0.0, 2.0, 64).astype(np.float32)
    probs = TokenProbs.from_distribution(LogitsProcessor(params, 64, ()).process(logits))
    distribution = {token: float(value) for token, value in enumerate(textbook_probs(logits, params)) if value > 0}
    counts = dict.fromkeys(distribution, 0)
    for one in range(seed, seed + 20_000):
        counts[probs.token_at_quantile(step_uniform(one, 0, 10, Purpose.RESIDUAL, 1))] += 1
    assert chi_square_p_value(counts, distribution) > 0.001


def test_draw_distinct_samples_in_order_without_replacement(seed):
    values = np.array([0.5, 0.3, 0.15, 0.05])
    probs = TokenProbs(values)
    distribution = {(one, two): float(values[one] * values[two] / (1 - values[one])) for one in range(4) for two in range(4) if one != two}
    counts = dict.fromkeys(distribution, 0)
    for one in range(seed, seed + 10_000):
        first, second = draw_distinct(probs, 2, one, 0, 7, 0)
        counts[first, second] += 1
    assert chi_square_p_value(counts, distribution) > 0.001


def test_draw_distinct_returns_no_more_tokens_than_exist():
    probs = TokenProbs(np.array([0.5, 0.5]), np.array([3, 8]))
    assert sorted(draw_distinct(probs, 5, 1, 0, 7, 0)) == [3, 8]
    assert len(draw_distinct(probs, 1, 1, 0, 7, 0)) == 1


def test_token_probs_do_not_share_memory_with_the_logits():
    logits = np.zeros(32, np.float32)
    probs = TokenProbs.from_distribution(LogitsProcessor(SamplingParams(temperature=1.0), 32, ()).process(logits))
    before = probs.probs.copy()
    logits[:] = np.arange(32)
    np.testing.assert_array_equal(probs.probs, before)
