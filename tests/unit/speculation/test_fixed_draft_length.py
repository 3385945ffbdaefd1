"""The fast simulation of fixed draft lengths agrees with the replay that defines it."""

import numpy as np
import pytest

from harness.fixed_draft_length import fixed_lengths
from harness.replay import Costs, Trace, best_fixed, made_up, replay
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.tree import DraftTree

COSTS = Costs(lambda rows: 0.03 * (1 + 0.4 * ((rows - 1) // 4)), (1e-3, 4e-3), (1e-4, 2e-5), 1e-4)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
def test_fixed_length_costs_of_synthetic_texts_equal_the_replay(chance: float, batch_size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    traces = [made_up(length, lambda _: chance, random) for length in (40, 1, 17, 30, 25, 8)]
    missing = [None if position % 3 == 0 else tree for position, tree in enumerate(traces[0].guesses)]
    traces.append(Trace(traces[0].token_ids, missing))
    seconds = fixed_lengths(traces, COSTS, batch_size=batch_size)
    best, best_s = best_fixed(traces, COSTS, batch_size=batch_size)
    assert seconds[0] == pytest.approx(best_fixed(traces, COSTS, batch_size=batch_size, deepest=0)[1])
    assert min(seconds) == pytest.approx(best_s)
    assert seconds[best] == pytest.approx(best_s)


def test_fixed_length_costs_of_trees_equal_the_replay() -> None:
    tree = DraftTree.from_nodes(0, [1, 2, 3, 4, 5], [0, 0, 1, 2, 3], "player")
    traces = [Trace([token for _ in range(9) for token in (1, 3, 2, 4)], [tree] * 36)]
    seconds = fixed_lengths(traces, COSTS, deepest=4)
    assert min(seconds) == pytest.approx(best_fixed(traces, COSTS, deepest=4)[1])
    for length in range(1, 5):
        assert seconds[length] == pytest.approx(replay(FixedDraftLength(length), traces, COSTS).seconds)
