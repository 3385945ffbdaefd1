"""A conversation in the form that a model's chat template wants it in."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from paceline.engine.batch import RequestMaker
from paceline.engine.inputs import with_plain_texts
from paceline.errors import RequestError
from paceline.parsing.tools import ToolUse
from paceline.server.chat_request import ChatRequest
from paceline.tokenizer.tokenizer import Tokenizer

_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""Variables of chat templates that requests set by fields of their own."""
_END_MARK = "\ue000end-of-prefix\ue000"


def check_template(request: ChatRequest, tokenizer: Tokenizer) -> None:
    """That the chat template can say everything that is in a request.

    Raises:
        RequestError: it knows no tools, or no such option; `parameter` names what of the request.
    """
    if request.offered_tools and not tokenizer.template_takes("tools"):
        _refuse("tools", "tools cannot be called: this model's chat template does not know them; leave them out")
    for index, message in enumerate(request.messages):
        if (message.get("tool_calls") or message.get("role") == "tool") and not tokenizer.template_takes("tools"):
            _refuse(
                f"messages[{index}].{'tool_calls' if message.get('tool_calls') else 'role'}",
                f"messages[{index}] is about a call of a tool, which this model's chat template does not know: say it in a text",
            )
    for name in request.template_options:
        if name in _GIVEN or not tokenizer.template_takes(name):
            _refuse("template_options", f"{name} is no option of this model's chat template: leave it out")


def conversation_ids(request: ChatRequest, maker: RequestMaker) -> list[int]:
    """The token ids of a conversation: with the model's turn begun, or with its last message left open.

    Raises:
        RequestError: the chat template rejects it, or leaves out a tool.
    """
    tools = [tool.as_template() for tool in request.offered_tools]
    messages = _with_end_mark(request.messages) if request.continue_final_message else request.messages

    def rendered(*, as_objects: bool) -> str:
        return maker.tokenizer.chat_text(
            with_plain_texts(_messages(messages, as_objects=as_objects)),
            tools=tools,
            options=request.template_options,
            add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
            max_context=maker.max_context,
        )

    text = _with_arguments(request, rendered)
    if request.continue_final_message:
        text, mark, _ = text.rpartition(_END_MARK)
        if not mark:
            _refuse("messages", "this model's chat template leaves the last message out, so that it cannot be continued: begin a new turn")
    unknown = next((tool.name for tool in request.offered_tools if tool.name not in text), None)
    if unknown is not None:
        _refuse("tools", f"tools cannot be called: this model's chat template says nothing of {unknown!r}; send no tools")
    return maker.tokenizer.encode(text, add_special_tokens=False)


def _with_end_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with a mark at the end of the last one's text: templates close a message in ways of their own."""
    *others, last = messages
    content = last.get("content") or ""
    if isinstance(content, list):
        return [*others, {**last, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _END_MARK}]}]
    return [*others, {**last, "content": content + _END_MARK}]


def _with_arguments(request: ChatRequest, rendered: Callable[..., str]) -> str:
    """The text, in which arguments of calls are as the template wants them: objects, unless it needs a text to write down."""
    arguments = [_parsed(call["function"]["arguments"]) for message in request.messages for call in message.get("tool_calls") or ()]
    try:
        text = rendered(as_objects=True)
    except RequestError as error:
        if not arguments:
            raise
        try:
            return rendered(as_objects=False)
        except RequestError:
            raise error from None
    written = [str(given) for given in arguments if given]  # as Python writes objects: JSON has other quotes
    return rendered(as_objects=False) if any(one in text for one in written if one.startswith("{'")) else text


def _messages(messages: Sequence[Mapping[str, Any]], *, as_objects: bool) -> list[Mapping[str, Any]]:
    """Messages whose calls have their arguments as templates want them, and whose results have the tool's name."""
    names: dict[str, str] = {}
    found: list[Mapping[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            names |= {call["id"]: call["function"]["name"] for call in calls if call.get("id")}
            message = {**message, "tool_calls": [_call(call, as_objects=as_objects) for call in calls]}
        elif message.get("role") == "tool" and message.get("tool_call_id") in names:
            message = {"name": names[message["tool_call_id"]], **message}
        found.append(message)
    return found


def _call(call: Mapping[str, Any], *, as_objects: bool) -> Mapping[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if as_objects:
        arguments = _parsed(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(arguments: Any) -> Any:
    """An object where the text is one; else the text, which a broken call may be."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def check_tools(request: ChatRequest) -> None:
    """That tools and what is said of their use go together.

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


def _refuse(parameter: str, text: str) -> NoReturn:
    raise RequestError(text, parameter=parameter)
