"""Drafters for exactness tests: they are given the tokens of plain decoding and propose right, wrong and malformed drafts.

`paceline prove` and the project's own tests share them.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

Answers: TypeAlias = Mapping[tuple[tuple[int, ...], int], Sequence[int]]
"""Output tokens of plain decoding, by prompt and seed."""

RIGHT_SHARE = 0.65
_OUT_OF_RANGE_SHARE = 0.1  # share of the wrong tokens whose id is out of range
_EXTEND_SHARE = 0.6  # share of new nodes that extend the previous node


class AnswerDrafter(Drafter):
    """Drafts with knowledge of the output of plain decoding."""

    def __init__(self, answers: Answers, vocab_size: int, seed: int = 0) -> None:
        self._answers, self._vocab_size = answers, vocab_size
        self._random = np.random.default_rng(seed)

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        return [self._tree(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    @abstractmethod
    def _tree(self, request: Request, budget: DraftBudget) -> DraftTree | None: ...

    def _upcoming(self, request: Request) -> Sequence[int]:
        """Return the tokens that plain decoding emits next; empty where they are not known."""
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        return self._answers.get((prompt, request.seed), ())[request.num_output_tokens :]


class WrongDrafter(AnswerDrafter):
    """Drafts only tokens that the target will reject: a chain of shifted ids, and siblings of its first token if rows are left."""

    name = "always_wrong"

    def _tree(self, request: Request, budget: DraftBudget) -> DraftTree | None:
        upcoming = self._upcoming(request)[: budget.max_tokens]
        if not upcoming or self._vocab_size < 2:
            return None
        tokens = [(token + 1) % self._vocab_size for token in upcoming]
        parents = list(range(len(tokens)))
        for distance in range(2, min(self._vocab_size, 1 + budget.max_rows - len(tokens))):
            tokens.append((upcoming[0] + distance) % self._vocab_size)
            parents.append(0)
        return DraftTree.from_nodes(request.token_ids[-1], tokens, parents, self.name)


class RandomDrafter(AnswerDrafter):
    """Drafts random trees of right and wrong tokens: duplicate siblings, ids out of range, several paths that may be accepted.

    Chains where the budget has no rows for branches.
    """

    name = "random_tree"

    def reseed(self, seed: int) -> None:
        """Restart the random numbers, so that a case can be repeated."""
        self._random = np.random.default_rng(seed)

    def _tree(self, request: Request, budget: DraftBudget) -> DraftTree | None:
        upcoming = self._upcoming(request)
        if budget.max_tokens < 1 or not upcoming:
            return None
        if budget.max_rows <= budget.max_depth + 1:
            tokens = [self._token(upcoming, index) for index in range(min(budget.max_tokens, len(upcoming)))]
            return DraftTree.chain(request.token_ids[-1], tokens, self.name)
        return self._grow(request.token_ids[-1], upcoming, budget.max_rows - 1, budget.max_depth)

    def _grow(self, root: int, upcoming: Sequence[int], num_drafts: int, max_depth: int) -> DraftTree:
        tokens, parents, depths = list[int](), list[int](), [0]
        for node in range(1, num_drafts + 1):
            parent = node - 1 if self._random.random() < _EXTEND_SHARE else int(self._random.integers(0, node))
            if depths[parent] >= max_depth:
                parent = 0
            parents.append(parent)
            depths.append(depths[parent] + 1)
            tokens.append(self._token(upcoming, depths[node] - 1))
        return DraftTree.from_nodes(root, tokens, parents, self.name)

    def _token(self, upcoming: Sequence[int], index: int) -> int:
        if index < len(upcoming) and self._random.random() < RIGHT_SHARE:
            return upcoming[index]
        if self._random.random() < _OUT_OF_RANGE_SHARE:
            return self._vocab_size + int(self._random.integers(0, 8))
        return int(self._random.integers(0, self._vocab_size))
