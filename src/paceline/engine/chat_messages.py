"""Converts messages and tools to the form that chat templates read, and changes messages so that a template accepts them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from paceline.errors import RequestError
from paceline.parsing.tools import Tool

Message = dict[str, Any]
MessagesAdaptation = Callable[[Sequence[Message]], list[Message]]
"""Function that changes messages for templates that reject the unchanged ones."""

_MISTRAL_CALL_ID_LEN = 9


def parse_tools(tools: Sequence[Tool | Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Convert tools to `Tool`. A mapping describes a function as in OpenAI's API, with or without {"type": "function"}.

    Raises:
        RequestError: `tools` is not a list, an item does not describe a function, or two functions have the same name.
    """
    if not isinstance(tools, Iterable):
        raise RequestError(f"tools is {tools!r}: give a list of functions", parameter="tools")
    parsed_tools = tuple(_parse_tool(index, tool) for index, tool in enumerate(tools))
    names = [tool.name for tool in parsed_tools]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise RequestError(f"tools has two functions with the name {duplicate!r}: give each a name of its own", parameter="tools")
    return parsed_tools


def tool_for_template(tool: Tool) -> dict[str, Any]:
    """Return a tool in OpenAI's format. Missing properties and description are added, because templates read them without a check."""
    parameters = dict(tool.parameters or {})
    for name, value in (("type", "object"), ("properties", {})):
        parameters.setdefault(name, value)
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def tool_with_types(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Add types and descriptions to properties that have none, for templates that read them without a check."""
    function = tool["function"]
    return {**tool, "function": {**function, "parameters": _with_property_types(function["parameters"], is_root=True)}}


def with_string_contents(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Replace each content that is a list of text parts by one string, the parts joined by newlines as in vLLM.

    Raises:
        RequestError: a part is not text.
    """
    return [_with_string_content(message) for message in messages]


def messages_for_template(messages: Sequence[Mapping[str, Any]], *, has_developer_role: bool) -> list[Message]:
    """Add missing fields to messages, because templates read many fields without a check.

    An assistant message that only calls tools gets an empty content. Tool calls get a type, and arguments as objects. Tool results get the
    name of their tool. The role "developer" becomes "system" unless `has_developer_role` is set.

    Raises:
        RequestError: an item of `tool_calls` is not a call of a function.
    """
    tool_names: dict[str, str] = {}
    converted: list[Message] = []
    for index, original in enumerate(messages):
        message = dict(original)
        role = message.get("role")
        if role == "developer" and not has_developer_role:
            message["role"] = "system"
        if role in ("assistant", "tool") and message.get("content") is None:
            message["content"] = ""
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_tool_call_for_template(f"messages[{index}].tool_calls", call) for call in calls]
            tool_names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"] if call.get("id")}
        elif role == "tool" and not message.get("name") and message.get("tool_call_id") in tool_names:
            message["name"] = tool_names[message["tool_call_id"]]
        converted.append(message)
    return converted


def with_arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """Encode the arguments of tool calls as JSON, for templates that insert arguments without encoding."""
    return [_map_tool_calls(message, _tool_call_with_text_arguments) for message in messages]


