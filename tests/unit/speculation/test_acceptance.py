"""The acceptance model: rates over all requests, an offset for each, and drafts that are compared with the text."""

import math

import numpy as np
import pytest

from harness.decoding_rows import make_request
from paceline.runtimes.cost import ForwardProfile
from paceline.speculation.draft_length.acceptance import (
    MAX_LOG_ODDS_OFFSET,
    MAX_OFFSET_TOKENS,
    MAX_RATE,
    MIN_RATE,
    PRIOR_RATE,
    AcceptanceRates,
    DraftHistory,
    clip_rate,
    match_confidence,
)
from paceline.speculation.draft_length.policy import AdaptiveDraftLength
from paceline.speculation.drafter import DraftBudget, Drafter, DrafterTraits
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

# AcceptanceRates


def test_acceptance_rates_without_observations_are_the_prior() -> None:
    rates = AcceptanceRates()
    assert rates.rates_by_depth(3) == pytest.approx([PRIOR_RATE] * 3)
    assert rates.rate_by_prob(0.3) == pytest.approx(0.3)
    assert rates.rates_by_depth(0) == []
    assert not rates.has_probs


def test_acceptance_rates_by_depth_are_the_accepted_share_of_each_depth(seed: int) -> None:
    random, rates, true = np.random.default_rng(seed), AcceptanceRates(), (0.9, 0.6, 0.2)
    for _ in range(3000):
        for depth, rate in enumerate(true, 1):
            accepted = bool(random.random() < rate)
            rates.observe(depth, None, is_first_child=True, accepted=accepted)
            if not accepted:
                break
    assert rates.rates_by_depth(3) == pytest.approx(true, abs=0.08)


def test_acceptance_rates_at_unseen_depths_resemble_the_depth_before() -> None:
    rates = AcceptanceRates()
    for _ in range(400):
        rates.observe(1, None, is_first_child=True, accepted=True)
    assert min(rates.rates_by_depth(8)) == pytest.approx(rates.rates_by_depth(1)[0])


def test_acceptance_by_prob_is_calibrated_separately_for_first_siblings() -> None:
    """The drafter claims 0.9; its first tokens are right half of the time, later siblings never."""
    rates = AcceptanceRates()
    for number in range(400):
        rates.observe(1, 0.9, is_first_child=True, accepted=number % 2 == 0)
        rates.observe(1, 0.9, is_first_child=False, accepted=False)
    assert rates.has_probs
    assert rates.rate_by_prob(0.9) == pytest.approx(0.5, abs=0.05)
    assert rates.rate_by_prob(0.9, is_first_child=False) < 0.05
    assert rates.rate_by_prob(0.2) == pytest.approx(0.2), "other probabilities are counted by themselves"


def test_acceptance_rates_follow_a_change() -> None:
    rates = AcceptanceRates()
    for accepted, count in ((True, 2000), (False, 2000)):
        for _ in range(count):
            rates.observe(1, 0.8, is_first_child=True, accepted=accepted)
    assert rates.rates_by_depth(1)[0] < 0.2
    assert rates.rate_by_prob(0.8) < 0.2


def test_optimism_of_acceptance_rates_falls_with_observations() -> None:
    rates, found = AcceptanceRates(), list[float]()
    for number in range(200):
        found.append(rates.optimism)
        rates.observe(1, None, is_first_child=True, accepted=number % 2 == 0)
    assert found[0] > 0.5
    assert found[-1] < 0.2


# DraftHistory


def test_draft_history_without_observations_has_the_global_rate() -> None:
    assert DraftHistory().rate_for_request(0.7) == pytest.approx(0.7)
    assert DraftHistory().rate_for_request(0.7, optimism=1.0) > 0.8


@pytest.mark.parametrize("true", [0.1, 0.4, 0.9])
def test_request_bias_learns_the_acceptance_rate_of_the_request(true: float, seed: int) -> None:
    random, history = np.random.default_rng(seed), DraftHistory()
    found = list[float]()
    for _ in range(600):
        history.observe(0.6, accepted=bool(random.random() < true))
        found.append(history.rate_for_request(0.6))
    assert float(np.mean(found[200:])) == pytest.approx(true, abs=0.1)
    assert history.num_verified_tokens <= MAX_OFFSET_TOKENS


def test_request_bias_shifts_all_acceptance_rates_by_the_same_odds() -> None:
    history = DraftHistory(log_odds_offset=math.log(3.0))
    for rate in (0.1, 0.5, 0.9):
        found = history.rate_for_request(rate)
        assert found / (1.0 - found) == pytest.approx(3.0 * rate / (1.0 - rate))


def test_request_bias_is_bounded_and_rates_stay_below_one() -> None:
    history = DraftHistory()
    for _ in range(5000):
        history.observe(0.6, accepted=True)
    assert abs(history.log_odds_offset) <= MAX_LOG_ODDS_OFFSET
    assert history.rate_for_request(0.6) <= MAX_RATE
    assert (clip_rate(0.0), clip_rate(1.0), clip_rate(0.5)) == (MIN_RATE, MAX_RATE, 0.5)


