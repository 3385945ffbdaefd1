"""Guess what followed the longest matching end of the text before, weighed by how often it did.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975), section 4. Deviations: an online suffix automaton instead of
suffix trees; a node's distribution is always that of the longest matching context, guessed tokens included, so that a guess goes on
where the matching passage ended; trees grow by probability per row of the target pass; nothing is shared between requests unless a store
is given and the request names a namespace.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from paceline.drafters.suffix.automaton import MAX_MATCH, Match, SuffixAutomaton
from paceline.drafters.suffix.store import SuffixStore
from paceline.errors import ConfigError
from paceline.speculation.acceptance import match_confidence
from paceline.speculation.drafter import DraftBudget, Drafter, RequestState
from paceline.speculation.reading import MOST_CAUGHT_UP, ReadingTime
from paceline.speculation.request import FinishReason, Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Guess, grow_tree

MIN_MATCH = 2
LEAST_PROB = 0.2  # of a node's path; in the texts tried, less likely nodes added rows but hardly any tokens


@dataclass(slots=True)
class _Reader:
    """How far a request's text was read against one automaton, and the longest end of it found there."""

    automaton: SuffixAutomaton
    num_read: int = 0
    match: Match = (0, 0)

    def read(self, token_ids: Sequence[int]) -> None:
        """Read a request's tokens: of those not read yet, only the last `max_match` matter."""
        first = len(token_ids) - self.automaton.max_match
        if first > self.num_read:
            self.num_read, self.match = first, (0, 0)
        for token in token_ids[self.num_read :]:
            self.match = self.automaton.follow(self.match, token)
        self.match = self.automaton.settle(self.match)  # the stored text may have grown since
        self.num_read = len(token_ids)


@dataclass(slots=True)
class _Text:
    """A request's own text, and its place in the stored ones."""

    own: SuffixAutomaton
    stored: list[_Reader] = field(default_factory=list)


class SuffixDrafter(Drafter):
    """Proposes trees of what followed before, in the request's own text; needs no model.

    Args:
        min_match: tokens of context that must occur before anything is guessed.
        max_match: tokens of context that are compared at most.
        store: finished outputs of requests that name a namespace; None = a request is guessed from its own text alone.
    """

    name = "suffix"
    stops_early = False
    is_copier = True

    def __init__(self, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH, store: SuffixStore | None = None) -> None:
        if not 1 <= min_match <= max_match:
            raise ConfigError(f"min_match is {min_match} and max_match {max_match}: use 1 <= min_match <= max_match")
        self._min_match, self._max_match, self._store = min_match, max_match, store
        self._texts = RequestState[_Text]()
        self._reading = ReadingTime()

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        return [self._guess(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def reading_s(self, request: Request) -> float:
        text = self._texts.get(request)
        return self._reading.of(len(request.token_ids) - (0 if text is None else text.own.size))

    def can_guess(self, request: Request) -> bool:
        text = self._texts.get(request)
        is_shared = self._store is not None and request.hints.namespace is not None
        if text is None or is_shared or len(request.token_ids) - text.own.size > MOST_CAUGHT_UP:
            return True
        for token in request.token_ids[text.own.size :]:
            text.own.append(token)
        return text.own.repeated[1] >= self._min_match

    def release(self, request: Request) -> None:
        is_whole = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)  # neither given up nor failed
        if self._store is not None and request.hints.namespace is not None and is_whole:
            self._store.add(request.hints.namespace, request.output_token_ids)

    def describe(self) -> str:
        shared = "" if self._store is None else ", and in its namespace's finished outputs"
        return f"suffix (what followed the last {self._min_match} or more tokens before, by frequency{shared})"

    def _guess(self, request: Request, budget: DraftBudget) -> DraftTree | None:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text(SuffixAutomaton(self._max_match))
        automaton = text.own
        num_unread, start = len(request.token_ids) - automaton.size, perf_counter()
        for token in request.token_ids[automaton.size :]:
            automaton.append(token)
        self._reading.observe(num_unread, perf_counter() - start)
        match = automaton.repeated
        for reader in self._stored(text, request):
            if reader.match[1] > match[1]:
                automaton, match = reader.automaton, reader.match
        if match[1] < self._min_match:
            return None
        return self._grow(automaton, match, request.token_ids[-1], budget)

    def _stored(self, text: _Text, request: Request) -> list[_Reader]:
        if self._store is None or request.hints.namespace is None:
            return []
        known = {id(reader.automaton): reader for reader in text.stored}
        text.stored = [known.get(id(automaton)) or _Reader(automaton) for automaton in self._store.automata(request.hints.namespace)]
        for reader in text.stored:
            reader.read(request.token_ids)
        return text.stored

    def _grow(self, automaton: SuffixAutomaton, match: Match, root_token_id: int, budget: DraftBudget) -> DraftTree | None:
        wanted = min(budget.max_depth, budget.row_budget - 1)
        certain = automaton.run(match, self._min_match, wanted)
        if len(certain) == wanted > 0:  # the usual case by far, and no tree is better
            return DraftTree.chain(root_token_id, certain, self.name, match_confidence(match[1], wanted))

        def expand(context: Match) -> list[Guess[Match]]:
            return [(token, prob, self.name, then) for token, prob, then in automaton.followers(context, self._min_match)]

        return grow_tree(root_token_id, budget, match, expand, least_prob=LEAST_PROB)
