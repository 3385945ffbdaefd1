"""Requests as agents, SDKs and programs send them, over a chat template that reads everything which may be missing."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.apis import APIS, Chat, Messages, OllamaChat, Responses, Spoken
from harness.http_client import HttpClient
from harness.tool_model import write_tool_model
from harness.written_answers import write_down
from paceline import AsyncEngine
from paceline.server.app import create_app
from paceline.server.fields import IGNORED_HEADER
from paceline.server.settings import ServerSettings

CASES = Path(__file__).parents[4] / "shared/cases/requests.jsonl"
CHAT, MESSAGES, RESPONSES, OLLAMA = Chat(), Messages(), Responses(), OllamaChat()

TEMPLATE = """
{%- for tool in tools or [] %}
{{- '<|im_start|>system\\n' + tool.function.name + ': ' + tool.function.description + ' ' }}
{{- tool.function.parameters.properties | tojson }}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def picky(mini_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpClient]:
    directory = write_tool_model(mini_dir, tmp_path_factory.mktemp("picky") / "mini", TEMPLATE)
    engine = AsyncEngine.open(str(directory), drafter="ngram", max_num_seqs=4, threads=1)
    yield HttpClient(
        create_app(
            engine, ServerSettings(served_model_name="mini", tool_call_parser="hermes", reasoning_parser="none", grammar_timeout_s=60)
        )
    )
    asyncio.run(engine.close())


def engine_of(client: HttpClient) -> AsyncEngine:
    engine: AsyncEngine = client.app.state.service.models[0].service.engine
    return engine


def read_cases() -> list[Any]:
    if not CASES.exists():
        return [pytest.param({}, marks=pytest.mark.skip(reason=f"{CASES} is missing"))]
    found = []
    for row in map(json.loads, CASES.read_text(encoding="utf-8").splitlines()):
        found.append(pytest.param(row, id=row["title"]))
    return found


@pytest.mark.parametrize("row", read_cases())
def test_recorded_request_case_has_the_expected_status(picky: HttpClient, row: dict[str, Any]) -> None:
    body = {"model": "mini", "max_tokens": 4, **row["body"]}
    for is_streamed in (False, True):
        answer = picky.post(row["path"], {**body, "stream": is_streamed})
        assert answer.status_code == row["status"], answer.text


USER = {"role": "user", "content": "I need a taxi."}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "r"}
TOOLS: dict[str, Any] = {
    "chat": [{"type": "function", "function": FUNCTION}],
    "messages": [{"name": "f", "description": "d", "input_schema": FUNCTION["parameters"]}],
    "responses": [{"type": "function", **FUNCTION}],
    "ollama": [{"type": "function", "function": FUNCTION}],
}
LEFTOVERS = {"cache_control": {"type": "ephemeral"}, "extra_content": {"google": {}}, "provider_specific_fields": {}, "metadata": {}}


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [USER, *messages], **more}


def called(**more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [CALL], **more}


def blocks(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(content)}


USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
USED = {"type": "tool_result", "tool_use_id": "c1", "content": "r"}
ITEM_CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
ITEM_RESULT = {"type": "function_call_output", "call_id": "c1", "output": "r"}
OLLAMA_CALL = {"function": {"name": "f", "arguments": {}}}
OLLAMA_RESULT = {"role": "tool", "tool_name": "f", "content": "r"}

