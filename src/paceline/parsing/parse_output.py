"""Parses the text that a model generated into content, reasoning and tool calls."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import RequestError
from paceline.outputs import ParsedToolCall as ParsedToolCall
from paceline.parsing.events import Event, Reasoning, Text, ToolCall, parts_of
from paceline.parsing.registry import (
    AUTO,
    GENERIC,
    HARMONY,
    HARMONY_REASONING,
    NONE,
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    OutputFormat,
    check_parser_names,
)
from paceline.parsing.tools import Tool

_END_TOKENS = re.compile(
    r"(?:\s*(?:</s>|<eos>|<\|(?:im_end|eot_id|eom_id|eot|eom|end|end_of_text|endoftext|return|user|observation|role_end|END_OF_TURN_TOKEN)\|>"
    r"|<end_of_turn>|<turn\|>|<｜end▁of▁sentence｜>|\[e~\[|<\|/?end_of_role\|>))+\s*$"
)
"""Tokens by which models end an output."""


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """Holds the parts of a model's text.

    Attributes:
        content: the text of the answer, without markup.
        reasoning: the text of the reasoning; None if there is none.
        tool_calls: the calls, in the order written.
    """

    content: str
    reasoning: str | None
    tool_calls: tuple[ParsedToolCall, ...]

    @classmethod
    def of_events(cls, events: Sequence[Event], broken_off: Collection[int] = ()) -> "ParsedOutput":
        """Return what all events of one sample amount to.

        Args:
            broken_off: indices of the calls whose arguments ended within a string.
        """
        parts = parts_of(events)
        content, reasoning = ("".join(part.text for part in parts if isinstance(part, kind)) for kind in (Text, Reasoning))
        calls = [part for part in parts if isinstance(part, ToolCall)]
        found = (ParsedToolCall(call.name, call.parsed() or {}, call.id, index not in broken_off) for index, call in enumerate(calls))
        return cls(content, reasoning or None, tuple(found))


def parse_output(
    text: str,
    *,
    tools: Sequence[Mapping[str, Any] | Tool] | None = (),
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    template: str | None = None,
    in_reasoning: bool | None = None,
) -> ParsedOutput:
    """Return the content, reasoning and tool calls of a text that a model wrote.

    The text has to contain its special tokens: detokenize it with `skip_special_tokens=False`. A token that ends the output is dropped.

    Args:
        text: the whole text after the prompt.
        tools: the functions that the model was shown, as OpenAI describes them: {"type": "function", "function": {"name": …}} or
            {"name": …}. Values of formats without types (XML and the like) get the types of their schemas. Without any tools every name
            is taken for a tool's.
        tool_call_parser: the format of calls; "auto" = as the template or the text shows, "none" = calls are text.
        reasoning_parser: the format of reasoning, in the same way.
        template: the model's chat template, as text.
        in_reasoning: whether the prompt ends with the opening mark of reasoning; None = if the text has only the closing mark.

    Raises:
        ConfigError: there is no such parser, or the two do not go together.
        RequestError: a tool is not a description of a function.
    """
    if isinstance(tools, str | Mapping):
        raise RequestError(f"tools is {tools!r}: send a list of functions", parameter="tools")
    text = _END_TOKENS.sub("", text)
    shown = [tool if isinstance(tool, Tool) else tool_of(tool) for tool in tools or ()]
    candidates = _formats(text, tool_call_parser, reasoning_parser, template)
    found = [_parse(text, shown, one, in_reasoning=in_reasoning) for one in candidates]
    return max(found, key=lambda one: len(one.tool_calls))


def tool_of(described: object) -> Tool:
    """Return the tool that an OpenAI description of a function means.

    Raises:
        RequestError: it is none.
    """
    function = described.get("function", described) if isinstance(described, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise RequestError(f"a tool has no name: {str(described)[:200]}; send {{'name': …, 'parameters': {{…}}}}", parameter="tools")
    parameters, description = function.get("parameters"), function.get("description")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(f"parameters of the tool {name!r} must be a JSON schema, got {type(parameters).__name__}", parameter="tools")
    return Tool(name=name, description=description if isinstance(description, str) else None, parameters=parameters)


def _formats(text: str, tool_call_parser: str, reasoning_parser: str, template: str | None) -> list[OutputFormat]:
    """Return the formats that the text may have; several if only the text shows them."""
    if template is not None:
        return [OutputFormat.of_template(template, tool_call_parser, reasoning_parser)]
    tool_call_name, reasoning_name = check_parser_names(tool_call_parser, reasoning_parser)
    names = [tool_call_name]
    if tool_call_name == AUTO:
        names = [*(name for name, one in TOOL_CALL_FORMATS.items() if one.is_in(text)), GENERIC]
    if reasoning_name == AUTO:
        reasoning_name = next((name for name, one in REASONING_FORMATS.items() if one.is_in(text)), NONE)
    formats = []
    for name in names:
        if tool_call_name == AUTO and name == HARMONY and reasoning_name not in (HARMONY_REASONING, NONE):
            continue
        is_pair = tool_call_parser != AUTO or reasoning_name != HARMONY_REASONING or name == HARMONY
        formats.append(OutputFormat.of_template("", name, reasoning_name if is_pair else NONE))
    return formats


def _parse(text: str, tools: Sequence[Tool], formats: OutputFormat, *, in_reasoning: bool | None) -> ParsedOutput:
    one = formats.reasoning_format
    if in_reasoning is None:
        closed_at = text.find(one.close) if one and one.close and one.opened else -1
        in_reasoning = closed_at >= 0 and one is not None and one.open not in text[:closed_at]
    stream = formats.stream(tools, in_reasoning=in_reasoning, parses_calls=True)
    return ParsedOutput.of_events([*stream.push(text), *stream.finish()], stream.sink.broken_off)
