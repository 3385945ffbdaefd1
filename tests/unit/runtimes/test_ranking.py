"""Summaries of logits for drafting: our kernels and torch equal numpy for any values."""

import numpy as np
import pytest
import torch

from harness.native_network import BUILT, Network, make_batch
from paceline.runtimes.base import FloatArray, RowRange
from paceline.runtimes.logits_summary import SAMPLING_DTYPE, LogitsSummary, RowSampling, SummaryOptions, decode_summaries
from paceline.runtimes.torch.ops import summarize_logits
from paceline.sampling.draw import Distribution, draw
from paceline.sampling.noise import Purpose, noise_key
from paceline.sampling.truncation import top_n

SOURCES = [*BUILT, "torch"]
SIZES = [1, 2, 33, 255, 256, 257, 4096, 4100, 12_345]
SEED, SAMPLE = 7, 1


def ranked(
    source: str, rows: FloatArray, ranking: SummaryOptions, draws: RowSampling | None = None, num_threads: int = 1
) -> list[LogitsSummary]:
    if source == "torch":
        return decode_summaries(summarize_logits(torch.from_numpy(rows), ranking, None if draws is None else draws.reshape(-1)).numpy())
    run = Network([rows.shape[1]], lambda blocks, inputs: [blocks.summarize(inputs[0], ranking)], level=source, num_threads=num_threads)
    batch = make_batch([RowRange(0, len(rows), 0, np.arange(16, dtype=np.int32))])
    return decode_summaries(run(rows, batch=batch, draws=draws)[0])


def rows_of(size: int, seed: int) -> FloatArray:
    """Rows without and with ties, with some and with most entries at -inf."""
    random = np.random.default_rng(seed)
    rows = random.normal(0, 3, (6, size)).astype(np.float32)
    rows[1:3] = np.round(rows[1:3], 1)
    rows[2:4, random.integers(0, size, size // 2)] = -np.inf
    rows[4] = -np.inf
    rows[4, random.integers(0, size, 3)] = 1.5
    rows[5] = 0.25
    return rows


def check(found: LogitsSummary, scores: FloatArray, count: int, ids: np.ndarray) -> None:
    best = top_n(scores, count)
    best = best[scores[best] > -np.inf]
    filled = count - len(best)
    assert found.token_ids == [*ids[best].tolist(), *[-1] * filled]
    assert found.scores == [*scores[best].tolist(), *[-np.inf] * filled]
    wide = scores[np.isfinite(scores)].astype(np.float64)
    assert found.log_sum_exp == pytest.approx(np.log(np.exp(wide - wide.max()).sum()) + wide.max(), rel=2e-6, abs=2e-6)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("count", [1, 4, 11])
def test_top_tokens_and_logsumexp_equal_numpy(source: str, count: int, seed: int) -> None:
    for size in SIZES:
        rows = rows_of(size, seed)
        for columns in {size, (size + 1) // 2}:
            ids = np.sort(np.random.default_rng(seed).choice(3 * size, columns, replace=False))
            for target_ids in (None, ids):
                ranking = SummaryOptions(columns, count, target_ids)
                for found, row in zip(ranked(source, rows, ranking), rows, strict=True):
                    if np.isfinite(row[:columns]).any():
                        check(found, row[:columns], count, np.arange(columns) if target_ids is None else ids)
                    else:
                        assert not np.isfinite(found.log_sum_exp)
                    assert found.sampled_id == -1


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 4095, 4096, 8191, 8199])
def test_ranking_of_a_nan_row_is_marked(source: str, value: float, place: int) -> None:
    rows = np.random.default_rng(place).normal(0, 1, (3, 8200)).astype(np.float32)
    rows[1, place] = value
    rows[2] = -np.inf
    rows[2, place] = value
    found = ranked(source, rows, SummaryOptions(8200, 4))
    assert [bool(np.isfinite(row.log_sum_exp)) for row in found] == [True, False, False]
    rows[2] = -np.inf
    assert ranked(source, rows, SummaryOptions(8200, 4))[2].log_sum_exp == -np.inf
    if place:  # columns that do not count are not looked at
        assert np.isfinite(ranked(source, rows, SummaryOptions(place, 4))[1].log_sum_exp)


@pytest.mark.spread(0.4)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_token_sampled_while_ranking_equals_that_of_the_sampler(source: str, temperature: float, is_mapped: bool, seed: int) -> None:
    """With the noise of the target's ids, in every row that requires it."""
    num_drawn = 0
    for size in SIZES[1:]:
        rows = np.concatenate([rows_of(size, seed + repeat)[[0, 1, 2, 4]] * scale for repeat, scale in enumerate((0.1, 0.5, 2.0))])
        ids = np.sort(np.random.default_rng(seed).choice(3 * size, size, replace=False)) if is_mapped else None
        draws = np.zeros(len(rows), SAMPLING_DTYPE)
        for position in range(len(rows)):
            temperatures = temperature if position % 4 else 0.0
            draws[position] = (noise_key(SEED, SAMPLE, position, Purpose.TOKEN), temperatures, 0)
        for position, (found, row) in enumerate(zip(ranked(source, rows, SummaryOptions(size, 3, ids), draws), rows, strict=True)):
            if position % 4 == 0:
                assert found.sampled_id == -1
                assert found.scores[0] == row.max()
            elif np.isfinite(row).any():
                scores = row / np.float32(temperature)
                assert found.sampled_id == draw(Distribution(scores, ids, False), SEED, SAMPLE, position)
                check(found, scores, 3, np.arange(size) if ids is None else ids)
                num_drawn += 1
    assert num_drawn > 40


def test_ranking_is_equal_on_every_instruction_set_and_thread_count(seed: int) -> None:
    rows = np.random.default_rng(seed).normal(0, 2, (5, 30_001)).astype(np.float32)
    draws = np.array([(noise_key(SEED, 0, position, Purpose.TOKEN), 0.8, 0) for position in range(5)], SAMPLING_DTYPE)
    found = [ranked(level, rows, SummaryOptions(30_001, 11), draws, num_threads) for level in BUILT for num_threads in (1, 2, 3)]
    assert all(one == found[0] for one in found)
    alone = [ranked(BUILT[0], rows[row : row + 1], SummaryOptions(30_001, 11), draws[row : row + 1])[0] for row in range(5)]
    assert alone == found[0]
