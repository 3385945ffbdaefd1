"""Parses JSON with the errors that models make, while it arrives, and emits strict JSON.

Accepted besides JSON: single quotes, keys and words without quotes, Python's literals, numbers such as `.5`, missing and doubled commas,
comments, control characters and quotes within strings, and closers that are missing or too many. Where the text ends, or continues with
something that cannot be JSON, the value is closed.
"""

import json
import re
from dataclasses import dataclass, field

from paceline.parsing.json_completer import JsonCompleter
from paceline.parsing.text_stream import MAX_NAME_LEN, WHITESPACE, Emit, MalformedError, Parse, TextStream

MAX_DEPTH = 200
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LENIENT_NUMBER = re.compile(r"([-+]?)(0|[1-9][0-9]*)?(?:\.([0-9]*))?([eE][-+]?[0-9]+)?")
_LITERALS = {
    **dict.fromkeys(("true", "True", "TRUE"), "true"),
    **dict.fromkeys(("false", "False", "FALSE"), "false"),
    **dict.fromkeys(("null", "None", "NULL", "undefined", "NaN", "nan", "Infinity", "-Infinity", "inf", "-inf"), "null"),
}
_CLOSERS = {"{": "}", "[": "]"}
_QUOTES = "\"'"
_PLAIN = {quote: re.compile(rf'[^"{quote}\\\x00-\x1f]+') for quote in _QUOTES}
_SPACE = re.compile(rf"[{WHITESPACE}]+")
_BLANK = re.compile(" ")
_WORD_START = re.compile(r"[-+.\w$]")
_NAME_START = re.compile(r"[^\W\d]")
_WORD = re.compile(r'[^,:{}\[\]"\s<>`|]')
_AFTER_STRING = ",:}])\"'<`|;"
_ESCAPED = '"\\/bfnrt'
_HEX = re.compile(r"[0-9a-fA-F]{4}")


@dataclass(frozen=True, slots=True)
class RawQuotes:
    """Quotation marks within which nothing is escaped.

    Attributes:
        quote: the mark before and after a string.
        call_begin, call_end: marks of a call. One within a string ends it if the string is not closed before the next call.
    """

    quote: str
    call_begin: str
    call_end: str


