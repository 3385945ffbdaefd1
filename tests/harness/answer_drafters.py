"""Drafters that are given the tokens of plain decoding: one with a given share of right tokens, one that breaks the interface."""

from collections.abc import Sequence

from paceline.proof.exactness.adversaries import RIGHT_SHARE, AnswerDrafter, Answers, RandomDrafter
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

_EXCEPTION_SHARE = 0.02


class OracleDrafter(AnswerDrafter):
    """Drafts chains of the tokens of plain decoding; each is right with probability `accuracy`."""

    name = "oracle"

    def __init__(self, answers: Answers, *, accuracy: float = 1.0, vocab_size: int = 0, seed: int = 0) -> None:
        super().__init__(answers, vocab_size, seed)
        self._accuracy = accuracy

    def _tree(self, request: Request, budget: DraftBudget) -> DraftTree | None:
        drafts = list(self._upcoming(request)[: budget.max_tokens])
        for index in range(len(drafts)):
            if self._accuracy < 1.0 and self._random.random() >= self._accuracy:
                drafts[index] = (drafts[index] + 1) % self._vocab_size
        return DraftTree.chain(request.token_ids[-1], drafts, self.name) if drafts else None


class ChaosDrafter(RandomDrafter):
    """Breaks the drafter interface too: trees above the budget, wrong roots, end tokens, negative ids, exceptions."""

    name = "chaos"

    def __init__(self, answers: Answers, vocab_size: int, *, seed: int = 0, eos: int = 0, raises: bool = True) -> None:
        super().__init__(answers, vocab_size, seed)
        self._eos, self._raises = eos, raises

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        if self._raises and self._random.random() < _EXCEPTION_SHARE:
            raise RuntimeError("chaos")
        return super().propose(requests, budgets)

    def _tree(self, request: Request, budget: DraftBudget) -> DraftTree | None:
        num_drafts = int(self._random.integers(0, budget.max_rows + 4))
        if num_drafts == 0:
            return None if self._random.random() < 0.5 else DraftTree.root_only(request.token_ids[-1])
        root = request.token_ids[-1] if self._random.random() < 0.9 else 0
        return self._grow(root, self._upcoming(request), num_drafts, max_depth=num_drafts)

    def _token(self, upcoming: Sequence[int], index: int) -> int:
        if self._random.random() < RIGHT_SHARE:
            return upcoming[index] if index < len(upcoming) else self._eos
        wrong = [self._eos, -1, self._vocab_size, self._vocab_size + 7, int(self._random.integers(0, self._vocab_size))]
        return wrong[int(self._random.integers(len(wrong)))]
