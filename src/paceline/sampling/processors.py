"""Turns logits into the distribution of the next token, for plain steps, verification and drafting alike.

Order: logit bias, repetition penalty, presence and frequency penalties, no_repeat_ngram, bad words, banned tokens, min_tokens, custom
processors, grammar; then, unless the request is greedy, temperature, top-k, top-p, min-p.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, RequestError
from paceline.sampling.constraints import BadWords, Constraint, CustomProcessors, RepeatedNgrams
from paceline.sampling.draw import Distribution, ScoreArray, draw
from paceline.sampling.grammars.matcher import GrammarMatcher
from paceline.sampling.params import SamplingParams
from paceline.sampling.path_sampler import PathSampler, sample_row
from paceline.sampling.truncation import truncate

_MaskFunction = Callable[[ScoreArray, Sequence[int]], None]


class EditedRow(NamedTuple):
    """A row of logits after all processors that run before temperature."""

    logits: ScoreArray  # [V]; if no processor changes the row, they are a view of it, which the next forward pass overwrites
    max_logit: np.float32  # the largest of `logits`, finite
    params: SamplingParams  # sampling parameters of the request
    sampler: PathSampler | None  # samples with `params` in C; None = the runtime has no kernels

    def distribution(self) -> Distribution:
        """Return the distribution of the row after temperature, top-k, top-p and min-p."""
        params = self.params
        if params.is_greedy:
            return Distribution(self.logits, None, True)
        scores, max_score = self.scaled_logits(), self.max_logit / np.float32(params.temperature)
        ids = truncate(scores, max_score, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        return Distribution(scores if ids is None else scores[ids], ids, False)

    def scaled_logits(self) -> ScoreArray:
        """Return [V] the logits divided by the temperature; unchanged if the request is greedy."""
        is_unscaled = self.params.is_greedy or self.params.temperature == 1.0
        return self.logits if is_unscaled else self.logits / np.float32(self.params.temperature)

    def draw(self, seed: int, sample_index: int, position: int) -> int:
        """Sample the token from `distribution()`, with the compiled sampler if there is one and rounding cannot change its result."""
        token = None if self.sampler is None else sample_row(self.sampler, self.logits, seed, sample_index, position)
        return draw(self.distribution(), seed, sample_index, position) if token is None else token


class LogitsProcessor:
    """Turns rows of logits into distributions, for one of the n samples of a request.

    It keeps the committed output. The row of a draft node is processed with the tokens of the path to the node. The result has the same
    bits as if these tokens were committed.

    Args:
        params: sampling parameters of the request.
        vocab_size: number of logits in a row.
        prompt_token_ids: prompt, to which the repetition penalty, repeated n-grams, bad words and custom processors apply as well.
        eos_token_ids: ids that are banned, like `params.stop_token_ids`, while the output is shorter than `params.min_tokens`.
        grammar: matcher of `params.grammar`.
        bad_word_ids: token sequences of the texts in `params.bad_words` (`constraints.bad_word_ids`).
        path_sampler: compiled temperature, top-k, top-p and min-p of `params`; None = there is no compiled sampler.

    Raises:
        RequestError: an id of the parameters or the prompt is not in the vocabulary, or `grammar` or `bad_word_ids` is missing.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt_token_ids: Sequence[int],
        eos_token_ids: Sequence[int] = (),
        *,
        grammar: GrammarMatcher | None = None,
        bad_word_ids: Sequence[Sequence[int]] = (),
        path_sampler: PathSampler | None = None,
    ) -> None:
        params.check_vocabulary(vocab_size)
        if params.grammar is not None and grammar is None:
            raise RequestError("grammar: no grammar compiler is available; generate without a grammar", parameter="grammar")
        self._params = params
        self._path_sampler = path_sampler
        self.num_output_tokens = 0
        self.grammar = grammar
        self._bias_ids = np.array(list(params.logit_bias.keys()), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float32)
        self._banned_ids = np.array(sorted(set(params.banned_token_ids)), np.int64)
        ends = {*params.stop_token_ids, *(token_id for token_id in eos_token_ids if token_id < vocab_size)}
        self._end_ids = np.array(sorted(ends), np.int64)
        self._min_tokens = params.min_tokens if ends else 0
        # The state below is created only if a parameter needs it, because updating it takes time for each token.
        penalises_seen, has_ngrams = params.repetition_penalty != 1.0, params.no_repeat_ngram_size > 0
        prompt_ids = _distinct_ids(prompt_token_ids, vocab_size) if penalises_seen or has_ngrams else None
        self._seen_counts = TokenCounts(prompt_ids) if penalises_seen else None
        self._output_counts = TokenCounts() if params.frequency_penalty or params.presence_penalty else None
        self._counts = [counts for counts in (self._seen_counts, self._output_counts) if counts is not None]
        self._commits: list[Callable[[int], None]] = [counts.add for counts in self._counts]
        self._masks: list[tuple[str, _MaskFunction]] = []  # masks by parameter name, in the order in which they apply
        if has_ngrams:
            self._add_constraint("no_repeat_ngram_size", RepeatedNgrams(params.no_repeat_ngram_size, prompt_token_ids))
        if words := _bad_word_sequences(params, bad_word_ids, vocab_size):
            self._add_constraint("bad_words", BadWords(words, prompt_token_ids))
        if self._banned_ids.size:
            self._masks.append(("banned_token_ids", self._mask_banned))
        if self._min_tokens:
            self._masks.append(("min_tokens", self._mask_end_tokens))
        if params.processors:
            self._add_constraint("processors", CustomProcessors(params.processors, prompt_token_ids))
        if grammar is not None:
            self._add_constraint("grammar", grammar)
        self._edits_every_row = bool(params.logit_bias or self._counts or any(name != "min_tokens" for name, _ in self._masks))

    def _add_constraint(self, name: str, constraint: Constraint) -> None:
        self._masks.append((name, constraint.mask))
        self._commits.append(constraint.commit)

    def commit(self, *token_ids: int) -> None:
        """Append tokens to the committed output. O(1) per token."""
        self.num_output_tokens += len(token_ids)
        for commit in self._commits:
            for token_id in token_ids:
                commit(token_id)

    def is_complete(self, path: Sequence[int] = ()) -> bool:
        """Return whether the grammar allows no token after the committed output and `path`."""
        return self.grammar is not None and self.grammar.is_finished(path)

    @property
    def needs_no_editing(self) -> bool:
        """Whether `edit_logits` leaves the rows after the committed output unchanged."""
        return not self._edits_every_row and self.num_output_tokens >= self._min_tokens

    @property
    def path_sampler(self) -> PathSampler | None:
        """The compiled sampler for rows after the committed output; None if it is missing or `edit_logits` changes these rows."""
        return self._path_sampler if self.needs_no_editing else None

    @property
    def only_applies_temperature(self) -> bool:
        """Whether temperature is the only sampling parameter that changes the distribution of the next tokens."""
        return self.needs_no_editing and not self._params.has_truncation

    def process(self, logits: ScoreArray, path: Sequence[int] = ()) -> Distribution:
        """Return the distribution of the token after prompt + committed output + `path`; arguments and errors as for `edit_logits`."""
        return self.edit_logits(logits, path).distribution()

    def edit_logits(self, logits: ScoreArray, path: Sequence[int] = ()) -> EditedRow:
        """Apply all processors that run before temperature.

        Args:
            logits: [V] float32, never modified.
            path: draft tokens between the committed output and this row.

        Raises:
            CheckpointError: the row contains NaN or +inf, or no finite number.
            RequestError: the parameters exclude all tokens, or a custom processor fails.
        """
        max_logit = _checked_max(logits)
        if self._edits_every_row or self.num_output_tokens + len(path) < self._min_tokens:
            logits = logits.copy()
            max_logit = self._edit_in_place(logits, path)
        return EditedRow(logits, max_logit, self._params, self._path_sampler)

    def _edit_in_place(self, scores: ScoreArray, path: Sequence[int]) -> np.float32:
        """Apply penalties, biases and masks to a row in place; return its largest score."""
        if self._bias_ids.size:
            scores[self._bias_ids] += self._bias
        if self._counts:
            self._penalise(scores, path)
        max_score: np.float32 | None = None
        for index, (_, mask) in enumerate(self._masks):
            mask(scores, path)
            max_score = scores.max()
            if np.isneginf(max_score):
                raise self._no_token_left_error(index, path)
        return scores.max() if max_score is None else max_score

    def _penalise(self, scores: ScoreArray, path: Sequence[int]) -> None:
        for counts in self._counts:
            counts.extend(path)
        try:
            if self._seen_counts is not None:
                # Keskar et al. 2019 (arXiv:1909.05858), section 4.1; negative scores are multiplied, as in transformers.
                seen, penalty = scores[self._seen_counts.token_ids], np.float32(self._params.repetition_penalty)
                scores[self._seen_counts.token_ids] = np.where(seen < 0, seen * penalty, seen / penalty)
            if self._output_counts is not None:
                # Penalties are computed from total counts and subtracted once: rounding is then the same for draft and committed tokens.
                total = self._output_counts.counts * np.float32(self._params.frequency_penalty)
                scores[self._output_counts.token_ids] -= total + np.float32(self._params.presence_penalty)
        finally:
            for counts in self._counts:
                counts.drop_last(path)

    def _mask_banned(self, scores: ScoreArray, path: Sequence[int]) -> None:
        scores[self._banned_ids] = -np.inf

    def _mask_end_tokens(self, scores: ScoreArray, path: Sequence[int]) -> None:
        if self.num_output_tokens + len(path) < self._min_tokens:
            scores[self._end_ids] = -np.inf

    def _no_token_left_error(self, mask_index: int, path: Sequence[int]) -> RequestError:
        name, earlier = self._masks[mask_index][0], [name for name, _ in self._masks[:mask_index]]
        excluded = f"all tokens that {' and '.join(earlier)} left" if earlier else "the whole vocabulary"
        text = f"no token is left to choose at output position {self.num_output_tokens + len(path)}: {name} excludes {excluded}; allow more"
        return RequestError(text, parameter=name)


