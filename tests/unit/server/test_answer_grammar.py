"""What an answer is held to: calls as the reader of their format reads them, and nothing else."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Library

from harness.markup_cases import Case, events_of, said
from paceline.errors import RequestError
from paceline.parsing.registry import TOOL_CALL_FORMATS, OutputFormat
from paceline.parsing.tools import Tool, ToolUse
from paceline.sampling.grammar import Grammar
from paceline.sampling.matcher import GrammarCompiler
from paceline.sampling.params import SamplingParams
from paceline.server.chat_request import ChatRequest
from paceline.server.dialogue.answer_grammar import answer_grammar
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
THINKING = {
    "hermes": "think",
    "xml": "think",
    "glm": "think",
    "mistral": "mistral",
    "gemma4": "gemma4",
    "harmony": "harmony",
    "llama3": "none",
    "kimi": "think",
    "minimax": "think",
    "granite3": "none",
}


def request(**fields: Any) -> ChatRequest:
    return ChatRequest(**{"messages": [], "tools": TOOLS, "tool_use": ToolUse.REQUIRED, "params": SamplingParams(), **fields})


def with_tokens(mini: Path, tokens: tuple[str, ...]) -> Tokenizer:
    """The mini's tokenizer, with further special tokens."""
    library = Library.from_file(str(mini / "tokenizer.json"))
    library.add_special_tokens(list(tokens))
    pretrained = SimpleNamespace(backend_tokenizer=library, chat_template=None, special_tokens_map={})
    pretrained.encode = lambda text, **_: library.encode(text, add_special_tokens=False).ids
    return Tokenizer(pretrained)


def allows(tokenizer: Tokenizer, grammar: Grammar | None, text: str, prompt: str = "") -> bool:
    """Whether a grammar takes a text and its end."""
    assert grammar is not None
    matcher = GrammarCompiler(tokenizer, [END]).matcher(grammar, tokenizer.encode(prompt))
    return matcher.is_allowed([*tokenizer.encode(text, add_special_tokens=False), END])


ARGUMENTS = '{"kind": "taxi", "seats": 2}'
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "book", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "xml": "<tool_call>\n<function=book>\n<parameter=kind>\ntaxi\n</parameter>\n<parameter=seats>\n2\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>book\n<arg_key>kind</arg_key>\n<arg_value>taxi</arg_value>\n<arg_key>seats</arg_key>\n<arg_value>2</arg_value>\n"
    "</tool_call>",
    "mistral": f"[TOOL_CALLS]book[ARGS]{ARGUMENTS}",
    "gemma4": '<|tool_call>call:book{kind:<|"|>taxi<|"|>,seats:2}<tool_call|>',
    "harmony": f"<|channel|>commentary to=functions.book <|constrain|>json<|message|>{ARGUMENTS}",
    "llama3": f'{{"name": "book", "parameters": {ARGUMENTS}}}',
    "kimi": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.book:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "minimax": '<minimax:tool_call>\n<invoke name="book">\n<parameter name="kind">taxi</parameter>\n<parameter name="seats">2</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "granite3": f'<|tool_call|>[{{"name": "book", "arguments": {ARGUMENTS}}}]',
}
THOUGHT = {
    "hermes": "<think>\nHm.\n</think>\n\n",
    "xml": "<think>Hm.</think>",
    "glm": "<think>Hm.</think>\n",
    "kimi": "<think>Hm.</think>",
    "minimax": "<think>\nHm.\n</think>\n\n",
    "mistral": "[THINK]Hm.[/THINK]",
    "gemma4": "<|channel>thought\nHm.<channel|>",
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
}


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_required_call_is_written_as_the_model_writes_it(mini_dir: Path, name: str, has_tokens: bool) -> None:
    formats, asked = OutputFormat(name, THINKING[name]), request()
    tokenizer = with_tokens(mini_dir, formats.tokens(asked) if has_tokens else ())
    grammar = answer_grammar(asked, formats, tokenizer, in_reasoning=False)
    call = WRITTEN[name] if has_tokens or name != "mistral" else f'[TOOL_CALLS][{{"name": "book", "arguments": {ARGUMENTS}}}]'
    assert said(events_of(Case("", (name, THINKING[name]), "", []), [call], TOOLS)[0]) == [("call", "book", ARGUMENTS)]
    assert allows(tokenizer, grammar, call)
    assert allows(tokenizer, grammar, THOUGHT.get(name, "") + call)
    assert not allows(tokenizer, grammar, call.replace("taxi", "ship"))
    assert not allows(tokenizer, grammar, call.replace("2", "5"))
    assert not allows(tokenizer, grammar, call.replace("book", "look"))
    assert not allows(tokenizer, grammar, "Yes." + call)
    named = answer_grammar(request(tool_name="cancel"), formats, tokenizer, in_reasoning=False)
    assert not allows(tokenizer, named, call)


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_whatever_the_grammar_allows_is_read_as_calls_that_match_the_schemas(
    mini_dir: Path, name: str, seed: int, large_counts: bool
) -> None:
    """A model of random taste, which likes to come to an end."""
    random = np.random.default_rng(seed)
    formats = OutputFormat(name, "harmony" if name == "harmony" else "none")
    asked = request()
    tokenizer = with_tokens(mini_dir, formats.tokens(asked))
    compiler = GrammarCompiler(tokenizer, [END])
    grammar = answer_grammar(asked, formats, tokenizer, in_reasoning=False)
    assert grammar is not None
    ends = [token_id for text in ('"', "}", "]", ",", "\n", "</", "1") for token_id in tokenizer.encode(text, add_special_tokens=False)]
    shown = [token_id for token in formats.tokens(asked) if (token_id := tokenizer.added_token_id(token)) is not None]
    for _ in range(40 if large_counts else 2):
        matcher, detokenizer, token_id = compiler.matcher(grammar), tokenizer.detokenizer(shown), 0
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
        events, num_complete = events_of(Case("", (name, formats.think), "", []), [detokenizer.text], TOOLS)
        calls = [one for one in said(events) if one[0] == "call"]
        assert [one for one in said(events) if one[0] == "text"] == []
        assert num_complete >= len(calls) - 1
        for _, called, arguments in calls[:num_complete]:
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


