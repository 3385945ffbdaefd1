"""Whose turn it is, and how much fits into the time."""

import pytest

from paceline.benchmarking.run import Size, fit_size, rotate_modes

EVERYTHING = frozenset({"rounds", "tokens", "prompts"})


def test_rotate_modes_puts_each_mode_first_equally_often() -> None:
    assert [rotate_modes("ABC", turn) for turn in range(4)] == [list("ABC"), list("BCA"), list("CAB"), list("ABC")]
    assert rotate_modes([], 3) == []


def test_fit_size_keeps_a_size_that_fits_the_time_limit() -> None:
    size = Size(5, 96, 4)
    assert fit_size(size, frozenset(), 6 * 2 * 4 * 1.0, turn_s=1.0, num_cells=2) == size


def test_fit_size_reduces_prompts_then_rounds_then_tokens() -> None:
    """A turn takes a second, there are two cells: 48 seconds."""
    size = Size(5, 96, 4)
    assert fit_size(size, frozenset(), 24, turn_s=1.0, num_cells=2) == Size(5, 96, 2)
    assert fit_size(size, frozenset(), 10, turn_s=1.0, num_cells=2) == Size(4, 96, 1)
    assert fit_size(size, frozenset(), 4, turn_s=1.0, num_cells=2) == Size(3, 48, 1)
    assert fit_size(size, frozenset(), 0, turn_s=1.0, num_cells=2) == Size(3, 32, 1)


@pytest.mark.parametrize("name", sorted(EVERYTHING))
def test_fit_size_keeps_values_set_by_the_user(name: str) -> None:
    size = Size(5, 96, 4)
    assert getattr(fit_size(size, frozenset({name}), 0, turn_s=1.0, num_cells=2), name) == getattr(size, name)


def test_run_time_estimate_counts_batches_not_prompts() -> None:
    assert Size(1, 96, 8).seconds(1.0, 96, num_cells=1, batch_size=8) == 2.0
    assert Size(1, 96, 9).seconds(1.0, 96, num_cells=1, batch_size=8) == 4.0
