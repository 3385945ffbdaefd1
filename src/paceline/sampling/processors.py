"""The only way from logits to a distribution, the same for plain steps, verification and drafting.

Order: logit bias, repetition penalty, presence and frequency penalties, no_repeat_ngram, bad words, bans, min_tokens, custom processors,
grammar, temperature, top-k, top-p, min-p.
Temperature 0 stops before temperature. A row that the parameters do not change is passed on without a copy.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, RequestError
from paceline.sampling.custom_processors import CustomProcessors
from paceline.sampling.draw import Distribution, ScoreArray, draw
from paceline.sampling.history import TokenCounts
from paceline.sampling.params import SamplingParams
from paceline.sampling.path_sampler import PathSampler, sample_row
from paceline.sampling.sequence_bans import BadWords, RepeatedNgrams

_MASK_ORDER = ("no_repeat_ngram_size", "bad_words", "banned_token_ids", "min_tokens", "processors", "grammar")
_Ids = NDArray[np.int64]


class EditedRow(NamedTuple):
    """A row of logits after everything that comes before temperature.

    Attributes:
        logits: [V]; the row itself where nothing edits it, so it lives until the runtime's next pass.
        max_logit: the largest of them, finite.
        sampler: draws from `logits` with the parameters of `params`; None = the definition does.
    """

    logits: ScoreArray
    max_logit: np.float32
    params: SamplingParams
    sampler: PathSampler | None

    def distribution(self) -> Distribution:
        """Apply temperature, top-k, top-p and min-p."""
        params = self.params
        if params.is_greedy:
            return Distribution(self.logits, None, True)
        scores = self.scale()
        peak = self.max_logit / np.float32(params.temperature)
        ids = truncate(scores, peak, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        return Distribution(scores if ids is None else scores[ids], ids, False)

    def scale(self) -> ScoreArray:
        """[V] scores: the logits divided by the temperature, or as they are where the request is greedy."""
        unscaled = self.params.is_greedy or self.params.temperature == 1.0
        return self.logits if unscaled else self.logits / np.float32(self.params.temperature)

    def draw(self, seed: int, sample_index: int, position: int) -> int:
        """Draw the token as `draw` does from `distribution()`, by the compiled sampler where it can; same arguments."""
        token = None if self.sampler is None else sample_row(self.sampler, self.logits, seed, sample_index, position)
        return draw(self.distribution(), seed, sample_index, position) if token is None else token


class Constraint(Protocol):
    """What may follow the output, decided row by row: a grammar, or one of our own bans."""

    def mask(self, scores: ScoreArray, path: Sequence[int]) -> None:
        """Set the scores [V] of what is not allowed after the committed output and `path` to -inf, in place; changes no state."""

    def commit(self, token_id: int) -> None:
        """Record that a token became part of the output; called once for each, in order."""


class GrammarState(Constraint, Protocol):
    """What a grammar allows."""

    def is_finished(self, path: Sequence[int] = ()) -> bool:
        """Whether committed output + `path` is complete with no end token to come."""


class LogitsProcessor:
    """Turns rows of logits into distributions for one sample of one request.

    It knows the committed history. Rows of draft nodes name the path that leads to them, so a row is processed
    with the same history, and to the same bits, whether its tokens are committed or still guesses.

    Args:
        params: the request's.
        vocab_size: V of the rows.
        prompt_token_ids: the prompt; counts for the repetition penalty, repeated n-grams, bad words and custom processors.
        eos_token_ids: banned, like `params.stop_token_ids`, while the output is shorter than `params.min_tokens`.
        constraint: what `params.grammar` allows.
        bad_word_ids: `sequence_bans.bad_word_ids` of `params.bad_words`; may be left out where these hold no texts.
        path_sampler: draws with the temperature, top-k, top-p and min-p of `params`; None = nothing compiled does.

    Attributes:
        truncates: whether top-k, top-p or min-p leave tokens out.

    Raises:
        RequestError: an id of the parameters or the prompt is not in the vocabulary; bad words are texts and `bad_word_ids` is missing;
            there is a grammar and no constraint.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt_token_ids: Sequence[int],
        eos_token_ids: Sequence[int] = (),
        *,
        constraint: GrammarState | None = None,
        bad_word_ids: Sequence[Sequence[int]] = (),
        path_sampler: PathSampler | None = None,
    ) -> None:
        params.check_vocabulary(vocab_size)
        self._path_sampler = path_sampler
        self.num_output_tokens = 0
        self.constraint = constraint
        self._params = params
        self._bias_ids = np.array(list(params.logit_bias.keys()), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float32)
        self._banned_ids = np.array(sorted(set(params.banned_token_ids)), np.int64)
        ends = {*params.stop_token_ids, *(token_id for token_id in eos_token_ids if token_id < vocab_size)}
        self._end_ids = np.array(sorted(ends), np.int64)
        self._min_tokens = params.min_tokens if ends else 0
        # Everything below exists only where a parameter asks for it, so requests without it pay nothing per token.
        self._seen = TokenCounts(_distinct(prompt_token_ids, vocab_size)) if params.repetition_penalty != 1.0 else None
        self._generated = TokenCounts() if params.frequency_penalty or params.presence_penalty else None
        self._trackers = [counts for counts in (self._seen, self._generated) if counts is not None]
        words = _bad_word_sequences(params, bad_word_ids, vocab_size)
        constraints = _own_constraints(params, words, prompt_token_ids, vocab_size)
        if params.grammar is not None and constraint is None:
            raise RequestError("grammar: nothing here can hold the output to it; generate without one", parameter="grammar")
        if constraint is not None:
            constraints["grammar"] = constraint
        self._listeners = [*(counts.add for counts in self._trackers), *(one.commit for one in constraints.values())]
        masks = {name: one.mask for name, one in constraints.items()}
        if self._banned_ids.size:
            masks["banned_token_ids"] = self._mask_banned
        if self._min_tokens:
            masks["min_tokens"] = self._mask_ends
        self._masks = [(name, masks[name]) for name in _MASK_ORDER if name in masks]
        self.truncates = not params.is_greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
        self._edits_every_row = bool(params.logit_bias or self._trackers or masks.keys() - {"min_tokens"})

    def commit(self, token_id: int) -> None:
        """Record that a token became part of the output. O(1)."""
        self.num_output_tokens += 1
        for listen in self._listeners:
            listen(token_id)

    def commit_all(self, token_ids: Sequence[int]) -> None:
        """`commit` of several, in order."""
        self.num_output_tokens += len(token_ids)
        for listen in self._listeners:
            for token_id in token_ids:
                listen(token_id)

    def is_complete(self, path: Sequence[int] = ()) -> bool:
        """Whether the grammar lets nothing follow the committed output and `path`."""
        return self.constraint is not None and self.constraint.is_finished(path)

    @property
    def leaves_rows(self) -> bool:
        """Whether nothing edits the rows behind the committed output: temperature, top-k, top-p and min-p alone are applied."""
        return not self._edits_every_row and self.num_output_tokens >= self._min_tokens

    @property
    def path_sampler(self) -> PathSampler | None:
        """Samples from the rows after the committed output without `process`; None where these are edited."""
        return self._path_sampler if self.leaves_rows else None

    @property
    def only_scales(self) -> bool:
        """Whether only the temperature changes the rows behind the committed output, so that they may be read without `process`."""
        return self.leaves_rows and not self.truncates

    def process(self, logits: ScoreArray, path: Sequence[int] = ()) -> Distribution:
        """Compute the distribution of the token that follows prompt + committed output + `path`; arguments and errors as for `edit`."""
        return self.edit(logits, path).distribution()

    def edit(self, logits: ScoreArray, path: Sequence[int] = ()) -> EditedRow:
        """Apply everything before temperature.

        Args:
            logits: [V] float32, never modified.
            path: tokens after the committed output that lead to this row.

        Raises:
            CheckpointError: the row holds NaN or +inf, or nothing finite.
            RequestError: the parameters leave no token to choose, or a custom processor fails.
        """
        max_logit = _checked_max(logits)
        if self._edits_every_row or self.num_output_tokens + len(path) < self._min_tokens:
            logits = logits.copy()
            max_logit = self._edit(logits, path)
        return EditedRow(logits, max_logit, self._params, self._path_sampler)

    def _edit(self, scores: ScoreArray, path: Sequence[int]) -> np.float32:
        """Edit a row in place; returns the largest score that is left."""
        if self._bias_ids.size:
            scores[self._bias_ids] += self._bias
        if self._trackers:
            self._penalise(scores, path)
        peak: np.float32 | None = None
        for name, mask in self._masks:
            mask(scores, path)
            peak = scores.max()
            if np.isneginf(peak):
                raise self._nothing_left(name, path)
        return scores.max() if peak is None else peak

    def _penalise(self, scores: ScoreArray, path: Sequence[int]) -> None:
        for counts in self._trackers:
            counts.extend(path)
        try:
            if self._seen is not None:
                _repetition_penalty(scores, self._seen.token_ids, self._params.repetition_penalty)
            if self._generated is not None:
                # Total counts first, one subtraction after: guessed and committed tokens round alike.
                penalty = self._generated.counts * np.float32(self._params.frequency_penalty)
                scores[self._generated.token_ids] -= penalty + np.float32(self._params.presence_penalty)
        finally:
            for counts in self._trackers:
                counts.drop_last(path)

    def _mask_banned(self, scores: ScoreArray, path: Sequence[int]) -> None:
        scores[self._banned_ids] = -np.inf

    def _mask_ends(self, scores: ScoreArray, path: Sequence[int]) -> None:
        if self.num_output_tokens + len(path) < self._min_tokens:
            scores[self._end_ids] = -np.inf

    def _nothing_left(self, name: str, path: Sequence[int]) -> RequestError:
        position = self.num_output_tokens + len(path)
        earlier = [one for one, _ in self._masks]
        earlier = earlier[: earlier.index(name)]
        left = f"what {' and '.join(earlier)} left of the vocabulary" if earlier else "the whole vocabulary"
        return RequestError(f"no token is left to choose at output position {position}: {name} excludes {left}; allow more", parameter=name)


