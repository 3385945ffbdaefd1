"""Calls in elements or marks: FunctionGemma, Seed-OSS, MiniCPM5, Muse Glimmer and Apertus."""

from types import SimpleNamespace
from typing import Any

import pytest

from harness.format_rows import NOW, Row, cases, check, name_of, parse, text, weather
from harness.markup_cases import Case, events_of, parsed
from paceline.parsing.registry import REASONING_FORMATS, OutputFormat


def gemma(call: str) -> str:
    return f"<start_function_call>call:{call}<end_function_call>"


FUNCTIONGEMMA: list[Row] = [
    (gemma("weather{city:<escape>Köln<escape>,days:3}"), [weather(city="Köln", days=3)]),
    (gemma("now{}") + gemma("now{}"), [NOW, NOW]),
    (f"I look. {gemma('now{}')} Done.", [*text("I look."), NOW, *text("Done.")]),
    (gemma('weather{city:<escape>a "b" \\ {c},d:[1]\n<escape>}'), [weather(city='a "b" \\ {c},d:[1]\n')]),
    (
        gemma("weather{metric:true,tags:[<escape>a<escape>,<escape>b<escape>],at:{x:1.5},note:null}"),
        [weather(metric=True, tags=["a", "b"], at={"x": 1.5}, note=None)],
    ),
    (gemma("weather{days:<escape>3<escape>,metric:<escape>true<escape>}"), [weather(days=3, metric=True)]),
    (gemma("weather{city:<escape>3<escape>,any:4}"), [weather(city="3", any=4)]),
    (gemma("weather{city:3,note:true}"), [weather(city="3", note="true")]),
    (gemma("weather{city:Paris,days: 3 }"), [weather(city="Paris", days=3)]),
    (gemma('weather{"city":"Paris",}'), [weather(city="Paris")]),
    (gemma("weather{city:<escape>Paris<escape>"), [weather(city="Paris")]),
    (gemma("weather{city:<escape>Paris"), [weather(city="Paris")]),
    (gemma("weather{city:<escape>A<escape>}")[:-3], [weather(city="A")]),
    ("<start_function_call>call:weather{city:<escape>Par", [weather(city="Par")]),
    ("<start_function_call>call:weather{at:{x:1.5,", [weather(at={"x": 1.5})]),
    ("<start_function_call>call:weather{days:3", [weather(days=3)]),
    (gemma("now"), text(gemma("now"))),
    (gemma("weather{city}"), [weather()]),
]
SEED_OSS: list[Row] = [
    (
        '<seed:think>Hm.</seed:think>\nI look.\n<seed:tool_call>\n<function=weather>\n<parameter=city>Köln\n"b"</parameter>\n'
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        [("reasoning", "Hm."), *text("I look."), weather(city='Köln\n"b"', days=3)],
    ),
    (
        "<seed:think>a<seed:cot_budget_reflect>5 of 9</seed:cot_budget_reflect>b</seed:think>Yes",
        [("reasoning", "a<seed:cot_budget_reflect>5 of 9</seed:cot_budget_reflect>b"), *text("Yes")],
    ),
    ("<seed:tool_call><function=now></function></seed:tool_call>", [NOW]),
    ("<seed:tool_call><function=now></function><function=now></function></seed:tool_call>", [NOW, NOW]),
    (
        "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        [NOW, NOW],
    ),
    (
        '<seed:tool_call><function=weather><parameter=tags>["a"]</parameter><parameter=metric>True</parameter></function></seed:tool_call>',
        [weather(tags=["a"], metric=True)],
    ),
    (
        "<seed:tool_call><function=weather><parameter=city>true</parameter><parameter=new>[1]</parameter></function></seed:tool_call>",
        [weather(city="true", new="[1]")],
    ),
    ("<seed:tool_call><function=weather><parameter=city></parameter></function></seed:tool_call>", [weather(city="")]),
    ("<seed:tool_call>\n<function=now>\n</function>", [NOW]),
    ("<seed:tool_call>now</seed:tool_call>", text("<seed:tool_call>now</seed:tool_call>")),
    ("<seed:think>no end", [("reasoning", "no end")]),
    ("a <seed:think>b", text("a <seed:think>b")),
    ("Hello", text("Hello")),
]
MINICPM5: list[Row] = [
    (
        '<think>\nHm.\n</think>\n\nI look.\n<function name="weather"><param name="city">Köln</param><param name="days">3</param>'
        "</function>",
        [("reasoning", "Hm."), *text("I look."), weather(city="Köln", days=3)],
    ),
    ('<function name="now"></function>\n<function name="now"></function>', [NOW, NOW]),
    ('<function name="weather"><param name="city">\n  A b \n</param></function>', [weather(city="A b")]),
    ('<function name="weather"><param name="city"><![CDATA[ a\n<b> & "c" ]]></param></function>', [weather(city=' a\n<b> & "c" ')]),
    ('<function name="weather"><param name="any"><![CDATA[[1, 2]]]></param></function>', [weather(any=[1, 2])]),
    ('<function name="weather"><param name="city">a &lt; b &amp;&amp; c &nbsp;</param></function>', [weather(city="a < b && c &nbsp;")]),
    ('<function name="weather"><param name="city">a < b</param></function>', [weather(city="a < b")]),
    ("<functionname='weather'><paramname=city>A</param></function>", [weather(city="A")]),
    ('<function  name="weather" id="1">\n<param  name="city" >A</param>\n</function>', [weather(city="A")]),
    ('<function name="weather"><param name="city">A<param name="days">3</function>', [weather(city="A", days=3)]),
    (
        '<function name="weather"><param name="metric">True</param><param name="note">null</param></function>',
        [weather(metric=True, note=None)],
    ),
    ('<function name="weather"><param name="city">A</param>', [weather(city="A")]),
    ('<function name="weather"><param name="city">Kö', [weather(city="Kö")]),
    ('<function name="weather"><param name="city">A</param><param name="days">3', [weather(city="A")]),
    ('<function name="weather"><param name="city">A</param>?', [weather(city="A"), *text("?")]),
    ('The tag <function name="x"> begins it', text('The tag <function name="x"> begins it')),
    ('<function name="weather"><arguments><param name="city">A</param></arguments></function>', [weather(city="A")]),
    ("a <function b", text("a <function b")),
]


