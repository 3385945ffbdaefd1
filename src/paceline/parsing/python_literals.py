"""Converts the arguments of a call that is written as Python to JSON, with the errors that models make.

Strings may hold raw line ends. `true`, `false` and `null`, leading zeros, sets and tuples are read too. Names, operators and bytes are
refused.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline.parsing.argument_types import admits_text, coerce_argument, is_text, parameter_schema
from paceline.parsing.lenient_json import escape_json
from paceline.parsing.text_stream import WHITESPACE, MalformedError

MAX_DEPTH = 100
QUOTES = "'\""
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_PREFIXES = ("", "r", "u", "f", "rf", "fr")
_SPACE = re.compile(f"[{WHITESPACE}]*")
_KEY = re.compile(r"[^\s=,()'\"\[\]{}*]*")
_WORD = re.compile(r"[-+.\w]*")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CONTENT = {
    **{quote: re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*", re.DOTALL) for quote in QUOTES},
    **{quote * 3: re.compile(rf"[^{quote}\\]*(?:(?:\\.|{quote}(?!{quote}{quote}))[^{quote}\\]*)*", re.DOTALL) for quote in QUOTES},
}
_NO_FIELDS = re.compile(r"(?:[^{}]|\{\{|\}\})*")
_ESCAPES = {"\n": "", "a": "\\u0007", "v": "\\u000b", "'": "'", '"': '\\"', "\\": "\\\\", **{char: "\\" + char for char in "nrtbf"}}
_HEX = "[0-9a-fA-F]"
_PART = re.compile(
    rf"""\\(?P<char>[\nabfnrtv'"\\])|\\(?P<octal>[0-7]{{1,3}})|\\x(?P<x>{_HEX}{{2}})|\\u(?P<u>{_HEX}{{4}})|\\U(?P<U>{_HEX}{{8}})"""
    rf"""|(?P<cut>\\[xuU]{_HEX}*\Z)|[^\\]+|\\"""
)


@dataclass(slots=True)
class LiteralReader:
    """Reads arguments and literals of a whole text, and writes them as JSON.

    Attributes:
        at: index of the next character.
        parts: the JSON; if the text ends within a value, the end of the JSON is missing.
        string_start: index of the first quote of the last string; -1 = there was none.
    """

    text: str
    at: int = 0
    parts: list[str] = field(default_factory=list)
    string_start: int = -1

    def read_arguments(self, schema: Mapping[str, Any] | None) -> None:
        """Read the arguments of a call as an object.

        Raises:
            MalformedError: one is no literal, or the text ends within it.
        """
        self.parts.append("{")
        before = ""
        while self._peek() != "":
            if self._take("**"):
                unpacked = json.loads(self._collect(0))
                if not isinstance(unpacked, dict):
                    raise MalformedError
                for key, value in unpacked.items():
                    self.parts.append(f'{before}"{escape_json(key)}": {json.dumps(value, ensure_ascii=False)}')
                    before = ", "
            else:
                key = self._match(_KEY)
                if not key:
                    raise MalformedError
                self._expect("=")
                self.parts.append(f'{before}"{escape_json(key)}": ')
                self._read(parameter_schema(schema, key))
                before = ", "
            if self._peek() != "":
                self._expect(",")
        self.parts.append("}")

    def _read(self, schema: Mapping[str, Any] | None = None, depth: int = 0) -> None:
        """Read a literal; the schema decides between a string and other types."""
        char = self._peek()
        if depth > MAX_DEPTH:
            raise MalformedError
        if char in _CLOSERS and schema is not None and is_text(schema):
            self.parts.append(f'"{escape_json(self._collect(depth))}"')
        elif char in _CLOSERS:
            self._read_bracket(depth)
        else:
            word = self._match(_WORD)
            if self.text[self.at : self.at + 1] in tuple(QUOTES) and word.lower() in _PREFIXES:
                self._read_text(word.lower(), schema)
            else:
                self.parts.append(_scalar(word, schema))

    def _collect(self, depth: int) -> str:
        """Read a literal and return its JSON."""
        outer, self.parts = self.parts, []
        try:
            self._read(depth=depth + 1)
            return "".join(self.parts)
        finally:
            self.parts = outer

    def _read_bracket(self, depth: int) -> None:
        """Read a list, a tuple, a set, an object, or one value in parentheses: the mark after the first value decides."""
        end = _CLOSERS[self.text[self.at]]
        self.at += 1
        if end == "]":
            self.parts.append("[")
            self._read_items(depth, end)
            return
        if self._peek() == end:
            self.at += 1
            self.parts.append("[]" if end == ")" else "{}")
            return
        first = self._collect(depth)
        following = self._peek()
        if end == "}" and following == ":":
            self.parts.append("{")
            self._read_pairs(depth, first)
        elif following == ",":
            self.parts.append(f"[{first}")
            self._read_items(depth, end)
        else:
            self._expect(end)
            self.parts.append(first if end == ")" else f"[{first}]")

    def _read_items(self, depth: int, end: str) -> None:
        """Read the rest of a list, before its first item or before the comma after it."""
        before = ""
        while self._peek() != end:
            if self._peek() == ",":
                self.at += 1
                before = ", "
            if self._peek() == end:
                break
            self.parts.append(before)
            self._read(depth=depth + 1)
            if self._peek() not in (",", end):
                raise MalformedError
        self.at += 1
        self.parts.append("]")

    def _read_pairs(self, depth: int, key: str) -> None:
        """Read the pairs of an object, before the colon after the first key."""
        before = ""
        while True:
            self._expect(":")
            if key[0] in "[{":
                raise MalformedError
            self.parts.append(f"{before}{key}: " if key[0] == '"' else f'{before}"{key}": ')
            self._read(depth=depth + 1)
            before = ", "
            if self._peek() == ",":
                self.at += 1
                if self._peek() != "}":
                    key = self._collect(depth)
                    continue
            self._expect("}")
            self.parts.append("}")
            return

    def _read_text(self, prefix: str, schema: Mapping[str, Any] | None) -> None:
        """Read a string and those next to it."""
        self.string_start = self.at
        text, is_whole = self._read_string(prefix)
        while is_whole and self._peek() in tuple(QUOTES):
            more, is_whole = self._read_string("")
            text += more
        if schema is None or admits_text(schema):
            self.parts.append(f'"{text}"' if is_whole else f'"{text}')
        elif is_whole:
            self.parts.append(coerce_argument(json.loads(f'"{text}"'), schema))
        if not is_whole:
            raise MalformedError

    def _read_string(self, prefix: str) -> tuple[str, bool]:
        """Return a string as JSON without quotes, and whether it has an end."""
        quote = self.text[self.at]
        end = quote * 3 if self.text.startswith(quote * 3, self.at) else quote
        self.at += len(end)
        content = self._match(_CONTENT[end])
        is_whole = self._take(end)
        if not is_whole:
            self.at = len(self.text)
        if "f" in prefix:
            if not _NO_FIELDS.fullmatch(content):
                raise MalformedError
            content = content.replace("{{", "{").replace("}}", "}")
        if "r" in prefix:
            return escape_json(content), is_whole
        return _PART.sub(lambda found: _part_json(found, is_whole=is_whole), content), is_whole

    def _peek(self) -> str:
        """Pass white space and return the next character; empty at the end."""
        self._match(_SPACE)
        return self.text[self.at : self.at + 1]

    def _take(self, literal: str) -> bool:
        is_there = self.text.startswith(literal, self.at)
        self.at += len(literal) if is_there else 0
        return is_there

    def _expect(self, literal: str) -> None:
        if self._peek() != literal:
            raise MalformedError
        self.at += 1

    def _match(self, pattern: "re.Pattern[str]") -> str:
        found = pattern.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        return found[0]


def _part_json(found: "re.Match[str]", *, is_whole: bool) -> str:
    """Return an escape, or the text between two, as JSON. An escape that the end of the text cuts is left out."""
    kind = found.lastgroup
    if kind == "char":
        return _ESCAPES[found[kind]]
    if kind == "u":  # the halves of a surrogate pair are escaped one by one; JSON joins them again
        return found[0]
    if kind == "cut" and not is_whole:
        return ""
    code = int(found[kind], 8 if kind == "octal" else 16) if kind in ("octal", "x", "U") else -1
    return escape_json(chr(code) if 0 <= code <= 0x10FFFF else found[0])


def _scalar(word: str, schema: Mapping[str, Any] | None) -> str:
    value = _WORDS.get(word) or _number(word)
    if value is None:
        raise MalformedError
    if schema is None or value == "null":
        return value
    if is_text(schema):
        return f'"{escape_json(word)}"'
    coerced = coerce_argument(value, schema)
    return coerced if coerced[0] != '"' or admits_text(schema) else value


def _number(word: str) -> str | None:
    """Return a number as JSON; None for other words."""
    for parse in (partial(int, base=0), int, float):  # 0x1f, 07, 5.
        try:
            value = parse(word)
            return json.dumps(value) if isinstance(value, int) or math.isfinite(value) else None
        except ValueError:  # no such number, or an integer of more digits than Python converts
            continue
    return None
