"""Drafting replayed on a simulated clock: never slower than plain decoding, close to the best fixed length, quick to stop and start."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.fixed_draft_length import fixed_lengths
from harness.replay import DEEPEST, Costs, Trace, best_fixed, controller, made_up, replay
from harness.spread import mark_cases
from paceline.runtimes.cost import ForwardProfile
from paceline.speculation.draft_length.acceptance import PRIOR_RATE
from paceline.speculation.draft_length.policy import AdaptiveDraftLength, FixedDraftLength
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

MACHINES = {
    "cheap rows": Costs(lambda rows: 0.040 * (1 + 0.03 * (rows - 1)), (2e-5, 0.0)),
    "dear rows": Costs(lambda rows: 0.040 * (1 + 0.15 * (rows - 1)), (2e-5, 0.0)),
    "stairs": Costs(lambda rows: 0.030 * (1 + 0.5 * ((rows - 1) // 4)), (2e-5, 0.0)),
    "a draft model": Costs(lambda rows: 0.040 * (1 + 0.04 * (rows - 1)), (1e-3, 4e-3)),
    "a dear draft model": Costs(lambda rows: 0.040 * (1 + 0.04 * (rows - 1)), (1e-3, 12e-3)),
    "a tiny target": Costs(lambda rows: 0.0010 * (1 + 0.06 * (rows - 1)), (1e-5, 1e-4), (1e-4, 2e-5)),
}
SAYS: dict[str, Callable[[float], float] | None] = {"nothing": None, "too much": lambda chance: min(0.98, max(0.02, chance**0.5))}


def texts(chance: Callable[[int], float], random: np.random.Generator, count: int, says: str, length: int = 128) -> list[Trace]:
    return [made_up(length, chance, random, confident=SAYS[says]) for _ in range(count)]


def plain_seconds(traces: list[Trace], costs: Costs, batch_size: int = 1) -> float:
    return best_fixed_seconds(traces, costs, batch_size=batch_size, deepest=0)


def best_fixed_seconds(traces: list[Trace], costs: Costs, *, batch_size: int = 1, deepest: int = DEEPEST) -> float:
    return min(fixed_lengths(traces, costs, batch_size=batch_size, deepest=deepest))


def test_call_with_prefill_only_lowers_the_expected_draft_time() -> None:
    """Its time is an upper limit of the time of a draft alone."""
    drafter: Any = SimpleNamespace(name="head")
    policy = AdaptiveDraftLength(8, ForwardProfile.from_samples(dict.fromkeys((1, 2, 4, 8, 16), 0.03)))
    policy.observe_draft_time(drafter, 1, 4, 0.2, has_prefill=True)
    assert policy.cost.draft_s("head", 1, 4) == 0.0, "not known yet"
    for _ in range(40):
        policy.observe_draft_time(drafter, 1, 4, 0.2)
    known_s = policy.cost.draft_s("head", 1, 4)
    policy.observe_draft_time(drafter, 1, 4, 0.9, has_prefill=True)
    assert policy.cost.draft_s("head", 1, 4) == known_s
    for _ in range(10):
        policy.observe_draft_time(drafter, 1, 4, 0.05, has_prefill=True)
    assert policy.cost.draft_s("head", 1, 4) < known_s / 2


CASES = [(chance, machine, says) for chance in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0) for machine in MACHINES for says in SAYS]
FEW = [(chance, list(MACHINES)[at % 6], list(SAYS)[at % 2]) for at, chance in enumerate((0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0))]


@pytest.mark.parametrize(("chance", "machine", "says"), mark_cases(CASES, FEW))
def test_adaptive_length_is_as_fast_as_the_best_fixed_length(chance: float, machine: str, says: str, seed: int) -> None:
    costs, random = MACHINES[machine], np.random.default_rng(seed)
    traces = texts(lambda _: chance, random, 24, says)
    seconds = replay(controller(costs), traces, costs).seconds
    assert seconds <= 1.06 * best_fixed_seconds(traces, costs)  # what is learned of the first text included
    assert seconds <= 1.015 * plain_seconds(traces, costs)


@pytest.mark.parametrize(("chance", "machine", "says"), mark_cases(CASES, FEW))
def test_adaptive_length_in_a_batch_is_never_slower_than_plain(chance: float, machine: str, says: str, seed: int) -> None:
    costs, random = MACHINES[machine], np.random.default_rng(seed)
    traces = texts(lambda _: chance, random, 24, says, length=96)
    seconds = replay(controller(costs), traces, costs, batch_size=8).seconds
    assert seconds <= 1.03 * plain_seconds(traces, costs, 8)


@pytest.mark.parametrize("machine", ["a draft model", "a dear draft model"])
def test_drafts_of_a_batch_reach_the_planned_depth(machine: str, seed: int) -> None:
    """Guessing takes as long as the deepest of all: to stop earlier saves nothing."""
    costs, random = MACHINES[machine], np.random.default_rng(seed)
    traces = texts(lambda _: 0.9, random, 32, "too much")
    assert replay(controller(costs), traces, costs, batch_size=8).seconds < 1.06 * best_fixed_seconds(traces, costs, batch_size=8)


@pytest.mark.spread(0.5)
@pytest.mark.parametrize("machine", MACHINES)
def test_only_confident_drafts_are_sent_if_they_are_better(machine: str, seed: int) -> None:
    """Passages of 64 tokens that are easy, then hard, which the drafter knows: no fixed length does as well."""
    costs, random = MACHINES[machine], np.random.default_rng(seed)
    traces = texts(lambda at: 0.95 if at // 64 % 2 else 0.05, random, 8, "too much", length=256)
    assert replay(controller(costs), traces, costs).seconds < 1.03 * best_fixed_seconds(traces, costs)


@pytest.mark.spread(0.4)
@pytest.mark.parametrize(("machine", "batch_size", "count"), [("cheap rows", 8, 32), ("dear rows", 1, 8)])
@pytest.mark.parametrize("number", range(6))
def test_few_rejections_do_not_stop_drafting(machine: str, batch_size: int, count: int, number: int) -> None:
    """Guesses right at 0.3, of which one is worth 6 to 14 %: what single steps bring says nothing for long."""
    costs, random = MACHINES[machine], np.random.default_rng(number)
    traces = texts(lambda _: 0.3, random, count, "too much")
    best = best_fixed_seconds(traces, costs, batch_size=batch_size, deepest=4)
    assert replay(controller(costs), traces, costs, batch_size=batch_size).seconds < 1.05 * best


def test_useless_drafter_costs_at_most_one_percent() -> None:
    costs, policy = MACHINES["a draft model"], controller(MACHINES["a draft model"])
    traces = texts(lambda _: 0.0, np.random.default_rng(0), 1, "nothing", length=3_000)
    outcome = replay(policy, traces, costs)
    assert outcome.seconds < 1.013 * plain_seconds(traces, costs)
    assert outcome.plain[SkipReason.UNPROFITABLE] > 2_850
    assert outcome.num_draft_tokens > 20, "it is tried again now and then"


@pytest.mark.parametrize(("machine", "within"), [("cheap rows", 80), ("a draft model", 400)])
def test_improved_drafter_is_used_again_soon(machine: str, within: int) -> None:
    """One that takes no time is watched all the while; for one that does, a hundredth of the time is spent on looking."""
    costs = MACHINES[machine]
    traces = texts(lambda at: 0.0 if at < 1_000 else 1.0, np.random.default_rng(0), 1, "nothing", length=3_000)
    fast = Trace(traces[0].token_ids[:1_000], traces[0].guesses[:1_000])
    late_s = replay(controller(costs), traces, costs).seconds - replay(controller(costs), [fast], costs).seconds
    always = texts(lambda _: 1.0, np.random.default_rng(0), 1, "nothing", length=2_000)
    assert late_s < replay(controller(costs), always, costs).seconds + within * costs.pass_s(1)


def test_worsened_drafter_is_stopped_soon() -> None:
    costs = MACHINES["a draft model"]
    traces = texts(lambda at: 1.0 if at < 1_000 else 0.0, np.random.default_rng(0), 1, "nothing", length=2_000)
    good = texts(lambda _: 1.0, np.random.default_rng(0), 1, "nothing", length=1_000)
    after_s = replay(controller(costs), traces, costs).seconds - replay(controller(costs), good, costs).seconds
    assert after_s < 1_060 * costs.pass_s(1)


def test_break_even_drafter_does_not_oscillate() -> None:
    costs = Costs(lambda rows: 1.0 + 0.5 * (rows > 1) + 0.9 * (rows > 2))
    outcome = replay(controller(costs), texts(lambda _: 0.5, np.random.default_rng(0), 30, "nothing"), costs)
    assert outcome.seconds < 1.02 * outcome.num_emitted_tokens


def test_noisy_measured_times_slow_adaptive_drafting_by_little(seed: int) -> None:
    random, costs = np.random.default_rng(seed), MACHINES["a draft model"]
    for chance in (0.1, 0.6):
        traces = texts(lambda _, chance=chance: chance, random, 12, "nothing")  # type: ignore[misc]
        noisy = replay(controller(costs), traces, costs, noise=lambda: 1.0 if random.random() < 0.7 else 3.0 * random.random() + 1.0)
        assert noisy.seconds < 1.08 * replay(controller(costs), traces, costs).seconds
        assert noisy.seconds < 1.03 * plain_seconds(traces, costs)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_wrong_profile_is_corrected_by_measured_passes(factor: float) -> None:
    """More rows take half as much longer, or twice, as was measured at load."""
    costs = MACHINES["dear rows"]
    wrong = ForwardProfile.from_samples({rows: 0.04 + factor * (seconds - 0.04) for rows, seconds in costs.table().seconds.items()})
    for chance in (0.2, 0.7):
        traces = texts(lambda _, chance=chance: chance, np.random.default_rng(3), 12, "nothing")  # type: ignore[misc]
        seconds = replay(controller(costs, table=wrong), traces, costs).seconds
        assert seconds < 1.02 * plain_seconds(traces, costs)
        assert seconds < 1.10 * best_fixed_seconds(traces, costs)


@pytest.mark.parametrize("machine", ["cheap rows", "a draft model"])
def test_useless_profile_stops_no_drafter_for_good(machine: str) -> None:
    """A program that ran while the passes were timed made all but those of one row look ten times as long."""
    costs = MACHINES[machine]
    wrong = ForwardProfile.from_samples({1: 0.04, 2: 0.4, 17: 0.5})
    traces = texts(lambda _: 0.8, np.random.default_rng(3), 24, "nothing", length=256)
    best, plain = best_fixed_seconds(traces, costs), plain_seconds(traces, costs)
    assert best < 0.5 * plain
    assert replay(controller(costs, table=wrong), traces, costs).seconds < 1.2 * best


def test_drafter_that_begins_to_pay_is_used_soon() -> None:
    """Accepted trials follow one another. One every hundred steps would take many texts to show that drafts pay now."""
    costs, random = MACHINES["a draft model"], np.random.default_rng(5)
    policy = controller(costs)
    replay(policy, texts(lambda _: 0.02, random, 30, "nothing", length=96), costs)
    usable = texts(lambda _: 0.85, random, 8, "nothing", length=96)
    assert replay(policy, usable, costs).seconds < 1.07 * best_fixed_seconds(usable, costs)


def test_sampled_drafts_are_sent_unchanged_by_the_policy() -> None:
    """To leave out those that seem unlikely would change the distribution that rejection keeps."""
    costs, policy = MACHINES["dear rows"], controller(MACHINES["dear rows"])
    (trace,) = texts(lambda _: 0.5, np.random.default_rng(0), 1, "too much", length=64)
    seen: list[DraftTree] = []
    prune_drafts = policy.prune_drafts

    def watched(batch: Any, max_rows: int | None) -> None:
        before = [rows.tree for rows in batch]
        prune_drafts(batch, max_rows)
        seen.extend(tree for tree, rows in zip(before, batch, strict=True) if tree is not rows.tree)

    policy.prune_drafts = watched  # type: ignore[method-assign]
    replay(policy, [trace], costs)
    assert seen
    seen.clear()
    probs: Any = {0: SimpleNamespace(is_within=lambda vocab_size: True)}
    drawn = [tree and replace(tree, draft_probs=probs) for tree in trace.guesses]
    replay(policy, [replace(trace, guesses=drawn)], costs, drawn=True)
    assert not seen


def test_drafter_without_measured_time_is_tried() -> None:
    """It may copy a text that is right: what is left out of its guesses says so within a few tokens."""
    costs = Costs(lambda rows: 0.060 * (1 + 0.65 * (rows - 1)), (2e-5, 0.0))
    known = Costs(lambda rows: 0.060 * (1 + 0.10 * (rows - 1)), (2e-5, 0.0))
    right = texts(lambda _: 1.0, np.random.default_rng(0), 1, "too much", length=64)
    outcome = replay(controller(costs, table=costs.table()), right, known)
    assert outcome.steps < 40


def test_unknown_drafter_starts_with_short_drafts() -> None:
    policy, costs = controller(MACHINES["cheap rows"]), MACHINES["cheap rows"]
    outcome = replay(policy, [Trace([1, 2, 3], [DraftTree.chain(0, [0] * 16, "player")] * 3)], costs)
    assert outcome.num_draft_tokens <= 2 * 4
    assert 0.5 < PRIOR_RATE < 0.7


def test_policy_replay_without_drafts_calls_no_drafter() -> None:
    costs = Costs(float, (9.0, 9.0))
    assert best_fixed([Trace([1, 2, 3], [None] * 3)], costs, deepest=0) == (0, 3.0)


def test_replay_of_a_fixed_length_equals_a_hand_computed_one() -> None:
    costs = Costs(float)
    trace = Trace([1, 2, 3, 4, 5], [DraftTree.chain(0, [token + 1 for token in range(at, at + 3)], "player") for at in range(5)])
    outcome = replay(FixedDraftLength(3), [trace], costs)
    assert (outcome.steps, outcome.num_accepted_tokens, outcome.seconds) == (2, 3, 4.0 + 1.0)
