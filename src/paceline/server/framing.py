"""Bytes of an answer's objects, whole and in streams."""

import json
from collections.abc import Mapping
from typing import Any

_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode  # json.dumps makes one for every call
_LINE_BREAKS = {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that JSON allows within a string and that `str.splitlines` takes for the end of a line, as many clients do."""


def as_json(fields: Mapping[str, Any]) -> bytes:
    """Encode one object on one line. Half a character, which an answer may repeat from a request, becomes a question mark."""
    text = _ENCODE(fields)
    if not text.isascii():
        for char, escaped in _LINE_BREAKS.items():
            text = text.replace(char, escaped)
    return text.encode("utf-8", "replace")


def data_event(fields: Mapping[str, Any]) -> bytes:
    """A server-sent event without a name, as in OpenAI's chats."""
    return b"data: " + as_json(fields) + b"\n\n"


def named_event(fields: Mapping[str, Any]) -> bytes:
    """A server-sent event whose name is its `type`, as in Anthropic's messages and OpenAI's responses."""
    return b"event: " + str(fields["type"]).encode() + b"\n" + data_event(fields)


def line(fields: Mapping[str, Any]) -> bytes:
    """An object on a line of its own, as in Ollama's streams."""
    return as_json(fields) + b"\n"
