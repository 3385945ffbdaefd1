"""What an output must match: a grammar by its text. Checked for form here, compiled for a model by `sampling/matcher.py`."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from paceline.errors import RequestError

MAX_TEXT = 1_000_000  # characters
MAX_MARKER = 100  # characters of a `reasoning_end`
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_ANY_OBJECT = '{"type": "object"}'
_ANY_WHITESPACE = {"whitespace_flexible": True, "item_separator": ",", "key_separator": ":"}


class GrammarKind(Enum):
    """The language a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    LARK = "lark"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must match. Made by the constructors below.

    JSON is written on one line, as `json.dumps` does, unless `any_whitespace` is set: then the model may indent it, and a model that
    never stops indenting never ends.

    Attributes:
        kind: what `text` is; its name is accepted too.
        text: a JSON schema, a regular expression, a Lark grammar or a JSON list of choices.
        reasoning_end: text after which the grammar begins, such as "</think>"; before it every token but an end token is allowed. None =
            the grammar begins with the first token, as it does where the prompt ends with this text.

    Raises:
        RequestError: it cannot be a grammar; `parameter` is "grammar".
    """

    kind: GrammarKind
    text: str
    reasoning_end: str | None = None

    def __post_init__(self) -> None:
        names = [kind.value for kind in GrammarKind]
        given: object = self.kind
        if not isinstance(given, GrammarKind) and given not in names:
            _refuse(f"kind {given!r} is none of {', '.join(names)}")
        object.__setattr__(self, "kind", GrammarKind(given))
        _check_text("its text", self.text, MAX_TEXT)
        if self.reasoning_end is not None:
            _check_text("reasoning_end", self.reasoning_end, MAX_MARKER)
        if self.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT):
            _parsed_schema(self.text)
        elif self.kind is GrammarKind.CHOICE:
            self.choices()
        elif self.kind is GrammarKind.LARK and _GBNF_RULE.search(self.text):
            _refuse("it is written in GBNF (`root ::= ...`): write it in Lark, with rules `start: ...` and regular expressions `/[a-z]+/`")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, *, any_whitespace: bool = False, reasoning_end: str | None = None) -> "Grammar":
        """Return a grammar of the JSON values that match a schema; properties are in the schema's order.

        Args:
            schema: a mapping or its JSON text. Keywords that cannot be enforced are refused when the grammar is compiled.
            any_whitespace: whether the model may use whitespace as it likes.
        """
        return cls(GrammarKind.JSON_SCHEMA, _schema_text(schema, any_whitespace=any_whitespace), reasoning_end)

    @classmethod
    def json_object(cls, *, any_whitespace: bool = False, reasoning_end: str | None = None) -> "Grammar":
        """Return a grammar of any JSON object."""
        return cls(GrammarKind.JSON_OBJECT, _schema_text(_ANY_OBJECT, any_whitespace=any_whitespace), reasoning_end)

    @classmethod
    def regex(cls, pattern: str, *, reasoning_end: str | None = None) -> "Grammar":
        """Return a grammar of the texts that a regular expression matches as a whole (Rust's regex crate, without look-around)."""
        return cls(GrammarKind.REGEX, pattern, reasoning_end)

    @classmethod
    def lark(cls, text: str, *, reasoning_end: str | None = None) -> "Grammar":
        """Return a grammar from a context-free grammar in llguidance's dialect of Lark, whose first rule is `start`."""
        return cls(GrammarKind.LARK, text, reasoning_end)

    @classmethod
    def choice(cls, texts: Sequence[str], *, reasoning_end: str | None = None) -> "Grammar":
        """Return a grammar of exactly one of `texts`."""
        given: object = texts
        if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(text, str) for text in given):
            _refuse(f"choices {texts!r} are no list of texts")
        return cls(GrammarKind.CHOICE, json.dumps(list(texts), ensure_ascii=False), reasoning_end)

    def choices(self) -> list[str]:
        """The texts of a choice."""
        try:
            texts = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"grammar: choices are no JSON list ({error})", parameter="grammar") from error
        is_usable = isinstance(texts, list) and texts and all(isinstance(text, str) and text for text in texts)
        if not is_usable:
            _refuse(f"choices {texts!r} are no list of one or more non-empty texts")
        found: list[str] = texts
        return found


def _refuse(reason: str) -> NoReturn:
    raise RequestError(f"grammar: {reason}", parameter="grammar")


def _check_text(name: str, text: object, limit: int) -> None:
    if not isinstance(text, str) or not text:
        _refuse(f"{name} is {text!r}; give a non-empty string")
    if len(text) > limit:
        _refuse(f"{name} has {len(text)} characters; at most {limit} are compiled")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            _refuse(f"{name} cannot be written in UTF-8 ({error.reason} at character {error.start})")


def _schema_text(schema: Mapping[str, Any] | str, *, any_whitespace: bool) -> str:
    given: object = schema
    if isinstance(given, str):
        if not any_whitespace:
            return given
        given = _parsed_schema(given)
    if not isinstance(given, Mapping):
        _refuse(f"schema {schema!r} is neither a mapping nor JSON text")
    try:
        layout = {**_ANY_WHITESPACE, **given.get("x-guidance", {})}
        laid_out = {**given, "x-guidance": layout} if any_whitespace else dict(given)
        return json.dumps(laid_out, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"grammar: the schema cannot be written as JSON ({error})", parameter="grammar") from error


def _parsed_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"grammar: the schema is no JSON ({error})", parameter="grammar") from error
    if not isinstance(schema, dict):
        _refuse(f"the schema {schema!r} is no JSON object")
    parsed: dict[str, Any] = schema
    return parsed
