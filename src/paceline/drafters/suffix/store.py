"""Finished outputs that later requests of the same namespace may be guessed from. Nothing is stored unless someone asks for it."""

from collections import OrderedDict
from collections.abc import Sequence

from paceline.drafters.suffix.automaton import MAX_MATCH, SEPARATOR, SuffixAutomaton
from paceline.errors import ConfigError


class SuffixStore:
    """Finished outputs to guess from, kept apart by namespace and bounded: the oldest go first.

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
