"""Drafting with a head that guesses all positions at once: masked pairs stand where neither token nor feature is known.

Source: P-EAGLE (arXiv:2602.01469) and its code in speculators and vLLM. Deviations: those of `drafter.py`; trees are grown as there, where
the guesses of a level are the same behind each of its nodes, for they depend on the true pairs alone.

The pair of the root says what follows it, and k masked pairs behind it say what follows that, one after the other: each sees the true pairs
and the masked ones before it. Their rows are overwritten by true pairs later.
"""

from collections.abc import Sequence

import numpy as np

from paceline.drafters.pairs.cache import PairRows
from paceline.drafters.pairs.drafter import PairDrafter
from paceline.drafters.pairs.head import PairOutputs
from paceline.drafters.pairs.tree import GrowingDraft
from paceline.runtimes.ranking import DRAW, Draws
from paceline.sampling.noise import Purpose, noise_key
from paceline.speculation.tree import DraftTree


class ParallelDrafter(PairDrafter):
    """Drafts with a head that takes masked pairs: one pass a proposal."""

    def _describe(self) -> str:
        return super()._describe().removesuffix(")") + ", all positions in one pass)"

    def _num_drafted(self, depth: int, width: int) -> int:
        return depth - 1

    def _draft(self, group: Sequence[tuple[PairRows, GrowingDraft]]) -> dict[int, DraftTree | None]:
        if not group:
            return {}
        drafts = [draft for _, draft in group]
        num_masked = [draft.depth - 1 for draft in drafts]
        outputs = self._run_true([pairs for pairs, _ in group], wants_logits=True, num_masked=num_masked, draws=_draws(drafts))
        self._take_levels(drafts, outputs)
        return {id(draft.request): draft.finished(self.name) for draft in drafts}

    def _take_levels(self, drafts: Sequence[GrowingDraft], outputs: PairOutputs) -> None:
        """Hand out the rows, [depth] of each draft."""
        ranked, first = outputs.ranked(), 0
        for draft in drafts:
            for row in range(first, first + draft.depth):
                nodes = draft.frontier
                if not nodes:
                    break
                if draft.reads_ranks:
                    is_greedy = draft.request.params.is_greedy
                    guesses = [self._guesses.of_ranked(ranked[row], draft.width, is_greedy=is_greedy)] * len(nodes)
                else:
                    guesses = [
                        self._guesses.next_token(
                            draft.request,
                            draft.path(node),
                            outputs.logits[row],
                            draft.width,
                            needs_draft_probs=draft.budget.needs_draft_probs,
                        )
                        for node in nodes
                    ]
                draft.take(guesses, np.empty((len(nodes), 0), np.float32))  # no later pair takes their features
            first += draft.depth


def _draws(drafts: Sequence[GrowingDraft]) -> Draws | None:
    """How the tokens of all levels are drawn, by draft."""
    if not any(draft.is_drawn for draft in drafts):
        return None
    draws = np.zeros(sum(draft.depth for draft in drafts), DRAW)
    first = 0
    for draft in drafts:
        if draft.is_drawn:
            request = draft.request
            for level in range(draft.depth):
                key = noise_key(request.seed, request.sample_index, len(request.token_ids) + level, Purpose.TOKEN)
                draws[first + level] = (key, request.params.temperature, 0)
        first += draft.depth
    return draws
