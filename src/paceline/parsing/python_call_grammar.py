"""What a call written as Python may be under a JSON schema."""

import json
from collections.abc import Mapping
from typing import Any

from paceline.parsing.argument_types import parameter_schema, resolve_ref
from paceline.parsing.tool_call_grammar import ToolCallGrammar, arguments_schema
from paceline.parsing.tools import Tool

_CONSTANTS = {"boolean": '("True" | "False")', "null": '"None"'}


def python_call_grammar(grammar: ToolCallGrammar, tool: Tool) -> str:
    """Return a grammar of f(a="x", n=3), with arguments in the schema's order.

    Texts, numbers, lists and objects are as in JSON; alone, true, false and null are as in Python.
    """
    root = arguments_schema(tool)
    required = root.get("required") or ()
    first = following = '""'
    for name in reversed(list(root.get("properties") or ())):
        value = grammar.rule(f"{grammar.text(f'{name}=')} {_value(grammar, parameter_schema(root, name) or {}, root)}")
        is_required = name in required
        first = grammar.rule(f"{value} {following}" + ("" if is_required else f" | {first}"))
        following = grammar.rule(f'", " {value} {following}' if is_required else f'(", " {value})? {following}')
    return f'{grammar.text(f"{tool.name}(")} {first} ")"'


def _value(grammar: ToolCallGrammar, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    schema = resolve_ref(schema, root)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return grammar.one_of([_constant(grammar, value) for value in values])
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list) and options:
        return grammar.one_of([_value(grammar, option if isinstance(option, Mapping) else {}, root) for option in options])
    types = schema.get("type") or ["string", "number", "boolean", "null"]
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    typed = [
        _CONSTANTS.get(name) or grammar.json({**definitions, **schema, "type": name})
        for name in ([types] if isinstance(types, str) else types)
    ]
    return grammar.one_of(typed)


def _constant(grammar: ToolCallGrammar, value: object) -> str:
    if value is None or isinstance(value, bool):
        return grammar.text(str(value))
    return grammar.text(json.dumps(value, ensure_ascii=False))
