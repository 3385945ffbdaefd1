"""Drafts from the prediction of a request: a text that most of its output is expected to repeat, such as a file to be edited.

When the output differs from the prediction, the drafter realigns: it searches for the position in the prediction at which the output
continues (`PredictedText`).

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
"""To realign, the prediction is searched for the last 8, 4 or 2 output tokens; the longest match is used."""
NUM_NEARBY_POSITIONS = 16  # after a mismatch, this many of the next predicted tokens are searched for the last output token
MAX_SUBSTITUTED_TOKENS = 2  # maximum number of output tokens that are assumed to replace one predicted token each
NUM_ASSUMED_MATCHES = 2  # added to the number of matched tokens to estimate acceptance
_PRIOR_TRIALS = 4.0  # weight of the accuracy 0.5 that is assumed for a new strategy, as a number of trials


@dataclass(slots=True)
class _RealignmentStrategy:
    """Counts how often a strategy to realign found the right position, so that the next output token was the one predicted there."""

    num_trials: int = 0
    num_correct: int = 0

    @property
    def smoothed_accuracy(self) -> float:
        return (self.num_correct + 0.5 * _PRIOR_TRIALS) / (self.num_trials + _PRIOR_TRIALS)


class PredictedText:
    """A predicted text, and the position in it at which the output continues.

    When the output differs from the prediction, three strategies find a position to continue: (a) search the prediction for the longest
    suffix of the output; (b) search the next predicted tokens for the last output token; (c) assume that each differing output token
    replaces one predicted token. The strategy that was right most often is used.

    Example: predicted 1 2 3 4 5 6, output 1 2 9: by (c) 9 replaces 3, so 4 is next. Output 1 2 9 8 5: by (b) 6 is next.

    Attributes:
        num_observed: number of output tokens passed to `observe_tokens` so far.
        num_matched: number of consecutive output tokens, up to the last one, that equalled the prediction.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._ngram_ends: list[dict[tuple[int, ...], list[int]]] = []  # n-gram indices of the prediction by match length, shortest first
        self.num_observed = 0
        self._last_tokens: list[int] = []  # the last 8 output tokens
        self._matched_end = 0  # position in the prediction after the last token that the output matched
        self._num_unmatched = 0  # number of output tokens after the last matching one
        self.num_matched = 0
        self._position: int | None = 0  # position in the prediction at which the output continues; None = unknown
        self._suffix, self._nearby, self._substitution = _RealignmentStrategy(), _RealignmentStrategy(), _RealignmentStrategy()
        self._nearby_start = -1  # position of the first token in `_nearby_positions`; -1 = there are no tokens in it yet
        self._nearby_positions: dict[int, int] = {}  # token -> position after its first occurrence from `_nearby_start` on
        self._candidates: list[tuple[_RealignmentStrategy, int]] = []  # the position that each strategy found after the last mismatch

    def observe_tokens(self, token_ids: Sequence[int]) -> None:
        """Compare the next output tokens with the prediction, and realign if they differ."""
        for token in token_ids:
            self._last_tokens = [*self._last_tokens[1 - MATCH_LENGTHS[0] :], token]
            for strategy, position in self._candidates:
                strategy.num_trials += 1
                strategy.num_correct += self._has_token_at(position, token)
            if self._position is not None and self._has_token_at(self._position, token):
                self._position = self._matched_end = self._position + 1
                self._num_unmatched, self.num_matched, self._candidates = 0, self.num_matched + 1, []
            else:
                self.num_matched = 0
                self._num_unmatched += 1
                self._candidates = self._realign(token)
                self._position = (
                    max(self._candidates, key=lambda candidate: candidate[0].smoothed_accuracy)[1] if self._candidates else None
                )
        self.num_observed += len(token_ids)

    @property
    def has_next(self) -> bool:
        """Whether a next token is predicted: the position is known and not at the end of the prediction."""
        return self._position is not None and self._position < len(self._token_ids)

    def propose(self, num_draft_tokens: int) -> Sequence[int]:
        """Return the next `num_draft_tokens` predicted tokens, fewer at the end of the prediction; none if the position is unknown."""
        return () if self._position is None else self._token_ids[self._position : self._position + num_draft_tokens]

    def confidence(self, count: int) -> list[float]:
        """Estimate the acceptance probability of each of the next `count` predicted tokens."""
        probs = match_confidence(NUM_ASSUMED_MATCHES + self.num_matched, count)
        if self._candidates and probs:
            probs[0] = max(strategy.smoothed_accuracy for strategy, _ in self._candidates)
        return probs

    def _has_token_at(self, position: int, token: int) -> bool:
        return position < len(self._token_ids) and self._token_ids[position] == token

    def _realign(self, token: int) -> list[tuple[_RealignmentStrategy, int]]:
        """Return the positions in the prediction at which the output may continue, by strategy. `token` is the last output token."""
        candidates = []
        position = self._position_after_longest_suffix()
        if position is not None:
            candidates.append((self._suffix, position))
        if self._nearby_start != self._matched_end:
            nearby = list(enumerate(self._token_ids[self._matched_end : self._matched_end + NUM_NEARBY_POSITIONS], self._matched_end + 1))
            self._nearby_start = self._matched_end
            self._nearby_positions = {predicted: position for position, predicted in reversed(nearby)}
        nearby_position = self._nearby_positions.get(token)
        if nearby_position is not None:
            candidates.append((self._nearby, nearby_position))
        if self._num_unmatched <= MAX_SUBSTITUTED_TOKENS:
            candidates.append((self._substitution, self._matched_end + self._num_unmatched))
        return candidates

    def _position_after_longest_suffix(self) -> int | None:
        """Return the position after the longest suffix of the output that occurs in the prediction; None if none of `MATCH_LENGTHS` occurs.

        If it occurs several times: the first occurrence that ends after the match of the call before, else the last occurrence.
        """
        best = None
        for index, length in enumerate(reversed(MATCH_LENGTHS)):
            if index == len(self._ngram_ends):
                self._ngram_ends.append(_index_ngrams(self._token_ids, length))
            ends = self._ngram_ends[index].get(tuple(self._last_tokens[-length:])) if len(self._last_tokens) >= length else None
            if not ends:  # if a suffix does not occur, longer suffixes do not occur either
                break
            first = bisect_left(ends, self._matched_end)
            best = ends[first] if first < len(ends) else ends[-1]
        return best


