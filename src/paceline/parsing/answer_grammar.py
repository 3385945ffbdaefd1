"""The grammar of an answer whose calls are required, whose arguments must match their schemas, or whose text has a grammar."""

import json
from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import RequestError
from paceline.parsing.registry import TOOL_CALL_FORMATS, OutputFormat
from paceline.parsing.tool_call_grammar import ANYTHING, ToolCallGrammar
from paceline.parsing.tools import Tool, ToolUse
from paceline.sampling.grammars.grammar import Grammar, GrammarKind
from paceline.tokenizer.tokenizer import Tokenizer

_SPACE = "/[ \\n]{0,4}/"


def answer_grammar(
    formats: OutputFormat,
    tokenizer: Tokenizer,
    tools: Sequence[Tool],
    *,
    tool_use: ToolUse = ToolUse.AUTO,
    tool_name: str | None = None,
    several: bool = True,
    grammar: Grammar | None = None,
    in_reasoning: bool = False,
) -> Grammar | None:
    """Return the grammar of an answer; None if it is free.

    Reasoning may come first. If the prompt has begun reasoning, the grammar holds from its end on.

    Args:
        tools: those that the model was shown.
        tool_use: whether calls are required.
        tool_name: the only tool that may be called; None = any.
        several: whether there may be several calls.
        grammar: what the text of the answer must match.
        in_reasoning: whether the prompt has begun reasoning.

    Raises:
        RequestError: a required call and the grammar of the text exclude one another.
    """
    callable_tools = [tool for tool in tools if tool_use is not ToolUse.NONE and tool_name in (None, tool.name)]
    if callable_tools and tool_use is ToolUse.REQUIRED and grammar is not None:
        raise RequestError("a required tool call and a grammar of the text exclude one another: send one of them", parameter="grammar")
    is_free = tool_use is not ToolUse.REQUIRED and not any(tool.strict for tool in callable_tools)
    if not callable_tools or (grammar is None and is_free):
        if grammar is None or not in_reasoning:
            return grammar
        return replace(grammar, reasoning_end=grammar.reasoning_end or formats.reasoning_end)
    chosen = TOOL_CALL_FORMATS[formats.tool_call_parser]
    rules = ToolCallGrammar(tokenizer, formats.tokens(tools))
    calls = chosen.grammar(rules, callable_tools, several=several and tool_name is None)
    if grammar is not None:
        calls = rules.one_of([calls, _text_rule(rules, grammar)])
    elif tool_use is not ToolUse.REQUIRED:
        opening = rules.token_ids.get(chosen.opening)
        if opening is None:  # no token marks the beginning of a call
            return None
        free = rules.rule(f"({ANYTHING} | <[^{opening}]>)*")
        return Grammar.lark(rules.lark(f"{free} ({calls} {free})?"))
    if in_reasoning:
        return Grammar.lark(rules.lark(f"{_SPACE} {calls}"), reasoning_end=formats.reasoning_end)
    return Grammar.lark(rules.lark(f"{_reasoning(rules, formats)}{calls}"))


def _reasoning(rules: ToolCallGrammar, formats: OutputFormat) -> str:
    one = formats.reasoning_format
    if one is None or not one.close:  # harmony's reasoning is part of its calls
        return ""
    return f"({rules.literal(one.open)} {rules.until(one.close)} {_SPACE})? "


def _text_rule(rules: ToolCallGrammar, grammar: Grammar) -> str:
    if grammar.kind not in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT):
        raise RequestError(
            f"tools and a grammar of the kind {grammar.kind.value} exclude one another: send one of them, or a JSON schema",
            parameter="grammar",
        )
    return rules.json(json.loads(grammar.text))
