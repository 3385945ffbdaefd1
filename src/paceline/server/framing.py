"""How the objects of an answer become bytes, whole and in streams."""

import json
from collections.abc import Mapping
from typing import Any

_AS_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode  # json.dumps makes one for every call


def as_json(fields: Mapping[str, Any]) -> bytes:
    """One object. Half a character, which a request may hold and an answer repeat, becomes a question mark."""
    return _AS_JSON(fields).encode("utf-8", "replace")


def data_event(fields: Mapping[str, Any]) -> bytes:
    """A server-sent event without a name, as in OpenAI's chats."""
    return b"data: " + as_json(fields) + b"\n\n"


def named_event(fields: Mapping[str, Any]) -> bytes:
    """A server-sent event that is called as its `type` says, as in Anthropic's messages and OpenAI's responses."""
    return b"event: " + str(fields["type"]).encode() + b"\n" + data_event(fields)


def line(fields: Mapping[str, Any]) -> bytes:
    """An object on a line of its own, as in Ollama's streams."""
    return as_json(fields) + b"\n"
