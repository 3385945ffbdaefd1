"""Every run of tokens of a text, how often it occurs and what follows it, updated token by token.

Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text", section 3. Addition: counts and last places,
kept for runs up to a bounded length, so that a token costs O(bound) even in a text that repeats itself all the time.
"""

from heapq import nsmallest
from itertools import islice

MAX_MATCH = 16
MAX_FOLLOWERS = 32  # distinct next tokens looked at: where there are more, each is unlikely
MAX_SIBLINGS = 4
SEPARATOR = -1  # between the texts of a store; no token id

Match = tuple[int, int]
"""A context in an automaton: a state, and how many tokens of the context it stands for (its longest string may be longer)."""


class SuffixAutomaton:
    """All runs of tokens of a text, how often each occurs and where last; grows by one token in O(max_match) time.

    A state stands for the runs that end at the same places. `_link` leads to the state of their longest shorter end that occurs at
    more places; `_length` is that of the longest run. Counts are exact for runs of up to `max_match` + 1 tokens.

    Args:
        max_match: contexts longer than this are compared by their last `max_match` tokens.
    """

    __slots__ = ("_count", "_counted", "_counted_length", "_last", "_last_end", "_length", "_link", "_next", "max_match", "size")

    def __init__(self, max_match: int = MAX_MATCH) -> None:
        self.max_match = max_match
        self.size = 0
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._count, self._last_end = [-1], [0], [0], [0]
        self._last = 0
        self._counted: int = 0  # the state of the text's last max_match + 1 tokens
        self._counted_length: int = 0

    def append(self, token_id: int) -> None:
        """Add one token to the text."""
        nexts, links, lengths = self._next, self._link, self._length
        self.size += 1
        state, made = self._last, len(lengths)
        self._last = made
        nexts.append({})
        links.append(0)
        lengths.append(self.size)
        self._count.append(0)
        self._last_end.append(0)
        while state >= 0 and token_id not in nexts[state]:
            nexts[state][token_id] = made
            state = links[state]
        if state >= 0:
            target = nexts[state][token_id]
            if lengths[target] != lengths[state] + 1:
                target = self._split(target, state, token_id)
            links[made] = target
        self._count_ends(token_id)

    def follow(self, match: Match, token_id: int) -> Match:
        """The longest end of `match` + token, at most max_match tokens, that occurs in the text."""
        nexts, links, lengths = self._next, self._link, self._length
        state, length = self.settle(match)
        while token_id not in nexts[state]:
            if state == 0:
                return 0, 0
            state = links[state]
            length = lengths[state]
        return self.settle((nexts[state][token_id], min(length + 1, self.max_match)))

    @property
    def repeated(self) -> Match:
        """The longest end of the text, at most max_match tokens, that occurs in it before."""
        state = self._link[self._last] if self.size else 0
        if self._length[state] <= self.max_match:
            return state, self._length[state]
        return self.settle((self._counted, self.max_match))

    def followers(self, match: Match, min_match: int) -> list[tuple[int, float, Match]]:
        """What followed the longest end of `match` that anything followed; nothing where that is shorter than `min_match`.

        Args:
            match: from `repeated`, `follow` or here, before the text grew further.

        Returns:
            (token, its share of the places, the context with it), the most frequent first, then the latest; of at most MAX_FOLLOWERS
            tokens, those seen first.
        """
        state, length = match
        following = self._next[state]
        while not following and state:  # it occurs at the end of the text alone
            state = self._link[state]
            length = self._length[state]
            following = self._next[state]
        if length < min_match:
            return []
        if len(following) == 1:
            ((token, then),) = following.items()
            return [(token, 1.0, self._grown(then, length))] if token != SEPARATOR else []
        counts, ends = self._count, self._last_end
        total = counts[state] - (ends[state] == self.size)
        seen = [(-counts[then], -ends[then], token, then) for token, then in islice(following.items(), MAX_FOLLOWERS) if token != SEPARATOR]
        best = nsmallest(MAX_SIBLINGS, seen) if len(seen) > MAX_SIBLINGS else sorted(seen)
        return [(token, -count / total, self._grown(then, length)) for count, _, token, then in best]

    def run(self, match: Match, min_match: int, num_tokens: int) -> list[int]:
        """Up to `num_tokens` tokens behind `match`, as long as each place goes on in the same way: what `followers` says with share 1."""
        nexts, links, lengths, max_match = self._next, self._link, self._length, self.max_match
        state, length = match
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            following = nexts[state]
            while not following and state:
                state = links[state]
                length = lengths[state]
                following = nexts[state]
            if length < min_match or len(following) != 1:
                break
            ((token, state),) = following.items()
            if token == SEPARATOR:
                break
            tokens.append(token)
            if length < max_match:
                length += 1
            else:
                state, length = self.settle((state, length))
        return tokens

    def _grown(self, state: int, length: int) -> Match:
        """A context of `length` tokens and one more, which led to `state`."""
        return (state, length + 1) if length < self.max_match else self.settle((state, length))

    def settle(self, match: Match) -> Match:
        """The same context after the state it was in has been split, or after its length was cut."""
        state, length = match
        links, lengths = self._link, self._length
        while state and lengths[links[state]] >= length:
            state = links[state]
        return state, length

    def _split(self, target: int, state: int, token_id: int) -> int:
        """Give the shorter runs of `target`, which now end at one place more, a state of their own; returns it."""
        nexts, links, lengths = self._next, self._link, self._length
        made = len(lengths)
        nexts.append(nexts[target].copy())
        links.append(links[target])
        lengths.append(lengths[state] + 1)
        self._count.append(self._count[target])
        self._last_end.append(self._last_end[target])
        links[target] = made
        while state >= 0 and nexts[state].get(token_id) == target:
            nexts[state][token_id] = made
            state = links[state]
        return made

    def _count_ends(self, token_id: int) -> None:
        """Every run of up to max_match + 1 tokens that ends at the new token ends at one place more."""
        links, lengths, counts, ends, size = self._link, self._length, self._count, self._last_end, self.size
        state, length = self._counted, self._counted_length
        while state and lengths[links[state]] >= length:  # it was split; as `settle`, without the call
            state = links[state]
        state = self._next[state][token_id]
        if length <= self.max_match:
            length += 1
        while lengths[links[state]] >= length:
            state = links[state]
        self._counted, self._counted_length = state, length
        while state > 0:
            counts[state] += 1
            ends[state] = size
            state = links[state]
