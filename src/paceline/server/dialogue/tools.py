"""Checks of the tools that a request offers."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn, TypeVar

from paceline.errors import RequestError
from paceline.parsing.tool_call_grammar import arguments_schema
from paceline.parsing.tools import Tool, ToolUse
from paceline.sampling.grammar import Grammar
from paceline.sampling.matcher import GrammarCompiler
from paceline.server.dialogue.request import ChatRequest
from paceline.server.http_errors import HttpError
from paceline.server.settings import ServerSettings

Given = TypeVar("Given")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def checked_tools(
    given: Sequence[Given] | None,
    read: Callable[[str, Given], Tool],
    settings: ServerSettings,
    *,
    within: str = "",
    parameters: str = "parameters",
) -> tuple[Tool, ...]:
    """The tools of a request.

    Args:
        read: makes a tool of what was sent, which is told its place, such as "tools[0]".
        within: where in it a dialect has name and schema, such as ".function".
        parameters: what the dialect calls the schema.

    Raises:
        HttpError: they are too many or too long, a name is none, or as `read`.
    """
    given = given or ()
    if len(given) > settings.max_tools:
        _wrong("tools", f"tools has {len(given)} functions, and may have {settings.max_tools}: send fewer")
    found = [(f"tools[{index}]{within}", read(f"tools[{index}]", one)) for index, one in enumerate(given)]
    for place, tool in found:
        if not _NAME.fullmatch(tool.name):
            _wrong(f"{place}.name", f"{place}.name is no name: use 1 to 128 letters, digits, dots, underscores and hyphens")
        num_chars = len(json.dumps(tool.parameters)) + len(tool.description or "")
        if num_chars > settings.max_grammar_chars:
            text = f"{place} has {num_chars} characters, and may have {settings.max_grammar_chars}: shorten its description and schema"
            _wrong(place, text)
        if (tool.parameters or {}).get("type", "object") != "object":
            name = f"{place}.{parameters}"
            _wrong(name, f"{name} describes no object: arguments have names; send a schema of the type object")
    return tuple(replace(tool, place=f"{place}.{parameters}") for place, tool in found)


def check_tools(request: ChatRequest) -> None:
    """Check that the tools have different names and fit the tool choice.

    Raises:
        RequestError: they do not.
    """
    names = [tool.name for tool in request.tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        _refuse("tools", f"tools has two functions with the name {twice!r}: give each a name of its own")
    if request.tool_use is ToolUse.REQUIRED and not names:
        _refuse("tool_choice", "tool_choice requires a call, and there are no tools: send tools, or leave it out")
    if request.tool_name is not None and request.tool_name not in names:
        _refuse("tool_choice", f"tool_choice names the function {request.tool_name!r}, which is not among the tools: name one of them")


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


def _refuse(parameter: str, text: str) -> NoReturn:
    raise RequestError(text, parameter=parameter)
