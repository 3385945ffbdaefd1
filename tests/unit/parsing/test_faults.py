"""Calls are read in spite of the small faults that models make, and every call ends in valid JSON."""

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.fault_cases import FAULT_CASES, TOOLS, FaultCase
from harness.format_rows import longest_of_formats, pieces_of
from harness.markup_cases import CASES
from paceline.parsing.events import Event, ToolCallArguments, ToolCallStart
from paceline.parsing.parse_output import ParsedOutput
from paceline.parsing.registry import OutputFormat
from paceline.parsing.tools import Tool

SHARED = Path(__file__).parents[3].parent / "shared" / "cases" / "tool_calls.jsonl"
Found = tuple[list[tuple[str, dict[str, Any]]], str, str | None]


def found_in(case: FaultCase, pieces: Sequence[str], tools: Sequence[Tool] = TOOLS) -> Found:
    """The calls, content and reasoning of an answer that arrives in pieces."""
    stream = OutputFormat(*case.parsers).stream(tools, in_reasoning=case.in_reasoning)
    events: list[Event] = [event for piece in pieces for event in stream.push(piece)]
    output = ParsedOutput.of_events(events + stream.finish())
    return [(call.name, call.arguments) for call in output.tool_calls], output.content, output.reasoning


CUT = longest_of_formats((case.parsers, case.output) for case in FAULT_CASES)


def name_of(case: FaultCase) -> str:
    return f"{case.parsers[0]}: {case.title}"


@pytest.mark.spread(0.5)
@pytest.mark.parametrize("case", FAULT_CASES, ids=name_of)
def test_faulty_tool_call_is_repaired_in_every_split(case: FaultCase, large_counts: bool) -> None:
    for pieces in pieces_of(case.output, every_cut=large_counts or case.output in CUT):
        assert found_in(case, pieces) == (case.calls, case.content, case.reasoning), pieces


def shared_cases() -> list[dict[str, Any]]:
    if not SHARED.exists():
        return []
    return [json.loads(line) for line in SHARED.read_text(encoding="utf-8").splitlines()]


@pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED} is not here")
def test_shared_parser_cases_are_parsed_right_in_every_split(large_counts: bool) -> None:
    longest = longest_of_formats(((row["format"], row["think"]), row["output"]) for row in shared_cases())
    for row in shared_cases():
        tools = [Tool(name=name, parameters=schema) for name, schema in row["tools"].items()]
        calls = [(call["name"], call["arguments"]) for call in row["calls"]]
        case = FaultCase(row["title"], (row["format"], row["think"]), row["output"], calls)
        for pieces in pieces_of(case.output, every_cut=large_counts or case.output in longest):
            found, content, _ = found_in(case, pieces, tools)
            assert found == calls, (row["title"], pieces)
            assert row["content"] in (None, content), (row["title"], pieces)


MARKS = (
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", "<arg_key>", "</arg_value>", "<|tool_call>",
    "<tool_call|>", '<|"|>', "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<|channel|>", "<|message|>", "<|call|>", "<|python_tag|>",
    "<|tool_call_begin|>", "<|tool_call_end|>", "<minimax:tool_call>", "<invoke name=", "```", "to=functions.f ", "call:", "null", "\\u12",
    "{", "}", "[", "]", ",", ":", '"', "'", "\\", "\n", " ", "/*", "//", "é", "😀", "0", "-", "e",
)  # fmt: skip


def damaged(text: str, random: np.random.Generator) -> str:
    """A text with one to four pieces dropped, doubled, moved, or replaced by a mark."""
    for _ in range(int(random.integers(1, 5))):
        begin = int(random.integers(len(text) + 1))
        end = min(len(text), begin + int(random.integers(12)))
        kind = random.integers(4)
        middle = ("", text[begin:end] * 2, MARKS[random.integers(len(MARKS))], text[begin:end][::-1])[kind]
        text = text[:begin] + middle + text[end:]
    return text


def checked_calls(events: Sequence[Event]) -> None:
    """Every call has the text of one JSON object."""
    texts: dict[int, str] = {}
    for event in events:
        if isinstance(event, ToolCallStart):
            texts[event.call] = ""
        elif isinstance(event, ToolCallArguments):
            texts[event.call] += event.json
    for text in texts.values():
        assert isinstance(json.loads(text), dict)


