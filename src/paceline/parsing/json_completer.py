"""Completes JSON that arrives in pieces, so that it is strict JSON wherever it ends.

A comma and a key are held until the value after them begins, because JSON allows neither before a closing brace. So the text that was
passed on can be closed at any time, with a quote and the closers of what is open.
"""

import re

_TOKEN = re.compile(r'\s+|[{}\[\],:"]|[^\s{}\[\],:"]+')
_STRING = re.compile(r'(?:[^"\\]+|\\u[0-9a-fA-F]{4}|\\[^u])*')
_INCOMPLETE_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_MAX_HELD_CHARS = 1000  # further white space is dropped: copying a longer held text for each new piece takes quadratic time
_CLOSERS = {"{": "}", "[": "]"}


class JsonCompleter:
    """Emits the pieces of one JSON value, and the text that closes it.

    Attributes:
        in_string: whether the text that was passed on ends within a string.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._closers: list[str] = []
        self._separator = self._key = self._escape = ""  # held: a comma, a key with its colon, the beginning of an escape
        self._last = ""  # last item emitted in this object or list: "value", "word" or "" (none)
        self.in_string = self._in_key = self._expects_key = False

    @property
    def is_open(self) -> bool:
        """Whether an object, a list or a string is not closed."""
        return self.in_string or bool(self._closers)

    def add(self, text: str) -> str:
        """Return the part of the held text and `text` after which the value can be closed."""
        text, self._escape = self._escape + text, ""
        at = 0
        while at < len(text):
            at = self._add_string(text, at) if self.in_string else self._add_token(text, at)
        parts, self._parts = self._parts, []
        return "".join(parts)

    def close(self) -> str:
        """Return the text that closes the value. A comma or a key without a value is dropped."""
        closing = ('"' if self.in_string and not self._in_key else "") + "".join(reversed(self._closers))
        self._closers, self.in_string, self._in_key = [], False, False
        self._separator = self._key = self._escape = ""
        return closing

    def _add_string(self, text: str, at: int) -> int:
        found = _STRING.match(text, at)
        assert found is not None
        end = found.end()
        if end < len(text) and text[end] == '"':
            end += 1
            self.in_string = False
        elif _INCOMPLETE_ESCAPE.match(text, end):
            self._escape = text[end:]
        elif end < len(text):  # a backslash that begins no escape
            end += 1
        if self._in_key:
            self._key += text[at:end]
            self._in_key = self.in_string
        else:
            self._parts.append(text[at:end])
        return end + len(self._escape)

    def _add_token(self, text: str, at: int) -> int:
        found = _TOKEN.match(text, at)
        assert found is not None
        token = found[0]
        if token == ",":
            self._key = ""
            self._separator += token if self._last and "," not in self._separator else ""
            self._expects_key = self._closers[-1:] == ["}"]
        elif token == ":" or token[0].isspace():
            if self._key:
                self._key += token[: max(0, _MAX_HELD_CHARS - len(self._key))] if token != ":" else token
            elif token != ":":
                self._separator += token[: max(0, _MAX_HELD_CHARS - len(self._separator))]
        elif token in ("}", "]"):
            self._parts.append(token if self._key or "," in self._separator else self._separator + token)
            self._closers = self._closers[:-1]
            self._release("value")
        elif token == '"' and self._expects_key:
            self._key = token
            self.in_string = self._in_key = True
            self._expects_key = False
        else:
            self._begin_value(token)
        return found.end()

    def _begin_value(self, token: str) -> None:
        is_word = token not in '{["'
        continues = is_word and self._last == "word" and not self._separator
        comma = "," if self._last and not continues and "," not in self._separator else ""
        self._parts += (comma, self._separator, self._key, token)
        self._release("word" if is_word else "value")
        self.in_string = token == '"'
        if token in _CLOSERS:
            self._closers.append(_CLOSERS[token])
            self._expects_key = token == "{"
            self._last = ""

    def _release(self, last: str) -> None:
        self._separator = self._key = ""
        self._last = last
        self._expects_key = False
