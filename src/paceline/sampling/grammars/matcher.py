"""Matches an output against a grammar, and determines which tokens may follow the committed output and a path of a draft tree.

There is one llguidance matcher for all paths. To move from one path to another, it rolls tokens back and consumes
others, which takes about a microsecond a token. End tokens are handled here, because llguidance cannot roll back an end token after a
complete text. They are allowed wherever the text may end.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RequestError
from paceline.sampling.grammars.compiled_grammar import CompiledGrammar, failure_reason


class ReasoningSection:
    """Finds the end of the reasoning section. The grammar applies to the text after it.

    Args:
        marker: bytes that end the section; they may be split over several tokens.
        bytes_of: token id -> bytes.
    """

    def __init__(self, marker: bytes, bytes_of: Callable[[int], bytes]) -> None:
        self._marker, self._bytes_of = marker, bytes_of
        self._tail = b""  # end of the committed text, which may be the beginning of the marker

    def num_reasoning_tokens(self, path: Sequence[int]) -> int | None:
        """Return how many tokens of `path` belong to the reasoning section; None if the section does not end in `path`."""
        tail = self._tail
        for index, token_id in enumerate(path):
            tail = self._append(tail, token_id)
            if self._marker in tail:
                return index + 1
        return None

    def commit(self, token_id: int) -> bool:
        """Append a token of the output; return whether it ends the section."""
        self._tail = self._append(self._tail, token_id)
        return self._marker in self._tail

    def _append(self, tail: bytes, token_id: int) -> bytes:
        """Return the tail of a text to which a token is appended, long enough to contain a marker that ends in this token."""
        return tail[max(0, len(tail) - len(self._marker) + 1) :] + self._bytes_of(token_id)


class GrammarMatcher:
    """Matches one request's output with its grammar. Implements `Constraint`.

    The argument `path` of the methods is the draft tokens after the committed output. Where the grammar forces a text, `mask` allows
    only the tokenizer's own encoding of the text, but `num_allowed_tokens` any tokens that spell it.

    Raises:
        RequestError: by every method, if the grammar exceeds llguidance's limits.
    """

    def __init__(self, compiled: CompiledGrammar, reasoning: ReasoningSection | None = None) -> None:
        self._compiled = compiled
        self._vocabulary = compiled.vocabulary
        self._matcher = compiled.new_matcher()
        self._reasoning = reasoning
        self._unique_items = compiled.new_unique_items_state()
        self._has_ended = False
        self._committed: list[int] = []  # output tokens that llguidance's matcher has consumed
        self._path: list[int] = []  # draft tokens that llguidance's matcher has consumed after the output tokens
        self._mask_words = np.zeros(self._vocabulary.num_mask_words, np.uint32)
        self._mask_address = self._mask_words.ctypes.data

    def is_finished(self, path: Sequence[int] = ()) -> bool:
        """Return whether output + `path` is complete: it ends with an end token or, if the model has none, no token may follow."""
        grammar_path = self._after_reasoning(path)
        if self._has_ended or grammar_path is None:
            return self._has_ended
        if self._vocabulary.eos_set:
            return not self._vocabulary.eos_set.isdisjoint(grammar_path)
        return self._move_to(grammar_path) == len(grammar_path) and not self._allowed_tokens(self._vocabulary.size).any()

    def mask(self, scores: NDArray[np.float32], path: Sequence[int]) -> None:
        eos_ids = self._vocabulary.eos_ids
        eos_ids = eos_ids[: np.searchsorted(eos_ids, len(scores))]
        grammar_path = self._after_reasoning(path)
        if grammar_path is None:
            scores[eos_ids] = -np.inf
        elif self._has_ended or not self._vocabulary.eos_set.isdisjoint(grammar_path):
            _mask_all_except(scores, eos_ids)
        elif self._move_to(grammar_path) < len(grammar_path):
            scores.fill(-np.inf)
        else:
            allowed = self._allowed_tokens(len(scores))
            if self._unique_items is not None:
                self._forbid_duplicates(allowed, grammar_path)
            if 4 * np.count_nonzero(allowed) < 3 * len(scores):  # measured: this is then faster than the other branch
                _mask_all_except(scores, allowed.nonzero()[0])
            else:
                scores[~allowed] = -np.inf

    def commit(self, token_id: int) -> None:
        if self._reasoning is not None:
            if self._reasoning.commit(token_id):
                self._reasoning = None
            return
        self._has_ended = self._has_ended or token_id in self._vocabulary.eos_set
        if self._has_ended:
            return
        if self._path[:1] != [token_id] and self._move_to((token_id,)) == 0:
            text = f"no token of this model continues the output after {len(self._committed)} tokens"
            example = f"{self._vocabulary.bytes_of(token_id)!r} does not match"
            raise RequestError(f"grammar: {text} ({example}): require only characters of its vocabulary", parameter="grammar")
        if self._unique_items is not None:
            self._unique_items.feed(self._vocabulary.bytes_of(token_id))
            self._unique_items.has_duplicate = False
        self._committed.append(self._path.pop(0))

    def num_allowed_tokens(self, path: Sequence[int]) -> int:
        """Return the length of the longest prefix of `path` that may follow the output."""
        is_end = self._vocabulary.eos_set.__contains__
        grammar_path = self._after_reasoning(path)
        if grammar_path is None:
            return _first_index(path, is_end)
        if self._has_ended:
            return 0
        end = _first_index(grammar_path, is_end)
        count = self._move_to(grammar_path[:end])
        if count == end < len(grammar_path) and self._matcher.is_accepting():
            count += 1
        return len(path) - len(grammar_path) + count

    def is_allowed(self, path: Sequence[int]) -> bool:
        """Return whether the whole `path` may follow the output."""
        return self.num_allowed_tokens(path) == len(path)

    def forced_tokens(self, path: Sequence[int]) -> list[int]:
        """Return the tokens of the text that must follow `path`, without end tokens; empty if the grammar forces none."""
        grammar_path = self._after_reasoning(path)
        if grammar_path is None or self._has_ended or self._move_to(grammar_path) < len(grammar_path):
            return []
        forced: list[int] = self._call_matcher(lambda matcher: matcher.compute_ff_tokens())
        return forced

    def _after_reasoning(self, path: Sequence[int]) -> Sequence[int] | None:
        """Return the part of `path` that the grammar applies to; None if the reasoning section does not end in `path`."""
        if self._reasoning is None:
            return path
        start = self._reasoning.num_reasoning_tokens(path)
        return None if start is None else path[start:]

    def _move_to(self, path: Sequence[int]) -> int:
        """Move the matcher to the end of `path`, or as far as the grammar allows; return how many of its tokens were consumed."""
        consumed, num_shared = self._path, 0
        while num_shared < min(len(consumed), len(path)) and consumed[num_shared] == path[num_shared]:
            num_shared += 1
        num_back = len(consumed) - num_shared
        if num_back:
            del consumed[num_shared:]
            self._matcher.rollback(num_back)  # on a failed matcher this does nothing, and the next call raises
        # llguidance's matcher would fail for good after an id outside the vocabulary.
        rest = list(path[num_shared:])
        rest = rest[: _first_index(rest, lambda token_id: not 0 <= token_id < self._vocabulary.size)]
        if rest:
            consumed.extend(rest[: self._call_matcher(lambda matcher: matcher.try_consume_tokens(rest))])
        return len(consumed)

    def _allowed_tokens(self, vocab_size: int) -> NDArray[np.bool_]:
        """Return [vocab_size] whether each token may follow at the matcher's position, end tokens included."""
        self._call_matcher(lambda matcher: matcher.unsafe_compute_mask_ptr(self._mask_address, self._mask_words.nbytes))
        bits = self._mask_words.view(np.uint8)
        end_id = self._vocabulary.end_id
        may_end = bool(bits[end_id >> 3] >> (end_id & 7) & 1)
        allowed = np.unpackbits(bits, bitorder="little", count=vocab_size).view(np.bool_)
        allowed[end_id : end_id + 1] = False
        for eos_id in self._vocabulary.eos_ids.tolist():
            allowed[eos_id : eos_id + 1] = may_end
        return allowed

    def _forbid_duplicates(self, allowed: NDArray[np.bool_], path: Sequence[int]) -> None:
        """Clear the tokens that would make an item of an array with `uniqueItems` repeat an earlier one, in place.

        If all allowed tokens would do so, they stay allowed, because otherwise the output could not be continued.
        """
        assert self._unique_items is not None
        state = self._unique_items.copy()
        for token_id in path:
            state.feed(self._vocabulary.bytes_of(token_id))
            state.has_duplicate = False
        ending_bytes = state.ending_bytes
        if ending_bytes is None:
            return
        may_repeat = self._vocabulary.tokens_containing(ending_bytes)[: len(allowed)]
        repeats = []
        for token_id in np.flatnonzero(allowed[: len(may_repeat)] & may_repeat).tolist():
            next_state = state.copy()
            next_state.feed(self._vocabulary.bytes_of(token_id))
            if next_state.has_duplicate:
                repeats.append(token_id)
        if len(repeats) < np.count_nonzero(allowed):
            allowed[repeats] = False

    def _call_matcher(self, call: Callable[[Any], Any]) -> Any:
        """Call a method of llguidance's matcher. If it fails, call it once more on a new matcher at the same position."""
        result = call(self._matcher)
        if self._matcher.is_error():
            self._matcher = self._compiled.replace_matcher(self._matcher)
            self._matcher.try_consume_tokens([*self._committed, *self._path])
            self._raise_if_failed()
            result = call(self._matcher)
            self._raise_if_failed()
        return result

    def _raise_if_failed(self) -> None:
        if self._matcher.is_error():
            num_tokens = len(self._committed) + len(self._path)
            raise RequestError(
                f"grammar: llguidance fails after {num_tokens} output tokens ({failure_reason(self._matcher)}); use a simpler grammar or "
                "shorter texts",
                parameter="grammar",
            )


def _mask_all_except(scores: NDArray[np.float32], token_ids: NDArray[np.integer]) -> None:
    kept = scores[token_ids]
    scores.fill(-np.inf)
    scores[token_ids] = kept


def _first_index(token_ids: Sequence[int], is_match: Callable[[int], bool]) -> int:
    """Return the index of the first token for which `is_match` is true; len(token_ids) if there is none."""
    return next((index for index, token_id in enumerate(token_ids) if is_match(token_id)), len(token_ids))
