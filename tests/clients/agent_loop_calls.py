"""Two-turn agent loops by the official clients, which echo their own objects.

Reads server addresses from stdin and writes a line of JSON for each: the loops that failed.

Run in the environment of the clients: `agent_loop_calls.py KEY`.
"""

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

import anthropic
import ollama
import openai
from pydantic import BaseModel

QUESTION = "Is the museum open?"
SCHEMA = {"type": "object", "properties": {"kind": {"type": "string", "enum": ["taxi", "bus"]}}, "required": ["kind"]}
DESCRIBED = {"type": "function", "function": {"name": "book", "description": "Books a ride.", "parameters": SCHEMA}}
BARE = {"type": "function", "function": {"name": "cancel"}}
LIMIT = 300
GREEDY = {"temperature": 0}
ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}


class Book(BaseModel):
    """Books a ride."""

    kind: Literal["taxi", "bus"]


class Reply(BaseModel):
    """What is answered."""

    is_open: bool


def chat_loop(url: str, key: str, *, is_streamed: bool = False, tools: tuple[Any, ...] = (DESCRIBED, BARE)) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    ask = {"model": "mini", "tools": list(tools), "max_tokens": LIMIT, "temperature": 0, "parallel_tool_calls": False}
    if is_streamed:
        with client.chat.completions.stream(messages=messages, tool_choice="required", **ask) as stream:
            assert "tool_calls.function.arguments.done" in [event.type for event in stream]
            choice = stream.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(messages=messages, tool_choice="required", **ask).choices[0]
    message = choice.message
    assert message.tool_calls, message
    assert choice.finish_reason == "tool_calls", choice
    messages.append(message)
    for call in message.tool_calls:
        json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
    answer = client.chat.completions.create(messages=messages, **{**ask, "max_tokens": 8}).choices[0].message
    messages += [answer, {"role": "user", "content": "Thank you."}]
    client.chat.completions.create(messages=messages, **{**ask, "max_tokens": 8})


def parsed_loop(url: str, key: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tool = openai.pydantic_function_tool(Book)
    ask = {"model": "mini", "max_tokens": LIMIT, "temperature": 0}
    forced = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    message = client.chat.completions.parse(messages=messages, **forced, **ask).choices[0].message
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}]
    reply = client.chat.completions.parse(messages=messages, response_format=Reply, **ask).choices[0].message
    messages += [reply, {"role": "user", "content": "And now?"}]
    client.chat.completions.create(messages=messages, **{**ask, "max_tokens": 8})


def responses_loop(url: str, key: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [{"type": "function", **DESCRIBED["function"]}, {"type": "function", "name": "cancel", "parameters": None, "strict": None}]
    ask = {"model": "mini", "tools": tools, "temperature": 0, "max_output_tokens": LIMIT}
    response = client.responses.create(input=items, tool_choice="required", parallel_tool_calls=False, **ask)
    items += response.output
    calls = [item for item in response.output if item.type == "function_call"]
    assert calls, response.output
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "done"} for call in calls]
    items += client.responses.create(input=items, **{**ask, "max_output_tokens": 16}).output
    items.append({"role": "user", "content": "Thank you."})
    client.responses.create(input=items, **{**ask, "max_output_tokens": 16})


def anthropic_loop(url: str, key: str, *, is_streamed: bool = False) -> None:
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    book = {"name": "book", "description": "Books a ride.", "input_schema": SCHEMA}
    tools = [book, {"name": "cancel", "input_schema": {"type": "object"}}]
    ask: dict[str, Any] = {"model": "mini", "tools": tools, "system": "Be brief.", "max_tokens": LIMIT, "extra_body": GREEDY}
    if is_streamed:
        with client.messages.stream(messages=messages, tool_choice=ONE_CALL, **ask) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(messages=messages, tool_choice=ONE_CALL, **ask)
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert calls, answer.content
    messages.append({"role": "assistant", "content": answer.content})
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "done", "is_error": False} for call in calls]
    messages.append({"role": "user", "content": results})
    answer = client.messages.create(messages=messages, **{**ask, "max_tokens": 8})
    messages += [{"role": "assistant", "content": answer.content or "ok"}, {"role": "user", "content": "Thank you."}]
    client.messages.create(messages=messages, **{**ask, "max_tokens": 8})


def ollama_loop(url: str, key: str) -> None:
    client = ollama.Client(host=url, headers={"Authorization": f"Bearer {key}"})
    call = ollama.Message.ToolCall(function=ollama.Message.ToolCall.Function(name="book", arguments={"kind": "bus"}))
    messages: list[Any] = [
        {"role": "user", "content": QUESTION},
        ollama.Message(role="assistant", tool_calls=[call]),
        {"role": "tool", "tool_name": "book", "content": "done"},
    ]
    options = {"num_predict": 8, "temperature": 0}
    answer = client.chat(model="mini", messages=messages, tools=[DESCRIBED, BARE], options=options)
    messages += [answer.message, {"role": "user", "content": "Thank you."}]
    for _ in client.chat(model="mini", messages=messages, tools=[DESCRIBED], options=options, stream=True):
        pass


LOOPS: dict[str, Callable[[str, str], None]] = {
    "chat": chat_loop,
    "chat streamed": lambda url, key: chat_loop(url, key, is_streamed=True),
    "chat without descriptions": lambda url, key: chat_loop(url, key, tools=(BARE,)),
    "parse": parsed_loop,
    "responses": responses_loop,
    "anthropic": anthropic_loop,
    "anthropic streamed": lambda url, key: anthropic_loop(url, key, is_streamed=True),
    "ollama": ollama_loop,
}


def main() -> None:
    (key,) = sys.argv[1:]
    for line in sys.stdin:
        failures = {}
        for name, loop in LOOPS.items():
            try:
                loop(line.strip(), key)
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"[:400] + traceback.format_exc()[-200:]
        sys.stdout.write(json.dumps(failures) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
