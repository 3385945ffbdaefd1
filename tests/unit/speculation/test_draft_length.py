"""The guard, on a simulated clock: what a step costs is given, and what a drafter is worth."""

from collections.abc import Callable

import pytest

from paceline.kv_cache.paged import CachedSequence
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.draft_length import (
    CLEAR_EVIDENCE,
    MIN_EVIDENCE,
    PROBE_INTERVAL,
    SHORT_EVIDENCE,
    WINDOW,
    DraftLengthPolicy,
    StepCosts,
)
from paceline.speculation.request import Request

NUM_DRAFT_TOKENS = 4
COSTS = StepCosts(plain_s=1.0, speculative_s=1.4, draft_s=0.2)  # pays from 0.6 accepted tokens a step


def _request() -> Request:
    params = SamplingParams()
    return Request([1], 1, params, LogitsProcessor(params, 4, [1]), CachedSequence(), seed=0, sample_index=0, max_len=10)


def _policy(costs: StepCosts | None = COSTS) -> DraftLengthPolicy:
    return DraftLengthPolicy(NUM_DRAFT_TOKENS, costs=costs)


def _run(policy: DraftLengthPolicy, request: Request, num_steps: int, accepted: Callable[[int], int]) -> tuple[list[bool], float]:
    """Which of the steps had drafts, and tokens per second of the simulated clock; plain decoding makes 1 a second."""
    drafted, seconds, tokens = [], 0.0, 0
    for step in range(num_steps):
        budget = policy.budget(request)
        drafted.append(budget is not None)
        seconds += COSTS.plain_s if budget is None else COSTS.speculative_s + COSTS.draft_s
        tokens += 1
        if budget is not None:
            tokens += accepted(step)
            policy.observe(request, budget.max_depth, accepted(step))
    return drafted, tokens / seconds


@pytest.mark.parametrize(
    ("plain_s", "speculative_s", "draft_s", "wanted"), [(1.0, 1.0, 0.0, 0.0), (2.0, 3.0, 1.0, 1.0), (1.0, 1.4, 0.2, 0.6)]
)
def test_at_break_even_a_step_with_drafts_is_as_fast_as_a_plain_one(plain_s, speculative_s, draft_s, wanted):
    costs = StepCosts(plain_s, speculative_s, draft_s)
    accepted = costs.break_even_accepted()
    assert accepted == pytest.approx(wanted)
    assert (1 + accepted) / (speculative_s + draft_s) == pytest.approx(1 / plain_s)


def test_an_unmeasured_plain_pass_never_shuts_a_drafter_off():
    assert StepCosts(0.0, 1.0, 1.0).break_even_accepted() == 0.0


def test_a_useless_drafter_is_shut_off_after_the_evidence_and_probed_at_a_fixed_interval():
    drafted, speed = _run(_policy(), _request(), 1_000, lambda step: 0)
    first = CLEAR_EVIDENCE // NUM_DRAFT_TOKENS
    probes = [step for step, is_drafted in enumerate(drafted) if is_drafted]
    assert probes[:first] == list(range(first))
    assert probes[first:] == list(range(first - 1 + PROBE_INTERVAL, 1_000, PROBE_INTERVAL))
    assert speed > 0.97


@pytest.mark.parametrize("accepted", [1, 4])
def test_a_drafter_that_pays_is_never_shut_off(accepted):
    drafted, speed = _run(_policy(), _request(), 500, lambda step: accepted)
    assert all(drafted)
    assert speed == pytest.approx((1 + accepted) / 1.6)


def test_a_drafter_at_break_even_is_left_alone():
    drafted, _ = _run(_policy(StepCosts(1.0, 1.5, 0.5)), _request(), 200, lambda step: 1)
    assert all(drafted)


def test_a_drafter_that_becomes_useless_is_shut_off_within_the_window():
    drafted, _ = _run(_policy(), _request(), 200, lambda step: 4 if step < 100 else 0)
    assert all(drafted[:100])
    assert not any(drafted[101 + WINDOW // NUM_DRAFT_TOKENS : 100 + PROBE_INTERVAL])


def test_a_drafter_that_becomes_good_is_back_after_one_good_probe():
    drafted, _ = _run(_policy(), _request(), 300, lambda step: 0 if step < 100 else 3)
    back = drafted.index(True, 100)
    assert back < 100 + PROBE_INTERVAL
    assert all(drafted[back:])


def test_few_rejected_tokens_in_few_steps_are_no_evidence_yet():
    policy, request = DraftLengthPolicy(8, costs=COSTS), _request()
    assert _run(policy, request, 3, lambda step: 0)[0] == [True] * 3
    drafted, _ = _run(_policy(), _request(), 6, lambda step: int(step == 0))
    assert drafted == [True] * (MIN_EVIDENCE // NUM_DRAFT_TOKENS)


def test_a_lucky_probe_of_a_useless_drafter_costs_no_more_than_the_evidence():
    drafted, _ = _run(_policy(), _request(), 300, lambda step: int(step == CLEAR_EVIDENCE // NUM_DRAFT_TOKENS - 1 + PROBE_INTERVAL))
    lucky = drafted.index(True, 10)
    assert drafted[lucky : lucky + 7] == [True] * 6 + [False]


def test_without_costs_the_guard_is_off():
    drafted, _ = _run(_policy(None), _request(), 200, lambda step: 0)
    assert all(drafted)


def test_requests_are_guarded_one_by_one():
    policy, useless, good = _policy(), _request(), _request()
    for _ in range(20):
        _run(policy, useless, 1, lambda step: 0)
        _run(policy, good, 1, lambda step: 4)
    assert policy.budget(useless) is None
    assert policy.budget(good) is not None


def test_a_released_request_is_forgotten():
    policy, request = _policy(), _request()
    _run(policy, request, 20, lambda step: 0)
    assert policy.budget(request) is None
    policy.release(request)
    policy.release(request)
    policy.observe(request, 4, 0)
    assert policy.budget(request) is not None


def test_the_median_of_the_last_drafts_times_moves_the_break_even_point():
    policy = _policy(StepCosts(1.0, 1.0))
    policy.observe_draft_time(0.5)
    assert policy.costs.draft_s == 0.5
    for _ in range(8):
        policy.observe_draft_time(0.6)
    assert policy.costs.draft_s == pytest.approx(0.6)
    assert policy.costs.break_even_accepted() == pytest.approx(0.6)
    unguarded = _policy(None)
    unguarded.observe_draft_time(1.0)
    assert unguarded.costs is None


def test_the_budget_is_a_chain_unless_said_otherwise():
    budget = DraftLengthPolicy(5).budget(_request())
    assert (budget.row_budget, budget.max_depth) == (6, 5)
    budget = DraftLengthPolicy(5, row_budget=12).budget(_request())
    assert (budget.row_budget, budget.max_depth) == (12, 5)


def test_a_request_that_follows_others_for_whom_drafting_did_not_pay_is_shut_off_sooner():
    policy = _policy()
    first, second, third = _request(), _request(), _request()
    _run(policy, first, 100, lambda step: 0)
    drafted, _ = _run(policy, second, 20, lambda step: 0)
    assert drafted == [step < SHORT_EVIDENCE // NUM_DRAFT_TOKENS for step in range(20)]
    good, _ = _run(policy, third, 20, lambda step: 3)
    assert all(good)


def test_one_slow_draft_does_not_move_the_break_even_point():
    policy = _policy()
    for seconds in (5.0, 0.2, 0.2, 0.2, 5.0, 0.2):
        policy.observe_draft_time(seconds)
    assert policy.costs is not None
    assert policy.costs.draft_s == pytest.approx(0.2)
