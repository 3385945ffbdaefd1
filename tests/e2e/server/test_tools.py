"""Tool calls and reasoning in `/v1/chat/completions`: separated from the text, and forced where a call is required."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from harness.http_client import HttpClient
from harness.markup_cases import CASES, TOOLS, Case, Parsed
from harness.tool_model import answering, write_tool_model
from paceline import AsyncEngine
from paceline.parsing import registry as formats
from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.tool_calls import hermes
from paceline.sampling.grammars.grammar import Grammar
from paceline.server.app import create_app
from paceline.server.fields import IGNORED_HEADER
from paceline.server.settings import ServerSettings

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "I need a taxi."}
BOOK = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["taxi", "bus"]},
        "seats": {"type": "integer", "minimum": 1, "maximum": 4},
        "now": {"type": "boolean"},
    },
    "required": ["kind", "seats"],
}
DESCRIBED = [
    {"type": "function", "function": {"name": "book", "description": "Books a ride.", "parameters": BOOK}},
    {"type": "function", "function": {"name": "cancel"}},
]
ASKED = {"messages": [USER], "tools": DESCRIBED, "temperature": 0, "max_tokens": 120}
CASE_TOOLS = [tool.as_template() for tool in TOOLS]


@pytest.fixture(scope="module")
def tool_engine(mini_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    directory = write_tool_model(mini_dir, tmp_path_factory.mktemp("tools") / "mini")
    engine = AsyncEngine.open(str(directory), drafter="ngram", max_num_seqs=4, threads=1)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def tooled(tool_engine: AsyncEngine) -> Callable[..., HttpClient]:
    return cache(lambda **settings: HttpClient(create_app(tool_engine, ServerSettings(**settings))))


def whole(client: HttpClient, fields: dict[str, Any]) -> tuple[Parsed, str]:
    """Contents of a complete answer: reasoning, text, calls, and the finish reason."""
    (choice,) = client.json(PATH, fields)["choices"]
    message = choice["message"]
    said = [("reasoning", message["reasoning_content"])] if "reasoning_content" in message else []
    said += [("text", message["content"])] if message["content"] else []
    for call in message.get("tool_calls", []):
        assert call["id"]
        assert call["type"] == "function"
        said.append(("call", call["function"]["name"], call["function"]["arguments"]))
    return said, choice["finish_reason"]


def streamed(client: HttpClient, fields: dict[str, Any]) -> tuple[Parsed, str]:
    """The same of a stream's events."""
    text, thought, reason = "", "", ""
    calls: list[dict[str, str]] = []
    for event in client.events(PATH, fields):
        for choice in event["choices"]:
            text += choice["delta"].get("content", "")
            thought += choice["delta"].get("reasoning_content", "")
            reason = choice["finish_reason"] or reason
            for call in choice["delta"].get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(calls)
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    said: Parsed = [("reasoning", thought)] if thought else []
    said += [("text", text)] if text else []
    return said + [("call", call["name"], call["arguments"]) for call in calls], reason


@pytest.mark.spread(0.5)
@pytest.mark.parametrize(
    "more", [{"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": {"type": "function", "function": {"name": "book"}}}]
)
@pytest.mark.parametrize("tool_call_parser", ["hermes", "qwen3_coder", "glm45", "mistral", "llama3_json", "gemma4", "openai"])
def test_required_tool_call_has_arguments_that_match_the_schema(
    tooled: Callable[..., HttpClient], tool_call_parser: str, more: dict[str, Any]
) -> None:
    client = tooled(tool_call_parser=tool_call_parser, reasoning_parser="none")
    fields = {**ASKED, **more, "tools": DESCRIBED[:1]}
    said, reason = whole(client, fields)
    ((kind, name, arguments),) = said
    assert (kind, name, reason) == ("call", "book", "tool_calls")
    given = json.loads(arguments)
    assert given["kind"] in ("taxi", "bus")
    assert given["seats"] in range(1, 5)
    assert set(given) <= set(BOOK["properties"])
    assert streamed(client, fields) == (said, reason)


def test_tool_choice_required_can_select_any_tool(tooled: Callable[..., HttpClient]) -> None:
    fields = {**ASKED, "tool_choice": "required", "temperature": 1.5, "parallel_tool_calls": False}
    names = {whole(tooled(reasoning_parser="none"), {**fields, "seed": seed})[0][0][1] for seed in range(8)}
    assert names == {"book", "cancel"}


