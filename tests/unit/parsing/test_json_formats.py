"""Formats whose calls are JSON between marks, and their neighbours of the same families: with the faults that models make."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.format_rows import check, longest_of_formats, name_of
from harness.json_formats import REASONING_PARSERS
from harness.markup_cases import Case, Parsed, events_of, parsed
from paceline.parsing.registry import OutputFormat

CITY = '{"city": "Köln [1]"}'
TWO: Parsed = [("call", "weather", CITY), ("call", "now", "{}")]
DS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
DS_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
SEP = "<｜tool▁sep｜>"


@dataclass(frozen=True, slots=True)
class Style:
    """How a format writes JSON calls.

    Attributes:
        open, close: marks; `close` may be empty.
        is_list: whether all calls are one list; else each has marks of its own.
        only_known: whether only offered tools are called.
    """

    name: str
    open: str
    close: str
    is_list: bool = True
    name_key: str = "name"
    arguments_key: str = "arguments"
    only_known: bool = False

    def call(self, name: str, arguments: str = "{}") -> str:
        return f'{{"{self.name_key}": "{name}", "{self.arguments_key}": {arguments}}}'

    def case(self, name: str, output: str, expected: Parsed, **fields: Any) -> Case:
        return Case(name, (self.name, REASONING_PARSERS[self.name]), output, expected, **fields)

    @property
    def bare(self) -> str:
        """The opening mark without the list's bracket."""
        return self.open.removesuffix("[")


STYLES = (
    Style("phi4_mini_json", "<|tool_call|>[", "]<|/tool_call|>"),
    Style("functools", "functools[", "]"),
    Style("nemotron_json", "<TOOLCALL>[", "]</TOOLCALL>"),
    Style("cohere_command3", "<|START_ACTION|>[", "]<|END_ACTION|>", name_key="tool_name", arguments_key="parameters"),
    Style("command_r", "Action: ```json\n[", "]\n```", name_key="tool_name", arguments_key="parameters", only_known=True),
    Style("jamba", "<tool_calls>[", "]</tool_calls>"),
    Style("hunyuan_a13b", "<tool_calls>[", "]</tool_calls>"),
    Style("xlam", "[", "]", only_known=True),
    Style("granite", "<tool_call>[", "]"),
    Style("internlm", "<|action_start|><|plugin|>", "<|action_end|>", is_list=False, arguments_key="parameters"),
    Style("granite-20b-fc", "<function_call> ", "", is_list=False),
    Style("gigachat3", "<|function_call|>", "", is_list=False),
    Style("gigachat3_message", "<|message_sep|>\n\nfunction call<|role_sep|>\n", "", is_list=False),
    Style("minimax_m1", "<tool_calls>", "</tool_calls>", is_list=False),
)
REASONING_PARSERS = {**REASONING_PARSERS, "granite": "granite"}


def list_cases(style: Style) -> Iterator[Case]:
    """Cases of formats that write a list."""
    first, second = style.call("weather", CITY), style.call("now")
    one: Parsed = [("call", "weather", CITY)]
    yield style.case("two calls", f"{style.open}{first}, {second}{style.close}", TWO)
    yield style.case("line ends", f"{style.open}\n    {first},\n    {second}\n{style.close}", TWO)
    yield style.case("no comma", f"{style.open}{first}\n{second}{style.close}", TWO)
    yield style.case("a trailing comma", f"{style.open}{first},{style.close}", one)
    yield style.case("a doubled brace", f"{style.open}{first}}}{style.close}", one)
    yield style.case("a missing bracket", f"{style.open}{first}{style.close.removeprefix(']')}", one)
    yield style.case(
        "one call and no more",
        f"{style.open}{first}, {second}{style.close}",
        [*one, ("text", f", {second}{style.close}")],
        parallel=False,
    )
    if not style.only_known:
        yield style.case("no calls", f"{style.open}{style.close}", [])
    if style.bare not in ("", "functools"):
        yield style.case("no list", f"{style.bare}{first}{style.close.removeprefix(']')}", one)


