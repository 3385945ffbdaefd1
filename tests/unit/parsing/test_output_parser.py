"""Tool calls and reasoning are found in a model's output, however it is split into pieces."""

import json
import time
from collections.abc import Iterator
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.format_rows import longest_of_formats
from harness.markup_cases import CASES, GEMMA, HARMONY, HERMES, LLAMA, MISTRAL, TOOLS, XML, Case, Parsed, events_of, parsed
from paceline.errors import ConfigError, RequestError
from paceline.parsing.argument_types import coerce_argument
from paceline.parsing.events import ToolCallStart
from paceline.parsing.registry import OutputFormat


def cut(text: str, places: tuple[int, ...]) -> list[str]:
    return [text[start:end] for start, end in pairwise((0, *places, len(text)))]


def every_split(text: str, *, into_three: bool) -> Iterator[list[str]]:
    """All cuts into two pieces; of short texts also into three, on request; and character by character."""
    yield list(text)
    for num_cuts in (1, 2) if len(text) <= 64 and into_three else (1,):
        for places in combinations(range(1, len(text)), num_cuts):
            yield cut(text, places)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.formats[0]}: {case.name}")
def test_whole_answer_is_parsed_into_text_and_tool_calls(case: Case) -> None:
    events, num_complete = events_of(case, [case.output])
    assert parsed(events) == case.expected
    calls = [one for one in case.expected if one[0] == "call"]
    assert num_complete == (len(calls) if case.num_complete is None else case.num_complete)
    for call in calls[:num_complete]:
        assert isinstance(json.loads(call[2]), dict)


CUT = longest_of_formats((case.formats, case.output) for case in CASES if len(case.output) <= 64)


@pytest.mark.spread(0.4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.formats[0]}: {case.name}")
def test_parser_events_are_equal_for_every_split_of_an_answer(case: Case, large_counts: bool) -> None:
    for pieces in every_split(case.output, into_three=large_counts or case.output in CUT):
        assert parsed(events_of(case, pieces)[0]) == case.expected, pieces


MARKERS = (
    "<tool_call>",
    "<|tool_call>",
    "[TOOL_CALLS]",
    "<think>",
    "</think>",
    "<|channel|>",
    "<|channel>",
    "<function=",
    "{",
    '"',
    "\\",
    "\n",
)


def long_answer(formats: tuple[str, str], random: np.random.Generator) -> str:
    """Answers of a format in a row, with text, broken markers and cut answers in between."""
    written = [case.output for case in CASES if case.formats == formats]
    parts = []
    for _ in range(12):
        kind = random.integers(4)
        text = written[random.integers(len(written))]
        if kind == 0:
            text = text[: random.integers(len(text) + 1)]
        elif kind == 1:
            marker = MARKERS[random.integers(len(MARKERS))]
            text = f" äö😀 {marker[: random.integers(1, len(marker) + 1)]} "
        parts.append(text)
    return "".join(parts)


def test_parser_events_are_equal_for_random_splits_of_long_answers(seed: int, large_counts: bool) -> None:
    random = np.random.default_rng(seed)
    kinds = sorted({case.formats for case in CASES})
    for count in range(10_000 if large_counts else 90):
        text = long_answer(kinds[count % len(kinds)], random)
        case = Case("long", kinds[count % len(kinds)], text, [], is_opened=bool(random.integers(2)), parallel=bool(random.integers(4)))
        num_cuts = int(random.integers(1, 40))
        pieces = cut(text, tuple(sorted(random.integers(0, len(text) + 1, num_cuts).tolist())))
        once, again = events_of(case, [text]), events_of(case, pieces)
        assert (parsed(again[0]), again[1]) == (parsed(once[0]), once[1]), pieces


def test_truncated_answer_loses_no_text(seed: int, large_counts: bool) -> None:
    """What is neither white space nor markup of a format is in an event, wherever an answer breaks off."""
    random = np.random.default_rng(seed)
    for case in CASES:
        for _ in range(200 if large_counts else 4):
            end = int(random.integers(len(case.output) + 1))
            found = "".join("".join(one[1:]) for one in parsed(events_of(case, [case.output[:end]])[0]))
            words = [word for word in ("Hm", "look", "Köln", "weather") if word in case.output[:end]]
            assert [word for word in words if word not in found] == []


