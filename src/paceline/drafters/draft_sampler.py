"""Sample draft tokens from a drafter's logits, for one request and one path.

At temperature 0 the draft tokens are the most probable ones. Otherwise the first draft token is drawn with the target's own noise (Gumbel
coupling, Daliri et al. 2024, arXiv:2408.07978, section 3), so that drafter and target tend to draw the same token; its siblings are the
most probable others.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.runtimes.base import FloatArray
from paceline.runtimes.logits_summary import SAMPLING_DTYPE, LogitsSummary, RowSampling, SummaryOptions
from paceline.sampling.draw import Distribution, draw
from paceline.sampling.noise import Purpose, noise_key
from paceline.sampling.params import SamplingParams
from paceline.sampling.residual import TokenProbs, draw_distinct
from paceline.sampling.truncation import TOP_N, support_of, top_probs
from paceline.speculation.request import Request
from paceline.speculation.tree_growth import COUPLED_PROB

_MAX_LOG_PROB_GAP = 12.0  # a token whose log-probability is this far below the best is not worth a row of the target's pass


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Draft tokens after one node, best first, each with the estimated probability that the target draws it.

    Attributes:
        draft_probs: the distribution the tokens were drawn from, for rejection sampling.
    """

    token_ids: Sequence[int] = ()
    probs: Sequence[float] = ()
    draft_probs: TokenProbs | None = None


NO_TOKENS = DraftTokens()


def token_draws(rows: Sequence[tuple[Request, int] | None]) -> RowSampling | None:
    """Return how each row's token is drawn with the target's noise; None if no row is drawn from.

    Args:
        rows: for each row the request and the number of draft tokens before the drawn one; None = not drawn.
    """
    if not any(rows):
        return None
    draws = np.zeros(len(rows), SAMPLING_DTYPE)
    for index, row in enumerate(rows):
        if row is not None:
            request, num_draft_tokens = row
            key = noise_key(request.seed, request.sample_index, len(request.token_ids) + num_draft_tokens, Purpose.TOKEN)
            draws[index] = (key, request.params.temperature, 0)
    return draws


class DraftSampler:
    """Samples rows over a draft vocabulary as rows over the target's.

    Args:
        target_ids: [Vd] the target's id of each draft id; None = the same.
        vocab_size: V; ids beyond it are never drafted.
        num_known: nor are ids from here on; None = V.
    """

    def __init__(self, target_ids: NDArray[np.int64] | None, vocab_size: int, num_known: int | None = None) -> None:
        self._row = np.full(vocab_size, -np.inf, np.float32)  # target ids that the draft vocabulary lacks stay -inf
        self._vocab_size, self._num_known = vocab_size, vocab_size if num_known is None else min(vocab_size, num_known)
        self._target_ids = None if target_ids is None else target_ids[target_ids < self._num_known]

    def ranking(self, width: int) -> SummaryOptions:
        """Return the ranking to request from the pass, so that `sample_ranked` can sample `width` tokens."""
        columns = self._num_known if self._target_ids is None else len(self._target_ids)
        return SummaryOptions(columns, 1 if width == 1 else width + 1, self._target_ids)

    def truncated_ranking(self, width: int) -> SummaryOptions:
        """Return the ranking to request from the pass, so that `sample_truncated` can sample."""
        return replace(self.ranking(width), count=max(TOP_N, width + 1))

    def sample_ranked(self, row: LogitsSummary, width: int, *, is_greedy: bool) -> DraftTokens:
        """Sample as `sample` does, for a request whose logits are changed by the temperature only."""
        log_sum, drawn, scores, ids = row
        if not math.isfinite(log_sum):
            return NO_TOKENS
        first = ids[0] if is_greedy else drawn
        if width == 1:
            best = math.exp(scores[0] - log_sum)
            return DraftTokens((first,), (best if first == ids[0] else _unlikely_prob(best),))
        floor = scores[0] - _MAX_LOG_PROB_GAP
        prob_of = {token: math.exp(score - log_sum) for token, score in zip(ids, scores, strict=True) if score > floor}
        return _with_siblings(first, prob_of, width, is_greedy=is_greedy)

    def sample_truncated(self, request: Request, path: Sequence[int], row: LogitsSummary, width: int) -> DraftTokens | None:
        """Sample as `sample`, for a request with top-k, top-p or min-p; None if the top tokens do not determine what these keep.

        Args:
            row: ranked by `truncated_ranking` and drawn from with the noise of this position.
        """
        log_sum, drawn, scores, ids = row
        probs = [math.exp(score - log_sum) for score in scores]
        support = support_of(request.params, probs)
        top = ids[: support.count]
        if drawn not in top:
            if not support.is_all:
                return None
            position = len(request.token_ids) + len(path)
            candidates = Distribution(np.array(scores[: support.count], np.float32), np.array(top), greedy=False)
            drawn = draw(candidates, request.seed, request.sample_index, position)
        prob_of = {token: prob / support.mass if support.is_all else prob for token, prob in zip(top, probs, strict=False)}
        if width == 1:
            return DraftTokens((drawn,), (min(1.0, prob_of[drawn]),))
        return _with_siblings(drawn, prob_of, width, is_greedy=False)

    def sample(self, request: Request, path: Sequence[int], row: FloatArray, width: int, *, needs_draft_probs: bool) -> DraftTokens:
        """Sample up to `width` tokens that may follow the request's tokens and `path`; none if no known token is allowed.

        Args:
            row: [Vd] logits.
            needs_draft_probs: draw from the row's distribution with separate noise (a single token only).
        """
        try:
            return self.sample_target_row(request, path, self._as_target_row(row), width, needs_draft_probs=needs_draft_probs)
        except PacelineError:  # the sampling parameters allow no known token, or the logits are invalid
            return NO_TOKENS

    def sample_target_row(
        self, request: Request, path: Sequence[int], row: FloatArray, width: int, *, needs_draft_probs: bool
    ) -> DraftTokens:
        """Sample as `sample`, from a row [V] over the target's ids.

        Raises:
            PacelineError: as `LogitsProcessor.edit`.
        """
        edited = request.processor.edit(row, path)
        if needs_draft_probs and width == 1 and not request.params.is_greedy:
            return _draw_separately(request, path, edited.distribution())
        first = edited.draw(request.seed, request.sample_index, len(request.token_ids) + len(path))
        scores, ids = edited.scale(), self._target_ids
        return _most_probable(request.params, scores if ids is None else scores[ids], ids, first, width)  # scores of other ids are -inf

    def sample_candidates(
        self,
        request: Request,
        path: Sequence[int],
        token_ids: NDArray[np.integer],
        scores: FloatArray,
        width: int,
        *,
        needs_draft_probs: bool,
    ) -> DraftTokens:
        """Sample as `sample` does, from the candidates: all other ids are impossible.

        Args:
            token_ids: [k] the target's ids of the candidates, ascending.
            scores: [k] their logits.
        """
        if not len(token_ids) or not np.isfinite(scores).all():
            return NO_TOKENS
        if not request.processor.only_scales:
            whole = np.full(self._vocab_size, -np.inf, np.float32)
            whole[token_ids] = scores
            try:
                return self.sample_target_row(request, path, whole, width, needs_draft_probs=needs_draft_probs)
            except PacelineError:  # the sampling parameters allow none of these tokens
                return NO_TOKENS
        is_greedy = request.params.is_greedy
        scaled = scores if is_greedy else scores / np.float32(request.params.temperature)
        candidates = Distribution(scaled, token_ids.astype(np.int64), is_greedy)
        if needs_draft_probs and width == 1 and not candidates.greedy:
            return _draw_separately(request, path, candidates)
        first = draw(candidates, request.seed, request.sample_index, len(request.token_ids) + len(path))
        return _most_probable(request.params, candidates.scores, candidates.token_ids, first, width)

    def _as_target_row(self, row: FloatArray) -> FloatArray:
        if self._target_ids is not None:
            self._row[self._target_ids] = row[: len(self._target_ids)]  # draft ids ascend by target id, so ids beyond V come last
            return self._row
        known = min(len(row), self._num_known)
        if known == self._vocab_size:
            return row[:known]
        self._row[:known] = row[:known]
        return self._row