class TokenCounts:
    """Counts of the tokens of a growing text, as arrays of ids and counts.

    Args:
        token_ids: distinct ids to start with, each counted once.
    """

    def __init__(self, token_ids: NDArray[np.int64] | None = None) -> None:
        start = np.empty(0, np.int64) if token_ids is None else token_ids
        self._size = len(start)
        capacity = max(64, 2 * self._size)
        self._ids = np.zeros(capacity, np.int64)
        self._ids[: self._size] = start
        self._counts = np.zeros(capacity, np.float32)
        self._counts[: self._size] = 1.0
        self._slots = {int(token_id): slot for slot, token_id in enumerate(start)}  # index of each token id in both arrays

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """Distinct ids, in order of first occurrence; a view that the next change invalidates."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.float32]:
        """Number of occurrences of each of `token_ids`; a view that the next change invalidates."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Count a token. O(1)."""
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._size
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._slots[token_id] = slot
            self._ids[slot] = token_id
            self._counts[slot] = 0.0
            self._size += 1
        self._counts[slot] += 1.0

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self.add(token_id)

    def drop_last(self, token_ids: Sequence[int]) -> None:
        """Undo `extend` for these ids, which must be the ones counted last."""
        for token_id in reversed(token_ids):
            slot = self._slots[token_id]
            self._counts[slot] -= 1.0
            if self._counts[slot] == 0.0:
                # Ids are removed in reverse order, so an id whose count returns to 0 is the last one in the arrays.
                del self._slots[token_id]
                self._size -= 1