def kinds_in_order(said: Parsed) -> Parsed:
    """As OpenAI's message holds them: kinds apart, and one text."""
    texts = {kind: "".join(one[1] for one in said if one[0] == kind) for kind in ("reasoning", "text")}
    return [(kind, text) for kind, text in texts.items() if text] + [one for one in said if one[0] == "call"]


SHORT_CASES = [case for case in CASES if case.output.strip() and not case.is_opened]


def test_tool_answers_whole_and_streamed_equal_the_parser_cases(tooled: Callable[..., HttpClient], large_counts: bool) -> None:
    for case in SHORT_CASES[:: 1 if large_counts else 12]:
        check_case(tooled, case)


def check_case(tooled: Callable[..., HttpClient], case: Case) -> None:
    client = tooled(tool_call_parser=case.formats[0], reasoning_parser=case.formats[1])
    fields = {"messages": [USER], "tools": CASE_TOOLS, "temperature": 0, "max_tokens": 400, "parallel_tool_calls": case.parallel}
    calls = [one for one in case.expected if one[0] == "call"]
    reason = "tool_calls" if (len(calls) if case.num_complete is None else case.num_complete) else "stop"
    with answering(Grammar.choice([case.output])):
        assert whole(client, fields) == (kinds_in_order(case.expected), reason)
        assert streamed(client, fields) == (kinds_in_order(case.expected), reason)


def test_tool_answer_cut_by_max_tokens_has_finish_reason_length(tooled: Callable[..., HttpClient]) -> None:
    with answering(Grammar.choice(['<tool_call>{"name": "book", "arguments": {"kind": "taxi"}}</tool_call>'])):
        said, reason = whole(tooled(), {**ASKED, "max_tokens": 20})
        assert reason == "length"
        assert streamed(tooled(), {**ASKED, "max_tokens": 20}) == (said, reason)


def test_stop_string_within_a_tool_call_ends_the_answer(tooled: Callable[..., HttpClient]) -> None:
    with answering(Grammar.choice(['I go. <tool_call>{"name": "book", "arguments": {"kind": "taxi"}}</tool_call>'])):
        for stop, expected in {
            "taxi": [("text", "I go."), ("call", "book", '{"kind": ""}')],
            '"book", "arg': [("text", 'I go. <tool_call>{"name": ')],
            "_call>": [("text", "I go. <tool")],
            '"}': [("text", "I go."), ("call", "book", '{"kind": "taxi"}')],
        }.items():
            assert whole(tooled(), {**ASKED, "stop": stop}) == (expected, "stop")
            assert streamed(tooled(), {**ASKED, "stop": stop}) == (expected, "stop")


def test_tool_call_cut_by_a_stop_string_has_status_incomplete(tooled: Callable[..., HttpClient]) -> None:
    written = '<tool_call>{"name": "book", "arguments": {"seats": 2, "kind": "taxi"}}</tool_call>'
    with answering(Grammar.choice([written])):
        said = ([("call", "book", '{"seats": 2}')], "stop")
        assert whole(tooled(), {**ASKED, "stop": ', "kind"'}) == streamed(tooled(), {**ASKED, "stop": ', "kind"'}) == said
        fields = {"input": "A ride.", "tools": [{"type": "function", **DESCRIBED[0]["function"]}], "stop": [', "kind"']}
        (item,) = tooled().json("/v1/responses", fields)["output"]
        assert (item["type"], item["status"]) == ("function_call", "incomplete")


def test_tool_call_cut_by_a_stop_string_has_finish_reason_stop(tooled: Callable[..., HttpClient]) -> None:
    call = '<tool_call>{"name": "book", "arguments": {"seats": %d, "kind": "taxi"}}</tool_call>'
    with answering(Grammar.choice([f"{call % 1}\n{call % 2}"])):
        fields = {**ASKED, "stop": '2, "kind"'}
        calls, reason = whole(tooled(), fields)
        assert (len(calls), reason) == (2, "stop")
        assert streamed(tooled(), fields) == (calls, reason)


def test_tool_call_that_starts_with_a_special_token_is_parsed(tooled: Callable[..., HttpClient], monkeypatch: pytest.MonkeyPatch) -> None:
    reads = {"<|im_start|>": hermes.FORMAT.anywhere[hermes.OPEN]}
    special = ToolCallFormat(reads, (), ("<|im_start|>",), hermes.calls_grammar)
    monkeypatch.setitem(formats.TOOL_CALL_FORMATS, "special", special)
    monkeypatch.setattr(formats, "TOOL_CALL_PARSERS", ("special",))
    client = tooled(tool_call_parser="special", reasoning_parser="none")
    written = Grammar.lark(f'start: "a" <[1]> {json.dumps(json.dumps({"name": "cancel"}) + "</tool_call>")}')
    with answering(written):
        assert whole(client, ASKED) == ([("text", "a"), ("call", "cancel", "{}")], "tool_calls")
        assert streamed(client, ASKED) == ([("text", "a"), ("call", "cancel", "{}")], "tool_calls")


