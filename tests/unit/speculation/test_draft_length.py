"""The guard, on a simulated clock: what a step costs is given, and what a drafter is worth."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from paceline.kv_cache.paged import CachedSequence
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.budgets import share_rows
from paceline.speculation.draft_history import CLEAR_STEPS, MIN_EVIDENCE, WINDOW
from paceline.speculation.draft_length import PROBE_INTERVAL, SHORT_STEPS, DraftLengthPolicy, StepCosts
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
    first = CLEAR_STEPS
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
    drafted, _ = _run(_policy(), _request(), 300, lambda step: int(step == CLEAR_STEPS - 1 + PROBE_INTERVAL))
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
    first, second, third, fourth = (_request() for _ in range(4))
    _run(policy, first, 100, lambda step: 0)
    drafted, _ = _run(policy, second, 20, lambda step: 0)
    assert drafted == [step < 1 for step in range(20)]  # of what was drafted before it nothing at all was accepted
    good, _ = _run(policy, third, 5, lambda step: 1)
    assert all(good)
    drafted, _ = _run(policy, fourth, 20, lambda step: 0)
    assert drafted == [step < SHORT_STEPS for step in range(20)]


def test_a_useless_drafter_drafts_once_for_a_batch():
    policy, requests = _policy(), [_request() for _ in range(16)]
    assert all(_step(policy, requests, [0] * 16))
    for _ in range(PROBE_INTERVAL * 16 - 1):
        assert not any(_step(policy, requests, [0] * 16))
    assert all(_step(policy, requests, [0] * 16))


def test_the_first_drafts_of_a_large_batch_are_short_until_drafting_is_known_to_pay():
    policy = _policy()
    for num_requests, depth in ((1, 4), (4, 4), (8, 2), (16, 1), (64, 1)):
        policy.begin_step(num_requests, num_requests)
        budget = policy.budget(_request())
        assert (budget.row_budget, budget.max_depth) == (depth + 1, depth)
    unguarded = _policy(None)
    unguarded.begin_step(16, 16)
    assert unguarded.budget(_request()) == unguarded.full_budget
    policy.begin_step(1, 1)
    _run(policy, _request(), 6, lambda step: 4)
    policy.begin_step(16, 16)
    assert policy.budget(_request()) == policy.full_budget


def test_a_useless_drafter_is_shut_off_however_cheap_its_rows_seem():
    policy, request = _policy(StepCosts(1.0, 0.9)), _request()
    drafted, _ = _run(policy, request, PROBE_INTERVAL, lambda step: 0)
    assert sum(drafted) == CLEAR_STEPS


def test_a_good_request_among_bad_ones_goes_on_drafting():
    policy, requests = _policy(), [_request() for _ in range(16)]
    for step in range(40):
        drafted = _step(policy, requests, [0] * 15 + [4])
        assert drafted[-1]
        assert step < 1 + SHORT_STEPS or not any(drafted[:-1])


def test_drafts_that_pay_alone_stop_where_a_batch_makes_their_rows_dear_and_go_on_after_it():
    policy = DraftLengthPolicy(NUM_DRAFT_TOKENS, costs=StepCosts(1.0, 1.1))  # pays from 0.1 alone
    requests = [_request() for _ in range(16)]
    for _ in range(2):  # the first pass of so many rows does not count
        policy.observe_pass(16, 2.0)
        policy.observe_pass(80, 7.0)  # pays from 2.5 in the whole batch
    for step in range(10):
        assert _step(policy, requests, [2] * 16) == [step < 1 + SHORT_STEPS] * 16
    for request in requests[1:]:
        policy.release(request)
    assert _step(policy, requests[:1], [2]) == [True]


def _step(policy: DraftLengthPolicy, requests: list[Request], accepted: list[int]) -> list[bool]:
    """One step of requests that decode together: which of them drafted."""
    policy.begin_step(len(requests), len(requests))
    budgets = [policy.budget(request) for request in requests]
    for request, budget, kept in zip(requests, budgets, accepted, strict=True):
        if budget is not None:
            policy.observe(request, budget.max_depth, min(kept, budget.max_depth))
    return [budget is not None for budget in budgets]


def test_one_slow_draft_does_not_move_the_break_even_point():
    policy = _policy()
    for seconds in (5.0, 0.2, 0.2, 0.2, 5.0, 0.2):
        policy.observe_draft_time(seconds)
    assert policy.costs is not None
    assert policy.costs.draft_s == pytest.approx(0.2)


def test_the_probes_of_many_requests_are_as_rare_as_those_of_one():
    """Each of them makes the pass of all requests longer."""
    policy, requests = _policy(), [_request() for _ in range(8)]
    for request in requests:
        policy.budget(request)
    num_drafted = [0] * 512
    for step in range(512):
        for request in requests:
            budget = policy.budget(request)
            if budget is not None:
                num_drafted[step] += 1
                policy.observe(request, budget.max_depth, 0)
    assert sum(num_drafted[8:]) <= 8 * (512 // (8 * PROBE_INTERVAL) + 1)


def test_acceptance_is_what_was_kept_lately_and_an_even_chance_before():
    policy, request = _policy(), _request()
    assert policy.acceptance(request) == 0.5
    policy.budget(request)
    assert policy.acceptance(request) == 0.5
    policy.observe(request, 4, 3)
    assert policy.acceptance(request) == 0.75


def _expected(shares: list[int], acceptance: list[float]) -> float:
    return sum(rate**depth for share, rate in zip(shares, acceptance, strict=True) for depth in range(1, share + 1))


def test_rows_are_shared_so_that_no_other_way_promises_more_tokens(seed):
    generator = np.random.default_rng(seed)
    for _ in range(200):
        count = int(generator.integers(1, 5))
        wanted = generator.integers(0, 5, count).tolist()
        acceptance = generator.choice([0.0, 0.1, 0.5, 0.5, 0.9, 1.0], count).tolist()
        available = int(generator.integers(-2, 12))
        shares = share_rows(wanted, acceptance, available)
        assert sum(shares) == max(0, min(sum(wanted), available))
        assert all(0 <= share <= most for share, most in zip(shares, wanted, strict=True))
        others = [list(other) for other in product(*(range(most + 1) for most in wanted)) if sum(other) <= max(0, available)]
        assert _expected(shares, acceptance) == pytest.approx(max(_expected(other, acceptance) for other in others))


ALIKE = {12: [4, 4, 4], 11: [4, 4, 3], 6: [2, 2, 2], 4: [2, 1, 1], 2: [1, 1, 0], 0: [0, 0, 0], -9: [0, 0, 0]}


@pytest.mark.parametrize(("available", "shares"), ALIKE.items())
def test_where_nothing_is_known_all_get_alike(available, shares):
    assert share_rows([4, 4, 4], [0.5, 0.5, 0.5], available) == shares


def test_a_request_that_never_succeeds_drafts_half_as_much_before_it_is_shut_off():
    policy, request = _policy(), _request()
    depths = []
    for _ in range(CLEAR_STEPS):
        budget = policy.budget(request)
        assert budget is not None
        depths.append((budget.max_depth, budget.row_budget))
        policy.observe(request, budget.max_depth, 0)
    assert depths == [(4, 5), (4, 5), (2, 3), (2, 3)]
    assert policy.budget(request) is None

    policy, request = _policy(), _request()
    for accepted, depth in ((0, 4), (0, 4), (1, 2), (0, 4)):
        budget = policy.budget(request)
        assert budget is not None
        assert budget.max_depth == depth
        policy.observe(request, budget.max_depth, accepted)


@pytest.mark.parametrize(("kept", "goes_on"), [(0.7, False), (0.95, True)])
def test_short_drafts_of_a_large_batch_tell_whether_long_ones_would_pay(kept, goes_on):
    """Rows of a batch of 16 are dear: only nearly perfect drafts pay, which one token each tells within two steps."""
    policy = DraftLengthPolicy(NUM_DRAFT_TOKENS, costs=StepCosts(1.0, 1.25))
    requests = [_request() for _ in range(16)]
    random = np.random.default_rng(0)
    for _ in range(2):
        policy.observe_pass(16, 2.0)
        policy.observe_pass(80, 7.6)  # pays from 2.8 accepted tokens a step
    rows = []
    for _ in range(8):
        policy.begin_step(16, 16)
        budgets = [policy.budget(request) for request in requests]
        rows.append(sum(budget.max_depth for budget in budgets if budget is not None))
        for request, budget in zip(requests, budgets, strict=True):
            if budget is not None:
                chain = np.cumprod(random.random(budget.max_depth) < kept)
                policy.observe(request, budget.max_depth, int(chain.sum()))
    assert rows[:2] == [16, 16]
    assert sum(rows[2:]) > 200 if goes_on else sum(rows[2:]) < 40