def _bad_word_sequences(params: SamplingParams, bad_word_ids: Sequence[Sequence[int]], vocab_size: int) -> list[Sequence[int]]:
    if not bad_word_ids and any(isinstance(word, str) for word in params.bad_words):
        raise RequestError("bad_words: texts need a tokenizer, and there is none; send token sequences", parameter="bad_words")
    for token_id in (token_id for word in bad_word_ids for token_id in word):
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"bad_words: token ids must be in [0, {vocab_size - 1}], got {token_id}", parameter="bad_words")
    return [*(word for word in params.bad_words if not isinstance(word, str)), *bad_word_ids]


def _checked_max(logits: ScoreArray) -> np.float32:
    max_logit: np.float32 = logits.max()  # NaN if any logit is NaN
    if not math.isfinite(max_logit):
        value = "NaN" if np.isnan(max_logit) else str(max_logit)
        raise CheckpointError(
            f"the target produced {value} logits (largest of a row of {len(logits)}): its weights are damaged or overflow in this "
            "precision; verify the checkpoint's files or load it with a wider dtype or kv_cache_dtype"
        )
    return max_logit


def _distinct_ids(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    distinct = np.unique(np.asarray(token_ids, np.int64))
    if distinct.size and not 0 <= distinct[0] <= distinct[-1] < vocab_size:
        outside = int(distinct[0]) if distinct[0] < 0 else int(distinct[-1])
        raise RequestError(f"prompt: token ids must be in [0, {vocab_size - 1}], got {outside}", parameter="prompt")
    return distinct
