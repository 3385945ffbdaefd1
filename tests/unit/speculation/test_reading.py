"""Reading a prompt is part of what drafting costs: on a simulated clock, it is done where it pays, and seldom where it does not."""

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.kv_cache.cache import CachedSequence
from paceline.runtimes.cost import ForwardProfile
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.draft_length.policy import OVERHEAD_SHARE, AdaptiveDraftLength
from paceline.speculation.drafter import FREE_PREFILL_TOKENS, DraftBudget, Drafter, PrefillTime
from paceline.speculation.request import FinishReason, Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.speculator import Speculator
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

NUM_DRAFT_TOKENS = 4
PLAIN_S, ROW_S, DRAFT_S = 1.0, 0.1, 0.2


def make_request(num_prompt: int = 900, max_tokens: int = 256) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    request = Request(
        [1] * (num_prompt + 1), num_prompt, params, LogitsProcessor(params, 4, [1]), CachedSequence(), 0, 0, num_prompt + max_tokens
    )
    request.cached_sequence.committed_len = num_prompt
    return request


class Clock(Drafter):
    """Reads new tokens at a given number of simulated seconds each, and drafts `accepted` right tokens."""

    name = "clock"

    def __init__(self, accepted: int, token_s: float) -> None:
        self.accepted, self.token_s = accepted, token_s
        self.seconds, self.read_s, self.num_reads = 0.0, 0.0, 0
        self._num_read: dict[int, int] = {}

    def prefill_s(self, request: Request) -> float:
        num_unindexed = len(request.token_ids) - self._num_read.get(id(request), 0)
        return num_unindexed * self.token_s if num_unindexed > FREE_PREFILL_TOKENS else 0.0

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        for request in requests:
            self.num_reads += self.prefill_s(request) > 0
            self.read_s += self.prefill_s(request)
            self.seconds += self.prefill_s(request) + DRAFT_S
            self._num_read[id(request)] = len(request.token_ids)
        return [
            DraftTree.chain(request.token_ids[-1], [2] * budget.max_depth, self.name)
            for request, budget in zip(requests, budgets, strict=True)
        ]

    def release(self, request: Request) -> None:
        self._num_read.pop(id(request), None)


def decode(speculator: Speculator, drafter: Clock, num_tokens: int, *, max_tokens: int = 256) -> float:
    """Simulated seconds of one request with a long prompt that generates this many tokens."""
    request, seconds = make_request(max_tokens=max_tokens), 0.0
    while request.num_output_tokens < num_tokens:
        rows, before = RequestRows.without_draft(request, 1), drafter.seconds
        speculator.propose([rows])
        assert rows.tree is not None
        drafted = rows.tree.num_draft_tokens
        kept = min(drafter.accepted, drafted)
        pass_s = PLAIN_S + ROW_S * drafted
        seconds += pass_s + drafter.seconds - before
        request.token_ids.extend([2] * kept + [3])
        request.cached_sequence.committed_len = len(request.token_ids) - 1
        if drafted:
            speculator.observe_verified(request, rows.tree, range(1, kept + 1))
        speculator.policy.observe_step_time([rows], pass_s, 0.0)
    request.finish_reason = FinishReason.STOP
    speculator.release(request)
    return seconds


def open_speculator(accepted: int, token_s: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Speculator, Clock]:
    drafter = Clock(accepted, token_s)
    policy = AdaptiveDraftLength(
        NUM_DRAFT_TOKENS, ForwardProfile.from_samples({rows: PLAIN_S + ROW_S * (rows - 1) for rows in (1, 2, 5, 9)})
    )
    observe = policy.observe_draft_time
    monkeypatch.setattr(
        policy, "observe_draft_time", lambda who, count, depth, seconds, **more: observe(who, count, depth, DRAFT_S, **more)
    )  # by this clock
    return Speculator([drafter], policy, vocab_size=4), drafter