def with_short_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Replace ids of tool calls by nine letters and digits, as Mistral's templates require.

    Ids are numbered in order, so they stay the same as the conversation grows and its cached prefix can be reused.
    """
    short_ids: dict[str, str] = {}

    def short_id(call_id: Any) -> Any:
        if not isinstance(call_id, str) or (len(call_id) == _MISTRAL_CALL_ID_LEN and call_id.isalnum()):
            return call_id
        return short_ids.setdefault(call_id, f"call{len(short_ids):05d}")

    converted = [_map_tool_calls(message, lambda call: {**call, "id": short_id(call.get("id", ""))}) for message in messages]
    return [{**one, "tool_call_id": short_id(one["tool_call_id"])} if one.get("tool_call_id") else one for one in converted]


def with_sequential_calls(messages: Sequence[Message]) -> list[Message]:
    """Split messages with several tool calls, for templates that allow one per message. Each call is followed by its result."""
    converted: list[Message] = []
    moved_indices: set[int] = set()
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if index in moved_indices:
            continue
        if len(calls) < 2:
            converted.append(message)
            continue
        result_indices = list(takewhile(lambda later: messages[later].get("role") == "tool", range(index + 1, len(messages))))
        for call_index, call in enumerate(calls):
            converted.append({**(message if call_index == 0 else {"role": message["role"], "content": ""}), "tool_calls": [call]})
            unmoved = [later for later in result_indices if later not in moved_indices]
            own_indices = [later for later in unmoved if messages[later].get("tool_call_id") == call.get("id")]
            moved_indices.update(own_indices)
            converted += [messages[later] for later in own_indices]
    return converted


def with_content_in_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Append content to the reasoning, for templates that reject an assistant message with content, reasoning and tool calls."""
    return [
        {**message, "reasoning_content": _join_nonempty_texts(message["reasoning_content"], message["content"]), "content": ""}
        if message.get("tool_calls") and message.get("reasoning_content") and message.get("content")
        else message
        for message in messages
    ]


def with_merged_turns(messages: Sequence[Message]) -> list[Message]:
    """Merge consecutive messages of the same role, except tool results, for templates whose roles must alternate."""
    merged_messages: list[Message] = []
    for message in messages:
        previous = merged_messages[-1] if merged_messages else None
        if previous is None or previous.get("role") != message.get("role") or message.get("role") not in ("system", "user", "assistant"):
            merged_messages.append(message)
            continue
        merged = {**previous, **message, "content": _join_nonempty_texts(previous.get("content"), message.get("content"))}
        if previous.get("tool_calls") and message.get("tool_calls"):
            merged["tool_calls"] = [*previous["tool_calls"], *message["tool_calls"]]
        merged_messages[-1] = merged
    return merged_messages


def with_system_as_user_text(messages: Sequence[Message]) -> list[Message]:
    """Move the text of system messages to the beginning of the next user message, for templates without a system role."""
    return _move_system_text_to_user(messages, 0)


