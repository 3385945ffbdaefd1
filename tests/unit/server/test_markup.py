"""Calls and thoughts are found in what a model writes, wherever the pieces of its text begin."""

import json
import time
from collections.abc import Iterator
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.markup_cases import CASES, GEMMA, HARMONY, HERMES, LLAMA, MISTRAL, TOOLS, XML, Case, Said, events_of, said
from paceline.errors import ConfigError, RequestError
from paceline.parsing.argument_types import coerce_argument
from paceline.parsing.events import ToolCallStart
from paceline.parsing.registry import OutputFormat
from paceline.sampling.params import SamplingParams
from paceline.server.chat_request import ChatRequest


def cut(text: str, places: tuple[int, ...]) -> list[str]:
    return [text[start:end] for start, end in pairwise((0, *places, len(text)))]


def every_split(text: str) -> Iterator[list[str]]:
    """All cuts into two pieces; of short texts also into three; and character by character."""
    yield list(text)
    for num_cuts in (1, 2) if len(text) <= 64 else (1,):
        for places in combinations(range(1, len(text)), num_cuts):
            yield cut(text, places)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.formats[0]}: {case.name}")
def test_an_answer_is_understood(case: Case) -> None:
    events, num_complete = events_of(case, [case.written])
    assert said(events) == case.said
    calls = [one for one in case.said if one[0] == "call"]
    assert num_complete == (len(calls) if case.num_complete is None else case.num_complete)
    for call in calls[:num_complete]:
        assert isinstance(json.loads(call[2]), dict)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.formats[0]}: {case.name}")
def test_every_split_of_an_answer_says_the_same(case: Case) -> None:
    for pieces in every_split(case.written):
        assert said(events_of(case, pieces)[0]) == case.said, pieces


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
    written = [case.written for case in CASES if case.formats == formats]
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


def test_sampled_splits_of_long_answers_say_the_same(seed: int, large_counts: bool) -> None:
    random = np.random.default_rng(seed)
    kinds = sorted({case.formats for case in CASES})
    for count in range(10_000 if large_counts else 90):
        text = long_answer(kinds[count % len(kinds)], random)
        case = Case("long", kinds[count % len(kinds)], text, [], is_opened=bool(random.integers(2)), parallel=bool(random.integers(4)))
        num_cuts = int(random.integers(1, 40))
        pieces = cut(text, tuple(sorted(random.integers(0, len(text) + 1, num_cuts).tolist())))
        once, again = events_of(case, [text]), events_of(case, pieces)
        assert (said(again[0]), again[1]) == (said(once[0]), once[1]), pieces


def test_nothing_of_a_broken_answer_is_lost(seed: int, large_counts: bool) -> None:
    """What is neither white space nor markup of a format is told, wherever an answer breaks off."""
    random = np.random.default_rng(seed)
    for case in CASES:
        for _ in range(200 if large_counts else 4):
            end = int(random.integers(len(case.written) + 1))
            told = "".join("".join(one[1:]) for one in said(events_of(case, [case.written[:end]])[0]))
            words = [word for word in ("Hm", "look", "city", "Köln", "weather") if word in case.written[:end]]
            assert [word for word in words if word not in told] == []


