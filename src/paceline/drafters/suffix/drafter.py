"""Draft what followed the longest matching end of the text before, weighed by how often it did.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975), section 4. Deviations: an online suffix automaton instead of
suffix trees; a node's distribution is always that of the longest matching context, guessed tokens included, so that a guess goes on
where the matching passage ended; trees grow by probability per row of the target pass; nothing is shared between requests unless a store
is given and the request names a namespace.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.drafters.suffix.automaton import MAX_MATCH, SEPARATOR, Match, SuffixAutomaton
from paceline.errors import ConfigError
from paceline.speculation.draft_length.acceptance import match_confidence
from paceline.speculation.drafter import MAX_CATCH_UP_TOKENS, DraftBudget, Drafter, DrafterTraits, RequestState
from paceline.speculation.request import FinishReason, Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Candidate, grow_tree

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


class SuffixStore:
    """Finished outputs that later requests of the same namespace may be guessed from; bounded: the oldest go first.

    Args:
        max_tokens: of one namespace.
        max_namespaces: the one not used for longest is dropped.

    Raises:
        ConfigError: a bound is below 1.
    """

    def __init__(self, max_tokens: int = 65_536, max_namespaces: int = 16, max_match: int = MAX_MATCH) -> None:
        for name, value in (("max_tokens", max_tokens), ("max_namespaces", max_namespaces)):
            if value < 1:
                raise ConfigError(f"{name} of a suffix store is {value}: use a whole number from 1, or no store")
        self._half, self._max_namespaces, self._max_match = max(1, max_tokens // 2), max_namespaces, max_match
        # Two automata each, the older one full: tokens cannot be removed from an automaton, so the older one is dropped as a whole.
        self._texts: OrderedDict[str, list[SuffixAutomaton]] = OrderedDict()

    def add(self, namespace: str, token_ids: Sequence[int]) -> None:
        """Remember an output; of one that is too long, its end."""
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
        """The automata of a namespace, the older one first."""
        return self._texts.get(namespace, ())

    def num_tokens(self, namespace: str) -> int:
        """Tokens kept, the separators between outputs included."""
        return sum(automaton.size for automaton in self.automata(namespace))

    def clear(self, namespace: str | None = None) -> None:
        """Forget one namespace, or all of them."""
        if namespace is None:
            self._texts.clear()
        else:
            self._texts.pop(namespace, None)


class SuffixDrafter(Drafter):
    """Proposes trees of what followed before, in the request's own text; needs no model.

    Args:
        min_match: tokens of context that must occur before anything is guessed.
        max_match: tokens of context that are compared at most.
        store: finished outputs of requests that name a namespace; None = a request is guessed from its own text alone.
    """

    name = "suffix"

    def __init__(self, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH, store: SuffixStore | None = None) -> None:
        if not 1 <= min_match <= max_match:
            raise ConfigError(f"min_match is {min_match} and max_match {max_match}: use 1 <= min_match <= max_match")
        self._min_match, self._max_match, self._store = min_match, max_match, store
        self._texts = RequestState[_Text]()
        shared = "" if store is None else ", and in its namespace's finished outputs"
        self.traits = DrafterTraits(
            f"suffix (what followed the last {min_match} or more tokens before, by frequency{shared})", is_lookup=True
        )

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        return [self._guess(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def has_candidates(self, request: Request) -> bool:
        text = self._texts.get(request)
        is_shared = self._store is not None and request.namespace is not None
        if text is None or is_shared or len(request.token_ids) - text.own.size > MAX_CATCH_UP_TOKENS:
            return True
        for token in request.token_ids[text.own.size :]:
            text.own.append(token)
        return text.own.repeated[1] >= self._min_match

    def release(self, request: Request) -> None:
        is_whole = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)  # neither given up nor failed
        if self._store is not None and request.namespace is not None and is_whole:
            self._store.add(request.namespace, request.output_token_ids)

    def _guess(self, request: Request, budget: DraftBudget) -> DraftTree | None:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text(SuffixAutomaton(self._max_match))
        automaton = text.own
        for token in request.token_ids[automaton.size :]:
            automaton.append(token)
        match = automaton.repeated
        for reader in self._stored(text, request):
            if reader.match[1] > match[1]:
                automaton, match = reader.automaton, reader.match
        if match[1] < self._min_match:
            return None
        return self._grow(automaton, match, request.token_ids[-1], budget)

    def _stored(self, text: _Text, request: Request) -> list[_Reader]:
        if self._store is None or request.namespace is None:
            return []
        known = {id(reader.automaton): reader for reader in text.stored}
        text.stored = [known.get(id(automaton)) or _Reader(automaton) for automaton in self._store.automata(request.namespace)]
        for reader in text.stored:
            reader.read(request.token_ids)
        return text.stored

    def _grow(self, automaton: SuffixAutomaton, match: Match, root_token_id: int, budget: DraftBudget) -> DraftTree | None:
        wanted = budget.max_tokens
        certain = automaton.run(match, self._min_match, wanted)
        if len(certain) == wanted > 0:  # the usual case by far, and no tree is better
            return DraftTree.chain(root_token_id, certain, self.name, match_confidence(match[1], wanted))

        def expand(context: Match) -> list[Candidate[Match]]:
            return [(token, prob, self.name, then) for token, prob, then in automaton.followers(context, self._min_match)]

        return grow_tree(root_token_id, budget, match, expand, least_prob=LEAST_PROB)