@pytest.mark.spread(0.4)
@pytest.mark.parametrize("num_tokens", [8, 30, 200])
@pytest.mark.parametrize("token_s", [0.005, 0.05, 1.0])
def test_useless_drafter_is_rarely_prefilled(num_tokens: int, token_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    speculator, drafter = open_speculator(0, token_s, monkeypatch)
    for _ in range(3):
        decode(speculator, drafter, num_tokens)  # the first ones may be tried out
    before_s = drafter.read_s
    num_requests = 6_000 // num_tokens
    seconds = sum(decode(speculator, drafter, num_tokens) for _ in range(num_requests))
    plain_s = num_requests * num_tokens * PLAIN_S
    assert seconds < 1.03 * plain_s
    assert drafter.read_s - before_s < 2 * OVERHEAD_SHARE * plain_s + 900 * token_s


def test_profitable_drafter_is_prefilled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    speculator, drafter = open_speculator(3, 0.02, monkeypatch)
    for _ in range(5):
        seconds = decode(speculator, drafter, 200)
        assert seconds == pytest.approx(900 * 0.02 + 50 * 1.6, rel=0.15)
    assert drafter.num_reads == 5


def test_short_output_is_not_prefilled_for_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    speculator, drafter = open_speculator(3, 0.02, monkeypatch)
    assert decode(speculator, drafter, 16, max_tokens=16) == 15 * PLAIN_S, "18 seconds to save 10"
    speculator, drafter = open_speculator(3, 0.02, monkeypatch)
    assert decode(speculator, drafter, 16) > 18, "where nothing is known outputs are taken to be long"
    assert decode(speculator, drafter, 16) == 15 * PLAIN_S, "as the last one was"


def test_drafter_that_becomes_profitable_is_prefilled(monkeypatch: pytest.MonkeyPatch) -> None:
    speculator, drafter = open_speculator(0, 0.005, monkeypatch)
    for _ in range(20):
        decode(speculator, drafter, 100)
    drafter.accepted = 3
    for _ in range(20):
        seconds = decode(speculator, drafter, 100)
    assert seconds < 60


def test_step_without_drafter_prefill_is_skipped_as_unprofitable(monkeypatch: pytest.MonkeyPatch) -> None:
    speculator, drafter = open_speculator(3, 1.0, monkeypatch)
    rows = RequestRows.without_draft(make_request(), 1)
    speculator.propose([rows])
    assert (rows.skip_reason, drafter.num_reads) == (SkipReason.UNPROFITABLE, 0)
    assert speculator.num_drafter_failures == 0


def test_drafter_prefill_time_follows_measurements(seed: int) -> None:
    reading = PrefillTime()
    assert reading.expected_s(1000) == 0.0
    random = np.random.default_rng(seed)
    for _ in range(40):
        count = int(random.integers(FREE_PREFILL_TOKENS + 1, 500))
        reading.observe(count, count * 0.003 * random.uniform(0.9, 1.1))
        reading.observe(FREE_PREFILL_TOKENS, 9.0)
    assert reading.expected_s(200) == pytest.approx(0.6, rel=0.1)
    assert reading.expected_s(FREE_PREFILL_TOKENS) == 0.0


def test_accepted_trial_lets_only_the_next_step_overspend(monkeypatch: pytest.MonkeyPatch) -> None:
    speculator, _ = open_speculator(0, 0.0, monkeypatch)
    policy, batch = speculator.policy, [RequestRows.without_draft(make_request(max_tokens=8), 1)]
    assert isinstance(policy, AdaptiveDraftLength)
    policy.begin_step(batch)
    policy._overhead_budget_s = -1.0
    policy._trial_request = batch[0].request
    policy.observe_verified(batch[0].request, DraftTree.chain(3, [2, 2], "clock"), [1, 2])
    assert [policy.begin_step(batch) for _ in range(2)] == [None, SkipReason.UNPROFITABLE]
