"""Grammars compiled by llguidance for the vocabulary of one model. All llguidance objects are created here."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import BackendUnavailableError, RequestError, convert_library_errors
from paceline.installation import install_command
from paceline.sampling.grammars.grammar import Grammar, GrammarKind
from paceline.sampling.grammars.json_schema import enforceable_schema
from paceline.sampling.grammars.unique_items import ITEM_END_BYTES, STRING_END_BYTES, UniqueItemsState, unique_items_schema
from paceline.tokenizer.tokenizer import Tokenizer

JSON_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # llguidance's options for JSON on one line
_ADDED_END_TOKEN = "<|end of grammar|>"
_MAX_FAILURE_REASON_CHARS = 400


class GrammarVocabulary:
    """A model's tokenizer, converted for llguidance.

    Attributes:
        size: number of ids of the tokenizer.
        eos_ids, eos_set: ids that end an output, as an ascending array and as a set.
        end_id: the id that represents all `eos_ids` in llguidance's masks. If there are none, an id after the vocabulary.
        num_mask_words: number of 32-bit words of a mask.

    Raises:
        BackendUnavailableError: llguidance is not installed.
        RequestError: llguidance cannot read this tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise BackendUnavailableError(f"grammars need llguidance: {install_command('grammar')}") from error
        self.llguidance: Any = llguidance
        self.size = tokenizer.vocab_size
        self._tokens_containing: dict[bytes, NDArray[np.bool_]] = {}
        self.eos_ids = np.array(sorted({token_id for token_id in eos_token_ids if 0 <= token_id < self.size}), np.int64)
        self.eos_set = frozenset(self.eos_ids.tolist())
        text = tokenizer.to_json()
        if self.eos_set:
            self.end_id = int(self.eos_ids[0])
        else:
            text, self.end_id = _add_end_token(text)
        with convert_library_errors("grammar: llguidance cannot read this model's tokenizer; generate without a grammar", _grammar_error):
            self.ll_tokenizer = self.llguidance.LLTokenizer(text, eos_token=self.end_id)
        self.num_mask_words = (self.ll_tokenizer.vocab_size + 31) // 32

    def tokens_containing(self, byte_values: bytes) -> NDArray[np.bool_]:
        """Return [size] whether the text of each token contains one of the bytes; all True if `byte_values` is empty."""
        if not byte_values:
            return np.ones(self.size, np.bool_)
        if byte_values not in self._tokens_containing:
            has_byte = [not set(byte_values).isdisjoint(self.bytes_of(token_id)) for token_id in range(self.size)]
            self._tokens_containing[byte_values] = np.array(has_byte, np.bool_)
        return self._tokens_containing[byte_values]

    def bytes_of(self, token_id: int) -> bytes:
        """Return the text of a token; empty for ids outside the vocabulary."""
        text: bytes = self.ll_tokenizer.decode_bytes([token_id]) if 0 <= token_id < self.size else b""
        return text


class CompiledGrammar:
    """A compiled grammar, from which each request gets a matcher.

    llguidance's matchers of one grammar share an automaton, which grows with every text that is matched. When it exceeds a limit,
    matchers fail, and `replace_matcher` compiles the grammar again.

    Args:
        limits: values of llguidance's `LLParserLimits` by name; llguidance's defaults apply to the others.

    Raises:
        RequestError: the grammar does not compile, or no text matches it.
    """

    def __init__(self, grammar: Grammar, vocabulary: GrammarVocabulary, limits: dict[str, int]) -> None:
        self.vocabulary = vocabulary
        self._limits = vocabulary.llguidance.LLParserLimits(verbose_errors=False, **limits)
        self._text = llguidance_text(grammar, vocabulary)
        self._initial_matcher = self._compile()
        if not self._initial_matcher.is_error():
            self._initial_matcher.compute_bitmask()  # makes `is_error` true for grammars that match no text
        if self._initial_matcher.is_error():
            raise _grammar_error(f"grammar: {failure_reason(self._initial_matcher)}")
        self._unique_items = unique_items_schema(json.loads(grammar.text)) if grammar.kind is GrammarKind.JSON_SCHEMA else None
        if self._unique_items is not None:
            for ending_bytes in (STRING_END_BYTES, ITEM_END_BYTES):  # cached now, because computing it takes longer than a decoding step
                vocabulary.tokens_containing(ending_bytes)

    def new_matcher(self) -> Any:
        """Return an llguidance matcher at the beginning of a text."""
        return self._initial_matcher.deep_copy()

    def replace_matcher(self, failed_matcher: Any) -> Any:
        """Return a new matcher for one that failed; compile the grammar again if the shared automaton may have caused the failure.

        Compiling delays the whole batch: a grammar of 60 kB takes 0.4 s.
        """
        if "Current row has" not in failed_matcher.get_error():  # an error of this text is not due to the automaton
            self._initial_matcher = self._compile()
        return self._initial_matcher.deep_copy()

    def new_unique_items_state(self) -> UniqueItemsState | None:
        """Return a state for one output that enforces `uniqueItems`; None if the grammar does not use this keyword."""
        return None if self._unique_items is None else UniqueItemsState(self._unique_items)

    def _compile(self) -> Any:
        return self.vocabulary.llguidance.LLMatcher(self.vocabulary.ll_tokenizer, self._text, log_level=0, limits=self._limits)


def failure_reason(matcher: Any) -> str:
    """Return why an llguidance matcher failed, on one line."""
    error_text: str = matcher.get_error()
    if error_text.startswith("NoExtension"):
        return "no text matches it"
    if error_text.startswith("oneOf constraints are not supported"):
        return "`oneOf` cannot be enforced where several cases may match: use `anyOf`, or give each case a property with its own `const`"
    return " ".join(error_text.replace("<non-verbose/>", "").split())[:_MAX_FAILURE_REASON_CHARS]


def llguidance_text(grammar: Grammar, vocabulary: GrammarVocabulary) -> str:
    """Convert a grammar to llguidance's format.

    Raises:
        RequestError: llguidance has no format for it.
    """
    convert = vocabulary.llguidance.LLMatcher
    try:
        if grammar.kind is GrammarKind.REGEX:
            text = convert.grammar_from_regex(grammar.text)
        elif grammar.kind is GrammarKind.LARK:
            text = convert.grammar_from_lark(grammar.text)
        elif grammar.kind is GrammarKind.CHOICE:  # string literals of Lark have the syntax of JSON
            text = convert.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in grammar.choices()))
        else:
            text = convert.grammar_from_json_schema(json.dumps(enforceable_schema(json.loads(grammar.text))), defaults=JSON_WHITESPACE)
    except ValueError as error:
        raise _grammar_error(f"grammar: {error}") from error
    return str(text)


def _grammar_error(text: str) -> RequestError:
    return RequestError(text, parameter="grammar")


def _add_end_token(tokenizer_json: str) -> tuple[str, int]:
    """Add an end token, which llguidance requires, to a tokenizer.json; return the new JSON and the token's id."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(tokenizer_json)
    backend.add_special_tokens([_ADDED_END_TOKEN])
    return backend.to_str(), backend.get_vocab()[_ADDED_END_TOKEN]
