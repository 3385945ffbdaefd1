"""The count_steps over recorded texts counts steps as decoding does."""

import numpy as np
import pytest

from paceline.training.trainer import count_steps


@pytest.mark.parametrize(
    ("hits", "steps"),
    [
        ([[0, 0], [0, 0], [0, 0], [0, 0]], 4),  # plain decoding
        ([[1, 1], [1, 1], [1, 1], [1, 1]], 2),  # the prompt's pass, then one step with two accepted tokens and one more
        ([[0, 0], [0, 1], [1, 0], [0, 0]], 3),  # a right second token after a wrong first one is not accepted
        ([[0, 0]], 1),
    ],
)
def test_acceptance_estimate_counts_steps_of_a_recorded_text(hits: list[list[int]], steps: int) -> None:
    assert count_steps(np.array(hits, bool)) == (steps, len(hits))
