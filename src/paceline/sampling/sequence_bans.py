"""Token sequences that must not be completed: repeated n-grams and bad words. Both look at the end of the text only."""

from array import array
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RequestError

_ANCHOR = "\n"  # what a word may follow without a space


class RepeatedNgrams:
    """Bans every token that would complete an n-gram of prompt + output for the second time, as transformers does.

    Args:
        size: tokens of an n-gram, >= 1.
        token_ids: the prompt.
    """

    def __init__(self, size: int, token_ids: Sequence[int]) -> None:
        self._num_before = size - 1
        self._token_ids: list[int] = []
        self._followers: dict[tuple[int, ...], array[int]] = {}
        for token_id in token_ids:
            self.commit(int(token_id))

    def commit(self, token_id: int) -> None:
        """Record that a token became part of the output. O(size)."""
        if len(self._token_ids) >= self._num_before:
            start = tuple(_last(self._token_ids, self._num_before))
            followers = self._followers.get(start)
            if followers is None:
                self._followers[start] = array("q", (token_id,))
            else:
                followers.append(token_id)
        self._token_ids.append(token_id)

    def mask(self, scores: NDArray[np.float32], path: Sequence[int]) -> None:
        """Set what would repeat an n-gram after prompt + output + `path` to -inf, in place. O(len(path) * size) and what it bans."""
        count = self._num_before
        tail = [*_last(self._token_ids, count), *path]
        if len(tail) < count:
            return
        start = tuple(_last(tail, count))
        followers = self._followers.get(start)
        if followers is not None:
            scores[np.frombuffer(followers, np.int64)] = -np.inf
        for end in range(count, len(tail)):  # the n-grams that end in the path
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
        endings: dict[int, dict[tuple[int, ...], set[int]]] = {}
        for *before, last in (word for word in sequences if len(word) > 1):
            endings.setdefault(len(before), {}).setdefault(tuple(before), set()).add(last)
        self._endings = {
            count: {before: np.array(sorted(lasts), np.int64) for before, lasts in group.items()} for count, group in endings.items()
        }
        self._num_before = max(self._endings, default=0)
        self._recent = _last(list(token_ids), self._num_before)

    def commit(self, token_id: int) -> None:
        """Record that a token became part of the output."""
        self._recent = _last([*self._recent, token_id], self._num_before)

    def mask(self, scores: NDArray[np.float32], path: Sequence[int]) -> None:
        """Set what would complete a bad word after prompt + output + `path` to -inf, in place."""
        scores[self._single_ids] = -np.inf
        tail = _last([*self._recent, *path], self._num_before)
        for count, endings in self._endings.items():
            lasts = endings.get(tuple(_last(tail, count)))
            if lasts is not None:
                scores[lasts] = -np.inf


def bad_word_ids(words: Sequence[str | Sequence[int]], encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The distinct token sequences of bad words, for `LogitsProcessor`.

    A text counts as it is written at the start of a text, after a space, and after a line break (where tokenizers that put a space in
    front of every text show how they spell a word without one). Other ways to cut it into tokens, or tokens that hold more than it,
    are not found. A token sequence stands for itself.

    Args:
        words: `SamplingParams.bad_words`.
        encode: text -> token ids, without special tokens.

    Raises:
        RequestError: a text has no tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        spellings = _spellings(word, encode) if isinstance(word, str) else [tuple(word)]
        if not any(spellings):
            raise RequestError(f"bad_words: {word!r} has no tokens in this model's vocabulary; leave it out", parameter="bad_words")
        found.update(dict.fromkeys(ids for ids in spellings if ids))
    return tuple(found)


def _spellings(word: str, encode: Callable[[str], Sequence[int]]) -> list[tuple[int, ...]]:
    bare = word.lstrip(" ") or word
    anchor, anchored = tuple(encode(_ANCHOR)), tuple(encode(_ANCHOR + bare))
    spellings = [tuple(encode(bare)), tuple(encode(" " + bare))]
    if anchor and anchored[: len(anchor)] == anchor:
        spellings.append(anchored[len(anchor) :])
    return spellings


def _last(token_ids: list[int], count: int) -> list[int]:
    return token_ids[max(0, len(token_ids) - count) :]
