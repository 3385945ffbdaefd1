"""Official clients of the APIs that the server speaks, in an environment of their own (make test-clients), against a real process."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from clients.run_foreign import run_foreign
from harness.server_process import Server
from harness.tool_model import write_tool_model
from paceline import LLM, RequestOutput, SamplingParams

MESSAGES = [{"role": "user", "content": "I need a taxi to the airport."}]
SAMPLING: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 24}
RESPONSE_EVENTS = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
RESPONSE_EVENTS += ["content_part.done", "output_item.done"]
CALL_EVENTS = ["created", "in_progress", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
CALL_EVENTS += ["output_item.done", "completed"]
MESSAGE_EVENTS = ["message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"]


@pytest.fixture(scope="module")
def model(mini_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_model(mini_dir, tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with closing(Server("--model", str(model), "--served-model-name", "mini", "--drafter", "ngram")) as started:
        yield started


@pytest.fixture(scope="module")
def expected(model: Path) -> RequestOutput:
    with LLM(str(model), drafter="none", threads=1) as llm:
        return llm.chat(MESSAGES, SamplingParams(**SAMPLING))


@pytest.fixture
def asked(clients: Path, server: Server, tally: "Counter[str]", request: pytest.FixtureRequest) -> dict[str, Any]:
    name = str(request.param)
    python = clients / "servers" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no environment {python.parent.parent}")
    question = json.dumps({"messages": MESSAGES, **SAMPLING})
    found: dict[str, Any] = json.loads(run_foreign(clients / "servers", "ask_server.py", name, server.url, question))
    tally["APIs whose official clients understand the server"] += 1
    return found


def once(kinds: list[str]) -> list[str]:
    """The same list without consecutive duplicates."""
    return [kind for index, kind in enumerate(kinds) if index == 0 or kind != kinds[index - 1]]


def check(found: dict[str, Any], expected: RequestOutput) -> None:
    """Properties that hold for every client."""
    assert found["whole"] == found["streamed"] == expected.text
    assert found["usage"] == found["streamed_usage"] == [expected.usage.prompt_tokens, expected.usage.completion_tokens]
    assert set(found["json"]) == {"age"}
    for name in ("error", "streamed_error", "stored", "not_found"):
        if name in found:
            status, text = found[name]
            assert status == (404 if name == "not_found" else 400) or (status, name) == (-1, "streamed_error")
            assert {"error": "temperatur", "streamed_error": "", "stored": "previous_response_id", "not_found": "mini"}[name] in text
    if "call" in found:
        name, arguments, _ = found["call"]
        assert name == "weather"
        assert set(arguments) == {"city"}
        assert found.get("call_streamed", True)


@pytest.mark.parametrize("asked", ["responses"], indirect=True)
def test_openai_client_reads_responses(asked: dict[str, Any], expected: RequestOutput) -> None:
    check(asked, expected)
    assert once(asked["events"])[:-1] == [f"response.{kind}" for kind in RESPONSE_EVENTS]
    assert asked["events"][-1] in ("response.completed", "response.incomplete")
    assert once(asked["call_events"]) == [f"response.{kind}" for kind in CALL_EVENTS]
    assert (asked["drafter"], asked["call"][2]) == ("ngram", "completed")


@pytest.mark.parametrize("asked", ["messages"], indirect=True)
def test_anthropic_client_reads_messages(asked: dict[str, Any], expected: RequestOutput) -> None:
    check(asked, expected)
    assert once(asked["raw_events"]) == MESSAGE_EVENTS
    assert [kind for kind in once(asked["events"]) if kind in MESSAGE_EVENTS][-1] == "message_stop"
    assert asked["counted"] == expected.usage.prompt_tokens
    assert asked["stopped"] == ["stop_sequence", True]
    assert (asked["drafter"], asked["call"][2], asked["models"]) == ("ngram", "tool_use", ["mini"])


@pytest.mark.parametrize("asked", ["ollama"], indirect=True)
def test_ollama_client_reads_chat_and_generate(asked: dict[str, Any], expected: RequestOutput) -> None:
    check(asked, expected)
    assert asked["done"] == [False] * (len(asked["done"]) - 1) + [True]
    assert asked["prompted"] == expected.text
    assert asked["raw"] == [True, 6]
    assert asked["logprobs"] == expected.usage.completion_tokens
    assert asked["models"] == [["mini"], ["mini"]]
    assert (asked["context"], asked["capabilities"], asked["loaded"]) == (2048, ["completion", "tools", "thinking"], "load")
