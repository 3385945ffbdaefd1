"""Answers as models write them, and what they consist of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.parsing.events import Event, Reasoning, Text, ToolCall, ToolCallStart, parts_of
from paceline.parsing.registry import OutputFormat
from paceline.parsing.tools import Tool

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "at": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        "note": {"type": ["string", "null"]},
        "any": {},
    },
    "required": ["city"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}}},
}
TOOLS = (Tool(name="weather", description="Tomorrow's weather.", parameters=WEATHER), Tool(name="now"))

Parsed = list[tuple[str, ...]]
"""("text", …), ("reasoning", …) or ("call", name, arguments) in the order written."""


@dataclass(frozen=True, slots=True)
class Case:
    """An answer.

    Attributes:
        formats: of tool calls and of reasoning.
        output: what the model wrote.
        is_opened: whether the prompt has begun reasoning.
        num_complete: calls whose arguments are complete; None = all of `expected`.
    """

    name: str
    formats: tuple[str, str]
    output: str
    expected: Parsed
    is_opened: bool = False
    parallel: bool = True
    num_complete: int | None = None


def events_of(case: Case, pieces: Iterable[str], tools: Sequence[Tool] = TOOLS) -> tuple[list[Event], int]:
    """The events of an answer that arrives in pieces, and how many of its calls are complete."""
    stream = OutputFormat(*case.formats).stream(tools, several=case.parallel, in_reasoning=case.is_opened)
    events: list[Event] = []
    for piece in pieces:
        events += stream.push(piece)
    events += stream.finish()
    assert stream.is_done
    return events, stream.sink.num_calls - len(stream.sink.broken_off)


def parsed(events: Sequence[Event]) -> Parsed:
    """What events amount to, ids left out."""
    calls = [event.call for event in events if isinstance(event, ToolCallStart)]
    assert calls == list(range(len(calls)))
    kinds = {Text: "text", Reasoning: "reasoning"}
    return [
        ("call", part.name, part.arguments) if isinstance(part, ToolCall) else (kinds[type(part)], part.text) for part in parts_of(events)
    ]


HERMES, LLAMA, MISTRAL, XML, GLM, GEMMA, HARMONY, KIMI, MINIMAX, GRANITE = (
    (name, think)
    for name, think in (
        ("hermes", "qwen3"),
        ("llama3_json", "none"),
        ("mistral", "mistral"),
        ("qwen3_coder", "qwen3"),
        ("glm45", "qwen3"),
        ("gemma4", "gemma4"),
        ("openai", "openai_gptoss"),
        ("kimi_k2", "qwen3"),
        ("minimax_m2", "qwen3"),
        ("granite", "none"),
    )
)
CASES = [
    Case(
        "plain text",
        HERMES,
        "Hello.\n\nIt is 3 < 4 <tool and </tool_call>.\n",
        [("text", "Hello.\n\nIt is 3 < 4 <tool and </tool_call>.\n")],
    ),
    Case("nothing", HERMES, "", []),
    Case("space alone", HERMES, " \n", [("text", " \n")]),
    Case(
        "a call",
        HERMES,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 😀", "days": 2}}\n</tool_call>',
        [("call", "weather", '{"city": "Köln 😀", "days": 2}')],
    ),
    Case(
        "reasoning, text and two calls",
        HERMES,
        '<think>\nHm.\n\nSo.\n</think>\n\nI look.\n<tool_call>{"name":"now"}</tool_call>\n'
        '<tool_call>{"name": "weather", "arguments": {"city": "A"}}</tool_call>\nDone.',
        [("reasoning", "Hm.\n\nSo."), ("text", "I look."), ("call", "now", "{}"), ("call", "weather", '{"city": "A"}'), ("text", "Done.")],
    ),
    Case(
        "reasoning that the prompt began",
        HERMES,
        "so <think> it\n</think>\nYes",
        [("reasoning", "so <think> it"), ("text", "Yes")],
        is_opened=True,
    ),
    Case("reasoning without an end", HERMES, "<think>\nmore\n", [("reasoning", "more\n")]),
    Case("reasoning marks in the text", HERMES, "a <think>b</think>", [("text", "a <think>b</think>")]),
    Case("the end of reasoning first", HERMES, "</think>\n\nYes", [("text", "Yes")]),
    Case("empty reasoning", HERMES, "<think>\n\n</think>\n\nYes", [("text", "Yes")]),
    Case(
        "arguments first",
        HERMES,
        '<tool_call>{"arguments": {"days": 1}, "name": "weather"}</tool_call>',
        [("call", "weather", '{"days": 1}')],
    ),
    Case(
        "arguments in a text", HERMES, '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', [("call", "now", '{"a": 1}')]
    ),
    Case(
        "lax strings",
        HERMES,
        '<tool_call>{"name": "now", "arguments": {"a": "x\ny\\d \\u00e4\\n"}}</tool_call>',
        [("call", "now", '{"a": "x\\ny\\\\d \\u00e4\\n"}')],
    ),
    Case("reasoning after no call", HERMES, "<tool_call><think>b</think>", [("text", "<tool_call><think>b</think>")]),
    Case("no call after text", HERMES, "a \n<tool_call> b", [("text", "a \n<tool_call> b")]),
    Case("a missing brace", HERMES, '<tool_call>{"name": "now", "arguments": {"a": 1}</tool_call>', [("call", "now", '{"a": 1}')]),
    Case(
        "a missing end",
        HERMES,
        '<tool_call>{"name": "now", "arguments": {"a": [1, -2.5e3, null]}}',
        [("call", "now", '{"a": [1, -2.5e3, null]}')],
    ),
    Case(
        "no call",
        HERMES,
        '<tool_call>later</tool_call> <tool_call><tool_call>{"name": 3}',
        [("text", '<tool_call>later</tool_call> <tool_call><tool_call>{"name": 3}')],
    ),
    Case(
        "a repeated opening mark",
        HERMES,
        '<tool_call>\n<tool_call>{"name": "now"}</tool_call>',
        [("call", "now", "{}")],
    ),
    Case(
        "a call that breaks off",
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"city": "Kö',
        [("call", "weather", '{"city": "Kö"}')],
        num_complete=0,
    ),
    Case(
        "a word without quotes",
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"city": oops}}</tool_call>',
        [("call", "weather", '{"city": "oops"}')],
    ),
    Case(
        "one call and no more",
        HERMES,
        '<tool_call>{"name": "now"}</tool_call>\n<tool_call>{"name": "now"}</tool_call>',
        [("call", "now", "{}"), ("text", '<tool_call>{"name": "now"}</tool_call>')],
        parallel=False,
    ),
    Case("bare", LLAMA, '{"name": "weather", "parameters": {"city": "A;"}}', [("call", "weather", '{"city": "A;"}')]),
    Case(
        "typed and two",
        LLAMA,
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
        [("call", "now", "{}"), ("call", "now", "{}")],
    ),
    Case("another JSON", LLAMA, '{"name": "Ann", "parameters": {}}', [("text", '{"name": "Ann", "parameters": {}}')]),
    Case("JSON within text", LLAMA, 'So: {"name": "now", "parameters": {}}', [("text", 'So: {"name": "now", "parameters": {}}')]),
    Case(
        "JSON after no call",
        LLAMA,
        '<|python_tag|>{{"name": "now", "parameters": {}}',
        [("text", '<|python_tag|>{{"name": "now", "parameters": {}}')],
    ),
    Case("a list", LLAMA, "[1] {", [("text", "[1] {")]),
    Case("python", LLAMA, "<|python_tag|>print(1)", [("text", "<|python_tag|>print(1)")]),
    Case(
        "list",
        MISTRAL,
        'Ok.[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "weather", "arguments": {"city": "]"}}]',
        [("text", "Ok."), ("call", "now", "{}"), ("call", "weather", '{"city": "]"}')],
    ),
    Case(
        "names",
        MISTRAL,
        '[THINK]Hm.[/THINK][TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "A"}',
        [("reasoning", "Hm."), ("call", "now", "{}"), ("call", "weather", '{"city": "A"}')],
    ),
    Case("a name alone", MISTRAL, "[TOOL_CALLS]now, please", [("text", "[TOOL_CALLS]now, please")]),
    Case("no list", MISTRAL, "[TOOL_CALLS][1]", [("text", "[TOOL_CALLS][1]")]),
    Case(
        "parameters",
        XML,
        '<think>\nA\n</think>\n\nI look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nSankt\n"Veit" </x>\n</parameter>\n'
        '<parameter=days>\n03\n</parameter>\n<parameter=metric>\nTrue\n</parameter>\n<parameter=tags>\n["a", "b"]\n</parameter>\n'
        '<parameter=at>\n{"x": 1.5}\n</parameter>\n</function>\n</tool_call>',
        [
            ("reasoning", "A"),
            ("text", "I look."),
            (
                "call",
                "weather",
                '{"city": "Sankt\\n\\"Veit\\" </x>", "days": "03", "metric": true, "tags": ["a", "b"], "at": {"x": 1.5}}',
            ),
        ],
    ),
    Case(
        "other values",
        XML,
        "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n<parameter=at>\nnull\n</parameter>\n<parameter=note>\nnull\n"
        "</parameter>\n<parameter=any>\n[1]\n</parameter>\n<parameter=new>\n[1]\n</parameter>\n</function>\n</tool_call>\n<tool_call>"
        "<function=now></function></tool_call>",
        [("call", "weather", '{"days": 3, "at": null, "note": null, "any": [1], "new": "[1]"}'), ("call", "now", "{}")],
    ),
    Case("bare function", XML, "<function=now>\n</function>\n</tool_call>", [("call", "now", "{}")]),
    Case("empty", XML, "<tool_call><function=now><parameter=a>\n</parameter></function></tool_call>", [("call", "now", '{"a": ""}')]),
    Case(
        "broken",
        XML,
        "<tool_call><function=weather><parameter=days>\n3",
        [("call", "weather", '{"days": 3}')],
    ),
    Case("no function", XML, "<tool_call>\n{}</tool_call>", [("text", "<tool_call>\n{}</tool_call>")]),
    Case(
        "keys and values",
        GLM,
        "<think>A</think>\nI look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln\n</x></arg_value>\n<arg_key>days"
        "</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        [("reasoning", "A"), ("text", "I look."), ("call", "weather", '{"city": "Köln\\n</x>", "days": 2}'), ("call", "now", "{}")],
    ),
    Case(
        "without line ends",
        GLM,
        "<tool_call>weather<arg_key>tags</arg_key><arg_value>[]</arg_value><arg_key>b</arg_key><arg_value>c",
        [("call", "weather", '{"tags": [], "b": "c"}')],
        num_complete=0,
    ),
    Case("no name", GLM, "<tool_call>later</tool_call>", [("text", "<tool_call>later</tool_call>")]),
    Case("no keys", GLM, "<tool_call>now or never", [("text", "<tool_call>now or never")]),
    Case(
        "quoted",
        GEMMA,
        '<|channel>thought\nHm.\n<channel|>I look.<|tool_call>call:weather{city:<|"|>A "b" \\ {<|"|>,days:2,metric:true,'
        'tags:[<|"|>a<|"|>,<|"|>b<|"|>],at:{x:1.5},note:null}<tool_call|><|tool_call>call:now{}<tool_call|>',
        [
            ("reasoning", "Hm."),
            ("text", "I look."),
            (
                "call",
                "weather",
                '{"city": "A \\"b\\" \\\\ {", "days": 2, "metric": true, "tags": ["a", "b"], "at": {"x": 1.5}, "note": null}',
            ),
            ("call", "now", "{}"),
        ],
    ),
    Case("empty reasoning", GEMMA, "<|channel>thought\n<channel|>Yes.", [("text", "Yes.")]),
    Case("reasoning without its label", GEMMA, "<|channel>x<channel|>Yes.", [("reasoning", "x"), ("text", "Yes.")]),
    Case("reasoning with nothing but its label", GEMMA, "<|channel>thought<channel|>Yes.", [("text", "Yes.")]),
    Case(
        "doubled and stray marks", GEMMA, "<|channel><|channel>thought\nx<channel|>Yes.<channel|>", [("reasoning", "x"), ("text", "Yes.")]
    ),
    Case("a stray end mark", GEMMA, "<|tool_call>call:now{}<tool_call|> <tool_call|><|tool_response>", [("call", "now", "{}")]),
    Case("bare words", GEMMA, '<|tool_call>call:now{a:word, "b": "c"}<tool_call|>', [("call", "now", '{"a": "word", "b": "c"}')]),
    Case("no braces", GEMMA, "<|tool_call>call:now<tool_call|>", [("text", "<|tool_call>call:now<tool_call|>")]),
    Case(
        "broken",
        GEMMA,
        '<|tool_call>call:weather{city:<|"|>A<tool_call|>',
        [("call", "weather", '{"city": "A"}')],
        num_complete=0,
    ),
    Case(
        "channels",
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        [("reasoning", "Hm."), ("text", "Yes.")],
    ),
    Case(
        "a function",
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "A"}<|call|>',
        [("reasoning", "Hm."), ("text", "I look."), ("call", "weather", '{"city": "A"}')],
    ),
    Case("the recipient first", HARMONY, " to=functions.now<|channel|>commentary json<|message|>{}", [("call", "now", "{}")]),
    Case(
        "a tool of the model's own",
        HARMONY,
        "<|channel|>analysis to=browser.open<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>Yes.",
        [("reasoning", "{}"), ("text", "Yes.")],
    ),
    Case(
        "a recipient that is no tool",
        HARMONY,
        "<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=user"
        "<|channel|>final<|message|>Yes.",
        [("reasoning", "Hm."), ("text", "Yes.")],
    ),
    Case("no header", HARMONY, "Hello <|channel|>there", [("text", "Hello <|channel|>there")]),
    Case(
        "no arguments",
        HARMONY,
        "<|channel|>commentary to=functions.now<|message|>x",
        [("text", "<|channel|>commentary to=functions.now<|message|>x")],
    ),
    Case(
        "a section",
        KIMI,
        "<think>Hm.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Köln"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        [("reasoning", "Hm."), ("text", "I look."), ("call", "weather", '{"city": "Köln"}'), ("call", "now", "{}")],
    ),
    Case(
        "a name without an id",
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>now<|tool_call_argument_begin|>{}",
        [("call", "now", "{}")],
    ),
    Case(
        "broken",
        KIMI,
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "K',
        [("call", "weather", '{"city": "K"}')],
        num_complete=0,
    ),
    Case(
        "invocations",
        MINIMAX,
        '<think>\nHm.\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Köln\n"a"</parameter>\n'
        '<parameter name="days">2</parameter>\n<parameter name="tags">["a"]</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        [
            ("reasoning", "Hm."),
            ("text", "I look."),
            ("call", "weather", '{"city": "Köln\\n\\"a\\"", "days": 2, "tags": ["a"]}'),
            ("call", "now", "{}"),
        ],
    ),
    Case("no invocation", MINIMAX, "<minimax:tool_call>now</minimax:tool_call>", [("text", "<minimax:tool_call>now</minimax:tool_call>")]),
    Case(
        "a list after a token",
        GRANITE,
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "A"}}, {"name": "now", "arguments": {}}]',
        [("call", "weather", '{"city": "A"}'), ("call", "now", "{}")],
    ),
    Case("no list after a token", GRANITE, "<|tool_call|> later", [("text", "<|tool_call|> later")]),
]
