"""Who fails again and again is asked ever more seldom, and at once after a success."""

import itertools
from collections.abc import Sequence

from paceline.speculation.backoff import LONGEST_BREAK, Backoff


def calls(backoff: Backoff, steps: int, failing: Sequence[int] | None = None) -> list[int]:
    """The steps in which somebody is asked who fails in those of `failing`, None = always."""
    asked = []
    for step in range(steps):
        if backoff.is_due():
            asked.append(step)
            backoff.note(failed=failing is None or step in failing)
    return asked


def test_breaks_grow_while_it_fails_up_to_a_longest() -> None:
    asked = calls(Backoff(), 1000)
    breaks = [later - earlier - 1 for earlier, later in itertools.pairwise(asked)]
    assert breaks[:7] == [0, 1, 3, 7, 15, 31, 63]
    assert set(breaks[7:]) == {LONGEST_BREAK}


def test_a_single_failure_costs_no_break_and_a_success_ends_all_breaks() -> None:
    assert calls(Backoff(), 10, failing=(3, 7)) == list(range(10))
    asked = calls(Backoff(), 40, failing=range(8))
    assert asked == [0, 1, 3, 7, *range(15, 40)]