def object_cases(style: Style) -> Iterator[Case]:
    """Cases of formats that write marks around each call."""
    first, second = style.call("weather", CITY), style.call("now")
    yield style.case("two calls", f"{style.open}{first}{style.close}{style.open}{second}{style.close}", TWO)
    yield style.case("a line between", f"{style.open}{first}{style.close}\n{style.open}\n{second}{style.close}", TWO)
    yield style.case("one mark", f"{style.open}{first}\n{second}{style.close}", TWO)
    yield style.case("a list", f"{style.open}[{first}, {second}]{style.close}", TWO)
    yield style.case("a doubled brace", f"{style.open}{first}}}{style.close}", [("call", "weather", CITY)])


def json_cases(style: Style) -> Iterator[Case]:
    """Cases of all styles."""
    first = style.call("weather", CITY)
    one: Parsed = [("call", "weather", CITY)]
    yield style.case("one call", f"{style.open}{first}{style.close}", one)
    yield style.case("text after", f"{style.open}{first}{style.close}\nDone.", [*one, ("text", "Done.")])
    if style.name != "xlam":  # a list within text is no call
        yield style.case("text before", f"I look. {style.open}{first}{style.close}", [("text", "I look."), *one])
    mark = style.close.removeprefix("]")
    if mark and style.name != "command_r":
        yield style.case("a doubled end mark", f"{style.open}{first}{style.close}{mark}", one)
    if style.close:
        yield style.case("no end mark", f"{style.open}{first}", one)
        yield style.case("half an end mark", f"{style.open}{first}{style.close[:-1]}", one)
    swapped = f'{{"{style.arguments_key}": {CITY}, "{style.name_key}": "weather"}}'
    yield style.case("arguments first", f"{style.open}{swapped}{style.close}", one)
    quoted = style.call("weather", json.dumps(CITY, ensure_ascii=False))
    yield style.case("arguments in a text", f"{style.open}{quoted}{style.close}", one)
    unknown = f"{style.open}{style.call('fly')}{style.close}"
    yield style.case("an unknown tool", unknown, [("text", unknown)] if style.only_known else [("call", "fly", "{}")])
    yield style.case("no call", f"{style.open}later{style.close}", [("text", f"{style.open}later{style.close}")])
    yield style.case("another JSON", f'{style.open}{{"a": 1}}{style.close}', [("text", f'{style.open}{{"a": 1}}{style.close}')])
    if not style.only_known:
        yield style.case("no arguments", f'{style.open}{{"{style.name_key}": "now"}}{style.close}', [("call", "now", "{}")])
    yield from list_cases(style) if style.is_list else object_cases(style)


def case(format_name: str, name: str, output: str, expected: Parsed, **fields: Any) -> Case:
    return Case(name, (format_name, REASONING_PARSERS[format_name]), output, expected, **fields)


