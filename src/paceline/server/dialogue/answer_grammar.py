"""What an answer is held to when calls are required, when their arguments are, or when its text is."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import RequestError
from paceline.parsing.registry import HARMONY, NONE, REASONING_FORMATS, TOOL_CALL_FORMATS, OutputFormat
from paceline.parsing.tool_call_grammar import ANYTHING, ToolCallGrammar
from paceline.parsing.tools import Tool, ToolUse
from paceline.sampling.grammar import Grammar, GrammarKind
from paceline.server.chat_request import ChatRequest
from paceline.tokenizer.tokenizer import Tokenizer

_SPACE = "/[ \\n]{0,4}/"


def answer_grammar(request: ChatRequest, formats: OutputFormat, tokenizer: Tokenizer, *, in_reasoning: bool) -> Grammar | None:
    """The grammar of an answer; None where it is free.

    Thoughts come first, if the model likes; where the prompt has begun them the grammar holds from their end on.

    Args:
        in_reasoning: whether the prompt has begun thoughts.

    Raises:
        RequestError: two things that were asked for exclude one another.
    """
    given, tools = request.params.grammar, _callable_tools(request)
    if tools and request.tool_use is ToolUse.REQUIRED and given is not None:
        raise RequestError("a form of the text and a required call exclude one another: send one of them", parameter="grammar")
    if not tools or (given is None and request.tool_use is ToolUse.AUTO and not any(tool.strict for tool in tools)):
        return given if given is None or not in_reasoning else replace(given, reasoning_end=given.reasoning_end or formats.think_end)
    chosen = TOOL_CALL_FORMATS[formats.tools]
    grammar = ToolCallGrammar(tokenizer, formats.tokens(request.offered_tools))
    calls = chosen.grammar(grammar, tools, several=request.parallel_tool_calls and request.tool_name is None)
    if given is not None:
        calls = grammar.one_of([calls, _text_rule(grammar, given)])
    elif request.tool_use is ToolUse.AUTO:
        opening = grammar.token_id(chosen.opening)
        if opening is None:  # nothing says where a call begins
            return None
        free = grammar.rule(f"({ANYTHING} | <[^{opening}]>)*")
        return Grammar.lark(grammar.lark(f"{free} ({calls} {free})?"))
    if in_reasoning:
        return Grammar.lark(grammar.lark(f"{_SPACE} {calls}"), reasoning_end=formats.think_end)
    return Grammar.lark(grammar.lark(f"{_thoughts(grammar, formats)}{calls}"))


def _callable_tools(request: ChatRequest) -> Sequence[Tool]:
    return [tool for tool in request.offered_tools if request.tool_name in (None, tool.name)]


def _thoughts(grammar: ToolCallGrammar, formats: OutputFormat) -> str:
    if formats.think in (NONE, HARMONY):  # harmony's are part of its calls
        return ""
    think = REASONING_FORMATS[formats.think]
    return f"({grammar.text(think.open)} {grammar.until(think.close)} {_SPACE})? "


def _text_rule(grammar: ToolCallGrammar, given: Grammar) -> str:
    if given.kind not in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT):
        raise RequestError(f"a grammar of the kind {given.kind.value} and tools exclude one another: send one of them", parameter="grammar")
    return grammar.json_text(given.text)