def with_later_system_as_user_text(messages: Sequence[Message]) -> list[Message]:
    """Do the same as `with_system_as_user_text`, except for system messages at the beginning of the conversation."""
    first_other = next((index for index, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    return _move_system_text_to_user(messages, first_other)


def with_generic_tools(messages: Sequence[Message], description: str) -> list[Message]:
    """Rewrite tool calls as JSON in the assistant's text and tool results as user messages, for templates without tools.

    Args:
        description: text about the tools, which is added to the system message; empty = no tools are offered.
    """
    converted: list[Message] = []
    is_after_result = False
    for original in messages:
        message = dict(original)
        calls = message.pop("tool_calls", None)
        if calls:
            message["content"] = _join_nonempty_texts(message.get("content"), "\n".join(map(_tool_call_as_json, calls)), "\n")
        elif message.get("role") == "tool":
            name = message.get("name")
            title = f"Result of {name}:\n" if name else "Result:\n"
            message = {"role": "user", "content": f"{title}{message.get('content', '')}"}
            if is_after_result:
                converted[-1]["content"] += f"\n\n{message['content']}"
                continue
        is_after_result = original.get("role") == "tool"
        converted.append(message)
    if not description:
        return converted
    if converted and converted[0].get("role") == "system":
        return [{**converted[0], "content": _join_nonempty_texts(converted[0].get("content"), description)}, *converted[1:]]
    return [{"role": "system", "content": description}, *converted]


def has_tool_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether messages contain a tool call or a tool result."""
    return any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)


def _parse_tool(index: int, tool: object) -> Tool:
    if isinstance(tool, Tool):
        return tool
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        advice = "give {'type': 'function', 'function': {'name', 'description', 'parameters'}}"
        raise RequestError(f"tools[{index}] is no function with a name: {advice}", parameter="tools")
    description, parameters = function.get("description"), function.get("parameters")
    if not isinstance(description, str | None) or not isinstance(parameters, Mapping | None):
        raise RequestError(
            f"tools[{index}] has the description {description!r} and the parameters {parameters!r}: give a text and a JSON schema",
            parameter="tools",
        )
    return Tool(name=name, description=description, parameters=parameters, strict=function.get("strict") is True)


def _with_property_types(schema: Any, *, is_root: bool = False) -> Any:
    """Return a JSON schema in which each property has one type and a description."""
    if not isinstance(schema, Mapping):
        return schema
    typed = dict(schema)
    if isinstance(typed.get("properties"), Mapping):
        typed["properties"] = {name: _with_property_types(property_schema) for name, property_schema in typed["properties"].items()}
    if "items" in typed:
        typed["items"] = _with_property_types(typed["items"])
    typed["type"] = _infer_type(schema)
    if not is_root:
        typed.setdefault("description", "")
    return typed


def _infer_type(schema: Mapping[str, Any]) -> str:
    declared = schema.get("type")
    if isinstance(declared, str):
        return declared
    subschemas = [one for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for one in schema[key] if isinstance(one, Mapping)]
    types = [*(declared if isinstance(declared, list) else ()), *(one.get("type") for one in subschemas)]
    return next((one for one in types if isinstance(one, str) and one != "null"), "object" if "$ref" in schema else "string")


def _tool_call_for_template(location: str, call: object) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"{location} contains {call!r}, which is no call: give {{'id', 'type': 'function', 'function': {{'name', 'arguments'}}}}",
            parameter="messages",
        )
    other_fields = {name: value for name, value in call.items() if name not in ("type", "function", "name", "arguments")}
    return {**other_fields, "type": "function", "function": {**function, "arguments": _parse_arguments(function.get("arguments"))}}


def _parse_arguments(arguments: Any) -> Any:
    """Parse arguments of a tool call that are a JSON object as text. Return other arguments unchanged, such as incomplete JSON."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _map_tool_calls(message: Message, convert: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [convert(call) for call in calls]} if calls else message


def _tool_call_with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _tool_call_as_json(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return json.dumps({"tool_call": {"name": function["name"], "arguments": function["arguments"]}}, ensure_ascii=False)


def _move_system_text_to_user(messages: Sequence[Message], start: int) -> list[Message]:
    converted: list[Message] = list(messages[:start])
    pending_text = ""
    for message in messages[start:]:
        if message.get("role") == "system":
            pending_text = _join_nonempty_texts(pending_text, message.get("content"))
            continue
        if pending_text and message.get("role") != "user":
            if message.get("role") == "tool":  # a tool result must directly follow its call
                converted.append(message)
                continue
            converted.append({"role": "user", "content": pending_text})
            pending_text = ""
        converted.append({**message, "content": _join_nonempty_texts(pending_text, message.get("content"))} if pending_text else message)
        pending_text = ""
    return [*converted, {"role": "user", "content": pending_text}] if pending_text else converted


def _join_nonempty_texts(first: Any, second: Any, separator: str = "\n\n") -> str:
    return separator.join(str(text) for text in (first, second) if text)


def _with_string_content(message: Mapping[str, Any]) -> Mapping[str, Any]:
    unchecked_message: object = message
    content = unchecked_message.get("content") if isinstance(unchecked_message, Mapping) else None
    return {**message, "content": "\n".join(map(_text_of_content_part, content))} if isinstance(content, list | tuple) else message


def _text_of_content_part(part: object) -> str:
    advice = "give {'type': 'text', 'text': ...}"
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RequestError(f"a message contains the part {part!r}: {advice}", parameter="messages")
    part_type, text = part.get("type"), part.get("text")
    if part_type is None:
        raise RequestError(f"a part of a message has no type: {advice}", parameter="messages")
    if part_type != "text":
        raise RequestError(f"a message contains a part of the type {part_type!r}: this model reads text only", parameter="messages")
    if not isinstance(text, str):
        raise RequestError(f"a part of a message is of the type 'text' and its text is {text!r}: {advice}", parameter="messages")
    return text
