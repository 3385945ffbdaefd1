"""Over seeds, what is drawn has exactly the distribution the logits and parameters define."""

import numpy as np
import pytest

from harness.scripted_target import (
    LEAST_EXPECTED,
    NoisePosition,
    ScriptedTarget,
    chi_square_p_value,
    draw_many,
    joint_counts,
    textbook_probs,
)
from paceline.sampling.draw import draw
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor

NUM_SEEDS, LARGE_NUM_SEEDS = 50_000, 200_000
NUM_TOKENS = 3
PARAMS = {
    "top-k": SamplingParams(temperature=1.0, top_k=5),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8),
    "everything": SamplingParams(
        temperature=0.8,
        top_k=12,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.3,
        frequency_penalty=0.3,
        presence_penalty=0.4,
        logit_bias={2: 1.5, 7: -1.0},
        banned_token_ids=(5,),
    ),
}


def _seeds(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.uint64)


@pytest.mark.parametrize("name", PARAMS)
def test_sampled_texts_have_the_joint_distribution_of_the_logits(name, seed, large_counts):
    num_seeds = LARGE_NUM_SEEDS if large_counts else NUM_SEEDS
    target = ScriptedTarget()
    distribution = target.exact_joint_distribution(PARAMS[name], NUM_TOKENS)
    assert sum(mass * num_seeds >= LEAST_EXPECTED for mass in distribution.values()) > 50
    texts = target.generate_many(PARAMS[name], _seeds(seed, num_seeds), NUM_TOKENS)
    assert chi_square_p_value(joint_counts(texts), distribution) > 0.001


@pytest.mark.parametrize("name", PARAMS)
def test_single_request_sampling_equals_the_vectorised_sampler(name, seed, large_counts):
    target = ScriptedTarget()
    seeds = _seeds(seed, 2_000 if large_counts else 600)
    many = target.generate_many(PARAMS[name], seeds, NUM_TOKENS)
    assert [target.generate(PARAMS[name], int(one), NUM_TOKENS) for one in seeds] == [tuple(text) for text in many.tolist()]


@pytest.mark.parametrize(
    "wrong_position",
    [
        pytest.param(lambda position: (position - 3) % 2, id="keyed by the row of a pass of two"),
        pytest.param(lambda position: min(position, 4), id="reused by the next position"),
        pytest.param(lambda position: 0, id="reused by every position"),
    ],
)
@pytest.mark.parametrize("name", ["top-k", "top-p"])
def test_fault_of_noise_without_position_is_found(name, wrong_position: NoisePosition, seed):
    target = ScriptedTarget()
    distribution = target.exact_joint_distribution(PARAMS[name], NUM_TOKENS)
    texts = target.generate_many(PARAMS[name], _seeds(seed, NUM_SEEDS), NUM_TOKENS, wrong_position)
    assert chi_square_p_value(joint_counts(texts), distribution) < 1e-6


def test_samples_of_one_request_are_independent(seed):
    target = ScriptedTarget()
    params = PARAMS["top-k"]
    row = LogitsProcessor(params, target.vocab_size, target.prompt).process(target.logits(target.prompt))
    samples = np.stack([draw_many(row, _seeds(seed, NUM_SEEDS), sample_index, 3) for sample_index in (0, 1)], axis=1)
    probs = textbook_probs(target.logits(target.prompt), params)
    kept = np.flatnonzero(probs)
    distribution = {(int(one), int(other)): float(probs[one] * probs[other]) for one in kept for other in kept}
    assert chi_square_p_value(joint_counts(samples), distribution) > 0.001


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_sampled_tokens_of_a_large_vocabulary_have_the_distribution(top_p, seed, large_counts):
    """The 50 most probable tokens one by one, the rest as one cell: a random tail would show there."""
    num_draws = 100_000 if large_counts else 4_000
    params = SamplingParams(temperature=0.9, top_p=top_p)
    logits = (np.random.default_rng(5).standard_normal(32_000) * 3.0).astype(np.float32)
    row = LogitsProcessor(params, 32_000, ()).process(logits)
    probs = _exact_row_distribution(logits, 0.9, top_p)
    largest = np.argsort(-probs)[:50]
    distribution = {int(token_id): float(probs[token_id]) for token_id in largest}
    distribution["tail"] = 1.0 - sum(distribution.values())
    counts = dict.fromkeys(distribution, 0)
    for one in range(num_draws):
        token_id = draw(row, seed + one, 0, 17)
        assert probs[token_id] > 0.0
        counts[token_id if token_id in distribution else "tail"] += 1
    assert 0.05 < distribution["tail"] < 0.95
    assert chi_square_p_value(counts, distribution) > 0.001


def _exact_row_distribution(logits: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    probs = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= top_p]] = 0.0
    return probs / probs.sum()