def _draw_separately(request: Request, path: Sequence[int], distribution: Distribution) -> DraftTokens:
    """Draw one token with separate noise, for rejection sampling."""
    probs = TokenProbs.from_distribution(distribution)
    return DraftTokens(draw_distinct(probs, 1, request.seed, request.sample_index, len(request.token_ids), len(path)), (1.0,), probs)


def _most_probable(params: SamplingParams, scores: FloatArray, ids: NDArray[np.int64] | None, first: int, width: int) -> DraftTokens:
    """Return `first` and the most probable other tokens.

    Args:
        scores: [M] before truncation.
        ids: [M] of the scores; None = their positions.
    """
    best, probs = top_probs(params, scores, width + 1 if width > 1 else 1)
    tokens: list[int] = (best if ids is None else ids[best]).tolist()
    if width == 1:
        index = first if ids is None else int(ids.searchsorted(first))
        return DraftTokens((first,), (probs[0] if scores[index] == scores[best[0]] else _unlikely_prob(probs[0]),))
    floor = scores[best[0]] - _MAX_LOG_PROB_GAP
    prob_of = {token: prob for token, prob, score in zip(tokens, probs, scores[best], strict=True) if score > floor}
    return _with_siblings(first, prob_of, width, is_greedy=params.is_greedy)


def _unlikely_prob(best: float) -> float:
    """Estimate the probability of a drawn token that is not the most probable one, from the probability `best` of that one."""
    return min(best, 1.0 - best) / 2.0


def _with_siblings(first: int, prob_of: Mapping[int, float], width: int, *, is_greedy: bool) -> DraftTokens:
    """Return `first` and the most probable others, scaled to the probability that `first` leaves.

    Args:
        prob_of: probabilities of the most probable tokens, best first.
    """
    own = prob_of.get(first, 0.0)
    if not is_greedy:
        own = max(own, COUPLED_PROB)
    others = [item for item in prob_of.items() if item[0] != first][: width - 1]
    rest = sum([prob for _, prob in others])
    scale = min(1.0, (1.0 - own) / rest) if rest > 0.0 else 0.0
    return DraftTokens((first, *[token for token, _ in others]), (own, *[prob * scale for _, prob in others]))
