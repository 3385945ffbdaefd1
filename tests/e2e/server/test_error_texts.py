"""Error texts: the field, its value, what is allowed, and the limits that are really applied."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from harness.apis import Chat, Messages, OllamaChat, Responses, Spoken
from harness.http_client import HttpClient
from paceline import AsyncEngine
from paceline.server.app import create_app
from paceline.server.settings import ServerSettings

TURNS = [{"role": "user", "content": "Hello"}]
HALF = "\ud83d"
CHAT, MESSAGES, RESPONSES, OLLAMA = Chat(), Messages(), Responses(), OllamaChat()


class Completions(Chat):
    """`/v1/completions`."""

    path = "/v1/completions"

    def fields(self, messages: Any, **sampling: Any) -> dict[str, Any]:
        return {"prompt": "Hello", **sampling}


COMPLETIONS = Completions()


def refusal(client: HttpClient, api: Spoken, body: Any) -> tuple[str, str | None]:
    """The text of an error and the field that it names, if its API has a place for that."""
    answer = client.ask("POST", api.path, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return api.message_of(answer.json()), error.get("param") if isinstance(error, dict) else None


def result_of(content: Any) -> list[dict[str, Any]]:
    """A conversation with the result of a call, of Anthropic's."""
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    return [*TURNS, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


SAID: list[tuple[Spoken, dict[str, Any], str]] = [
    (CHAT, {"stop": 5}, "stop is 5: send a string or a list"),
    (CHAT, {"stop": ["a", None]}, "stop[1] is null: send a string"),
    (CHAT, {"temperature": "x" * 99}, f'temperature is "{"x" * 39}…": send a number'),
    (CHAT, {"max_tokens": 1.5}, "max_tokens is 1.5: send a whole number"),
    (CHAT, {"temperature": math.nan}, "temperature is NaN: send a finite number"),
    (CHAT, {"stream": "yes"}, 'stream is "yes": send true or false'),
    (CHAT, {"messages": {}}, "messages is an object: send a list"),
    (CHAT, {"messages": [5]}, "messages[0] is 5: send an object"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function is missing: send it"),
    (
        CHAT,
        {"response_format": {"type": "xml"}},
        'response_format.type is "xml": send text, json_object, json_schema, regex, choice or grammar',
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a", "contenn": 1}]},
        "messages[0].contenn is no parameter of this request: did you mean content?",
    ),
    (CHAT, {"grammar": 'root ::= "a"', "json_schema": {"type": "object"}}, "json_schema and grammar both hold the answer to a form"),
    (CHAT, {"grammar": 'root ::= "a"', "json_schema": ""}, "grammar is not served: it is GBNF"),
    (
        CHAT,
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice.allowed_tools has no tools",
    ),
    (COMPLETIONS, {"prompt": [[1], [2, "a"]]}, 'prompt[1][1] is "a": send a whole number'),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt[1] is 5: send a string"),
    (RESPONSES, {"tool_choice": "all"}, 'tool_choice is "all": send one of "none", "auto" or "required" or an object'),
    (OLLAMA, {"think": "much"}, 'think is "much": send true or false or one of "low", "medium" or "high"'),
    (MESSAGES, {"messages": [{"role": "user", "content": []}]}, "messages[0].content is empty: send a text"),
    (MESSAGES, {"messages": result_of([{"type": "image"}])}, 'messages[2].content[0].content[0].type is "image": send "text"'),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include is not served: message.output_text.logprobs is in the answers of"),
    (RESPONSES, {"input": [{"type": "file"}]}, 'input[0].type is not served: it is "file"; send one of message, function_call'),
    (
        CHAT,
        {"speculation": {"num_speculative_tokens": 65}},
        "speculation.num_speculative_tokens is 65: it must be a whole number in [0, 64]",
    ),
]


@pytest.mark.parametrize(("api", "more", "text"), SAID, ids=[f"{case[0].path} {at}" for at, case in enumerate(SAID)])
def test_request_error_names_field_value_and_allowed_value(client: HttpClient, api: Spoken, more: dict[str, Any], text: str) -> None:
    limit = {} if api is CHAT else {"max_tokens": 4}
    message, name = refusal(client, api, {**api.fields(TURNS, **limit), **more})
    assert text in message
    assert name is None or message.startswith(name)
    assert "None" not in message


def test_missing_model_name_error_names_the_path_that_lists_models(client: HttpClient) -> None:
    for path in ("/api/generate", "/api/chat"):
        answer = client.post(path, {})
        assert (answer.status_code, answer.json()["error"]) == (400, "model is missing: send one of the names that GET /v1/models lists")


HALVES: list[tuple[Spoken, dict[str, Any], str]] = [
    (CHAT, {"messages": [*TURNS, {"role": "user", "content": f"a{HALF}"}]}, "messages[1].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]}, "messages[0].content[0].text"),
    (CHAT, {"stop": ["a", HALF]}, "stop[1]"),
    (COMPLETIONS, {"prompt": HALF}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", HALF]}, "prompt[1]"),
    (RESPONSES, {"input": HALF}, "input"),
    (RESPONSES, {"input": [{"role": "user", "content": HALF}]}, "input[0].content"),
    (RESPONSES, {"instructions": HALF}, "instructions"),
    (MESSAGES, {"system": HALF}, "system"),
    (MESSAGES, {"messages": result_of(HALF)}, "messages[2].content[0].content"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {"properties": {HALF: {}}}}]}, "tools[0].input_schema.properties"),
    (OLLAMA, {"messages": [{"role": "user", "content": HALF}]}, "messages[0].content"),
    (OLLAMA, {"options": {"stop": HALF}}, "options.stop"),
]


@pytest.mark.parametrize(("api", "more", "place"), HALVES, ids=[f"{case[0].path} {case[2]}" for case in HALVES])
def test_half_surrogate_pair_in_a_text_is_refused_with_its_field(client: HttpClient, api: Spoken, more: dict[str, Any], place: str) -> None:
    message, name = refusal(client, api, {**api.fields(TURNS, max_tokens=2), **more})
    assert message.startswith(f"{place} holds half of a surrogate pair")
    assert name in (None, place)


NUMBERS: dict[Spoken, tuple[str, ...]] = {
    CHAT: (
        *("temperature", "top_p", "top_k", "min_p", "n", "max_tokens", "max_completion_tokens", "min_tokens", "seed", "top_logprobs"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "speculation.num_speculative_tokens"),
    ),
    COMPLETIONS: (
        *("temperature", "top_p", "top_k", "min_p", "n", "max_tokens", "min_tokens", "seed", "logprobs"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "speculation.num_speculative_tokens"),
    ),
    MESSAGES: (
        *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "speculation.num_speculative_tokens"),
    ),
    RESPONSES: (
        *("temperature", "top_p", "top_k", "min_p", "max_output_tokens", "min_tokens", "seed"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "speculation.num_speculative_tokens"),
    ),
    OLLAMA: (
        *(f"options.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "num_predict", "seed", "repeat_penalty")),
        *("options.frequency_penalty", "options.presence_penalty", "top_logprobs", "speculation.num_speculative_tokens"),
    ),
}
CASES = [(api, name) for api, names in NUMBERS.items() for name in names]
WHOLE = re.compile("tokens|top_k|top_logprobs|^logprobs|^n$|seed|num_|max_")
LIMITS = re.compile(r"in ([\[(])([-+.e\d]+), ([-+.e\d]+)\]")


def body_with(api: Spoken, name: str, value: float) -> dict[str, Any]:
    limit = {} if "max_" in name and "draft" not in name else {"max_tokens": 2}
    body = {**api.fields(TURNS, **limit), "stream": False}
    if name == "top_logprobs":
        body["logprobs"] = True
    *outer, last = name.split(".")
    target: dict[str, Any] = body.setdefault(outer[0], {}) if outer else body
    target[last] = value
    return body


@pytest.mark.spread(0.3)
@pytest.mark.parametrize(("api", "name"), CASES, ids=[f"{api.path} {name}" for api, name in CASES])
def test_number_limits_in_error_messages_are_the_enforced_ones(short_client: HttpClient, api: Spoken, name: str) -> None:
    """Both are taken, and the next number beyond each of them is refused with the same words."""
    is_whole = bool(WHOLE.search(name.rpartition(".")[2]))
    number: Callable[[str], float] = int if is_whole else float
    message, _ = refusal(short_client, api, body_with(api, name, -(10**30)))
    found = LIMITS.search(message)
    assert found is not None, message
    low, high = number(found[2]), number(found[3])
    below, above = (low - 1, high + 1) if is_whole else (math.nextafter(low, -math.inf), math.nextafter(high, math.inf))
    for beyond in (below, above, 10**30):
        if beyond == 0 and "num_predict" in name:
            continue  # what the context holds
        if beyond == -1 and ("num_predict" in name or "tokens" in name or name == "options.seed"):
            continue  # what the context holds; a fresh one
        assert LIMITS.search(refusal(short_client, api, body_with(api, name, beyond))[0]), beyond
    for limit in (low if found[1] == "[" else math.ulp(0.0), high):
        answer = short_client.post(api.path, body_with(api, name, limit))
        assert answer.status_code == 200, (limit, answer.text)
    if found[1] == "(":
        refusal(short_client, api, body_with(api, name, low))


def test_token_id_error_names_the_vocabulary_of_this_model(client: HttpClient, engine: AsyncEngine) -> None:
    last = engine.loaded.input_processor.vocab_size - 1
    for token_id in (-1, last + 1, 2**31 - 1, 2**31):
        for more in (
            {"stop_token_ids": [token_id]},
            {"logit_bias": {str(token_id): 1}} if token_id > 0 else {"stop_token_ids": [token_id]},
        ):
            message, _ = refusal(client, CHAT, {**CHAT.fields(TURNS), **more})
            assert not (found := LIMITS.search(message)) or int(found[3]) == last
    client.json(CHAT.path, {**CHAT.fields(TURNS, max_tokens=1), "stop_token_ids": [last]})


def test_too_many_prompts_or_samples_error_names_prompt_or_n(served: Callable[..., HttpClient]) -> None:
    client = served(max_queue=0)
    for more, name in (({"prompt": ["a"] * 9}, "prompt"), ({"prompt": "a", "n": 9}, "n"), ({"prompt": ["a"] * 3, "n": 3}, "n")):
        assert refusal(client, COMPLETIONS, more)[1] == name


def test_prediction_without_prediction_drafter_names_the_option() -> None:
    import asyncio

    engine = AsyncEngine.open("mini", drafter="ngram", threads=1)
    client = HttpClient(create_app(engine, ServerSettings()))
    for api, prediction in ((COMPLETIONS, "a"), (CHAT, {"type": "content", "content": "a"})):
        message, name = refusal(client, api, {**api.fields(TURNS), "prediction": prediction})
        assert (name, "--drafter prediction" in message, "=" in message) == ("prediction", True, False)
    asyncio.run(engine.close())


def test_wrong_http_method_error_names_the_allowed_one(client: HttpClient) -> None:
    for api in (CHAT, MESSAGES, RESPONSES, OLLAMA):
        answer = client.get(api.path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert api.message_of(answer.json()).startswith("this path takes POST")