def truncate(scores: ScoreArray, peak: np.float32, *, top_k: int, top_p: float, min_p: float) -> _Ids | None:
    """List the ids that survive top-k, then top-p of what that left, then min-p.

    With weights w = exp(score - largest score), top-p keeps an id while the weight before it is below top_p * sum(w), in the order
    (score descending, id ascending).

    Args:
        scores: [V] log-probabilities up to a constant.
        peak: their maximum, finite.
        top_k: keep scores not below the k-th best, ties included; 0 = off.
        top_p: keep ids while the weight before them is below `top_p` of the whole; 1 = off.
        min_p: keep ids with exp(score - peak) >= min_p; 0 = off.

    Returns:
        ids, ascending, at least one; None = all V.

    Source: Holtzman et al. 2019 (arXiv:1904.09751) section 3.1 for top-p; Nguyen et al. 2024 (arXiv:2407.01082) for min-p.
    """
    ids: _Ids | None = None
    if 0 < top_k < len(scores):
        finite = scores[scores > -np.inf]  # partition takes 20 times as long on a row that is mostly -inf
        ids = np.flatnonzero(scores >= (np.partition(finite, -top_k)[-top_k] if top_k < len(finite) else finite.min()))
        scores = scores[ids]
    if top_p == 1.0 and min_p == 0.0:
        return ids
    weights = np.exp(scores - peak)
    if top_p < 1.0:
        kept = _top_p(scores, weights, peak, top_p)
        kept = kept[weights[kept] >= np.float32(min_p)]
    else:
        kept = np.flatnonzero(weights >= np.float32(min_p))
    return kept if ids is None else ids[kept]


