"""A fixed draft length, and how rows are divided where a pass has too few."""

from collections.abc import Sequence

import pytest

from paceline.drafters.ngram import NgramDrafter
from paceline.kv_cache.cache import CachedSequence
from paceline.runtimes.cost import ForwardProfile
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.draft_length.policy import AdaptiveDraftLength, FixedDraftLength
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.propose import fit_rows
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree


def decoding(count: int) -> list[RequestRows]:
    """Requests of which each brings its root, and may draft four tokens."""
    batch = []
    for _ in range(count):
        params = SamplingParams()
        request = Request([1], 1, params, LogitsProcessor(params, 4, [1]), CachedSequence(), seed=0, sample_index=0, max_len=10)
        rows = RequestRows.without_draft(request, 1)
        rows.max_draft_budget = rows.draft_budget = DraftBudget(5, 4)
        batch.append(rows)
    return batch


def kept_of(wanted: Sequence[int], available: int) -> list[int]:
    """Draft tokens that are left of drafts of these lengths."""
    batch = decoding(len(wanted))
    for rows, count in zip(batch, wanted, strict=True):
        rows.tree = DraftTree.chain(1, range(count), "any")
    fit_rows(batch, available)
    return [rows.num_draft_tokens for rows in batch]


SHARES = {12: [4, 4, 4], 11: [4, 4, 3], 6: [2, 2, 2], 4: [2, 1, 1], 2: [1, 1, 0], 0: [0, 0, 0], -9: [0, 0, 0]}


@pytest.mark.parametrize(("available", "shares"), SHARES.items())
def test_fit_rows_with_equal_drafts_shares_equally(available: int, shares: list[int]) -> None:
    assert kept_of([4, 4, 4], available) == shares


def test_fit_rows_with_short_drafts_gives_the_rest_to_long_ones() -> None:
    assert kept_of([1, 4, 0, 4], 7) == [1, 3, 0, 3]
    assert kept_of([1, 4, 0, 4], 99) == [1, 4, 0, 4]


@pytest.mark.parametrize(("max_rows", "rows"), [(None, 6), (12, 12)])
def test_fixed_length_without_max_rows_drafts_a_chain(max_rows: int | None, rows: int) -> None:
    policy = FixedDraftLength(5, max_rows=max_rows)
    assert (policy.max_rows, policy.num_speculative_tokens) == (rows, 5)


def test_fit_rows_beyond_the_pass_keeps_first_tokens_and_counts_the_rest() -> None:
    batch = decoding(3)
    for rows, count in zip(batch, (4, 1, 4), strict=True):
        rows.tree = DraftTree.chain(1, range(count), "any")
    fit_rows(batch, 6)
    assert [list(rows.tree.token_ids[1:]) for rows in batch if rows.tree] == [[0, 1, 2], [0], [0, 1]]
    assert [rows.request.stats.num_dropped_tokens for rows in batch] == [1, 0, 2]
    fit_rows(batch, 1)
    assert [rows.num_draft_tokens for rows in batch] == [1, 0, 0]
    assert [rows.skip_reason for rows in batch] == [None, SkipReason.PASS_FULL, SkipReason.PASS_FULL]


def test_steps_without_considered_requests_do_not_delay_drafting() -> None:
    """On a small target deciding takes more than the share of a pass that pays for attempts in vain."""
    policy = AdaptiveDraftLength(4, ForwardProfile.from_samples({1: 1.0, 5: 1.2}))
    batch, num_skipped = decoding(1), 0
    for _ in range(400):
        if policy.begin_step(batch) is not None:
            num_skipped += 1
        else:
            assert policy.skip_reason(batch[0].request, NgramDrafter()) is None
        policy.observe_step_time(batch, 1.0, 0.1, plan_s=0.1)
    assert 0.8 * 400 < num_skipped < 400 - 20
