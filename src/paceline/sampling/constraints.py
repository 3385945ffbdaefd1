"""Rules about the next token that depend on the text so far: repeated n-grams, bad words and the user's own processors.

Each rule sets the scores of the tokens that it forbids to -inf. It applies to the committed text plus a path of draft tokens, so that draft
tokens have the same effect as committed ones.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RequestError, is_interrupt
from paceline.sampling.params import CustomProcessor


class Constraint(Protocol):
    """A rule that forbids some next tokens."""

    def mask(self, scores: NDArray[np.float32], path: Sequence[int]) -> None:
        """Set the scores [V] of tokens that may not follow the committed output and `path` to -inf, in place; `path` is not committed."""

    def commit(self, token_id: int) -> None:
        """Append a token to the committed output."""


class RepeatedNgrams:
    """Bans every token that would complete an n-gram of prompt + output for the second time, as in transformers.

    Args:
        ngram_size: number of tokens of an n-gram, >= 1.
        token_ids: the prompt.
    """

    def __init__(self, ngram_size: int, token_ids: Sequence[int]) -> None:
        self._num_before = ngram_size - 1
        self._token_ids: list[int] = []
        self._followers: dict[tuple[int, ...], array[int]] = {}
        for token_id in token_ids:
            self.commit(int(token_id))

    def commit(self, token_id: int) -> None:
        """Append a token to the output. O(ngram_size)."""
        if len(self._token_ids) >= self._num_before:
            start = tuple(_last_tokens(self._token_ids, self._num_before))
            self._followers.setdefault(start, array("q")).append(token_id)
        self._token_ids.append(token_id)

    def mask(self, scores: NDArray[np.float32], path: Sequence[int]) -> None:
        """Mask tokens that repeat an n-gram. O(len(path) * ngram_size + number of banned tokens)."""
        count = self._num_before
        tail = [*_last_tokens(self._token_ids, count), *path]
        if len(tail) < count:
            return
        start = tuple(_last_tokens(tail, count))
        followers = self._followers.get(start)
        if followers is not None:
            scores[np.frombuffer(followers, np.int64)] = -np.inf
        for end in range(count, len(tail)):  # n-grams whose end is in the path
            if tuple(tail[end - count : end]) == start:
                scores[tail[end]] = -np.inf


class BadWords:
    """Bans the last token of each sequence wherever prompt + output end with the tokens before it.

    Args:
        sequences: token ids of the bad words, none empty.
        token_ids: the prompt.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], token_ids: Sequence[int]) -> None:
        self._single_ids = np.array(sorted({word[0] for word in sequences if len(word) == 1}), np.int64)
        last_ids_by_prefix: dict[int, dict[tuple[int, ...], set[int]]] = {}
        for *prefix, last_id in (word for word in sequences if len(word) > 1):
            last_ids_by_prefix.setdefault(len(prefix), {}).setdefault(tuple(prefix), set()).add(last_id)
        self._last_ids_by_prefix = {  # length of a prefix -> prefix -> ids that would complete a bad word after it
            count: {prefix: np.array(sorted(last_ids), np.int64) for prefix, last_ids in prefixes.items()}
            for count, prefixes in last_ids_by_prefix.items()
        }
        self._num_before = max(self._last_ids_by_prefix, default=0)
        self._recent = _last_tokens(list(token_ids), self._num_before)

    def commit(self, token_id: int) -> None:
        self._recent = _last_tokens([*self._recent, token_id], self._num_before)

    def mask(self, scores: NDArray[np.float32], path: Sequence[int]) -> None:
        scores[self._single_ids] = -np.inf
        tail = _last_tokens([*self._recent, *path], self._num_before)
        for count, last_ids_by_prefix in self._last_ids_by_prefix.items():
            last_ids = last_ids_by_prefix.get(tuple(_last_tokens(tail, count)))
            if last_ids is not None:
                scores[last_ids] = -np.inf


def bad_word_ids(words: Sequence[str | Sequence[int]], encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Convert bad words to distinct token sequences.

    A word has different tokens at the start of a text, after a space and after a line break. All three token sequences are returned. Other
    tokenizations of the word, and tokens that contain more than the word, are not banned.

    Args:
        words: texts and token sequences, as in `SamplingParams.bad_words`.
        encode: text -> token ids, without special tokens.

    Raises:
        RequestError: a text has no tokens.
    """
    distinct: dict[tuple[int, ...], None] = {}
    for word in words:
        sequences = _tokenizations(word, encode) if isinstance(word, str) else [tuple(word)]
        if not any(sequences):
            raise RequestError(f"bad_words: {word!r} has no tokens in this model's vocabulary; leave it out", parameter="bad_words")
        distinct.update(dict.fromkeys(ids for ids in sequences if ids))
    return tuple(distinct)


def _tokenizations(word: str, encode: Callable[[str], Sequence[int]]) -> list[tuple[int, ...]]:
    bare_word = word.lstrip(" ") or word
    sequences = [tuple(encode(bare_word)), tuple(encode(" " + bare_word))]
    # Some tokenizers add a space before every text, but not after a line break.
    line_break, line = tuple(encode("\n")), tuple(encode("\n" + bare_word))
    if line_break and line[: len(line_break)] == line_break:
        sequences.append(line[len(line_break) :])
    return sequences


class CustomProcessors:
    """Runs a request's own processors, in order.

    Args:
        processors: functions of (token ids of prompt + output + path, scores [V] float32) that return new scores. They get copies.
            They also run for draft tokens, in any order and several times for the same text, so results must depend on the arguments only.
        token_ids: the prompt.
    """

    def __init__(self, processors: Sequence[CustomProcessor], token_ids: Sequence[int]) -> None:
        self._processors = processors
        self._token_ids = [int(token_id) for token_id in token_ids]

    def commit(self, token_id: int) -> None:
        self._token_ids.append(token_id)

    def mask(self, scores: NDArray[np.float32], path: Sequence[int]) -> None:
        """Replace the scores by those that the processors return, in place.

        Raises:
            RequestError: a processor raises, or does not return a float32 array [V] without NaN and +inf.
        """
        for processor in self._processors:
            try:
                returned = processor([*self._token_ids, *path], scores.copy())
            except BaseException as error:  # no exception of a user's code may end other requests
                if is_interrupt(error):
                    raise
                raise _processor_error(processor, f"raised {type(error).__name__}: {error}") from error
            if (problem := _scores_problem(returned, len(scores))) is not None:
                raise _processor_error(processor, f"returned {problem}")
            scores[:] = returned


def _scores_problem(scores: object, vocab_size: int) -> str | None:
    if not isinstance(scores, np.ndarray):
        return f"{type(scores).__name__}; it must return the scores, a numpy array"
    if scores.shape != (vocab_size,):
        return f"scores of shape {scores.shape}; the shape must stay ({vocab_size},)"
    if scores.dtype != np.float32:
        return f"{scores.dtype} scores; they must stay float32: return scores.astype(numpy.float32)"
    max_score = scores.max()  # NaN if any score is NaN
    if np.isnan(max_score) or max_score == np.inf:
        return f"{'NaN' if np.isnan(max_score) else 'inf'} scores; to force a token set all others to -inf"
    return None


def _processor_error(processor: CustomProcessor, problem: str) -> RequestError:
    name = getattr(processor, "__qualname__", type(processor).__qualname__)
    return RequestError(f"processors: {name} {problem}", parameter="processors")


def _last_tokens(token_ids: list[int], count: int) -> list[int]:
    return token_ids[max(0, len(token_ids) - count) :]