def _top_p(scores: ScoreArray, weights: ScoreArray, peak: np.float32, top_p: float) -> _Ids:
    """List the positions that top-p keeps, ascending."""
    total = float(weights.sum())
    floor = float(peak) + math.log((1.0 - top_p) * total / len(scores))  # all below it together weigh less than what top-p drops
    for candidates in (scores[scores >= floor], scores):  # rounding may need the whole row
        falling = np.sort(candidates)[::-1]
        mass = np.cumsum(np.exp(falling - peak), dtype=np.float64)
        if len(mass) and mass[-1] >= top_p * total:
            break
    count = min(int(np.searchsorted(mass, top_p * total)) + 1, len(scores))
    kept = np.flatnonzero(scores >= falling[count - 1])
    tied = np.flatnonzero(scores[kept] == falling[count - 1])
    return np.delete(kept, tied[len(tied) - (len(kept) - count) :])


def _bad_word_sequences(params: SamplingParams, bad_word_ids: Sequence[Sequence[int]], vocab_size: int) -> list[Sequence[int]]:
    """The sequences in `params`, and those its texts were turned into."""
    if not bad_word_ids and any(isinstance(word, str) for word in params.bad_words):
        raise RequestError("bad_words: texts need a tokenizer, and there is none here; give token sequences", parameter="bad_words")
    for token_id in (token_id for word in bad_word_ids for token_id in word):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"bad_words: {token_id} is no token id of this model; ids are in [0, {vocab_size - 1}]", parameter="bad_words"
            )
    return [*(word for word in params.bad_words if not isinstance(word, str)), *bad_word_ids]


