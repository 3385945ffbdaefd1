"""Whose turn it is, and how much fits into the time."""

import pytest

from paceline.benchmarking.run import Size, fit_size, rotate_modes

EVERYTHING = frozenset({"rounds", "tokens", "prompts"})


def test_every_mode_is_first_once_in_as_many_turns_as_there_are_modes() -> None:
    assert [rotate_modes("ABC", turn) for turn in range(4)] == [list("ABC"), list("BCA"), list("CAB"), list("ABC")]
    assert rotate_modes([], 3) == []


def test_what_fits_stays() -> None:
    size = Size(5, 96, 4)
    assert fit_size(size, frozenset(), 6 * 2 * 4 * 1.0, turn_s=1.0, num_cells=2) == size


def test_prompts_go_first_then_rounds_then_tokens() -> None:
    """A turn takes a second, there are two cells: 48 seconds."""
    size = Size(5, 96, 4)
    assert fit_size(size, frozenset(), 24, turn_s=1.0, num_cells=2) == Size(5, 96, 2)
    assert fit_size(size, frozenset(), 10, turn_s=1.0, num_cells=2) == Size(4, 96, 1)
    assert fit_size(size, frozenset(), 4, turn_s=1.0, num_cells=2) == Size(3, 48, 1)
    assert fit_size(size, frozenset(), 0, turn_s=1.0, num_cells=2) == Size(3, 32, 1)


@pytest.mark.parametrize("name", sorted(EVERYTHING))
def test_what_the_user_gave_stays(name: str) -> None:
    size = Size(5, 96, 4)
    assert getattr(fit_size(size, frozenset({name}), 0, turn_s=1.0, num_cells=2), name) == getattr(size, name)


def test_batches_take_a_turn_each() -> None:
    assert Size(1, 96, 8).seconds(1.0, 96, num_cells=1, batch_size=8) == 2.0
    assert Size(1, 96, 9).seconds(1.0, 96, num_cells=1, batch_size=8) == 4.0
