"""Proposing with one or several drafters: which are called, which draft is kept, and what an error costs."""

import logging
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from harness.decoding_rows import VOCAB_SIZE, make_request
from paceline.runtimes.cost import ForwardProfile
from paceline.sampling.residual import TokenProbs
from paceline.speculation.draft_length.policy import AdaptiveDraftLength, FixedDraftLength
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter, DrafterNeeds, DrafterTraits
from paceline.speculation.propose import MAX_FAILURE_BACKOFF_STEPS
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.speculator import Speculator
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

Answer = Callable[[Request], DraftTree | None]
RIGHT = [5, 6, 7, 8]


class Scripted(Drafter):
    """Proposes given trees and records its calls."""

    def __init__(self, name: str, answer: Answer, *, is_lookup: bool = False, needs: DrafterNeeds | None = None) -> None:
        self.name, self.answer, self.needs = name, answer, needs or DrafterNeeds()
        self.traits = DrafterTraits(is_lookup=is_lookup)
        self.asked: list[list[Request]] = []
        self.observed: list[CommittedRows] = []
        self.released: list[Request] = []

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        self.asked.append(list(requests))
        return [self.answer(request) for request in requests]

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        self.observed += rows

    def release(self, request: Request) -> None:
        self.released.append(request)

    @property
    def num_calls(self) -> int:
        return len(self.asked)


def chain(*tokens: int, source: str, prob: float | None = None) -> Answer:
    probs = None if prob is None else [prob] * len(tokens)
    return lambda request: DraftTree.chain(request.token_ids[-1], tokens, source, probs)


def fail(request: Request) -> DraftTree:
    raise RuntimeError("broken")


def adaptive(row_s: float = 0.05) -> AdaptiveDraftLength:
    return AdaptiveDraftLength(8, ForwardProfile.from_samples({rows: 1.0 + row_s * (rows - 1) for rows in (1, 2, 3, 5, 9, 17, 33)}))


def speculator_of(drafters: Sequence[Drafter], policy: FixedDraftLength | None = None) -> Speculator:
    return Speculator(drafters, policy or FixedDraftLength(4), vocab_size=VOCAB_SIZE)


def propose(speculator: Speculator, *requests: Request, max_rows: int | None = None) -> list[RequestRows]:
    batch = [RequestRows.without_draft(request, 1) for request in requests]
    speculator.propose(batch, max_rows)
    return batch


def source_of(rows: RequestRows) -> str | None:
    assert rows.tree is not None
    rows.tree.check()
    return rows.tree.sources[1] if rows.num_draft_tokens else None


def step(speculator: Speculator, request: Request, said: Sequence[int] = RIGHT, forward_s: float = 1.0) -> RequestRows:
    """Propose, accept what agrees with `said`, and emit one token more."""
    (rows,) = propose(speculator, request)
    tree, accepted = rows.tree, list[int]()
    assert tree is not None
    for token in said:
        child = tree.child(accepted[-1] if accepted else 0, token)
        if child is None:
            break
        accepted.append(child)
    request.token_ids += [*said, 1][: len(accepted) + 1]
    request.cached_sequence.committed_len = len(request.token_ids) - 1
    if rows.num_draft_tokens:
        speculator.observe_verified(request, tree, accepted)
    speculator.policy.observe_step_time([rows], forward_s, 0.0)
    return rows


