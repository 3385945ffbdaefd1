"""Untrusted schemas: one that takes minutes to compile costs its sender seconds and other requests nothing."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from harness.http_client import HttpClient
from paceline import AsyncEngine, RequestError
from paceline.sampling.grammars.compile_sandbox import CompileSandbox

CHAT = "/v1/chat/completions"
ENDLESS: list[dict[str, Any]] = [
    {"type": "integer", "multipleOf": 999983},
    {"type": "string", "allOf": [{"pattern": f"a{{{count}}}.*b"} for count in range(1, 300)]},
]


def asking(schema: dict[str, Any]) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0, "response_format": wanted}


@pytest.fixture
def served_in(served: Callable[..., HttpClient], engine: AsyncEngine) -> Callable[[float], HttpClient]:
    return lambda seconds: served(grammar_timeout_s=seconds)


@pytest.mark.parametrize("schema", ENDLESS, ids=["multipleOf", "patterns"])
def test_schema_that_compiles_too_long_is_refused(served_in: Callable[[float], HttpClient], schema: dict[str, Any]) -> None:
    error = served_in(0.7).refusal(CHAT, asking(schema))
    assert (error["param"], "longer than 0.7 s" in error["message"]) == ("response_format", True)


def test_slow_schema_compilation_delays_other_schemas_by_seconds_at_most(served_in: Callable[[float], HttpClient]) -> None:
    client = served_in(1.0)
    known = {"type": "object", "properties": {"known": {"type": "boolean"}}, "required": ["known"], "additionalProperties": False}
    expected = client.json(CHAT, asking(known))["choices"]
    hostile = threading.Thread(target=client.refusal, args=(CHAT, asking(ENDLESS[0])))
    hostile.start()
    try:
        time.sleep(0.3)
        assert client.json(CHAT, asking(known))["choices"] == expected
        assert hostile.is_alive(), "a known schema does not even wait for it"
        client.json(CHAT, asking({**known, "title": "new"}))
    finally:
        hostile.join(30)


def test_busy_grammar_compiler_is_status_503_with_retry_after(client: HttpClient, engine: AsyncEngine) -> None:
    sandbox = engine.loaded.input_processor.grammar_compiler.sandbox = CompileSandbox(0.02)
    with sandbox._lock:
        answer = client.post(CHAT, asking({"title": "one that nobody asked for before"}))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "grammar_busy")
    assert int(answer.headers["retry-after"]) > 0


def test_requests_with_the_same_grammar_share_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(CompileSandbox, "_compile", lambda _, text: compiled.append(text))
    sandbox = CompileSandbox(5.0)
    for text in ("a", "a", "b", "a"):
        sandbox.check_grammar(text)
    assert compiled == ["a", "b"]


def test_grammar_that_needs_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.sampling.grammars.compile_sandbox.MAX_MEMORY_BYTES", 1 << 20)
    with pytest.raises(RequestError, match="MB"):
        CompileSandbox(30.0).check_grammar('{"grammars": [{"json_schema": {"type": "object"}}]}')


def test_closing_the_engine_ends_waiting_grammar_compilations() -> None:
    """A thread that waits holds the end of the process up, and one turn after the other may take a minute."""
    sandbox, outcomes = CompileSandbox(60.0), list[str | None]()

    def ask(number: int) -> None:
        with pytest.raises(RequestError) as caught:
            sandbox.check_grammar(library_json({**ENDLESS[0], "title": str(number)}))
        outcomes.append(caught.value.code)

    waiting = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in waiting:
        thread.start()
    while sandbox.isolated.pid is None:
        time.sleep(0.01)
    sandbox.close()
    for thread in waiting:
        thread.join(20)
    assert outcomes == ["grammar_busy"] * 3


def library_json(schema: dict[str, Any]) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def nested(depth: int) -> bytes:
    """The JSON of a request with a schema so deep, which Python's own encoder cannot write."""
    schema = '{"properties": {"a": ' * depth + "{}" + "}}" * depth
    return json.dumps(asking({"place": 0})).replace('{"place": 0}', schema).encode()


def test_too_deeply_nested_json_schema_is_status_400(client: HttpClient) -> None:
    """Also where it can be read, and not be written again."""
    for depth in range(400, 500):
        answer = client.ask("POST", CHAT, content=nested(depth), headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), depth