# what is told when so much has arrived, and not a character more has to be waited for
AT_ONCE = [
    (HERMES, "Hello wor", [("text", "Hello wor")]),
    (HERMES, "a <tool", [("text", "a")]),
    (HERMES, "a <tool!", [("text", "a <tool!")]),
    (HERMES, "<think>\nI thi", [("thought", "I thi")]),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Kö', [("call", "weather", '{"city": "Kö')]),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"days": 12', [("call", "weather", '{"days": ')]),
    (HERMES, "<tool_call>{x", [("text", "<tool_call>{x")]),
    (LLAMA, '{"name": "weather", "parameters": {', [("call", "weather", "{")]),
    (LLAMA, '{"name": "Ann"', [("text", '{"name": "Ann"')]),
    (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city', [("call", "weather", '{"city')]),
    (XML, "<tool_call>\n<function=weather>", [("call", "weather", "{")]),
    (XML, "<tool_call>\n<function=weather>\n<parameter=city>\nKöln <b", [("call", "weather", '{"city": "Köln <b')]),
    (XML, "<tool_call>\n<function=weather>\n<parameter=days>\n12", [("call", "weather", '{"days": ')]),
    (GEMMA, '<|tool_call>call:weather{city:<|"|>Kö', [("call", "weather", '{"city": "Kö')]),
    (GEMMA, "<|channel>thought\nI", [("thought", "I")]),
    (HARMONY, "<|channel|>analysis<|message|>I thi", [("thought", "I thi")]),
    (HARMONY, '<|channel|>commentary to=functions.weather<|message|>{"city": "K', [("call", "weather", '{"city": "K')]),
]


@pytest.mark.parametrize(("formats", "arrived", "expected"), AT_ONCE, ids=[arrived for _, arrived, _ in AT_ONCE])
def test_nothing_is_held_back_that_need_not_be(formats: tuple[str, str], arrived: str, expected: Said) -> None:
    request = ChatRequest(messages=[], tools=TOOLS, params=SamplingParams())
    sink = OutputFormat(*formats).sink(0, request.offered_tools, several=request.parallel_tool_calls)
    reading = OutputFormat(*formats).reading(request.offered_tools, sink, in_reasoning=False)
    reading.push(arrived)
    assert said(sink.take()) == expected


def test_a_long_answer_is_read_in_time_that_grows_with_its_length() -> None:
    long = (
        '<tool_call>{"name": "weather", "arguments": {"tags": ['
        + ", ".join(['"a\\n"', "-1.5"] * 20_000)
        + "]}}</tool_call>"
        + "x <tool" * 20_000
    )
    start_s = time.process_time()
    events_of(Case("long", HERMES, long, []), [long])
    events_of(Case("long", HERMES, long, []), [long[at : at + 5] for at in range(0, len(long), 5)])
    assert time.process_time() - start_s < 10


def test_values_are_typed_as_the_schema_says() -> None:
    assert coerce_argument("None", {"type": ["integer", "null"]}) == "null"
    assert coerce_argument(" 3 ", {"type": "number"}) == "3"
    assert coerce_argument("3.5", {"type": "integer"}) == '"3.5"'
    assert coerce_argument('{"a": 1}', {"type": "string"}) == '"{\\"a\\": 1}"'
    assert coerce_argument('{"a": 1}', {}) == '{"a": 1}'
    assert coerce_argument("true", {"enum": ["true", "no"]}) == '"true"'
    assert coerce_argument("[1", {"type": "array"}) == '"[1"'


TEMPLATES = [
    ("{% if tools %}<tool_call>{% endif %}", ("hermes", "none")),
    ("<tool_call>\n<function=name>\n<parameter=key> </think>", ("xml", "think")),
    ("<tool_call>name\n<arg_key>key</arg_key> </think>", ("glm", "think")),
    ('<|start_header_id|> {"name": function name, "parameters": {}}', ("llama3", "none")),
    ("[INST] [TOOL_CALLS] [THINK]", ("mistral", "mistral")),
    ("<|tool_call>call: <|channel>thought", ("gemma4", "gemma4")),
    ("<|start|>assistant<|channel|>final<|message|> <think>", ("harmony", "harmony")),
    ("<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", ("kimi", "none")),
    ('<minimax:tool_call>\n<invoke name="a"> </think>', ("minimax", "think")),
    ("respond with <|tool_call|> and a list", ("granite3", "none")),
    ("<|im_start|>", ("none", "none")),
]


@pytest.mark.parametrize(("template", "found"), TEMPLATES, ids=[found[0] for _, found in TEMPLATES])
def test_a_chat_template_shows_the_formats_of_its_model(template: str, found: tuple[str, str]) -> None:
    tokenizer: Any = SimpleNamespace(template_source=lambda *, has_tools: template)
    assert OutputFormat.of(tokenizer) == OutputFormat(*found)
    assert OutputFormat.of(tokenizer, "none", "none") == OutputFormat("none", "none")


def test_an_id_that_the_model_wrote_is_the_calls() -> None:
    """Its template writes it again, and the model reads the tool's name in it."""
    written = next(case for case in CASES if case.formats[0] == "kimi")
    events, _ = events_of(written, [written.written])
    assert [event.id for event in events if isinstance(event, ToolCallStart)] == ["functions.weather:0", "functions.now:1"]


def test_a_chat_template_that_is_no_text_shows_no_format() -> None:
    def refuse(*, has_tools: bool) -> str:
        raise RequestError("no text")

    tokenizer: Any = SimpleNamespace(template_source=refuse)
    assert OutputFormat.of(tokenizer) == OutputFormat("none", "none")


def test_formats_that_do_not_exist_or_go_together_are_refused() -> None:
    tokenizer: Any = SimpleNamespace(template_source=lambda *, has_tools: "<tool_call>")
    for tools, think in (("json", "auto"), ("auto", "thoughts"), ("harmony", "think"), ("auto", "harmony")):
        with pytest.raises(ConfigError, match="_parser is"):
            OutputFormat.of(tokenizer, tools, think)
