"""A grammar compiled by llguidance for the ids of one model. The one place that knows how llguidance wants to be called."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import BackendUnavailableError, RequestError, library_errors
from paceline.installation import install_extra
from paceline.sampling.grammar import Grammar, GrammarKind
from paceline.sampling.json_schema import servable_schema
from paceline.sampling.unique_items import ENDS_ITEM, ENDS_STRING, UniqueItemsState, unique_items
from paceline.tokenizer.tokenizer import Tokenizer

_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_END = "<|end of grammar|>"  # stands for the end in a vocabulary that has no end token
_MAX_REASON = 400  # characters of llguidance's message that an error repeats


class GrammarVocabulary:
    """A tokenizer as llguidance sees it.

    Attributes:
        size: ids that exist.
        eos_ids, eos_set: ids that end an output, ascending.
        end_id: the one that stands for all of them in llguidance's masks; where the model has none, one that is no token.
        num_words: 32-bit words of a mask.

    Raises:
        BackendUnavailableError: llguidance is not installed.
        RequestError: it cannot read this tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise BackendUnavailableError(f"grammars need llguidance: {install_extra('grammar')}") from error
        self.llguidance: Any = llguidance
        self.size = tokenizer.vocab_size
        self._tokens_with: dict[bytes, NDArray[np.bool_]] = {}
        self.eos_ids = np.array(sorted({token_id for token_id in eos_token_ids if 0 <= token_id < self.size}), np.int64)
        self.eos_set = frozenset(self.eos_ids.tolist())
        text = tokenizer.to_json()
        if self.eos_set:
            self.end_id = int(self.eos_ids[0])
        else:
            text, self.end_id = _with_an_end(text)
        with library_errors("grammar: the tokenizer of this model cannot be held to one; generate without it", _refused):
            self.ids = self.llguidance.LLTokenizer(text, eos_token=self.end_id)
        self.num_words = (self.ids.vocab_size + 31) // 32

    def tokens_with(self, wanted: bytes) -> NDArray[np.bool_]:
        """[size] bool: which tokens hold any of the bytes; all of them if there are none."""
        if not wanted:
            return np.ones(self.size, np.bool_)
        if wanted not in self._tokens_with:
            found = [not set(wanted).isdisjoint(self.bytes_of(token_id)) for token_id in range(self.size)]
            self._tokens_with[wanted] = np.array(found, np.bool_)
        return self._tokens_with[wanted]

    def bytes_of(self, token_id: int) -> bytes:
        """The text of a token; empty for ids that do not exist."""
        text: bytes = self.ids.decode_bytes([token_id]) if 0 <= token_id < self.size else b""
        return text


def _refused(text: str) -> RequestError:
    return RequestError(text, parameter="grammar")


class CompiledGrammar:
    """A grammar in llguidance's form, compiled once and copied for each request.

    Args:
        limits: llguidance's `LLParserLimits` by name; those not named are its own.

    Raises:
        RequestError: it does not compile, or no text matches it.
    """

    def __init__(self, grammar: Grammar, vocabulary: GrammarVocabulary, limits: dict[str, int]) -> None:
        self.vocabulary = vocabulary
        self._limits = vocabulary.llguidance.LLParserLimits(verbose_errors=False, **limits)
        self._text = library_text(grammar, vocabulary)
        self._first = self._compile()
        if not self._first.is_error():
            self._first.compute_bitmask()  # for some grammars only this shows that no text matches
        if self._first.is_error():
            raise RequestError(f"grammar: {reason_of(self._first)}", parameter="grammar")
        self._unique_items = unique_items(json.loads(grammar.text)) if grammar.kind is GrammarKind.JSON_SCHEMA else None
        if self._unique_items is not None:
            for ending_bytes in (ENDS_STRING, ENDS_ITEM):  # now, as it takes longer than a step
                vocabulary.tokens_with(ending_bytes)

    def matcher(self) -> Any:
        """A fresh matcher; all of them share the grammar's automaton, which grows with use."""
        return self._first.deep_copy()

    def unique_items_state(self) -> UniqueItemsState | None:
        """What an output must be followed with besides the matcher; None = nothing."""
        return None if self._unique_items is None else UniqueItemsState(self._unique_items)

    def renew(self) -> Any:
        """A fresh matcher with a new automaton, which matchers of later requests share."""
        self._first = self._compile()
        return self._first.deep_copy()

    def _compile(self) -> Any:
        return self.vocabulary.llguidance.LLMatcher(self.vocabulary.ids, self._text, log_level=0, limits=self._limits)


def reason_of(matcher: Any) -> str:
    """Why a matcher of llguidance's broke, on one line."""
    text: str = matcher.get_error()
    if text.startswith("NoExtension"):
        return "no text matches it"
    if text.startswith("oneOf constraints are not supported"):
        return "`oneOf` cannot be enforced where several cases may hold: use `anyOf`, or give each case a property with its own `const`"
    return " ".join(text.replace("<non-verbose/>", "").split())[:_MAX_REASON]


def has_grown_too_far(matcher: Any) -> bool:
    """Return whether a matcher may be broken because of its automaton, which others share, and not because of its own text alone."""
    text: str = matcher.get_error()
    return "Current row has" not in text


def library_text(grammar: Grammar, vocabulary: GrammarVocabulary) -> str:
    """A grammar in llguidance's form.

    Raises:
        RequestError: it has none.
    """
    try:
        return _text_of(grammar, vocabulary.llguidance.LLMatcher)
    except ValueError as error:
        raise RequestError(f"grammar: {error}", parameter="grammar") from error


def _text_of(grammar: Grammar, matcher: Any) -> str:
    if grammar.kind is GrammarKind.REGEX:
        text = matcher.grammar_from_regex(grammar.text)
    elif grammar.kind is GrammarKind.LARK:
        text = matcher.grammar_from_lark(grammar.text)
    elif grammar.kind is GrammarKind.CHOICE:
        # Lark's strings are JSON's
        text = matcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in grammar.choices()))
    else:
        text = matcher.grammar_from_json_schema(json.dumps(servable_schema(json.loads(grammar.text))), defaults=_ONE_LINE)
    return str(text)


def _with_an_end(tokenizer_json: str) -> tuple[str, int]:
    """The tokenizer with one more token, for llguidance needs an end; and its id."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(tokenizer_json)
    backend.add_special_tokens([_NO_END])
    return backend.to_str(), backend.get_vocab()[_NO_END]