def take(speculator: Speculator, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Report these seconds a proposal instead of the measured ones."""
    observe = speculator.policy.observe_draft_time
    monkeypatch.setattr(
        speculator.policy,
        "observe_draft_time",
        lambda drafter, count, depth, _, **more: observe(drafter, count, depth, seconds[drafter.name], **more),
    )


# Which drafter is called


def test_lookup_drafters_are_called_first_in_any_configured_order() -> None:
    order: list[str] = []

    def recorded(name: str) -> Answer:
        return lambda request: order.append(name)  # type: ignore[func-returns-value]

    drafters = [
        Scripted("model", recorded("model")),
        Scripted("a", recorded("a"), is_lookup=True),
        Scripted("b", recorded("b"), is_lookup=True),
    ]
    propose(speculator_of(drafters), make_request([1, 2]))
    assert order == ["a", "b", "model"]


def test_draft_model_drafts_where_the_lookup_drafter_has_no_match() -> None:
    lookup = Scripted(
        "lookup", lambda request: chain(*RIGHT, source="lookup")(request) if request.token_ids[0] == 1 else None, is_lookup=True
    )
    model = Scripted("model", chain(5, 6, source="model"))
    batch = propose(speculator_of([model, lookup]), make_request([1, 2]), make_request([3, 2]))
    assert [source_of(rows) for rows in batch] == ["lookup", "model"]
    assert [rows.skip_reason for rows in batch] == [None, None]


@pytest.mark.parametrize("model_s", [0.6, 5.0])
def test_draft_model_is_not_called_if_a_likely_lookup_draft_exists(model_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = Scripted("lookup", chain(*RIGHT, source="lookup", prob=0.95), is_lookup=True)
    model = Scripted("model", chain(5, 6, source="model", prob=0.8))
    speculator, request = speculator_of([lookup, model], adaptive()), make_request([1, 2])
    take(speculator, monkeypatch, lookup=1e-5, model=model_s)
    rows = [step(speculator, request) for _ in range(60)]
    assert all(source_of(one) == "lookup" for one in rows[20:])
    assert model.num_calls < 12
    assert lookup.num_calls == 60


def test_draft_model_is_called_if_the_lookup_draft_is_unlikely(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup drafter always has a draft, which is wrong."""
    lookup = Scripted("lookup", chain(9, 9, source="lookup", prob=0.6), is_lookup=True)
    model = Scripted("model", chain(*RIGHT, source="model", prob=0.8))
    speculator, request = speculator_of([lookup, model], adaptive()), make_request([1, 2])
    take(speculator, monkeypatch, lookup=1e-5, model=0.2)
    rows = [step(speculator, request) for _ in range(60)]
    assert sum(source_of(one) == "model" for one in rows[20:]) > 35


def test_draft_with_the_higher_measured_acceptance_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both drafters claim the same probability."""
    for names in (("good", "bad"), ("bad", "good")):
        answers = {"good": chain(5, 6, source="good", prob=0.8), "bad": chain(9, 9, 9, source="bad", prob=0.8)}
        drafters = [Scripted(name, answers[name], is_lookup=True) for name in names]
        speculator, request = speculator_of(drafters, adaptive()), make_request([1, 2])
        rows = [step(speculator, request) for _ in range(40)]
        assert all(source_of(one) == "good" for one in rows[-10:])


def test_request_that_names_a_drafter_gets_drafts_of_that_one_only() -> None:
    first, second = Scripted("first", chain(*RIGHT, source="first")), Scripted("second", chain(5, source="second"))
    named, free = make_request([1, 2]), make_request([3, 4])
    named.drafter = "second"
    batch = propose(speculator_of([first, second]), named, free)
    assert [source_of(rows) for rows in batch] == ["second", "first"]
    assert first.asked == [[free]]


def test_drafter_without_candidates_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, request = Scripted("only", chain(5, source="only")), make_request([1, 2])
    monkeypatch.setattr(drafter, "has_candidates", lambda request: False)
    (rows,) = propose(speculator_of([drafter]), request)
    assert (drafter.num_calls, rows.skip_reason) == (0, SkipReason.NO_MATCH)


@pytest.mark.parametrize("is_lookup", [True, False])
def test_skip_reason_unprofitable_is_kept_if_another_drafter_has_no_match(is_lookup: bool) -> None:
    """It is more informative than that the other drafter found nothing."""
    lookup, other = Scripted("lookup", lambda request: None, is_lookup=True), Scripted("other", chain(*RIGHT, source="other", prob=0.01))
    lookup.traits = DrafterTraits(is_lookup=is_lookup)
    (rows,) = propose(speculator_of([lookup, other], adaptive(row_s=0.5)), make_request([1, 2]))
    assert (rows.num_draft_tokens, rows.skip_reason) == (0, SkipReason.UNPROFITABLE)


# Limits


def test_drafts_are_trimmed_to_budget_and_vocabulary_and_the_rest_counted() -> None:
    drafter = Scripted("only", chain(5, 6, VOCAB_SIZE, 7, source="only"))
    (rows,) = propose(speculator_of([drafter]), make_request([1, 2]))
    assert rows.tree is not None
    assert list(rows.tree.token_ids[1:]) == [5, 6]
    assert rows.request.stats.num_dropped_tokens == 2
    drafter.answer = chain(VOCAB_SIZE, source="only")
    (rows,) = propose(speculator_of([drafter]), make_request([1, 2]))
    assert (rows.num_draft_tokens, rows.skip_reason) == (0, SkipReason.UNUSABLE)


def test_requests_that_may_not_draft_get_their_skip_reason() -> None:
    drafter = Scripted("only", chain(*RIGHT, source="only"))
    off, ending, at_prompt, resumed = (make_request([1, 2, 3]) for _ in range(4))
    off.num_speculative_tokens = 0
    ending.max_len = 4
    at_prompt.num_prompt_tokens = 3
    batch = [RequestRows.without_draft(request, 1) for request in (off, ending, at_prompt)]
    resumed.cached_sequence.committed_len = 0
    batch.append(RequestRows.without_draft(resumed, 3))
    speculator_of([drafter]).propose(batch)
    assert [rows.skip_reason for rows in batch] == [SkipReason.OFF, SkipReason.NO_ROOM, SkipReason.PROMPT, SkipReason.RESUMED]
    assert drafter.num_calls == 0


def test_batch_drafts_fit_the_pass_after_the_required_token_rows() -> None:
    drafter = Scripted("only", chain(*RIGHT, source="only"))
    batch = propose(speculator_of([drafter]), *(make_request([1, 2]) for _ in range(3)), max_rows=8)
    assert [rows.num_draft_tokens for rows in batch] == [2, 2, 1]
    batch = propose(speculator_of([drafter]), *(make_request([1, 2]) for _ in range(3)), max_rows=3)
    assert [rows.skip_reason for rows in batch] == [SkipReason.PASS_FULL] * 3


def test_tree_is_pruned_to_the_rows_of_a_full_pass() -> None:
    parents = [0, 0, 0, 1, 2, 3]
    drafter = Scripted("only", lambda request: DraftTree.from_nodes(request.token_ids[-1], [5, 6, 7, 8, 9, 10], parents, "only"))
    policy = FixedDraftLength(4, max_rows=16)
    speculator = Speculator([drafter], policy, vocab_size=VOCAB_SIZE)
    (rows,) = propose(speculator, make_request([1, 2]), max_rows=6)
    assert rows.tree is not None
    assert rows.num_draft_tokens == 5


def test_tree_that_is_not_in_breadth_first_order_fails_like_any_error_of_a_drafter(caplog: pytest.LogCaptureFixture) -> None:
    tree = DraftTree((2, 5, 6, 7), (-1, 0, 1, 0), (0, 1, 2, 1), ("", "only", "only", "only"))
    (rows,) = propose(speculator_of([Scripted("only", lambda request: tree)]), make_request([1, 2]))
    assert rows.skip_reason is SkipReason.DRAFTER_FAILED
    assert "not in breadth-first order" in caplog.text


# Errors


@pytest.mark.parametrize("order", [("broken", "good"), ("good", "broken")])
def test_failing_drafter_does_not_stop_another_one(order: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    made = {"broken": Scripted("broken", fail), "good": Scripted("good", chain(5, 6, source="good"))}
    speculator = speculator_of([made[name] for name in order])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            (rows,) = propose(speculator, make_request([1, 2]))
            assert (source_of(rows), rows.skip_reason) == ("good", None)
    assert len(caplog.messages) == 1
    assert "RuntimeError: broken" in caplog.messages[0]
    assert speculator.num_drafter_failures >= 1


def test_failing_drafter_alone_makes_plain_steps_with_growing_backoff() -> None:
    drafter, num_steps = Scripted("broken", fail), 400
    speculator = speculator_of([drafter])
    for _ in range(num_steps):
        (rows,) = propose(speculator, make_request([1, 2]))
        assert (rows.num_draft_tokens, rows.skip_reason) == (0, SkipReason.DRAFTER_FAILED)
    assert speculator.num_drafter_failures == drafter.num_calls
    assert num_steps / MAX_FAILURE_BACKOFF_STEPS < drafter.num_calls < 16
    drafter.answer = chain(5, source="broken")
    assert any(source_of(propose(speculator, make_request([1, 2]))[0]) for _ in range(MAX_FAILURE_BACKOFF_STEPS + 1)), "it is tried again"
    assert source_of(propose(speculator, make_request([1, 2]))[0]) == "broken", "and then in every step"


def test_drafter_that_removes_tokens_fails_only_that_request() -> None:
    requests = [make_request([1, 2]), make_request([1, 2])]

    def clear_first(request: Request) -> DraftTree:
        if request is requests[0]:
            request.token_ids.clear()
        return DraftTree.chain(2, [5, 6], "bad")

    speculator = speculator_of([Scripted("bad", clear_first), Scripted("good", chain(7, source="good"))])
    batch = propose(speculator, *requests)
    assert [source_of(rows) for rows in batch] == [None, "good"]
    assert "the drafter bad removed or replaced tokens" in str(requests[0].error)
    assert (requests[1].error, requests[1].token_ids, len(requests[0].token_ids)) == (None, [1, 2], 2)
    assert speculator.num_drafter_failures == 1


def test_text_of_a_drafter_error_is_logged_as_one_printable_line(caplog: pytest.LogCaptureFixture) -> None:
    def fail_in_color(request: Request) -> DraftTree:
        raise ValueError("red\x1b[31m\nnext line")

    propose(speculator_of([Scripted("only", fail_in_color)]), make_request([1, 2]))
    assert caplog.messages == [r"a drafter failed (ValueError: red\x1b[31m next line); steps without its drafts are plain"]


GARBAGE: dict[str, Callable[[Sequence[Request]], object]] = {
    "too few": lambda requests: [],
    "no list": lambda requests: None,
    "no tree": lambda requests: ["tree"] * len(requests),
    "a loop": lambda requests: [DraftTree((1, 2), (-1, 1), (0, 1), ("", "x"))] * len(requests),
    "wrong depths": lambda requests: [DraftTree((1, 2), (-1, 0), (0, 5), ("", "x"))] * len(requests),
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_invalid_draft_of_one_drafter_leaves_the_draft_of_another(garbage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for is_first in (True, False):
        broken, good = Scripted("broken", fail), Scripted("good", chain(7, 8, source="good"))
        monkeypatch.setattr(broken, "propose", lambda requests, budgets: GARBAGE[garbage](requests))
        speculator = speculator_of([broken, good] if is_first else [good, broken])
        (rows,) = propose(speculator, make_request([1, 2]))
        assert rows.tree is not None
        assert list(rows.tree.token_ids[1:]) == [7, 8]
        assert speculator.num_drafter_failures == 1


def test_keyboard_interrupt_in_a_drafter_is_raised() -> None:
    def interrupt(request: Request) -> DraftTree:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        propose(speculator_of([Scripted("only", interrupt)]), make_request([1, 2]))


@pytest.mark.parametrize("call", ["begin_step", "prune_drafts"])
def test_policy_that_raises_leaves_drafts_or_plain_steps(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    speculator = speculator_of([Scripted("only", chain(5, 6, source="only"))])
    monkeypatch.setattr(speculator.policy, call, lambda *_: 1 / 0)
    (rows,) = propose(speculator, make_request([1, 2]))
    assert rows.tree is not None
    rows.tree.check()
    assert (rows.num_draft_tokens == 0) == (rows.skip_reason is not None)
    assert speculator.num_drafter_failures == 1


def drawn(*tokens: int) -> Answer:
    """A chain whose tokens were drawn, each from two ids."""

    def answer(request: Request) -> DraftTree:
        probs = {node: TokenProbs(np.full(2, 0.5), np.array([token, token + 1])) for node, token in enumerate(tokens)}
        return DraftTree.from_nodes(request.token_ids[-1], tokens, range(len(tokens)), "drawing", probs)

    return answer


@pytest.mark.parametrize("policy", [FixedDraftLength(4), adaptive()], ids=["fixed", "adaptive"])
def test_sampled_draft_is_kept_whatever_other_drafters_propose(policy: FixedDraftLength) -> None:
    """To choose by the tokens or the length of what was drawn would change the distribution that rejection keeps."""
    lookup = Scripted("lookup", chain(*RIGHT, source="lookup", prob=0.99), is_lookup=True)
    drawing, last = Scripted("drawing", drawn(9)), Scripted("last", chain(*RIGHT, source="last", prob=0.99))
    speculator = speculator_of([lookup, drawing, last], policy)
    policy.plan_drafts = lambda batch, drafter, max_rows: None  # type: ignore[method-assign]  # all are called that may be
    (rows,) = propose(speculator, make_request([1, 2, 3]))
    assert (source_of(rows), rows.num_draft_tokens) == ("drawing", 1)
    assert (lookup.num_calls, last.num_calls) == (1, 0)


# Several drafters as one


def test_observe_passes_each_drafter_the_layers_it_needs() -> None:
    needs = {"a": DrafterNeeds(layers=(4, 1)), "b": DrafterNeeds(layers=(2,)), "c": DrafterNeeds()}
    drafters = [Scripted(name, fail, needs=own) for name, own in needs.items()]
    speculator = speculator_of(drafters)
    collected = tuple(np.arange(3 * 2 * 5, dtype=np.float32).reshape(3, 2, 5))  # of layers 1, 2 and 4
    speculator.observe_rows([CommittedRows(make_request([1, 2]), 0, 2, None, collected)])
    found = [drafter.observed[0].collected_hidden_states for drafter in drafters]
    assert np.array_equal(found[0], [collected[2], collected[0]])
    assert np.array_equal(found[1], [collected[1]])
    assert found[2] == ()


def test_needs_of_several_drafters_are_their_union() -> None:
    drafters = [
        Scripted("a", fail, needs=DrafterNeeds(layers=(4, 1))),
        Scripted("b", fail, needs=DrafterNeeds(hidden_states=True, layers=(1, 2))),
    ]
    assert DrafterNeeds.union(drafters) == DrafterNeeds(hidden_states=True, layers=(1, 2, 4))
    assert DrafterNeeds.union([]) == DrafterNeeds()


@pytest.mark.parametrize("call", ["observe", "release"])
def test_observe_and_release_reach_all_drafters_if_one_raises(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = Scripted("first", fail), Scripted("last", fail)
    speculator, request = speculator_of([first, last]), make_request([1, 2])
    monkeypatch.setattr(first, call, lambda *_: 1 / 0)
    if call == "observe":
        speculator.observe_rows([CommittedRows(request, 0, 1)])
        assert len(last.observed) == 1
    else:
        speculator.release(request)
        assert last.released == [request]
    assert speculator.num_drafter_failures == 1


def test_release_and_eviction_reach_all_drafters() -> None:
    drafters = [Scripted("a", chain(5, 6, source="a")), Scripted("b", fail)]
    speculator, request = speculator_of(drafters, adaptive()), make_request([1, 2])
    for _ in range(3):
        step(speculator, request)
    speculator.preempt(request)
    assert [drafter.released for drafter in drafters] == [[request]] * 2
    assert request.draft_histories
    speculator.release(request)
    assert [drafter.released for drafter in drafters] == [[request] * 2] * 2
    assert not request.draft_histories