def escape_json(text: str) -> str:
    """Escape a text for a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_word(word: str) -> str | None:
    """Return the JSON of a number or a literal as JavaScript or Python write it; None if the word is neither."""
    if word in _LITERALS or NUMBER.fullmatch(word):
        return _LITERALS.get(word, word)
    found = _LENIENT_NUMBER.fullmatch(word)
    if found is None or not (found[2] or found[3]):
        return None
    fraction = f".{found[3] or '0'}" if found[3] is not None else ""
    return f"{found[1].replace('+', '')}{found[2] or '0'}{fraction}{found[4] or ''}"


def emit_json_object(stream: TextStream, add: Emit, *, raw: RawQuotes | None = None) -> Parse[None]:
    """Pass a JSON object and emit it piece by piece.

    Args:
        add: takes JSON whose end may be missing, as `EventSink.arguments` does.
        raw: further quotation marks, within which nothing is escaped; separators are then written as Python's json does.

    Raises:
        MalformedError: the text does not begin with a brace; nothing was emitted.
    """
    if (yield from stream.peek()) != "{":
        raise MalformedError

    def emit(part: str) -> None:
        add(part)
        stream.mark_emitted()

    yield from _Reader(stream, emit, raw).read_value()
    stream.mark_emitted()


def read_json_value(stream: TextStream) -> Parse[str]:
    """Pass any JSON value; returns it as strict JSON.

    Raises:
        MalformedError: it is no value, or the text ends within it.
    """
    parts: list[str] = []
    reader = _Reader(stream, parts.append)
    if not (yield from reader.read_value()):
        raise MalformedError
    completer = JsonCompleter()
    return completer.add("".join(parts)) + completer.close()


def parse_json(text: str) -> str | None:
    """Return a whole text as strict JSON; None if it is not one complete value."""
    stream = TextStream(text.strip(), has_ended=True)
    try:
        next(read_json_value(stream))
    except StopIteration as stop:
        return str(stop.value) if stream.at == len(stream.text) else None
    except MalformedError:
        return None
    raise AssertionError("a text that has ended is not waited for")


def read_short_string(stream: TextStream) -> Parse[str]:
    """Pass a string or a word of at most 256 characters; returns its text.

    Raises:
        MalformedError: it is none, or longer.
    """
    parts: list[str] = []
    num_chars = 0

    def add(part: str) -> None:
        nonlocal num_chars
        parts.append(part)
        num_chars += len(part)
        if num_chars > MAX_NAME_LEN + 2:
            raise MalformedError

    reader = _Reader(stream, add)
    char = yield from stream.peek()
    if char and char in _QUOTES:
        if not (yield from reader.read_string(char)):
            raise MalformedError
    elif _NAME_START.match(char):
        return (yield from stream.matching(_WORD))
    else:
        raise MalformedError
    return str(json.loads("".join(parts), strict=False))


@dataclass(slots=True)
class _Reader:
    """Reads one value.

    Attributes:
        emit: takes JSON that a `JsonCompleter` makes strict.
        raw: as for `emit_json_object`.
        closers: of the objects and lists that are open, from the outermost.
        expected: the next part of an object or list: "key", ":", "value" or ",".
    """

    stream: TextStream
    emit: Emit
    raw: RawQuotes | None = None
    closers: list[str] = field(default_factory=list)
    expected: str = "value"

    def read_value(self) -> Parse[bool]:
        """Pass the value; returns whether it is complete."""
        while True:
            char = yield from self._skip_space()
            if char in ("}", "]") and self.closers:
                self._close(char)
            elif char in (",", ":") and self.closers:
                self.stream.at += 1
                self._separate(char)
            elif not (yield from self._read_part(char)):
                return False
            if not self.closers:
                return True

    def _read_part(self, char: str) -> Parse[bool]:
        """Pass a string, a word or an opener; returns whether there is one."""
        is_raw = self.raw is not None and (yield from self.stream.one_of((self.raw.quote,))) is not None
        if not is_raw and not (char in _CLOSERS or (char and char in _QUOTES) or _WORD_START.match(char)):
            return False
        if self.expected in (",", ":"):  # the separator is missing
            self._separate(self.expected)
        if char in _CLOSERS:
            return self._open(char)
        is_key = self.expected == "key"
        if is_raw and self.raw is not None:
            is_whole = yield from self._read_raw_string(self.raw)
        elif char in _QUOTES:
            is_whole = yield from self.read_string(char)
        else:
            is_whole = yield from self._read_word(is_key=is_key)
        self.expected = ":" if is_key else ","
        return is_whole

    def _separate(self, separator: str) -> None:
        """Emit a comma or a colon; the completer drops commas that are too many."""
        if separator == ":" and self.expected != ":":
            return
        self.emit(f"{separator} " if self.raw and self.expected == separator else separator)
        self.expected = "key" if separator == "," and self.closers[-1] == "}" else "value"

    def _open(self, char: str) -> bool:
        if self.expected == "key" or len(self.closers) == MAX_DEPTH:
            return False
        self.stream.at += 1
        self.closers.append(_CLOSERS[char])
        self.expected = "key" if char == "{" else "value"
        self.emit(char)
        return True

    def _close(self, char: str) -> None:
        """Close all up to the opener of `char`; a closer without an opener is dropped."""
        self.stream.at += 1
        while char in self.closers:
            closer = self.closers.pop()
            self.emit(closer)
            self.expected = ","
            if closer == char:
                return

    def read_string(self, quote: str) -> Parse[bool]:
        """Pass a string; returns whether it has an end."""
        self.stream.at += 1
        self.emit('"')
        while (yield from self.stream.peek()) != "":
            if plain := _PLAIN[quote].match(self.stream.text, self.stream.at):
                self.stream.at = plain.end()
                self.emit(plain[0])
                continue
            char = self.stream.text[self.stream.at]
            if char == "\\":
                self.stream.at += 1
                self.emit((yield from self._read_escape()))
            elif char == quote and (yield from self._is_end()):
                self.stream.at += 1
                self.emit('"')
                return True
            else:
                self.stream.at += 1
                self.emit(escape_json(char))
        return False

    def _is_end(self) -> Parse[bool]:
        """Return whether the next character, a quote, ends its string; a quote within the text does not."""
        num_ahead = 1
        while self.closers and (yield from self.stream.wait(num_ahead + 1)):
            char = self.stream.text[self.stream.at + num_ahead]
            if char not in WHITESPACE:
                return char in _AFTER_STRING
            num_ahead += 1
        return True

    def _read_escape(self) -> Parse[str]:
        """Return the JSON of a backslash, which is passed, and the character that it escapes."""
        char = yield from self.stream.peek()
        if char == "":
            return ""
        if char in _ESCAPED or char == "'":
            self.stream.at += 1
            return "'" if char == "'" else "\\" + char
        if char == "u":
            is_there = yield from self.stream.wait(5)
            if _HEX.fullmatch(self.stream.text, self.stream.at + 1, self.stream.at + 5):
                self.stream.at += 5
                return "\\" + self.stream.text[self.stream.at - 5 : self.stream.at]
            if not is_there and re.fullmatch("[0-9a-fA-F]*", self.stream.text[self.stream.at + 1 :]):
                self.stream.at = len(self.stream.text)
                return ""
        return "\\\\"

    def _read_raw_string(self, raw: RawQuotes) -> Parse[bool]:
        """Pass a string; closers before an end mark that ends it are not part of it."""
        stream, marks = self.stream, (raw.quote, raw.call_end)
        stream.at += len(raw.quote)
        self.emit('"')
        while (mark := (yield from stream.emit_until(marks, self._emit_text, held=_CLOSERS["{"] + _CLOSERS["["]))) is not None:
            if mark == raw.call_end and (yield from self._first_of((raw.quote, raw.call_begin))) != raw.quote:
                return False
            self._emit_text(stream.unemitted)
            stream.at += len(mark)
            if mark == raw.quote:
                self.emit('"')
                yield from self._pass_doubled(raw.quote)
                return True
            self._emit_text(mark)
        return False

    def _emit_text(self, text: str) -> None:
        self.emit(escape_json(text))

    def _first_of(self, marks: tuple[str, ...]) -> Parse[str | None]:
        """Return which of `marks` comes first in the text that follows, without passing anything."""
        pattern, num_ahead = re.compile("|".join(map(re.escape, marks))), 0
        while (found := pattern.search(self.stream.text, self.stream.at + num_ahead)) is None:
            if self.stream.has_ended:
                return None
            num_ahead = max(0, len(self.stream.text) - self.stream.at - max(map(len, marks)))
            yield
        return found[0]

    def _pass_doubled(self, quote: str) -> Parse[None]:
        """Pass a quote that follows a string if it cannot begin another one."""
        if (yield from self.stream.one_of((quote,))):
            yield from self.stream.wait(len(quote) + 1)
            following = self.stream.text[self.stream.at + len(quote) :][:1]
            self.stream.at += len(quote) if following in ("", ",", "}", "]") else 0

    def _read_word(self, *, is_key: bool) -> Parse[bool]:
        """Pass a number, a literal, or a text without quotes."""
        try:
            word = yield from self.stream.matching(_WORD)
            value = None if is_key else json_word(word)
            while not is_key and value is None and (yield from self._has_next_word()):
                word += (yield from self.stream.matching(_BLANK)) + (yield from self.stream.matching(_WORD))
        except MalformedError:
            return False
        self.emit(value or f'"{escape_json(word)}"')
        return True

    def _has_next_word(self) -> Parse[bool]:
        """Return whether a space and a letter or digit come next."""
        if (yield from self.stream.peek()) != " ":
            return False
        yield from self.stream.wait(2)
        return self.stream.text[self.stream.at + 1 : self.stream.at + 2].isalnum()

    def _skip_space(self) -> Parse[str]:
        """Pass white space and comments; returns the next character."""
        while True:
            char = yield from self.stream.peek()
            if space := _SPACE.match(self.stream.text, self.stream.at):
                self.stream.at = space.end()
                if self.raw is None:
                    self.emit(space[0])
            elif char != "/" or not (yield from self._skip_comment()):
                return char

    def _skip_comment(self) -> Parse[bool]:
        comment = yield from self.stream.one_of(("//", "/*"))
        if comment is None:
            return False
        end = "\n" if comment == "//" else "*/"
        if (yield from self.stream.emit_until((end,), lambda _: None)) is not None:
            self.stream.at += len(end)
        return True