def atem(*invokes: str) -> str:
    return "<atem:function_calls>\n" + "".join(f"<atem:invoke {one}\n</atem:invoke>\n" for one in invokes) + "</atem:function_calls>"


def city(name: str) -> str:
    return f'name="weather"><atem:parameter name="city">{name}</atem:parameter>'


NOW_INVOKED = atem('name="now">')
MUSE: list[Row] = [
    (
        " to=self<|message|>Hm.\n<|eom|><|start|>assistant to=weather<|message|>"
        + atem(city("Köln") + '\n<atem:parameter name="days">3</atem:parameter>')
        + "<|eot|>",
        [("reasoning", "Hm."), weather(city="Köln", days=3)],
    ),
    (" to=user<|message|>Hello.<|eot|>", text("Hello.")),
    ("<|message|>Hello.", text("Hello.")),
    ("Hello to=me.", text("Hello to=me.")),
    (" to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.", [("reasoning", "Hm."), *text("Yes.")]),
    (" to=self<|message|>Hm.<|start|>assistant to=user<|message|>Yes.", [("reasoning", "Hm."), *text("Yes.")]),
    (f" to=self<|message|>I could {NOW_INVOKED}.<|eom|>", [("reasoning", f"I could {NOW_INVOKED}.")]),
    (" to=now.now<|message|>" + atem('name="now.now">'), [NOW]),
    (" to=a.b<|message|>" + atem('name="a.b">'), [("call", "a.b", "{}")]),
    (atem('name="now">', 'name="now">'), [NOW, NOW]),
    (atem(city(" a <b> &amp; ")), [weather(city=" a <b> &amp; ")]),
    (atem('name="weather"><atem:parameter name="tags">["a"]</atem:parameter>'), [weather(tags=["a"])]),
    ('<atem:function_calls><atem:invoke name="now"></atem:invoke>', [NOW]),
    (atem(city("A")).replace("</atem:parameter>", ""), [weather(city="A")]),
    ('<atem:function_calls><atem:invoke name="weather"><atem:parameter name="city">Kö', [weather(city="Kö")]),
    ("<atem:function_calls>x", text("<atem:function_calls>x")),
]
APERTUS: list[Row] = [
    ('<|tools_prefix|>[{"weather": {"city": "Köln"}}]<|tools_suffix|>', [weather(city="Köln")]),
    ('I look.<|tools_prefix|>[{"now": {}}, {"now": {}}]<|tools_suffix|>Done.', [*text("I look."), NOW, NOW, *text("Done.")]),
    ("<|inner_prefix|>Hm.<|inner_suffix|>Yes.", [("reasoning", "Hm."), *text("Yes.")]),
    ('<|inner_prefix|>\nHm.\n<|tools_prefix|>[{"now": {}}]<|tools_suffix|><|inner_suffix|>Y', [("reasoning", "Hm."), NOW, *text("Y")]),
    ("<|inner_prefix|>Hm.", [("reasoning", "Hm.")]),
    ('<|tools_prefix|>{"now": {}}<|tools_suffix|>', [NOW]),
    ('<|tools_prefix|> [ {"now" : {} } ] <|tools_suffix|>', [NOW]),
    ('<|tools_prefix|>[{"now": {}},]<|tools_suffix|>', [NOW]),
    ('<|tools_prefix|>[{"now": {}]<|tools_suffix|>', [NOW]),
    ('<|tools_prefix|>[{"now": {}}', [NOW]),
    ('<|tools_prefix|>[{"weather": {"city": "]<|tools_suffix|>"}}]<|tools_suffix|>', [weather(city="]<|tools_suffix|>")]),
    ("<|tools_prefix|>[]<|tools_suffix|>", text("<|tools_prefix|>[]<|tools_suffix|>")),
    ('<|tools_prefix|>[{"now": 3}]<|tools_suffix|>', text('<|tools_prefix|>[{"now": 3}]<|tools_suffix|>')),
    ("<|tools_prefix|>later", text("<|tools_prefix|>later")),
]
CASES = [
    *cases("functiongemma", "none", FUNCTIONGEMMA),
    *cases("seed_oss", "seed_oss", SEED_OSS),
    *cases("minicpm5", "think", MINICPM5),
    *cases("muse_glimmer", "muse_glimmer", MUSE),
    *cases("apertus", "apertus", APERTUS),
]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_tagged_format_answer_is_parsed_equally_in_every_split(case: Case) -> None:
    check(case)