SPECIAL_CASES = [
    case("phi4_mini_json", "functools", f'functools[{{"name": "weather", "arguments": {CITY}}}]', [("call", "weather", CITY)]),
    case(
        "phi4_mini_json", "a code block", f'<|tool_call|>```json\n[{{"name": "weather", "arguments": {CITY}}}]\n```<|/tool_call|>', TWO[:1]
    ),
    case("functools", "a word", "import functools, and functools[0].", [("text", "import functools, and functools[0].")]),
    case(
        "nemotron_json",
        "thoughts that the prompt began",
        'Hm.\n</think>\n\n<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>',
        [("reasoning", "Hm."), ("call", "now", "{}")],
        is_opened=True,
    ),
    case(
        "cohere_command3",
        "thoughts, ids and line ends",
        '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
        + CITY
        + '},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        [("reasoning", "Hm."), *TWO],
    ),
    case("cohere_command3", "a response", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", [("text", "Yes.")]),
    case(
        "cohere_command3",
        "thoughts and a response",
        "<|START_THINKING|>\nHm.\n<|END_THINKING|>\n<|START_RESPONSE|>Yes [1].<|END_RESPONSE|>",
        [("reasoning", "Hm."), ("text", "Yes [1].")],
    ),
    case(
        "command_r",
        "as the model writes it",
        'I look.\nAction:\n```json\n[\n    {\n        "tool_name": "weather",\n        "parameters": ' + CITY + "\n    }\n]```\n",
        [("text", "I look."), *TWO[:1]],
    ),
    case("command_r", "the word", "Action: none.", [("text", "Action: none.")]),
    case("hunyuan_a13b", "the role", "助手：Yes.", [("text", "Yes.")]),
    case(
        "hunyuan_a13b",
        "thoughts and calls in an answer",
        '<think>\nHm.\n</think>\n<answer>\n<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>\n</answer>',
        [("reasoning", "Hm."), ("call", "now", "{}")],
    ),
    case("hunyuan_a13b", "an answer", "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", [("reasoning", "Hm."), ("text", "Yes.")]),
    case("hunyuan_a13b", "an end within text", "Write </answer> there.", [("text", "Write </answer> there.")]),
    case("jamba", "calls on lines", '<tool_calls>\n{"name": "now"}\n{"name": "now"}\n</tool_calls>', [("call", "now", "{}")] * 2),
    case("xlam", "a code block", f'So:\n```json\n[{{"name": "weather", "arguments": {CITY}}}]\n```', [("text", "So:"), *TWO[:1]]),
    case("xlam", "other code", "```python\nx = [1]\n```", [("text", "```python\nx = [1]\n```")]),
    case("xlam", "tags", f'<tool_call>[{{"name": "weather", "arguments": {CITY}}}]</tool_call>', TWO[:1]),
    case("xlam", "a list of numbers", "[1, 2]", [("text", "[1, 2]")]),
    case("xlam", "a list in text", 'So: [{"name": "now", "arguments": {}}]', [("text", 'So: [{"name": "now", "arguments": {}}]')]),
    case("internlm", "an interpreter", "<|action_start|><|interpreter|>1", [("text", "<|action_start|><|interpreter|>1")]),
    case(
        "granite-20b-fc",
        "thoughts",
        'Here is my thought process: Hm. Here is my response: <function_call> {"name": "now", "arguments": {}}',
        [("reasoning", "Hm."), ("call", "now", "{}")],
    ),
]
DEEPSEEK_CASES = [
    case("deepseek_v3", "one call", f"{DS}function{SEP}weather\n```json\n{CITY}\n```{DS_END}", TWO[:1]),
    case(
        "deepseek_v3",
        "two calls",
        f"{DS}function{SEP}weather\n```json\n{CITY}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function{SEP}now\n```json\n{{}}\n```{DS_END}",
        TWO,
    ),
    case(
        "deepseek_v3",
        "thoughts and text",
        f"<think>\nHm.\n</think>\n\nI look.{DS}function{SEP}now\n```json\n{{}}\n```{DS_END}",
        [("reasoning", "Hm."), ("text", "I look."), ("call", "now", "{}")],
    ),
    case("deepseek_v3", "no outer end mark", f"{DS}function{SEP}weather\n```json\n{CITY}\n```<｜tool▁call▁end｜>", TWO[:1]),
    case("deepseek_v3", "no end marks", f"{DS}function{SEP}weather\n```json\n{CITY}\n```", TWO[:1]),
    case("deepseek_v3", "no end of the fence", f"{DS}function{SEP}weather\n```json\n{CITY}{DS_END}", TWO[:1]),
    case("deepseek_v3", "no fence", f"{DS}function{SEP}weather\n{CITY}{DS_END}", TWO[:1]),
    case("deepseek_v3", "no inner mark", f"<｜tool▁calls▁begin｜>function{SEP}weather\n```json\n{CITY}\n```{DS_END}", TWO[:1]),
    case("deepseek_v3", "no outer mark", f"<｜tool▁call▁begin｜>function{SEP}weather\n```json\n{CITY}\n```<｜tool▁call▁end｜>", TWO[:1]),
    case("deepseek_v3", "another spelling", f"<｜tool_calls_begin｜><｜tool▁call▁begin｜>function{SEP}now\n```json\n{{}}\n```", TWO[1:]),
    case("deepseek_v3", "the newer form", f"{DS}weather{SEP}{CITY}{DS_END}", TWO[:1]),
    case("deepseek_v3", "text after", f"{DS}function{SEP}now\n```json\n{{}}\n```{DS_END}\nDone.", [*TWO[1:], ("text", "Done.")]),
    case("deepseek_v3", "no call", f"{DS}later", [("text", f"{DS}later")]),
    case("deepseek_v31", "one call", f"{DS}weather{SEP}{CITY}{DS_END}", TWO[:1]),
    case("deepseek_v31", "two calls", f"{DS}weather{SEP}{CITY}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now{SEP}{{}}{DS_END}", TWO),
    case("deepseek_v31", "line ends", f"{DS}\nweather\n{SEP}\n{CITY}\n{DS_END}", TWO[:1]),
    case("deepseek_v31", "a tool called function", f"{DS}function{SEP}{{}}{DS_END}", [("call", "function", "{}")]),
    case("deepseek_v31", "no arguments", f"{DS}now{SEP}{DS_END}", TWO[1:]),
    case("deepseek_v31", "a fence", f"{DS}weather{SEP}```json\n{CITY}\n```{DS_END}", TWO[:1]),
    case("deepseek_v31", "no end marks", f"{DS}weather{SEP}{CITY}", TWO[:1]),
    case("deepseek_v31", "half an end mark", f"{DS}weather{SEP}{CITY}<｜tool▁ca", TWO[:1]),
    case("deepseek_v31", "text before", f"I look.\n\n{DS}now{SEP}{{}}{DS_END}", [("text", "I look."), *TWO[1:]]),
    case("deepseek_v31", "no JSON", f"{DS}now{SEP}x{DS_END}", [("text", f"{DS}now{SEP}x{DS_END}")]),
    case(
        "deepseek_v31",
        "one call and no more",
        f"{DS}now{SEP}{{}}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now{SEP}{{}}{DS_END}",
        [*TWO[1:], ("text", f"<｜tool▁call▁begin｜>now{SEP}{{}}{DS_END}")],
        parallel=False,
    ),
]


def dsml(block: str, *invokes: str) -> str:
    return f"<｜DSML｜{block}>\n" + "".join(invokes) + f"</｜DSML｜{block}>"


def invoke(name: str, *parameters: str) -> str:
    return f'<｜DSML｜invoke name="{name}">\n' + "".join(parameters) + "</｜DSML｜invoke>\n"


def parameter(key: str, value: str, attribute: str = ' string="true"') -> str:
    return f'<｜DSML｜parameter name="{key}"{attribute}>{value}</｜DSML｜parameter>\n'


CITY_PARAMETER = parameter("city", "Köln [1]")
NOT_TEXT = ' string="false"'


def dsml_cases(name: str, block: str) -> Iterator[Case]:
    one = TWO[:1]
    yield case(name, "two calls", dsml(block, invoke("weather", CITY_PARAMETER), invoke("now")), TWO)
    yield case(name, "text before", "I look.\n\n" + dsml(block, invoke("now")), [("text", "I look."), *TWO[1:]])
    typed = [parameter("days", "2", NOT_TEXT), parameter("tags", '["a"]', NOT_TEXT), parameter("metric", "True", NOT_TEXT)]
    yield case(name, "values", dsml(block, invoke("weather", *typed)), [("call", "weather", '{"days": 2, "tags": ["a"], "metric": true}')])
    yield case(
        name,
        "a text marked as JSON",
        dsml(block, invoke("weather", parameter("city", "10", NOT_TEXT))),
        [("call", "weather", '{"city": "10"}')],
    )
    yield case(
        name, "a number marked as text", dsml(block, invoke("weather", parameter("days", "2"))), [("call", "weather", '{"days": 2}')]
    )
    yield case(
        name, "any value marked as text", dsml(block, invoke("weather", parameter("any", "[2]"))), [("call", "weather", '{"any": "[2]"}')]
    )
    yield case(name, "an unknown key", dsml(block, invoke("now", parameter("a", "1", NOT_TEXT))), [("call", "now", '{"a": 1}')])
    yield case(name, "no attribute", dsml(block, invoke("weather", parameter("city", "Köln [1]", ""))), one)
    yield case(
        name,
        "line ends in a text",
        dsml(block, invoke("weather", parameter("city", 'a\n"b"'))),
        [("call", "weather", '{"city": "a\\n\\"b\\""}')],
    )
    yield case(name, "no outer end mark", f"<｜DSML｜{block}>\n" + invoke("weather", CITY_PARAMETER), one)
    yield case(name, "no end of a call", f'<｜DSML｜{block}><｜DSML｜invoke name="weather">{CITY_PARAMETER}', one)
    unclosed = '<｜DSML｜parameter name="city" string="true">Köln [1]'
    yield case(name, "a value without end", dsml(block, invoke("weather", unclosed)), one)
    yield case(
        name,
        "the next value ends it",
        dsml(block, invoke("weather", unclosed, typed[0])),
        [("call", "weather", '{"city": "Köln [1]", "days": 2}')],
    )
    yield case(name, "no call", f"<｜DSML｜{block}>later", [("text", f"<｜DSML｜{block}>later")])
    broken = f"<｜DSML｜{block}>\n" + '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Kö'
    yield case(name, "broken off in a text", broken, [("call", "weather", '{"city": "Kö"}')], num_complete=0)
    fault = dsml(block, '<｜DSML｜invoke name="now">\n<｜DSML｜parameter name="a" string="true"!>')
    yield case(name, "a broken tag", fault, [("call", "now", "{}"), ("text", fault[fault.index("<｜DSML｜parameter") :])], num_complete=0)


def hy(*calls: str) -> str:
    return "<tool_calls>\n" + "\n".join(calls) + "\n</tool_calls>"


def pair(key: str, value: str) -> str:
    return f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"


HY_WEATHER = f"<tool_call>weather<tool_sep>\n{pair('city', 'Köln [1]')}</tool_call>"
HY_NOW = "<tool_call>now<tool_sep></tool_call>"
HY_CASES = [
    case("hy_v3", "two calls", hy(HY_WEATHER, HY_NOW), TWO),
    case("hy_v3", "on one line", hy(HY_WEATHER, HY_NOW).replace("\n", ""), TWO),
    case("hy_v3", "thoughts and text", f"<think>Hm.</think>I look.\n{hy(HY_NOW)}", [("reasoning", "Hm."), ("text", "I look."), *TWO[1:]]),
    case(
        "hy_v3",
        "values",
        hy("<tool_call>weather<tool_sep>" + pair("days", "2") + pair("at", '{"x": 1}') + pair("note", "null") + "</tool_call>"),
        [("call", "weather", '{"days": 2, "at": {"x": 1}, "note": null}')],
    ),
    case("hy_v3", "arguments as JSON", hy(f"<tool_call>weather<tool_sep>{CITY}</tool_call>"), TWO[:1]),
    case("hy_v3", "no inner mark", f"<tool_calls>weather<tool_sep>{CITY}</tool_calls>", TWO[:1]),
    case("hy_v3", "no outer mark", HY_WEATHER, TWO[:1]),
    case("hy_v3", "no end marks", "<tool_calls><tool_call>weather<tool_sep>" + pair("city", "Köln [1]"), TWO[:1]),
    case("hy_v3", "a value without end", hy("<tool_call>weather<tool_sep><arg_key>city</arg_key><arg_value>Köln [1]</tool_call>"), TWO[:1]),
    case("hy_v3", "no separator", hy(HY_WEATHER, HY_NOW).replace("<tool_sep>", "").replace("\n", ""), TWO),
    case("hy_v3", "no separator and no tool", "<tool_call>later</tool_call>", [("text", "<tool_call>later</tool_call>")]),
    case("hy_v3", "text after", f"{hy(HY_NOW)}\nDone.", [*TWO[1:], ("text", "Done.")]),
    case("hy_v3", "no call", "<tool_calls>later</tool_calls>", [("text", "<tool_calls>later</tool_calls>")]),
    case(
        "hy_v3",
        "broken off in a text",
        "<tool_calls><tool_call>weather<tool_sep><arg_key>city</arg_key><arg_value>Kö",
        [("call", "weather", '{"city": "Kö"}')],
        num_complete=0,
    ),
    case(
        "hy_v3",
        "a key without value",
        hy("<tool_call>weather<tool_sep><arg_key>city</arg_key></tool_call>"),
        [("call", "weather", "{}"), ("text", "<arg_key>city</arg_key></tool_call>\n</tool_calls>")],
        num_complete=0,
    ),
]
FUNCTIONARY_CASES = [
    case("functionary_v31", "one call", f"<function=weather>{CITY}</function>", TWO[:1]),
    case("functionary_v31", "two calls", f"<function=weather>{CITY}</function><function=now>{{}}</function>", TWO),
    case("functionary_v31", "lines between", f"<function=weather>{CITY}</function>\n<function=now>\n{{}}\n</function>", TWO),
    case("functionary_v31", "text before", "I look. <function=now>{}</function>", [("text", "I look."), *TWO[1:]]),
    case("functionary_v31", "text after", "<function=now>{}</function> Done.", [*TWO[1:], ("text", "Done.")]),
    case("functionary_v31", "no end", f"<function=weather>{CITY}", TWO[:1]),
    case("functionary_v31", "half an end", f"<function=weather>{CITY}</func", TWO[:1]),
    case("functionary_v31", "no JSON", "<function=now>x</function>", [("text", "<function=now>x</function>")]),
    case("functionary_v31", "no name", "<function=>{}</function>", [("text", "<function=>{}</function>")]),
    case("functionary_v31", "no tag", "a <function = b", [("text", "a <function = b")]),
    case(
        "functionary_v31",
        "one call and no more",
        "<function=now>{}</function><function=now>{}</function>",
        [*TWO[1:], ("text", "<function=now>{}</function>")],
        parallel=False,
    ),
    case("functionary_v32", "one call", f">>>weather\n{CITY}", TWO[:1]),
    case("functionary_v32", "two calls", f">>>weather\n{CITY}>>>now\n{{}}", TWO),
    case("functionary_v32", "two calls on lines", f">>>weather\n{CITY}\n>>>now\n{{}}\n", TWO),
    case("functionary_v32", "text and a call", f">>>all\nI look.>>>weather\n{CITY}", [("text", "I look."), *TWO[:1]]),
    case("functionary_v32", "the prompt has the mark", f"weather\n{CITY}>>>now\n{{}}", TWO),
    case("functionary_v32", "text after the prompt's mark", "all\nYes.", [("text", "Yes.")]),
    case("functionary_v32", "text without a heading", "weather is fine.", [("text", "weather is fine.")]),
    case("functionary_v32", "a console", ">>> x = 1\n>>>x\n1", [("text", ">>> x = 1\n>>>x\n1")]),
    case("functionary_v32", "another heading", "maybe\n{}", [("text", "maybe\n{}")]),
    case("functionary_v32", "an unknown tool", ">>>fly\n{}", [("call", "fly", "{}")]),
    case("functionary_v32", "no JSON", ">>>now\nx", [("text", ">>>now\nx")]),
]
REASONING_CASES = [
    Case(name, ("none", think), written, expected, is_opened=is_opened)
    for name, think, written, expected, is_opened in [
        (
            "both parts",
            "granite",
            "Here is my thought process: Hm.\nHere is my response: Yes.",
            [("reasoning", "Hm."), ("text", "Yes.")],
            False,
        ),
        (
            "short forms",
            "granite",
            "Here's my thought process:\nHm. Here's my response:\nYes.",
            [("reasoning", "Hm."), ("text", "Yes.")],
            False,
        ),
        ("no thoughts", "granite", "Here is my view: so.", [("text", "Here is my view: so.")], False),
        ("no end", "granite", "Here is my thought process:\nHm. Here is", [("reasoning", "Hm. Here is")], False),
        ("a response", "ernie45", "<think>Hm.</think>\n\n<response>\nYes.\n</response>\n", [("reasoning", "Hm."), ("text", "Yes.")], False),
        ("the prompt began", "ernie45", "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", [("reasoning", "Hm."), ("text", "Yes.")], True),
        ("no response tag", "ernie45", "Hm.\n</think>\nYes.", [("reasoning", "Hm."), ("text", "Yes.")], True),
        ("a response alone", "ernie45", "<response>Yes.</response>", [("text", "Yes.")], False),
        ("no end of a response", "ernie45", "<think>Hm.</think><response>Yes", [("reasoning", "Hm."), ("text", "Yes")], False),
        ("tags in the text", "ernie45", "Use <response> and </response> so.", [("text", "Use <response> and </response> so.")], False),
        ("plain text", "hunyuan_a13b", "Yes.", [("text", "Yes.")], False),
        ("no thoughts", "hunyuan_a13b", "<think>\n\n</think>\n<answer>\nYes.\n</answer>", [("text", "Yes.")], False),
        ("an answer alone", "hunyuan_a13b", "<answer>Yes.</answer>", [("text", "Yes.")], False),
        ("no end", "cohere_command3", "<|START_THINKING|>Hm", [("reasoning", "Hm")], False),
        ("text marks", "cohere_command3", "<|START_TEXT|>Yes.<|END_TEXT|>", [("text", "Yes.")], False),
    ]
]


def with_suffix(one: Case) -> Case:
    """Return a case of Hunyuan 3 with the suffix that the published model's tags have."""
    expected = [(kind, *(TAG.sub(r"\1:opensource>", part) for part in parts)) for kind, *parts in one.expected]
    return replace(one, formats=("hy_v3_opensource",) * 2, output=TAG.sub(r"\1:opensource>", one.output), expected=expected)


TAG = re.compile("(</?(?:think|tool_calls?|tool_sep|arg_key|arg_value))>")
CASES = [
    *(one for style in STYLES for one in json_cases(style)),
    *SPECIAL_CASES,
    *DEEPSEEK_CASES,
    *dsml_cases("deepseek_v32", "function_calls"),
    *dsml_cases("deepseek_v4", "tool_calls"),
    *HY_CASES,
    *map(with_suffix, HY_CASES),
    *FUNCTIONARY_CASES,
    *REASONING_CASES,
]


CUT = longest_of_formats((case.formats, case.output) for case in CASES)


@pytest.mark.spread(0.5)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_json_tool_calls_are_parsed_right_in_every_split(case: Case, large_counts: bool) -> None:
    events, num_complete = events_of(case, [case.output])
    assert parsed(events) == case.expected
    calls = [one for one in case.expected if one[0] == "call"]
    assert num_complete >= (len(calls) if case.num_complete is None else case.num_complete)
    assert all(isinstance(json.loads(call[2]), dict) for call in calls)
    check(case, every_cut=large_counts or case.output in CUT)


@pytest.mark.spread(0.3)
@pytest.mark.parametrize("case", [one for one in CASES if any(part[0] == "call" for part in one.expected)], ids=name_of)
def test_truncated_json_tool_call_keeps_its_complete_part(case: Case) -> None:
    wholes = [one for one in case.expected if one[0] == "call"]
    for end in range(1, len(case.output)):
        calls = [one for one in parsed(events_of(case, [case.output[:end]])[0]) if one[0] == "call"]
        for (_, name, arguments), whole in zip(calls, wholes, strict=False):
            assert name == whole[1]
            assert_beginning(json.loads(arguments), json.loads(whole[2]))


def assert_beginning(part: dict[str, Any], whole: dict[str, Any]) -> None:
    assert list(part) == list(whole)[: len(part)]
    for key, value in part.items():
        text = whole[key] if isinstance(whole[key], str) else json.dumps(whole[key])
        assert value == whole[key] or text.startswith(value.lower() if text == "true" else value)


def test_long_json_answers_parse_equally_in_random_splits(seed: int, large_counts: bool) -> None:
    """Answers of one format in a row, some of them cut off."""
    random = np.random.default_rng(seed)
    kinds = sorted({one.formats for one in CASES})
    for count in range(5_000 if large_counts else 100):
        formats = kinds[count % len(kinds)]
        written = [one.output for one in CASES if one.formats == formats]
        parts = [written[random.integers(len(written))] for _ in range(8)]
        text = "".join(part[: random.integers(len(part) + 1)] if random.integers(3) == 0 else part + " 😀" for part in parts)
        case = Case("long", formats, text, [], is_opened=bool(random.integers(2)), parallel=bool(random.integers(4)))
        places = sorted(random.integers(0, len(text) + 1, int(random.integers(1, 40))).tolist())
        pieces = [text[start:end] for start, end in pairwise((0, *places, len(text)))]
        assert parsed(events_of(case, pieces)[0]) == parsed(events_of(case, [text])[0]), pieces


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_each_parser_has_at_least_ten_test_cases(name: str) -> None:
    assert len({one.output for one in CASES if one.formats[0] == name}) >= 10


TEMPLATES = [
    ("<|tool|>{{ tools }}<|/tool|><|end|>", ("phi4_mini_json", "none")),
    ("<|tool|>{{ tools }}<|/tool|> respond with <|tool_call|>{}<|/tool_call|>", ("phi4_mini_json", "none")),
    ('a single JSON list formatted as functools[{"name": [function name]}]', ("functools", "none")),
    ('<AVAILABLE_TOOLS>[] <TOOLCALL>[{"name": "tool_name1"}]</TOOLCALL> <think></think>', ("nemotron_json", "qwen3")),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name\\n```json", ("deepseek_v3", "none")),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜></think>", ("deepseek_v31", "qwen3")),
    ('dsml_token = "｜DSML｜" <{{ dsml_token }}function_calls> message.tool_calls <think></think>', ("deepseek_v32", "qwen3")),
    ('dsml_token = "｜DSML｜" <{{ dsml_token }}tool_calls> <think></think>', ("deepseek_v4", "qwen3")),
    (
        "write <|START_THINKING|>, <|START_ACTION|> followed by a list of JSON-formatted tool calls",
        ("cohere_command3", "cohere_command3"),
    ),
    ("Write 'Action:' followed by a json-formatted list of actions", ("command_r", "none")),
    ("<|action_start|><|plugin|>\n<|action_end|>", ("internlm", "none")),
    ("<think></think><tool_calls><tool_call>name<tool_sep><arg_key>", ("hy_v3", "qwen3")),
    ("<tool_calls><tool_call>name<arg_key>", ("hy_v3", "none")),
    ("<|bom|><|system|> <tool_calls>[]</tool_calls>", ("jamba", "none")),
    ("<tool_calls>[]</tool_calls> <think>\\n\\n</think> split('<answer>')", ("hunyuan_a13b", "hunyuan_a13b")),
    ("<|im_start|> make calls in a single JSON array: []", ("xlam", "none")),
    ('<|start_header_id|> "parameters" <function=example_function_name>{}</function>', ("functionary_v31", "none")),
    ("<|start_header_id|> \"parameters\" '>>>all\\n' + message['content']", ("functionary_v32", "functionary_v32")),
    ('<|function_call_library|> "<function_call> {\\"name\\": \\"no_function\\"}"', ("granite-20b-fc", "none")),
    ("<|start_of_role|> <|tool_call|> after 'Here is my thought process:' and after 'Here is my response:'", ("granite", "granite")),
    ("<tool_call> <think></think> <response></response>", ("hermes", "ernie45")),
]


@pytest.mark.parametrize(("template", "expected"), TEMPLATES, ids=[f"{number}-{found[0]}" for number, (_, found) in enumerate(TEMPLATES)])
def test_chat_template_selects_the_json_parsers_of_its_model(template: str, expected: tuple[str, str]) -> None:
    tokenizer: Any = SimpleNamespace(template_source=lambda *, has_tools: template)
    assert OutputFormat.of(tokenizer) == OutputFormat(*expected)


def test_counted_tool_call_ids_are_replaced_by_unique_ones() -> None:
    """Cohere's count from 0 in each conversation turn, and ids must be unique."""
    written = '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now", "parameters": {}}]<|END_ACTION|>'
    events, _ = events_of(case("cohere_command3", "", written, []), [written])
    assert [event.id.startswith("call_") for event in events if hasattr(event, "id")] == [True]
