"""Prompt lookup: search the text for an earlier occurrence of its last tokens, and draft the tokens that followed there.

Source: Saxena 2023, "Prompt Lookup Decoding". Deviations: the longest match is used and, of equally long matches, the latest; an index
replaces the search through the prompt; matches of fewer than MIN_MATCH_TOKENS tokens are ignored.
"""

from collections.abc import Sequence

from paceline.speculation.draft_length.acceptance import match_confidence
from paceline.speculation.drafter import MAX_CATCH_UP_TOKENS, DraftBudget, Drafter, DrafterTraits, RequestState
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

MIN_MATCH_TOKENS = 3
MAX_MATCH_TOKENS = 6
MAX_COMPARED_OCCURRENCES = 256  # latest earlier occurrences of the last n-gram; the longest match among them is used


class NgramIndex:
    """Index of a growing text: for each n-gram of `min_match` tokens the positions after its occurrences. O(1) amortised per token.

    Example: text 1 2 3 4 1 2 3, min_match 2. The longest match of its end is 1 2 3 at the beginning, and the tokens after it are 4 1 2 3.
    A proposal of six tokens continues with its own tokens: 4 1 2 3 4 1.

    Attributes:
        match_len: number of matching tokens at the last call of `find_match`.
    """

    def __init__(self, min_match: int = MIN_MATCH_TOKENS, max_match: int = MAX_MATCH_TOKENS) -> None:
        self._min_match, self._max_match = min_match, max_match
        self._latest_end: dict[tuple[int, ...], int] = {}  # position after the latest occurrence of each n-gram
        self._previous_end: list[int] = [0]  # position after an n-gram -> position after its previous occurrence, 0 = none
        self.match_len = 0
        self._last_match: tuple[int, int | None] = 0, None  # length of the text at the last call of `find_match`, and its result

    def num_unindexed(self, num_tokens: int) -> int:
        """Return how many tokens of a text of `num_tokens` tokens are not in the index yet."""
        return num_tokens - len(self._previous_end) + 1

    def find_match(self, token_ids: Sequence[int]) -> int | None:
        """Find the longest suffix of a text that also occurs earlier; return the position after its latest earlier occurrence, or None.

        Args:
            token_ids: the whole text; it must begin with the text of the call before.
        """
        size, ends, previous, length = len(token_ids), self._latest_end, self._previous_end, self._min_match
        if size == self._last_match[0]:  # `has_candidates` has searched this text already
            return self._last_match[1]
        for end in range(len(previous), size):  # the n-gram that ends at `size` has no next token yet
            if end < length:
                previous.append(0)
                continue
            ngram = tuple(token_ids[end - length : end])
            previous.append(ends.get(ngram, 0))
            ends[ngram] = end
        end_of_latest = ends.get(tuple(token_ids[size - length :])) if size > length else None
        match_end = None if end_of_latest is None else self._longest_match(token_ids, end_of_latest)
        self._last_match = size, match_end
        return match_end

    def _longest_match(self, token_ids: Sequence[int], end: int) -> int:
        """Return the position after the longest match, among the occurrences of the last n-gram that end at `end` or earlier."""
        size, best, best_length = len(token_ids), end, 0
        for _ in range(MAX_COMPARED_OCCURRENCES):
            length = self._min_match
            while length < self._max_match and length < end and token_ids[end - 1 - length] == token_ids[size - 1 - length]:
                length += 1
            if length > best_length:
                best, best_length = end, length
                if length == self._max_match:
                    break
            end = self._previous_end[end]
            if end == 0:
                break
        self.match_len = best_length
        return best

    def propose(self, token_ids: Sequence[int], num_draft_tokens: int) -> list[int]:
        """Return the `num_draft_tokens` tokens after the match that `find_match` finds; an empty list if it finds none."""
        match_end, size = self.find_match(token_ids), len(token_ids)
        if match_end is None:
            return []
        drafts = list(token_ids[match_end : match_end + num_draft_tokens])
        while len(drafts) < num_draft_tokens:  # at the end of the text, the copy continues with the draft tokens
            drafts.append(drafts[match_end + len(drafts) - size])
        return drafts


class NgramDrafter(Drafter):
    """Drafts a chain copied from the request's own tokens; needs no model."""

    name = "ngram"

    def __init__(self, min_match: int = MIN_MATCH_TOKENS, max_match: int = MAX_MATCH_TOKENS) -> None:
        self._match_limits = (min_match, max_match)
        self._indices = RequestState[NgramIndex]()
        self.traits = DrafterTraits(f"ngram (copies what followed the last {min_match} or more tokens before)", is_lookup=True)

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        trees: list[DraftTree | None] = []
        for request, budget in zip(requests, budgets, strict=True):
            index = self._indices.get(request)
            if index is None:
                index = self._indices[request] = NgramIndex(*self._match_limits)
            drafts = index.propose(request.token_ids, budget.max_tokens)
            probs = match_confidence(index.match_len, len(drafts))
            trees.append(DraftTree.chain(request.token_ids[-1], drafts, self.name, probs) if drafts else None)
        return trees

    def has_candidates(self, request: Request) -> bool:
        index, num_tokens = self._indices.get(request), len(request.token_ids)
        if index is None or index.num_unindexed(num_tokens) > MAX_CATCH_UP_TOKENS:
            return True
        return index.find_match(request.token_ids) is not None
