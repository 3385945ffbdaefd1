"""The grammar of an answer allows calls as the parser of their format reads them, and nothing else."""

import json
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Library

from harness import json_formats
from harness.markup_cases import Case, events_of, parsed
from paceline.errors import RequestError
from paceline.parsing.answer_grammar import answer_grammar
from paceline.parsing.registry import TOOL_CALL_FORMATS, OutputFormat
from paceline.parsing.tools import Tool, ToolUse
from paceline.sampling.grammars.compiler import GrammarCompiler
from paceline.sampling.grammars.grammar import Grammar
from paceline.tokenizer.tokenizer import Tokenizer

pytest.importorskip("llguidance")
END = 2
BOOK = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["taxi", "bus"]},
        "note": {"type": "string", "maxLength": 8},
        "seats": {"$ref": "#/$defs/seats"},
        "via": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}, "maxItems": 2},
        "wait": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["kind", "seats"],
    "$defs": {"seats": {"type": "integer", "minimum": 1, "maximum": 4}},
}
TOOLS = (Tool(name="book", parameters=BOOK), Tool(name="cancel"))
REASONING_PARSERS = {
    "hermes": "qwen3",
    "qwen3_coder": "qwen3",
    "glm45": "qwen3",
    "mistral": "mistral",
    "gemma4": "gemma4",
    "openai": "openai_gptoss",
    "generic": "none",
    "llama3_json": "none",
    "kimi_k2": "qwen3",
    "minimax_m2": "qwen3",
    "granite": "none",
    "lfm2": "qwen3",
    "pythonic": "none",
    "llama4_pythonic": "none",
    "olmo3": "qwen3",
    "gemma3": "none",
    "functiongemma": "none",
    "seed_oss": "seed_oss",
    "minicpm5": "qwen3",
    "muse_glimmer": "muse_glimmer",
    "apertus": "apertus",
    "smollm3": "qwen3",
    "minimax_m3": "minimax_m3",
    "kimi_k3": "kimi_k3",
    "solar_open": "solar_open",
    "step3": "qwen3",
}


def grammar_of(formats: OutputFormat, tokenizer: Tokenizer, tools: tuple[Tool, ...] = TOOLS, **choices: Any) -> Grammar | None:
    """The grammar of an answer that has to be a call, unless `choices` differs."""
    return answer_grammar(formats, tokenizer, tools, **{"tool_use": ToolUse.REQUIRED, **choices})


def with_tokens(mini: Path, tokens: tuple[str, ...]) -> Tokenizer:
    """The mini's tokenizer, with further special tokens."""
    library = Library.from_file(str(mini / "tokenizer.json"))
    library.add_special_tokens(list(tokens))
    pretrained = SimpleNamespace(backend_tokenizer=library, chat_template=None, special_tokens_map={})
    pretrained.encode = lambda text, **_: library.encode(text, add_special_tokens=False).ids
    return Tokenizer(pretrained)


@lru_cache(maxsize=1)
def compiler_of(tokenizer: Tokenizer) -> GrammarCompiler:
    """A compiler, whose tables take most of the time of a test."""
    return GrammarCompiler(tokenizer, [END])


def allows(tokenizer: Tokenizer, grammar: Grammar | None, text: str, prompt: str = "") -> bool:
    """Whether a grammar takes a text and its end."""
    assert grammar is not None
    matcher = compiler_of(tokenizer).new_matcher(grammar, tokenizer.encode(prompt))
    return matcher.is_allowed([*tokenizer.encode(text, add_special_tokens=False), END])


