"""Drafters that try to change a token: one that knows the answer, one that is always wrong, one that proposes anything."""

from collections.abc import Mapping, Sequence

import numpy as np

from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

Answers = Mapping[tuple[tuple[int, ...], int], Sequence[int]]
"""(prompt, seed) -> the tokens plain decoding gave."""


class OracleDrafter(Drafter):
    """Proposes what plain decoding answered; each guess is right with probability `accuracy`, else another token."""

    name = "oracle"

    def __init__(self, answers: Answers, *, accuracy: float = 1.0, vocab_size: int = 0, seed: int = 0) -> None:
        self._answers = answers
        self._accuracy = accuracy
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        return [self._tree(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def _tree(self, request: Request, budget: DraftBudget) -> DraftTree | None:
        answer = self._answers[tuple(request.token_ids[: request.num_prompt_tokens]), request.seed]
        start = request.num_output_tokens
        drafts = list(answer[start : start + min(budget.max_depth, budget.row_budget - 1)])
        for index in range(len(drafts)):
            if self._accuracy < 1.0 and self._random.random() >= self._accuracy:
                drafts[index] = (drafts[index] + 1) % self._vocab_size
        return DraftTree.chain(request.token_ids[-1], drafts, self.name) if drafts else None


class WrongDrafter(Drafter):
    """Proposes tokens the target will not say: each answer shifted by one id."""

    name = "wrong"

    def __init__(self, answers: Answers, vocab_size: int) -> None:
        self._answers = answers
        self._vocab_size = vocab_size

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        trees: list[DraftTree | None] = []
        for request, budget in zip(requests, budgets, strict=True):
            answer = self._answers[tuple(request.token_ids[: request.num_prompt_tokens]), request.seed]
            rest = list(answer[request.num_output_tokens :])[: budget.max_depth]
            trees.append(DraftTree.chain(request.token_ids[-1], [(token + 1) % self._vocab_size for token in rest], self.name))
        return trees


class ChaosDrafter(Drafter):
    """Random trees of answer tokens and noise: duplicates, EOS, ids out of range, nothing, wrong roots, sometimes an exception."""

    name = "chaos"

    def __init__(self, answers: Answers, vocab_size: int, *, seed: int = 0, eos: int = 0, raises: bool = True) -> None:
        self._answers = answers
        self._vocab_size = vocab_size
        self._eos = eos
        self._raises = raises
        self._random = np.random.default_rng(seed)

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        if self._raises and self._random.random() < 0.02:
            raise RuntimeError("chaos")
        return [self._tree(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def _tree(self, request: Request, budget: DraftBudget) -> DraftTree | None:
        random = self._random
        size = int(random.integers(0, budget.row_budget + 4))
        if size == 0:
            return None if random.random() < 0.5 else DraftTree.root_only(request.token_ids[-1])
        answer = self._answers[tuple(request.token_ids[: request.num_prompt_tokens]), request.seed]
        parents: list[int] = []
        tokens: list[int] = []
        depths = [0]
        for node in range(1, size + 1):
            parent = node - 1 if random.random() < 0.6 else int(random.integers(0, node))
            parents.append(parent)
            depths.append(depths[parent] + 1)
            at = request.num_output_tokens + depths[node] - 1
            right = answer[at] if at < len(answer) else self._eos
            noise = int(random.choice([self._eos, -1, self._vocab_size, self._vocab_size + 7, random.integers(0, self._vocab_size)]))
            tokens.append(right if random.random() < 0.65 else noise)
        root = request.token_ids[-1] if random.random() < 0.9 else 0
        return DraftTree.grow(root, tokens, parents, self.name)
