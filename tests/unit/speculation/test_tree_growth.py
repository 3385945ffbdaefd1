"""Trees grow by the probability of a node's path, and keep to their budget."""

import numpy as np
import pytest

from paceline.speculation.drafter import DraftBudget
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Candidate, grow_tree

Path = tuple[int, ...]


def expand_by(probs_behind: dict[Path, dict[int, float]], asked: list[Path] | None = None):  # type: ignore[no-untyped-def]
    def expand(path: Path) -> list[Candidate[Path]]:
        if asked is not None:
            asked.append(path)
        return [(token, prob, (*path, token)) for token, prob in probs_behind.get(path, {}).items()]

    return expand


def paths(tree: DraftTree) -> list[Path]:
    tree.check()
    texts: list[Path] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        texts.append((*texts[parent], token) if parent >= 0 else ())
    return texts[1:]


PROBS: dict[Path, dict[int, float]] = {(): {1: 0.6, 2: 0.3}, (1,): {3: 0.9}, (1, 3): {4: 0.9}, (1, 3, 4): {5: 0.1}}


@pytest.mark.parametrize(
    ("max_rows", "expected"),
    [
        (2, [(1,)]),
        (4, [(1,), (1, 3), (1, 3, 4)]),
        (5, [(1,), (2,), (1, 3), (1, 3, 4)]),
        (6, [(1,), (2,), (1, 3), (1, 3, 4), (1, 3, 4, 5)]),
    ],
)
def test_tree_growth_adds_the_most_probable_paths(max_rows: int, expected: list[Path]) -> None:
    tree = grow_tree(9, DraftBudget(max_rows, 8), (), expand_by(PROBS), "drafter")
    assert tree is not None
    assert paths(tree) == expected
    assert list(tree.sources[1:]) == ["drafter"] * len(expected)
    assert tree.token_ids[0] == 9


def test_tree_growth_is_bounded_by_depth_and_probability() -> None:
    asked: list[Path] = []
    tree = grow_tree(9, DraftBudget(20, 2), (), expand_by(PROBS, asked), "drafter", min_path_prob=0.5)
    assert tree is not None
    assert paths(tree) == [(1,), (1, 3)]
    assert asked == [(), (1,)]


def test_tree_growth_stops_with_the_last_row() -> None:
    probs_behind: dict[Path, dict[int, float]] = {(): {1: 0.3, 2: 0.28}, (1,): {3: 0.4}, (1, 3): {4: 0.9}, (2,): {5: 0.1}}
    for max_rows, expected, last_asked in ((3, [(1,), (2,)], [(), (1,)]), (4, [(1,), (2,), (1, 3)], [(), (1,), (2,)]), (1, None, [])):
        asked: list[Path] = []
        tree = grow_tree(9, DraftBudget(max_rows, 8), (), expand_by(probs_behind, asked), "drafter")
        assert (None if tree is None else paths(tree)) == expected
        assert asked == last_asked


@pytest.mark.parametrize(("max_rows", "max_depth", "probs_behind"), [(1, 4, PROBS), (5, 0, PROBS), (5, 4, {}), (5, 4, {(): {1: 0.0}})])
def test_tree_growth_without_candidates_or_rows_returns_no_tree(
    max_rows: int, max_depth: int, probs_behind: dict[Path, dict[int, float]]
) -> None:
    assert grow_tree(9, DraftBudget(max_rows, max_depth), (), expand_by(probs_behind), "drafter") is None


def test_random_grown_trees_stay_within_their_budget(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(150):
        probs_behind: dict[Path, dict[int, float]] = {}
        open_paths: list[Path] = [()]
        for path in open_paths:
            if len(path) < 5:
                probs = random.dirichlet([0.3] * 4)[: random.integers(0, 4)]
                probs_behind[path] = {token: float(prob) for token, prob in enumerate(probs)}
                open_paths += [(*path, token) for token in probs_behind[path]]
        budget = DraftBudget(int(random.integers(1, 20)), int(random.integers(0, 6)))
        tree = grow_tree(9, budget, (), expand_by(probs_behind), "drafter")
        if tree is not None:
            assert set(paths(tree)) <= set(open_paths)
            assert len(tree.parents) <= budget.max_rows
            assert max(tree.depths) <= budget.max_depth
            assert tree.trim(vocab_size=10, max_depth=budget.max_depth, max_rows=budget.max_rows) is tree
