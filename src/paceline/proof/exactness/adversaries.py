"""Drafters that know what plain decoding says and try to change it: one is always wrong, one is right some of the time."""

from collections.abc import Sequence

import numpy as np

from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

_RIGHT = 0.65  # share of right guesses of the one that errs
_OUTSIDE = 0.1  # of its wrong guesses, those that are no token at all


class Answers:
    """What plain decoding says to each request of a case."""

    def __init__(self) -> None:
        self._token_ids: dict[Request, Sequence[int]] = {}

    def know(self, request: Request, token_ids: Sequence[int]) -> None:
        """Note the answer to a request."""
        self._token_ids[request] = token_ids

    def rest(self, request: Request) -> Sequence[int]:
        """What is still to come; empty where nothing is known."""
        return self._token_ids.get(request, ())[request.num_output_tokens :]

    def forget(self) -> None:
        """Know nothing any more."""
        self._token_ids.clear()


class WrongDrafter(Drafter):
    """Proposes tokens the target will not say: each one of the answer moved by some ids, as siblings where there is room."""

    name = "always wrong"

    def __init__(self, answers: Answers, vocab_size: int) -> None:
        self._answers, self._vocab_size = answers, vocab_size

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        return [self._tree(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def _tree(self, request: Request, budget: DraftBudget) -> DraftTree | None:
        rest = self._answers.rest(request)[: budget.max_tokens]
        if not rest or self._vocab_size < 2:
            return None
        tokens = [(token + 1) % self._vocab_size for token in rest]
        parents = list(range(len(tokens)))
        for distance in range(2, min(self._vocab_size, 1 + budget.row_budget - len(tokens))):
            tokens.append((rest[0] + distance) % self._vocab_size)
            parents.append(0)
        return DraftTree.grow(request.token_ids[-1], tokens, parents, self.name)


class ErringDrafter(Drafter):
    """Replays plain decoding with errors; where there is room for branches, as a tree in which any path may be the right one."""

    name = "sometimes right"

    def __init__(self, answers: Answers, vocab_size: int) -> None:
        self._answers, self._vocab_size = answers, vocab_size
        self._random = np.random.default_rng(0)

    def begin(self, seed: int) -> None:
        """Make the choices of a case."""
        self._random = np.random.default_rng(seed)

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        return [self._tree(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def _tree(self, request: Request, budget: DraftBudget) -> DraftTree | None:
        rest = self._answers.rest(request)
        depth = budget.max_tokens
        if depth < 1 or not rest:
            return None
        if budget.row_budget <= budget.max_depth + 1:
            tokens = [self._guess(rest, at) for at in range(min(depth, len(rest)))]
            return DraftTree.chain(request.token_ids[-1], tokens, self.name)
        return self._branching(request.token_ids[-1], rest, budget)

    def _branching(self, root: int, rest: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Nodes under random parents; more often than not the last one goes on."""
        tokens, parents, depths = list[int](), list[int](), [0]
        for node in range(1, budget.row_budget):
            parent = node - 1 if self._random.random() < 0.6 else int(self._random.integers(0, node))
            if depths[parent] >= budget.max_depth:
                parent = 0
            parents.append(parent)
            depths.append(depths[parent] + 1)
            tokens.append(self._guess(rest, depths[node] - 1))
        return DraftTree.grow(root, tokens, parents, self.name)

    def _guess(self, rest: Sequence[int], at: int) -> int:
        if at < len(rest) and self._random.random() < _RIGHT:
            return rest[at]
        if self._random.random() < _OUTSIDE:
            return self._vocab_size + int(self._random.integers(0, 8))
        return int(self._random.integers(0, self._vocab_size))
