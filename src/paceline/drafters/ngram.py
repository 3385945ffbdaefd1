"""Prompt lookup: draft what followed the same tokens before.

Source: Saxena 2023, "Prompt Lookup Decoding". Deviations: the longest match wins and, among equally long ones, the latest; the index
is built token by token instead of searching the prompt every step; short matches propose nothing.
"""

from collections.abc import Sequence

from paceline.speculation.draft_length.acceptance import match_confidence
from paceline.speculation.drafter import MAX_CATCH_UP_TOKENS, DraftBudget, Drafter, DrafterTraits, RequestState
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

MIN_MATCH = 3
MAX_MATCH = 6
MOST_PLACES = 256  # of the shortest run, the latest ones, that are looked at for a longer one


class NgramIndex:
    """Where each run of `min_match` to `max_match` tokens last ended with something behind it. O(1) amortised per token.

    Example: after [1, 2, 3, 4, 1, 2, 3] with min_match 2, the longest run that occurred before is 1 2 3, and 4 1 2 3 followed it;
    asked for six tokens, the proposal is 4 1 2 3 4 1.
    """

    def __init__(self, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH) -> None:
        self._min_match, self._max_match = min_match, max_match
        self._ends: dict[tuple[int, ...], int] = {}  # of each run of `min_match` tokens
        self._before: list[int] = [0]  # by the end of such a run, that of the same one before it; 0 = none
        self.match_len = 0  # of the last match
        self._matched: tuple[int, int | None] = 0, None  # tokens of the text that was matched last, and what was found

    def num_unread(self, num_tokens: int) -> int:
        """How many of `num_tokens` tokens are not in the index yet."""
        return num_tokens - len(self._before) + 1

    def match(self, token_ids: Sequence[int]) -> int | None:
        """The place behind the latest earlier occurrence of the longest matching end of `token_ids`; None without one.

        `token_ids` must begin with what earlier calls saw.
        """
        size, ends, before, length = len(token_ids), self._ends, self._before, self._min_match
        if size == self._matched[0]:  # asked whether there is a guess, then for it
            return self._matched[1]
        for end in range(len(before), size):  # the run that ends at `size` has nothing behind it yet
            if end < length:
                before.append(0)
                continue
            run = tuple(token_ids[end - length : end])
            before.append(ends.get(run, 0))
            ends[run] = end
        place = ends.get(tuple(token_ids[size - length :])) if size > length else None
        found = None if place is None else self._longest(token_ids, place)
        self._matched = size, found
        return found

    def _longest(self, token_ids: Sequence[int], place: int) -> int:
        """Of the ends of the run that the text ends with, from `place` back, the first one behind a longest match."""
        size, before, best, most = len(token_ids), self._before, place, 0
        end = place
        for _ in range(MOST_PLACES):
            length = self._min_match
            while length < self._max_match and length < end and token_ids[end - 1 - length] == token_ids[size - 1 - length]:
                length += 1
            if length > most:
                best, most = end, length
                if length == self._max_match:
                    break
            end = before[end]
            if end == 0:
                break
        self.match_len = most
        return best

    def propose(self, token_ids: Sequence[int], num_draft_tokens: int) -> list[int]:
        """The tokens behind that place; empty without a match. Arguments as for `match`."""
        found, size = self.match(token_ids), len(token_ids)
        if found is None:
            return []
        drafts = list(token_ids[found : found + num_draft_tokens])
        while len(drafts) < num_draft_tokens:  # a repetition goes on with its own guesses
            drafts.append(drafts[found + len(drafts) - size])
        return drafts


class NgramDrafter(Drafter):
    """Proposes a chain copied from the request's own tokens; needs no model and no memory to speak of."""

    name = "ngram"

    def __init__(self, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH) -> None:
        self._match = (min_match, max_match)
        self._indices = RequestState[NgramIndex]()
        self.traits = DrafterTraits(f"ngram (copies what followed the last {min_match} or more tokens before)", is_lookup=True)

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        trees: list[DraftTree | None] = []
        for request, budget in zip(requests, budgets, strict=True):
            index = self._indices.get(request)
            if index is None:
                index = self._indices[request] = NgramIndex(*self._match)
            drafts = index.propose(request.token_ids, budget.max_tokens)
            probs = match_confidence(index.match_len, len(drafts))
            trees.append(DraftTree.chain(request.token_ids[-1], drafts, self.name, probs) if drafts else None)
        return trees

    def has_candidates(self, request: Request) -> bool:
        index, num_tokens = self._indices.get(request), len(request.token_ids)
        is_read = index is not None and index.num_unread(num_tokens) <= MAX_CATCH_UP_TOKENS
        return index is None or not is_read or index.match(request.token_ids) is not None
