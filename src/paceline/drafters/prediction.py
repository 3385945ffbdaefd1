"""Drafts from a text that the request expects the output to repeat: a file to be edited, an answer to be corrected.

After a mismatch the drafter realigns: it looks for the position in the prediction at which the output continues. Several strategies may
each find one; the one that has been right most often in this request is used.

Source: OpenAI's "Predicted Outputs" as documented; Saxena 2023, "Prompt Lookup Decoding", for matching by the last tokens.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.speculation.draft_length.acceptance import match_confidence
from paceline.speculation.drafter import MAX_CATCH_UP_TOKENS, DraftBudget, Drafter, DrafterTraits, RequestState
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

MATCH_LENGTHS = (8, 4, 2)
"""Numbers of the output's last tokens that are searched in the prediction, longest first."""
NUM_NEARBY_POSITIONS = 16  # positions after a mismatch at which one matching token is enough to realign
MAX_SUBSTITUTED_TOKENS = 2  # maximum number of output tokens assumed to replace as many predicted ones
NUM_PRIOR_MATCHES = 2  # matching tokens that a new prediction is credited with
_PRIOR_TRIALS = 4.0  # number of trials that the prior accuracy of 0.5 counts for


@dataclass(slots=True)
class _RealignmentStrategy:
    """A way to realign, and how often the token that it predicted was correct."""

    num_tried: int = 0
    num_correct: int = 0

    @property
    def accuracy(self) -> float:
        return (self.num_correct + 0.5 * _PRIOR_TRIALS) / (self.num_tried + _PRIOR_TRIALS)


class PredictedText:
    """A predicted text, and the position in it at which the output continues.

    After a mismatch, realign by (a) the longest suffix match, (b) a nearby occurrence of the token, or (c) assuming a one-to-one
    substitution; use whichever has been right most often.

    Example: predicted [1, 2, 3, 4, 5, 6], output 1 2 9: by (c) 9 replaces 3, and 4 is next. Output 1 2 9 8 5: by (b) 6 is next.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._ends: list[dict[tuple[int, ...], list[int]]] = []  # by match length, shortest first; made when first needed
        self.num_read = 0
        self._tail: list[int] = []  # last output tokens, as many as the longest match needs
        self._anchor = 0  # predicted position after the last matching token
        self._num_unmatched = 0  # output tokens since then
        self.num_matched = 0  # length of the last run of matching output tokens
        self._position: int | None = 0  # predicted position of the next output token; None = unknown
        self._suffix, self._nearby, self._substitution = _RealignmentStrategy(), _RealignmentStrategy(), _RealignmentStrategy()
        self._indexed_anchor, self._position_after = -1, dict[int, int]()  # by token, near the anchor
        self._found: list[tuple[_RealignmentStrategy, int]] = []  # position that each strategy found after the last mismatch

    def observe_tokens(self, token_ids: Sequence[int]) -> None:
        """Advance by the next output tokens, and realign after a mismatch."""
        for token in token_ids:
            self._tail = [*self._tail[1 - MATCH_LENGTHS[0] :], token]
            for strategy, position in self._found:
                strategy.num_tried += 1
                strategy.num_correct += self._has_token_at(position, token)
            if self._position is not None and self._has_token_at(self._position, token):
                self._position = self._anchor = self._position + 1
                self._num_unmatched, self.num_matched, self._found = 0, self.num_matched + 1, []
            else:
                self.num_matched = 0
                self._num_unmatched += 1
                self._found = self._realign(token)
                self._position = max(self._found, key=lambda one: one[0].accuracy)[1] if self._found else None
        self.num_read += len(token_ids)

    @property
    def has_next(self) -> bool:
        """Whether there is a predicted next token."""
        return self._position is not None and self._position < len(self._token_ids)

    def propose(self, num_draft_tokens: int) -> Sequence[int]:
        """Return the predicted next tokens; empty at the end of the prediction, or if the output does not match it."""
        return () if self._position is None else self._token_ids[self._position : self._position + num_draft_tokens]

    def confidence(self, count: int) -> list[float]:
        """Return the confidence in the first `count` tokens of a proposal."""
        probs = match_confidence(NUM_PRIOR_MATCHES + self.num_matched, count)
        if self._found and probs:
            probs[0] = max(strategy.accuracy for strategy, _ in self._found)
        return probs

    def _has_token_at(self, position: int, token: int) -> bool:
        return position < len(self._token_ids) and self._token_ids[position] == token

    def _realign(self, token: int) -> list[tuple[_RealignmentStrategy, int]]:
        """Return the positions at which the output may continue after `token`, its last one."""
        found = []
        position = self._position_after_longest_suffix()
        if position is not None:
            found.append((self._suffix, position))
        if self._indexed_anchor != self._anchor:
            ahead = list(enumerate(self._token_ids[self._anchor : self._anchor + NUM_NEARBY_POSITIONS], self._anchor + 1))
            self._indexed_anchor, self._position_after = self._anchor, {one: position for position, one in reversed(ahead)}
        near = self._position_after.get(token)
        if near is not None:
            found.append((self._nearby, near))
        if self._num_unmatched <= MAX_SUBSTITUTED_TOKENS:
            found.append((self._substitution, self._anchor + self._num_unmatched))
        return found

    def _position_after_longest_suffix(self) -> int | None:
        """Return the position after the longest suffix of the output in the prediction; of several, the first after the anchor."""
        best = None
        for index, length in enumerate(reversed(MATCH_LENGTHS)):
            if index == len(self._ends):
                self._ends.append(_index_ngrams(self._token_ids, length))
            ends = self._ends[index].get(tuple(self._tail[-length:])) if len(self._tail) >= length else None
            if not ends:  # if a suffix does not occur, no longer suffix does
                break
            first = bisect_left(ends, self._anchor)
            best = ends[first] if first < len(ends) else ends[-1]
        return best


def _index_ngrams(token_ids: Sequence[int], length: int) -> dict[tuple[int, ...], list[int]]:
    """Return for each n-gram of `length` tokens the positions that follow it, ascending."""
    ends: dict[tuple[int, ...], list[int]] = {}
    for end in range(length, len(token_ids) + 1):
        ends.setdefault(tuple(token_ids[end - length : end]), []).append(end)
    return ends


class PredictionDrafter(Drafter):
    """Drafts a chain from the request's own prediction; drafts nothing for requests without one."""

    name = "prediction"
    traits = DrafterTraits("prediction (the text that a request expects its output to resemble)", is_lookup=True, uses_predictions=True)

    def __init__(self) -> None:
        self._texts = RequestState[PredictedText]()

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        return [self._draft(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def has_candidates(self, request: Request) -> bool:
        if not request.prediction_token_ids:
            return False
        text = self._texts.get(request)
        if text is None or request.num_output_tokens - text.num_read > MAX_CATCH_UP_TOKENS:
            return True
        text.observe_tokens(request.token_ids[request.num_prompt_tokens + text.num_read :])
        return text.has_next

    def _draft(self, request: Request, budget: DraftBudget) -> DraftTree | None:
        if not request.prediction_token_ids:
            return None
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = PredictedText(request.prediction_token_ids)
        text.observe_tokens(request.token_ids[request.num_prompt_tokens + text.num_read :])
        drafts = text.propose(budget.max_tokens)
        return DraftTree.chain(request.token_ids[-1], drafts, self.name, text.confidence(len(drafts))) if drafts else None
