"""Reasoning and tool calls in every API: its own blocks or items, streamed and complete, and sent back in the conversation."""

import asyncio
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.apis import APIS, Messages, Responses, Said, Spoken
from harness.http_client import HttpClient
from harness.tool_model import write_tool_model
from harness.written_answers import kinds, write_down
from paceline import AsyncEngine
from paceline.server import anthropic, ollama, openai_chat, responses
from paceline.server.app import create_app
from paceline.server.fields import IGNORED_HEADER
from paceline.server.settings import ServerSettings

MESSAGES = [{"role": "user", "content": "How is the weather in Oslo?"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Bergen"]}}, "required": ["city"], "additionalProperties": False}
WEATHER = {"name": "weather", "description": "Tomorrow's weather.", "parameters": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WRITTEN = f"<think>\nHm. Oslo.\n</think>\n\nLet me see.{CALL}\n{CALL}"
CALLED = ("call", "weather", '{"city": "Oslo"}')
TOOLS: dict[str, dict[str, Any]] = {
    "chat": {"tools": [{"type": "function", "function": WEATHER}]},
    "messages": {"tools": [{"name": "weather", "description": WEATHER["description"], "input_schema": SCHEMA}]},
    "responses": {"tools": [{"type": "function", **WEATHER, "strict": True}]},
    "ollama": {"tools": [{"type": "function", "function": WEATHER}]},
}
REASONS = {"chat": "tool_calls", "messages": ("tool_use", None), "responses": ("completed", None), "ollama": "stop"}
CUT = {"chat": "length", "messages": ("max_tokens", None), "responses": ("incomplete", "max_output_tokens"), "ollama": "length"}


@pytest.fixture(scope="module")
def talking(mini_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpClient]:
    engine = AsyncEngine.open(str(write_tool_model(mini_dir, tmp_path_factory.mktemp("talking"))), drafter="ngram", threads=1)
    yield HttpClient(create_app(engine, ServerSettings(served_model_name="mini")))
    asyncio.run(engine.close())


@pytest.fixture(params=APIS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def asked(name: str, **more: Any) -> dict[str, Any]:
    return {**APIS[name].fields(MESSAGES, max_tokens=60, temperature=0), **TOOLS[name], **more}


def plain(said: Said) -> Said:
    """The same with arguments spelled one way."""
    return [(kind, *more[:-1], json.dumps(json.loads(more[-1]))) if kind == "call" else (kind, *more) for kind, *more in said]


@pytest.mark.parametrize("piece_len", [1, 7, 1000])
def test_reasoning_content_and_tool_calls_are_separated_in_every_api(
    talking: HttpClient, monkeypatch: pytest.MonkeyPatch, name: str, piece_len: int
) -> None:
    write_down(monkeypatch, WRITTEN, piece_len=piece_len)
    api = APIS[name]
    whole, events = api.whole(talking, asked(name)), api.stream(talking, asked(name))
    expected = [("thought", "Hm. Oslo."), ("text", "Let me see."), CALLED, CALLED]
    assert [(*one[:-1], one[-1].strip()) for one in plain(api.said(whole))] == expected
    assert plain(api.streamed(events)) == plain(api.said(whole))
    assert api.ending(whole)[0] == api.streamed_ending(events)[0] == REASONS[name]


def test_answer_cut_within_a_tool_call_has_finish_reason_length(talking: HttpClient, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_down(monkeypatch, WRITTEN[:-30], finish_reason="length")
    api: Spoken = APIS[name]
    fields = asked(name)
    fields.update({"max_tokens": 5} if name == "messages" else {})  # as many as it has: else the context is at its end
    whole = api.whole(talking, fields)
    answer = talking.post(api.path, {**fields, "stream": True, **({"stream_options": {"include_usage": True}} if name == "chat" else {})})
    events = api.events(answer.text)
    assert plain(api.said(whole)[:3])[-1] == CALLED
    assert api.ending(whole)[0] == CUT[name]
    if name != "messages":
        assert api.ending(whole) == api.streamed_ending(events)


MESSAGE_ORDER = [
    "message_start",
    *["content_block_start", "content_block_delta", "content_block_stop"] * 4,
    "message_delta",
    "message_stop",
]
ITEM_OF_TEXT = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
ITEM_OF_CALL = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]
RESPONSE_ORDER = [
    f"response.{kind}"
    for kind in [
        "created",
        "in_progress",
        *[kind.format("reasoning_text") for kind in ITEM_OF_TEXT],
        *[kind.format("output_text") for kind in ITEM_OF_TEXT],
        *ITEM_OF_CALL * 2,
        "completed",
    ]
]


def test_stream_events_follow_the_order_of_anthropic_and_responses(talking: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    write_down(monkeypatch, WRITTEN)
    assert kinds(Messages().stream(talking, asked("messages"))) == MESSAGE_ORDER
    assert kinds(Responses().stream(talking, asked("responses"))) == RESPONSE_ORDER


def test_anthropic_thinking_block_ends_with_a_signature(talking: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    write_down(monkeypatch, WRITTEN)
    deltas = [event["delta"]["type"] for event in Messages().stream(talking, asked("messages")) if event["type"] == "content_block_delta"]
    assert deltas.count("signature_delta") == 1
    assert deltas.index("signature_delta") == deltas.count("thinking_delta")


FORCED = {
    "chat": {"tool_choice": "required", "parallel_tool_calls": False},
    "messages": {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    "responses": {"tool_choice": {"type": "function", "name": "weather"}},
}


@pytest.mark.parametrize("name", FORCED, indirect=True)
def test_required_tool_call_fits_its_schema_in_every_api(talking: HttpClient, name: str) -> None:
    api = APIS[name]
    fields = asked(name, **FORCED[name])
    whole, events = api.whole(talking, fields), api.stream(talking, fields)
    calls = [one for one in api.said(whole) if one[0] == "call"]
    assert calls
    assert all(json.loads(call[2])["city"] in ("Oslo", "Bergen") for call in calls)
    assert api.streamed(events) == api.said(whole)
    assert api.ending(whole)[0] == REASONS[name]


@pytest.mark.parametrize("name", FORCED, indirect=True)
def test_invalid_tool_schema_error_names_its_field_path(talking: HttpClient, name: str) -> None:
    wrong = {"type": "object", "properties": {"city": {"type": 7}}}
    tools: Any = copy.deepcopy(TOOLS[name]["tools"])
    tools[0].update({"input_schema": wrong} if name == "messages" else {})
    tools[0].get("function", tools[0]).update({} if name == "messages" else {"parameters": wrong})
    answer = talking.post(APIS[name].path, asked(name, **FORCED[name], tools=tools))
    assert answer.status_code == 400
    places = {"chat": "tools[0].function.parameters", "messages": "tools[0].input_schema", "responses": "tools[0].parameters"}
    assert places[name] in APIS[name].message_of(answer.json())


HISTORY = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "How is the weather in Oslo?"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
    },
    {"role": "tool", "tool_call_id": "a", "name": "weather", "content": "rain"},
    {"role": "user", "content": "And then?"},
]


def test_history_with_tool_calls_is_read_equally_in_every_api() -> None:
    settings = ServerSettings()
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "rain"}], "is_error": False}
    turns = [
        HISTORY[1],
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result, {"type": "text", "text": "And then?"}]},
    ]
    fields = anthropic.MessagesFields.model_validate(
        {"max_tokens": 1, "system": [{"type": "text", "text": "Be short."}], "messages": turns}
    )
    assert anthropic.conversation(fields).messages() == HISTORY

    items = [
        {"role": "user", "content": [{"type": "input_text", "text": HISTORY[1]["content"]}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Oslo"}', "status": "completed"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"role": "user", "content": "And then?"},
    ]
    found = responses.conversation(responses.ResponsesFields.model_validate({"instructions": "Be short.", "input": items}), settings)
    found[2]["tool_calls"][0]["function"]["arguments"] = json.loads(found[2]["tool_calls"][0]["function"]["arguments"])
    assert found == HISTORY

    called = {"role": "assistant", "content": "Let me see.", "thinking": "Hm."}
    called |= {"tool_calls": [{"id": "a", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]}
    told = [*HISTORY[:2], called, {"role": "tool", "tool_name": "weather", "content": "rain"}, HISTORY[4]]
    assert ollama.conversation(ollama.ChatFields.model_validate({"model": "mini", "messages": told}), settings) == HISTORY


def test_tool_result_without_an_earlier_call_is_kept() -> None:
    """Agents cut old turns off. Whether such a result can be rendered is up to the chat template."""
    settings, result = ServerSettings(), {"role": "tool", "tool_call_id": "b", "content": "rain"}
    block = {"type": "tool_result", "tool_use_id": "b", "content": "rain"}
    fields = anthropic.MessagesFields.model_validate({"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]})
    assert anthropic.conversation(fields).messages() == [result]
    item = {"type": "function_call_output", "call_id": "b", "output": "rain"}
    assert responses.conversation(responses.ResponsesFields.model_validate({"input": [item]}), settings) == [result]
    assert openai_chat.conversation([openai_chat.Message.model_validate(result)], settings) == [result]
    named = {"role": "tool", "tool_name": "weather", "content": "rain"}
    found = ollama.conversation(ollama.ChatFields.model_validate({"model": "mini", "messages": [named]}), settings)
    assert found == [{"role": "tool", "tool_call_id": "", "name": "weather", "content": "rain"}]


THINKING: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "messages": [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking": {"type": "disabled"}}),
        ({"output_config": {"effort": "low"}}, {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}),
    ],
    "responses": [({"reasoning": {"effort": "low"}}, {"reasoning": {"effort": "none"}})],
    "ollama": [({"think": True}, {"think": False}), ({"think": "high"}, {"think": False})],
}


@pytest.mark.parametrize("name", THINKING, indirect=True)
def test_thinking_option_of_every_api_reaches_the_chat_template(talking: HttpClient, client: HttpClient, name: str) -> None:
    api = APIS[name]
    fields = api.fields(MESSAGES, max_tokens=1)
    untold = api.ending(api.whole(talking, fields))[1]
    for told, told_not in THINKING[name]:
        assert api.ending(api.whole(talking, {**fields, **told}))[1] > untold, "the prompt begins the thoughts"
        assert api.ending(api.whole(talking, {**fields, **told_not}))[1] == untold
        for more in (told, told_not):
            answer = client.post(api.path, {**fields, **more})
            assert answer.status_code == 200, answer.text
            ignored = answer.headers[IGNORED_HEADER].split(", ")
            assert any(name == field or name.startswith(f"{field}.") for field in more for name in ignored), "without a variable"


def test_ollama_show_lists_capabilities(talking: HttpClient, client: HttpClient) -> None:
    assert talking.json("/api/show", {"model": "mini"})["capabilities"] == ["completion", "tools", "thinking"]
    assert client.json("/api/show", {"model": "mini:latest"})["capabilities"] == ["completion"]


def test_count_tokens_includes_the_tools(talking: HttpClient) -> None:
    fields = {name: value for name, value in asked("messages").items() if name in ("model", "messages", "tools")}
    count = talking.json("/v1/messages/count_tokens", fields)["input_tokens"]
    assert count == Messages().ending(Messages().whole(talking, asked("messages")))[1]
    del fields["tools"]
    assert talking.json("/v1/messages/count_tokens", fields)["input_tokens"] < count
