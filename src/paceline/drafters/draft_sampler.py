"""Sample draft tokens from a drafter's logits, for one request and one path of a draft tree.

At temperature 0 the draft tokens are the most probable ones. Otherwise the first draft token is drawn with the random noise that the target
will use at that position (Gumbel coupling, Daliri et al. 2024, arXiv:2408.07978, section 3), so that drafter and target tend to draw the
same token. Its siblings in the tree are the most probable other tokens.
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
from paceline.sampling.truncation import SUPPORT_TOP_N, support_of, top_probs
from paceline.speculation.request import Request
from paceline.speculation.tree_growth import MIN_COUPLED_PROB

_MAX_LOG_PROB_GAP = 12.0  # siblings whose log-probability is smaller than that of the most probable token by more than this are not drafted


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """The draft tokens after one node of a draft tree, most probable first."""

    token_ids: Sequence[int] = ()
    probs: Sequence[float] = ()  # for each token the estimated probability that the target draws it
    draft_probs: TokenProbs | None = None  # the distribution that the tokens were drawn from; only for rejection sampling


NO_TOKENS = DraftTokens()


def target_noise_sampling(rows: Sequence[tuple[Request, int] | None]) -> RowSampling | None:
    """Return the noise keys and temperatures with which a pass draws one token from each row of logits; None if it draws none.

    Args:
        rows: for each row the request and the number of draft tokens before the token to draw; None = draw no token from this row.
    """
    if not any(rows):
        return None
    sampling = np.zeros(len(rows), SAMPLING_DTYPE)
    for index, row in enumerate(rows):
        if row is not None:
            request, num_draft_tokens = row
            key = noise_key(request.seed, request.sample_index, len(request.token_ids) + num_draft_tokens, Purpose.TOKEN)
            sampling[index] = (key, request.params.temperature, 0)
    return sampling


class DraftSampler:
    """Samples draft tokens, as ids of the target, from rows of logits over a draft vocabulary.

    Args:
        target_ids: [Vd] target id of each draft id, ascending; None = draft ids are target ids.
        vocab_size: V, size of the target's vocabulary.
        num_draftable_ids: only target ids below this number are drafted; None = V.
    """

    def __init__(self, target_ids: NDArray[np.int64] | None, vocab_size: int, num_draftable_ids: int | None = None) -> None:
        self._vocab_size, self._target_row = vocab_size, np.full(vocab_size, -np.inf, np.float32)  # ids that cannot be drafted stay -inf
        self._num_draftable_ids = vocab_size if num_draftable_ids is None else min(vocab_size, num_draftable_ids)
        self._target_ids = None if target_ids is None else target_ids[target_ids < self._num_draftable_ids]

    def summary_options(self, width: int) -> SummaryOptions:
        """Return the options with which a pass summarises a row of logits for `sample_from_top_tokens` of `width` tokens."""
        columns = self._num_draftable_ids if self._target_ids is None else len(self._target_ids)
        return SummaryOptions(columns, 1 if width == 1 else width + 1, self._target_ids)

    def truncated_summary_options(self, width: int) -> SummaryOptions:
        """Return the options with which a pass summarises a row of logits for `sample_from_truncated_top_tokens` of `width` tokens."""
        return replace(self.summary_options(width), num_top_tokens=max(SUPPORT_TOP_N, width + 1))

    def sample_from_top_tokens(self, row: LogitsSummary, width: int, *, is_greedy: bool) -> DraftTokens:
        """Sample as `sample` does, from the top tokens of a row, for a request whose parameters only scale the logits by temperature."""
        log_sum, drawn, scores, ids = row
        if not math.isfinite(log_sum):
            return NO_TOKENS
        first = ids[0] if is_greedy else drawn
        if width == 1:
            best = math.exp(scores[0] - log_sum)
            return DraftTokens((first,), (best if first == ids[0] else _estimate_drawn_prob(best),))
        floor = scores[0] - _MAX_LOG_PROB_GAP
        prob_by_token = {token: math.exp(score - log_sum) for token, score in zip(ids, scores, strict=True) if score > floor}
        return _add_siblings(first, prob_by_token, width, is_greedy=is_greedy)

    def sample_from_truncated_top_tokens(self, request: Request, path: Sequence[int], row: LogitsSummary, width: int) -> DraftTokens | None:
        """Sample as `sample` does, from the top tokens of a row, for a request with top-k, top-p or min-p.

        None if more tokens of the row are needed to apply top-k, top-p and min-p.
        """
        log_sum, drawn, scores, ids = row
        probs = [math.exp(score - log_sum) for score in scores]
        support = support_of(request.params, probs)
        top = ids[: support.num_kept]
        if drawn not in top:
            if not support.includes_all_kept:
                return None
            position = len(request.token_ids) + len(path)
            candidates = Distribution(np.array(scores[: support.num_kept], np.float32), np.array(top), greedy=False)
            drawn = draw(candidates, request.seed, request.sample_index, position)
        prob_by_token = {token: prob / support.mass if support.includes_all_kept else prob for token, prob in zip(top, probs, strict=False)}
        if width == 1:
            return DraftTokens((drawn,), (min(1.0, prob_by_token[drawn]),))
        return _add_siblings(drawn, prob_by_token, width, is_greedy=False)

    def sample(self, request: Request, path: Sequence[int], row: FloatArray, width: int, *, needs_draft_probs: bool) -> DraftTokens:
        """Sample up to `width` tokens that may follow the request's tokens and `path`; none if the draft vocabulary has no allowed token.

        Args:
            path: draft tokens before the sampled one.
            row: [Vd] logits of the drafter.
            needs_draft_probs: if `width` is 1, draw with noise that the target does not use, and return the distribution.
        """
        try:
            return self.sample_target_row(request, path, self.to_target_logits(row), width, needs_draft_probs=needs_draft_probs)
        except PacelineError:  # the request's constraints allow no token that can be drafted, or the logits are invalid
            return NO_TOKENS

    def sample_target_row(
        self, request: Request, path: Sequence[int], row: FloatArray, width: int, *, needs_draft_probs: bool
    ) -> DraftTokens:
        """Sample as `sample` does, from a row of logits [V] over the target's ids.

        Raises:
            PacelineError: no token is allowed, or the logits are invalid.
        """
        edited = request.processor.edit_logits(row, path)
        if needs_draft_probs and width == 1 and not request.params.is_greedy:
            return _draw_for_rejection_sampling(request, path, edited.distribution())
        first = edited.draw(request.seed, request.sample_index, len(request.token_ids) + len(path))
        scores, ids = edited.scaled_logits(), self._target_ids
        return _first_and_most_probable(request.params, scores if ids is None else scores[ids], ids, first, width)

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
        """Sample as `sample` does, if all tokens but these candidates have probability 0.

        Args:
            token_ids: [k] target ids of the candidates, ascending.
            scores: [k] logits of the candidates.
        """
        if not len(token_ids) or not np.isfinite(scores).all():
            return NO_TOKENS
        if not request.processor.only_applies_temperature:
            target_row = np.full(self._vocab_size, -np.inf, np.float32)
            target_row[token_ids] = scores
            try:
                return self.sample_target_row(request, path, target_row, width, needs_draft_probs=needs_draft_probs)
            except PacelineError:  # the request's constraints allow none of the candidates
                return NO_TOKENS
        is_greedy = request.params.is_greedy
        scaled = scores if is_greedy else scores / np.float32(request.params.temperature)
        candidates = Distribution(scaled, token_ids.astype(np.int64), is_greedy)
        if needs_draft_probs and width == 1 and not candidates.greedy:
            return _draw_for_rejection_sampling(request, path, candidates)
        first = draw(candidates, request.seed, request.sample_index, len(request.token_ids) + len(path))
        return _first_and_most_probable(request.params, candidates.scores, candidates.token_ids, first, width)

    def to_target_logits(self, row: FloatArray) -> FloatArray:
        """Convert logits [Vd] to a row [V] of the target's ids, which the next call may overwrite; ids that are never drafted get -inf."""
        if self._target_ids is not None:
            # target ids ascend, so the columns of ids that are never drafted are the last
            self._target_row[self._target_ids] = row[: len(self._target_ids)]
            return self._target_row
        num_columns = min(len(row), self._num_draftable_ids)
        if num_columns == self._vocab_size:
            return row[:num_columns]
        self._target_row[:num_columns] = row[:num_columns]
        return self._target_row