def test_thoughts_that_the_prompt_began_come_first(mini_dir: Path) -> None:
    tokenizer, formats = with_tokens(mini_dir, ("<think>", "</think>")), OutputFormat("hermes", "think")
    grammar = answer_grammar(request(), formats, tokenizer, in_reasoning=True)
    assert allows(tokenizer, grammar, "Hm. {\n</think>\n\n" + WRITTEN["hermes"], "<think>\n")
    assert not allows(tokenizer, grammar, "Hm.", "<think>\n")
    assert not allows(tokenizer, grammar, "Hm.</think>Yes.", "<think>\n")


def test_a_form_of_the_text_begins_behind_thoughts(mini_dir: Path) -> None:
    tokenizer, formats = with_tokens(mini_dir, ("<think>", "</think>")), OutputFormat("hermes", "think")
    asked = request(tools=(), tool_use=ToolUse.AUTO, params=SamplingParams(grammar=Grammar.json_object()))
    behind = answer_grammar(asked, formats, tokenizer, in_reasoning=True)
    assert allows(tokenizer, behind, 'Hm.</think>{"a": 1}', "<think>\n")
    assert not allows(tokenizer, behind, '{"a": 1}', "<think>\n")
    assert answer_grammar(asked, formats, tokenizer, in_reasoning=False) is asked.params.grammar


def test_strict_tools_that_may_be_called_leave_the_text_free(mini_dir: Path) -> None:
    tools = (Tool(name="book", parameters=BOOK, strict=True), TOOLS[1])
    for name in ("hermes", "xml", "glm", "mistral", "gemma4", "kimi", "minimax", "granite3"):
        formats, asked = OutputFormat(name, THINKING[name]), request(tools=tools, tool_use=ToolUse.AUTO)
        tokenizer = with_tokens(mini_dir, formats.tokens(asked))
        grammar = answer_grammar(asked, formats, tokenizer, in_reasoning=False)
        thought = THOUGHT.get(name, "")
        assert allows(tokenizer, grammar, thought + "Yes, {.")
        assert allows(tokenizer, grammar, thought + "I book. " + WRITTEN[name])
        assert not allows(tokenizer, grammar, WRITTEN[name].replace("taxi", "ship"))
        assert answer_grammar(request(tool_use=ToolUse.AUTO), formats, tokenizer, in_reasoning=False) is None


def test_a_form_of_the_text_leaves_calls_possible(mini_dir: Path) -> None:
    tokenizer, formats = with_tokens(mini_dir, ("<tool_call>", "</tool_call>")), OutputFormat("hermes", "none")
    form = SamplingParams(grammar=Grammar.json_object())
    grammar = answer_grammar(request(tool_use=ToolUse.AUTO, params=form), formats, tokenizer, in_reasoning=False)
    assert allows(tokenizer, grammar, WRITTEN["hermes"])
    assert allows(tokenizer, grammar, '{"a": 1}')
    assert not allows(tokenizer, grammar, "Yes.")
    with pytest.raises(RequestError, match="exclude"):
        answer_grammar(request(params=form), formats, tokenizer, in_reasoning=False)
    with pytest.raises(RequestError, match="exclude"):
        answer_grammar(
            request(tool_use=ToolUse.AUTO, params=SamplingParams(grammar=Grammar.regex("a"))), formats, tokenizer, in_reasoning=False
        )
