"""Converts messages and tools to the form that chat templates read, and changes messages so that a template accepts them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paceline.errors import RequestError
from paceline.parsing.tools import Tool

Message = dict[str, Any]
Adaptation = Callable[[Sequence[Message]], list[Message]]

_CALL_ID_LENGTH = 9


def parse_tools(given: Sequence[Tool | Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Convert tools to `Tool`. A mapping describes a function as in OpenAI's API, with or without {"type": "function"}.

    Raises:
        RequestError: `given` is no list, an item does not describe a function, or two functions have the same name.
    """
    if not isinstance(given, Iterable):
        raise RequestError(f"tools is {given!r}: give a list of functions", parameter="tools")
    tools = tuple(_parse_tool(index, one) for index, one in enumerate(given))
    names = [tool.name for tool in tools]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise RequestError(f"tools has two functions with the name {duplicate!r}: give each a name of its own", parameter="tools")
    return tools


def tool_for_template(tool: Tool) -> dict[str, Any]:
    """Return a tool in OpenAI's format. It always has properties and a description, because templates read them without a check."""
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
    names: dict[str, str] = {}
    found: list[Message] = []
    for index, given in enumerate(messages):
        message = dict(given)
        role = message.get("role")
        if role == "developer" and not has_developer_role:
            message["role"] = "system"
        if role in ("assistant", "tool") and message.get("content") is None:
            message["content"] = ""
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_call_for_template(f"messages[{index}].tool_calls", call) for call in calls]
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"] if call.get("id")}
        elif role == "tool" and not message.get("name") and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
        found.append(message)
    return found


def with_arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """Encode the arguments of tool calls as JSON, for templates that insert them without encoding them."""
    return [_map_tool_calls(message, _with_text_arguments) for message in messages]


def with_short_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Replace ids of tool calls by nine letters and digits, as Mistral's templates require.

    Ids are numbered in order, so they stay the same as the conversation grows and its cached prefix can be reused.
    """
    ids: dict[str, str] = {}

    def short_id(call_id: Any) -> Any:
        if not isinstance(call_id, str) or (len(call_id) == _CALL_ID_LENGTH and call_id.isalnum()):
            return call_id
        return ids.setdefault(call_id, f"call{len(ids):05d}")

    found = [_map_tool_calls(message, lambda call: {**call, "id": short_id(call.get("id", ""))}) for message in messages]
    return [{**one, "tool_call_id": short_id(one["tool_call_id"])} if one.get("tool_call_id") else one for one in found]


def with_sequential_calls(messages: Sequence[Message]) -> list[Message]:
    """Split messages with several tool calls, for templates that allow one per message. Each call is followed by its result."""
    found: list[Message] = []
    used: set[int] = set()
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if index in used:
            continue
        if len(calls) < 2:
            found.append(message)
            continue
        results = []
        for later in range(index + 1, len(messages)):
            if messages[later].get("role") != "tool":
                break
            results.append(later)
        for number, call in enumerate(calls):
            found.append({**(message if number == 0 else {"role": message["role"], "content": ""}), "tool_calls": [call]})
            own = [one for one in results if one not in used and messages[one].get("tool_call_id") == call.get("id")]
            used.update(own)
            found += [messages[one] for one in own]
    return found


def with_content_in_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Append content to the reasoning, for templates that reject an assistant message with content, reasoning and tool calls."""
    return [
        {**message, "reasoning_content": _join_texts(message["reasoning_content"], message["content"]), "content": ""}
        if message.get("tool_calls") and message.get("reasoning_content") and message.get("content")
        else message
        for message in messages
    ]