def test_tool_call_markup_stays_text_without_tools(tooled: Callable[..., HttpClient]) -> None:
    written = '<tool_call>{"name": "book", "arguments": {}}</tool_call>'
    with answering(Grammar.choice([written])):
        for more in ({"tools": None}, {"tool_choice": "none"}):
            assert whole(tooled(), {**ASKED, **more}) == ([("text", written)], "stop")


def test_reasoning_opened_by_the_prompt_is_parsed_as_reasoning(tooled: Callable[..., HttpClient]) -> None:
    fields = {"messages": [USER], "temperature": 0, "max_tokens": 60}
    with answering(Grammar.choice(["Hm.\n</think>\n\nYes."])):
        for more in ({"reasoning_effort": "high"}, {"chat_template_kwargs": {"enable_thinking": True}}):
            expected = [("reasoning", "Hm."), ("text", "Yes.")], "stop"
            assert whole(tooled(), {**fields, **more}) == expected
            assert streamed(tooled(), {**fields, **more}) == expected
        assert whole(tooled(), {**fields, "reasoning_effort": "none"}) == ([("text", "Hm.\n</think>\n\nYes.")], "stop")


def test_response_format_constrains_the_text_after_reasoning(tooled: Callable[..., HttpClient]) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {
            "name": "a",
            "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
        },
    }
    fields = {"messages": [USER], "temperature": 0, "max_tokens": 300, "response_format": form, "logit_bias": {}}
    said, _ = whole(tooled(), {**fields, "reasoning_effort": "low", "stop": ["</think>"], "max_tokens": 40})
    assert [one[0] for one in said] == ["reasoning"]
    assert not said[0][1].startswith("{"), "the form does not hold thoughts"
    ((kind, text),) = whole(tooled(), fields)[0]
    assert (kind, set(json.loads(text))) == ("text", {"a"})


def test_tool_answers_contain_token_origins_and_logprobs(tooled: Callable[..., HttpClient]) -> None:
    fields = {**ASKED, "logprobs": True, "speculation": {"origins": True}}
    with answering(Grammar.choice(['I go. <tool_call>{"name": "cancel"}</tool_call>'])):
        (choice,) = (answer := tooled().json(PATH, fields))["choices"]
        events = tooled().events(PATH, fields)
    pieces = [event["choices"][0]["logprobs"] for event in events]
    assert [token for piece in pieces if piece for token in piece["content"]] == choice["logprobs"]["content"]
    ids = [token_id for event in events if "speculation" in event for token_id in event["speculation"]["token_ids"]]
    assert ids == answer["speculation"]["token_ids"][0]


CALLED = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "so",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "book", "arguments": '{"kind": "bus"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "done"},
]


def test_tool_calls_and_results_are_rendered_by_the_chat_template(tooled: Callable[..., HttpClient], tool_engine: AsyncEngine) -> None:
    ids = tooled().json("/tokenize", {"messages": CALLED, "tools": DESCRIBED})["tokens"]
    text = tool_engine.loaded.input_processor.tokenizer.decode(ids, skip_special_tokens=False)
    assert '{"name": "cancel", "description": "", "parameters": {"type": "object", "properties": {}}}}\n' in text
    assert '<think>\nso\n</think>\n\n<tool_call>{"name": "book", "arguments": {"kind": "bus"}}</tool_call><|im_end|>' in text
    assert "<tool_response>book: done</tool_response>" in text
    answer = tooled().json(PATH, {"messages": CALLED, "tools": DESCRIBED, "temperature": 0, "max_tokens": 2})
    assert answer["usage"]["prompt_tokens"] == len(ids)


