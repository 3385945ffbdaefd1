"""Passes have one limit of rows, and what does not fit one is done in parts."""

import numpy as np
import pytest

from paceline.config import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, MAX_PASS_ROWS
from paceline.errors import PacelineError
from paceline.runtimes.base import ForwardBatch, split_into_passes


def test_forward_batch_with_too_many_rows_is_an_internal_error():
    assert MAX_PASS_ROWS >= MAX_NUM_BATCHED_TOKENS + MAX_NUM_SEQS
    rows = np.zeros(MAX_PASS_ROWS + 1, np.int32)
    ForwardBatch(rows[1:], ())
    with pytest.raises(ValueError, match=f"at most {MAX_PASS_ROWS} rows, got {MAX_PASS_ROWS + 1}: split it") as refusal:
        ForwardBatch(rows, ())
    assert not isinstance(refusal.value, PacelineError)


@pytest.mark.parametrize("largest", [1, 40, MAX_PASS_ROWS])
def test_split_into_passes_keeps_order_and_uses_the_fewest_passes(largest, seed):
    random = np.random.default_rng([seed, largest])
    for count in (0, 1, 500):
        counts = random.integers(1, largest + 1, count).tolist()
        parts = list(split_into_passes(range(count), counts.__getitem__))
        assert [item for part in parts for item in part] == list(range(count))
        rows = [sum(counts[item] for item in part) for part in parts]
        assert all(0 < total <= MAX_PASS_ROWS for total in rows)
        for total, behind in zip(rows, parts[1:], strict=False):
            assert total + counts[behind[0]] > MAX_PASS_ROWS
