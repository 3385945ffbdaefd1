"""Draft from a text given with the request that the output should repeat: a file to be edited, an answer to be corrected.

Once the output leaves the prediction, we look for the place where it joins it again. There may be several; which kind of place is the
right one depends on how the text was edited, so we count which kinds were right before.

Source: OpenAI's "Predicted Outputs" as seen from outside; Saxena 2023, "Prompt Lookup Decoding", for finding a place by its last tokens.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.speculation.draft_length.acceptance import match_confidence
from paceline.speculation.drafter import MAX_CATCH_UP_TOKENS, DraftBudget, Drafter, DrafterTraits, RequestState
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

MATCHES = (8, 4, 2)
"""Numbers of the output's last tokens that are looked for in the prediction, longest first."""
NEAR = 16  # places behind the mismatch where one token is enough
MAX_REPLACED = 2  # output tokens taken to replace as many of the prediction; after more, the place is lost
GIVEN = 2  # what a prediction's sender says of it counts as much as so many tokens that agreed
_ASSUMED = 4.0  # places for which the assumed even chance stands


@dataclass(slots=True)
class _Kind:
    """One way to find the place, and how often it was right about the token behind."""

    tried: int = 0
    right: int = 0

    @property
    def chance(self) -> float:
        return (self.right + 0.5 * _ASSUMED) / (self.tried + _ASSUMED)


class Prediction:
    """A predicted text and where in it the output is.

    Behind a token that the prediction does not have there, the place may be behind the longest run that the output ends with; behind the
    same token near by; or output tokens replaced as many predicted ones. The kind that was right most often in this text is believed.

    Example: predicted [1, 2, 3, 4, 5, 6], output 1 2 9 (the 3 was replaced): the place is in front of 4. Output 1 2 9 8 5: nothing
    else agrees, but 5 stands near, so the place is in front of 6.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._ends: list[dict[tuple[int, ...], list[int]]] = []  # of runs, the shortest first, as far as they were needed
        self.num_read = 0
        self._tail: list[int] = []  # the output's last tokens, as many as a match may need
        self._anchor = 0  # place behind the last token on which the two agreed
        self._num_lost = 0  # output tokens since then
        self.num_agreed = 0  # output tokens that agreed without a break, up to the last one
        self._place: int | None = 0  # where the output probably goes on
        self._run, self._near, self._replaced = _Kind(), _Kind(), _Kind()
        self._near_anchor, self._nearby = -1, dict[int, int]()  # places behind the tokens from the anchor on
        self._found: list[tuple[_Kind, int]] = []  # places behind the last token, where it did not agree

    def read(self, token_ids: Sequence[int]) -> None:
        """Follow the output by its next tokens."""
        for token in token_ids:
            self._tail = [*self._tail[1 - MATCHES[0] :], token]
            for kind, place in self._found:
                kind.tried += 1
                kind.right += self._is_at(place, token)
            if self._place is not None and self._is_at(self._place, token):
                self._place = self._anchor = self._place + 1
                self._num_lost, self.num_agreed, self._found = 0, self.num_agreed + 1, []
            else:
                self.num_agreed = 0
                self._num_lost += 1
                self._found = self._find(token)
                self._place = max(self._found, key=lambda one: one[0].chance)[1] if self._found else None
        self.num_read += len(token_ids)

    @property
    def goes_on(self) -> bool:
        """Whether it says anything of the next token."""
        return self._place is not None and self._place < len(self._token_ids)

    def propose(self, num_draft_tokens: int) -> Sequence[int]:
        """What the prediction says comes next; empty at its end and where the output has left it."""
        return () if self._place is None else self._token_ids[self._place : self._place + num_draft_tokens]

    def confidence(self, count: int) -> list[float]:
        """How sure the first `count` tokens of a proposal are."""
        probs = match_confidence(GIVEN + self.num_agreed, count)
        if self._found and probs:
            probs[0] = max(kind.chance for kind, _ in self._found)
        return probs

    def _is_at(self, place: int, token: int) -> bool:
        return place < len(self._token_ids) and self._token_ids[place] == token

    def _find(self, token: int) -> list[tuple[_Kind, int]]:
        """Places where the output may go on behind `token`, its last one."""
        found = []
        place = self._behind_longest_run()
        if place is not None:
            found.append((self._run, place))
        if self._near_anchor != self._anchor:
            ahead = list(enumerate(self._token_ids[self._anchor : self._anchor + NEAR], self._anchor + 1))
            self._near_anchor, self._nearby = self._anchor, {one: place for place, one in reversed(ahead)}
        near = self._nearby.get(token)
        if near is not None:
            found.append((self._near, near))
        if self._num_lost <= MAX_REPLACED:
            found.append((self._replaced, self._anchor + self._num_lost))
        return found

    def _behind_longest_run(self) -> int | None:
        """The place behind the longest run that the output ends with; of several, the first behind the anchor, else the last one."""
        best = None
        for index, length in enumerate(reversed(MATCHES)):
            if index == len(self._ends):
                self._ends.append(_places(self._token_ids, length))
            found = self._ends[index].get(tuple(self._tail[-length:])) if len(self._tail) >= length else None
            if not found:  # no longer run occurs either
                break
            first = bisect_left(found, self._anchor)
            best = found[first] if first < len(found) else found[-1]
        return best


def _places(token_ids: Sequence[int], length: int) -> dict[tuple[int, ...], list[int]]:
    """For each run of `length` tokens the places behind it, in order."""
    places: dict[tuple[int, ...], list[int]] = {}
    for end in range(length, len(token_ids) + 1):
        places.setdefault(tuple(token_ids[end - length : end]), []).append(end)
    return places


class PredictionDrafter(Drafter):
    """Proposes a chain of what the request's own prediction says; rests for requests without one."""

    name = "prediction"
    traits = DrafterTraits("prediction (the text a request says its output will resemble)", is_lookup=True, uses_predictions=True)

    def __init__(self) -> None:
        self._predictions = RequestState[Prediction]()

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        return [self._guess(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def has_candidates(self, request: Request) -> bool:
        if not request.prediction_token_ids:
            return False
        prediction = self._predictions.get(request)
        if prediction is None or request.num_output_tokens - prediction.num_read > MAX_CATCH_UP_TOKENS:
            return True
        prediction.read(request.token_ids[request.num_prompt_tokens + prediction.num_read :])
        return prediction.goes_on

    def _guess(self, request: Request, budget: DraftBudget) -> DraftTree | None:
        if not request.prediction_token_ids:
            return None
        prediction = self._predictions.get(request)
        if prediction is None:
            prediction = self._predictions[request] = Prediction(request.prediction_token_ids)
        prediction.read(request.token_ids[request.num_prompt_tokens + prediction.num_read :])
        drafts = prediction.propose(budget.max_tokens)
        return DraftTree.chain(request.token_ids[-1], drafts, self.name, prediction.confidence(len(drafts))) if drafts else None
