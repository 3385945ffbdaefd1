"""Text that arrives in pieces, for readers that are written as if all of it were there.

A reader is a generator: it yields where it has to wait for more text. What it says depends on the text alone, not on where the pieces
began, because it only ever looks at characters that no further text can change the meaning of.
"""

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

Result = TypeVar("Result")
Parse = Generator[None, None, Result]
"""Yields to wait for more text."""
Emit = Callable[[str], None]

WHITESPACE = " \t\r\n"
MAX_NAME_LEN = 256
"""Characters of a name of a tool or an argument."""


class MalformedError(Exception):
    """What looked like markup is none; it is text."""


@dataclass(slots=True)
class TextStream:
    """What has arrived and may still matter.

    Attributes:
        text: its beginning is dropped when more arrives, so that no index in it holds while a reader waits.
        num_emitted: index of the first character that was neither told nor found to be markup.
        at: index at which the reader stands.
        has_ended: whether nothing more comes.
    """

    text: str = ""
    num_emitted: int = 0
    at: int = 0
    has_ended: bool = False

    def add(self, text: str) -> None:
        """More has arrived."""
        self.text = self.text[self.num_emitted :] + text
        self.at -= self.num_emitted
        self.num_emitted = 0

    @property
    def unemitted(self) -> str:
        """What was passed and not told."""
        return self.text[self.num_emitted : self.at]

    def mark_emitted(self) -> None:
        """Everything passed so far was told, or is markup."""
        self.num_emitted = self.at

    def peek(self) -> Parse[str]:
        """The next character; empty at the end."""
        while self.at >= len(self.text) and not self.has_ended:
            yield
        return self.text[self.at : self.at + 1]

    def take(self, literal: str) -> Parse[bool]:
        """Whether `literal` comes next; then it is passed."""
        while True:
            found = self.text[self.at : self.at + len(literal)]
            if found == literal:
                self.at += len(literal)
                return True
            if self.has_ended or not literal.startswith(found):
                return False
            yield

    def take_or_end(self, literal: str) -> Parse[bool]:
        """The same, where the text may also end within `literal`."""
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
        """Which of `literals` comes next, without passing it; None of them."""
        while True:
            rest = self.text[self.at : self.at + max(map(len, literals), default=0)]
            for literal in literals:
                if rest.startswith(literal):
                    return literal
            if self.has_ended or not any(literal.startswith(rest) for literal in literals):
                return None
            yield

    def skip(self, characters: str = WHITESPACE) -> Parse[None]:
        """Pass any number of `characters`."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in characters:
                self.at += 1
            if self.at < len(self.text) or self.has_ended:
                return
            yield

    def until(self, literal: str, limit: int = MAX_NAME_LEN) -> Parse[str]:
        """What stands in front of `literal`; both are passed.

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
        """All characters that `characters`, a pattern of one of them, matches.

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

    def emit_until(self, markers: Sequence[str], say: Emit, *, held: str = "") -> Parse[str | None]:
        """Tell what comes until one of `markers`, which is not passed; returns it, None at the end.

        Args:
            held: characters that are told only when others of the text follow: those in front of a marker are passed and not told.
        """
        pattern = _any_of(tuple(markers))
        longest = max(map(len, markers), default=1)
        while True:
            found = pattern.search(self.text, self.at) if markers else None
            end = found.start() if found else len(self.text) if self.has_ended else _open_from(self.text, self.at, markers, longest)
            told = self.text[self.at : end]
            if held and (found or not self.has_ended):
                told = told.rstrip(held)
            if told:
                say(told)
            self.at += len(told)
            self.mark_emitted()
            if found:
                self.at = found.start()
                return found[0]
            if self.has_ended:
                return None
            yield


@cache
def _any_of(markers: tuple[str, ...]) -> "re.Pattern[str]":
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


def _open_from(text: str, start: int, markers: Sequence[str], longest: int) -> int:
    """Where the longest end of a text begins that may become one of `markers`; the text's end where there is none."""
    for at in range(max(start, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[at:]) for marker in markers):
            return at
    return len(text)


@dataclass(slots=True)
class StreamParser:
    """A reader and the text it waits for."""

    stream: TextStream
    reading: Parse[None]
    is_done: bool = field(default=False, init=False)

    def push(self, text: str) -> None:
        """Let it read on."""
        if text:
            self.stream.add(text)
            self._go_on()

    def finish(self) -> None:
        """Let it read to the end."""
        self.stream.has_ended = True
        self._go_on()

    def _go_on(self) -> None:
        if not self.is_done:
            self.is_done = next(self.reading, True) is True
