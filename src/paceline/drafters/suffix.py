"""Suffix decoding: find earlier occurrences of the text's last tokens, and draft what followed them, the most frequent tokens first.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975), section 4. Deviations: a suffix automaton instead of suffix trees; the
candidates after a draft token are what followed the longest known suffix of text and draft; trees contain the most
probable nodes, one for each row of the budget; other requests' texts are used only with a `SuffixStore`, by requests that have a namespace.
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
from paceline.speculation.tree_growth import grow_tree

MAX_MATCH_TOKENS = 16
MAX_COMPARED_NEXT_TOKENS = 32  # if more different tokens followed a match, none of them is likely: only those seen first are compared
MAX_SIBLINGS = 4
MAX_INDEXED_TOKENS_PER_STEP = 65_536  # indexing this many tokens of a prompt takes about 0.1 s, during which other requests wait
OUTPUT_SEPARATOR = -1  # follows each output in a `SuffixStore`; no token has this id

Match = tuple[int, int]
"""A substring of the text: a state of the automaton, and the length of the substring. A state contains substrings of several lengths."""


class SuffixAutomaton:
    """Suffix automaton: all substrings of a growing text, with their number of occurrences and last position.

    A state is a set of substrings that occur at the same end positions. `_length` is the length of the longest of them. `_link` is the
    state of its longest suffix that occurs at more positions.

    Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text", section 3. Addition: counts and last positions
    of substrings. They are exact for up to `max_match` + 1 tokens; with this limit, appending a token takes O(max_match) time.
    """

    __slots__ = ("_count", "_counted_len", "_counted_state", "_last", "_last_end", "_length", "_link", "_next", "max_match", "size")

    def __init__(self, max_match: int = MAX_MATCH_TOKENS) -> None:
        self.max_match = max_match
        self.size = 0
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._count, self._last_end = [-1], [0], [0], [0]
        self._last = 0
        self._counted_state: int = 0  # state of the longest suffix of the text, up to max_match + 1 tokens, that is counted
        self._counted_len: int = 0

    def append(self, token_id: int) -> None:
        nexts, links, lengths = self._next, self._link, self._length
        self.size += 1
        state, new_state = self._last, len(lengths)
        self._last = new_state
        nexts.append({})
        links.append(0)
        lengths.append(self.size)
        self._count.append(0)
        self._last_end.append(0)
        while state >= 0 and token_id not in nexts[state]:
            nexts[state][token_id] = new_state
            state = links[state]
        if state >= 0:
            suffix_state = nexts[state][token_id]
            if lengths[suffix_state] != lengths[state] + 1:
                suffix_state = self._split_state(suffix_state, state, token_id)
            links[new_state] = suffix_state
        self._count_end_positions(token_id)

    def extend_match(self, match: Match, token_id: int) -> Match:
        """Append a token to a match; return the longest suffix of the result that occurs in the text, of at most `max_match` tokens."""
        nexts, links, lengths = self._next, self._link, self._length
        state, length = self.refresh_match(match)
        while token_id not in nexts[state]:
            if state == 0:
                return 0, 0
            state = links[state]
            length = lengths[state]
        return self.refresh_match((nexts[state][token_id], min(length + 1, self.max_match)))

    @property
    def repeated_suffix(self) -> Match:
        """The longest suffix of the text that also occurs earlier, of at most `max_match` tokens."""
        state = self._link[self._last] if self.size else 0
        if self._length[state] <= self.max_match:
            return state, self._length[state]
        return self.refresh_match((self._counted_state, self.max_match))

    def next_tokens(self, match: Match, min_match: int) -> list[tuple[int, float, Match]]:
        """Return the tokens that followed a match in the text. If none did, its suffixes are tried, down to `min_match` tokens.

        Args:
            match: a match returned by this class since the last `append`.

        Returns:
            for each token: the token, its share of the match's occurrences, and the match extended by it. The most frequent tokens come
            first; of equally frequent ones the last seen. Only MAX_COMPARED_NEXT_TOKENS different tokens, those first seen, are compared.
        """
        state, length = match
        following = self._next[state]
        while not following and state:  # a substring that occurs only at the end of the text has no next token
            state = self._link[state]
            length = self._length[state]
            following = self._next[state]
        if length < min_match:
            return []
        if len(following) == 1:
            ((token, next_state),) = following.items()
            return [(token, 1.0, self._match_extended_to(next_state, length))] if token != OUTPUT_SEPARATOR else []
        counts, ends = self._count, self._last_end
        total = counts[state] - (ends[state] == self.size)
        candidates = [
            (-counts[next_state], -ends[next_state], token, next_state)
            for token, next_state in islice(following.items(), MAX_COMPARED_NEXT_TOKENS)
            if token != OUTPUT_SEPARATOR
        ]
        best = nsmallest(MAX_SIBLINGS, candidates) if len(candidates) > MAX_SIBLINGS else sorted(candidates)
        return [(token, -count / total, self._match_extended_to(next_state, length)) for count, _, token, next_state in best]

    def unambiguous_tokens(self, match: Match, min_match: int, num_tokens: int) -> list[int]:
        """Return up to `num_tokens` tokens that followed a match. Stop where different tokens, or none, followed the text so far."""
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
            if token == OUTPUT_SEPARATOR:
                break
            tokens.append(token)
            if length < max_match:
                length += 1
            else:
                state, length = self.refresh_match((state, length))
        return tokens

    def _match_extended_to(self, state: int, length: int) -> Match:
        """Return a match of `length` tokens extended by the token that leads to `state`."""
        return (state, length + 1) if length < self.max_match else self.refresh_match((state, length))

    def refresh_match(self, match: Match) -> Match:
        """Return a match with its current state: `append` may have split the state, or the caller may have shortened the substring."""
        state, length = match
        links, lengths = self._link, self._length
        while state and lengths[links[state]] >= length:
            state = links[state]
        return state, length

    def _split_state(self, old_state: int, state: int, token_id: int) -> int:
        """Move the shorter substrings of a state, which now also occur at the end of the text, to a new state; return the new state.

        The longest of them is the longest substring of `state` with `token_id` appended.
        """
        nexts, links, lengths = self._next, self._link, self._length
        new_state = len(lengths)
        nexts.append(nexts[old_state].copy())
        links.append(links[old_state])
        lengths.append(lengths[state] + 1)
        self._count.append(self._count[old_state])
        self._last_end.append(self._last_end[old_state])
        links[old_state] = new_state
        while state >= 0 and nexts[state].get(token_id) == old_state:
            nexts[state][token_id] = new_state
            state = links[state]
        return new_state

    def _count_end_positions(self, token_id: int) -> None:
        """Count one more occurrence of each substring of up to `max_match` + 1 tokens that ends with the new token."""
        links, lengths, counts, ends, size = self._link, self._length, self._count, self._last_end, self.size
        state, length = self._counted_state, self._counted_len
        while state and lengths[links[state]] >= length:  # `refresh_match`, inlined for speed
            state = links[state]
        state = self._next[state][token_id]
        if length <= self.max_match:
            length += 1
        while lengths[links[state]] >= length:
            state = links[state]
        self._counted_state, self._counted_len = state, length
        while state > 0:
            counts[state] += 1
            ends[state] = size
            state = links[state]


MIN_MATCH_TOKENS = 2
MIN_PATH_PROB = 0.2  # tree nodes below this probability are not drafted: in measurements they were hardly ever accepted


@dataclass(slots=True)
class _StoreMatch:
    """The longest suffix of a request's text that occurs in one automaton of a `SuffixStore`."""

    automaton: SuffixAutomaton
    num_compared_tokens: int = 0  # number of the request's tokens that were compared with the automaton so far
    match: Match = (0, 0)

    def update(self, token_ids: Sequence[int]) -> None:
        """Extend the match by the new tokens of a request's text `token_ids`. Only the last `max_match` tokens can match: skip others."""
        first = len(token_ids) - self.automaton.max_match
        if first > self.num_compared_tokens:
            self.num_compared_tokens, self.match = first, (0, 0)
        for token in token_ids[self.num_compared_tokens :]:
            self.match = self.automaton.extend_match(self.match, token)
        self.match = self.automaton.refresh_match(self.match)  # states are split when outputs are added to the store
        self.num_compared_tokens = len(token_ids)