OPENED = [
    ("seed_oss", "user <seed:think>\n", "so\n</seed:think>\nYes"),
    ("muse_glimmer", "<|start|>assistant to=self<|message|>", "so<|eom|><|start|>assistant to=user<|message|>Yes"),
    ("apertus", "<|assistant_start|><|inner_prefix|>", "so<|inner_suffix|>Yes"),
]


@pytest.mark.parametrize(("name", "prompt", "written"), OPENED, ids=[name for name, _, _ in OPENED])
def test_tagged_format_reasoning_opened_by_the_prompt_is_parsed(name: str, prompt: str, written: str) -> None:
    assert prompt.rstrip().endswith(REASONING_FORMATS[name].open)
    assert parse((name, name), [written], is_opened=True) == [("reasoning", "so"), ("text", "Yes")]


TEMPLATES = [
    ("<start_of_turn> <start_function_call>call:", ("functiongemma", "none")),
    ("<seed:tool_call>\n<function=f>\n<parameter=a>1</parameter> <seed:think>", ("seed_oss", "seed_oss")),
    ('<function name="f"><param name="a">1</param></function> <think></think>', ("minicpm5", "think")),
    ("<|start|>assistant to=self<|message|> <atem:function_calls>", ("muse_glimmer", "muse_glimmer")),
    ("<|inner_prefix|> <|tools_prefix|>", ("apertus", "apertus")),
]


@pytest.mark.parametrize(("template", "expected"), TEMPLATES)
def test_chat_template_selects_its_tagged_format(template: str, expected: tuple[str, str]) -> None:
    tokenizer: Any = SimpleNamespace(template_source=lambda *, has_tools: template)
    assert OutputFormat.of(tokenizer) == OutputFormat(*expected)


# texts up to the value of `city` or `days`, and the tag after it
BROKEN_OFF = {
    "qwen3_coder": ("<tool_call>\n<function=weather>\n<parameter=KEY>\n", "\n</parameter>"),
    "seed_oss": ("<seed:tool_call><function=weather><parameter=KEY>", "</parameter>"),
    "minimax_m2": ('<minimax:tool_call><invoke name="weather"><parameter name="KEY">', "</parameter>"),
    "deepseek_v32": ('<｜DSML｜function_calls><｜DSML｜invoke name="weather"><｜DSML｜parameter name="KEY">', "</｜DSML｜parameter>"),
    "minicpm5": ('<function name="weather"><param name="KEY">', "</param>"),
    "muse_glimmer": ('<atem:function_calls><atem:invoke name="weather"><atem:parameter name="KEY">', "</atem:parameter>"),
    "glm45": ("<tool_call>weather<arg_key>KEY</arg_key><arg_value>", "</arg_value>"),
    "hy_v3": ("<tool_calls><tool_call>weather<tool_sep><arg_key>KEY</arg_key><arg_value>", "</arg_value>"),
}


@pytest.mark.parametrize("name", BROKEN_OFF)
def test_truncated_tagged_value_contains_no_part_of_its_closing_tag(name: str) -> None:
    opening, closing = BROKEN_OFF[name]
    for end in range(len(closing)):
        case = Case("", (name, "none"), opening.replace("KEY", "city") + "Paris" + closing[:end], [])
        events, num_complete = events_of(case, [case.output])
        assert (parsed(events), num_complete) == ([weather(city="Paris")], 0), end


@pytest.mark.parametrize("name", BROKEN_OFF)
def test_tagged_call_truncated_before_a_number_omits_the_argument(name: str) -> None:
    opening, closing = BROKEN_OFF[name]
    for end in range(opening.index("KEY"), len(opening) + 1):
        assert parse((name, "none"), [opening[:end].replace("KEY", "days")]) == [weather()], end
    assert parse((name, "none"), [opening.replace("KEY", "days") + "3" + closing]) == [weather(days=3)]


@pytest.mark.parametrize("written", ["<|tool_call_start|>[weather(city='Par", "<|tool_call_start|>[weather(city='Paris', tags=['a"])
def test_pythonic_call_truncated_within_a_string_is_incomplete(written: str) -> None:
    assert events_of(Case("", ("lfm2", "none"), written, []), [written])[1] == 0
