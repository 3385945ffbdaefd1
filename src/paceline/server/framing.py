"""Bytes of an answer's objects, whole and in streams."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode  # json.dumps makes one for every call
_LINE_BREAKS = {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that JSON allows within a string and that `str.splitlines` takes for the end of a line, as many clients do."""
_PIECE_ITEMS = 64
"""Items of a list that are encoded at once."""
_MAX_DEPTH = 12
"""Objects and lists in one another that are encoded piece by piece: answers have their long lists within 6."""


def as_json(fields: Mapping[str, Any]) -> bytes:
    """Encode one object on one line. Half a character, which an answer may repeat from a request, becomes a question mark."""
    return _as_bytes(_ENCODE(fields))


def large_json(fields: Mapping[str, Any]) -> bytes:
    """Encode as `as_json`, in pieces between which other threads can run; call it in a thread."""
    return b"".join(map(_as_bytes, _pieces(fields, _MAX_DEPTH)))


def _pieces(value: Any, depth: int) -> Iterator[str]:
    if depth and isinstance(value, dict):
        yield "{"
        for index, (key, inner) in enumerate(value.items()):
            yield f"{',' if index else ''}{_ENCODE(key)}:"
            yield from _pieces(inner, depth - 1)
        yield "}"
    elif depth and isinstance(value, list | tuple):
        yield "["
        for start in range(0, len(value), _PIECE_ITEMS):
            yield "," if start else ""
            if len(value) > _PIECE_ITEMS:  # items of long lists are small: tokens, and what is known of one
                yield _ENCODE(value[start : start + _PIECE_ITEMS])[1:-1]
            else:
                for index, inner in enumerate(value):
                    yield "," if index else ""
                    yield from _pieces(inner, depth - 1)
        yield "]"
    else:
        yield _ENCODE(value)


def _as_bytes(text: str) -> bytes:
    if not text.isascii():
        for char, escaped in _LINE_BREAKS.items():
            text = text.replace(char, escaped)
    return text.encode("utf-8", "replace")


def data_event(fields: Mapping[str, Any], encode: Callable[[Mapping[str, Any]], bytes] = as_json) -> bytes:
    """A server-sent event without a name, as in OpenAI's chats."""
    return b"data: " + encode(fields) + b"\n\n"


def named_event(fields: Mapping[str, Any]) -> bytes:
    """A server-sent event whose name is its `type`, as in Anthropic's messages and OpenAI's responses."""
    return b"event: " + str(fields["type"]).encode() + b"\n" + data_event(fields)


def line(fields: Mapping[str, Any]) -> bytes:
    """An object on a line of its own, as in Ollama's streams."""
    return as_json(fields) + b"\n"
