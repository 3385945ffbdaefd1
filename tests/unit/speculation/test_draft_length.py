"""A fixed draft length, and how rows are divided where a pass has too few."""

import pytest

from paceline.kv_cache.paged import CachedSequence
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.budgets import fit_rows, share_rows
from paceline.speculation.draft_length import DraftLengthPolicy
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import PlainReason
from paceline.speculation.tree import DraftTree


class Nobody:
    name = "nobody"


def decoding(count: int) -> list[RequestRows]:
    """Requests of which each brings its root, and may draft four tokens."""
    batch = []
    for _ in range(count):
        params = SamplingParams()
        request = Request([1], 1, params, LogitsProcessor(params, 4, [1]), CachedSequence(), seed=0, sample_index=0, max_len=10)
        rows = RequestRows.of(request, 1)
        rows.given = rows.budget = DraftBudget(5, 4)
        batch.append(rows)
    return batch


ALIKE = {12: [4, 4, 4], 11: [4, 4, 3], 6: [2, 2, 2], 4: [2, 1, 1], 2: [1, 1, 0], 0: [0, 0, 0], -9: [0, 0, 0]}


@pytest.mark.parametrize(("available", "shares"), ALIKE.items())
def test_all_get_alike(available: int, shares: list[int]) -> None:
    assert share_rows([4, 4, 4], available) == shares


def test_what_one_cannot_use_the_others_get() -> None:
    assert share_rows([1, 4, 0, 4], 7) == [1, 3, 0, 3]
    assert share_rows([1, 4, 0, 4], 99) == [1, 4, 0, 4]


@pytest.mark.parametrize(("max_rows", "wanted"), [(None, [5, 5, 5]), (15, [5, 5, 5]), (9, [3, 3, 3]), (5, [2, 2, None]), (3, [None] * 3)])
def test_budgets_fit_the_pass(max_rows: int | None, wanted: list[int | None]) -> None:
    batch = decoding(3)
    DraftLengthPolicy(4).plan(batch, [(rows, Nobody()) for rows in batch], max_rows)  # type: ignore[misc]
    assert [rows.budget and rows.budget.row_budget for rows in batch] == wanted
    assert all((rows.plain_reason is PlainReason.FULL_PASS) == (rows.budget is None) for rows in batch)


@pytest.mark.parametrize(("row_budget", "rows"), [(None, 6), (12, 12)])
def test_the_budget_is_a_chain_unless_said_otherwise(row_budget: int | None, rows: int) -> None:
    policy = DraftLengthPolicy(5, row_budget=row_budget)
    assert (policy.row_budget, policy.num_draft_tokens) == (rows, 5)


def test_guesses_beyond_the_rows_of_a_pass_are_cut_the_best_stay() -> None:
    batch = decoding(3)
    for rows, count in zip(batch, (4, 1, 4), strict=True):
        rows.tree = DraftTree.chain(1, range(count), "any")
    fit_rows(batch, 6)
    assert [list(rows.tree.token_ids[1:]) for rows in batch if rows.tree] == [[0, 1, 2], [0], [0, 1]]
    assert [rows.request.stats.cut for rows in batch] == [1, 0, 2]
    fit_rows(batch, 1)
    assert [rows.num_guesses for rows in batch] == [1, 0, 0]
    assert [rows.plain_reason for rows in batch] == [None, PlainReason.FULL_PASS, PlainReason.FULL_PASS]