SERVED: list[tuple[Spoken, str, dict[str, Any]]] = [
    (CHAT, "content is null", chat(called(), RESULT)),
    (CHAT, "content is an empty list", chat(called(content=[]), RESULT)),
    (CHAT, "content is absent", chat({"role": "assistant", "tool_calls": [CALL]}, RESULT)),
    (CHAT, "answer without anything", chat({"role": "assistant", "content": None}, USER)),
    (CHAT, "answer that refused", chat({"role": "assistant", "content": None, "refusal": "No."}, USER)),
    (CHAT, "result without content", chat(called(), {**RESULT, "content": None})),
    (CHAT, "result without id", chat(called(), {"role": "tool", "content": "r"})),
    (CHAT, "result whose call was cut off", chat(RESULT, USER)),
    (CHAT, "two calls with one id", chat(called(tool_calls=[CALL, CALL]), RESULT, RESULT)),
    (CHAT, "call without id and type", chat(called(tool_calls=[{"function": CALL["function"]}]), {"role": "tool", "content": "r"})),
    (CHAT, "call with an empty id", chat(called(tool_calls=[{**CALL, "id": ""}]), {**RESULT, "tool_call_id": ""})),
    (CHAT, "arguments are an object", chat(called(tool_calls=[{**CALL, "function": {"name": "f", "arguments": {"a": 1}}}]), RESULT)),
    (CHAT, "arguments are null", chat(called(tool_calls=[{**CALL, "function": {"name": "f", "arguments": None}}]), RESULT)),
    (CHAT, "arguments are broken", chat(called(tool_calls=[{**CALL, "function": {"name": "f", "arguments": "{"}}]), RESULT)),
    (CHAT, "reasoning by both names", chat(called(reasoning="t", reasoning_content="t", reasoning_details=[{}]), RESULT)),
    (CHAT, "leftovers everywhere", chat(called(**LEFTOVERS, parsed=None, annotations=[], audio=None, function_call=None), RESULT)),
    (CHAT, "leftovers of a call", chat(called(tool_calls=[{**CALL, **LEFTOVERS, "index": 0}]), {**RESULT, "is_error": False, "name": "f"})),
    (CHAT, "leftovers of a part", chat(blocks({"type": "text", "text": "a", **LEFTOVERS}))),
    (CHAT, "a part of an answer", chat(blocks({"type": "output_text", "text": "a", "annotations": []}, role="assistant"), USER)),
    (CHAT, "leftovers of a tool", {"tools": [{**TOOLS["chat"][0], **LEFTOVERS}]}),
    (CHAT, "tool that is strict", {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]}),
    (CHAT, "requests of SDKs", {"store": True, "user": "u", "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k"}),
    (CHAT, "requests of llama.cpp", {"cache_prompt": True, "id_slot": -1, "n_keep": 0, "samplers": [], "n_probs": 0}),
    (CHAT, "requests of vLLM", {"skip_special_tokens": True, "priority": 0, "request_id": "r", "length_penalty": 1.0}),
    (CHAT, "requests of LiteLLM", {"litellm_metadata": {}, "extra_headers": {}, "num_retries": 2, "timeout": 600}),
    (CHAT, "stream options without a stream", {"stream_options": {"include_usage": True, "include_obfuscation": False}, "stream": False}),
    (CHAT, "stop is empty", {"stop": []}),
    (CHAT, "stops are empty", {"stop": ["", ""]}),
    (CHAT, "stop is null", {"stop": None}),
    (CHAT, "completion tokens without limit", {"max_completion_tokens": -1, "ignore_eos": False}),
    (CHAT, "n_predict", {"n_predict": 3}),
    (CHAT, "logprobs are off", {"logprobs": False, "top_logprobs": 0}),
    (CHAT, "no functions", {"functions": None, "function_call": "none", "tools": [], "tool_choice": "auto"}),
    (CHAT, "prefix of the answer, as DeepSeek's", chat({"role": "assistant", "content": "It is", "prefix": True})),
    (CHAT, "prefix of the answer, as Kimi's", chat({"role": "assistant", "content": "It is", "partial": True})),
    (CHAT, "no turn is begun", {"add_generation_prompt": False}),
    (MESSAGES, "call and result", chat(blocks(USE, role="assistant"), blocks(USED), max_tokens=4)),
    (MESSAGES, "result that failed", chat(blocks(USE, role="assistant"), blocks({**USED, "is_error": True}))),
    (MESSAGES, "result without content", chat(blocks(USE, role="assistant"), blocks({"type": "tool_result", "tool_use_id": "c1"}))),
    (MESSAGES, "result whose call was cut off", {"messages": [blocks(USED)]}),
    (MESSAGES, "thoughts", chat(blocks({"type": "thinking", "thinking": "t", "signature": "s"}, USE, role="assistant"), blocks(USED))),
    (MESSAGES, "redacted thoughts", chat(blocks({"type": "redacted_thinking", "data": "x"}, USE, role="assistant"), blocks(USED))),
    (MESSAGES, "leftovers", chat(blocks({**USE, **LEFTOVERS, "caller": {}}, role="assistant"), blocks({**USED, **LEFTOVERS}))),
    (MESSAGES, "answer as it was", chat({"role": "assistant", "content": [{"type": "text", "text": "a", "citations": None}]}, USER)),
    (MESSAGES, "empty answer at the end", chat({"role": "assistant", "content": []})),
    (MESSAGES, "blank answer at the end", chat({"role": "assistant", "content": " "})),
    (MESSAGES, "prefill", chat({"role": "assistant", "content": "It is"})),
    (MESSAGES, "prefill of a block", chat(blocks({"type": "text", "text": "It is"}, role="assistant"))),
    (MESSAGES, "requests of SDKs", {"metadata": {"user_id": "u"}, "betas": ["a"], "context_management": {"edits": []}}),
    (MESSAGES, "limit without end", {"max_tokens": -1, "stop_sequences": ["a"]}),
    (MESSAGES, "unknown field", {"new_feature": {"on": True}}),
    (RESPONSES, "call and result", {"input": [USER, ITEM_CALL, ITEM_RESULT]}),
    (RESPONSES, "result whose call was cut off", {"input": [ITEM_RESULT, USER]}),
    (RESPONSES, "leftovers", {"input": [USER, {**ITEM_CALL, "id": "i", "status": "completed", "parsed_arguments": {}}, ITEM_RESULT]}),
    (RESPONSES, "reasoning without content", {"input": [USER, {"type": "reasoning", "summary": [], "encrypted_content": "x"}]}),
    (RESPONSES, "stored", {"store": True, "include": ["reasoning.encrypted_content"], "truncation": "disabled"}),
    (RESPONSES, "requests of SDKs", {"prompt_cache_key": "k", "stream_options": {"include_obfuscation": False}}),
    (RESPONSES, "limit without end", {"max_output_tokens": -1, "stop": ""}),
    (RESPONSES, "unknown field", {"new_feature": 1}),
    (OLLAMA, "call and result", chat({"role": "assistant", "tool_calls": [OLLAMA_CALL]}, OLLAMA_RESULT)),
    (OLLAMA, "result whose call was cut off", chat(OLLAMA_RESULT)),
    (OLLAMA, "leftovers", chat({"role": "assistant", "content": "a", "thinking": "", "images": None, "done": True}, USER)),
    (OLLAMA, "requests", {"keep_alive": -1, "truncate": True, "options": {"num_gpu": 1, "mirostat": 0, "stop": [""], "num_predict": 3}}),
    (OLLAMA, "unknown option", {"options": {"num_predict": 3, "new_option": 1}}),
    (OLLAMA, "unknown field", {"new_feature": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("api", "title", "more"), SERVED, ids=[f"{row[0].path} {row[1]}" for row in SERVED])
def test_requests_of_known_clients_are_accepted(
    picky: HttpClient, monkeypatch: pytest.MonkeyPatch, api: Spoken, title: str, more: dict[str, Any]
) -> None:
    write_down(monkeypatch, "hello")
    answer = picky.post(api.path, {**api.fields([USER], max_tokens=4), "stream": False, **more})
    assert answer.status_code == 200, (title, answer.text)
    assert api.said(answer.json()) == [("text", "hello")]


BARE: dict[str, list[Any]] = {
    "chat": [{"function": {"name": "f"}}, {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}],
    "messages": [{"name": "f", "input_schema": {}}, {"name": "f", "type": "custom"}],
    "responses": [{"type": "function", "name": "f"}, {"type": "function", "name": "f", "parameters": None, "strict": None}],
    "ollama": [{"function": {"name": "f"}}, {"type": "function", "function": {"name": "f", "parameters": {}}}],
}


@pytest.mark.parametrize("name", BARE)
def test_tools_without_description_or_parameters_are_accepted(picky: HttpClient, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_down(monkeypatch, "hello")
    for tool in BARE[name]:
        answer = picky.post(APIS[name].path, {**APIS[name].fields([USER], max_tokens=4), "tools": [tool]})
        assert answer.status_code == 200, answer.text


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TAGS = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
REFUSED: list[tuple[Spoken, dict[str, Any], str]] = [
    (CHAT, {"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    (CHAT, {"skip_special_tokens": False}, "skip_special_tokens"),
    (CHAT, {"best_of": 3}, "best_of"),
    (CHAT, {"n_probs": 5}, "n_probs"),
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"mirostat": 2}, "mirostat"),
    (CHAT, {"dry_multiplier": 0.8}, "dry_multiplier"),
    (CHAT, {"logits_processors": ["a"]}, "logits_processors"),
    (CHAT, {"documents": [{"text": "a"}]}, "documents"),
    (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    (CHAT, chat(called(function_call={"name": "f", "arguments": "{}"})), "messages[1].function_call"),
    (CHAT, chat(called(), continue_final_message=True), "continue_final_message"),
    (CHAT, {"continue_final_message": True}, "continue_final_message"),
    (CHAT, chat({"role": "assistant", "content": "a"}, continue_final_message=True, add_generation_prompt=True), "add_generation_prompt"),
    (CHAT, chat({"role": "assistant", "content": "{"}, continue_final_message=True, guided_json={"type": "object"}), "guided_json"),
    (
        MESSAGES,
        chat({"role": "assistant", "content": "{"}, output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}}),
        "output_config.format",
    ),
    (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (CHAT, {"max_tokens": -2}, "max_tokens"),
    (CHAT, {"n_predict": -5, "max_tokens": None}, "max_tokens"),
    (CHAT, {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    (CHAT, {"structured_outputs": {"structural_tag": {**TAGS, "triggers": ["<g"]}}}, "structured_outputs.structural_tag"),
    (CHAT, {"structured_outputs": {"structural_tag": {**TAGS, "structures": [{"begin": "<f"}]}}}, "structured_outputs.structural_tag"),
    (CHAT, {"guided_grammar": "?start: a"}, "guided_grammar"),
    (CHAT, {"guided_regex": "("}, "guided_regex"),
    (CHAT, {"guided_json": "{"}, "guided_json"),
    (CHAT, {"guided_json": {"type": 7}}, "guided_json"),
    (CHAT, {"guided_choice": []}, "guided_choice"),
    (CHAT, {"guided_choice": ["a"], "guided_regex": "a"}, "guided_regex"),
    (CHAT, {"response_format": {"type": "regex"}}, "response_format"),
    (MESSAGES, {"temprature": 1}, "temprature"),
    (RESPONSES, {"max_output_token": 4}, "max_output_token"),
    (RESPONSES, {"input": [{"type": "image_generation_call", "id": "a"}]}, "input[0].type"),
    (OLLAMA, {"options": {"temprature": 1}}, "options.temprature"),
]


@pytest.mark.parametrize(("api", "more", "name"), REFUSED, ids=[f"{row[0].path} {row[2]} {at}" for at, row in enumerate(REFUSED)])
def test_unsupported_field_is_refused_by_name(picky: HttpClient, api: Spoken, more: dict[str, Any], name: str) -> None:
    answer = picky.post(api.path, {**api.fields([USER], max_tokens=4), **more})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert name in api.message_of(answer.json())
    assert not isinstance(error, dict) or error.get("param", name) == name


def test_gbnf_grammar_is_refused_with_a_hint_at_lark(picky: HttpClient) -> None:
    for field in ({"grammar": "root ::= [a-z]+"}, {"structured_outputs": {"grammar": "# rules\nroot  ::= item\nitem ::= 'a'"}}):
        message = picky.refusal(CHAT.path, {**CHAT.fields([USER]), **field})["message"]
        assert "GBNF" in message
        assert "Lark" in message


def test_ignored_fields_are_named_in_a_response_header(picky: HttpClient) -> None:
    for api in APIS.values():
        for is_streamed in (False, True):
            fields = {**api.fields([USER], max_tokens=1), "stream": is_streamed}
            assert IGNORED_HEADER not in picky.post(api.path, fields).headers
            answer = picky.post(api.path, {**fields, "new_feature": 1, "keep_alive": 5})
            assert answer.headers[IGNORED_HEADER] == "new_feature, keep_alive"


LARK = 'start: "x" "y"+'
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"json": SCHEMA}}, r'\{"a": ?[12]\}'),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}, r'\{"a": ?[12]\}'),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"grammar": LARK}}, "xy+"),
    ({"structured_outputs": {"json_object": True}}, r"\{.*"),
    ({"guided_json": SCHEMA}, r'\{"a": ?[12]\}'),
    ({"guided_regex": "^[ab]{3}$"}, "[ab]{3}"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_grammar": LARK}, "xy+"),
    ({"grammar": LARK}, "xy+"),
    ({"json_schema": SCHEMA}, r'\{"a": ?[12]\}'),
    ({"regex": "[ab]{3}"}, "[ab]{3}"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}}, r'\{"a": ?[12]\}'),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, r'\{"a": ?[12]\}'),
    ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, r'\{"a": ?[12]\}'),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, r'\{"a": ?[12]\}'),
    ({"response_format": {"type": "json", "value": SCHEMA}}, r'\{"a": ?[12]\}'),
    ({"response_format": {"type": "regex", "pattern": "[ab]{3}"}}, "[ab]{3}"),
    ({"response_format": {"type": "regex", "regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"response_format": {"type": "regex", "value": "[ab]{3}"}}, "[ab]{3}"),
    ({"response_format": {"type": "choice", "choice": ["yes", "no"]}}, "yes|no"),
    ({"response_format": {"type": "grammar", "grammar": LARK}}, "xy+"),
    ({"response_format": {"type": "grammar", "value": LARK}}, "xy+"),
    ({"response_format": {"type": "text"}, "grammar": "", "guided_json": None}, ".*"),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS, ids=[json.dumps(row[0])[:70] for row in FORMS])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_structured_output_option_is_accepted_in_every_form(picky: HttpClient, path: str, form: dict[str, Any], pattern: str) -> None:
    prompt: dict[str, Any] = {"messages": [USER]} if "chat" in path else {"prompt": "I need a taxi."}
    (choice,) = picky.json(path, {**prompt, "temperature": 0, "max_tokens": 30, "seed": 1, **form})["choices"]
    text = choice["message"]["content"] if "chat" in path else choice["text"]
    assert re.fullmatch(pattern + ".*" if choice["finish_reason"] == "length" else pattern, text, re.DOTALL), text


FORMAT = {
    "type": "triggered_tags",
    "triggers": ["I"],
    "tags": [
        {"begin": "It ", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "."},
        {"begin": "I ", "schema": SCHEMA, "end": ""},
    ],
}


@pytest.mark.parametrize("tag", [{"type": "structural_tag", "format": FORMAT}, json.dumps({**FORMAT, "type": "structural_tag"})])
def test_structural_tag_schema_constrains_the_text_after_the_tag(picky: HttpClient, tag: Any) -> None:
    fields = {"messages": [USER], "temperature": 1.0, "max_tokens": 60, "structured_outputs": {"structural_tag": tag}}
    biased = {**fields, "logit_bias": {str(picky.json("/tokenize", {"content": "I"})["tokens"][-1]): 100}}
    for seed in range(4):
        text = picky.json(CHAT.path, {**biased, "seed": seed})["choices"][0]["message"]["content"]
        found = re.search(r"I(.*)", text, re.DOTALL)
        assert found
        assert re.match(r'( \{"a": [12]\}|t \{"a": [12]\}\.)', found[1]), text


@pytest.mark.parametrize("text", ["It is", "It is ", "  It\n\nis"])
def test_final_assistant_message_is_continued(picky: HttpClient, text: str) -> None:
    messages = [USER, {"role": "assistant", "content": text}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    ids = picky.json("/tokenize", fields)["tokens"]
    assert picky.json("/detokenize", {"tokens": ids})["content"].endswith(f"<|im_start|>assistant\n{text}")
    greedy = {"temperature": 0, "max_tokens": 8}
    answers = [picky.json(CHAT.path, {**fields, **greedy}), picky.json("/v1/completions", {"prompt": ids, **greedy})]
    expected = answers[1]["choices"][0]["text"]
    assert answers[0]["choices"][0]["message"]["content"] == expected
    assert answers[0]["usage"]["prompt_tokens"] == len(ids)
    events = picky.events(CHAT.path, {**fields, **greedy})
    assert CHAT.streamed(events) == [("text", expected)]
    assert MESSAGES.said(MESSAGES.whole(picky, {"messages": messages, **greedy})) == [("text", expected)]
    assert picky.json("/v1/messages/count_tokens", {"messages": messages})["input_tokens"] == len(ids)


def test_changing_claude_code_header_is_removed_from_the_system_prompt(picky: HttpClient) -> None:
    note = "x-anthropic-billing-header: cc_version=2.1; cch=1a2b;"
    fields = {"messages": [USER], "max_tokens": 1}

    def count(system: Any) -> int:
        return int(picky.json("/v1/messages/count_tokens", {"messages": [USER], "system": system})["input_tokens"])

    short = count([{"type": "text", "text": "Be short."}])
    assert count([{"type": "text", "text": note}, {"type": "text", "text": "Be short."}]) == short
    assert count(f"{note}\nBe short.") == short == count("Be short.")
    assert count([{"type": "text", "text": "Be short."}, {"type": "text", "text": note}]) > short
    assert count([{"type": "text", "text": note}]) == count(None)
    long = [{"type": "text", "text": "Be short. " * 60}]
    usages = [picky.json(MESSAGES.path, {**fields, "system": [{"type": "text", "text": f"{note}{at}"}, *long]})["usage"] for at in range(2)]
    assert usages[1]["cache_read_input_tokens"] > 100


ALLOWED = [{"type": "function", "function": {**FUNCTION, "name": name}} for name in ("f", "g", "h")]


@pytest.mark.parametrize("names", [["g"], ["g", "h"]])
def test_allowed_tools_limits_which_tools_are_called(picky: HttpClient, names: list[str]) -> None:
    listed = [{"type": "function", "function": {"name": name}} for name in names]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": listed}}
    fields = {**CHAT.fields([USER], max_tokens=60, temperature=1.2), "parallel_tool_calls": False, "tools": ALLOWED, "tool_choice": choice}
    items = [{"type": "function", "name": name} for name in names]
    tools = [{"type": "function", **tool["function"]} for tool in ALLOWED]
    choice = {"type": "allowed_tools", "mode": "required", "tools": items}
    more = {"parallel_tool_calls": False, "tools": tools, "tool_choice": choice}
    response = {**RESPONSES.fields([USER], max_tokens=60, temperature=1.2), **more}
    for seed in range(4):
        for api, body in ((CHAT, fields), (RESPONSES, response)):
            ((kind, name, _),) = api.said(api.whole(picky, {**body, "seed": seed}))
            assert (kind, name in names) == ("call", True)
    auto = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": listed}}
    prompts = [picky.json(CHAT.path, {**fields, "max_tokens": 1, "tool_choice": one})["usage"]["prompt_tokens"] for one in (auto, "auto")]
    assert prompts[0] < prompts[1], "tools that may not be called are not described"
    unknown = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]}}
    assert picky.refusal(CHAT.path, {**fields, "tool_choice": unknown})["param"] == "tool_choice.allowed_tools"