ARGUMENTS = '{"kind": "taxi", "seats": 2}'
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "book", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=book>\n<parameter=kind>\ntaxi\n</parameter>\n<parameter=seats>\n2\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm45": "<tool_call>book\n<arg_key>kind</arg_key>\n<arg_value>taxi</arg_value>\n<arg_key>seats</arg_key>\n<arg_value>2</arg_value>\n"
    "</tool_call>",
    "mistral": f"[TOOL_CALLS]book[ARGS]{ARGUMENTS}",
    "gemma4": '<|tool_call>call:book{kind:<|"|>taxi<|"|>,seats:2}<tool_call|>',
    "openai": f"<|channel|>commentary to=functions.book <|constrain|>json<|message|>{ARGUMENTS}",
    "llama3_json": f'{{"name": "book", "parameters": {ARGUMENTS}}}',
    "kimi_k2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.book:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="book">\n<parameter name="kind">taxi</parameter>\n'
    '<parameter name="seats">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "generic": f'{{"tool_call": {{"name": "book", "arguments": {ARGUMENTS}}}}}',
    "granite": f'<|tool_call|>[{{"name": "book", "arguments": {ARGUMENTS}}}]',
    "lfm2": '<|tool_call_start|>[book(kind="taxi", seats=2)]<|tool_call_end|>',
    "pythonic": '[book(kind="taxi", seats=2)]',
    "llama4_pythonic": '[book(kind="taxi", seats=2)]',
    "olmo3": '<function_calls>\nbook(kind="taxi", seats=2)\n</function_calls>',
    "gemma3": '```tool_code\nbook(kind="taxi", seats=2)\n```',
    "functiongemma": "<start_function_call>call:book{kind:<escape>taxi<escape>,seats:2}<end_function_call>",
    "seed_oss": "<seed:tool_call>\n<function=book>\n<parameter=kind>taxi</parameter>\n<parameter=seats>2</parameter>\n</function>\n"
    "</seed:tool_call>",
    "minicpm5": '<function name="book"><param name="kind">taxi</param><param name="seats">2</param></function>',
    "muse_glimmer": ' to=book<|message|><atem:function_calls>\n<atem:invoke name="book">\n<atem:parameter name="kind">taxi'
    '</atem:parameter>\n<atem:parameter name="seats">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    "apertus": f'<|tools_prefix|>[{{"book": {ARGUMENTS}}}]<|tools_suffix|>',
    "smollm3": f'<tool_call>\n{{"name": "book", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "minimax_m3": '<tool_call>\n<invoke name="book"><kind>taxi</kind><seats>2</seats></invoke>\n</tool_call>'.replace(
        "<", "]<]minimax[>[<"
    ),
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="book" index="1"<|sep|><|open|>argument key="kind" type="string"<|sep|>taxi'
    '<|close|>argument<|sep|><|open|>argument key="seats" type="integer"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|>",
    "solar_open": f"<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>book<|tool_call:args|>{ARGUMENTS}<|tool_call:end|>"
    "<|calls|>",
    "step3": '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="book">'
    '<steptml:parameter name="kind">taxi</steptml:parameter><steptml:parameter name="seats">2</steptml:parameter></steptml:invoke>'
    "<｜tool_call_end｜>\n<｜tool_calls_end｜>",
}
REASONING = {
    "hermes": "<think>\nHm.\n</think>\n\n",
    "qwen3_coder": "<think>Hm.</think>",
    "glm45": "<think>Hm.</think>\n",
    "kimi_k2": "<think>Hm.</think>",
    "minimax_m2": "<think>\nHm.\n</think>\n\n",
    "mistral": "[THINK]Hm.[/THINK]",
    "gemma4": "<|channel>thought\nHm.<channel|>",
    "openai": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
    "lfm2": "<think>Hm.</think>",
    "olmo3": "<think>Hm.</think>",
    "seed_oss": "<seed:think>Hm.</seed:think>\n",
    "minicpm5": "<think>\nHm.\n</think>\n\n",
    "muse_glimmer": " to=self<|message|>Hm.<|eom|><|start|>assistant",
    "apertus": "<|inner_prefix|>Hm.<|inner_suffix|>",
    "smollm3": "<think>\nHm.\n</think>\n",
    "minimax_m3": "<mm:think>Hm.</mm:think>",
    "kimi_k3": "<|open|>think<|sep|>Hm.<|close|>think<|sep|>",
    "solar_open": "<|think|>Hm.<|end|><|begin|>assistant",
    "step3": "<think>Hm.</think>",
}
WRITTEN |= json_formats.written_calls(ARGUMENTS)
REASONING_PARSERS |= json_formats.REASONING_PARSERS
REASONING |= json_formats.REASONING


