"""Who is asked, and whose guess counts."""

from collections.abc import Sequence

import pytest

from paceline.drafters.stack import StackDrafter
from paceline.kv_cache.paged import CachedSequence
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter, DrafterNeeds
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree


class Recorder(Drafter):
    """Guesses for the requests whose last token it knows, and writes down what it is told."""

    def __init__(self, name: str, known: Sequence[int], needs: DrafterNeeds | None = None) -> None:
        self.name = name
        self.known = known
        self.needs = needs or DrafterNeeds()
        self.cache_bytes_per_token = 10
        self.calls: list[object] = []

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        self.calls.append([(request.token_ids[-1], budget.max_depth) for request, budget in zip(requests, budgets, strict=True)])
        return [DraftTree.chain(r.token_ids[-1], [7], self.name) if r.token_ids[-1] in self.known else None for r in requests]

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        self.calls.append(rows)

    def fork(self, parent: Request, child: Request) -> None:
        self.calls.append((parent, child))

    def release(self, request: Request) -> None:
        self.calls.append(request)


def make_request(token_id: int) -> Request:
    params = SamplingParams()
    return Request([token_id], 1, params, LogitsProcessor(params, 9, [token_id]), CachedSequence(), seed=0, sample_index=0, max_len=9)


def test_the_first_guess_wins_and_later_drafters_are_asked_only_where_there_is_none() -> None:
    first, second, third = Recorder("first", [1, 3]), Recorder("second", [0, 2]), Recorder("third", [0, 1])
    requests = [make_request(token) for token in (0, 1, 2, 3, 4)]
    trees = StackDrafter([first, second, third]).propose(requests, [DraftBudget(9, depth) for depth in (5, 6, 7, 8, 9)])
    assert [tree and tree.sources[1] for tree in trees] == ["second", "first", "second", "first", None]
    assert first.calls == [[(0, 5), (1, 6), (2, 7), (3, 8), (4, 9)]]
    assert second.calls == [[(0, 5), (2, 7), (4, 9)]]
    assert third.calls == [[(4, 9)]]


def test_a_later_drafter_rests_where_the_first_knows_everything() -> None:
    first, second = Recorder("first", [1]), Recorder("second", [1])
    StackDrafter([first, second]).propose([make_request(1)], [DraftBudget(9, 1)])
    assert second.calls == []


def test_everybody_is_told_everything() -> None:
    drafters = [Recorder("a", []), Recorder("b", [])]
    stack = StackDrafter(drafters)
    parent, child = make_request(0), make_request(1)
    rows = [CommittedRows(parent, 0, 1)]
    stack.observe(rows)
    stack.fork(parent, child)
    stack.release(child)
    for drafter in drafters:
        assert drafter.calls == [rows, (parent, child), child]


def test_a_stack_needs_and_costs_what_its_drafters_do() -> None:
    stack = StackDrafter(
        [
            Recorder("a", [], DrafterNeeds(layers=(4, 1))),
            Recorder("b", [], DrafterNeeds(hidden_states=True, layers=(1, 2), prompt_rows=True)),
        ]
    )
    assert stack.needs == DrafterNeeds(hidden_states=True, layers=(1, 2, 4), prompt_rows=True)
    assert stack.cache_bytes_per_token == 20
    assert (stack.name, stack.describe()) == ("a+b", "a, else b")


def test_a_drafter_that_returns_too_little_is_noticed() -> None:
    short = Recorder("short", [])
    short.propose = lambda requests, budgets: []  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="shorter"):
        StackDrafter([short]).propose([make_request(0)], [DraftBudget(9, 1)])
