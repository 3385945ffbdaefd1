"""Limits on what a request holds, checked before anything is made of it."""

from collections.abc import Mapping
from typing import Any

from paceline.server.http_errors import HttpError
from paceline.server.settings import MAX_HEAD_BYTES, MAX_HEADERS, ServerSettings


def head_too_large() -> HttpError:
    """What a client is told whose request has more of headers and path than is kept."""
    text = f"the request has more than {MAX_HEAD_BYTES} bytes of headers and path, or more than {MAX_HEADERS} headers: send fewer"
    return HttpError(431, text, code="head_too_large", headers={"Connection": "close"})


def check_count(name: str, count: int, limit: int) -> None:
    """That a list is not too long.

    Raises:
        HttpError: it is.
    """
    if count > limit:
        raise HttpError(400, f"{name} has {count} items, and may have {limit}: send fewer", parameter=name, code="invalid_value")


def check_length(name: str, num_chars: int, settings: ServerSettings) -> None:
    """That a prompt is not too long to be looked at.

    Raises:
        HttpError: it is.
    """
    if num_chars > settings.max_prompt_chars:
        text = f"{name} has {num_chars} characters, and may have {settings.max_prompt_chars}: shorten it"
        raise HttpError(400, text, parameter=name, code="context_length_exceeded")


def num_chars(value: object) -> int:
    """Characters of all texts in a JSON value, keys included."""
    count, left = 0, [value]
    while left:
        one: Any = left.pop()
        if isinstance(one, str):
            count += len(one)
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            left += one
    return count
