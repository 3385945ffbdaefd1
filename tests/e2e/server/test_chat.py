"""`/v1/chat/completions`: the engine's output in OpenAI's format, complete or streamed."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from harness.http_client import HttpClient
from paceline import AsyncEngine
from paceline.speculation.draft_length.policy import FixedDraftLength

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "I need a taxi to the airport."}]
GREEDY = {"model": "mini", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
SAMPLED = {"model": "mini", "messages": MESSAGES, "temperature": 0.9, "seed": 7, "max_tokens": 24}


def joined(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def reasons(events: list[dict[str, Any]], index: int = 0) -> list[str]:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


def test_chat_answer_has_the_text_and_usage_of_the_engine(client: HttpClient, engine: AsyncEngine) -> None:
    answer = client.json(PATH, GREEDY)
    input_processor = engine.loaded.input_processor
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "mini"
    assert answer["system_fingerprint"].endswith("-exact")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"], "refusal": None}
    assert choice["message"]["content"]
    assert choice["finish_reason"] in ("stop", "length")
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(input_processor.chat_token_ids(MESSAGES))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert answer["speculation"]["num_emitted_tokens"] == usage["completion_tokens"]


VARIANTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.3, "seed": 4, "n": 3, "top_k": 20, "min_p": 0.01},
    {"stop": ["a", "shared"], "max_tokens": 60},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"40": -100, "41": 1.5}},
    {"max_completion_tokens": 5},
    {"response_format": {"type": "json_object"}},
    {"speculation": {"enabled": False}},
]


@pytest.mark.parametrize("more", VARIANTS, ids=json.dumps)
def test_streamed_chat_answer_equals_the_whole_one(client: HttpClient, more: dict[str, Any]) -> None:
    fields = {**GREEDY, **more}
    whole = client.json(PATH, fields)
    events = client.events(PATH, {**fields, "stream_options": {"include_usage": True}})
    for index, choice in enumerate(whole["choices"]):
        assert choice["index"] == index
        assert joined(events, index) == choice["message"]["content"]
        assert reasons(events, index) == [choice["finish_reason"]]
    *chunks, last = events
    assert last["choices"] == []
    uncached = {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert {name: last["usage"][name] for name in uncached} == {name: whole["usage"][name] for name in uncached}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in events}) == 1


def test_chat_stream_begins_with_the_role_and_has_no_usage_by_default(client: HttpClient) -> None:
    first, *others = client.events(PATH, GREEDY)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in choice["delta"] for event in others for choice in event["choices"])
    assert all("usage" not in event for event in (first, *others))


def test_chat_samples_differ_and_are_reproducible_by_seed(client: HttpClient) -> None:
    fields = {**SAMPLED, "n": 3}
    texts = [[choice["message"]["content"] for choice in client.json(PATH, fields)["choices"]] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    negative = [client.json(PATH, {**SAMPLED, "seed": -5})["choices"] for _ in range(2)]
    assert negative[0] == negative[1]


def test_chat_logprobs_tokens_join_to_the_answer(client: HttpClient) -> None:
    fields = {**GREEDY, "logprobs": True, "top_logprobs": 2, "max_tokens": 6}
    (choice,) = client.json(PATH, fields)["choices"]
    content = choice["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode().strip() == choice["message"]["content"].strip()
    assert [len(token["top_logprobs"]) for token in content] == [2] * len(content)
    assert all(token["top_logprobs"][0]["logprob"] == token["logprob"] for token in content), "greedy: the best one is taken"
    pieces = [event["choices"][0]["logprobs"] for event in client.events(PATH, fields)]
    assert [token for piece in pieces if piece for token in piece["content"]] == content


def test_chat_logprobs_without_top_logprobs_list_no_alternatives(client: HttpClient) -> None:
    (choice,) = client.json(PATH, {**GREEDY, "logprobs": True, "max_tokens": 2})["choices"]
    assert [token["top_logprobs"] for token in choice["logprobs"]["content"]] == [[], []]


def test_json_schema_response_format_constrains_the_chat_answer(client: HttpClient) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    answer = client.json(PATH, {**GREEDY, "response_format": wanted, "max_tokens": 40})
    assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"age"}


def test_chat_answer_without_max_tokens_may_fill_the_context(short_client: HttpClient, short_engine: AsyncEngine) -> None:
    fields = {"messages": MESSAGES, "temperature": 0, "ignore_eos": True}
    usage = short_client.json(PATH, fields)["usage"]
    assert usage["total_tokens"] == short_engine.loaded.input_processor.max_model_len


def test_content_parts_are_joined_and_developer_role_is_system(client: HttpClient) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    assert client.json(PATH, {**GREEDY, "messages": parts})["choices"] == client.json(PATH, GREEDY)["choices"]
    answers = [
        client.json(PATH, {**GREEDY, "messages": [{"role": role, "content": "Be short."}, *MESSAGES]})["choices"]
        for role in ("developer", "system")
    ]
    assert answers[0] == answers[1]


def test_chat_prediction_is_drafted_and_changes_no_text(client: HttpClient) -> None:
    plain = client.json(PATH, {**GREEDY, "speculation": {"enabled": False}})
    text = plain["choices"][0]["message"]["content"]
    predicted = client.json(PATH, {**GREEDY, "prediction": {"type": "content", "content": [{"type": "text", "text": text}]}})
    assert predicted["choices"] == plain["choices"]
    assert plain["speculation"]["num_draft_tokens"] == 0
    assert plain["speculation"]["plain_steps"] == plain["speculation"]["steps"]


def test_chat_answer_contains_token_origins_on_request(client: HttpClient) -> None:
    fields = {**GREEDY, "speculation": {"origins": True, "drafter": "ngram", "num_speculative_tokens": 3}}
    answer = client.json(PATH, fields)
    stats = answer["speculation"]
    assert len(stats["token_ids"][0]) == len(stats["origins"][0]) == answer["usage"]["completion_tokens"]
    assert stats["origins"][0].count("accepted") == stats["num_accepted_tokens"]
    assert stats["num_emitted_tokens"] == stats["num_accepted_tokens"] + stats["num_bonus_tokens"]
    pieces = [event["speculation"]["token_ids"] for event in client.events(PATH, fields) if "speculation" in event]
    assert [token_id for piece in pieces for token_id in piece] == stats["token_ids"][0]
    assert "origins" not in client.json(PATH, GREEDY)["speculation"]


def test_chat_answer_contains_draft_trees_on_request(client: HttpClient, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.loaded.engine.speculator, "policy", FixedDraftLength(4))  # the same drafts every time, whatever they cost
    told = client.json(PATH, GREEDY)["choices"][0]["message"]["content"]
    predicted = {"prediction": {"type": "content", "content": told}}
    fields = {**GREEDY, **predicted, "speculation": {"trees": True, "drafter": "prediction"}}
    answer = client.json(PATH, fields)
    stats, text = answer["speculation"], answer["choices"][0]["message"]["content"]
    (steps,), (token_ids,), (origins,), (texts,) = (stats[name] for name in ("trees", "token_ids", "origins", "texts"))
    assert "".join(texts).removesuffix("<|im_end|>") == text
    assert [one for step in steps for one in step["token_ids"]] == token_ids
    assert sum(len(step["accepted_nodes"]) for step in steps) == stats["num_accepted_tokens"] == origins.count("accepted") > 0
    for step in steps:
        assert len(step["draft_texts"]) == len(step["draft_token_ids"]) == len(step["parents"]) == len(step["sources"])
        assert (step["skip_reason"] is None) == bool(step["draft_token_ids"])
        assert [step["draft_token_ids"][node - 1] for node in step["accepted_nodes"]] == step["token_ids"][: len(step["accepted_nodes"])]
    events = [event for event in client.events(PATH, fields) if event.get("speculation")]
    assert [one for event in events for one in event["speculation"]["trees"]] == steps
    assert [one for event in events for one in event["speculation"]["texts"]] == texts
    assert all(event["speculation"]["trees"] for event in events), "each event has the steps of its tokens"
    alone = client.json(PATH, {**GREEDY, "speculation": {"origins": True}})["speculation"]
    assert ("trees" in alone, alone["steps"]) == (False, len(alone["origins"][0]) - alone["num_accepted_tokens"])


def test_chat_stream_usage_contains_timing(client: HttpClient) -> None:
    *_, last = client.events(PATH, {**GREEDY, "stream_options": {"include_usage": True}})
    assert last["speculation"]["timing"]["prompt_s"] > 0
    assert last["speculation"]["timing"]["decode_s"] > 0


def test_chat_answer_is_equal_with_ignored_fields_such_as_user(client: HttpClient) -> None:
    more = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "tools": [], "modalities": ["text"]}
    assert client.json(PATH, {**GREEDY, **more})["choices"] == client.json(PATH, GREEDY)["choices"]


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def changed(**fields: Any) -> dict[str, Any]:
    return {**GREEDY, **fields}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (changed(temperatur=1), "temperatur", "unknown_parameter"),
    (changed(temperature="hot"), "temperature", "invalid_value"),
    (changed(temperature=-1), "temperature", ""),
    (changed(top_p=0), "top_p", ""),
    (changed(max_tokens=0), "max_tokens", ""),
    (changed(max_completion_tokens=0), "max_completion_tokens", ""),
    (changed(max_tokens=True), "max_tokens", "invalid_value"),
    (changed(n=2), "n", ""),
    (changed(seed=2**64), "seed", "invalid_value"),
    (changed(logit_bias={"a": 1}), "logit_bias", "invalid_value"),
    (changed(logit_bias={"10000000": 1}), "logit_bias", ""),
    (changed(top_logprobs=3), "top_logprobs", "invalid_value"),
    (changed(logprobs=True, top_logprobs=21), "top_logprobs", ""),
    (changed(speculation={"enabled": "no"}), "speculation.enabled", "invalid_value"),
    (changed(speculation={"drafters": 1}), "speculation.drafters", "unknown_parameter"),
    (changed(speculation={"drafter": "medusa"}), "speculation.drafter", ""),
    (changed(speculation={"num_speculative_tokens": 1000}), "speculation.num_speculative_tokens", ""),
    (changed(tools=[{"type": "function"}]), "tools[0].function", "missing_required_parameter"),
    (changed(tool_choice="required"), "tool_choice", ""),
    (changed(modalities=["text", "audio"]), "modalities", "unsupported_parameter"),
    (changed(audio={"voice": "a"}), "audio", "unsupported_parameter"),
    (changed(response_format={"type": "xml"}), "response_format.type", "invalid_value"),
    (changed(response_format={"type": "json_schema", "json_schema": {"name": "a"}}), "response_format", "invalid_value"),
    (changed(response_format={"type": "json_schema", "json_schema": {"schema": {"type": 7}}}), "response_format", ""),
    (changed(messages=[]), "messages", ""),
    (changed(messages="hello"), "messages", "invalid_value"),
    (changed(messages=[{"role": "king", "content": "a"}]), "messages[0].role", "invalid_value"),
    (changed(messages=[{"role": "user"}]), "messages[0].content", "missing_required_parameter"),
    (changed(messages=[*MESSAGES, {"role": "assistant", "content": "a", "tool_calls": [{}]}]), "messages[1].tool_calls[0].function", ""),
    (
        changed(messages=[{"role": "user", "content": [IMAGE]}]),
        "messages[0].content[0].image_url",
        "unsupported_parameter",
    ),
    (changed(messages=[{"role": "user", "content": "a " * 5000}]), "messages", "context_length_exceeded"),
    ({"model": "mini"}, "messages", "missing_required_parameter"),
]


@pytest.mark.parametrize(("fields", "name", "code"), REFUSED, ids=[f"{name}-{place}" for place, (_, name, _) in enumerate(REFUSED)])
def test_invalid_chat_field_is_named_in_the_error(client: HttpClient, fields: dict[str, Any], name: str, code: str) -> None:
    for is_streamed in (False, True):
        error = client.refusal(PATH, {**fields, "stream": is_streamed})
        assert (error["param"], error["type"]) == (name, "invalid_request_error")
        assert error["message"]
        if code:
            assert error["code"] == code


def test_unknown_model_in_a_chat_request_is_status_404(client: HttpClient, served: Callable[..., HttpClient]) -> None:
    error = client.refusal(PATH, changed(model="gpt-5"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    own = served(served_model_name="owner/mine")
    assert own.json(PATH, changed(model="owner/mine"))["model"] == "owner/mine"
    assert own.get("/v1/models/owner/mine").json()["id"] == "owner/mine"
