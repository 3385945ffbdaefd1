"""Times that were measured while other programs held up the work mislead decisions for a while only."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from harness.replay import Costs, Outcome, controller, made_up, replay

SMALL = Costs(lambda rows: 0.0010 * (1 + 0.12 * (rows - 1)), (5e-5, 0.0), (8e-5, 2e-5), 1e-4)
"""A pass of a millisecond and a lookup drafter."""
SMALL_DRAFT = Costs(SMALL.pass_s, (3e-4, 3e-4), SMALL.host_s, SMALL.asking_s)


def copying(length: int, noise: Callable[[], float], chance: Callable[[int], float] = lambda _: 1.0) -> Outcome:
    """Four requests that copy, with every measured time multiplied by noise."""
    random = np.random.default_rng(0)
    traces = [made_up(length, chance, random, confident=lambda _: 0.9) for _ in range(4)]
    return replay(controller(SMALL), traces, SMALL, batch_size=4, noise=noise, other_noise=noise)


@pytest.mark.spread(0.4)
@pytest.mark.parametrize("share", [0.01, 0.03, 0.10])
@pytest.mark.parametrize("number", range(6))
def test_single_slow_calls_do_not_stop_drafting(share: float, number: int) -> None:
    random = np.random.default_rng(number)
    outcome = copying(1_500, lambda: random.uniform(5.0, 50.0) if random.random() < share else 1.0)
    assert outcome.steps < 300  # 95 on a quiet machine


@pytest.mark.parametrize("number", range(6))
def test_slow_start_is_forgotten_on_a_quiet_machine(number: int) -> None:
    """The costs measured then last for about 150 steps without drafts."""
    random, left = np.random.default_rng(number), [300]

    def noise() -> float:
        left[0] -= 1
        return random.uniform(1.0, 30.0) if left[0] > 0 else 1.0

    assert copying(1_500, noise).steps < 280


def test_batch_that_becomes_repetitive_again_is_drafted_soon() -> None:
    """Its guesses were wrong for long: once those that are compared with the text are right, that is out of date."""
    outcome = copying(3_000, lambda: 1.0, lambda at: 0.0 if 600 <= at < 1_000 else 1.0)
    assert outcome.steps < 850  # 400 of them in between


@pytest.mark.parametrize("slow", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("costs", [SMALL, SMALL_DRAFT], ids=["lookup", "draft model"])
def test_drafting_restarts_after_a_change_of_speed(slow: float, costs: Costs) -> None:
    """What draft tokens cost was not measured for long: it is taken to have changed as plain passes did."""
    policy = controller(costs)
    right, nothing = (made_up(400, lambda _: 0.9, np.random.default_rng(0), confident=lambda _: 0.9) for _ in range(2))
    nothing = replace(nothing, guesses=[None] * 400)
    replay(policy, [right], costs)
    replay(policy, [nothing], costs, noise=lambda: slow, other_noise=lambda: slow)
    replay(policy, [nothing], replace(costs, draft_s=(0.0, 0.0)))
    assert replay(policy, [right], costs).steps < 250


@pytest.mark.parametrize("slow", [5.0, 20.0])
@pytest.mark.parametrize("count", [3, 6, 12])
def test_slow_first_steps_do_not_stop_drafting_of_a_short_text(count: int, slow: float) -> None:
    """Memory and code are made ready in them."""
    left = [count]

    def noise() -> float:
        left[0] -= 1
        return slow if left[0] >= 0 else 1.0

    traces = [made_up(60, lambda _: 0.8, np.random.default_rng(1), confident=lambda chance: chance**0.5)]
    policy = controller(SMALL_DRAFT)
    assert replay(policy, traces, SMALL_DRAFT, other_noise=noise).steps < 35  # 59 where one slow step decides
