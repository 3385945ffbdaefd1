"""The only way from logits to a distribution, the same for plain steps, verification and drafting.

Order: logit bias, repetition penalty, presence and frequency penalties, no_repeat_ngram, bad words, bans, min_tokens, custom processors,
grammar, temperature, top-k, top-p, min-p.
Temperature 0 stops before temperature. A row that the parameters do not change is passed on without a copy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, RequestError
from paceline.sampling.custom_processors import CustomProcessors
from paceline.sampling.history import TokenCounts
from paceline.sampling.params import SamplingParams
from paceline.sampling.restrict import Nucleus, restrict_lazily
from paceline.sampling.sequence_bans import BadWords, RepeatedNgrams
from paceline.sampling.walker import Walker

ScoreArray = NDArray[np.float32]
ProbArray = NDArray[np.float64]

_MASK_ORDER = ("no_repeat_ngram_size", "bad_words", "banned_token_ids", "min_tokens", "processors", "grammar")
_DENSE_SHARE = 4  # noise for more than V / 4 listed ids costs more than for all V in order


@dataclass(frozen=True, slots=True)
class Distribution:
    """What is left of a row after all processors.

    Attributes:
        scores: [M] float32 log-probabilities up to a constant, already divided by the temperature. May be a view of the
            row they were made from, so they live until the runtime's next pass.
        token_ids: [M] ids, ascending; None = all V in order. Ids not listed have probability 0.
        greedy: whether the token is the argmax instead of a draw.
        nucleus: top-p and min-p, still to be applied where that would sort a wide, flat row: a draw tests only one or two ids.
            None = nothing left to apply. Everything else that reads scores starts from `restricted()`.
    """

    scores: ScoreArray
    token_ids: NDArray[np.int64] | None
    greedy: bool
    nucleus: Nucleus | None = None

    def restricted(self) -> "Distribution":
        """The same distribution with the nucleus applied: ids outside of it at -inf or no longer listed."""
        if self.nucleus is None:
            return self
        return _sampled(self.scores, self.token_ids, self.nucleus.positions())

    def argmax(self) -> int:
        """The most probable token, lowest id on ties."""
        best = int(self.scores.argmax())
        return best if self.token_ids is None else int(self.token_ids[best])

    def log_probs(self) -> ProbArray:
        """[M] float64 normalised log-probabilities (of the unscaled logits where `greedy`), -inf outside the nucleus."""
        scores = self.scores if self.nucleus is None else _only(self.scores, self.nucleus.positions())
        shifted = scores.astype(np.float64) - scores.max()
        return np.asarray(shifted - np.log(np.exp(shifted).sum()), np.float64)

    def probs(self) -> ProbArray:
        """[M] float64 probabilities, summing to 1."""
        return np.exp(self.log_probs())


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
        walker: draws from rows that are not edited, for `params`; None = `process` and `draw` do.

    Attributes:
        restricts: whether top-k, top-p or min-p leave tokens out.

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
        walker: Walker | None = None,
    ) -> None:
        params.check_vocabulary(vocab_size)
        self._walker = walker
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
        self.restricts = not params.is_greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
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
    def walker(self) -> Walker | None:
        """What draws from the rows behind the committed output in the place of `process` and `draw`; None where these are edited."""
        return self._walker if self.leaves_rows else None

    @property
    def only_scales(self) -> bool:
        """Whether only the temperature changes the rows behind the committed output, so that they may be read without `process`."""
        return self.leaves_rows and not self.restricts

    def draw_edited(self, logits: ScoreArray, path: Sequence[int], *, seed: int, sample_index: int, position: int) -> int | None:
        """The token that `process` and `draw` give, drawn by the walker from the edited row; None where it is left to them.

        Args:
            logits, path: as `process`.
            seed, sample_index, position: as `draw`.
        """
        walker = self._walker
        if walker is None or self._params.processors or len(logits) != len(walker.row) or not np.isfinite(logits.max()):
            return None
        scores = walker.row
        np.copyto(scores, logits)
        try:
            self._edit(scores, path)
        except RequestError:  # said where a row is processed, behind what may be wrong with it
            return None
        tokens, _, is_whole = walker.walk(scores[None], (0,), (-1,), seed=seed, sample_index=sample_index, position=position)
        return tokens[0] if is_whole else None

    def process(self, logits: ScoreArray, path: Sequence[int] = ()) -> Distribution:
        """The distribution of the token that follows prompt + committed output + `path`.

        Args:
            logits: [V] float32, never modified.
            path: tokens after the committed output that lead to this row.

        Raises:
            CheckpointError: the row holds NaN or +inf, or nothing finite.
            RequestError: the parameters leave no token to choose, or a custom processor fails.
        """
        params = self._params
        peak = _checked_peak(logits)
        scores = logits
        if self._edits_every_row or self.num_output_tokens + len(path) < self._min_tokens:
            scores = logits.copy()
            peak = self._edit(scores, path)
        if params.is_greedy:
            return Distribution(scores, None, True)
        if params.temperature != 1.0:
            scores = scores / np.float32(params.temperature)
            peak = peak / np.float32(params.temperature)
        kept, nucleus = restrict_lazily(scores, peak, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        if nucleus is None:
            return _sampled(scores, None, kept)
        return Distribution(nucleus.scores, kept, False, nucleus)

    def _edit(self, scores: ScoreArray, path: Sequence[int]) -> np.float32:
        """Everything before temperature, in place; returns the largest score that is left."""
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


def _sampled(scores: ScoreArray, token_ids: NDArray[np.int64] | None, kept: NDArray[np.int64] | None) -> Distribution:
    """The distribution of the `kept` positions of scores whose ids are `token_ids`; None = all."""
    if kept is None:
        return Distribution(scores, token_ids, False)
    if token_ids is not None or len(kept) <= len(scores) // _DENSE_SHARE:
        return Distribution(scores[kept], kept if token_ids is None else token_ids[kept], False)
    return Distribution(_only(scores, kept), None, False)


def _only(scores: ScoreArray, kept: NDArray[np.int64]) -> ScoreArray:
    """A copy with -inf everywhere else."""
    dense = np.full_like(scores, -np.inf)
    dense[kept] = scores[kept]
    return dense


def _checked_peak(logits: ScoreArray) -> np.float32:
    peak: np.float32 = logits.max()  # NaN if there is one
    if not math.isfinite(peak):
        found = "NaN" if np.isnan(peak) else str(peak)
        raise CheckpointError(
            f"the target produced {found} logits (largest of a row of {len(logits)}): its weights are damaged or overflow in this "
            "precision; verify the checkpoint's files or load it with a wider dtype or kv_type"
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