MEGABYTE = 1_000_000  # characters
LONG: dict[str, tuple[tuple[str, str], str]] = {
    "text": (("hermes", "qwen3"), "x <tool" * (MEGABYTE // 7)),
    "blanks": (("hermes", "qwen3"), " \n" * (MEGABYTE // 2)),
    "an argument": (("hermes", "none"), '<tool_call>{"name": "f", "arguments": {"city": "' + 'x "y" ' * (MEGABYTE // 6)),
    "a list": (("hermes", "none"), '<tool_call>{"name": "f", "arguments": {"tags": [' + '"a\\n", -1.5, ' * (MEGABYTE // 13)),
    "arguments before the name": (("hermes", "none"), '<tool_call>{"arguments": {"city": "' + "x" * MEGABYTE + '"}, "name": "f"}'),
    "opening marks": (("hermes", "qwen3"), "<tool_call>" * (MEGABYTE // 11)),
    "opening marks in reasoning": (("hermes", "qwen3"), "<think>" + "<tool_call>x" * (MEGABYTE // 12)),
    "held reasoning": (("hermes", "qwen3"), "<think><tool_call>" + "x" * MEGABYTE + "</think>"),
    "unclosed parameters": (("qwen3_coder", "none"), "<tool_call><function=f>" + "<parameter=city>a" * (MEGABYTE // 17)),
    "closing tags": (("qwen3_coder", "none"), "<function=f><parameter=city>" + "</parameter> x" * (MEGABYTE // 14)),
    "end marks": (("qwen3_coder", "none"), "<function=f><parameter=city>" + "</function></tool_call>" * (MEGABYTE // 23)),
    "nested calls": (("qwen3_coder", "none"), "<function=f><parameter=city>" + "<function=g><parameter=n>" * (MEGABYTE // 25)),
    "unclosed values": (("glm45", "none"), "<tool_call>f" + "<arg_key>city</arg_key><arg_value>a" * (MEGABYTE // 35)),
    "XML": (("minicpm5", "none"), '<function name="f"><param name="city">' + "&lt;<![CDATA[x]]></param> x" * (MEGABYTE // 27)),
    "keys": (("hy_v3", "none"), "<tool_calls><tool_call>f<tool_sep>" + "<arg_key>city</arg_key><arg_value>a" * (MEGABYTE // 35)),
    "quotes": (("gemma4", "none"), "<|tool_call>call:f{city:" + '<|"|>a<tool_call|>' * (MEGABYTE // 17)),
    "headers": (("openai", "openai_gptoss"), "commentary to=functions." * (MEGABYTE // 24)),
}


@pytest.mark.parametrize("title", LONG)
def test_parsing_time_is_linear_in_the_length_of_the_answer(title: str, large_counts: bool) -> None:
    """A megabyte takes less than 3 s on a quiet machine; in quadratic time the tenth of it that a short run reads would take minutes."""
    parsers, text = LONG[title]
    assert time_of(parsers, text if large_counts else text[: len(text) // 10]) < (9 if large_counts else 2)


def time_of(parsers: tuple[str, str], text: str) -> float:
    start_s = time.process_time()
    stream = OutputFormat(*parsers).stream(TOOLS)
    for at in range(0, len(text), 16):
        stream.push(text[at : at + 16])
    stream.finish()
    return time.process_time() - start_s


def test_damaged_answers_parse_to_valid_calls_in_every_split(seed: int, large_counts: bool) -> None:
    random = np.random.default_rng(seed)
    written = [(case.parsers, case.output, TOOLS) for case in FAULT_CASES] + [(case.formats, case.output, TOOLS) for case in CASES]
    for _ in range(100_000 if large_counts else 600):
        parsers, output, tools = written[random.integers(len(written))]
        text, in_reasoning = damaged(output, random), bool(random.integers(4) == 0)
        case = FaultCase("damaged", parsers, text, [], in_reasoning=in_reasoning)
        stream = OutputFormat(*parsers).stream(tools, in_reasoning=in_reasoning)
        checked_calls(stream.push(text) + stream.finish())
        whole = found_in(case, [text])
        places = sorted({0, len(text), *random.integers(0, len(text) + 1, int(random.integers(1, 6))).tolist()})
        assert found_in(case, [text[a:b] for a, b in pairwise(places)]) == whole, (parsers, text, places)
        assert found_in(case, list(text)) == whole, (parsers, text)
