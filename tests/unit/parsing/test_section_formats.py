"""Formats of sections and messages: MiniMax-M3, Kimi-K3, Step 3, Solar Open, GigaChat 3, Hunyuan 3, Apriel and Functionary 3.2."""

from types import SimpleNamespace
from typing import Any

import pytest

from harness.format_rows import NOW, Row, cases, check, name_of, parse, text, weather
from harness.markup_cases import Case
from paceline.parsing.registry import REASONING_FORMATS, OutputFormat
from paceline.parsing.tools import Tool

MARK = "]<]minimax[>["


def minimax(*invokes: str) -> str:
    body = "".join(f'<invoke name="{one}</invoke>\n' for one in invokes)
    return f"<tool_call>\n{body}</tool_call>".replace("<", f"{MARK}<")


MINIMAX_M3: list[Row] = [
    (
        "<mm:think>Hm.</mm:think>I look." + minimax('weather"><city>Köln</city><days>3</days>', 'now">'),
        [("reasoning", "Hm."), *text("I look."), weather(city="Köln", days=3), NOW],
    ),
    ("</mm:think>Yes.", text("Yes.")),
    ("<mm:think>no end", [("reasoning", "no end")]),
    (minimax('weather"><tags><item>a</item><item>b</item></tags><at><x>1.5</x></at>'), [weather(tags=["a", "b"], at={"x": 1.5})]),
    (minimax('weather"><any><item><k>1</k></item><item><k>x</k></item></any>'), [weather(any=[{"k": "1"}, {"k": "x"}])]),
    (minimax('weather"><city><b>x</b></city>'), [weather(city=f"{MARK}<b>x{MARK}</b>")]),
    (minimax('weather"><city> a\n"b" </city>'), [weather(city=' a\n"b" ')]),
    (minimax('weather"><tags><item>a</item>').split(f"{MARK}</invoke>")[0], [weather(tags=["a"])]),
    (minimax('weather"><city>Kö').split(f"{MARK}</invoke>")[0], [weather(city="Kö")]),
    (minimax('weather"><city>A'), [weather(city="A")]),
    (minimax('now">').removesuffix(f"{MARK}</tool_call>"), [NOW]),
    (f"{MARK}<tool_call>later", text(f"{MARK}<tool_call>later")),
]


def section(name: str, body: str, attributes: str = "") -> str:
    return f"<|open|>{name}{attributes}<|sep|>{body}<|close|>{name}<|sep|>"


def argument(key: str, kind: str, value: str) -> str:
    return section("argument", value, f' key="{key}" type="{kind}"')


def kimi(*calls: tuple[str, str]) -> str:
    written = [section("call", body, f' tool="{name}" index="{index}"') for index, (name, body) in enumerate(calls, 1)]
    return section("tools", "".join(written))


KIMI_K3: list[Row] = [
    (
        section("think", "Hm.") + section("response", "I look.") + kimi(("weather", argument("city", "string", "Köln")), ("now", "")),
        [("reasoning", "Hm."), *text("I look."), weather(city="Köln"), NOW],
    ),
    (section("response", "Yes.") + "<|close|>message<|sep|>", text("Yes.")),
    (section("response", "") + kimi(("now", "")), [NOW]),
    ("<|close|>think<|sep|>" + section("response", "Yes."), text("Yes.")),
    (
        kimi(("weather", argument("days", "number", "3") + argument("metric", "boolean", "true") + argument("any", "array", "[1]"))),
        [weather(days=3, metric=True, any=[1])],
    ),
    (kimi(("other", argument("a&quot;b", "number", "3"))), [("call", "other", '{"a\\"b": 3}')]),
    (kimi(("weather", section("json", '{"city": "A"}', ' type="object"'))), [weather(city="A")]),
    (kimi(("weather", argument("city", "string", 'a <b> "c"'))), [weather(city='a <b> "c"')]),
    (kimi(("weather", argument("city", "string", "Kö"))).split("<|close|>")[0], [weather(city="Kö")]),
    (kimi(("now", "")).removesuffix("<|close|>tools<|sep|>"), [NOW]),
    ("<|open|>tools<|sep|>later", text("<|open|>tools<|sep|>later")),
]


def steptml(*invokes: str) -> str:
    head = '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="'
    calls = [f"{head}{one}</steptml:invoke><｜tool_call_end｜>\n" for one in invokes]
    return f"<｜tool_calls_begin｜>\n{''.join(calls)}<｜tool_calls_end｜>"


CITY = 'weather"><steptml:parameter name="city">Köln</steptml:parameter>'
STEP3: list[Row] = [
    (
        "<think>Hm.</think>I look." + steptml(CITY, 'now">'),
        [("reasoning", "Hm."), *text("I look."), weather(city="Köln"), NOW],
    ),
    (steptml('now">').replace("<｜tool_call_begin｜>function<｜tool_sep｜>", ""), [NOW]),
    (steptml('now">').removesuffix("<｜tool_calls_end｜>"), [NOW]),
    (steptml(CITY).split("</steptml:parameter>")[0], [weather(city="Köln")]),
    ("<｜tool_calls_begin｜>later", text("<｜tool_calls_begin｜>later")),
]


def solar(*calls: str) -> str:
    written = [f"<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>{one}<|tool_call:end|>" for one in calls]
    return f"<|tool_calls|>{''.join(written)}<|calls|>"