def test_prompt_logprobs_have_the_format_of_vllm(picky: HttpClient) -> None:
    text = "I need a taxi to the airport."
    whole = picky.json("/v1/completions", {"prompt": text, "max_tokens": 1, "prompt_logprobs": 2, "temperature": 0})
    echoed = picky.json("/v1/completions", {"prompt": text, "max_tokens": 1, "echo": True, "logprobs": 2, "temperature": 0})
    first, *others = whole["choices"][0]["prompt_logprobs"]
    ids = picky.json("/tokenize", {"prompt": text})["tokens"]
    known = echoed["choices"][0]["logprobs"]["token_logprobs"][1 : len(ids)]
    assert first is None
    assert [entry[str(token_id)]["logprob"] for entry, token_id in zip(others, ids[1:], strict=True)] == known
    for entry in others:
        assert {one["rank"] for one in entry.values()} >= {1, 2}
        assert all(set(one) == {"logprob", "rank", "decoded_token"} for one in entry.values())
    chat_entries = picky.json(CHAT.path, {"messages": [USER], "max_tokens": 1, "prompt_logprobs": 0})["prompt_logprobs"]
    assert len(chat_entries) == len(picky.json("/tokenize", {"messages": [USER]})["tokens"])
    assert "prompt_logprobs" not in picky.json(CHAT.path, {"messages": [USER], "max_tokens": 1})


