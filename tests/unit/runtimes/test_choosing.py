"""Trees that the kernels choose are those of `speculation/tree_growth.py`, and their keys those of `sampling/noise.py`."""

import ctypes

import numpy as np
import pytest

from paceline.kv_cache.row_plan import TreeLayout
from paceline.runtimes.native.choosing import ChoiceMemory, layout_number
from paceline.runtimes.native.library import Choice, Wanted, kernels, kernels_path
from paceline.sampling.noise import Purpose, noise_key
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Guess, grow_tree

pytestmark = pytest.mark.skipif(kernels_path() is None, reason="no native kernels for this machine")


def random_guesses(random: np.random.Generator, num_contexts: int) -> list[list[Guess[int]]]:
    """By context, best first or in any order, with ties and zeros; each leads to a later context, as drafts do, or two to the same."""
    guesses: list[list[Guess[int]]] = []
    for context in range(num_contexts):
        count = int(random.integers(0, 6)) if context < num_contexts - 1 else 0
        shares = random.choice([0.0, 0.05, 0.1, 0.2, 0.5, 1.0, float(random.random())], count)
        tokens = random.choice(1000, count, replace=False)
        behind = random.integers(context + 1, num_contexts, count) if count else []
        guesses.append([(int(token), float(prob), "head", int(next_)) for token, prob, next_ in zip(tokens, shares, behind, strict=True)])
    return guesses


def chosen(guesses: list[list[Guess[int]]], budget: DraftBudget) -> tuple[DraftTree | None, int]:
    """What the kernels choose, and how many contexts they asked about."""
    flat = [guess for listed in guesses for guess in listed]
    ends = np.cumsum([len(listed) for listed in guesses]).astype(np.int32)
    firsts = np.array([0, *ends[:-1]], np.int32)
    tokens, behind = (np.array([guess[column] for guess in flat] or [0], np.int32) for column in (0, 3))
    probs = np.array([guess[1] for guess in flat] or [0.0])
    choice = Choice(*(array.ctypes.data for array in (firsts, ends, tokens, behind, probs)))
    memory = ChoiceMemory(choice)
    memory.make_room(budget.row_budget, 6 * budget.row_budget)
    wanted = Wanted(layout=layout_number(budget.layout), row_budget=budget.row_budget, most_depth=budget.max_depth)
    asked = kernels().choose_tree(ctypes.byref(choice), ctypes.byref(wanted))
    found = memory.found()
    return (None if found[0] == 1 else DraftTree.unpacked(99, found, "head")), asked


@pytest.mark.parametrize("layout", TreeLayout)
def test_a_chosen_tree_is_the_one_that_grows(layout: TreeLayout, seed: int, large_counts: bool) -> None:
    random = np.random.default_rng(seed)
    num_trees = num_branching = 0
    for _ in range(20_000 if large_counts else 1500):
        guesses = random_guesses(random, int(random.integers(1, 9)))
        budget = DraftBudget(int(random.integers(1, 20)), int(random.integers(0, 6)), layout)
        asked: list[int] = []

        def expand(context: int, guesses: list[list[Guess[int]]] = guesses, asked: list[int] = asked) -> list[Guess[int]]:
            asked.append(context)
            return guesses[context]

        expected = grow_tree(99, budget, 0, expand)
        found, num_asked = chosen(guesses, budget)
        assert num_asked == max(asked, default=-1) + 1
        if expected is None or found is None:
            assert found is expected
            continue
        found.check()
        for field in ("token_ids", "parents", "depths", "sources"):
            assert list(getattr(found, field)) == list(getattr(expected, field))
        num_trees += 1
        num_branching += list(found.parents) != list(range(-1, len(found.parents) - 1))
    assert num_trees > 600
    assert num_branching > 100 or layout is TreeLayout.CHAIN


def test_keys_are_those_of_the_noise(seed: int) -> None:
    token_key = kernels().token_key
    token_key.argtypes, token_key.restype = [ctypes.c_uint64] * 3, ctypes.c_uint64
    random = np.random.default_rng(seed)
    for most in (1 << 4, 1 << 32, (1 << 64) - 1):
        for _ in range(50):
            numbers = int(random.integers(0, most, dtype=np.uint64)), int(random.integers(0, 1 << 32)), int(random.integers(0, 1 << 40))
            assert token_key(*numbers) == noise_key(*numbers, Purpose.TOKEN)
