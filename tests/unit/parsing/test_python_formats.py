"""Calls written as Python: LFM2, Llama 3.2 and 4, OLMo 3, Gemma 3 and SmolLM3."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from harness.format_rows import NOW, Row, cases, check, longest_of_formats, name_of, parse, text, weather
from harness.markup_cases import TOOLS, Case, parsed
from paceline.parsing.registry import OutputFormat

LONG = "long " * 64


# between the parentheses of a call, in every format
ARGUMENTS: list[tuple[str, tuple[str, ...]]] = [
    ("city='x', days=3", weather(city="x", days=3)),
    ('city="Köln 😀", days=-3', weather(city="Köln 😀", days=-3)),
    (" city = 'x' ,\n days = 3, ", weather(city="x", days=3)),
    ("city=None, days=null", weather(city=None, days=None)),
    ("metric=True, note=None, at=None", weather(metric=True, note=None, at=None)),
    ("metric=false, note=null, any=true", weather(metric=False, note=None, any=True)),
    ("metric='true', days='3', tags='[\"a\"]'", weather(metric=True, days=3, tags=["a"])),
    ("city=3.10, note=7", weather(city="3.10", note="7")),
    ("city={'a': 1}", weather(city='{"a": 1}')),
    ("tags=['a', \"b\"], at={'x': 1.5}", weather(tags=["a", "b"], at={"x": 1.5})),
    ("any={'a': [1, (2, 'b'), {'c',}], 3: {}, True: ()}", weather(any={"a": [1, [2, "b"], ["c"]], "3": {}, "true": []})),
    ("any=('a'), new=(1,)", weather(any="a", new=[1])),
    ("days=07, any=[+1, 0x1f, 1_000, .5, 5., 01.5, 00]", weather(days=7, any=[1, 31, 1000, 0.5, 5.0, 1.5, 0])),
    ("any=1e3, new=-2.50", weather(any=1000, new=-2.5)),
    ("from=1, class='x', in=[]", ("call", "weather", '{"from": 1, "class": "x", "in": []}')),
    ("city='a\nb\tc\x00'", weather(city="a\nb\tc\x00")),
    ("city='it\\'s \\\\ \\n \\x41 \\101 \\d'", weather(city="it's \\ \n A A \\d")),
    ("city=r'a\\d', note=f'x{{y}}', any=u'z'", weather(city="a\\d", note="x{y}", any="z")),
    ("city='''a 'b'\n''', note=\"\"\"c\"\"\", any=''", weather(city="a 'b'\n", note="c", any="")),
    ("city='a' \"b\"", weather(city="ab")),
    ("city='), now()]'", weather(city="), now()]")),
    ("city='sed -n '360,450p' f.py'", weather(city="sed -n '360,450p' f.py")),
    ("city='it's', note='x'", ()),  # two readings
    ("**{'city': 'x'}, days=2", weather(city="x", days=2)),
    (f"city='{LONG}it's', days=2", weather(city=f"{LONG}it's", days=2)),
]
FAULTS = [
    "'Paris'",
    "city=Paris",
    "city=b'x'",
    "any=1e999",
    "any=1 + 2",
    "any=nan",
    f"any={'9' * 5000}",  # more digits than Python converts to text
    f"any=0x{'f' * 5000}",
    "**[1]",
    "city=f'{x}'",
    "city='x' y",
    "city=='x'",
    "any={[1]: 2}",
]
FRAMES = {
    "lfm2": "<|tool_call_start|>[{}]<|tool_call_end|>",
    "pythonic": "[{}]",
    "llama4_pythonic": "<|python_start|>[{}]<|python_end|>",
    "olmo3": "<function_calls>\n{}\n</function_calls>",
    "gemma3": "```tool_code\n{}\n```",
    "smollm3": "<code>\n{}\n</code>",
}


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize(("arguments", "expected"), ARGUMENTS, ids=[ascii(arguments[:40]) for arguments, _ in ARGUMENTS])
def test_pythonic_arguments_become_json_in_every_split(name: str, arguments: str, expected: tuple[str, ...], large_counts: bool) -> None:
    written = FRAMES[name].replace("{}", f"weather({arguments})")
    is_short_run_frame = name == "lfm2" and len(written) < 300  # the arguments are read by the same code in all frames
    check(Case("", (name, "none"), written, [expected] if expected else text(written)), every_cut=large_counts or is_short_run_frame)


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize("arguments", FAULTS, ids=lambda arguments: ascii(arguments[:40]))
def test_pythonic_call_with_non_literal_arguments_is_text(name: str, arguments: str) -> None:
    written = FRAMES[name].replace("{}", f"weather({arguments})")
    check(Case("", (name, "none"), written, text(written)))


LFM2: list[Row] = [
    (
        "I look.\n<|tool_call_start|>[now(), weather(city='A')]<|tool_call_end|>Done.",
        [*text("I look."), NOW, weather(city="A"), *text("Done.")],
    ),
    ("<think>Hm.</think><|tool_call_start|>now()<|tool_call_end|>", [("reasoning", "Hm."), NOW]),
    ("<|tool_call_start|>[now()]<|tool_call_end|> and <|tool_call_start|>[now()]<|tool_call_end|>", [NOW, *text("and"), NOW]),
    ('<|tool_call_start|>[{"name": "weather", "arguments": {"city": "A"}}, {"name": "now"}]<|tool_call_end|>', [weather(city="A"), NOW]),
    ('<|tool_call_start|>{"name": "now", "arguments": {}}<|tool_call_end|>', [NOW]),
    ("<|tool_call_start|>[a.b-c(d=1)]<|tool_call_end|>", [("call", "a.b-c", '{"d": 1}')]),
    ("<|tool_call_start|>[weather(city='A'<|tool_call_end|>ok", [weather(city="A"), *text("ok")]),
    (
        "<|tool_call_start|>[weather(city='A'), weather(city='it's'), now()]<|tool_call_end|>",
        [weather(city="A"), weather(city="it's"), NOW],
    ),
    ("<|tool_call_start|>[weather(city='x 'y'), weather(city='p 'q')]<|tool_call_end|>", [weather(city="x 'y"), weather(city="p 'q")]),
    ("<|tool_call_start|>[weather('A'), now()]<|tool_call_end|>", [*text("weather('A')"), NOW]),
    ("<|tool_call_start|>[now(), weather(city='a 'b', note='c')]<|tool_call_end|>", [NOW, *text("weather(city='a 'b', note='c')")]),
    (
        "<|tool_call_start|>[weather(city='x 'y' 'z), now(b'z')]<|tool_call_end|>",
        text("<|tool_call_start|>[weather(city='x 'y' 'z), now(b'z')]<|tool_call_end|>"),
    ),
    ("<|tool_call_start|>[weather(city='A)]<|tool_call_end|>ok", text("<|tool_call_start|>[weather(city='A)]<|tool_call_end|>ok")),
    ("<|tool_call_start|>[]<|tool_call_end|>", text("<|tool_call_start|>[]<|tool_call_end|>")),
    (f"<|tool_call_start|>[weather(city='{LONG}it's'), now()]<|tool_call_end|>", [weather(city=f"{LONG}it's"), NOW]),
    ("<|tool_call_start|>[weather('A', city=')'), now()]<|tool_call_end|>", [*text("weather('A', city=')')"), NOW]),
    ("<|tool_call_start|>later", text("<|tool_call_start|>later")),
    ("[weather(city='A')]", [weather(city="A")]),
    ("[other(city='A')]", text("[other(city='A')]")),
    ("<|tool_call_start|>[weather(city='Kö", [weather(city="Kö")]),
    ("<|tool_call_start|>[weather(tags=['a', 'b", [weather(tags=["a", "b"])]),
    ("<|tool_call_start|>[weather(any={'a': [1, ", [weather(any={"a": [1]})]),
    ("<|tool_call_start|>[weather(any={'a': ", [weather(any={})]),
    ("<|tool_call_start|>[weather(city='A', da", [weather(city="A")]),
    ("<|tool_call_start|>[weather(city='A'), wea", [weather(city="A")]),
    (
        f"<|tool_call_start|>[weather(city='{LONG}it's', note='x'), now()]<|tool_call_end|>",
        [*text(f"weather(city='{LONG}it's', note='x')"), NOW],
    ),
]
PYTHONIC: list[Row] = [
    ("[weather(city='A'), now()]", [weather(city="A"), NOW]),
    (" \n[now()]\n", [NOW]),
    ("[now()] ok", [NOW, *text("ok")]),
    ("[now(),\n now(),]", [NOW, NOW]),
    ("[now()", [NOW]),
    ("[weather(city='A'", [weather(city="A")]),
    ("[weather(city='A", [weather(city="A")]),
    ('[{"name": "now", "parameters": {}}]', [NOW]),
    ('{"name": "now", "parameters": {}}', [NOW]),
    ("See [now()]", text("See [now()]")),
    ("[other(a=1)]", text("[other(a=1)]")),
    ("[1, 2] is a list", text("[1, 2] is a list")),
    ("[now] (x)", text("[now] (x)")),
    ("[now(), other(a=1)]", [NOW, *text(", other(a=1)]")]),
]
LLAMA32: list[Row] = [("<|python_tag|>[now()]", [NOW]), ("<|python_tag|>print(1)", text("<|python_tag|>print(1)"))]
LLAMA4: list[Row] = [
    ("<|python_start|>[weather(city='A'), now()]<|python_end|>", [weather(city="A"), NOW]),
    ("<|python_start|>now()<|python_end|>", [NOW]),
    ('<|python_start|>{"name": "now", "parameters": {}}<|python_end|>', [NOW]),
    ("I look.<|python_start|>[now()]<|python_end|>", [*text("I look."), NOW]),
    ("<|python_start|>print(1)<|python_end|>", text("<|python_start|>print(1)<|python_end|>")),
]
OLMO3: list[Row] = [
    ('<function_calls>\nweather(city="A")\nnow()\n</function_calls>', [weather(city="A"), NOW]),
    (
        '<think>Hm.</think>I look.\n<function_calls>weather(city="A")</function_calls>',
        [("reasoning", "Hm."), *text("I look."), weather(city="A")],
    ),
    ("<function_calls>[now(), now()]</function_calls> ok", [NOW, NOW, *text("ok")]),
    ("<function_calls>\nnow();\n\nnow()", [NOW, NOW]),
    ('<function_calls>\nweather(city="</function_calls>")\n</function_calls>', [weather(city="</function_calls>")]),
    ('<function_calls>\nweather(city="a "b"")\nnow()\n</function_calls>', [weather(city='a "b"'), NOW]),
    ('<function_calls>\nweather("A")\nnow()\n</function_calls>', [*text('weather("A")'), NOW]),
    ('<function_calls>\nweather(city="A', [weather(city="A")]),
    ("<function_calls>\nnow()\nwea", [NOW]),
    ("<function_calls></function_calls>", text("<function_calls></function_calls>")),
    ("<function_calls>none</function_calls>", text("<function_calls>none</function_calls>")),
    ("now()", text("now()")),
]
GEMMA3: list[Row] = [
    ("```tool_code\nweather(city='A')\nnow()\n```", [weather(city="A"), NOW]),
    ("I look.\n```tool_code\nprint(now())\n```\nDone.", [*text("I look."), NOW, *text("Done.")]),
    ("```tool_code\nprint(default_api.weather(city='A'))\n```", [weather(city="A")]),
    ("```python\n[now()]\n```", [NOW]),
    ("```tool_code\nweather(city='a ```b```')\n```", [weather(city="a ```b```")]),
    ('```json\n{"name": "weather", "parameters": {"city": "A"}}\n```', [weather(city="A")]),
    ('```json\n[{"name": "now", "parameters": {}}, {"name": "now", "parameters": {}}]\n```', [NOW, NOW]),
    ("[now()]", [NOW]),
    ('{"name": "now", "parameters": {}}', [NOW]),
    ("```tool_code\nnow()", [NOW]),
    ("```tool_code\nx = now()\n```", text("```tool_code\nx = now()\n```")),
    ("```python\nprint(1)\n```", text("```python\nprint(1)\n```")),
    ('```json\n{"a": 1}\n```', text('```json\n{"a": 1}\n```')),
    ("```tool_code\nweather(city='A", [weather(city="A")]),
]
SMOLLM3: list[Row] = [
    ('<tool_call>\n{"name": "weather", "arguments": {"city": "A"}}\n</tool_call>', [weather(city="A")]),
    ("<think>\nHm.\n</think>\n<code>\nnow()\n</code>", [("reasoning", "Hm."), NOW]),
    ("<code>weather(city='A')\nprint(now())</code>ok", [weather(city="A"), NOW, *text("ok")]),
    ("<code>x = 1</code>", text("<code>x = 1</code>")),
    ("Write <code>other(1)</code>.", text("Write <code>other(1)</code>.")),
]
CASES = [
    *cases("lfm2", "think", LFM2),
    *cases("pythonic", "none", PYTHONIC + LLAMA32),
    *cases("llama4_pythonic", "none", PYTHONIC + LLAMA4),
    *cases("olmo3", "think", OLMO3),
    *cases("gemma3", "none", GEMMA3),
    *cases("smollm3", "think", SMOLLM3),
]


CUT = longest_of_formats((case.formats, case.output) for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_pythonic_answer_is_parsed_equally_in_every_split(case: Case, large_counts: bool) -> None:
    check(case, every_cut=large_counts or case.output in CUT)


def test_pythonic_parser_reads_one_call_without_parallel_tool_calls() -> None:
    written = "<|tool_call_start|>[now(), now()]<|tool_call_end|>"
    assert parse(("lfm2", "none"), [written], parallel=False) == [NOW, ("text", ", now()]<|tool_call_end|>")]
    single = "<|tool_call_start|>[now()]<|tool_call_end|>"
    assert parse(("lfm2", "none"), [single], parallel=False) == [NOW]


def test_pythonic_call_is_emitted_once_it_is_complete() -> None:
    stream = OutputFormat("lfm2", "none").stream(TOOLS)
    assert stream.push("<|tool_call_start|>[weather(city='A'") == []
    assert parsed(stream.push(")")) == [weather(city="A")]


def test_pythonic_parsing_of_faulty_quotes_takes_linear_time() -> None:
    start_s = time.process_time()
    for written in (
        "weather(city='" + "a 'b', " * 3000 + ")",
        "weather(city='" + "a 'b" * 100_000 + "')",
        "weather(any=" + "[" * 50_000,
        "f('a'" * 20_000,
    ):
        framed = f"<|tool_call_start|>[{written}]<|tool_call_end|>"
        pieces = [framed[at : at + 7] for at in range(0, len(framed), 7)]
        assert parse(("lfm2", "none"), [framed]) == parse(("lfm2", "none"), pieces)
    assert time.process_time() - start_s < 10


TEMPLATES = [
    ("<|im_start|> List of tools: <|tool_list_start|>[", "lfm2"),
    ("'<|tool_call_start|>[' ~ calls ~ ']<|tool_call_end|>'", "lfm2"),
    ("<|start_header_id|> [func_name1(params_name1=params_value1)]", "pythonic"),
    ("<|header_start|> [func_name1(param1=value1)]", "llama4_pythonic"),
    ("<|im_start|> <function_calls> </function_calls>", "olmo3"),
    ("<start_of_turn> ```tool_code", "gemma3"),
    ("<tool_call> <code> </code>", "smollm3"),
]


@pytest.mark.parametrize(("template", "expected"), TEMPLATES)
def test_chat_template_selects_its_pythonic_parser(template: str, expected: str) -> None:
    tokenizer: Any = SimpleNamespace(template_source=lambda *, has_tools: template)
    assert OutputFormat.of(tokenizer) == OutputFormat(expected, "none")