def test_max_tokens_minus_1_fills_the_context(short_client: HttpClient, short_engine: AsyncEngine) -> None:
    for path, prompt in ((CHAT.path, {"messages": [USER]}), ("/v1/completions", {"prompt": "I need"})):
        for limit in ({"max_tokens": -1}, {"n_predict": -1}):
            usage = short_client.json(path, {**prompt, **limit, "ignore_eos": True, "temperature": 0})["usage"]
            assert usage["total_tokens"] == short_engine.loaded.input_processor.max_model_len


def test_paths_without_the_v1_prefix_are_served(picky: HttpClient) -> None:
    greedy = {"temperature": 0, "max_tokens": 3}
    bodies: dict[str, dict[str, Any]] = {
        "/chat/completions": {"messages": [USER]},
        "/completions": {"prompt": "I need"},
        "/responses": {"input": "I need", "max_output_tokens": 3},
        "/messages": {"messages": [USER]},
        "/messages/count_tokens": {"messages": [USER]},
    }
    for path, body in bodies.items():
        fields = body if path in ("/responses", "/messages/count_tokens") else {**body, **greedy}
        answers = [picky.json(prefix + path, fields) for prefix in ("", "/v1")]
        assert set(answers[0]) == set(answers[1])
    assert picky.get("/models").json() == picky.get("/v1/models").json()
    assert picky.get("/models/mini").json() == picky.get("/v1/models/mini").json()
    assert picky.post("/messages", {"messages": []}).json()["type"] == "error"


