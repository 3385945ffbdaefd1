"""The fast simulation of fixed draft lengths agrees with the replay that defines it."""

import numpy as np
import pytest

from harness.fixed_draft_length import fixed_length_seconds
from harness.replay import Costs, Trace, best_fixed, made_up
from paceline.speculation.tree import DraftTree

COSTS = Costs(lambda rows: 0.03 * (1 + 0.4 * ((rows - 1) // 4)), (1e-3, 4e-3), (1e-4, 2e-5), 1e-4)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
def test_fixed_length_seconds_of_made_up_texts_equal_the_replay(chance: float, batch_size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    traces = [made_up(length, lambda _: chance, random) for length in (40, 1, 17, 30, 25, 8)]
    missing = [None if position % 3 == 0 else tree for position, tree in enumerate(traces[0].guesses)]
    traces.append(Trace(traces[0].token_ids, missing))
    seconds = fixed_length_seconds(traces, COSTS, batch_size=batch_size)
    best, best_s = best_fixed(traces, COSTS, batch_size=batch_size)
    assert seconds[0] == pytest.approx(best_fixed(traces, COSTS, batch_size=batch_size, deepest=0)[1])
    assert min(seconds) == pytest.approx(best_s)
    assert seconds[best] == pytest.approx(best_s)


def test_fixed_length_seconds_of_a_draft_with_branches_is_an_error() -> None:
    tree = DraftTree.grow(0, [1, 2, 3], [0, 0, 1], "player")
    with pytest.raises(ValueError, match="branches"):
        fixed_length_seconds([Trace([1, 2], [tree, tree])], COSTS)