def strict(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "tools[0].function.parameters"),
    ({"tools": [DESCRIBED[0], DESCRIBED[0]]}, "tools"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": {"b": {"type": "strange"}}}}}],
            "tool_choice": "required",
        },
        "tools[0].function.parameters",
    ),
    (
        {"tools": [DESCRIBED[0], strict("a", {"properties": {"b": {"pattern": "("}}})], "tool_choice": "required"},
        "tools[1].function.parameters",
    ),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ({"functions": [{"name": "a"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
    ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": [{"role": "function", "content": "a", "name": "b"}]}, "messages[0].role"),
    ({"messages": [{**CALLED[1], "role": "user"}]}, "messages[0].tool_calls"),
]


@pytest.mark.parametrize(("more", "name"), REFUSED, ids=[name for _, name in REFUSED])
def test_invalid_tool_field_is_named_in_the_error(tooled: Callable[..., HttpClient], more: dict[str, Any], name: str) -> None:
    for is_streamed in (False, True):
        error = tooled(grammar_timeout_s=600).refusal(PATH, {**ASKED, **more, "stream": is_streamed})
        assert error["param"] == name
        assert not re.search("lark|rule_|%json|start:", error["message"], re.IGNORECASE), "how a grammar is put together"


def test_required_tool_is_called_even_if_the_template_ignores_tools(client: HttpClient) -> None:
    """The embedded model's template does not support tools: calls have the generic form, and the schema is enforced."""
    only = {"type": "function", "function": {"name": "book"}}
    said, reason = whole(client, {**ASKED, "tool_choice": only})
    ((kind, name, arguments),) = said
    assert (kind, name, reason) == ("call", "book", "tool_calls")
    booked = json.loads(arguments)
    assert booked["kind"] in ("taxi", "bus")
    assert booked["seats"] in range(1, 5)
    assert streamed(client, {**ASKED, "tool_choice": only}) == (said, reason)


def test_history_with_tool_calls_is_accepted_without_tools(client: HttpClient) -> None:
    client.json(PATH, {"messages": CALLED, "max_tokens": 1})


def test_tool_choice_function_name_may_be_at_the_top_level(tooled: Callable[..., HttpClient]) -> None:
    name = ASKED["tools"][0]["function"]["name"]
    answers = [
        whole(tooled(), {**ASKED, "tool_choice": choice, "seed": 1, "max_tokens": 60})
        for choice in ({"type": "function", "function": {"name": name}}, {"type": "function", "name": name})
    ]
    assert answers[0] == answers[1]


THINKING: list[tuple[dict[str, Any], str]] = [
    ({"reasoning_effort": "none"}, "reasoning_effort"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"enabled": False}}, "reasoning.enabled"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens, thinking"),
    ({"thinking": {"type": "disabled"}}, "thinking"),
    ({"enable_thinking": False}, "enable_thinking"),
    ({"enable_thinking": True}, "enable_thinking"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking"),
    ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "chat_template_kwargs.reasoning_effort"),
    ({"chat_template_kwargs": {"mood": "good", "a\nb": 1}}, "chat_template_kwargs.mood, chat_template_kwargs.a?b"),
]


@pytest.mark.parametrize(("more", "names"), THINKING)
def test_chat_template_kwargs_unknown_to_the_template_are_reported(client: HttpClient, more: dict[str, Any], names: str) -> None:
    for streams in (False, True):
        answer = client.post(PATH, {"messages": [USER], "max_tokens": 1, "stream": streams, **more})
        assert (answer.status_code, answer.headers.get(IGNORED_HEADER)) == (200, names), answer.text


def test_tokenize_reports_chat_template_kwargs_unknown_to_the_template(client: HttpClient) -> None:
    answer = client.post("/tokenize", {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}})
    assert (answer.status_code, answer.headers[IGNORED_HEADER]) == (200, "chat_template_kwargs.enable_thinking")


def test_tools_without_a_tool_call_parser_are_refused(tooled: Callable[..., HttpClient]) -> None:
    assert "--tool-call-parser" in tooled(tool_call_parser="none").refusal(PATH, ASKED)["message"]


def test_strict_tools_without_an_opening_token_do_not_constrain_the_text(tooled: Callable[..., HttpClient]) -> None:
    """Without a token that marks the beginning of a call, the text is not constrained."""
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in DESCRIBED]
    assert whole(tooled(), {**ASKED, "tools": strict, "max_tokens": 12})[0]


def test_tool_answers_validate_as_types_of_the_openai_package(tooled: Callable[..., HttpClient]) -> None:
    chat = pytest.importorskip("openai.types.chat", reason="openai is not installed")
    fields = {**ASKED, "tool_choice": "required", "parallel_tool_calls": False}
    answer = chat.ChatCompletion.model_validate(tooled().json(PATH, fields), strict=True)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) is not None
    for event in tooled().events(PATH, fields):
        chat.ChatCompletionChunk.model_validate(event, strict=True)