SOLAR: list[Row] = [
    (
        "<|think|>Hm.<|end|><|begin|>assistant" + solar('weather<|tool_call:args|>{"city": "Köln"}', "now<|tool_call:args|>{}"),
        [("reasoning", "Hm."), weather(city="Köln"), NOW],
    ),
    ("<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.<|end|>", [("reasoning", "Hm."), *text("Yes.")]),
    ("<|content|>Yes.", text("Yes.")),
    (solar("now<|tool_call:args|>{}").removesuffix("<|tool_call:end|><|calls|>"), [NOW]),
    ('<|tool_calls|><|tool_call:begin|>x<|tool_call:name|>weather<|tool_call:args|>{"city": "Kö', [weather(city="Kö")]),
    ("<|tool_calls|>later", text("<|tool_calls|>later")),
]
CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
GIGACHAT: list[Row] = [
    (f"I look.<|function_call|>{CALL}", [*text("I look."), weather(city="Köln")]),
    (f"I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{CALL}<|message_sep|>", [*text("I look."), weather(city="Köln")]),
    ('<|function_call|>{"name": "weather", "arguments": {"city": "Kö', [weather(city="Kö")]),
    ("<|function_call|>later", text("<|function_call|>later")),
]
HUNYUAN: list[Row] = [
    (
        "<think:opensource>Hm.</think:opensource><tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Köln</arg_value:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
        [("reasoning", "Hm."), weather(city="Köln")],
    ),
    ("<think:opensource></think:opensource>Yes.", text("Yes.")),
]
MINIMAX_M1: list[Row] = [
    (f'I look.<tool_calls>\n{CALL}\n{{"name": "now", "arguments": {{}}}}\n</tool_calls>', [*text("I look."), weather(city="Köln"), NOW])
]
APRIEL: list[Row] = [
    ("Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]", [("reasoning", "Hm."), *text("Yes.")]),
    (
        f"Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\n<tool_calls>[{CALL}]</tool_calls>",
        [("reasoning", "Hm."), weather(city="Köln")],
    ),
]
FUNCTIONARY: list[Row] = [
    ("all\nYes.", text("Yes.")),
    ("all\nI look.>>>now\n{}", [*text("I look."), NOW]),
    ("now\n{}", [NOW]),
]
CASES = [
    *cases("minimax_m3", "minimax_m3", MINIMAX_M3),
    *cases("kimi_k3", "kimi_k3", KIMI_K3),
    *cases("step3", "qwen3", STEP3),
    *cases("solar_open", "solar_open", SOLAR),
    *cases("gigachat3", "none", GIGACHAT),
    *cases("gigachat3_message", "none", GIGACHAT),
    *cases("hy_v3_opensource", "hy_v3_opensource", HUNYUAN),
    *cases("minimax_m1", "none", MINIMAX_M1),
    *cases("hunyuan_a13b", "apriel", APRIEL),
    *cases("functionary_v32", "functionary_v32", FUNCTIONARY),
]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_section_format_answer_is_parsed_equally_in_every_split(case: Case) -> None:
    check(case)


OPENED = [
    ("minimax_m3", "ai\n<mm:think>", "so</mm:think>Yes"),
    ("kimi_k3", "<|open|>think<|sep|>", "so<|close|>think<|sep|><|open|>response<|sep|>Yes<|close|>response<|sep|>"),
    ("apriel", "Here are my reasoning steps:\n", "so\n[BEGIN FINAL RESPONSE]\nYes"),
    ("hy_v3_opensource", "<think:opensource>", "so</think:opensource>Yes"),
]


@pytest.mark.parametrize(("name", "prompt", "written"), OPENED, ids=[name for name, _, _ in OPENED])
def test_section_format_reasoning_opened_by_the_prompt_is_parsed(name: str, prompt: str, written: str) -> None:
    assert prompt.rstrip().endswith(REASONING_FORMATS[name].open)
    assert parse(("none", name), [written], is_opened=True) == [("reasoning", "so"), ("text", "Yes")]


def test_xml_elements_use_the_union_option_that_has_them() -> None:
    options = [{"type": "integer"}, {"type": "object", "properties": {"max": {"type": "integer"}}}]
    tool = Tool(name="find", parameters={"type": "object", "properties": {"limit": {"oneOf": options}}})
    stream = OutputFormat("minimax_m3", "none").stream([tool])
    stream.push(minimax('find"><limit><max>10</max></limit>'))
    stream.finish()
    assert stream.sink.num_calls - len(stream.sink.broken_off) == 1


TEMPLATES = [
    ("set ns = ']<]minimax[>[' <mm:think> </mm:think>", ("minimax_m3", "minimax_m3")),
    ("'<|open|>' + tag; open_tag('think') open_tag('tools')", ("kimi_k3", "kimi_k3")),
    ('<｜tool_calls_begin｜><steptml:invoke name="f"> </think>', ("step3", "qwen3")),
    ("<|think|> <|content|> <|tool_calls|><|tool_call:begin|><|tool_call:args|>", ("solar_open", "solar_open")),
    ("<|role_sep|> <|function_call|>", ("gigachat3", "none")),
    ("<|role_sep|> 'role': 'function call'", ("gigachat3_message", "none")),
    ("'<tool_calls{}>' '</think{}>' ':opensource'", ("hy_v3_opensource", "hy_v3_opensource")),
    ("<beginning_of_sentence> <tool_calls>\n", ("minimax_m1", "none")),
    ("Here are my reasoning steps: [BEGIN FINAL RESPONSE] <tool_calls>[", ("hunyuan_a13b", "apriel")),
    (">>>all", ("functionary_v32", "functionary_v32")),
]


@pytest.mark.parametrize(("template", "expected"), TEMPLATES, ids=[expected[0] for _, expected in TEMPLATES])
def test_chat_template_selects_its_section_format(template: str, expected: tuple[str, str]) -> None:
    tokenizer: Any = SimpleNamespace(template_source=lambda *, has_tools: template)
    assert OutputFormat.of(tokenizer) == OutputFormat(*expected)
