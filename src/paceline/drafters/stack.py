"""Several drafters, asked in order: who comes later guesses only where those before had no guess."""

from collections.abc import Sequence

from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter, DrafterNeeds
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree


class StackDrafter(Drafter):
    """The first guess wins; a later drafter costs nothing in steps where an earlier one has the answer."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self.name = "+".join(drafter.name for drafter in drafters)
        self.cache_bytes_per_token = sum(drafter.cache_bytes_per_token for drafter in drafters)
        self.needs = DrafterNeeds(
            hidden_states=any(drafter.needs.hidden_states for drafter in drafters),
            layers=tuple(sorted({layer for drafter in drafters for layer in drafter.needs.layers})),
            prompt_rows=any(drafter.needs.prompt_rows for drafter in drafters),
        )

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        trees: list[DraftTree | None] = [None] * len(requests)
        for drafter in self._drafters:
            open_indices = [index for index, tree in enumerate(trees) if tree is None]
            if not open_indices:
                break
            guesses = drafter.propose([requests[i] for i in open_indices], [budgets[i] for i in open_indices])
            for index, tree in zip(open_indices, guesses, strict=True):
                trees[index] = tree
        return trees

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        for drafter in self._drafters:
            drafter.observe(rows)

    def fork(self, parent: Request, child: Request) -> None:
        for drafter in self._drafters:
            drafter.fork(parent, child)

    def release(self, request: Request) -> None:
        for drafter in self._drafters:
            drafter.release(request)

    def describe(self) -> str:
        return ", else ".join(drafter.describe() for drafter in self._drafters)
