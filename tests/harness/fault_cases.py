"""Answers with the small faults that models make, and the calls, text and reasoning that are meant."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.parsing.tools import Tool

V = {"type": "string", "enum": ["3.9", "3.10", "true"]}
PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "state": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "on": {"type": "boolean"},
    "tags": {"type": "array"},
    "at": {"type": "object"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "one_of": {"oneOf": [{"type": "boolean"}, {"type": "string"}]},
    "version": {"anyOf": [{"$ref": "#/$defs/V"}, {"type": "null"}]},
    "all_of": {"allOf": [{"$ref": "#/$defs/V"}], "default": "3.9"},
    "level": {"enum": [1, 2, 3]},
    "fixed": {"const": "7"},
    "py_float": {"type": "float"},
    "py_int": {"type": "int"},
    "py_str": {"type": "str"},
    "py_bool": {"type": "bool"},
    "py_dict": {"type": "dict"},
    "py_list": {"type": "list[str]"},
    "free": {},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"V": V}}
TOOLS = (Tool(name="f", parameters=SCHEMA), Tool(name="g"))
PARIS = {"city": "Paris"}


@dataclass(frozen=True, slots=True)
class FaultCase:
    """An answer.

    Attributes:
        parsers: of tool calls and of reasoning.
        calls: their names and arguments.
    """

    title: str
    parsers: tuple[str, str]
    output: str
    calls: list[tuple[str, dict[str, Any]]]
    content: str = ""
    reasoning: str | None = None
    in_reasoning: bool = field(default=False, kw_only=True)


# what a model wrote for arguments, and the arguments that are meant
ARGUMENTS: list[tuple[str, str, dict[str, Any]]] = [
    ("strict", '{"city": "Paris", "n": 3}', {"city": "Paris", "n": 3}),
    ("trailing comma", '{"city": "Paris",}', PARIS),
    ("trailing comma in a list", '{"tags": ["a", "b",],}', {"tags": ["a", "b"]}),
    ("doubled comma", '{"city": "Paris",, "n": 3}', {"city": "Paris", "n": 3}),
    ("comma first", '{, "city": "Paris"}', PARIS),
    ("missing comma", '{"city": "Paris" "n": 3}', {"city": "Paris", "n": 3}),
    ("Python literals", '{"on": True, "maybe": None, "tags": [False]}', {"on": True, "maybe": None, "tags": [False]}),
    ("single quotes", "{'city': 'Paris', 'tags': ['a']}", {"city": "Paris", "tags": ["a"]}),
    ("an apostrophe", "{'city': 'L'Aquila'}", {"city": "L'Aquila"}),
    ("an escaped apostrophe", "{'city': 'L\\'Aquila'}", {"city": "L'Aquila"}),
    ("quotes in single quotes", "{'city': 'a \"b\"'}", {"city": 'a "b"'}),
    ("quotes in a text", '{"city": "the "old" town"}', {"city": 'the "old" town'}),
    ("keys without quotes", '{city: "Paris", n: 3}', {"city": "Paris", "n": 3}),
    ("values without quotes", '{"city": New York, "n": 3}', {"city": "New York", "n": 3}),
    ("raw newline", '{"city": "a\nb\tc"}', {"city": "a\nb\tc"}),
    ("backslash before nothing special", '{"city": "C:\\data"}', {"city": "C:\\data"}),
    ("lax numbers", '{"x": .5, "n": +1, "tags": [5., -.5]}', {"x": 0.5, "n": 1, "tags": [5.0, -0.5]}),
    ("no number", '{"x": NaN, "tags": [Infinity, -Infinity]}', {"x": None, "tags": [None, None]}),
    ("comments", '{"n": 3, // three\n /* and */ "city": "Paris"}', {"n": 3, "city": "Paris"}),
    ("a closer that is missing within", '{"tags": ["a", "b"}', {"tags": ["a", "b"]}),
    ("a closer too many within", '{"tags": ["a"]], "n": 3}', {"tags": ["a"], "n": 3}),
    ("a key without a value", '{"city": "Paris", "n":}', PARIS),
    ("end marks in a text", '{"city": "</tool_call> <|call|> ]}"}', {"city": "</tool_call> <|call|> ]}"}),
]

JSON_FORMS: dict[str, str] = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": @}\n</tool_call>',
    "mistral": "[TOOL_CALLS]f[ARGS]@",
    "granite": '<|tool_call|>[{"name": "f", "arguments": @}]',
    "llama3_json": '{"name": "f", "parameters": @}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>@<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "openai": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>@<|call|>",
    "generic": '{"tool_call": {"name": "f", "arguments": @}}',
}


def _json_cases() -> Iterator[FaultCase]:
    for parser, form in JSON_FORMS.items():
        reasoning = "openai_gptoss" if parser == "openai" else "none"
        for title, written, arguments in ARGUMENTS:
            yield FaultCase(title, (parser, reasoning), form.replace("@", written), [("f", arguments)])
        for title, written in (("null", "null"), ("empty text", '""'), ("None", "None"), ("an empty list", "[]")):
            yield FaultCase(f"arguments: {title}", (parser, reasoning), form.replace("@", written), [("f", {})])
        yield FaultCase("arguments as a text", (parser, reasoning), form.replace("@", '"{\\"city\\": \\"Paris\\"}"'), [("f", PARIS)])
        yield FaultCase("arguments as a Python text", (parser, reasoning), form.replace("@", "\"{'city': 'Paris'}\""), [("f", PARIS)])
        yield FaultCase("a brace too many", (parser, reasoning), form.replace("@", '{"city": "Paris"}}'), [("f", PARIS)])
        cut = form[: form.index("@")] + '{"tags": ["a", {"b": "c'
        yield FaultCase("cut within a text", (parser, reasoning), cut, [("f", {"tags": ["a", {"b": "c"}]})])
        cut = form[: form.index("@")] + '{"city": "Paris", "n": 3'
        yield FaultCase("cut after a number", (parser, reasoning), cut, [("f", {"city": "Paris", "n": 3})])
        cut = form[: form.index("@")] + '{"city": "Paris", "sta'
        yield FaultCase("cut within a key", (parser, reasoning), cut, [("f", PARIS)])


def _calls(parser: str, rows: list[tuple[Any, ...]], reasoning: str = "none") -> list[FaultCase]:
    return [FaultCase(row[0], (parser, reasoning), *row[1:]) for row in rows]


CALL = '{"name": "f", "arguments": {"city": "Paris"}}'
F: list[tuple[str, dict[str, Any]]] = [("f", PARIS)]
FG: list[tuple[str, dict[str, Any]]] = [("f", PARIS), ("g", {})]
WRAPPED = [
    *_calls(
        "hermes",
        [
            ("nested under function", f'<tool_call>{{"type": "function", "function": {CALL}}}</tool_call>', F),
            ("type in front", '<tool_call>{"type": "function", "name": "g", "arguments": {}}</tool_call>', [("g", {})]),
            ("the function's name", '<tool_call>{"function": "f", "arguments": {"city": "Paris"}}</tool_call>', F),
            ("parameters", '<tool_call>{"name": "f", "parameters": {"city": "Paris"}}</tool_call>', F),
            ("a list of calls", f'<tool_call>[{CALL}, {{"name": "g"}}]</tool_call>', FG),
            ("calls one after another", f'<tool_call>\n{CALL}\n{{"name": "g", "arguments": {{}}}}\n</tool_call>', FG),
            ("a code fence", f"<tool_call>\n```json\n{CALL}\n```\n</tool_call>", F),
            ("a code fence without a language", f"<tool_call>\n```\n{CALL}\n```\n</tool_call>", F),
            ("no end mark, then a call", f'<tool_call>{CALL}\n<tool_call>{{"name": "g"}}</tool_call>', FG),
            ("an opening mark as end mark", f"<tool_call>{CALL}<tool_call>", F),
            ("a doubled end mark", f"<tool_call>{CALL}</tool_call></tool_call>\nDone.", F, "Done."),
            ("an end mark without >", f"<tool_call>{CALL}</tool_call", F),
            ("another end mark", f"<tool_call>{CALL}</tool_calls>Done.", F, "Done."),
            ("a doubled opening mark", f"<tool_call>\n<tool_call>{CALL}</tool_call>", F),
            ("a missing brace", '<tool_call>{"name": "f", "arguments": {"city": "Paris"}</tool_call>', F),
            ("two missing braces", '<tool_call>{"name": "f", "arguments": {"city": "Paris"</tool_call>', F),
            ("no arguments and no brace", '<tool_call>{"name": "g"</tool_call>', [("g", {})]),
            ("parameters in tags", "<tool_call><function=f><parameter=city>Paris</parameter></function></tool_call>", F),
            ("no call", "<tool_call>later</tool_call>", [], "<tool_call>later</tool_call>"),
        ],
    ),
    *_calls(
        "mistral",
        [
            ("a list without an end", f"[TOOL_CALLS][{CALL}", F),
            ("one object", f"[TOOL_CALLS]{CALL}", F),
            ("a doubled mark", f"[TOOL_CALLS][TOOL_CALLS][{CALL}]", F),
            ("a list in a fence", f"[TOOL_CALLS]```json\n[{CALL}]\n```", F),
            ("no mark before arguments", '[TOOL_CALLS]f{"city": "Paris"}', F),
            ("space", '[TOOL_CALLS] f [ARGS] {"city": "Paris"}', F),
            ("two names", '[TOOL_CALLS]f[ARGS]{"city": "Paris"}[TOOL_CALLS]g[ARGS]{}', FG),
        ],
    ),
    *_calls(
        "granite",
        [
            ("no list", f"<|tool_call|>{CALL}", F),
            ("space and a fence", f"<|tool_call|> ```\n[{CALL}]\n```", F),
            ("two lists", f'<|tool_call|>[{CALL}]<|tool_call|>[{{"name": "g"}}]', FG),
        ],
    ),
    *_calls(
        "llama3_json",
        [
            ("a list", f'[{CALL}, {{"name": "g", "parameters": {{}}}}]', FG),
            ("a code fence", f"```json\n{CALL}\n```", F),
            ("nested under function", f'{{"type": "function", "function": {CALL}}}', F),
            ("a mark and a list", f"<|python_tag|>[{CALL}]", F),
            ("lines", f'{CALL}\n{{"name": "g", "parameters": {{}}}}', FG),
            ("another JSON", '[{"name": "Ann", "parameters": {}}]', [], '[{"name": "Ann", "parameters": {}}]'),
            ("code", "```python\nprint(1)\n```", [], "```python\nprint(1)\n```"),
        ],
    ),
    *_calls(
        "kimi_k2",
        [
            ("no section", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>', F),
            ("no end mark", '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"city": "Paris"}', F),
            ("no functions", '<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{"city": "Paris"}', F),
            ("no mark before arguments", '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0 {"city": "Paris"}', F),
        ],
    ),
    *_calls(
        "generic",
        [
            ("bare", CALL, F),
            ("a code fence", f"```json\n{CALL}\n```", F),
            ("after text", f'I look.\n{{"tool_call": {CALL}}}', F, "I look."),
            ("after text, in a fence", f'I look.\n```json\n{{"tool_call": {CALL}}}\n```\nDone.', F, "I look.Done."),
            ("lines", f'{{"tool_call": {CALL}}}\n{{"tool_call": {{"name": "g", "arguments": {{}}}}}}', FG),
            ("a list", f'{{"tool_calls": [{CALL}, {{"name": "g", "arguments": {{}}}}]}}', FG),
            ("another JSON", '{"answer": 42}', [], '{"answer": 42}'),
        ],
    ),
    *_calls(
        "gemma4",
        [
            ("strict", '<|tool_call>call:f{city:<|"|>Paris<|"|>,n:3}<tool_call|>', [("f", {"city": "Paris", "n": 3})]),
            ("two calls in a block", '<|tool_call>call:f{city:<|"|>Paris<|"|>}call:g{}<tool_call|>', FG),
            ("two calls and a comma", '<|tool_call>call:f{city:<|"|>Paris<|"|>}, call:g{}<tool_call|>', FG),
            ("a doubled opening mark", '<|tool_call><|tool_call>call:f{city:<|"|>Paris<|"|>}<tool_call|>', F),
            ("a doubled end mark", '<|tool_call>call:f{city:<|"|>Paris<|"|>}<tool_call|><tool_call|>', F),
            ("no end mark", '<|tool_call>call:f{city:<|"|>Paris<|"|>}', F),
            ("no end mark, then a call", '<|tool_call>call:f{city:<|"|>Paris<|"|>}<|tool_call>call:g{}<tool_call|>', FG),
            ("no word call", '<|tool_call>f{city:<|"|>Paris<|"|>}<tool_call|>', F),
            ("quoted keys", '<|tool_call>call:f{<|"|>city<|"|>:<|"|>Paris<|"|>}<tool_call|>', F),
            ("JSON", '<|tool_call>call:f{"city": "Paris"}<tool_call|>', F),
            ("a doubled quote", '<|tool_call>call:f{city:<|"|>Paris<|"|><|"|>}<tool_call|>', F),
            ("a quote after the call", '<|tool_call>call:f{city:<|"|>Paris<|"|>}<|"|><tool_call|>', F),
            ("a response mark", '<|tool_call>call:f{city:<|"|>Paris<|"|>}<tool_call|><|tool_response>', F),
            ("an unclosed text", '<|tool_call>call:f{city:<|"|>Paris}<tool_call|>', F),
            ("a trailing comma", '<|tool_call>call:f{city:<|"|>Paris<|"|>,}<tool_call|>', F),
            ("literals", "<|tool_call>call:f{on:True,maybe:None,x:.5}<tool_call|>", [("f", {"on": True, "maybe": None, "x": 0.5})]),
            ("missing closers", '<|tool_call>call:f{tags:[<|"|>a<|"|>,<|"|>b<|"|><tool_call|>', [("f", {"tags": ["a", "b"]})]),
            (
                "an end mark in a text",
                '<|tool_call>call:f{city:<|"|>a <tool_call|> b<|"|>}<tool_call|>',
                [("f", {"city": "a <tool_call|> b"})],
            ),
        ],
    ),
    *_calls(
        "openai",
        [
            ("a call as text", 'commentary to=functions.f {"city": "Paris"}', F),
            ("a call as text with a type", 'commentary to=functions.f json{"city": "Paris"}', F),
            ("a call after text", 'I look.\nassistantcommentary to=functions.f json {"city": "Paris"}', F, "I look."),
            ("a call in a message", '<|channel|>final<|message|>commentary to=functions.f {"city": "Paris"}', F),
            ("no message mark", '<|channel|>commentary to=functions.f <|constrain|>json{"city": "Paris"}<|call|>', F),
            ("no functions", '<|channel|>commentary to=f <|constrain|>json<|message|>{"city": "Paris"}<|call|>', F),
            ("no arguments", "<|channel|>commentary to=functions.g <|constrain|>json<|message|><|call|>", [("g", {})]),
            ("another end mark", '<|channel|>commentary to=functions.f<|message|>{"city": "Paris"}<|end|>', F),
            ("an unknown name", "commentary to=functions.h {}", [], "commentary to=functions.h {}"),
            ("only words", "I write to=functions.f and no more.", [], "I write to=functions.f and no more."),
        ],
        "openai_gptoss",
    ),
]


def _tagged(title: str, parameters: str, arguments: dict[str, Any]) -> Iterator[FaultCase]:
    """Arguments in the three forms with tags; `parameters` is written as "key=value;;key=value"."""
    pairs = [pair.split("=", 1) for pair in parameters.split(";;")]
    xml = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    yield FaultCase(title, ("qwen3_coder", "none"), f"<tool_call>\n<function=f>\n{xml}</function>\n</tool_call>", [("f", arguments)])
    glm = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
    yield FaultCase(title, ("glm45", "none"), f"<tool_call>f\n{glm}</tool_call>", [("f", arguments)])
    invoke = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in pairs)
    output = f'<minimax:tool_call>\n<invoke name="f">\n{invoke}</invoke>\n</minimax:tool_call>'
    yield FaultCase(title, ("minimax_m2", "none"), output, [("f", arguments)])


VALUES: list[tuple[str, str, dict[str, Any]]] = [
    ("text that looks like a value", "city=true;;state=4", {"city": "true", "state": "4"}),
    ("Python literals", "on=True;;maybe=None", {"on": True, "maybe": None}),
    ("numbers", "n=5.0;;x=.5", {"n": 5, "x": 0.5}),
    ("a number that is none", "n=soon;;x=1.5", {"n": "soon", "x": 1.5}),
    ("single quotes", "tags=['a', None];;at={'k': True}", {"tags": ["a", None], "at": {"k": True}}),
    ("a list as a text", 'tags="[1, 2]"', {"tags": [1, 2]}),
    ("an escaped list", 'tags=[\\"a\\", \\"b\\"]', {"tags": ["a", "b"]}),
    ("a reference in anyOf", "version=3.10;;maybe=4", {"version": "3.10", "maybe": 4}),
    ("null by a reference", "version=null", {"version": None}),
    ("a reference in allOf", "all_of=3.10", {"all_of": "3.10"}),
    ("oneOf", "one_of=true", {"one_of": True}),
    ("enum of numbers", "level=2;;fixed=7", {"level": 2, "fixed": "7"}),
    ("Python's types", "py_float=2;;py_int=3;;py_str=4;;py_bool=False", {"py_float": 2, "py_int": 3, "py_str": "4", "py_bool": False}),
    ("Python's containers", "py_dict={'a': 1};;py_list=['b']", {"py_dict": {"a": 1}, "py_list": ["b"]}),
    ("no type", "free=[1];;city=x", {"free": [1], "city": "x"}),
    ("tags in a text", "city=<a>b</a> & </b>", {"city": "<a>b</a> & </b>"}),
    ("trailing comma", "tags=[1, 2,];;at={'a': 1,}", {"tags": [1, 2], "at": {"a": 1}}),
]
TAGGED = [
    *_calls(
        "qwen3_coder",
        [
            ("unclosed, then the next", "<tool_call><function=f><parameter=city>\nA\n<parameter=n>\n3\n</parameter></function></tool_call>",
             [("f", {"city": "A", "n": 3})]),
            ("all unclosed", "<tool_call><function=f><parameter=city>\nA\n<parameter=n>\n3\n</function></tool_call>",
             [("f", {"city": "A", "n": 3})]),
            ("unclosed at the end", "<tool_call><function=f><parameter=city>\nA", [("f", {"city": "A"})]),
            ("only the call's end", "<tool_call><function=f><parameter=city>\nA\n</tool_call>", [("f", {"city": "A"})]),
            ("no end of the function",
             "<tool_call><function=f><parameter=city>A</parameter></tool_call>Yes.", [("f", {"city": "A"})], "Yes."),
            ("a nested parameter",
             "<tool_call><function=f><parameter=city>\n<parameter=n>1</parameter>\n</parameter></function></tool_call>",
             [("f", {"city": "<parameter=n>1</parameter>"})]),
            ("a nested call",
             "<tool_call><function=f><parameter=city>\n<function=g><parameter=n>1</parameter></function>!\n</parameter>"
             "<parameter=n>2</parameter></function></tool_call>",
             [("f", {"city": "<function=g><parameter=n>1</parameter></function>!", "n": 2})]),
            ("an end mark in a text", "<tool_call><function=f><parameter=city>a </function> b</parameter></function></tool_call>",
             [("f", {"city": "a </function> b"})]),
            ("a closing tag in a text", "<tool_call><function=f><parameter=city>a </parameter> b</parameter></function></tool_call>",
             [("f", {"city": "a </parameter> b"})]),
            ("a doubled closing tag", "<tool_call><function=f><parameter=city>a</parameter></parameter></function></tool_call>",
             [("f", {"city": "a"})]),
            ("no > after a name",
             "<tool_call><function=f><parameter=tags: [1]\n</parameter><parameter=n>3</parameter></function></tool_call>",
             [("f", {"n": 3})]),
            ("no > after the function", "<tool_call><function=f\n<parameter=n>3</parameter></function></tool_call>", [("f", {"n": 3})]),
            ("quoted names", '<tool_call><function="f"><parameter="n">3</parameter></function></tool_call>', [("f", {"n": 3})]),
            ("JSON", f"<tool_call>{CALL}</tool_call>", F),
            ("no opening mark", "<function=f><parameter=n>3</parameter></function></tool_call>", [("f", {"n": 3})]),
            ("a doubled opening mark", "<tool_call><tool_call><function=g></function></tool_call>", [("g", {})]),
            ("a doubled end mark", "<tool_call><function=g></function></tool_call></tool_call>Yes.", [("g", {})], "Yes."),
            ("two functions", "<tool_call><function=f><parameter=city>\nParis</function><function=g></function></tool_call>", FG),
            ("two calls, the first unclosed",
             "<tool_call><function=f><parameter=city>\nParis\n<tool_call><function=g></function></tool_call>",
             [("f", {"city": "Paris"}), ("g", {})]),
        ],
    ),
    *_calls(
        "glm45",
        [
            ("unclosed, then the next",
             "<tool_call>f<arg_key>city</arg_key><arg_value>A<arg_key>n</arg_key><arg_value>3</arg_value></tool_call>",
             [("f", {"city": "A", "n": 3})]),
            ("unclosed at the end", "<tool_call>f<arg_key>city</arg_key><arg_value>A</tool_call>", [("f", {"city": "A"})]),
            ("unclosed on a line", "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>A\n</tool_call>", [("f", {"city": "A"})]),
            ("no end mark", "<tool_call>f<arg_key>city</arg_key><arg_value>A</arg_value>", [("f", {"city": "A"})]),
            ("an unclosed key", "<tool_call>f<arg_key>city<arg_value>A</arg_value></tool_call>", [("f", {"city": "A"})]),
            ("an unknown name with arguments", "<tool_call>h<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", [("h", {"a": "1"})]),
            ("an end mark in a text", "<tool_call>f<arg_key>city</arg_key><arg_value>a </tool_call> b</arg_value></tool_call>",
             [("f", {"city": "a </tool_call> b"})]),
            ("two calls", "<tool_call>f<arg_key>city</arg_key><arg_value>Paris</tool_call><tool_call>g</tool_call>", FG),
        ],
    ),
    *_calls(
        "minimax_m2",
        [
            ("unclosed", '<minimax:tool_call><invoke name="f"><parameter name="city">A<parameter name="n">3</parameter></invoke>'
             "</minimax:tool_call>", [("f", {"city": "A", "n": 3})]),
            ("no end marks", '<minimax:tool_call><invoke name="f"><parameter name="city">A</parameter>', [("f", {"city": "A"})]),
            ("two calls",
             '<minimax:tool_call><invoke name="f"><parameter name="city">Paris</parameter></invoke><invoke name="g"></invoke>', FG),
        ],
    ),
]  # fmt: skip

KIMI_CALL = "<|tool_calls_section_begin|><|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
REASONED = {
    "hermes": '<tool_call>{"name": "g"}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=g>\n</function>\n</tool_call>",
    "glm45": "<tool_call>g</tool_call>",
    "kimi_k2": f"{KIMI_CALL}<|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call><invoke name="g"></invoke></minimax:tool_call>',
}


def _reasoning_cases() -> Iterator[FaultCase]:
    for parser, call in REASONED.items():
        parsers, g = (parser, "qwen3"), [("g", dict[str, Any]())]
        yield FaultCase("a call in unclosed reasoning", parsers, f"<think>\nHm.\n{call}", g, "", "Hm.")
        yield FaultCase("text after it", parsers, f"<think>\nHm.\n{call}\nYes.", g, "Yes.", "Hm.")
        yield FaultCase(
            "a call in closed reasoning", parsers, f"<think>\nHm.\n{call}\nNo.\n</think>\nYes.", [], "Yes.", f"Hm.\n{call}\nNo."
        )
        yield FaultCase("calls in closed reasoning and after", parsers, f"<think>{call}</think>{call}", g, "", call)
        yield FaultCase("a call in reasoning that the prompt began", parsers, f"Hm.\n{call}", g, "", "Hm.", in_reasoning=True)
        yield FaultCase("a repeated opening mark", parsers, f"<think>\n<think>\nHm.\n</think>\n{call}", g, "", "Hm.")
        yield FaultCase("an opening mark after the prompt's", parsers, f"<think>\nHm.</think>{call}", g, "", "Hm.", in_reasoning=True)
    no_call = "<think>\nI write <tool_call>now</tool_call>"
    yield FaultCase("no call in unclosed reasoning", ("hermes", "qwen3"), no_call, [], "", no_call.removeprefix("<think>\n"))
    both = f"<think>a <tool_call>b {REASONED['hermes']}"
    yield FaultCase("no call, then a call", ("hermes", "qwen3"), both, [("g", {})], "", "a <tool_call>b ")


FAULT_CASES = [
    *_json_cases(),
    *WRAPPED,
    *(case for row in VALUES for case in _tagged(*row)),
    *TAGGED,
    *_reasoning_cases(),
]
