"""What holds in every API: one text, streamed or whole, that of `LLM`; errors in its own shape; nothing left out in silence."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.apis import APIS, Spoken
from harness.http_client import HttpClient
from paceline import LLM, SamplingParams

MESSAGES = [{"role": "user", "content": "I need a taxi to the airport."}]
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "I need a taxi."},
    {"role": "assistant", "content": "Where to?"},
    {"role": "user", "content": "To the airport."},
]
SAMPLED = {"temperature": 0.9, "seed": 7, "max_tokens": 16}
NEW = {name: api for name, api in APIS.items() if name != "chat"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("mini", drafter="none", threads=1) as opened:
        yield opened


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> Spoken:
    return APIS[request.param]


@pytest.fixture(params=NEW)
def new_api(request: pytest.FixtureRequest) -> Spoken:
    return NEW[request.param]


def stopping(llm: LLM) -> dict[str, Any]:
    """Sampling with a stop text that is met in the middle of the answer."""
    output = llm.chat(MESSAGES, SamplingParams(**SAMPLED))
    words = output.text.split(" ")
    return {**SAMPLED, "stop": [words[2][1:] + " " + words[3][:1], "nowhere"]}


SAMPLINGS: dict[str, Callable[[LLM], dict[str, Any]]] = {
    "greedy": lambda _: {"temperature": 0, "max_tokens": 12},
    "sampled": lambda _: {**SAMPLED, "top_k": 30, "top_p": 0.95, "min_p": 0.01},
    "penalties": lambda _: {**SAMPLED, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "stopped": stopping,
    "to its end": lambda _: {"temperature": 0, "max_tokens": 200},
}


@pytest.mark.spread(0.3)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_api_returns_the_engine_text_whole_and_streamed(client: HttpClient, llm: LLM, api: Spoken, name: str) -> None:
    sampling = SAMPLINGS[name](llm)
    output = llm.chat(MESSAGES, SamplingParams(**sampling))
    fields = api.fields(MESSAGES, **sampling)
    whole, events = api.whole(client, fields), api.stream(client, fields)
    assert api.said(whole) == api.streamed(events) == [("text", output.text)]
    assert api.ending(whole) == api.streamed_ending(events)
    assert api.ending(whole)[1:] == (output.usage.prompt_tokens, output.usage.completion_tokens)


def test_every_api_gives_the_engine_text_for_a_conversation(client: HttpClient, llm: LLM, api: Spoken) -> None:
    output = llm.chat(TALK, SamplingParams(**SAMPLED))
    assert api.said(api.whole(client, api.fields(TALK, **SAMPLED))) == [("text", output.text)]


def test_drafts_change_no_api_answer_and_are_reported(client: HttpClient, api: Spoken) -> None:
    fields = api.fields(MESSAGES, **SAMPLED)
    plain = api.whole(client, {**fields, "speculation": {"enabled": False}})
    drafted = {**fields, "speculation": {"origins": True, "drafter": "ngram", "num_speculative_tokens": 3}}
    whole, events = api.whole(client, drafted), api.stream(client, drafted)
    assert api.said(plain) == api.said(whole) == api.streamed(events)
    assert api.speculation(plain)["num_draft_tokens"] == 0
    assert len(api.speculation(whole)["origins"][0]) == api.ending(whole)[2]
    assert api.speculation(whole)["num_emitted_tokens"] == api.speculation(events)["num_emitted_tokens"] == api.ending(whole)[2]
    assert api.speculation(whole)["seed"] == SAMPLED["seed"]


def test_stream_headers_forbid_buffering(client: HttpClient, new_api: Spoken) -> None:
    answer = client.post(new_api.path, {**new_api.fields(MESSAGES, max_tokens=2), "stream": True})
    kind = "application/x-ndjson" if new_api.path.startswith("/api/") else "text/event-stream"
    assert answer.headers["content-type"].startswith(kind)
    assert answer.headers["x-accel-buffering"] == "no"


Served = Callable[..., HttpClient]
ERRORS: list[tuple[str, int, dict[str, Any], dict[str, Any], str]] = [
    ("another model", 404, {}, {"model": "gpt-9"}, "mini"),
    ("an unknown field", 400, {}, {"modell": "mini"}, "did you mean model?"),
    ("too many messages", 400, {"max_messages": 2}, {}, "may have 2"),
    ("too long", 400, {"max_prompt_chars": 9}, {}, "characters > 9 maximum"),
    ("no key", 401, {"api_keys": ("key-of-this-very-test",)}, {}, "x-api-key"),
]


@pytest.mark.parametrize(("status", "settings", "more", "says"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS])
def test_errors_have_the_format_of_the_api(
    served: Served, new_api: Spoken, status: int, settings: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    for is_streamed in (False, True):
        fields = {**new_api.fields(TALK, max_tokens=2), **more, "stream": is_streamed}
        answer = served(**settings).post(new_api.path, fields)
        assert answer.status_code == status, answer.text
        assert says in new_api.message_of(answer.json())


@pytest.mark.parametrize("streams", [False, True])
def test_too_long_prompt_error_has_the_phrases_agents_recognise(client: HttpClient, api: Spoken, streams: bool) -> None:
    for text in ("x " * 3000, "x" * 3_000_000):
        fields = {**api.fields([{"role": "user", "content": text}], max_tokens=2), "stream": streams}
        answer = client.post(api.path, fields)
        assert answer.status_code == 400
        message = api.message_of(answer.json())
        assert re.match(r"prompt is too long: \d{4,} tokens > 2047 maximum", message)
        assert "This model's maximum context length is 2048 tokens" in message
        assert "shorten the prompt" in message


def test_api_key_is_accepted_as_x_api_key_and_bearer_token(served: Served, new_api: Spoken) -> None:
    client = served(api_keys=("key-of-this-very-test",))
    for headers in ({"x-api-key": "key-of-this-very-test"}, {"Authorization": "Bearer key-of-this-very-test"}):
        assert client.post(new_api.path, new_api.fields(MESSAGES, max_tokens=1), headers=headers).status_code == 200


def test_middleware_errors_have_the_format_of_each_api(client: HttpClient, new_api: Spoken) -> None:
    path = new_api.path
    answers = {
        400: client.ask("POST", path, content=b"{", headers={"Content-Type": "application/json"}),
        403: client.post(path, {}, headers={"Host": "evil.example"}),
        404: client.get(f"{path}/nowhere"),
        405: client.get(path),
        415: client.ask("POST", path, content=b"{}", headers={"Content-Type": "text/plain", "Origin": "http://evil.example"}),
    }
    for status, answer in answers.items():
        assert answer.status_code == status
        assert new_api.message_of(answer.json())


def test_failure_within_a_stream_is_its_last_event(served: Served, new_api: Spoken) -> None:
    client = served(request_timeout_s=0.2)
    fields = new_api.fields([{"role": "user", "content": "Hello"}], max_tokens=1900, temperature=1.9, min_tokens=1900)
    if new_api.path == "/api/chat":
        del fields["options"]["min_tokens"]
        fields["options"]["seed"] = 42  # whose answer is 1,900 tokens long
    answer = client.post(new_api.path, {**fields, "stream": True})
    if answer.status_code == 200:
        last = new_api.events(answer.text)[-1]
        text = json.dumps(last["response"]["error"]) if "response" in last else new_api.message_of(last)
    else:
        assert answer.status_code == 504
        text = new_api.message_of(answer.json())
    assert "0.2 s" in text