def test_request_bias_follows_a_changed_text_faster_after_surprises() -> None:
    history = DraftHistory()
    for _ in range(200):
        history.observe(0.6, accepted=True)
    for _ in range(12):
        history.observe(0.6, accepted=False)
    assert history.rate_for_request(0.6) < 0.6


def test_path_rates_are_products_down_to_the_minimum_rate() -> None:
    assert DraftHistory().path_rates([0.5, 0.5, 0.5, 0.5], 0.1) == pytest.approx([0.5, 0.25, 0.125])
    assert DraftHistory().path_rates([], 0.1) == []


def test_match_confidence_grows_with_match_length_and_copied_tokens() -> None:
    short, long = match_confidence(1, 4), match_confidence(8, 4)
    assert short == sorted(short)
    assert all(one < other for one, other in zip(short, long, strict=True))
    assert all(0.0 < prob < 1.0 for prob in [*short, *long])


# Unsent drafts


class Lookup(Drafter):
    name = "lookup"
    traits = DrafterTraits(is_lookup=True)

    def propose(self, requests: object, budgets: object) -> list[DraftTree | None]:
        return []


def hold_back(policy: AdaptiveDraftLength, request: Request, drafted: list[int]) -> RequestRows:
    """Let the policy judge a draft for a request on a machine on which no row pays."""
    rows = RequestRows.without_draft(request, 1)
    assert policy.begin_step([rows]) is None
    rows.max_draft_budget = DraftBudget(17, 16)
    rows.tree = DraftTree.chain(request.token_ids[-1], drafted, "lookup")
    policy.prune_drafts([rows], None)
    return rows


def costly_rows() -> AdaptiveDraftLength:
    return AdaptiveDraftLength(16, ForwardProfile.from_samples({rows: float(rows) ** 3 for rows in (1, 2, 3, 5, 9, 17, 33)}))


def resume(policy: AdaptiveDraftLength, request: Request) -> SkipReason | None:
    """The reason of the first step in which the request is considered again."""
    for _ in range(64):
        policy.begin_step([RequestRows.without_draft(request, 1)])
        if request.draft_histories["lookup"].resume_step <= policy._step:
            break
    return policy.skip_reason(request, Lookup())


def test_draft_too_costly_to_send_makes_the_step_plain_as_unprofitable() -> None:
    request = make_request([1, 2, 3])
    rows = hold_back(costly_rows(), request, [4, 5, 6, 7, 8])
    assert (rows.num_draft_tokens, rows.skip_reason) == (0, SkipReason.UNPROFITABLE)
    assert rows.expected_speedup is not None
    assert rows.expected_speedup < 1.03


def test_unsent_draft_that_was_right_raises_rates_and_drafting_goes_on() -> None:
    policy, request = costly_rows(), make_request([1, 2, 3])
    for _ in range(20):
        last = len(request.token_ids)
        hold_back(policy, request, [4, 5, 6, 7, 8])
        request.token_ids += [4, 5, 6, 7]
        request.cached_sequence.committed_len = len(request.token_ids) - 1
        assert resume(policy, request) is None
        assert len(request.token_ids) == last + 4
    (rates,) = policy.rates.values()
    assert min(rates.rates_by_depth(4)) > 0.8
    assert request.draft_histories["lookup"].log_odds_offset > 0.0


def test_unsent_draft_that_was_wrong_lowers_rates_and_backs_off() -> None:
    policy, request, waits = costly_rows(), make_request([1, 2, 3]), list[int]()
    for _ in range(6):
        hold_back(policy, request, [4, 5, 6, 7, 8])
        request.token_ids += [9]
        request.cached_sequence.committed_len = len(request.token_ids) - 1
        assert resume(policy, request) is SkipReason.UNPROFITABLE
        history = request.draft_histories["lookup"]
        waits.append(history.resume_step - policy._step)
    (rates,) = policy.rates.values()
    assert rates.num_observed == 6, "tokens after a wrong one are not counted"
    assert rates.rates_by_depth(1)[0] < 0.3
    assert history.log_odds_offset < 0.0
    assert max(waits) <= 2**3, "of lookup drafters"


def test_unsent_draft_is_not_scored_before_the_text_has_passed_it() -> None:
    policy, request = costly_rows(), make_request([1, 2, 3])
    hold_back(policy, request, [4, 5, 6, 7, 8])
    request.token_ids.append(4)
    policy.begin_step([RequestRows.without_draft(request, 1)])
    assert policy.skip_reason(request, Lookup()) is SkipReason.UNPROFITABLE
    assert request.draft_histories["lookup"].unsent_draft is not None
    assert all(rates.num_observed == 0 for rates in policy.rates.values())
