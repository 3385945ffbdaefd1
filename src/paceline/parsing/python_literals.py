"""Converts Python literals to JSON while they arrive, with the errors that models make.

Strings may hold raw line ends. A quote ends a string only if a comma, a closing bracket, a colon or the end follows.
`true`, `false` and `null`, leading zeros, sets and tuples are read too. Names, operators and bytes are refused.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.parsing.argument_types import admits_text, coerce_argument, is_text
from paceline.parsing.lenient_json import NUMBER, escape_json
from paceline.parsing.text_stream import WHITESPACE, Emit, MalformedError, Parse, TextStream

MAX_DEPTH = 100
QUOTES = ("'", '"')
AFTER_STRING = ",)]}:"
_PREFIXES = ("", "r", "u", "f", "rf", "fr")
_WORD = re.compile(r"[-+.\w]")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_DECIMAL = re.compile(r"0*([0-9].*)|\.[0-9].*")
_ESCAPES = {"\n": "", "a": "\\u0007", "v": "\\u000b", "'": "'", '"': '\\"', "\\": "\\\\", **{char: "\\" + char for char in "nrtbf"}}
_NUM_HEX = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]+")
_OCTAL = re.compile(r"[0-7]{1,3}")


class BrokenStringError(MalformedError):
    """Raised if a quote within a string neither ends it nor is escaped.

    Attributes:
        place: index of the string's first quote, where nothing was dropped from the stream.
    """

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place


@dataclass(frozen=True, slots=True)
class LiteralReader:
    """Reads literals.

    Args:
        ends: what ends the block that the literals are in.
        ends_strings: whether `ends` end it within a string as well, as special tokens do.
        is_strict: whether the first quote ends a string whatever follows; strings next to each other are then one.
    """

    ends: Sequence[str] = ()
    ends_strings: bool = False
    is_strict: bool = False

    def read(self, stream: TextStream, emit: Emit, schema: Mapping[str, Any] | None = None, depth: int = 0) -> Parse[None]:
        """Pass a literal and write it as JSON; the schema decides between a string and other types.

        Raises:
            MalformedError: it is none, or the text ends within it.
        """
        yield from stream.skip()
        char = yield from stream.peek()
        if depth > MAX_DEPTH:
            raise MalformedError
        if char and char in "[({":
            if schema is not None and is_text(schema):
                text = yield from self._collect(stream, depth)
                emit(f'"{escape_json(text)}"')
            elif char == "[":
                yield from self._read_list(stream, emit, depth)
            else:
                yield from self._read_bracket(stream, emit, depth)
            return
        word = yield from stream.matching(_WORD)
        quote = yield from stream.peek()
        if quote in QUOTES and word.lower() in _PREFIXES:
            yield from self._read_text(stream, emit, word.lower(), schema)
        else:
            emit(_scalar(word, schema))

    def _read_text(self, stream: TextStream, emit: Emit, prefix: str, schema: Mapping[str, Any] | None) -> Parse[None]:
        if schema is None or admits_text(schema):
            emit('"')
            yield from self._read_string(stream, emit, prefix)
            emit('"')
            return
        parts: list[str] = []
        yield from self._read_string(stream, parts.append, prefix)
        emit(coerce_argument(json.loads(f'"{"".join(parts)}"'), schema))

    def _collect(self, stream: TextStream, depth: int) -> Parse[str]:
        parts: list[str] = []
        yield from self.read(stream, parts.append, depth=depth + 1)
        return "".join(parts)

    def _read_list(self, stream: TextStream, emit: Emit, depth: int) -> Parse[None]:
        stream.at += 1
        emit("[")
        yield from self._read_items(stream, emit, depth, "]", "")

    def _read_items(self, stream: TextStream, emit: Emit, depth: int, end: str, before: str) -> Parse[None]:
        while True:
            yield from stream.skip()
            if (yield from stream.take(end)):
                break
            emit(before)
            yield from self.read(stream, emit, depth=depth + 1)
            before = ", "
            yield from stream.skip()
            if not (yield from stream.take(",")):
                yield from stream.expect(end)
                break
        emit("]")

    def _read_bracket(self, stream: TextStream, emit: Emit, depth: int) -> Parse[None]:
        """Read a tuple, a set, an object, or one value in parentheses: the mark after the first value decides."""
        end = ")" if stream.text[stream.at] == "(" else "}"
        stream.at += 1
        yield from stream.skip()
        if (yield from stream.take(end)):
            emit("[]" if end == ")" else "{}")
            return
        first = yield from self._collect(stream, depth)
        yield from stream.skip()
        if end == "}" and (yield from stream.take(":")):
            emit("{")
            yield from self._read_pairs(stream, emit, depth, first)
            return
        if (yield from stream.take(",")):
            emit("[" + first)
            yield from self._read_items(stream, emit, depth, end, ", ")
            return
        yield from stream.expect(end)
        emit(first if end == ")" else f"[{first}]")

    def _read_pairs(self, stream: TextStream, emit: Emit, depth: int, key: str) -> Parse[None]:
        """Read the pairs of an object, after the first key and its colon."""
        before = ""
        while True:
            if key[0] in "[{":
                raise MalformedError
            emit(f"{before}{key}: " if key[0] == '"' else f'{before}"{key}": ')
            yield from self.read(stream, emit, depth=depth + 1)
            before = ", "
            yield from stream.skip()
            has_more = yield from stream.take(",")
            yield from stream.skip()
            if (yield from stream.take("}")):
                emit("}")
                return
            if not has_more:
                raise MalformedError
            key = yield from self._collect(stream, depth)
            yield from stream.skip()
            yield from stream.expect(":")

    def _read_string(self, stream: TextStream, emit: Emit, prefix: str) -> Parse[None]:
        """Read a string and, in strict mode, those next to it."""
        while True:
            quote = stream.text[stream.at]
            stream.at += 1
            if (yield from stream.take(quote * 2)):
                yield from self._read_characters(stream, emit, prefix, quote * 3)
            else:
                yield from self._read_characters(stream, emit, prefix, quote)
            if not self.is_strict:
                return
            yield from stream.skip()
            if (yield from stream.peek()) not in QUOTES:
                return
            prefix = ""

    def _read_characters(self, stream: TextStream, emit: Emit, prefix: str, end: str) -> Parse[None]:
        stops = self.ends if self.ends_strings else ()
        braces = "{}" if "f" in prefix else ""
        plain = re.compile(f"[^\\\\{re.escape(end[0] + braces + ''.join(stop[0] for stop in stops))}]+")
        num_chars = len(end)
        while True:
            char = yield from stream.peek()
            if char == "":
                raise MalformedError
            if found := plain.match(stream.text, stream.at):
                stream.at = found.end()
                num_chars += len(found[0])
                emit(escape_json(found[0]))
            elif char == "\\":
                stream.at += 1
                num_chars += 1 + (yield from _read_escape(stream, emit, is_raw="r" in prefix))
            elif char == end[0] and (yield from stream.take(end)):
                if self.is_strict or len(end) == 3 or (yield from self._ends_after(stream)):
                    return
                raise BrokenStringError(stream.at - num_chars - 1)
            elif char in braces:
                yield from stream.expect(char * 2)
                num_chars += 2
                emit(char)
            elif (yield from stream.one_of(stops)) is not None:
                raise MalformedError
            else:
                stream.at += 1
                num_chars += 1
                emit(escape_json(char))

    def _ends_after(self, stream: TextStream) -> Parse[bool]:
        """Return whether what follows a quote lets it end its string; nothing is passed."""
        num_blank = 0
        while True:
            while stream.at + num_blank < len(stream.text) and stream.text[stream.at + num_blank] in WHITESPACE:
                num_blank += 1
            if stream.at + num_blank < len(stream.text):
                break
            if stream.has_ended:
                return True
            yield
        if stream.text[stream.at + num_blank] in AFTER_STRING:
            return True
        stream.at += num_blank
        end = yield from stream.one_of(self.ends)
        stream.at -= num_blank
        return end is not None


def _read_escape(stream: TextStream, emit: Emit, *, is_raw: bool) -> Parse[int]:
    """Write what a backslash and the characters after it mean; returns how many these are."""
    char = yield from stream.peek()
    if char == "":
        raise MalformedError
    if is_raw and char not in QUOTES:
        emit("\\\\")
        return 0
    if is_raw or char in _ESCAPES:
        stream.at += 1
        emit(("\\\\" if is_raw else "") + _ESCAPES[char])
        return 1
    num_digits = _NUM_HEX.get(char, 2 if char in "01234567" else 0)
    while len(stream.text) <= stream.at + num_digits and not stream.has_ended:
        yield
    if octal := _OCTAL.match(stream.text, stream.at):
        stream.at = octal.end()
        emit(escape_json(chr(int(octal[0], 8))))
        return len(octal[0])
    digits = stream.text[stream.at + 1 : stream.at + 1 + num_digits]
    if not num_digits or len(digits) < num_digits or not _HEX.fullmatch(digits) or int(digits, 16) > 0x10FFFF:
        emit("\\\\")
        return 0
    stream.at += 1 + num_digits
    # the halves of a surrogate pair are escaped one by one; JSON joins them again
    emit(f"\\u{digits}" if char == "u" else escape_json(chr(int(digits, 16))))
    return 1 + num_digits


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
    """Return a number as JSON writes it; None for other words."""
    sign, digits = ("-" if word.startswith("-") else ""), word.replace("_", "")
    digits = digits[1:] if digits[:1] in ("-", "+") else digits
    if digits[:2].lower() in ("0x", "0o", "0b"):
        try:
            return sign + str(int(digits, 0))
        except ValueError:
            return None
    found = _DECIMAL.fullmatch(digits)
    if found is None:
        return None
    if found[1] and NUMBER.fullmatch(found[1]) and math.isfinite(float(found[1])):
        return sign + found[1]
    try:
        value = float(digits)
    except ValueError:
        return None
    return sign + repr(value) if math.isfinite(value) else None
