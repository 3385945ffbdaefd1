"""Checks of the tools that a request offers."""

import json
import re
from collections.abc import Sequence
from typing import NoReturn

from paceline.server.dialogue.request import Tool
from paceline.server.http_errors import HttpError
from paceline.server.settings import ServerSettings

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def checked_tools(given: Sequence[tuple[str, Tool]], settings: ServerSettings, *, parameters: str = "parameters") -> tuple[Tool, ...]:
    """The tools, each given with its place in the request.

    Args:
        parameters: what the dialect calls them.

    Raises:
        HttpError: they are too many or too long, or a name is none.
    """
    if len(given) > settings.max_tools:
        _wrong("tools", f"tools has {len(given)} functions, and may have {settings.max_tools}: send fewer")
    for place, tool in given:
        if not _NAME.fullmatch(tool.name):
            _wrong(f"{place}.name", f"{place}.name is no name: use 1 to 128 letters, digits, dots, underscores and hyphens")
        num_chars = len(json.dumps(tool.parameters)) + len(tool.description or "")
        if num_chars > settings.max_grammar_chars:
            text = f"{place} has {num_chars} characters, and may have {settings.max_grammar_chars}: shorten its description and schema"
            _wrong(place, text)
        if (tool.parameters or {}).get("type", "object") != "object":
            name = f"{place}.{parameters}"
            _wrong(name, f"{name} describes no object: arguments have names; send a schema of the type object")
    return tuple(tool for _, tool in given)


def _wrong(name: str, text: str) -> NoReturn:
    raise HttpError(400, text, parameter=name, code="invalid_value")
