"""The grammar of calls in Gemma 4's markup."""

from collections.abc import Sequence

from paceline.parsing.schema_grammar import quoted_object_grammar
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tool_calls.gemma4 import CLOSE, OPEN, QUOTE
from paceline.parsing.tools import Tool


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Return a grammar of calls with properties in alphabetical order, as in the model's training data."""
    heads = [grammar.text(f"{OPEN}call:{tool.name}") for tool in tools]
    values = [quoted_object_grammar(grammar, tool, QUOTE, is_sorted=True) for tool in tools]
    calls = [f"{head} {value} {grammar.text(CLOSE)}" for head, value in zip(heads, values, strict=True)]
    return grammar.listed(calls, "", several=several)
