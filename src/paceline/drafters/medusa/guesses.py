"""What the heads guess for one request: candidates by depth, and how often candidates of a rank were right.

Guesses at a depth do not depend on what was guessed before them, but for processors that look at history (penalties): these see the chain
of first guesses.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.errors import PacelineError
from paceline.runtimes.base import FloatArray
from paceline.runtimes.ranking import RankedRow
from paceline.sampling.residual import TokenProbs, draw_distinct
from paceline.sampling.truncation import top_probs
from paceline.speculation.request import Request

NUM_RANKS = 10
_PRIOR_WEIGHT = 8.0
_MEMORY = 512.0  # trials a depth remembers


@dataclass(frozen=True, slots=True)
class Candidates:
    """Guesses at one depth, best first, and the probability the head gives each; of a sampled request the first one is the draw."""

    token_ids: Sequence[int]
    probs: Sequence[float]


@dataclass(slots=True)
class RankAccuracy:
    """How often the target's token was a head's r-th guess, over positions whose guesses before it were right; decays.

    Attributes:
        trials: [depths].
        hits: [depths, ranks].
    """

    trials: list[float] = field(default_factory=list)
    hits: list[list[float]] = field(default_factory=list)

    def observe(self, guessed: Sequence[Sequence[int]], token_ids: Sequence[int]) -> None:
        """Record what the target chose; the last of `token_ids` is the token after the last right guess.

        Args:
            guessed: by depth, the ids guessed there, best first.
        """
        while len(self.trials) < len(guessed):
            self.trials.append(0.0)
            self.hits.append([0.0] * NUM_RANKS)
        for depth, (ids, token) in enumerate(zip(guessed, token_ids, strict=False)):
            if self.trials[depth] >= _MEMORY:
                self.trials[depth] /= 2.0
                self.hits[depth] = [hits / 2.0 for hits in self.hits[depth]]
            self.trials[depth] += 1.0
            if token in ids:
                self.hits[depth][ids.index(token)] += 1.0

    def of(self, depth: int, rank: int, expected: float) -> float:
        """The share of a rank at a depth; `expected` where little is known."""
        trials, hits = (self.trials[depth], self.hits[depth][rank]) if depth < len(self.trials) else (0.0, 0.0)
        return (hits + _PRIOR_WEIGHT * expected) / (trials + _PRIOR_WEIGHT)


class Guesses:
    """Candidates of one request, made when a depth is asked for, in order.

    Args:
        row_of: a depth -> the head's row over the target's ids [V].
        num_ranks: candidates a depth.
        wants_probs: whether their probabilities are of use; else all are 1.
        ranked: the pass's own ranking of each depth's row, if that is enough; else None.
    """

    def __init__(
        self,
        request: Request,
        row_of: Callable[[int], FloatArray],
        num_ranks: int,
        *,
        wants_probs: bool,
        ranked: Sequence[RankedRow] | None = None,
    ) -> None:
        self._ranked = ranked
        self._request, self._row_of = request, row_of
        self._num_ranks, self._wants_probs = num_ranks, wants_probs
        self.by_depth: list[Candidates] = []

    def at(self, depth: int) -> Candidates:
        """Guesses for the token `depth` positions behind the root's child; none if no token the head knows is allowed."""
        while len(self.by_depth) <= depth:
            at = len(self.by_depth)
            self.by_depth.append(self._make(at) if self._ranked is None else self._of_ranked(self._ranked[at]))
        return self.by_depth[depth]

    def _of_ranked(self, row: RankedRow) -> Candidates:
        """As `_make`, for a request whose rows only the temperature changes."""
        log_sum, drawn, scores, ids = row
        if not math.isfinite(log_sum):
            return Candidates((), ())
        is_greedy = self._request.params.is_greedy
        if self._num_ranks == 1:
            return Candidates((ids[0] if is_greedy else drawn,), (1.0,))
        listed = [token for token in ids[: self._num_ranks] if token >= 0]
        probs = [1.0] * len(listed)
        if self._wants_probs:
            probs = [math.exp(score - log_sum) for score in scores[: len(listed)]]
        return Candidates(listed, probs) if is_greedy else self._led_by(drawn, listed, probs)

    def _led_by(self, first: int, ids: Sequence[int], probs: Sequence[float]) -> Candidates:
        """The drawn token, then the others."""
        others = [(token, prob) for token, prob in zip(ids, probs, strict=True) if token != first][: self._num_ranks - 1]
        own = probs[ids.index(first)] if first in ids else probs[-1]
        return Candidates([first, *[token for token, _ in others]], [own, *[prob for _, prob in others]])

    def _make(self, depth: int) -> Candidates:
        request = self._request
        chain = [guesses.token_ids[0] for guesses in self.by_depth if guesses.token_ids]
        try:
            edited = request.processor.edit(self._row_of(depth), chain)
        except PacelineError:
            return Candidates((), ())
        first = edited.draw(request.seed, request.sample_index, len(request.token_ids) + depth)
        if self._num_ranks == 1:
            return Candidates([first], [1.0])
        best, probs = top_probs(request.params, edited.scale(), self._num_ranks)
        ids: list[int] = best.tolist()
        if not self._wants_probs:
            probs = [1.0] * len(ids)
        return Candidates(ids, probs) if request.params.is_greedy else self._led_by(first, ids, probs)


def drawn_chain(request: Request, row_of: Callable[[int], FloatArray], depth: int) -> tuple[list[int], dict[int, TokenProbs]]:
    """One token per depth, each drawn from its head's distribution with separate noise, and the distributions by node."""
    token_ids: list[int] = []
    draft_probs: dict[int, TokenProbs] = {}
    for node in range(depth):
        try:
            draft_probs[node] = TokenProbs.from_distribution(request.processor.process(row_of(node), token_ids))
        except PacelineError:
            break
        token_ids += draw_distinct(draft_probs[node], 1, request.seed, request.sample_index, len(request.token_ids), node)
    return token_ids, draft_probs
