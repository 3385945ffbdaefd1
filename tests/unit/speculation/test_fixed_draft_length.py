"""The fast simulation of fixed draft lengths agrees with the replay that defines it."""

from pathlib import Path

import numpy as np
import pytest

from harness.fixed_draft_length import fixed_lengths
from harness.recorded_traces import FOLDER, load_traces, write_traces
from harness.replay import Costs, Trace, best_fixed, made_up, replay
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.tree import DraftTree

COSTS = Costs(lambda rows: 0.03 * (1 + 0.4 * ((rows - 1) // 4)), (1e-3, 4e-3), (1e-4, 2e-5), 1e-4)


@pytest.fixture(scope="module")
def traces() -> dict[str, list[Trace]]:
    return load_traces()


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
def test_fixed_length_costs_of_synthetic_texts_equal_the_replay(chance: float, batch_size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    traces = [made_up(length, lambda _: chance, random) for length in (40, 1, 17, 30, 25, 8)]
    missing = [None if position % 3 == 0 else tree for position, tree in enumerate(traces[0].guesses)]
    traces.append(Trace(traces[0].token_ids, missing))
    seconds = [one.seconds for one in fixed_lengths(traces, COSTS, batch_size=batch_size)]
    best, best_s = best_fixed(traces, COSTS, batch_size=batch_size)
    assert seconds[0] == pytest.approx(best_fixed(traces, COSTS, batch_size=batch_size, deepest=0)[1])
    assert min(seconds) == pytest.approx(best_s)
    assert seconds[best] == pytest.approx(best_s)


@pytest.mark.parametrize("name", ["mini/suffix/T0.8/json", "mini/draft_model/T0/code", "smollm2/ngram/T0/rewriting"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_fixed_length_costs_of_recorded_texts_equal_the_replay(name: str, batch_size: int, traces: dict[str, list[Trace]]) -> None:
    own = traces[name][:3]
    found = fixed_lengths(own, COSTS, batch_size=batch_size, deepest=6)
    assert min(one.seconds for one in found) == pytest.approx(best_fixed(own, COSTS, batch_size=batch_size, deepest=6)[1])
    assert found[3].mean_s == pytest.approx(replay(FixedDraftLength(3), own, COSTS, batch_size=batch_size).mean_s)


def test_fixed_length_costs_of_trees_equal_the_replay() -> None:
    tree = DraftTree.from_nodes(0, [1, 2, 3, 4, 5], [0, 0, 1, 2, 3], "player")
    traces = [Trace([token for _ in range(9) for token in (1, 3, 2, 4)], [tree] * 36)]
    seconds = [one.seconds for one in fixed_lengths(traces, COSTS, deepest=4)]
    assert min(seconds) == pytest.approx(best_fixed(traces, COSTS, deepest=4)[1])
    for length in range(1, 5):
        assert seconds[length] == pytest.approx(replay(FixedDraftLength(length), traces, COSTS).seconds)


def test_recorded_traces_are_written_and_read_as_they_were(tmp_path: Path, traces: dict[str, list[Trace]]) -> None:
    name = "mini/suffix/T0.8/json"
    write_traces(tmp_path / "again.json.gz", {name: traces[name]})
    again = load_traces(tmp_path)[name]
    assert again == traces[name]
    trees = [tree for trace in traces[name] for tree in trace.guesses if tree is not None]
    assert [tree.confidences for trace in again for tree in trace.guesses if tree is not None] == [tree.confidences for tree in trees]
    assert any(tree.tree_depth < tree.num_draft_tokens for tree in trees)


def test_recorded_traces_take_less_than_400_kb() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 400_000
