"""`/v1/completions`: texts continued as they are, from strings or token ids, one or many."""

import asyncio
import json
from typing import Any

import pytest

from harness.http_client import HttpClient
from paceline import AsyncEngine
from paceline.server.app import create_app
from paceline.server.settings import ServerSettings

PATH = "/v1/completions"
GREEDY = {"model": "mini", "prompt": "The old fisherman", "temperature": 0, "max_tokens": 12}


def joined(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"] if choice["index"] == index)


def ids_of(engine: AsyncEngine, text: str) -> list[int]:
    return engine.loaded.input_processor.prompt_ids(text)


def test_completion_response_has_the_fields_of_openai(client: HttpClient) -> None:
    answer = client.json(PATH, GREEDY)
    assert (answer["object"], answer["model"]) == ("text_completion", "mini")
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert choice["logprobs"] is None
    assert choice["text"]
    assert answer["usage"]["completion_tokens"] <= 12


def test_completion_prompt_may_be_text_token_ids_or_a_list(client: HttpClient, engine: AsyncEngine) -> None:
    texts = ["The old fisherman", "def add(a, b):"]
    alone = [client.json(PATH, {**GREEDY, "prompt": text})["choices"][0]["text"] for text in texts]
    for prompt in (texts, [ids_of(engine, text) for text in texts]):
        choices = client.json(PATH, {**GREEDY, "prompt": prompt})["choices"]
        assert [choice["text"] for choice in choices] == alone
        assert [choice["index"] for choice in choices] == [0, 1]
    assert client.json(PATH, {**GREEDY, "prompt": ids_of(engine, texts[0])})["choices"][0]["text"] == alone[0]


def test_completion_has_16_tokens_by_default(client: HttpClient) -> None:
    fields = {"prompt": "The old fisherman", "temperature": 0, "ignore_eos": True}
    answer = client.json(PATH, fields)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (16, "length")


VARIANTS: list[dict[str, Any]] = [
    {},
    {"prompt": ["The old fisherman", "def add(a, b):", "1 + 1 ="], "temperature": 0.9, "seed": 3, "n": 2},
    {"echo": True},
    {"echo": True, "max_tokens": 0},
    {"logprobs": 3},
    {"echo": True, "logprobs": 2},
    {"echo": True, "logprobs": 1, "max_tokens": 0},
    {"echo": True, "logprobs": 0, "prompt": [[8, 9], [5, 6, 7]], "temperature": 1, "seed": 2, "n": 2},
    {"stop": [" a", "e"], "max_tokens": 40},
    {"prompt": [5, 6, 7], "echo": True, "top_p": 0.9, "temperature": 1, "seed": 1},
]


@pytest.mark.parametrize("more", VARIANTS, ids=json.dumps)
def test_streamed_completion_equals_the_whole_one(client: HttpClient, more: dict[str, Any]) -> None:
    fields = {**GREEDY, **more}
    whole = client.json(PATH, fields)
    events = client.events(PATH, {**fields, "stream_options": {"include_usage": True}})
    for choice in whole["choices"]:
        index = choice["index"]
        pieces = [piece for event in events for piece in event["choices"] if piece["index"] == index]
        assert joined(events, index) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == [choice["finish_reason"]]
        if choice["logprobs"]:
            for name, values in choice["logprobs"].items():
                assert [value for piece in pieces for value in piece["logprobs"][name]] == values
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_completion_echo_returns_the_prompt_and_its_logprobs(client: HttpClient, engine: AsyncEngine) -> None:
    (choice,) = client.json(PATH, {**GREEDY, "echo": True, "logprobs": 2})["choices"]
    (plain,) = client.json(PATH, {**GREEDY, "logprobs": 2})["choices"]
    assert choice["text"] == GREEDY["prompt"] + plain["text"]
    logprobs, num_prompt = choice["logprobs"], len(ids_of(engine, GREEDY["prompt"]))
    assert "".join(logprobs["tokens"]).startswith(GREEDY["prompt"])
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert logprobs[name][num_prompt:] == plain["logprobs"][name]
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
    assert len({len(values) for values in logprobs.values()}) == 1


def test_completion_with_max_tokens_0_only_scores_the_prompt(client: HttpClient, engine: AsyncEngine) -> None:
    fields = {**GREEDY, "prompt": [GREEDY["prompt"], "Once upon"], "echo": True, "logprobs": 1}
    scored, whole = (client.json(PATH, {**fields, "max_tokens": count}) for count in (0, 4))
    assert scored["usage"]["completion_tokens"] == 0
    for one, other in zip(scored["choices"], whole["choices"], strict=True):
        count = len(one["logprobs"]["tokens"])
        assert one["logprobs"]["token_logprobs"] == other["logprobs"]["token_logprobs"][:count]
        assert (one["finish_reason"], other["text"].startswith(one["text"])) == ("length", True)
    assert [choice["text"] for choice in scored["choices"]] == fields["prompt"]


def test_completion_logprobs_spell_incomplete_characters_as_bytes(client: HttpClient, engine: AsyncEngine) -> None:
    (choice,) = client.json(PATH, {"prompt": "\N{SNOWMAN}", "echo": True, "logprobs": 0, "max_tokens": 0})["choices"]
    tokens = choice["logprobs"]["tokens"]
    assert choice["text"] == "\N{SNOWMAN}"
    assert all(token.startswith("bytes:\\x") for token in tokens) or tokens == ["\N{SNOWMAN}"]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"suffix": "end"}, "suffix", "unsupported_parameter"),
    ({"best_of": 3}, "best_of", "unsupported_parameter"),
    ({"logprobs": 21}, "logprobs", ""),
    ({"max_tokens": -2}, "max_tokens", ""),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": ""}, "prompt", ""),
    ({"prompt": [[]]}, "prompt", ""),
    ({"prompt": ["a"] * 65}, "prompt", "invalid_value"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_value"),
    ({"prompt": [10_000_000]}, "prompt", ""),
    ({"prompt": {"a": 1}}, "prompt", "invalid_value"),
    ({"prompt": [1] * 2048}, "prompt", "context_length_exceeded"),
    ({"prompt": "a", "n": 17, "temperature": 1}, "n", "invalid_value"),
    ({"tools": [{}]}, "tools", "unsupported_parameter"),
]


