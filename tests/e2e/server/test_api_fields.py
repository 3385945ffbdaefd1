"""Fields of Anthropic's messages, OpenAI's responses and Ollama's API: what each does, what is taken and not used, what is refused."""

import json
from typing import Any

import pytest

from harness.apis import Messages, OllamaChat, Responses, Spoken
from harness.http_client import HttpClient
from paceline import AsyncEngine
from paceline.server.fields import IGNORED_HEADER
from paceline.tokenizer.tokenizer import Tokenizer

TURNS = [{"role": "user", "content": "I need a taxi to the airport."}]
GREEDY = {"temperature": 0, "max_tokens": 8}
MESSAGES, RESPONSES, OLLAMA = Messages(), Responses(), OllamaChat()
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"], "additionalProperties": False}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "f", "parameters": {}}
IMAGE = {"type": "image", "source": {}}


def asked(api: Spoken, **more: Any) -> dict[str, Any]:
    return {**api.fields(TURNS, **GREEDY), **more}


def turns(*contents: Any) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def options(**more: Any) -> dict[str, Any]:
    return {"options": {**asked(OLLAMA)["options"], **more}}


REFUSED: list[tuple[Spoken, dict[str, Any], str]] = [
    (MESSAGES, {"temperature": -1}, "temperature"),
    (MESSAGES, {"temperature": "hot"}, "temperature"),
    (MESSAGES, {"max_tokens": 0}, "max_tokens"),
    (MESSAGES, {"top_p": 0}, "top_p"),
    (MESSAGES, {"seed": 2**64}, "seed"),
    (MESSAGES, {"stop_sequences": ["a"] * 17}, "stop_sequences"),
    (MESSAGES, {"system": [IMAGE]}, "system[0].type"),
    (MESSAGES, {"messages": []}, "messages"),
    (MESSAGES, {"messages": turns([IMAGE])}, "messages[0].content[0].type"),
    (MESSAGES, {"messages": turns([{"type": "document"}])}, "messages[0].content[0].type"),
    (MESSAGES, {"messages": turns([{"type": "tool_use", "id": "a", "name": "f", "input": {}}])}, "messages[0].content[0].type"),
    (MESSAGES, {"messages": turns([{"type": "text", "text": 1}])}, "messages[0].content[0].text"),
    (MESSAGES, {"messages": turns([{"type": "thinking", "thinking": "a", "thinkingg": 1}])}, "messages[0].content[0].thinkingg"),
    (MESSAGES, {"messages": turns("a", [{"type": "tool_use", "id": "a", "name": "f", "input": {}}])}, "messages"),
    (MESSAGES, {"messages": turns("a " * 5000)}, "prompt is too long"),
    (MESSAGES, {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    (MESSAGES, {"tools": [{**TOOL, "name": "no name"}]}, "tools[0].name"),
    (MESSAGES, {"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    (MESSAGES, {"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
    (MESSAGES, {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
    (MESSAGES, {"thinking": {"type": "much"}}, "thinking.type"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {"type": 7}}}}, "output_config.format"),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits"),
    (MESSAGES, {"mcp_servers": [{"url": "a"}]}, "mcp_servers"),
    (MESSAGES, {"container": "a"}, "container"),
    (MESSAGES, {"speculation": {"drafter": "medusa"}}, "speculation"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"conversation": "c"}, "conversation"),
    (RESPONSES, {"prompt": {"id": "p"}}, "prompt"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"truncation": "auto"}, "truncation"),
    (RESPONSES, {"top_logprobs": 2}, "top_logprobs"),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 7}}}}, "text.format"),
    (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format.type"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    (RESPONSES, {"input": "a " * 5000}, "input"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    (RESPONSES, {"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type"),
    (RESPONSES, {"tool_choice": {"type": "web_search"}}, "tool_choice"),
    (RESPONSES, {"tool_choice": "required"}, "tool_choice"),
    (OLLAMA, options(num_predict=-3), "options.num_predict"),
    (OLLAMA, options(temperature=-1), "options.temperature"),
    (OLLAMA, options(top_p=0), "options.top_p"),
    (OLLAMA, options(repeat_penalty=0), "options.repeat_penalty"),
    (OLLAMA, options(num_predict=2.5), "options.num_predict"),
    (OLLAMA, options(repeat_last_n=64, repeat_penalty=1.2), "options.repeat_last_n"),
    (OLLAMA, options(mirostat=1), "options.mirostat"),
    (OLLAMA, options(typical_p=0.5), "options.typical_p"),
    (OLLAMA, options(temperatur=1), "options.temperatur"),
    (OLLAMA, {"format": "xml"}, "format"),
    (OLLAMA, {"format": {"type": 7}}, "format"),
    (OLLAMA, {"top_logprobs": 2}, "top_logprobs"),
    (OLLAMA, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (OLLAMA, {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages[0].images"),
    (OLLAMA, {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    (OLLAMA, {"messages": turns("a " * 5000)}, "prompt is too long"),
    (OLLAMA, {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
]


@pytest.mark.parametrize(("api", "more", "place"), REFUSED, ids=[f"{case[0].path} {case[2]} {at}" for at, case in enumerate(REFUSED)])
def test_invalid_field_is_named_in_the_error_of_every_api(client: HttpClient, api: Spoken, more: dict[str, Any], place: str) -> None:
    for is_streamed in (False, True):
        answer = client.post(api.path, {"stream": is_streamed, **asked(api, **more)})
        assert answer.status_code == 400, answer.text
        named = answer.json()["error"]["param"] if api is RESPONSES else api.message_of(answer.json())
        assert place == named if api is RESPONSES else place in named


@pytest.mark.parametrize("num_ctx", [4096, 64, 0, -1])
def test_ollama_num_ctx_other_than_the_context_is_reported_as_ignored(client: HttpClient, num_ctx: int) -> None:
    for is_streamed in (False, True):
        answer = client.post(OLLAMA.path, {"stream": is_streamed, **asked(OLLAMA, **options(num_ctx=num_ctx, num_predict=2))})
        assert (answer.status_code, answer.headers[IGNORED_HEADER]) == (200, "options.num_ctx")
    answer = client.post(OLLAMA.path, asked(OLLAMA, **options(num_ctx=2048, num_predict=2)))
    assert IGNORED_HEADER not in answer.headers


def test_ollama_num_predict_0_means_no_limit(client: HttpClient) -> None:
    answer = client.json(OLLAMA.path, {"stream": False, **asked(OLLAMA, **options(num_predict=0, temperature=0))})
    assert answer["done_reason"] == "stop"
    assert answer["eval_count"] > 2


TAKEN: list[tuple[Spoken, dict[str, Any]]] = [
    (OLLAMA, options(num_predict=8.0, seed=3.0)),
    (MESSAGES, {"max_tokens": 8.0, "top_k": 5.0}),
    (RESPONSES, {"max_output_tokens": 8.0}),
    (MESSAGES, {"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}, "speed": "standard"}),
    (MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}, "tools": [], "mcp_servers": []}),
    (MESSAGES, {"thinking": {"type": "disabled"}, "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
    (MESSAGES, {"stop_sequences": ["", ""], "thinking": {"type": "disabled", "display": "omitted"}, "betas": ["a"]}),
    (RESPONSES, {"store": True, "stream_options": {"include_obfuscation": False}, "include": ["web_search_call.action.sources"]}),
    (OLLAMA, options(repeat_last_n=64, stop=["", ""], mirostat_tau=5.0)),
    (MESSAGES, {"messages": turns([{"type": "text", "text": TURNS[0]["content"], "cache_control": {"type": "ephemeral"}}])}),
    (RESPONSES, {"store": False, "metadata": {"a": "b"}, "user": "u", "include": ["reasoning.encrypted_content"], "top_logprobs": 0}),
    (RESPONSES, {"prompt_cache_key": "k", "client_metadata": {"a": "b"}, "service_tier": "auto", "truncation": "disabled"}),
    (RESPONSES, {"input": TURNS[0]["content"], "tools": [], "tool_choice": "auto", "reasoning": {"summary": "auto"}}),
    (RESPONSES, {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "parallel_tool_calls": True, "background": False}),
    (OLLAMA, {"keep_alive": "5m", "format": "", "think": False, "tools": []}),
    (OLLAMA, {"model": "mini:latest", **options(num_ctx=2048, num_gpu=1, num_thread=4, mirostat=0, repeat_last_n=-1, tfs_z=1.0)}),
]


@pytest.mark.parametrize(("api", "more"), TAKEN, ids=[f"{case[0].path} {at}" for at, case in enumerate(TAKEN)])
def test_fields_without_effect_change_no_text_in_any_api(client: HttpClient, api: Spoken, more: dict[str, Any]) -> None:
    assert api.said(api.whole(client, asked(api, **more))) == api.said(api.whole(client, asked(api)))


DESCRIBED: list[tuple[Spoken, dict[str, Any]]] = [
    (MESSAGES, {"tools": [TOOL]}),
    (RESPONSES, {"tools": [FUNCTION]}),
    (OLLAMA, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
]


@pytest.mark.parametrize(("api", "more"), DESCRIBED, ids=[case[0].path for case in DESCRIBED])
def test_tools_unknown_to_the_template_are_described_in_the_prompt(client: HttpClient, api: Spoken, more: dict[str, Any]) -> None:
    """The embedded model's template does not support tools: they are described in the system message."""
    whole = api.whole(client, asked(api, **more))
    assert api.said(whole)
    assert api.ending(whole)[1] > api.ending(api.whole(client, asked(api)))[1] + 50
    assert api.streamed(api.stream(client, asked(api, **more))) == api.said(whole)


FORMS: list[tuple[Spoken, dict[str, Any]]] = [
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}}}),
    (OLLAMA, {"format": SCHEMA}),
]


@pytest.mark.parametrize(("api", "form"), FORMS, ids=[case[0].path for case in FORMS])
def test_json_schema_constrains_the_answer_in_every_api(client: HttpClient, api: Spoken, form: dict[str, Any]) -> None:
    fields = {**api.fields(TURNS, temperature=0, max_tokens=40), **form}
    ((_, text),) = api.said(api.whole(client, fields))
    assert set(json.loads(text)) == {"age"}


def test_json_object_format_constrains_the_answer(client: HttpClient) -> None:
    for api, form in ((RESPONSES, {"text": {"format": {"type": "json_object"}}}), (OLLAMA, {"format": "json"})):
        ((_, text),) = api.said(api.whole(client, {**asked(api), **form}))
        assert text.startswith("{")


def test_anthropic_message_has_the_right_stop_reason(client: HttpClient, short_client: HttpClient, short_engine: AsyncEngine) -> None:
    text = MESSAGES.said(MESSAGES.whole(client, asked(MESSAGES)))[0][1]
    stopped = client.json(MESSAGES.path, asked(MESSAGES, stop_sequences=["nowhere", text[3:8]]))
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[3:8])
    assert client.json(MESSAGES.path, asked(MESSAGES, max_tokens=2))["stop_reason"] == "max_tokens"
    full = short_client.json(MESSAGES.path, asked(MESSAGES, max_tokens=10_000, ignore_eos=True))
    assert full["stop_reason"] == "model_context_window_exceeded"
    assert MESSAGES.ending(full)[1] + MESSAGES.ending(full)[2] == short_engine.loaded.input_processor.max_model_len


def test_consecutive_messages_of_one_role_are_merged(client: HttpClient) -> None:
    both = "I need a taxi.\nTo the airport."
    one = MESSAGES.whole(client, asked(MESSAGES, messages=[{"role": "user", "content": both}]))
    parts = [{"role": "user", "content": part} for part in both.split("\n")]
    several = MESSAGES.whole(client, asked(MESSAGES, messages=parts))
    items = [{"role": "user", "content": [{"type": "input_text", "text": part} for part in both.split("\n")]}]
    response = RESPONSES.whole(client, asked(RESPONSES, input=items))
    assert MESSAGES.said(one) == MESSAGES.said(several) == RESPONSES.said(response)
    assert MESSAGES.ending(one)[1] == MESSAGES.ending(several)[1] == RESPONSES.ending(response)[1]


def test_cached_tokens_are_reported_in_anthropic_and_responses_usage(client: HttpClient, engine: AsyncEngine) -> None:
    talk = turns("I need a taxi to the airport. " * 40)
    first, again = (client.json(MESSAGES.path, asked(MESSAGES, messages=talk, max_tokens=1))["usage"] for _ in range(2))
    assert first["input_tokens"] + first["cache_read_input_tokens"] == len(engine.loaded.input_processor.chat_token_ids(talk))
    assert again["cache_read_input_tokens"] > first["cache_read_input_tokens"]
    assert again["input_tokens"] == first["input_tokens"] + first["cache_read_input_tokens"] - again["cache_read_input_tokens"]
    details = RESPONSES.whole(client, asked(RESPONSES, input=talk))["usage"]["input_tokens_details"]
    assert details["cached_tokens"] == again["cache_read_input_tokens"]


def test_count_tokens_accepts_prompts_beyond_the_context(client: HttpClient, engine: AsyncEngine) -> None:
    count = client.json("/v1/messages/count_tokens", {"messages": TURNS})["input_tokens"]
    assert count == len(engine.loaded.input_processor.chat_token_ids(TURNS))
    assert client.json("/v1/messages/count_tokens", {"messages": turns("a " * 3000)})["input_tokens"] > 2048


def test_responses_api_returns_the_fields_of_the_request(client: HttpClient) -> None:
    more = {"instructions": "Be short.", "text": {"format": {"type": "text"}}, "parallel_tool_calls": False, "top_p": 0.5}
    body = json.dumps({**asked(RESPONSES, **more), "metadata": {"a": "\ud800"}}).encode()
    whole = client.ask("POST", RESPONSES.path, content=body, headers={"Content-Type": "application/json"}).json()
    begun = RESPONSES.stream(client, asked(RESPONSES, **more, metadata={"a": "?"}))[0]["response"]
    for answer in (whole, begun):
        assert answer["object"] == "response"
        assert (answer["instructions"], answer["metadata"], answer["top_p"]) == ("Be short.", {"a": "?"}, 0.5)
        assert answer["text"] == {"format": {"type": "text"}}
        assert (answer["store"], answer["parallel_tool_calls"], answer["max_output_tokens"]) == (False, False, 8)


def test_ollama_requests_stream_by_default(client: HttpClient) -> None:
    fields = asked(OLLAMA)
    events = OLLAMA.events(client.post(OLLAMA.path, fields).text)
    assert len(events) > 2
    assert OLLAMA.streamed(events) == OLLAMA.said(OLLAMA.whole(client, fields))


@pytest.mark.parametrize("kind", [{}, {"Content-Type": "application/x-www-form-urlencoded"}])
def test_json_content_type_is_optional_only_for_ollama_paths(client: HttpClient, kind: dict[str, str]) -> None:
    body = json.dumps(asked(OLLAMA, stream=False)).encode()
    answer = client.ask("POST", OLLAMA.path, content=body, headers=kind)
    assert answer.status_code == 200
    assert OLLAMA.said(answer.json()) == OLLAMA.said(OLLAMA.whole(client, asked(OLLAMA)))
    for header in ({"Origin": "null"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert client.ask("POST", OLLAMA.path, content=body, headers={**kind, **header}).status_code == 415
    for api in (MESSAGES, RESPONSES):
        assert client.ask("POST", api.path, content=json.dumps(asked(api)).encode(), headers=kind).status_code == 415


def test_ollama_generate_applies_the_chat_template_unless_raw(client: HttpClient, engine: AsyncEngine) -> None:
    prompt = {"model": "mini", "prompt": TURNS[0]["content"], "stream": False, **options()}
    answer = client.json("/api/generate", prompt)
    assert [("text", answer["response"])] == OLLAMA.said(OLLAMA.whole(client, asked(OLLAMA)))
    system = [{"role": "system", "content": "Be short."}, *TURNS]
    with_system = client.json("/api/generate", {**prompt, "system": "Be short."})
    assert [("text", with_system["response"])] == OLLAMA.said(OLLAMA.whole(client, asked(OLLAMA, messages=system)))
    raw = {**prompt, "raw": True}
    completed = client.json("/v1/completions", {"prompt": prompt["prompt"], **GREEDY})
    assert client.json("/api/generate", raw)["response"] == completed["choices"][0]["text"]
    events = OLLAMA.events(client.post("/api/generate", {**raw, "stream": True}).text)
    assert "".join(event["response"] for event in events) == completed["choices"][0]["text"]
    assert events[-1]["prompt_eval_count"] == completed["usage"]["prompt_tokens"]
    for name, value in (("suffix", "a"), ("template", "a"), ("context", [1]), ("images", ["a"])):
        answer = client.post("/api/generate", {**prompt, name: value})
        assert (answer.status_code, name in OLLAMA.message_of(answer.json())) == (400, True)


def test_ollama_generate_without_a_chat_template_continues_the_prompt(client: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = {"model": "mini", "prompt": "def f(x):", "stream": False, **options(temperature=0, num_predict=4)}
    raw = client.json("/api/generate", {**prompt, "raw": True})["response"]
    monkeypatch.setattr(Tokenizer, "has_chat_template", False)
    assert client.json("/api/generate", prompt)["response"] == raw


def test_ollama_logprobs_equal_those_of_openai_chat(client: HttpClient) -> None:
    chat = {"messages": TURNS, **GREEDY, "logprobs": True, "top_logprobs": 2}
    content = client.json("/v1/chat/completions", chat)["choices"][0]["logprobs"]["content"]
    fields = asked(OLLAMA, logprobs=True, top_logprobs=2)
    assert OLLAMA.whole(client, fields)["logprobs"] == content
    assert [one for event in OLLAMA.stream(client, fields) for one in event.get("logprobs", ())] == content


def test_ollama_request_without_a_prompt_reports_the_loaded_model(client: HttpClient) -> None:
    for path, empty in (("/api/chat", {"messages": []}), ("/api/generate", {"prompt": ""}), ("/api/generate", {})):
        assert client.json(path, {"model": "mini", **empty})["done_reason"] == "load"


def test_ollama_tags_ps_and_show_report_the_model(client: HttpClient) -> None:
    assert client.get("/api/version").json()["version"].count(".") == 2
    (listed,), (running,) = (client.get(path).json()["models"] for path in ("/api/tags", "/api/ps"))
    assert listed["name"] == listed["model"] == running["name"] == "mini"
    assert running["context_length"] == client.json("/api/show", {"name": "mini"})["model_info"]["llama.context_length"] == 2048
    assert client.post("/api/show", {"model": "other"}).status_code == 404