def _own_constraints(
    params: SamplingParams, words: Sequence[Sequence[int]], prompt_token_ids: Sequence[int], vocab_size: int
) -> dict[str, Constraint]:
    """Our own constraints, by the names of the parameters that ask for them."""
    constraints: dict[str, Constraint] = {}
    if params.no_repeat_ngram_size:
        _distinct(prompt_token_ids, vocab_size)
        constraints["no_repeat_ngram_size"] = RepeatedNgrams(params.no_repeat_ngram_size, prompt_token_ids)
    if words:
        constraints["bad_words"] = BadWords(words, prompt_token_ids)
    if params.processors:
        constraints["processors"] = CustomProcessors(params.processors, prompt_token_ids)
    return constraints


def _checked_max(logits: ScoreArray) -> np.float32:
    peak: np.float32 = logits.max()  # NaN if there is one
    if not math.isfinite(peak):
        found = "NaN" if np.isnan(peak) else str(peak)
        raise CheckpointError(
            f"the target produced {found} logits (largest of a row of {len(logits)}): its weights are damaged or overflow in this "
            "precision; verify the checkpoint's files or load it with a wider dtype or kv_cache_dtype"
        )
    return peak


def _repetition_penalty(scores: ScoreArray, token_ids: NDArray[np.int64], penalty: float) -> None:
    """Make seen tokens less likely (Keskar et al. 2019, arXiv:1909.05858, section 4.1; negative scores multiply, as transformers)."""
    seen = scores[token_ids]
    factor = np.float32(penalty)
    scores[token_ids] = np.where(seen < 0, seen * factor, seen / factor)


def _distinct(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    distinct = np.unique(np.asarray(token_ids, np.int64))
    if distinct.size and not 0 <= distinct[0] <= distinct[-1] < vocab_size:
        outside = int(distinct[0]) if distinct[0] < 0 else int(distinct[-1])
        raise RequestError(f"prompt: {outside} is no token id of this model; ids are in [0, {vocab_size - 1}]", parameter="prompt")
    return distinct
