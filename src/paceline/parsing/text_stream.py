"""Feeds text that arrives in pieces to parsers that are written as if the whole text were available.

A parser is a generator that yields to wait for more text. Its events depend on the text alone, not on how the text was cut
into pieces, because a parser only uses characters whose meaning no further text can change.
"""

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

Result = TypeVar("Result")
Parse = Generator[None, None, Result]
"""Yields to wait for more text."""
Emit = Callable[[str], None]

WHITESPACE = " \t\r\n"
MAX_NAME_LEN = 256
"""Characters of a name of a tool or an argument."""
NAME_CHARACTER = re.compile(r"[\w.\-]")
"""A character of the name of a tool."""
_TAG_CHARACTER = re.compile(r"[\w:.｜-]")


class MalformedError(Exception):
    """Raised when text that began like markup is not markup; it is passed on as text."""


@dataclass(slots=True)
class TextStream:
    """Buffers text between the parts that arrive and the parser that reads it.

    Attributes:
        text: the buffer. `add` drops its handled beginning, so an index into it is valid only until a parser waits for more text.
        num_emitted: index in `text` of the first character that is not handled: neither emitted nor recognised as markup.
        at: index in `text` of the next character to parse.
        num_dropped: number of characters that `add` dropped before `text`.
        has_ended: whether `text` ends with the last character of the whole text.
        kept: state of parsers between their calls, by the parser's key, so that they search no text twice.
    """

    text: str = ""
    num_emitted: int = 0
    at: int = 0
    num_dropped: int = 0
    has_ended: bool = False
    kept: dict[object, Any] = field(default_factory=dict)

    def add(self, text: str) -> None:
        """Append text that has arrived."""
        held = self.text[self.num_emitted :] if self.num_emitted else self.text
        self.at -= self.num_emitted
        self.num_dropped += self.num_emitted
        self.num_emitted = 0
        self.text = ""  # with one reference left, CPython appends in place, so that many pieces take linear time
        held += text
        self.text = held

    @property
    def unemitted(self) -> str:
        """The text that was passed and not emitted."""
        return self.text[self.num_emitted : self.at]

    @property
    def position(self) -> int:
        """The number of characters passed since the beginning; unlike `at` it stays valid when more text arrives."""
        return self.num_dropped + self.at

    def pass_to(self, position: int) -> None:
        """Pass the text up to a position, unless it was passed."""
        self.at = max(self.at, position - self.num_dropped)

    def mark_emitted(self) -> None:
        """Mark the text before `at` as handled: it was emitted, or it is markup that is not emitted."""
        self.num_emitted = self.at

    def wait(self, num_chars: int = 1) -> Parse[bool]:
        """Wait until `num_chars` characters follow; returns whether they do."""
        while len(self.text) < self.at + num_chars and not self.has_ended:
            yield
        return len(self.text) >= self.at + num_chars

    def peek(self) -> Parse[str]:
        """Return the next character without passing it; empty at the end."""
        while self.at >= len(self.text) and not self.has_ended:
            yield
        return self.text[self.at : self.at + 1]

    def take(self, literal: str) -> Parse[bool]:
        """Pass `literal` if it comes next; returns whether it did."""
        while True:
            found = self.text[self.at : self.at + len(literal)]
            if found == literal:
                self.at += len(literal)
                return True
            if self.has_ended or not literal.startswith(found):
                return False
            yield

    def take_or_end(self, literal: str) -> Parse[bool]:
        """Pass `literal`, or the beginning of it where the text ends; returns whether it came."""
        if (yield from self.take(literal)):
            return True
        rest = self.text[self.at :]
        if self.has_ended and literal.startswith(rest):
            self.at = len(self.text)
            return True
        return False

    def expect(self, literal: str) -> Parse[None]:
        """Pass `literal`.

        Raises:
            MalformedError: something else comes.
        """
        if not (yield from self.take(literal)):
            raise MalformedError

    def one_of(self, literals: Sequence[str]) -> Parse[str | None]:
        """Return which of `literals` comes next without passing it; None if none does."""
        longest = max(map(len, literals), default=0)
        while True:
            rest = self.text[self.at : self.at + longest]
            if self.has_ended or not _may_grow(rest, literals):
                return max(filter(rest.startswith, literals), key=len, default=None)
            yield

    def skip(self, characters: str = WHITESPACE) -> Parse[None]:
        """Pass any number of `characters`."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in characters:
                self.at += 1
            if self.at < len(self.text) or self.has_ended:
                return
            yield

    def skip_repeated(self, mark: str) -> Parse[None]:
        """Pass white space and an opening mark that is repeated."""
        yield from self.skip()
        while (yield from self.take(mark)):
            yield from self.skip()

    def pass_end_mark(self, close: str) -> Parse[None]:
        """Pass white space, `close` and other closing tags such as </tool>, any number of times: models omit, repeat and misspell them."""
        while True:
            yield from self.skip()
            self.mark_emitted()
            if (yield from self.peek()) == "":
                return
            if (yield from self.take_or_end(close)):
                continue
            if not (yield from self.take_or_end("</")):
                return
            yield from self.matching(_TAG_CHARACTER)
            yield from self.skip(" ")
            yield from self.take(">")

    def until(self, literal: str, limit: int = MAX_NAME_LEN) -> Parse[str]:
        """Pass the text up to and including `literal`; returns the text before it.

        Raises:
            MalformedError: it has more than `limit` characters, or the text ends before.
        """
        while True:
            found = self.text.find(literal, self.at, self.at + limit + len(literal))
            if found >= 0:
                passed, self.at = self.text[self.at : found], found + len(literal)
                return passed
            if self.has_ended or len(self.text) - self.at >= limit + len(literal):
                raise MalformedError
            yield

    def matching(self, characters: "re.Pattern[str]") -> Parse[str]:
        """Pass and return all characters that match `characters`, a pattern of one character.

        Raises:
            MalformedError: they are more than 256.
        """
        num_passed = 0
        while True:
            while self.at < len(self.text) and characters.match(self.text, self.at):
                self.at += 1
                num_passed += 1
                if num_passed > MAX_NAME_LEN:
                    raise MalformedError
            if self.at < len(self.text) or self.has_ended:
                return self.text[self.at - num_passed : self.at]
            yield

    def emit_until(self, markers: Sequence[str], emit: Emit, *, held: str = "") -> Parse[str | None]:
        """Emit the text before the first of `markers`, which is not passed; returns the marker, or None at the end.

        Args:
            held: characters that are emitted only when other text follows. Before a marker they are passed and not emitted.
        """
        pattern = _any_of(tuple(markers))
        longest = max(map(len, markers), default=1)
        num_held = 0  # characters after `at` that were searched and are held
        while True:
            start = self.at + num_held
            found = pattern.search(self.text, start) if markers else None
            end = len(self.text) if self.has_ended else _open_from(self.text, start, markers, longest)
            if found:
                end = found.start()
                if not self.has_ended and found.end() == len(self.text) and _may_grow(found[0], markers):
                    found = None
            num_passed = len(self.text[start:end].rstrip(held) if held and (found or not self.has_ended) else self.text[start:end])
            if num_passed or (self.has_ended and not found and num_held):
                emit(self.text[self.at : start + num_passed])
                self.at = start + num_passed
                num_held = 0
            num_held = end - self.at
            self.mark_emitted()
            if found:
                self.at = end
                return found[0]
            if self.has_ended:
                return None
            yield


def _may_grow(found: str, literals: Sequence[str]) -> bool:
    """Return whether more text may turn `found`, at the end of the text, into a longer one of `literals`."""
    return any(len(literal) > len(found) and literal.startswith(found) for literal in literals)


@cache
def _any_of(markers: tuple[str, ...]) -> "re.Pattern[str]":
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


def _open_from(text: str, start: int, markers: Sequence[str], longest: int) -> int:
    """Return the index from which the text may be the beginning of one of `markers`; its length if there is none."""
    for at in range(max(start, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[at:]) for marker in markers):
            return at
    return len(text)
