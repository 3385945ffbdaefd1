"""Prompt lookup: drafts what followed the same tokens before.

Source: Saxena 2023, "Prompt Lookup Decoding". Deviations: the longest match wins and, of equally long ones, the latest; an index grows
token by token, so that no step searches the prompt; short matches propose nothing.
"""

from collections.abc import Sequence

from paceline.speculation.draft_length.acceptance import match_confidence
from paceline.speculation.drafter import MAX_CATCH_UP_TOKENS, DraftBudget, Drafter, DrafterTraits, RequestState
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

MIN_MATCH = 3
MAX_MATCH = 6
MAX_OCCURRENCES = 256  # occurrences of the last n-gram that are tried for a longer match, latest first


class NgramIndex:
    """Index of the positions after each n-gram of `min_match` tokens. O(1) amortised per token.

    Example: after [1, 2, 3, 4, 1, 2, 3] with min_match 2, the longest match is 1 2 3, which 4 1 2 3 followed. A proposal of six tokens is
    4 1 2 3 4 1.
    """

    def __init__(self, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH) -> None:
        self._min_match, self._max_match = min_match, max_match
        self._ends: dict[tuple[int, ...], int] = {}  # position after the latest occurrence of each n-gram
        self._previous: list[int] = [0]  # for each position after an n-gram, the position after its previous occurrence; 0 = none
        self.match_len = 0  # of the last match
        self._last_match: tuple[int, int | None] = 0, None  # length of the text at the last match, and the position found

    def num_unindexed(self, num_tokens: int) -> int:
        """Return how many of the text's first `num_tokens` tokens are not in the index yet."""
        return num_tokens - len(self._previous) + 1

    def match(self, token_ids: Sequence[int]) -> int | None:
        """Return the position after the latest earlier occurrence of the longest matching suffix of `token_ids`; None without one.

        `token_ids` must begin with those of earlier calls.
        """
        size, ends, previous, length = len(token_ids), self._ends, self._previous, self._min_match
        if size == self._last_match[0]:  # the match was computed by `has_candidates`
            return self._last_match[1]
        for end in range(len(previous), size):  # the n-gram that ends at `size` has no next token yet
            if end < length:
                previous.append(0)
                continue
            ngram = tuple(token_ids[end - length : end])
            previous.append(ends.get(ngram, 0))
            ends[ngram] = end
        end_of_latest = ends.get(tuple(token_ids[size - length :])) if size > length else None
        found = None if end_of_latest is None else self._longest_match(token_ids, end_of_latest)
        self._last_match = size, found
        return found

    def _longest_match(self, token_ids: Sequence[int], end: int) -> int:
        """Return the position after the longest match, searching occurrences of the last n-gram backwards from the one before `end`."""
        size, best, best_length = len(token_ids), end, 0
        for _ in range(MAX_OCCURRENCES):
            length = self._min_match
            while length < self._max_match and length < end and token_ids[end - 1 - length] == token_ids[size - 1 - length]:
                length += 1
            if length > best_length:
                best, best_length = end, length
                if length == self._max_match:
                    break
            end = self._previous[end]
            if end == 0:
                break
        self.match_len = best_length
        return best

    def propose(self, token_ids: Sequence[int], num_draft_tokens: int) -> list[int]:
        """Return the tokens after the match; empty without one. Arguments as for `match`."""
        found, size = self.match(token_ids), len(token_ids)
        if found is None:
            return []
        drafts = list(token_ids[found : found + num_draft_tokens])
        while len(drafts) < num_draft_tokens:  # past the end of the text, the copy continues with its own draft tokens
            drafts.append(drafts[found + len(drafts) - size])
        return drafts


class NgramDrafter(Drafter):
    """Drafts a chain copied from the request's own tokens; needs no model."""

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
        is_read = index is not None and index.num_unindexed(num_tokens) <= MAX_CATCH_UP_TOKENS
        return index is None or not is_read or index.match(request.token_ids) is not None
