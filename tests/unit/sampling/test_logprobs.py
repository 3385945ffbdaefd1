import math

import numpy as np
import pytest

from paceline.sampling.logprobs import TokenLogprobs, processed_logprobs, raw_logprobs
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor

SIZES = [1, 7, 320, 639, 640, 1_001, 32_000]


def _textbook(scores, token_id, num_top) -> TokenLogprobs:
    """By a full sort and a sum without rounding."""
    values = [float(score) for score in scores]
    peak = max(values)
    log_total = math.log(math.fsum(math.exp(value - peak) for value in values))
    ranked = sorted((index for index in range(len(values)) if values[index] > -math.inf), key=lambda index: (-values[index], index))
    rank = 1 + sum(value > values[token_id] for value in values)
    return TokenLogprobs(
        token_id, values[token_id] - peak - log_total, rank, tuple((index, values[index] - peak - log_total) for index in ranked[:num_top])
    )


def _assert_equal(ours: TokenLogprobs, expected: TokenLogprobs) -> None:
    assert (ours.token_id, ours.rank) == (expected.token_id, expected.rank)
    assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in expected.top]
    assert ours.logprob == pytest.approx(expected.logprob, abs=1e-11)
    assert [value for _, value in ours.top] == pytest.approx([value for _, value in expected.top], abs=1e-11)


@pytest.mark.spread(0.25)
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["normal", "tied", "flat", "sorted", "half impossible"])
def test_raw_logprobs_equal_the_log_softmax(size, num_top, kind, seed):
    generator = np.random.default_rng([seed, size])
    row = {
        "normal": generator.standard_normal(size) * 4 + 300,
        "tied": generator.integers(0, 5, size),
        "flat": np.zeros(size),
        "sorted": np.linspace(9, -9, size),
        "half impossible": np.where(generator.random(size) < 0.5, -np.inf, generator.standard_normal(size)),
    }[kind].astype(np.float32)
    row[generator.integers(size)] = row.max() if np.isfinite(row.max()) else 0.0
    row.flags.writeable = False
    for token_id in {0, size - 1, int(row.argmax()), int(generator.integers(size))}:
        _assert_equal(raw_logprobs(row, token_id, num_top), _textbook(row, token_id, num_top))


def test_logprob_of_a_token_equals_its_top_logprobs_entry():
    row = np.random.default_rng(2).standard_normal(5_000).astype(np.float32)
    for token_id, value in raw_logprobs(row, 0, 20).top:
        assert raw_logprobs(row, token_id, 0).logprob == value
    assert [raw_logprobs(row, token_id, 0).rank for token_id, _ in raw_logprobs(row, 0, 20).top] == list(range(1, 21))


@pytest.mark.parametrize("size", [40, 6_000])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"repetition_penalty": 1.5, "banned_token_ids": (3,)},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.5},
        {"temperature": 50.0, "top_p": 0.9},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.001, "top_k": 30, "frequency_penalty": 1.0},
    ],
    ids=str,
)
def test_processed_logprobs_equal_those_of_the_distribution(values, size, seed):
    row = (np.random.default_rng(seed).standard_normal(size) * 2).astype(np.float32)
    distribution = LogitsProcessor(SamplingParams(**values), size, [1, 2]).process(row, [3, 4])
    dense = np.full(size, -np.inf)
    dense[slice(None) if distribution.token_ids is None else distribution.token_ids] = distribution.scores
    for token_id in (int(dense.argmax()), int(np.flatnonzero(dense > -np.inf)[-1]), 3, 17):
        _assert_equal(processed_logprobs(distribution, token_id, 20), _textbook(dense, token_id, 20))


def test_processed_top_logprobs_list_only_tokens_that_can_be_sampled():
    row = np.array([1, 5, 4, 2, 3], np.float32)
    distribution = LogitsProcessor(SamplingParams(temperature=1.0, top_k=2), 5, ()).process(row)
    inside, outside = processed_logprobs(distribution, 2, 20), processed_logprobs(distribution, 0, 20)
    assert [token_id for token_id, _ in inside.top] == [1, 2]
    assert sum(math.exp(value) for _, value in inside.top) == pytest.approx(1.0)
    assert inside.logprob == inside.top[1][1]
    assert (outside.logprob, outside.rank) == (-math.inf, 3)


def test_logprobs_are_plain_python_numbers():
    result = raw_logprobs(np.arange(2_000, dtype=np.float32), np.int64(5), 3)
    assert [type(value) for value in (result.token_id, result.logprob, result.rank, *result.top[0])] == [int, float, int, int, float]