# the events of a text that has arrived, without waiting for one more character
AT_ONCE = [
    (HERMES, "Hello wor", [("text", "Hello wor")]),
    (HERMES, "a <tool", [("text", "a")]),
    (HERMES, "a <tool!", [("text", "a <tool!")]),
    (HERMES, "<think>\nI thi", [("reasoning", "I thi")]),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Kö', [("call", "weather", '{"city": "Kö')]),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"days": 12', [("call", "weather", "{")]),
    (HERMES, "<tool_call>{<", [("text", "<tool_call>{")]),
    (LLAMA, '{"name": "weather", "parameters": {', [("call", "weather", "{")]),
    (LLAMA, '{"name": "Ann"', [("text", '{"name": "Ann"')]),
    (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city', [("call", "weather", "{")]),
    (XML, "<tool_call>\n<function=weather>", [("call", "weather", "{")]),
    (XML, "<tool_call>\n<function=weather>\n<parameter=city>\nKöln <b", [("call", "weather", '{"city": "Köln <b')]),
    (XML, "<tool_call>\n<function=weather>\n<parameter=days>\n12", [("call", "weather", "{")]),
    (GEMMA, '<|tool_call>call:weather{city:<|"|>Kö', [("call", "weather", '{"city": "Kö')]),
    (GEMMA, "<|channel>thought\nI", [("reasoning", "I")]),
    (HARMONY, "<|channel|>analysis<|message|>I thi", [("reasoning", "I thi")]),
    (HARMONY, '<|channel|>commentary to=functions.weather<|message|>{"city": "K', [("call", "weather", '{"city": "K')]),
]


@pytest.mark.parametrize(("formats", "arrived", "expected"), AT_ONCE, ids=[arrived for _, arrived, _ in AT_ONCE])
def test_parser_emits_text_as_soon_as_it_is_decided(formats: tuple[str, str], arrived: str, expected: Parsed) -> None:
    assert parsed(OutputFormat(*formats).stream(TOOLS).push(arrived)) == expected


def test_parsing_a_long_answer_takes_linear_time(large_counts: bool) -> None:
    num_parts = 20_000 if large_counts else 5_000
    long = (
        '<tool_call>{"name": "weather", "arguments": {"tags": ['
        + ", ".join(['"a\\n"', "-1.5"] * num_parts)
        + "]}}</tool_call>"
        + "x <tool" * num_parts
    )
    start_s = time.process_time()
    events_of(Case("long", HERMES, long, []), [long])
    events_of(Case("long", HERMES, long, []), [long[at : at + 5] for at in range(0, len(long), 5)])
    assert time.process_time() - start_s < (10 if large_counts else 3)


def test_coerce_argument_gives_values_the_types_of_the_schema() -> None:
    assert coerce_argument("None", {"type": ["integer", "null"]}) == "null"
    assert coerce_argument(" 3 ", {"type": "number"}) == "3"
    assert coerce_argument("3.5", {"type": "integer"}) == '"3.5"'
    assert coerce_argument('{"a": 1}', {"type": "string"}) == '"{\\"a\\": 1}"'
    assert coerce_argument('{"a": 1}', {}) == '{"a": 1}'
    assert coerce_argument("true", {"enum": ["true", "no"]}) == '"true"'
    assert coerce_argument("[1", {"type": "array"}) == '"[1"'


TEMPLATES = [
    ("{% if tools %}<tool_call>{% endif %}", ("hermes", "none")),
    ("<tool_call>\n<function=name>\n<parameter=key> </think>", ("qwen3_coder", "qwen3")),
    ("<tool_call>name\n<arg_key>key</arg_key> </think>", ("glm45", "qwen3")),
    ('<|start_header_id|> {"name": function name, "parameters": {}}', ("llama3_json", "none")),
    ("[INST] [TOOL_CALLS] [THINK]", ("mistral", "mistral")),
    ("<|tool_call>call: <|channel>thought", ("gemma4", "gemma4")),
    ("<|start|>assistant<|channel|>final<|message|> <think>", ("openai", "openai_gptoss")),
    ("<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", ("kimi_k2", "none")),
    ('<minimax:tool_call>\n<invoke name="a"> </think>', ("minimax_m2", "qwen3")),
    ("respond with <|tool_call|> and a list", ("granite", "none")),
    ("<|im_start|>", ("generic", "none")),
    ("", ("none", "none")),
]


@pytest.mark.parametrize(("template", "found"), TEMPLATES, ids=[found[0] for _, found in TEMPLATES])
def test_chat_template_selects_the_parsers_of_its_model(template: str, found: tuple[str, str]) -> None:
    tokenizer: Any = SimpleNamespace(template_source=lambda *, has_tools: template)
    assert OutputFormat.of(tokenizer) == OutputFormat(*found)
    assert OutputFormat.of(tokenizer, "none", "none") == OutputFormat("none", "none")


def test_tool_call_id_written_by_the_model_is_kept() -> None:
    """Its template writes it again, and the model reads the tool's name in it."""
    case = next(case for case in CASES if case.formats[0] == "kimi_k2")
    events, _ = events_of(case, [case.output])
    assert [event.id for event in events if isinstance(event, ToolCallStart)] == ["functions.weather:0", "functions.now:1"]


def test_unreadable_chat_template_selects_no_parser() -> None:
    def refuse(*, has_tools: bool) -> str:
        raise RequestError("no text")

    tokenizer: Any = SimpleNamespace(template_source=refuse)
    assert OutputFormat.of(tokenizer) == OutputFormat("none", "none")


def test_unknown_or_incompatible_parsers_are_refused() -> None:
    tokenizer: Any = SimpleNamespace(template_source=lambda *, has_tools: "<tool_call>")
    for tools, reasoning in (("json", "auto"), ("auto", "thoughts"), ("openai", "qwen3"), ("auto", "openai_gptoss")):
        with pytest.raises(ConfigError, match="parser"):
            OutputFormat.of(tokenizer, tools, reasoning)
