"""Times that were measured while other programs held up the work mislead decisions for a while only."""

from collections.abc import Callable

import numpy as np
import pytest

from harness.replay import Costs, Outcome, controller, made_up, replay
from paceline.speculation.stats import PlainReason

SMALL = Costs(lambda rows: 0.0010 * (1 + 0.12 * (rows - 1)), (5e-5, 1e-6), (8e-5, 2e-5), 1e-4)
"""A pass of a millisecond and guesses that cost next to nothing."""
SMALL_DRAFT = Costs(SMALL.pass_s, (3e-4, 3e-4), SMALL.host_s, SMALL.asking_s)


def copying(length: int, noise: Callable[[], float], chance: Callable[[int], float] = lambda _: 1.0) -> Outcome:
    """Four requests that copy, with every measured time multiplied by noise."""
    random = np.random.default_rng(0)
    traces = [made_up(length, chance, random, confident=lambda _: 0.9) for _ in range(4)]
    return replay(controller(SMALL), traces, SMALL, batch_size=4, noise=noise, other_noise=noise)


@pytest.mark.parametrize("share", [0.01, 0.03, 0.10])
@pytest.mark.parametrize("number", range(6))
def test_single_slow_calls_keep_nobody_from_copying(share: float, number: int) -> None:
    random = np.random.default_rng(number)
    outcome = copying(1_500, lambda: random.uniform(5.0, 50.0) if random.random() < share else 1.0)
    assert outcome.steps < 300  # 95 on a quiet machine


@pytest.mark.parametrize("number", range(6))
def test_a_start_on_a_busy_machine_is_forgotten_once_it_is_quiet(number: int) -> None:
    random, left = np.random.default_rng(number), [300]

    def noise() -> float:
        left[0] -= 1
        return random.uniform(1.0, 30.0) if left[0] > 0 else 1.0

    assert copying(1_500, noise).steps < 280


def test_a_batch_that_copies_again_is_soon_drafted_for() -> None:
    """Its guesses were wrong for long: once those that are compared with the text are right, that is out of date."""
    outcome = copying(3_000, lambda: 1.0, lambda at: 0.0 if 600 <= at < 1_000 else 1.0)
    assert outcome.steps < 850  # 400 of them in between


def test_plain_passes_that_were_held_up_do_not_make_drafting_look_worthwhile_for_long() -> None:
    random, left = np.random.default_rng(0), [150]

    def noise() -> float:
        left[0] -= 1
        return 3.0 if left[0] > 0 else 1.0

    traces = [made_up(300, lambda _: 0.7, random, confident=lambda chance: chance**0.5) for _ in range(16)]
    policy = controller(SMALL_DRAFT)
    policy.know_time("player", 3e-4)
    outcome = replay(policy, traces, SMALL_DRAFT, batch_size=4, noise=noise)
    assert outcome.plain[PlainReason.COMPARED] >= 3
    assert policy.costs.at(4) == pytest.approx(SMALL.pass_s(4)), "it is known again what they take"
    assert outcome.drafted < 2_300


@pytest.mark.parametrize("slow", [5.0, 20.0])
@pytest.mark.parametrize("count", [3, 6, 12])
def test_slow_first_steps_do_not_leave_a_short_text_without_guesses(count: int, slow: float) -> None:
    """Memory and code are made ready in them."""
    left = [count]

    def noise() -> float:
        left[0] -= 1
        return slow if left[0] >= 0 else 1.0

    traces = [made_up(60, lambda _: 0.8, np.random.default_rng(1), confident=lambda chance: chance**0.5)]
    policy = controller(SMALL_DRAFT)
    policy.know_time("player", 3e-4)
    assert replay(policy, traces, SMALL_DRAFT, other_noise=noise).steps < 35  # 59 where one slow step decides