@pytest.mark.parametrize(("more", "name", "code"), REFUSED, ids=[f"{name}-{place}" for place, (_, name, _) in enumerate(REFUSED)])
def test_invalid_completion_field_is_named_in_the_error(client: HttpClient, more: dict[str, Any], name: str, code: str) -> None:
    error = client.refusal(PATH, {**GREEDY, **more})
    assert error["param"].split("[")[0] == name
    assert not code or error["code"] == code


def test_models_endpoint_lists_the_model_and_finds_it_by_name(client: HttpClient, engine: AsyncEngine) -> None:
    (listed,) = client.get("/v1/models").json()["data"]
    assert (listed["id"], listed["object"], listed["max_model_len"]) == ("mini", "model", engine.loaded.input_processor.max_model_len)
    assert listed["drafters"] == ["ngram", "prediction"]
    assert client.get("/v1/models/mini").json() == listed
    assert client.get("/v1/models/other").status_code == 404


def test_tokenize_and_detokenize_endpoints_are_inverse(client: HttpClient, engine: AsyncEngine) -> None:
    answer = client.json("/tokenize", {"prompt": "The old fisherman"})
    assert answer["tokens"] == ids_of(engine, "The old fisherman")
    assert answer["count"] == len(answer["tokens"])
    assert client.json("/detokenize", {"tokens": answer["tokens"]}) == {"prompt": "The old fisherman", "content": "The old fisherman"}
    messages = [{"role": "user", "content": "Hello"}]
    assert client.json("/tokenize", {"messages": messages})["tokens"] == engine.loaded.input_processor.chat_token_ids(messages)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert client.json("/tokenize", {"messages": parts}) == client.json("/tokenize", {"messages": messages})
    assert client.refusal("/tokenize", {"prompt": "a", "messages": messages})["param"] == "prompt"
    assert client.refusal("/tokenize", {"messages": []})["param"] == "messages"
    assert client.refusal("/detokenize", {"tokens": [-1]})["param"] == "tokens"
    assert client.refusal("/detokenize", {"tokens": [10**9]})["param"] == "tokens"


def test_completion_contains_draft_trees_on_request(client: HttpClient) -> None:
    fields = {**GREEDY, "speculation": {"trees": True}}
    (trees,) = client.json(PATH, fields)["speculation"]["trees"]
    (token_ids,) = client.json(PATH, fields)["speculation"]["token_ids"]
    assert [one for tree in trees for one in tree["token_ids"]] == token_ids
    events = client.events(PATH, fields)
    assert [one for event in events for tree in event["speculation"]["trees"] for one in tree["token_ids"]] == token_ids


def test_prompt_of_full_context_length_is_only_accepted_with_max_tokens_0() -> None:
    engine = AsyncEngine.open("mini", drafter="ngram", max_model_len=64, max_num_seqs=2, threads=1)
    client = HttpClient(create_app(engine, ServerSettings()))
    longer = (ids_of(engine, "The old fisherman ") * 30)[:65]
    scored = {"temperature": 0, "max_tokens": 0, "echo": True, "logprobs": 1}
    whole, shorter = (client.json(PATH, {**scored, "prompt": longer[:length]})["choices"][0] for length in (64, 63))
    assert len(whole["logprobs"]["tokens"]) == 64
    assert whole["logprobs"]["token_logprobs"][:63] == shorter["logprobs"]["token_logprobs"]
    assert whole["finish_reason"] == "length"
    streamed = client.events(PATH, {**scored, "prompt": longer[:64]})
    assert [value for event in streamed for value in event["choices"][0]["logprobs"]["token_logprobs"]] == whole["logprobs"][
        "token_logprobs"
    ]
    for fields in ({**scored, "prompt": longer}, {**scored, "max_tokens": 2, "prompt": longer[:64]}, {"prompt": longer[:64]}):
        assert client.refusal(PATH, fields)["code"] == "context_length_exceeded"
    asyncio.run(engine.close())


def test_completion_names_the_requested_drafter(client: HttpClient) -> None:
    asked: list[tuple[dict[str, Any], str]] = [({}, "prediction+ngram"), ({"drafter": "ngram"}, "ngram"), ({"enabled": False}, "none")]
    for speculation, name in asked:
        assert client.json(PATH, {**GREEDY, "speculation": speculation})["speculation"]["drafter"] == name