@pytest.mark.spread(0.5)
@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
@pytest.mark.parametrize("has_tokens", [False, True])
def test_required_tool_call_grammar_allows_the_format_of_the_model(mini_dir: Path, name: str, has_tokens: bool) -> None:
    formats = OutputFormat(name, REASONING_PARSERS[name])
    tokenizer = with_tokens(mini_dir, formats.tokens(TOOLS) if has_tokens else ())
    grammar = grammar_of(formats, tokenizer)
    call = WRITTEN[name] if has_tokens or name != "mistral" else f'[TOOL_CALLS][{{"name": "book", "arguments": {ARGUMENTS}}}]'
    assert parsed(events_of(Case("", (name, REASONING_PARSERS[name]), "", []), [call], TOOLS)[0]) == [("call", "book", ARGUMENTS)]
    assert allows(tokenizer, grammar, call)
    assert allows(tokenizer, grammar, REASONING.get(name, "") + call)
    assert not allows(tokenizer, grammar, call.replace("taxi", "ship"))
    assert not allows(tokenizer, grammar, call.replace("2", "5"))
    assert not allows(tokenizer, grammar, call.replace("book", "look"))
    assert not allows(tokenizer, grammar, "Yes." + call)
    named = grammar_of(formats, tokenizer, tool_name="cancel")
    assert not allows(tokenizer, named, call)


@pytest.mark.spread(0.4)
@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_texts_sampled_from_a_tool_grammar_parse_as_valid_calls(mini_dir: Path, name: str, seed: int, large_counts: bool) -> None:
    """A model of random taste, which likes to come to an end."""
    random = np.random.default_rng(seed)
    formats = OutputFormat(name, "openai_gptoss" if name == "openai" else "none")
    tokenizer = with_tokens(mini_dir, formats.tokens(TOOLS))
    compiler = compiler_of(tokenizer)
    grammar = grammar_of(formats, tokenizer)
    assert grammar is not None
    ends = [token_id for text in ('"', "}", "]", ",", "\n", "</", "1") for token_id in tokenizer.encode(text, add_special_tokens=False)]
    shown = [token_id for token in formats.tokens(TOOLS) if (token_id := tokenizer.added_token_id(token)) is not None]
    for _ in range(40 if large_counts else 2):
        matcher, detokenizer, token_id = compiler.new_matcher(grammar), tokenizer.detokenizer(shown), 0
        num_tokens = 0
        while token_id != END and num_tokens < 600:
            scores = random.normal(size=tokenizer.vocab_size).astype(np.float32)
            scores[ends] += 3.0
            scores[shown] += 3.0
            scores[END] += 6.0
            matcher.mask(scores, ())
            token_id = int(scores.argmax())
            matcher.commit(token_id)
            detokenizer.push(token_id)
            num_tokens += 1
        detokenizer.flush()
        events, num_complete = events_of(Case("", (name, formats.reasoning_parser), "", []), [detokenizer.text], TOOLS)
        calls = [one for one in parsed(events) if one[0] == "call"]
        assert [one for one in parsed(events) if one[0] == "text"] == []
        has_end = token_id == END
        assert num_complete >= len(calls) - (not has_end)
        for _, called, arguments in calls if has_end else calls[:-1]:
            check_arguments(called, json.loads(arguments))