def _draw_for_rejection_sampling(request: Request, path: Sequence[int], distribution: Distribution) -> DraftTokens:
    """Draw one token for rejection sampling, with noise that the target does not use."""
    probs = TokenProbs.from_distribution(distribution)
    return DraftTokens(draw_distinct(probs, 1, request.seed, request.sample_index, len(request.token_ids), len(path)), (1.0,), probs)


def _first_and_most_probable(
    params: SamplingParams, scores: FloatArray, ids: NDArray[np.int64] | None, first_token: int, width: int
) -> DraftTokens:
    """Return `first_token`, which was drawn, and, as its siblings, the most probable other tokens, `width` in all.

    Args:
        scores: [M] scores before top-k, top-p and min-p.
        ids: [M] token ids of the scores; None = the index of a score is its id.
    """
    best, probs = top_probs(params, scores, width + 1 if width > 1 else 1)
    tokens: list[int] = (best if ids is None else ids[best]).tolist()
    if width == 1:
        index = first_token if ids is None else int(ids.searchsorted(first_token))
        return DraftTokens((first_token,), (probs[0] if scores[index] == scores[best[0]] else _estimate_drawn_prob(probs[0]),))
    floor = scores[best[0]] - _MAX_LOG_PROB_GAP
    prob_by_token = {token: prob for token, prob, score in zip(tokens, probs, scores[best], strict=True) if score > floor}
    return _add_siblings(first_token, prob_by_token, width, is_greedy=params.is_greedy)


def _estimate_drawn_prob(best_prob: float) -> float:
    """Estimate the probability of a drawn token that is not the most probable token, whose probability is `best_prob`."""
    return min(best_prob, 1.0 - best_prob) / 2.0


def _add_siblings(first_token: int, prob_by_token: Mapping[int, float], width: int, *, is_greedy: bool) -> DraftTokens:
    """Return `first_token` and its most probable siblings. If the target's noise chose it, `MIN_COUPLED_PROB` is its least probability."""
    first_prob = prob_by_token.get(first_token, 0.0)
    if not is_greedy:
        first_prob = max(first_prob, MIN_COUPLED_PROB)
    siblings = [item for item in prob_by_token.items() if item[0] != first_token][: width - 1]
    sibling_mass = sum([prob for _, prob in siblings])
    scale = min(1.0, (1.0 - first_prob) / sibling_mass) if sibling_mass > 0.0 else 0.0
    return DraftTokens((first_token, *[token for token, _ in siblings]), (first_prob, *[prob * scale for _, prob in siblings]))
