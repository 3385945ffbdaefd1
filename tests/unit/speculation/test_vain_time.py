"""What thinking of a batch's guesses takes in vain stays a small share of its time, however dear it is."""

import numpy as np
import pytest

from harness.replay import Costs, Trace, controller, made_up, replay
from paceline.speculation.vain_time import FREE, OF_COPIES, OF_OTHERS, Limits, VainTime

SMALL = Costs(lambda rows: 0.0010 * (1 + 0.22 * (rows - 1)), (5e-5, 0.0), (8e-5, 2e-5), 1e-4)
"""A pass of a millisecond, beside which asking counts."""
SMALL_DRAFT = Costs(SMALL.pass_s, (3e-4, 3e-4), SMALL.host_s, SMALL.asking_s)


def vain_share(spent: float, limits: Limits, num_steps: int = 4_000) -> float:
    """The share of all time that is spent, where each time takes so much and one rests as told."""
    vain, step, total = VainTime(), 0, 0.0
    while step < num_steps:
        total += spent
        step += 1 + vain.add(step, spent, limits)
    return total / num_steps


@pytest.mark.parametrize("limits", [OF_COPIES, OF_OTHERS])
@pytest.mark.parametrize("spent", [0.001, 0.01, 0.05, 0.12, 0.24])
def test_little_of_all_time_is_spent_in_vain(spent: float, limits: Limits) -> None:
    assert vain_share(spent, limits) <= 2.0 * limits.share + FREE / 4_000


@pytest.mark.parametrize("limits", [OF_COPIES, OF_OTHERS])
def test_where_it_takes_next_to_nothing_nobody_rests(limits: Limits) -> None:
    vain = VainTime()
    assert not any(vain.add(step, 0.9 * limits.share, limits) for step in range(1_000))


def test_the_first_questions_are_free_and_the_longest_rest_is_bounded() -> None:
    for limits in (OF_COPIES, OF_OTHERS):
        vain = VainTime()
        assert vain.add(0, 9.0, limits) == 0, "one step says little"
        assert max(vain.add(step, 1.0, limits) for step in range(1, 100)) == limits.longest_rest


@pytest.mark.parametrize("limits", [OF_COPIES, OF_OTHERS])
def test_what_was_of_use_is_set_off_and_a_rest_wears_off(limits: Limits) -> None:
    vain = VainTime()
    for step in range(4):
        rest = vain.add(step, 1.0, limits)
    assert rest == limits.longest_rest
    assert vain.add(4, -1.0, limits) == 0
    for step in range(5, 9):
        vain.add(step, 1.0, limits)
    assert vain.add(1_000, 0.0, limits) == 0
    for step in range(1_001, 1_005):
        vain.add(step, 1.0, limits)
    vain.forget()
    assert vain.add(1_005, 0.5 * FREE, limits) == 0


def over_plain(costs: Costs, traces: list[Trace], batch_size: int) -> float:
    """Seconds of the controller over those without a drafter, of whole batches of texts of one length."""
    num_steps = len(traces) // batch_size * len(traces[0].token_ids)
    plain_s = num_steps * (costs.pass_s(batch_size) + batch_size * costs.host_s[0])
    return replay(controller(costs), traces, costs, batch_size=batch_size).seconds / plain_s


@pytest.mark.parametrize("batch_size", [4, 16])
@pytest.mark.parametrize("costs", [SMALL, SMALL_DRAFT], ids=["cheap guesses", "a draft model"])
def test_batches_of_a_small_model_lose_little(costs: Costs, batch_size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    traces = [made_up(96, lambda _: 0.0, random) for _ in range(6 * batch_size)]
    assert over_plain(costs, traces, batch_size) <= (1.013 if costs is SMALL else 1.028)


@pytest.mark.parametrize(("draft_s", "length"), [(SMALL.draft_s, 400), ((3e-4, 1e-4), 1_000)], ids=["cheap guesses", "a draft model"])
def test_batches_whose_guesses_become_right_are_soon_drafted_for(draft_s: tuple[float, float], length: int, seed: int) -> None:
    costs = Costs(lambda rows: 0.0010 * (1 + 0.05 * (rows - 1)), draft_s, SMALL.host_s, SMALL.asking_s)
    random = np.random.default_rng(seed)
    late = [made_up(length, lambda at: 0.0 if at < 100 else 1.0, random) for _ in range(4)]
    assert over_plain(costs, late, 4) <= 0.8