def check_arguments(name: str, given: dict[str, Any]) -> None:
    if name == "cancel":
        assert given == {}
        return
    assert given["kind"] in ("taxi", "bus")
    assert given["seats"] in range(1, 5)
    assert set(given) <= set(BOOK["properties"])  # type: ignore[call-overload]
    assert isinstance(given.get("note", ""), str)
    assert given.get("wait") in (None, True, False)
    assert all(isinstance(one["x"], int) for one in given.get("via", []))


def test_required_tool_call_grammar_starts_with_opened_reasoning(mini_dir: Path) -> None:
    tokenizer, formats = with_tokens(mini_dir, ("<think>", "</think>")), OutputFormat("hermes", "qwen3")
    grammar = grammar_of(formats, tokenizer, in_reasoning=True)
    assert allows(tokenizer, grammar, "Hm. {\n</think>\n\n" + WRITTEN["hermes"], "<think>\n")
    assert not allows(tokenizer, grammar, "Hm.", "<think>\n")
    assert not allows(tokenizer, grammar, "Hm.</think>Yes.", "<think>\n")


def test_response_format_grammar_starts_after_reasoning(mini_dir: Path) -> None:
    tokenizer, formats = with_tokens(mini_dir, ("<think>", "</think>")), OutputFormat("hermes", "qwen3")
    form = Grammar.json_object()
    after = answer_grammar(formats, tokenizer, (), grammar=form, in_reasoning=True)
    assert allows(tokenizer, after, 'Hm.</think>{"a": 1}', "<think>\n")
    assert not allows(tokenizer, after, '{"a": 1}', "<think>\n")
    assert answer_grammar(formats, tokenizer, (), grammar=form) is form


def test_optional_strict_tools_leave_the_text_unconstrained(mini_dir: Path) -> None:
    tools = (Tool(name="book", parameters=BOOK, strict=True), TOOLS[1])
    for name in (name for name, one in TOOL_CALL_FORMATS.items() if one.opening):
        formats = OutputFormat(name, REASONING_PARSERS[name])
        tokenizer = with_tokens(mini_dir, formats.tokens(tools))
        grammar = answer_grammar(formats, tokenizer, tools)
        reasoning = REASONING.get(name, "")
        assert allows(tokenizer, grammar, reasoning + "Yes, {.")
        assert allows(tokenizer, grammar, reasoning + "I book. " + WRITTEN[name])
        assert not allows(tokenizer, grammar, WRITTEN[name].replace("taxi", "ship"))
        assert answer_grammar(formats, tokenizer, TOOLS) is None


def test_response_format_grammar_also_allows_tool_calls(mini_dir: Path) -> None:
    tokenizer, formats = with_tokens(mini_dir, ("<tool_call>", "</tool_call>")), OutputFormat("hermes", "none")
    form = Grammar.json_object()
    grammar = answer_grammar(formats, tokenizer, TOOLS, grammar=form)
    assert allows(tokenizer, grammar, WRITTEN["hermes"])
    assert allows(tokenizer, grammar, '{"a": 1}')
    assert not allows(tokenizer, grammar, "Yes.")
    with pytest.raises(RequestError, match="exclude"):
        grammar_of(formats, tokenizer, grammar=form)
    with pytest.raises(RequestError, match="exclude"):
        answer_grammar(formats, tokenizer, TOOLS, grammar=Grammar.regex("a"))


def test_pythonic_tool_call_grammar_uses_python_constants(mini_dir: Path) -> None:
    formats = OutputFormat("pythonic", "none")
    tokenizer = with_tokens(mini_dir, ())
    grammar = grammar_of(formats, tokenizer)
    for constant in ("True", "False", "None"):
        assert allows(tokenizer, grammar, f'[book(kind="bus", seats=1, wait={constant})]')
    assert not allows(tokenizer, grammar, '[book(kind="bus", seats=1, wait=true)]')
    assert allows(tokenizer, grammar, '[book(kind="bus", note="a\\n", seats=1, via=[{"x": 1}]), cancel()]')
