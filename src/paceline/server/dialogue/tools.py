"""Checks of the tools that a request offers."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from paceline.errors import RequestError
from paceline.sampling.grammar import Grammar
from paceline.sampling.matcher import GrammarCompiler
from paceline.server.dialogue.request import ChatRequest, Tool
from paceline.server.http_errors import HttpError
from paceline.server.markup.call_grammar import arguments_schema
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
    return tuple(replace(tool, place=f"{place}.{parameters}") for place, tool in given)


def schema_error(request: ChatRequest, error: RequestError, compiler: GrammarCompiler) -> RequestError:
    """What is wrong with a request whose grammar does not compile: a schema that does not by itself, or all of them together.

    Takes time, for schemas are compiled.
    """
    if error.code is not None:  # not what they say, but the time that they take
        return RequestError(str(error).replace("grammar", "tools", 1), parameter="tools", code=error.code)
    form = request.params.grammar
    if form is not None and (wrong := _refusal(form, compiler)) is not None:
        return wrong
    for tool in request.offered_tools:
        if (wrong := _refusal(Grammar.json_schema(arguments_schema(tool)), compiler)) is not None:
            reason = str(wrong).removeprefix("grammar: ")
            return RequestError(
                f"{tool.place} is no schema that arguments can be held to ({reason}): send another one", parameter=tool.place
            )
    text = "the schemas of the tools cannot be held to together: send fewer tools, simpler schemas, or tool_choice auto without strict"
    return RequestError(f"tools: {text}", parameter="tools")


def _refusal(grammar: Grammar, compiler: GrammarCompiler) -> RequestError | None:
    try:
        compiler.matcher(grammar)
    except RequestError as error:
        return error
    return None


def _wrong(name: str, text: str) -> NoReturn:
    raise HttpError(400, text, parameter=name, code="invalid_value")
