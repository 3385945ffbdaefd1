"""Drafts what followed the longest matching end of the text before, by frequency.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975), section 4. Deviations: an online suffix automaton instead of suffix trees;
a node's distribution is that of its longest matching context, draft tokens included; trees grow by probability per row of the target pass;
requests share nothing unless a store is given and the request names a namespace.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice

from paceline.errors import ConfigError
from paceline.speculation.draft_length.acceptance import match_confidence
from paceline.speculation.drafter import MAX_CATCH_UP_TOKENS, DraftBudget, Drafter, DrafterTraits, RequestState
from paceline.speculation.request import FinishReason, Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Candidate, grow_tree

MAX_MATCH = 16
MAX_NEXT_TOKENS = 32  # distinct next tokens counted after a context: with more, each one is improbable
MAX_SIBLINGS = 4
SEPARATOR = -1  # separates texts in a store; not a token id

Match = tuple[int, int]
"""A context in an automaton: a state, and the number of the context's tokens (the longest string of the state may be longer)."""


class SuffixAutomaton:
    """All substrings of a text, how often each occurs and where last; appending a token takes O(max_match) time.

    A state is a set of substrings that end at the same positions. `_link` leads to the state of their longest suffix with more end
    positions; `_length` is the length of the longest one. Counts are exact for substrings of up to `max_match` + 1 tokens.

    Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text", section 3. Addition: counts and last end
    positions, kept for substrings of bounded length, so that a token costs O(bound) even in a periodic text.

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
        self._counted: int = 0  # automaton state of the text's last max_match + 1 tokens
        self._counted_length: int = 0

    def append(self, token_id: int) -> None:
        """Append one token to the text."""
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

    def extend_match(self, match: Match, token_id: int) -> Match:
        """Return the longest suffix of `match` + token, at most max_match tokens, that occurs in the text."""
        nexts, links, lengths = self._next, self._link, self._length
        state, length = self.normalize(match)
        while token_id not in nexts[state]:
            if state == 0:
                return 0, 0
            state = links[state]
            length = lengths[state]
        return self.normalize((nexts[state][token_id], min(length + 1, self.max_match)))

    @property
    def repeated_suffix(self) -> Match:
        """The longest suffix of the text, at most max_match tokens, that also occurs earlier."""
        state = self._link[self._last] if self.size else 0
        if self._length[state] <= self.max_match:
            return state, self._length[state]
        return self.normalize((self._counted, self.max_match))

    def next_tokens(self, match: Match, min_match: int) -> list[tuple[int, float, Match]]:
        """Return what followed the longest suffix of `match` that anything followed; empty if that is shorter than `min_match`.

        Args:
            match: from `repeated_suffix`, `extend_match` or here, before the text grew further.

        Returns:
            (token, its share of the occurrences, the context with it), the most frequent first, then the latest. Only the MAX_NEXT_TOKENS
            tokens that followed first are counted.
        """
        state, length = match
        following = self._next[state]
        while not following and state:  # a context that occurs only at the end of the text has no next token
            state = self._link[state]
            length = self._length[state]
            following = self._next[state]
        if length < min_match:
            return []
        if len(following) == 1:
            ((token, then),) = following.items()
            return [(token, 1.0, self._longer_match(then, length))] if token != SEPARATOR else []
        counts, ends = self._count, self._last_end
        total = counts[state] - (ends[state] == self.size)
        seen = [
            (-counts[then], -ends[then], token, then) for token, then in islice(following.items(), MAX_NEXT_TOKENS) if token != SEPARATOR
        ]
        best = nsmallest(MAX_SIBLINGS, seen) if len(seen) > MAX_SIBLINGS else sorted(seen)
        return [(token, -count / total, self._longer_match(then, length)) for count, _, token, then in best]

    def unambiguous_tokens(self, match: Match, min_match: int, num_tokens: int) -> list[int]:
        """Return up to `num_tokens` tokens after `match`, as long as each context has a single next token."""
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
                state, length = self.normalize((state, length))
        return tokens

    def _longer_match(self, state: int, length: int) -> Match:
        """Return a context of `length` tokens and one more, which led to `state`."""
        return (state, length + 1) if length < self.max_match else self.normalize((state, length))

    def normalize(self, match: Match) -> Match:
        """Return the same context with its current state, after a state was split or the context was cut."""
        state, length = match
        links, lengths = self._link, self._length
        while state and lengths[links[state]] >= length:
            state = links[state]
        return state, length

    def _split(self, target: int, state: int, token_id: int) -> int:
        """Move the shorter substrings of `target`, which now have one more end position, to a new state; return it."""
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
        """Count the new end position for every substring of up to max_match + 1 tokens that ends at the new token."""
        links, lengths, counts, ends, size = self._link, self._length, self._count, self._last_end, self.size
        state, length = self._counted, self._counted_length
        while state and lengths[links[state]] >= length:  # the state may have been split since; `normalize`, inlined
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


MIN_MATCH = 2
MIN_PATH_PROB = 0.2  # measured: less probable nodes add rows to the pass but hardly any accepted tokens


@dataclass(slots=True)
class _StoreMatch:
    """The longest suffix of a request's text that occurs in one automaton of a store."""

    automaton: SuffixAutomaton
    num_read: int = 0
    match: Match = (0, 0)

    def update(self, token_ids: Sequence[int]) -> None:
        """Match a request's new tokens; only the last `max_match` of them matter."""
        first = len(token_ids) - self.automaton.max_match
        if first > self.num_read:
            self.num_read, self.match = first, (0, 0)
        for token in token_ids[self.num_read :]:
            self.match = self.automaton.extend_match(self.match, token)
        self.match = self.automaton.normalize(self.match)  # the stored text may have grown since the last match
        self.num_read = len(token_ids)


