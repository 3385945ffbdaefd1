"""Malformed bodies: any value in any place gets an error in the API's format, or an answer."""

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.apis import Chat, Messages, OllamaChat, Responses, Spoken
from harness.http_client import HttpClient
from harness.tool_model import write_tool_model
from harness.written_answers import write_down
from paceline import AsyncEngine
from paceline.server.app import create_app
from paceline.server.settings import ServerSettings

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "d", "parameters": SCHEMA}
SPECULATION = {"enabled": True, "drafter": "ngram", "num_speculative_tokens": 2, "origins": True}
BODIES: dict[str, tuple[Spoken, dict[str, Any]]] = {
    "/v1/chat/completions": (
        Chat(),
        {
            "model": "mini",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "a", "content": "rain"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "auto",
            "max_tokens": 2,
            "speculation": SPECULATION,
        },
    ),
    "/v1/messages": (
        Messages(),
        {
            "model": "mini",
            "max_tokens": 2,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "rain"}]}]},
            ],
            "tools": [{"name": "weather", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "metadata": {"user_id": "u"},
            "stop_sequences": ["END"],
            "temperature": 0.5,
            "speculation": SPECULATION,
        },
    ),
    "/v1/messages/count_tokens": (
        Messages(),
        {"system": "s", "messages": [{"role": "user", "content": "a"}], "tools": [{"name": "weather", "input_schema": SCHEMA}]},
    ),
    "/v1/responses": (
        Responses(),
        {
            "model": "mini",
            "instructions": "s",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
                {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "rain"},
            ],
            "max_output_tokens": 2,
            "tools": [{"type": "function", **FUNCTION, "strict": False}],
            "tool_choice": {"type": "function", "name": "weather"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "metadata": {"a": "b"},
            "logit_bias": {"5": 1.0},
            "speculation": SPECULATION,
        },
    ),
    "/api/chat": (
        OllamaChat(),
        {
            "model": "mini",
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "thinking": "t", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]},
                {"role": "tool", "tool_name": "weather", "content": "rain"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "options": {"num_predict": 2, "temperature": 0.5, "seed": 3, "stop": ["END"], "num_ctx": 64, "repeat_penalty": 1.1},
            "format": {"type": "object"},
            "think": True,
            "keep_alive": "5m",
            "speculation": SPECULATION,
        },
    ),
    "/api/generate": (OllamaChat(), {"model": "mini", "prompt": "a", "system": "s", "raw": False, "options": {"num_predict": 2}}),
    "/api/show": (OllamaChat(), {"model": "mini", "verbose": True}),
}


def deep(depth: int) -> Any:
    value: Any = "end"
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    10**30,
    1e308,
    0.5,
    "",
    "\ud800",
    "x" * 3000,
    [],
    {},
    [[]],
    {"type": "text"},
    {"\ud800": 1},
    deep(150),
]
HOSTILE += [["a"] * 3000, {"type": "image"}, {"$ref": "#"}, [{"type": "object", "text": 5}]]


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of a value in a body."""
    if here:
        yield here
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*here, key))


def with_value(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(body)
    target: Any = changed
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    return changed


@pytest.fixture(scope="module")
def talking(mini_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpClient]:
    engine = AsyncEngine.open(str(write_tool_model(mini_dir, tmp_path_factory.mktemp("talking"))), drafter="ngram", threads=1)
    yield HttpClient(create_app(engine, ServerSettings(served_model_name="mini")))
    asyncio.run(engine.close())


@pytest.mark.parametrize("path", BODIES)
def test_no_field_value_causes_a_server_error_status(
    talking: HttpClient, monkeypatch: pytest.MonkeyPatch, path: str, seed: int, large_counts: bool, tally: "Counter[str]"
) -> None:
    write_down(monkeypatch, "hello")
    api, body = BODIES[path]
    assert talking.post(path, {**body, "stream": False} if path != "/v1/messages/count_tokens" and path != "/api/show" else body).is_success
    cases = [(place, value) for place in places(body) for value in HOSTILE]
    if not large_counts:
        chosen = np.random.default_rng(seed).choice(len(cases), size=min(25, len(cases)), replace=False)
        cases = [cases[index] for index in chosen]
    for place, value in cases:
        content = json.dumps(with_value(body, place, value)).encode()
        answer = talking.ask("POST", path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, (place, value, answer.text)
        if answer.status_code != 200:
            assert api.message_of(answer.json())
        tally["bodies that no client sends"] += 1


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"\xff\xfe", b"[" * 50_000, b'{"model": NaN}', b'{"model":' * 900 + b"1" + b"}" * 900],
)
def test_malformed_request_body_is_status_400(talking: HttpClient, path: str, body: bytes) -> None:
    answer = talking.ask("POST", path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert BODIES[path][0].message_of(answer.json())


@pytest.mark.parametrize("depth", [150, 500, 900, 940, 980])
def test_deeply_nested_json_body_causes_no_server_error(talking: HttpClient, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    write_down(monkeypatch, "hello")
    bodies = {
        "/v1/messages": ("messages", 1, "content", 0, "input", "city"),
        "/v1/responses": ("metadata", "a"),
        "/api/chat": ("format", "type"),
    }
    for path, place in bodies.items():
        text = json.dumps(with_value(BODIES[path][1], place, "HERE")).replace('"HERE"', '{"a":' * depth + "1" + "}" * depth)
        answer = talking.ask("POST", path, content=text.encode(), headers={"Content-Type": "application/json"})
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
