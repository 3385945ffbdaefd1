"""The text of a grammar that an output must match. Its form is checked here; `compiler.py` compiles it for a model."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from paceline.errors import RequestError

MAX_TEXT_CHARS = 1_000_000
_MAX_REASONING_END_CHARS = 100
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_ANY_OBJECT_SCHEMA = '{"type": "object"}'
_ANY_WHITESPACE_OPTIONS = {"whitespace_flexible": True, "item_separator": ",", "key_separator": ":"}


class GrammarKind(Enum):
    """The language of a grammar's text."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    LARK = "lark"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an output must match. There is a class method for each kind of grammar.

    JSON is generated on one line, as by `json.dumps`, unless `any_whitespace` is set. Then the model may indent it, but may also
    generate whitespace without end.

    Attributes:
        kind: language of `text`; its value as a string is accepted too.
        text: a JSON schema, a regular expression, a Lark grammar or a JSON list of choices.
        reasoning_end: text that ends a reasoning section, such as "</think>". The grammar applies after it; before it all tokens except end
            tokens are allowed. None = no reasoning section. If the prompt ends with this text, the section has ended already.

    Raises:
        RequestError: the text is not a grammar of this kind; the error's `parameter` is "grammar".
    """

    kind: GrammarKind
    text: str
    reasoning_end: str | None = None

    def __post_init__(self) -> None:
        names = [kind.value for kind in GrammarKind]
        kind: object = self.kind
        if not isinstance(kind, GrammarKind) and kind not in names:
            _raise_error(f"kind {kind!r} is not one of {', '.join(names)}")
        object.__setattr__(self, "kind", GrammarKind(kind))
        _check_text("its text", self.text, MAX_TEXT_CHARS)
        if self.reasoning_end is not None:
            _check_text("reasoning_end", self.reasoning_end, _MAX_REASONING_END_CHARS)
        if self.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT):
            _parse_schema(self.text)
        elif self.kind is GrammarKind.CHOICE:
            self.choices()
        elif self.kind is GrammarKind.LARK and _GBNF_RULE.search(self.text):
            _raise_error("it is in GBNF (`root ::= ...`): use Lark, with rules `start: ...` and regular expressions `/[a-z]+/`")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, *, any_whitespace: bool = False, reasoning_end: str | None = None) -> "Grammar":
        """Return a grammar of the JSON values that match a schema; properties are generated in the schema's order.

        Args:
            schema: a mapping or its JSON text. Compiling it raises an error for keywords that cannot be enforced.
            any_whitespace: whether whitespace between JSON tokens is left to the model.
        """
        return cls(GrammarKind.JSON_SCHEMA, _schema_text(schema, any_whitespace=any_whitespace), reasoning_end)

    @classmethod
    def json_object(cls, *, any_whitespace: bool = False, reasoning_end: str | None = None) -> "Grammar":
        """Return a grammar of any JSON object."""
        return cls(GrammarKind.JSON_OBJECT, _schema_text(_ANY_OBJECT_SCHEMA, any_whitespace=any_whitespace), reasoning_end)

    @classmethod
    def regex(cls, pattern: str, *, reasoning_end: str | None = None) -> "Grammar":
        """Return a grammar of the texts that a regular expression of Rust's regex crate, which has no look-around, matches in full."""
        return cls(GrammarKind.REGEX, pattern, reasoning_end)

    @classmethod
    def lark(cls, text: str, *, reasoning_end: str | None = None) -> "Grammar":
        """Return a grammar from a context-free grammar in llguidance's dialect of Lark, whose first rule is `start`."""
        return cls(GrammarKind.LARK, text, reasoning_end)

    @classmethod
    def choice(cls, texts: Sequence[str], *, reasoning_end: str | None = None) -> "Grammar":
        """Return a grammar of exactly one of `texts`."""
        choices: object = texts
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not all(isinstance(text, str) for text in choices):
            _raise_error(f"choices must be a list of strings, got {texts!r}")
        return cls(GrammarKind.CHOICE, json.dumps(list(texts), ensure_ascii=False), reasoning_end)

    def choices(self) -> list[str]:
        """Return the texts that a grammar of the kind CHOICE allows."""
        try:
            texts = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"grammar: choices are not a JSON list ({error})", parameter="grammar") from error
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            _raise_error(f"choices must be a list of one or more non-empty strings, got {texts!r}")
        choices: list[str] = texts
        return choices


def _raise_error(reason: str) -> NoReturn:
    raise RequestError(f"grammar: {reason}", parameter="grammar")


def _check_text(name: str, text: object, max_chars: int) -> None:
    if not isinstance(text, str) or not text:
        _raise_error(f"{name} must be a non-empty string, got {text!r}")
    if len(text) > max_chars:
        _raise_error(f"{name} has {len(text)} characters; at most {max_chars} are compiled")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        _raise_error(f"{name} cannot be encoded in UTF-8 ({error.reason} at character {error.start})")


def _schema_text(schema: Mapping[str, Any] | str, *, any_whitespace: bool) -> str:
    schema_object: object = schema
    if isinstance(schema_object, str):
        if not any_whitespace:
            return schema_object
        schema_object = _parse_schema(schema_object)
    if not isinstance(schema_object, Mapping):
        _raise_error(f"schema must be a mapping or JSON text, got {schema!r}")
    try:
        options = {"x-guidance": {**_ANY_WHITESPACE_OPTIONS, **schema_object.get("x-guidance", {})}} if any_whitespace else {}
        return json.dumps({**schema_object, **options}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"grammar: the schema cannot be written as JSON ({error})", parameter="grammar") from error


def _parse_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"grammar: the schema is not JSON ({error})", parameter="grammar") from error
    if not isinstance(schema, dict):
        _raise_error(f"the schema must be a JSON object, got {schema!r}")
    parsed: dict[str, Any] = schema
    return parsed