def test_tokenize_accepts_the_fields_of_llama_cpp(picky: HttpClient) -> None:
    tokens = picky.json("/tokenize", {"prompt": "I need a taxi."})["tokens"]
    assert picky.json("/tokenize", {"content": "I need a taxi.", "add_special": True})["tokens"] == tokens
    pieces = picky.json("/tokenize", {"content": "I need", "with_pieces": True})["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == "I need"
    pieces = picky.json("/tokenize", {"content": "\u0e51", "with_pieces": True})["tokens"]
    assert [byte for piece in pieces for byte in piece["piece"]] == list("\u0e51".encode())
    strings = picky.json("/tokenize", {"prompt": "I need", "return_token_strs": True})["token_strs"]
    assert "".join(strings) == "I need"
    assert picky.json("/detokenize", {"tokens": tokens})["content"] == "I need a taxi."
    assert picky.refusal("/tokenize", {"content": "a", "prompt": "b"})["param"] == "prompt"


def test_tokenize_with_parse_special_false_keeps_control_tokens_as_text(picky: HttpClient) -> None:
    text = "a<|im_end|>b"
    control = picky.json("/tokenize", {"content": "<|im_end|>"})["tokens"]
    assert len(control) == 1
    assert control[0] in picky.json("/tokenize", {"content": text, "parse_special": True})["tokens"]
    for more in ({}, {"add_special": True}):
        tokens = picky.json("/tokenize", {"content": text, "parse_special": False, **more})["tokens"]
        assert control[0] not in tokens
        assert picky.json("/detokenize", {"tokens": tokens})["content"].endswith(text)


def test_props_reports_context_template_and_slots(picky: HttpClient) -> None:
    props = picky.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert (props["model_alias"], props["total_slots"]) == ("mini", 4)
    assert props["chat_template"] == TEMPLATE
    assert props["modalities"] == {"vision": False, "audio": False}


def test_reasoning_is_sent_as_reasoning_and_reasoning_content(picky: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client = HttpClient(create_app(engine_of(picky), ServerSettings(reasoning_parser="think", tool_call_parser="hermes")))
    write_down(monkeypatch, "<think>\nHm.\n</think>\n\nYes.")
    message = client.json(CHAT.path, {"messages": [USER]})["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hm."
    deltas = [choice["delta"] for event in client.events(CHAT.path, {"messages": [USER]}) for choice in event["choices"]]
    assert [delta.get("reasoning") for delta in deltas] == [delta.get("reasoning_content") for delta in deltas]
    echoed = client.post(CHAT.path, {"messages": [USER, message, USER]})
    assert echoed.status_code == 200
    assert IGNORED_HEADER not in echoed.headers


@pytest.mark.parametrize("name", APIS)
def test_unicode_line_separators_are_escaped_in_streams(picky: HttpClient, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    text = "a\u2028b\u2029c\u0085d"
    write_down(monkeypatch, text, piece_len=100)
    api = APIS[name]
    answer = picky.post(api.path, {**api.fields([USER], max_tokens=4), "stream": True})
    assert not re.search("[\u2028\u2029\u0085]", answer.text)
    assert api.streamed(api.events(answer.text) if name != "chat" else api.stream(picky, api.fields([USER]))) == [("text", text)]


@pytest.mark.parametrize("name", APIS)
def test_answer_can_be_sent_back_unchanged_as_history(picky: HttpClient, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    api = APIS[name]
    strict = HttpClient(create_app(engine_of(picky), ServerSettings(served_model_name="mini", unknown_fields="refuse")))
    write_down(monkeypatch, '<think>\nHm.\n</think>\n\nSee.<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    fields = {**api.fields([USER], max_tokens=40), "tools": TOOLS[name]}
    answer = api.whole(strict, fields)
    results: dict[str, Any] = {
        "chat": lambda: [
            answer["choices"][0]["message"],
            {**RESULT, "tool_call_id": answer["choices"][0]["message"]["tool_calls"][0]["id"]},
        ],
        "messages": lambda: [
            {"role": "assistant", "content": answer["content"]},
            blocks({**USED, "tool_use_id": answer["content"][-1]["id"]}),
        ],
        "responses": lambda: [*answer["output"], {**ITEM_RESULT, "call_id": answer["output"][-1]["call_id"]}],
        "ollama": lambda: [answer["message"], {"role": "tool", "tool_name": "f", "content": "r"}],
    }
    again = api.fields([USER, *results[name]()], max_tokens=40)
    assert strict.post(api.path, {**again, "tools": TOOLS[name], "stream": False}).status_code == 200
