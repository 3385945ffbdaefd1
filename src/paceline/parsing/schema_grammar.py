"""Builds grammars of arguments that are not JSON: values between tags, Python literals, and strings between a format's own quotes."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paceline.parsing.argument_types import enum_values, is_text, parameter_schema, resolve_ref
from paceline.parsing.tool_call_grammar import ToolCallGrammar, arguments_schema
from paceline.parsing.tools import Tool

_PYTHON_TYPES = {"boolean": '("True" | "False")', "null": '"None"'}
_JSON_TYPES = ("integer", "number", "boolean", "null")
_MAX_DEPTH = 8  # schemas that contain themselves are followed to this depth


def value_grammar(grammar: ToolCallGrammar, root: Mapping[str, Any], schema: Mapping[str, Any], end: str) -> str:
    """Return a grammar of a value and `end`. Of a string's keywords only `enum` is enforced.

    Args:
        root: the schema within which references are resolved.
    """
    if not is_text(schema):
        return f"{grammar.json({**_definitions(root), **schema})} {grammar.literal(end)}"
    if values := enum_values(schema):
        return f"{grammar.one_of([grammar.literal(str(value)) for value in values])} {grammar.literal(end)}"
    return grammar.until(end)


def parameters_grammar(
    grammar: ToolCallGrammar, tool: Tool, opening: Callable[[str, Mapping[str, Any]], str], end: str, after: str = ""
) -> str:
    """Return a grammar of a tool's arguments between tags, in the schema's order.

    Args:
        opening: returns a grammar of what precedes a value, from its name and schema.
        end: the text after a value.
        after: a grammar of what may follow `end`.
    """
    root = arguments_schema(tool)
    required, parts = root.get("required") or (), []
    for name in root.get("properties") or ():
        schema = parameter_schema(root, name) or {}
        one = grammar.rule(f"{opening(name, schema)} {value_grammar(grammar, root, schema, end)} {after}")
        parts.append(one if name in required else f"{one}?")
    return " ".join(parts)


def python_call_grammar(grammar: ToolCallGrammar, tool: Tool) -> str:
    """Return a grammar of f(a="x", n=3), with arguments in the schema's order.

    Strings, numbers, lists and objects are as in JSON; true, false and null as arguments are as in Python.
    """
    root = arguments_schema(tool)
    values = _Values(grammar, root, None)
    pairs = [(name, values.of(parameter_schema(root, name), 0)) for name in root.get("properties") or ()]
    return f'{grammar.literal(f"{tool.name}(")} {_chain(grammar, pairs, root, "=", ", ")} ")"'


def quoted_object_grammar(grammar: ToolCallGrammar, tool: Tool, quote: str, *, is_sorted: bool = False) -> str:
    """Return a grammar of {a:"x",n:3}, in which keys have no quotes and strings are between two of `quote`.

    Of a string's keywords only `enum` is enforced. The length of lists is not enforced.

    Args:
        is_sorted: whether properties are in alphabetical order; otherwise they are in the schema's.
    """
    root = arguments_schema(tool)
    return _Values(grammar, root, quote, is_sorted=is_sorted).of(root, 0)


class _Values:
    """Builds rules for values.

    Args:
        root: the schema within which references are resolved.
        quote: the mark around strings; None = values are Python's literals.
    """

    def __init__(self, grammar: ToolCallGrammar, root: Mapping[str, Any], quote: str | None, *, is_sorted: bool = False) -> None:
        self._grammar, self._root, self._quote, self._is_sorted = grammar, root, quote, is_sorted

    def of(self, schema: Any, depth: int) -> str:
        """Return a grammar of one value that matches `schema`."""
        schema = resolve_ref(schema, self._root) if isinstance(schema, Mapping) else {}
        if values := enum_values(schema):
            return self._grammar.one_of([self._grammar.literal(self._constant(value)) for value in values])
        options = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(options, list) and options:
            return self._grammar.one_of([self.of(option, depth) for option in options])
        types = schema.get("type") or ["string", "number", "boolean", "null"]
        return self._grammar.one_of([self._typed(name, schema, depth) for name in ([types] if isinstance(types, str) else types)])

    def _constant(self, value: object) -> str:
        if self._quote is None and (value is None or isinstance(value, bool)):
            return str(value)
        if self._quote is not None and isinstance(value, str):
            return f"{self._quote}{value}{self._quote}"
        return json.dumps(value, ensure_ascii=False)

    def _typed(self, name: str, schema: Mapping[str, Any], depth: int) -> str:
        grammar = self._grammar
        if self._quote is None or name in _JSON_TYPES:
            python = _PYTHON_TYPES.get(name) if self._quote is None else None
            return python or grammar.json({**_definitions(self._root), **schema, "type": name})
        if name == "array" and depth < _MAX_DEPTH:
            item = grammar.rule(self.of(schema.get("items"), depth + 1))
            return grammar.rule(f'"[" ({item} ("," {item})*)? "]"')
        if name == "object" and depth < _MAX_DEPTH:
            properties = schema.get("properties") or {}
            names = sorted(properties, key=str.lower) if self._is_sorted else properties
            pairs = [(key, self.of(properties[key], depth + 1)) for key in names]
            return f'"{{" {_chain(grammar, pairs, schema, ":", ",")} "}}"'
        return f"{grammar.literal(self._quote)} {grammar.until(self._quote)}"


def _chain(grammar: ToolCallGrammar, pairs: Iterable[tuple[str, str]], schema: Mapping[str, Any], assign: str, between: str) -> str:
    """Return a grammar of names with their values in order.

    It is built from the last pair to the first because each rule names the next one.
    """
    required = schema.get("required") or ()
    first = following = '""'
    separator = grammar.literal(between)
    for name, rule in reversed(list(pairs)):
        value = grammar.rule(f"{grammar.literal(name + assign)} {rule}")
        first = grammar.rule(f"{value} {following}" + ("" if name in required else f" | {first}"))
        following = grammar.rule(f"{separator} {value} {following}" if name in required else f"({separator} {value})? {following}")
    return first


def _definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    return {name: root[name] for name in ("$defs", "definitions") if name in root}