def with_merged_turns(messages: Sequence[Message]) -> list[Message]:
    """Merge consecutive messages of the same role, except tool results, for templates whose roles must alternate."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if last is None or last.get("role") != message.get("role") or message.get("role") not in ("system", "user", "assistant"):
            found.append(message)
            continue
        merged = {**last, **message, "content": _join_texts(last.get("content"), message.get("content"))}
        if last.get("tool_calls") and message.get("tool_calls"):
            merged["tool_calls"] = [*last["tool_calls"], *message["tool_calls"]]
        found[-1] = merged
    return found


def with_folded_system(messages: Sequence[Message]) -> list[Message]:
    """Move the text of system messages to the beginning of the next user message, for templates without a system role."""
    return _fold_system_messages(messages, 0)


def with_folded_later_system(messages: Sequence[Message]) -> list[Message]:
    """Do the same as `with_folded_system`, but leave system messages at the beginning of the conversation."""
    first = next((index for index, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    return _fold_system_messages(messages, first)


def with_generic_tools(messages: Sequence[Message], description: str) -> list[Message]:
    """Rewrite tool calls as JSON in the assistant's text and tool results as user messages, for templates without tools.

    Args:
        description: text about the tools, which is added to the system message; empty = no tools are offered.
    """
    found: list[Message] = []
    is_after_result = False
    for given in messages:
        message = dict(given)
        calls = message.pop("tool_calls", None)
        if calls:
            message["content"] = _join_texts(message.get("content"), "\n".join(map(_call_as_json_text, calls)), "\n")
        elif message.get("role") == "tool":
            name = message.get("name")
            title = f"Result of {name}:\n" if name else "Result:\n"
            message = {"role": "user", "content": f"{title}{message.get('content', '')}"}
            if is_after_result:
                found[-1]["content"] += f"\n\n{message['content']}"
                continue
        is_after_result = given.get("role") == "tool"
        found.append(message)
    if not description:
        return found
    if found and found[0].get("role") == "system":
        return [{**found[0], "content": _join_texts(found[0].get("content"), description)}, *found[1:]]
    return [{"role": "system", "content": description}, *found]


def has_tool_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether messages contain a tool call or a tool result."""
    return any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)


def _parse_tool(index: int, given: object) -> Tool:
    if isinstance(given, Tool):
        return given
    function = given.get("function", given) if isinstance(given, Mapping) else None
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
    found = dict(schema)
    if isinstance(found.get("properties"), Mapping):
        found["properties"] = {name: _with_property_types(one) for name, one in found["properties"].items()}
    if "items" in found:
        found["items"] = _with_property_types(found["items"])
    found["type"] = _infer_type(schema)
    if not is_root:
        found.setdefault("description", "")
    return found


def _infer_type(schema: Mapping[str, Any]) -> str:
    given = schema.get("type")
    if isinstance(given, str):
        return given
    options = [one for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list) for one in schema[name] if isinstance(one, Mapping)]
    names = [*(given if isinstance(given, list) else ()), *(one.get("type") for one in options)]
    return next((name for name in names if isinstance(name, str) and name != "null"), "object" if "$ref" in schema else "string")


def _call_for_template(location: str, call: object) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"{location} holds {call!r}, which is no call: give {{'id', 'type': 'function', 'function': {{'name', 'arguments'}}}}",
            parameter="messages",
        )
    others = {name: value for name, value in call.items() if name not in ("type", "function", "name", "arguments")}
    return {**others, "type": "function", "function": {**function, "arguments": _parse_arguments(function.get("arguments"))}}


def _parse_arguments(arguments: Any) -> Any:
    """Parse arguments of a tool call that are a JSON object as text; return others unchanged, such as those of an incomplete call."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _map_tool_calls(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [change(call) for call in calls]} if calls else message


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _call_as_json_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return json.dumps({"tool_call": {"name": function["name"], "arguments": function["arguments"]}}, ensure_ascii=False)


def _fold_system_messages(messages: Sequence[Message], first: int) -> list[Message]:
    found: list[Message] = list(messages[:first])
    pending = ""
    for message in messages[first:]:
        if message.get("role") == "system":
            pending = _join_texts(pending, message.get("content"))
            continue
        if pending and message.get("role") != "user":
            if message.get("role") == "tool":  # a tool result must directly follow its call
                found.append(message)
                continue
            found.append({"role": "user", "content": pending})
            pending = ""
        found.append({**message, "content": _join_texts(pending, message.get("content"))} if pending else message)
        pending = ""
    return [*found, {"role": "user", "content": pending}] if pending else found


def _join_texts(first: Any, second: Any, separator: str = "\n\n") -> str:
    return separator.join(str(text) for text in (first, second) if text)


def _with_string_content(message: Mapping[str, Any]) -> Mapping[str, Any]:
    given: object = message
    content = given.get("content") if isinstance(given, Mapping) else None
    return {**message, "content": "\n".join(map(_part_text, content))} if isinstance(content, list | tuple) else message


def _part_text(part: object) -> str:
    advice = "give {'type': 'text', 'text': ...}"
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RequestError(f"a message holds the part {part!r}: {advice}", parameter="messages")
    kind, text = part.get("type"), part.get("text")
    if kind is None:
        raise RequestError(f"a part of a message has no type: {advice}", parameter="messages")
    if kind != "text":
        raise RequestError(f"a message holds a part of the type {kind!r}: this model reads text only", parameter="messages")
    if not isinstance(text, str):
        raise RequestError(f"a part of a message is of the type 'text' and its text is {text!r}: {advice}", parameter="messages")
    return text