def _index_ngrams(token_ids: Sequence[int], length: int) -> dict[tuple[int, ...], list[int]]:
    """Return for each n-gram of `length` tokens the positions after its occurrences, ascending."""
    ends: dict[tuple[int, ...], list[int]] = {}
    for end in range(length, len(token_ids) + 1):
        ends.setdefault(tuple(token_ids[end - length : end]), []).append(end)
    return ends


class PredictionDrafter(Drafter):
    """Drafts a chain from a request's prediction; drafts nothing for requests without a prediction."""

    name = "prediction"
    traits = DrafterTraits("prediction (text that a request expects its output to resemble)", is_lookup=True, uses_predicted_outputs=True)

    def __init__(self) -> None:
        self._texts = RequestState[PredictedText]()

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        return [self._draft(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def has_candidates(self, request: Request) -> bool:
        if not request.prediction_token_ids:
            return False
        text = self._texts.get(request)
        if text is None or request.num_output_tokens - text.num_observed > MAX_CATCH_UP_TOKENS:
            return True
        text.observe_tokens(request.token_ids[request.num_prompt_tokens + text.num_observed :])
        return text.has_next

    def _draft(self, request: Request, budget: DraftBudget) -> DraftTree | None:
        if not request.prediction_token_ids:
            return None
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = PredictedText(request.prediction_token_ids)
        text.observe_tokens(request.token_ids[request.num_prompt_tokens + text.num_observed :])
        drafts = text.propose(budget.max_tokens)
        return DraftTree.chain(request.token_ids[-1], drafts, self.name, text.confidence(len(drafts))) if drafts else None
