"""`parse_output` reads content, reasoning and calls out of a text, with the parsers that are named or that the text shows."""

from typing import Any

import pytest

from harness.fault_cases import FAULT_CASES, TOOLS, FaultCase
from harness.markup_cases import CASES
from paceline import ParsedOutput, ParsedToolCall, parse_output
from paceline.errors import ConfigError, RequestError
from paceline.parsing.registry import REASONING_SYNONYMS, TOOL_CALL_SYNONYMS, OutputFormat
from paceline.parsing.tool_calls.generic import generic_tool_prompt

CALL = '<tool_call>{"name": "f", "arguments": {"n": 3}}</tool_call>'
F = {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}


def test_parse_output_separates_content_reasoning_and_tool_calls() -> None:
    found = parse_output(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}", tools=[{"type": "function", "function": F}])
    assert (found.content, found.reasoning) == ("I look.", "Hm.")
    assert [(call.name, call.arguments) for call in found.tool_calls] == [("f", {"n": 3})]
    assert found.tool_calls[0].id.startswith("call_")


def test_parse_output_of_plain_text_is_content() -> None:
    assert parse_output("Hello.") == ParsedOutput("Hello.", None, ())
    assert parse_output("") == ParsedOutput("", None, ())


def test_parse_output_types_arguments_by_the_tool_schemas() -> None:
    text = "<tool_call><function=f><parameter=n>3</parameter></function></tool_call>"
    for tools in ([F], [{"type": "function", "function": F}]):
        assert parse_output(text, tools=tools).tool_calls[0].arguments == {"n": 3}
    assert parse_output(text).tool_calls[0].arguments == {"n": "3"}


def test_parse_output_uses_the_named_parsers() -> None:
    assert parse_output(CALL, tool_call_parser="none").content == CALL
    assert parse_output(f"<think>a</think>{CALL}", reasoning_parser="none").content == "<think>a</think>"
    assert parse_output(CALL, tool_call_parser="mistral").tool_calls == ()


def test_parse_output_selects_parsers_from_the_chat_template() -> None:
    found = parse_output(f"a</think>{CALL}", template="<tool_call> </think>")
    assert (found.reasoning, len(found.tool_calls)) == ("a", 1)
    assert parse_output(CALL, template="[TOOL_CALLS]").tool_calls == ()


def test_parse_output_ends_opened_reasoning_at_its_end_marker() -> None:
    assert parse_output("Hm.</think>Yes.", reasoning_parser="qwen3") == ParsedOutput("Yes.", "Hm.", ())
    assert parse_output("Hm.", reasoning_parser="qwen3", in_reasoning=True) == ParsedOutput("", "Hm.", ())


@pytest.mark.spread(0.5)
@pytest.mark.parametrize(
    "case", [case for case in FAULT_CASES if case.calls and not case.in_reasoning], ids=lambda case: f"{case.parsers[0]}: {case.title}"
)
def test_parse_output_detects_the_parser_from_the_text(case: FaultCase) -> None:
    found = parse_output(case.output, tools=TOOLS)
    assert [call.name for call in found.tool_calls] == [name for name, _ in case.calls]


def test_parse_output_reads_calls_without_tool_schemas() -> None:
    for case in CASES:
        if case.name in ("a call", "a function", "a section", "invocations", "names", "a list after a token", "keys and values"):
            assert parse_output(case.output, tool_call_parser=case.formats[0]).tool_calls


def test_parse_output_refuses_a_tool_without_a_name() -> None:
    with pytest.raises(RequestError, match="name"):
        parse_output("a", tools=[{"type": "function"}])
    with pytest.raises(RequestError, match="schema"):
        parse_output("a", tools=[{"name": "f", "parameters": []}])


def test_parse_output_refuses_an_unknown_parser() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser is 'json': use one of auto"):
        parse_output("a", tool_call_parser="json")
    with pytest.raises(ConfigError, match="reasoning_parser"):
        parse_output("a", reasoning_parser="thoughts")


def test_parser_synonyms_mean_documented_parsers() -> None:
    for name, meant in TOOL_CALL_SYNONYMS.items():
        assert OutputFormat(name, "none").tool_call_parser == meant
    for name, meant in REASONING_SYNONYMS.items():
        assert OutputFormat("none", name).reasoning_parser == meant


def test_generic_tool_prompt_describes_the_form_the_parser_reads() -> None:
    prompt = generic_tool_prompt(TOOLS)
    assert '"name": "f"' in prompt
    form = next(line for line in prompt.splitlines() if line.startswith('{"tool_call"'))
    found = parse_output(form, tool_call_parser="generic").tool_calls
    assert found == (ParsedToolCall("the function's name", {"a parameter": "its value"}, found[0].id),)


ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize("end", ["<|im_end|>", "</s>", "<|eot_id|>", "<|eom_id|>\n", "<|im_end|>\n<|endoftext|>", "<end_of_turn>"])
def test_parse_output_removes_a_final_end_token(end: str) -> None:
    assert parse_output("Hi." + end, template="<tool_call>").content == "Hi."
    found = parse_output(ROME + end)
    assert (found.content, len(found.tool_calls)) == ("", 1)
    assert parse_output(f"Say {end.strip()} twice", template="<tool_call>").content == f"Say {end.strip()} twice"


def test_parse_output_marks_a_truncated_call_as_incomplete() -> None:
    assert [call.is_complete for call in parse_output(ROME).tool_calls] == [True]
    (call,) = parse_output(ROME[: ROME.index("ome")]).tool_calls
    assert (call.is_complete, call.arguments) == (False, {"city": "R"})


@pytest.mark.parametrize("tools", ["weather", {"name": "weather"}, ["weather"], [7]])
def test_parse_output_refuses_tools_that_are_no_list_of_functions(tools: Any) -> None:
    with pytest.raises(RequestError, match="tool"):
        parse_output(ROME, tools=tools)


def test_parse_output_accepts_tools_none() -> None:
    assert len(parse_output(ROME, tools=None).tool_calls) == 1
