"""A near-tie is one only where noise of the size that was measured can have decided."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.engine.input_processor import InputProcessor
from paceline.proof.exactness.compare import OutputPosition, decide, kept_sets
from paceline.sampling.params import SamplingParams
from paceline.sampling.truncation import truncate
from paceline.tokenizer.tokenizer import Tokenizer

V = 64


@pytest.fixture(scope="module")
def input_processor(mini_dir: Path) -> InputProcessor:
    return InputProcessor(Tokenizer.open(mini_dir), V, 512, (0,))


def place(params: SamplingParams) -> OutputPosition:
    return OutputPosition(params, (5, 6, 7, 8), 2)


def test_greedy_margin_is_the_distance_to_the_best_score(input_processor: InputProcessor) -> None:
    row = np.zeros(V, np.float32)
    row[3], row[4], row[5] = 2.0, 1.99, 1.0
    at = place(SamplingParams())
    assert decide(row, 3, at, input_processor, 0.05).margin == 0.0
    near, far = decide(row, 4, at, input_processor, 0.05), decide(row, 5, at, input_processor, 0.05)
    assert near.margin == pytest.approx(0.01)
    assert near.is_near
    assert far.margin == pytest.approx(1.0)
    assert not far.is_near


def test_sampled_margin_is_the_distance_of_noisy_scores(input_processor: InputProcessor, seed: int) -> None:
    """The token that is drawn has none; any other has as much as its logit must rise to be drawn."""
    random = np.random.default_rng(seed)
    for temperature in (0.5, 1.0, 2.0):
        row = random.normal(size=V).astype(np.float32)
        at = place(SamplingParams(temperature=temperature, seed=7))
        drawn = at.drawn(row, input_processor)
        assert drawn is not None
        assert decide(row, drawn, at, input_processor, 1e-3).margin == 0.0
        other = (drawn + 1) % V
        margin = decide(row, other, at, input_processor, 1e-3).margin
        for rise, expected in ((0.999 * margin, drawn), (1.001 * margin, other)):
            raised = row.copy()
            raised[other] += np.float32(rise * temperature)
            assert at.drawn(raised, input_processor) == expected


def test_score_bound_scales_with_temperature_and_penalties(input_processor: InputProcessor) -> None:
    row = np.random.default_rng(0).normal(size=V).astype(np.float32)
    assert decide(row, 1, place(SamplingParams(temperature=0.5, seed=1)), input_processor, 0.1).bound == pytest.approx(0.2)
    assert decide(row, 1, place(SamplingParams(repetition_penalty=1.5)), input_processor, 0.1).bound == pytest.approx(0.15)


@pytest.mark.parametrize(
    "restricted", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8, "min_p": 0.05}], ids=lambda one: "-".join(one)
)
def test_support_bounds_contain_every_noisy_row(restricted: dict[str, float], seed: int) -> None:
    random = np.random.default_rng(seed)
    params = SamplingParams(temperature=1.0, **restricted)  # type: ignore[arg-type]
    for _ in range(60):
        scores = random.normal(scale=1.5, size=V)
        bound = 0.2
        maybe, surely = kept_sets(scores, params, bound)
        assert not (surely & ~maybe).any()
        for _ in range(10):
            noisy = (scores + random.uniform(-bound / 2, bound / 2, V)).astype(np.float32)
            ids = truncate(noisy, noisy.max(), top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
            kept = np.isin(np.arange(V), np.arange(V) if ids is None else ids)
            assert not (kept & ~maybe).any()
            assert not (surely & ~kept).any()


def test_kept_set_without_noise_equals_that_of_the_sampler(seed: int) -> None:
    random = np.random.default_rng(seed)
    for restricted in ({"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}):
        params = SamplingParams(temperature=1.0, **restricted)  # type: ignore[arg-type]
        scores = random.normal(size=V).astype(np.float32)
        maybe, surely = kept_sets(scores.astype(np.float64), params, 0.0)
        ids = truncate(scores, scores.max(), top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        assert np.flatnonzero(maybe).tolist() == np.flatnonzero(surely).tolist() == ([] if ids is None else ids.tolist())


def test_token_outside_the_support_is_no_near_tie(input_processor: InputProcessor) -> None:
    row = np.zeros(V, np.float32)
    row[:4] = 8.0
    params = SamplingParams(temperature=1.0, top_k=4, seed=11)
    unrestricted = place(replace(params, top_k=0, temperature=50.0))
    lucky = unrestricted.drawn(row, input_processor)  # the id with the best noise, nearly
    assert lucky is not None
    if lucky < 4:
        pytest.skip("the best noise is that of a kept id")
    decision = decide(row, lucky, place(params), input_processor, 0.1)
    assert not decision.may_be_kept
    assert not decision.is_near
