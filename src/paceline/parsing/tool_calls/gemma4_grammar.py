"""The grammar of a JSON schema in Gemma 4's markup."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.parsing.argument_types import resolve_ref
from paceline.parsing.tool_call_grammar import ToolCallGrammar, arguments_schema
from paceline.parsing.tool_calls.gemma4 import CLOSE, OPEN, QUOTE
from paceline.parsing.tools import Tool

_PLAIN = ("integer", "number", "boolean", "null")
_MAX_DEPTH = 8  # schemas that contain themselves are resolved to this depth


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Return a grammar of calls. Of texts only their `enum` is enforced, of lists no length.

    Properties are in alphabetical order, as the model has learnt them.
    """
    calls = []
    for tool in tools:
        schema = arguments_schema(tool)
        opening = grammar.text(f"{OPEN}call:{tool.name}")
        calls.append(f"{opening} {_Values(grammar, schema).of(schema, 0)} {grammar.text(CLOSE)}")
    return grammar.listed(calls, "", several=several)


class _Values:
    """Rules for the values of one tool."""

    def __init__(self, grammar: ToolCallGrammar, root: Mapping[str, Any]) -> None:
        self._grammar, self._root = grammar, root

    def of(self, schema: Any, depth: int) -> str:
        """Return what matches one value."""
        schema = resolve_ref(schema, self._root) if isinstance(schema, Mapping) else {}
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and values:
            return self._grammar.one_of([self._constant(value) for value in values])
        options = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(options, list) and options:
            return self._grammar.one_of([self.of(option, depth) for option in options])
        types = schema.get("type") or ["string", "number", "boolean", "null"]
        return self._grammar.one_of([self._typed(name, schema, depth) for name in ([types] if isinstance(types, str) else types)])

    def _typed(self, name: str, schema: Mapping[str, Any], depth: int) -> str:
        if name in _PLAIN:  # as in JSON
            return self._grammar.json({**schema, "type": name})
        if name == "array" and depth < _MAX_DEPTH:
            item = self._grammar.rule(self.of(schema.get("items"), depth + 1))
            return self._grammar.rule(f'"[" ({item} ("," {item})*)? "]"')
        if name == "object" and depth < _MAX_DEPTH:
            return self._object(schema, depth)
        return f"{self._grammar.text(QUOTE)} {self._grammar.until(QUOTE)}"

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        """Return a rule of properties in order, built from the last one to the first because each rule names the next one."""
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        first = following = '""'
        for name in sorted(properties, key=str.lower, reverse=True):
            value = self._grammar.rule(f"{self._grammar.text(name + ':')} {self.of(properties[name], depth + 1)}")
            is_required = name in required
            first = self._grammar.rule(f"{value} {following}" + ("" if is_required else f" | {first}"))
            following = self._grammar.rule(f'"," {value} {following}' if is_required else f'("," {value})? {following}')
        return f'"{{" {first} "}}"'

    def _constant(self, value: object) -> str:
        if isinstance(value, str):
            return self._grammar.text(f"{QUOTE}{value}{QUOTE}")
        return self._grammar.text(json.dumps(value))