@dataclass(slots=True)
class _RequestText:
    """Suffix automaton of a request's own text, and matches of the end of this text in the outputs of a `SuffixStore`."""

    automaton: SuffixAutomaton
    store_matches: list[_StoreMatch] = field(default_factory=list)


class SuffixStore:
    """Outputs of finished requests, from which later requests of the same namespace draft. The oldest outputs are dropped first.

    Args:
        max_tokens: maximum number of tokens stored for each namespace.
        max_namespaces: maximum number of namespaces; the least recently used one is dropped.

    Raises:
        ConfigError: `max_tokens` or `max_namespaces` is below 1.
    """

    def __init__(self, max_tokens: int = 65_536, max_namespaces: int = 16, max_match: int = MAX_MATCH_TOKENS) -> None:
        for name, value in (("max_tokens", max_tokens), ("max_namespaces", max_namespaces)):
            if value < 1:
                raise ConfigError(f"{name} of a suffix store is {value}: use a whole number from 1, or no store")
        self._automaton_size, self._max_namespaces, self._max_match = max(1, max_tokens // 2), max_namespaces, max_match
        # two automata for each namespace: no token can be removed from an automaton, so the older one is dropped as a whole
        self._automata: OrderedDict[str, list[SuffixAutomaton]] = OrderedDict()

    def add(self, namespace: str, token_ids: Sequence[int]) -> None:
        """Add the output of a finished request. Of a long output, only the last `max_tokens` // 2 - 1 tokens are added."""
        stored_ids = token_ids[-(self._automaton_size - 1) :] if self._automaton_size > 1 else []
        automata = self._automata.setdefault(namespace, [])
        self._automata.move_to_end(namespace)
        if not automata or automata[-1].size + len(stored_ids) + 1 > self._automaton_size:
            automata.append(SuffixAutomaton(self._max_match))
            del automata[:-2]
        for token in (*stored_ids, OUTPUT_SEPARATOR):
            automata[-1].append(token)
        while len(self._automata) > self._max_namespaces:
            self._automata.popitem(last=False)

    def automata(self, namespace: str) -> Sequence[SuffixAutomaton]:
        """Return the automata with the outputs of a namespace, older outputs first."""
        return self._automata.get(namespace, ())

    def num_stored_tokens(self, namespace: str) -> int:
        """Return the number of tokens stored for a namespace, including one separator for each output."""
        return sum(automaton.size for automaton in self.automata(namespace))

    def clear(self, namespace: str | None = None) -> None:
        """Remove the stored outputs of one namespace, or of all."""
        if namespace is None:
            self._automata.clear()
        else:
            self._automata.pop(namespace, None)


class SuffixDrafter(Drafter):
    """Drafts what followed earlier occurrences of the text's last tokens; needs no model.

    Args:
        min_match: minimum number of last tokens that must occur earlier.
        max_match: maximum number of last tokens that are compared.
        store: outputs of earlier requests to draft from; None = a request drafts from its own text only.
    """

    name = "suffix"

    def __init__(self, min_match: int = MIN_MATCH_TOKENS, max_match: int = MAX_MATCH_TOKENS, store: SuffixStore | None = None) -> None:
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
        uses_store = self._store is not None and request.namespace is not None
        if text is None or uses_store or len(request.token_ids) - text.automaton.size > MAX_CATCH_UP_TOKENS:
            return True
        for token in request.token_ids[text.automaton.size :]:
            text.automaton.append(token)
        return text.automaton.repeated_suffix[1] >= self._min_match

    def release(self, request: Request) -> None:
        is_complete = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)  # not aborted or failed
        if self._store is not None and request.namespace is not None and is_complete:
            self._store.add(request.namespace, request.output_token_ids)

    def _draft(self, request: Request, budget: DraftBudget) -> DraftTree | None:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _RequestText(SuffixAutomaton(self._max_match))
        automaton = text.automaton
        for token in request.token_ids[automaton.size : automaton.size + MAX_INDEXED_TOKENS_PER_STEP]:
            automaton.append(token)
        if automaton.size < len(request.token_ids):
            return None
        match = automaton.repeated_suffix
        for store_match in self._matches_in_store(text, request):
            if store_match.match[1] > match[1]:
                automaton, match = store_match.automaton, store_match.match
        if match[1] < self._min_match:
            return None
        return self._build_tree(automaton, match, request.token_ids[-1], budget)

    def _matches_in_store(self, text: _RequestText, request: Request) -> list[_StoreMatch]:
        if self._store is None or request.namespace is None:
            return []
        matches = {id(stored.automaton): stored for stored in text.store_matches}
        text.store_matches = [matches.get(id(automaton)) or _StoreMatch(automaton) for automaton in self._store.automata(request.namespace)]
        for stored in text.store_matches:
            stored.update(request.token_ids)
        return text.store_matches

    def _build_tree(self, automaton: SuffixAutomaton, match: Match, root_token_id: int, budget: DraftBudget) -> DraftTree | None:
        num_tokens = budget.max_tokens
        continuation = automaton.unambiguous_tokens(match, self._min_match, num_tokens)
        if len(continuation) == num_tokens > 0:  # if each token has a single known continuation, a chain is enough
            return DraftTree.chain(root_token_id, continuation, self.name, match_confidence(match[1], num_tokens))
        return grow_tree(
            root_token_id, budget, match, lambda node: automaton.next_tokens(node, self._min_match), self.name, min_path_prob=MIN_PATH_PROB
        )
