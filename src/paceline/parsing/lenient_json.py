"""JSON as models write it, read while it arrives."""

import json
import re

from paceline.parsing.text_stream import MAX_NAME, SPACE, MalformedError, Reading, Say, Source

MAX_DEPTH = 200
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[-+.0-9A-Za-z]")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = ("true", "false", "null")
_ESCAPED = '"\\/bfnrt'
_HEX = re.compile(r"[0-9a-fA-F]{4}")


def inside(text: str) -> str:
    """A text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_word(word: str) -> str | None:
    """The word, if it is a JSON value by itself: a number, true, false or null."""
    return word if word in _WORDS or NUMBER.fullmatch(word) else None


def json_object(source: Source, say: Say) -> Reading[None]:
    """Pass a JSON object and tell it.

    What JSON does not allow within a string (a line end, a backslash in front of nothing special) is told as JSON writes it.

    Raises:
        MalformedError: it is none, or the text ends within it; what was passed until then was told.
    """
    if (yield from source.peek()) != "{":
        raise MalformedError
    yield from _value(source, say)


def skipped_value(source: Source) -> Reading[str]:
    """Pass any JSON value; returns it, with what JSON does not allow as JSON writes it.

    Raises:
        MalformedError: it is none, or the text ends within it.
    """
    parts: list[str] = []
    yield from _value(source, parts.append, settles=False)
    return "".join(parts)


def short_string(source: Source) -> Reading[str]:
    """Pass a JSON string of at most 256 characters; returns its text.

    Raises:
        MalformedError: it is none, or longer.
    """
    parts: list[str] = []

    def add(part: str) -> None:
        parts.append(part)
        if sum(map(len, parts)) > MAX_NAME + 2:
            raise MalformedError

    yield from _string(source, add)
    try:
        return str(json.loads("".join(parts)))
    except ValueError:
        raise MalformedError from None


def _value(source: Source, say: Say, *, settles: bool = True) -> Reading[None]:
    """One value, told piece by piece; `settles`: what is told need not be known any more."""

    def tell(part: str) -> None:
        say(part)
        if settles:
            source.settle()

    open_ends: list[str] = []
    while True:
        char = yield from _after_space(source, tell)
        if char in ("{", "["):
            source.at += 1
            tell(char)
            open_ends.append("}" if char == "{" else "]")
            if len(open_ends) > MAX_DEPTH:
                raise MalformedError
            if (yield from _after_space(source, tell)) != open_ends[-1]:
                if char == "{":
                    yield from _key(source, tell)
                continue
        elif char == '"':
            yield from _string(source, tell)
        else:
            yield from _word(source, tell)
        if not (yield from _has_more(source, tell, open_ends)):
            return


def _has_more(source: Source, tell: Say, open_ends: list[str]) -> Reading[bool]:
    """What follows a value: the ends of what it stands in, or another one."""
    while open_ends:
        char = yield from _after_space(source, tell)
        if char != open_ends[-1] and char != ",":
            raise MalformedError
        source.at += 1
        tell(char)
        if char == ",":
            if open_ends[-1] == "}":
                yield from _after_space(source, tell)
                yield from _key(source, tell)
            return True
        open_ends.pop()
    return False


def _key(source: Source, tell: Say) -> Reading[None]:
    yield from _string(source, tell)
    if (yield from _after_space(source, tell)) != ":":
        raise MalformedError
    source.at += 1
    tell(":")


def _string(source: Source, tell: Say) -> Reading[None]:
    if (yield from source.peek()) != '"':
        raise MalformedError
    source.at += 1
    tell('"')
    while True:
        if (yield from source.peek()) == "":
            raise MalformedError
        if plain := _PLAIN.match(source.text, source.at):
            source.at = plain.end()
            tell(plain[0])
            continue
        char = source.text[source.at]
        source.at += 1
        if char == "\\":
            tell((yield from _escape(source)))
        elif char == '"':
            tell(char)
            return
        else:
            tell(inside(char))


def _escape(source: Source) -> Reading[str]:
    """What stands for a backslash and what follows it."""
    char = yield from source.peek()
    if char == "":
        raise MalformedError
    if char in _ESCAPED:
        source.at += 1
        return "\\" + char
    if char == "u":
        while len(source.text) < source.at + 5 and not source.has_ended:
            yield
        if _HEX.fullmatch(source.text, source.at + 1, source.at + 5):
            source.at += 5
            return "\\" + source.text[source.at - 5 : source.at]
    return "\\\\"


def _word(source: Source, tell: Say) -> Reading[None]:
    """A number, true, false or null, told as a whole."""
    word = json_word((yield from source.matching(_WORD)))
    if word is None:
        raise MalformedError
    tell(word)


def _after_space(source: Source, tell: Say) -> Reading[str]:
    """The next character that is no white space, which is told."""
    while (char := (yield from source.peek())) != "" and char in SPACE:
        source.at += 1
        tell(char)
    return char
