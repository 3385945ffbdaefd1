"""Holding an output to a grammar: which tokens may follow it, at every node of a draft tree, and which are forced.

A matcher of llguidance is kept in step with the committed output. It moves down a path by consuming the path's tokens and back by a
rollback, about a microsecond a token. We remember what it consumed beyond the committed output, so that only the difference to the next
path is rolled back and consumed, and a tree needs no copies.

Three things are ours. End tokens never reach llguidance, which does not count one behind a finished text, so it could not be rolled
back; any of the model's is allowed where the text may end. Matchers of one compiled grammar share an automaton that grows with every
text until a limit makes it refuse; one that breaks is compiled anew, alone, and goes on. And reasoning comes before the grammar.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RequestError
from paceline.sampling.compiled_grammar import CompiledGrammar, GrammarVocabulary, has_grown_too_far, library_text, reason_of
from paceline.sampling.grammar import Grammar, GrammarKind
from paceline.sampling.grammar_trial import GrammarTrial
from paceline.tokenizer.tokenizer import Tokenizer

MAX_COMPILED = 64  # grammars a compiler keeps
_PROMPT_TAIL = 64  # tokens of the prompt that are looked at for the end of a reasoning section


class GrammarCompiler:
    """Compiles grammars for the ids of one model and keeps those lately used. May be asked from several threads.

    Args:
        tokenizer: the model's.
        eos_token_ids: ids that end an output.
        limits: llguidance's `LLParserLimits` by name; those not named are its own.

    Attributes:
        trial: what strangers' grammars must pass before they are compiled here; None = they are not strangers'.
    """

    trial: GrammarTrial | None = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int] = (),
        *,
        max_compiled: int = MAX_COMPILED,
        limits: dict[str, int] | None = None,
    ) -> None:
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids
        self._max_compiled = max_compiled
        self._limits = limits or {}
        self._vocabulary: GrammarVocabulary | None = None
        self._compiled: OrderedDict[tuple[GrammarKind, str], CompiledGrammar] = OrderedDict()
        self._lock = Lock()

    def matcher(self, grammar: Grammar, prompt_token_ids: Sequence[int] = ()) -> "GrammarMatcher":
        """A matcher for the output of one request.

        Args:
            prompt_token_ids: where these end with `grammar.reasoning_end`, it is not waited for in the output.

        Raises:
            RequestError: the grammar does not compile, or no text matches it, or it does not pass the trial.
            BackendUnavailableError: llguidance is not installed.
        """
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = GrammarVocabulary(self._tokenizer, self._eos_token_ids)
            is_known = grammar.kind is GrammarKind.JSON_OBJECT or (grammar.kind, grammar.text) in self._compiled
        if self.trial is not None and not is_known:  # outside the lock: those that are known do not wait
            self.trial.check(library_text(grammar, self._vocabulary))
        with self._lock:
            compiled = self._find(grammar, self._vocabulary)
        reasoning = None
        if grammar.reasoning_end is not None:
            marker = grammar.reasoning_end.encode()
            tail = b"".join(map(self._vocabulary.bytes_of, prompt_token_ids[-_PROMPT_TAIL:]))
            if not tail.rstrip().endswith(marker.rstrip() or marker):
                reasoning = _Reasoning(marker, self._vocabulary.bytes_of)
        return GrammarMatcher(compiled, reasoning)

    def _find(self, grammar: Grammar, vocabulary: GrammarVocabulary) -> CompiledGrammar:
        key = (grammar.kind, grammar.text)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = CompiledGrammar(grammar, vocabulary, self._limits)
            if len(self._compiled) > self._max_compiled:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return compiled


class _Reasoning:
    """Finds the token that completes a marker, by its bytes, across token borders."""

    def __init__(self, marker: bytes, bytes_of: Callable[[int], bytes]) -> None:
        self._marker, self._bytes_of = marker, bytes_of
        self._tail = b""  # the end of the committed text, in which the marker may have begun

    def end_in(self, path: Sequence[int]) -> int | None:
        """How many tokens of `path` belong to the reasoning section; None = all, and it goes on."""
        tail = self._tail
        for index, token_id in enumerate(path):
            tail = self._append(tail, token_id)
            if self._marker in tail:
                return index + 1
        return None

    def commit(self, token_id: int) -> bool:
        """Record a token; True where it ends the section."""
        self._tail = self._append(self._tail, token_id)
        return self._marker in self._tail

    def _append(self, tail: bytes, token_id: int) -> bytes:
        # One byte less than the marker is enough to find a marker that begins in earlier tokens.
        return tail[max(0, len(tail) - len(self._marker) + 1) :] + self._bytes_of(token_id)


class GrammarMatcher:
    """The state of one output in its grammar (a `Constraint` of sampling/processors.py), and what drafting asks of it.

    A path is what follows the committed output. Where tokens are forced the mask allows only the one that the tokenizer itself
    would write next; `num_allowed` goes by the text alone. Every method raises RequestError where the grammar proves too complex.
    """

    def __init__(self, compiled: CompiledGrammar, reasoning: _Reasoning | None = None) -> None:
        self._compiled = compiled
        self._vocabulary = compiled.vocabulary
        self._matcher = compiled.matcher()
        self._reasoning = reasoning
        self._unique_items = compiled.unique_items_state()
        self._has_ended = False
        self._committed: list[int] = []  # what the matcher consumed for good
        self._ahead: list[int] = []  # and what it consumed on its way down a path
        self._words = np.zeros(self._vocabulary.num_words, np.uint32)
        self._words_at = self._words.ctypes.data

    def is_finished(self, path: Sequence[int] = ()) -> bool:
        """Whether output + `path` is complete with no end token to come: it holds one, or the model has none and nothing may follow."""
        inside = self._constrained(path)
        if self._has_ended or inside is None:
            return self._has_ended
        if self._vocabulary.eos_set:
            return not self._vocabulary.eos_set.isdisjoint(inside)
        return self._go_to(inside) == len(inside) and not self._allowed(self._vocabulary.size).any()

    def mask(self, scores: NDArray[np.float32], path: Sequence[int]) -> None:
        """Set the scores [V] of what may not follow `path` to -inf, in place."""
        eos_ids = self._vocabulary.eos_ids
        eos_ids = eos_ids[: np.searchsorted(eos_ids, len(scores))]
        inside = self._constrained(path)
        if inside is None:
            scores[eos_ids] = -np.inf
        elif self._has_ended or not self._vocabulary.eos_set.isdisjoint(inside):
            _mask_all_except(scores, eos_ids)
        elif self._go_to(inside) < len(inside):
            scores.fill(-np.inf)
        else:
            allowed = self._allowed(len(scores))
            if self._unique_items is not None:
                self._forbid_duplicates(allowed, inside)
            if 4 * np.count_nonzero(allowed) < 3 * len(scores):  # which way is cheaper
                _mask_all_except(scores, allowed.nonzero()[0])
            else:
                scores[~allowed] = -np.inf

    def commit(self, token_id: int) -> None:
        """Record that a token became part of the output."""
        if self._reasoning is not None:
            if self._reasoning.commit(token_id):
                self._reasoning = None
            return
        self._has_ended = self._has_ended or token_id in self._vocabulary.eos_set
        if self._has_ended:
            return
        if self._ahead[:1] != [token_id] and self._go_to((token_id,)) == 0:
            text = self._vocabulary.bytes_of(token_id)
            raise RequestError(f"grammar: the output goes on with {text!r}, which it does not allow", parameter="grammar")
        if self._unique_items is not None:
            self._unique_items.feed(self._vocabulary.bytes_of(token_id))
            self._unique_items.has_duplicate = False
        self._committed.append(self._ahead.pop(0))

    def num_allowed(self, path: Sequence[int]) -> int:
        """How many tokens of `path`, from its first on, may follow the output one after the other."""
        is_end = self._vocabulary.eos_set.__contains__
        inside = self._constrained(path)
        if inside is None:
            return _first_index(path, is_end)
        if self._has_ended:
            return 0
        until = _first_index(inside, is_end)
        count = self._go_to(inside[:until])
        if count == until < len(inside) and self._matcher.is_accepting():
            count += 1
        return len(path) - len(inside) + count

    def is_allowed(self, path: Sequence[int]) -> bool:
        """Whether `path` may follow the output."""
        return self.num_allowed(path) == len(path)

    def forced_tokens(self, path: Sequence[int]) -> list[int]:
        """The tokens that must follow `path` one after the other, as the tokenizer writes their text; empty where there is a choice.

        An end token is never among them.
        """
        inside = self._constrained(path)
        if inside is None or self._has_ended or self._go_to(inside) < len(inside):
            return []
        forced: list[int] = self._matcher.compute_ff_tokens()
        if not forced and self._matcher.is_error():
            self._start_again()
            forced = self._matcher.compute_ff_tokens()
            self._check()
        return forced

    def _constrained(self, path: Sequence[int]) -> Sequence[int] | None:
        """The part of `path` that is under the grammar; None if reasoning goes on after it."""
        if self._reasoning is None:
            return path
        start = self._reasoning.end_in(path)
        return None if start is None else path[start:]

    def _go_to(self, path: Sequence[int]) -> int:
        """Move the matcher behind `path`, or as far as the grammar lets it; returns how many tokens of the path it stands behind."""
        ahead = self._ahead
        shared = 0
        while shared < len(ahead) and shared < len(path) and ahead[shared] == path[shared]:
            shared += 1
        num_back = len(ahead) - shared
        if num_back:
            del ahead[shared:]
            self._matcher.rollback(num_back)  # fails if the matcher is broken; the next call to it reports that
        # llguidance's matcher fails for good at an id outside the vocabulary.
        rest = list(path[shared:])
        rest = rest[: _first_index(rest, lambda token_id: not 0 <= token_id < self._vocabulary.size)]
        if rest:
            count = self._matcher.try_consume_tokens(rest)
            if count < len(rest) and self._matcher.is_error():
                self._start_again()
                count = self._matcher.try_consume_tokens(rest)
                self._check()
            ahead.extend(rest[:count])
        return len(ahead)

    def _allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """[vocab_size] bool: what may follow where the matcher stands; end tokens where the text may end."""
        self._matcher.unsafe_compute_mask_ptr(self._words_at, self._words.nbytes)
        if self._matcher.is_error():
            self._start_again()
            self._matcher.unsafe_compute_mask_ptr(self._words_at, self._words.nbytes)
            self._check()
        bits = self._words.view(np.uint8)
        end_id = self._vocabulary.end_id
        may_end = bool(bits[end_id >> 3] >> (end_id & 7) & 1)
        allowed = np.unpackbits(bits, bitorder="little", count=vocab_size).view(np.bool_)
        allowed[end_id : end_id + 1] = False
        for eos_id in self._vocabulary.eos_ids.tolist():
            allowed[eos_id : eos_id + 1] = may_end
        return allowed

    def _forbid_duplicates(self, allowed: NDArray[np.bool_], path: Sequence[int]) -> None:
        """Clear the tokens after `path` that repeat an item of an array with `uniqueItems`, in place.

        If each allowed token repeats one, they stay: an item that is half written can only be finished.
        """
        assert self._unique_items is not None
        state = self._unique_items.copy()
        for token_id in path:
            state.feed(self._vocabulary.bytes_of(token_id))
            state.has_duplicate = False
        ending_bytes = state.ending_bytes
        if ending_bytes is None:
            return
        may_repeat = self._vocabulary.tokens_with(ending_bytes)[: len(allowed)]
        repeats = []
        for token_id in np.flatnonzero(allowed[: len(may_repeat)] & may_repeat).tolist():
            after = state.copy()
            after.feed(self._vocabulary.bytes_of(token_id))
            if after.has_duplicate:
                repeats.append(token_id)
        if len(repeats) < np.count_nonzero(allowed):
            allowed[repeats] = False

    def _start_again(self) -> None:
        """Replace a broken matcher; compile the grammar anew where that may help.

        Compiling holds up the whole batch: a grammar of 60 kB takes 0.4 s.
        """
        self._matcher = self._compiled.renew() if has_grown_too_far(self._matcher) else self._compiled.matcher()
        self._matcher.try_consume_tokens([*self._committed, *self._ahead])
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            num_tokens = len(self._committed) + len(self._ahead)
            raise RequestError(
                f"grammar: after {num_tokens} tokens of output llguidance gives up ({reason_of(self._matcher)}); make it simpler or its "
                "texts shorter",
                parameter="grammar",
            )


def _mask_all_except(scores: NDArray[np.float32], token_ids: NDArray[np.integer]) -> None:
    kept = scores[token_ids]
    scores.fill(-np.inf)
    scores[token_ids] = kept


def _first_index(token_ids: Sequence[int], holds: Callable[[int], bool]) -> int:
    """Index of the first token that `holds` is true of; the number of tokens if there is none."""
    return next((index for index, token_id in enumerate(token_ids) if holds(token_id)), len(token_ids))