@dataclass(slots=True)
class _RequestText:
    """A request's own tokens, and its matches in the stored texts."""

    automaton: SuffixAutomaton
    stored: list[_StoreMatch] = field(default_factory=list)


class SuffixStore:
    """Finished outputs that later requests of the same namespace draft from. Its size is bounded; the oldest outputs are dropped first.

    Args:
        max_tokens: maximum number of tokens stored per namespace.
        max_namespaces: the least recently used one is dropped.

    Raises:
        ConfigError: a bound is below 1.
    """

    def __init__(self, max_tokens: int = 65_536, max_namespaces: int = 16, max_match: int = MAX_MATCH) -> None:
        for name, value in (("max_tokens", max_tokens), ("max_namespaces", max_namespaces)):
            if value < 1:
                raise ConfigError(f"{name} of a suffix store is {value}: use a whole number from 1, or no store")
        self._half, self._max_namespaces, self._max_match = max(1, max_tokens // 2), max_namespaces, max_match
        # two automata per namespace: tokens cannot be removed from one, so the older one is dropped as a whole
        self._texts: OrderedDict[str, list[SuffixAutomaton]] = OrderedDict()

    def add(self, namespace: str, token_ids: Sequence[int]) -> None:
        """Add a finished output; if it is too long, only its end."""
        kept = token_ids[-(self._half - 1) :] if self._half > 1 else []
        automata = self._texts.setdefault(namespace, [])
        self._texts.move_to_end(namespace)
        if not automata or automata[-1].size + len(kept) + 1 > self._half:
            automata.append(SuffixAutomaton(self._max_match))
            del automata[:-2]
        for token in (*kept, SEPARATOR):
            automata[-1].append(token)
        while len(self._texts) > self._max_namespaces:
            self._texts.popitem(last=False)

    def automata(self, namespace: str) -> Sequence[SuffixAutomaton]:
        """Return the automata of a namespace, the older one first."""
        return self._texts.get(namespace, ())

    def num_stored_tokens(self, namespace: str) -> int:
        """Return the number of stored tokens, separators between outputs included."""
        return sum(automaton.size for automaton in self.automata(namespace))

    def clear(self, namespace: str | None = None) -> None:
        """Remove the stored outputs of one namespace, or of all."""
        if namespace is None:
            self._texts.clear()
        else:
            self._texts.pop(namespace, None)


class SuffixDrafter(Drafter):
    """Drafts trees of what followed before in the request's own text; needs no model.

    Args:
        min_match: fewest tokens of context that must have occurred before.
        max_match: most tokens of context that are compared.
        store: finished outputs of requests that name a namespace; None = a request drafts from its own text alone.
    """

    name = "suffix"

    def __init__(self, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH, store: SuffixStore | None = None) -> None:
        if not 1 <= min_match <= max_match:
            raise ConfigError(f"min_match is {min_match} and max_match {max_match}: use 1 <= min_match <= max_match")
        self._min_match, self._max_match, self._store = min_match, max_match, store
        self._texts = RequestState[_RequestText]()
        shared = "" if store is None else ", and in its namespace's finished outputs"
        self.traits = DrafterTraits(
            f"suffix (what followed the last {min_match} or more tokens before, by frequency{shared})", is_lookup=True
        )

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        return [self._draft(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def has_candidates(self, request: Request) -> bool:
        text = self._texts.get(request)
        is_shared = self._store is not None and request.namespace is not None
        if text is None or is_shared or len(request.token_ids) - text.automaton.size > MAX_CATCH_UP_TOKENS:
            return True
        for token in request.token_ids[text.automaton.size :]:
            text.automaton.append(token)
        return text.automaton.repeated_suffix[1] >= self._min_match

    def release(self, request: Request) -> None:
        is_whole = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)  # the request was neither aborted nor did it fail
        if self._store is not None and request.namespace is not None and is_whole:
            self._store.add(request.namespace, request.output_token_ids)

    def _draft(self, request: Request, budget: DraftBudget) -> DraftTree | None:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _RequestText(SuffixAutomaton(self._max_match))
        automaton = text.automaton
        for token in request.token_ids[automaton.size :]:
            automaton.append(token)
        match = automaton.repeated_suffix
        for stored in self._matches_in_store(text, request):
            if stored.match[1] > match[1]:
                automaton, match = stored.automaton, stored.match
        if match[1] < self._min_match:
            return None
        return self._grow(automaton, match, request.token_ids[-1], budget)

    def _matches_in_store(self, text: _RequestText, request: Request) -> list[_StoreMatch]:
        if self._store is None or request.namespace is None:
            return []
        known = {id(stored.automaton): stored for stored in text.stored}
        text.stored = [known.get(id(automaton)) or _StoreMatch(automaton) for automaton in self._store.automata(request.namespace)]
        for stored in text.stored:
            stored.update(request.token_ids)
        return text.stored

    def _grow(self, automaton: SuffixAutomaton, match: Match, root_token_id: int, budget: DraftBudget) -> DraftTree | None:
        wanted = budget.max_tokens
        certain = automaton.unambiguous_tokens(match, self._min_match, wanted)
        if len(certain) == wanted > 0:  # a single continuation is the most frequent case, and no tree is better
            return DraftTree.chain(root_token_id, certain, self.name, match_confidence(match[1], wanted))

        def expand(context: Match) -> list[Candidate[Match]]:
            return [(token, prob, self.name, then) for token, prob, then in automaton.next_tokens(context, self._min_match)]

        return grow_tree(root_token_id, budget, match, expand, min_path_prob=MIN_PATH_PROB)
