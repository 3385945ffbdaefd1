"""JSON as models write it, read while it arrives."""

import json
import re

from paceline.parsing.text_stream import MAX_NAME_LEN, WHITESPACE, Emit, MalformedError, Parse, TextStream

MAX_DEPTH = 200
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[-+.0-9A-Za-z]")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = ("true", "false", "null")
_ESCAPED = '"\\/bfnrt'
_HEX = re.compile(r"[0-9a-fA-F]{4}")


def escape_json(text: str) -> str:
    """A text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_word(word: str) -> str | None:
    """The word, if it is a JSON value by itself: a number, true, false or null."""
    return word if word in _WORDS or NUMBER.fullmatch(word) else None


def emit_json_object(stream: TextStream, say: Emit) -> Parse[None]:
    """Pass a JSON object and tell it.

    What JSON does not allow within a string (a line end, a backslash in front of nothing special) is told as JSON writes it.

    Raises:
        MalformedError: it is none, or the text ends within it; what was passed until then was told.
    """
    if (yield from stream.peek()) != "{":
        raise MalformedError
    yield from _value(stream, say)


def read_json_value(stream: TextStream) -> Parse[str]:
    """Pass any JSON value; returns it, with what JSON does not allow as JSON writes it.

    Raises:
        MalformedError: it is none, or the text ends within it.
    """
    parts: list[str] = []
    yield from _value(stream, parts.append, marks_emitted=False)
    return "".join(parts)


def read_short_string(stream: TextStream) -> Parse[str]:
    """Pass a JSON string of at most 256 characters; returns its text.

    Raises:
        MalformedError: it is none, or longer.
    """
    parts: list[str] = []

    def add(part: str) -> None:
        parts.append(part)
        if sum(map(len, parts)) > MAX_NAME_LEN + 2:
            raise MalformedError

    yield from _string(stream, add)
    try:
        return str(json.loads("".join(parts)))
    except ValueError:
        raise MalformedError from None


def _value(stream: TextStream, say: Emit, *, marks_emitted: bool = True) -> Parse[None]:
    """One value, told piece by piece; `marks_emitted`: what is told need not be known any more."""

    def tell(part: str) -> None:
        say(part)
        if marks_emitted:
            stream.mark_emitted()

    open_ends: list[str] = []
    while True:
        char = yield from _after_space(stream, tell)
        if char in ("{", "["):
            stream.at += 1
            tell(char)
            open_ends.append("}" if char == "{" else "]")
            if len(open_ends) > MAX_DEPTH:
                raise MalformedError
            if (yield from _after_space(stream, tell)) != open_ends[-1]:
                if char == "{":
                    yield from _key(stream, tell)
                continue
        elif char == '"':
            yield from _string(stream, tell)
        else:
            yield from _word(stream, tell)
        if not (yield from _has_more(stream, tell, open_ends)):
            return


def _has_more(stream: TextStream, tell: Emit, open_ends: list[str]) -> Parse[bool]:
    """What follows a value: the ends of what it stands in, or another one."""
    while open_ends:
        char = yield from _after_space(stream, tell)
        if char != open_ends[-1] and char != ",":
            raise MalformedError
        stream.at += 1
        tell(char)
        if char == ",":
            if open_ends[-1] == "}":
                yield from _after_space(stream, tell)
                yield from _key(stream, tell)
            return True
        open_ends.pop()
    return False


def _key(stream: TextStream, tell: Emit) -> Parse[None]:
    yield from _string(stream, tell)
    if (yield from _after_space(stream, tell)) != ":":
        raise MalformedError
    stream.at += 1
    tell(":")


def _string(stream: TextStream, tell: Emit) -> Parse[None]:
    if (yield from stream.peek()) != '"':
        raise MalformedError
    stream.at += 1
    tell('"')
    while True:
        if (yield from stream.peek()) == "":
            raise MalformedError
        if plain := _PLAIN.match(stream.text, stream.at):
            stream.at = plain.end()
            tell(plain[0])
            continue
        char = stream.text[stream.at]
        stream.at += 1
        if char == "\\":
            tell((yield from _escape(stream)))
        elif char == '"':
            tell(char)
            return
        else:
            tell(escape_json(char))


def _escape(stream: TextStream) -> Parse[str]:
    """What stands for a backslash and what follows it."""
    char = yield from stream.peek()
    if char == "":
        raise MalformedError
    if char in _ESCAPED:
        stream.at += 1
        return "\\" + char
    if char == "u":
        while len(stream.text) < stream.at + 5 and not stream.has_ended:
            yield
        if _HEX.fullmatch(stream.text, stream.at + 1, stream.at + 5):
            stream.at += 5
            return "\\" + stream.text[stream.at - 5 : stream.at]
    return "\\\\"


def _word(stream: TextStream, tell: Emit) -> Parse[None]:
    """A number, true, false or null, told as a whole."""
    word = json_word((yield from stream.matching(_WORD)))
    if word is None:
        raise MalformedError
    tell(word)


def _after_space(stream: TextStream, tell: Emit) -> Parse[str]:
    """The next character that is no white space, which is told."""
    while (char := (yield from stream.peek())) != "" and char in WHITESPACE:
        stream.at += 1
        tell(char)
    return char
