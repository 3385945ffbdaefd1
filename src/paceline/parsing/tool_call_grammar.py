"""Builds a grammar for answers that call tools, in llguidance's dialect of Lark.

Added tokens of a tokenizer are referenced by id. Spelled out in other tokens they would give the same text, but not the token sequence
that the model was trained on.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paceline.parsing.argument_types import enum_values, is_text, parameter_schema, resolve_ref
from paceline.parsing.tools import Tool
from paceline.sampling.grammars.compiled_grammar import JSON_WHITESPACE
from paceline.sampling.grammars.json_schema import enforceable_schema
from paceline.tokenizer.tokenizer import Tokenizer

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
ANYTHING = "/(?s:.*)/"
_PYTHON_TYPES = {"boolean": '("True" | "False")', "null": '"None"'}
_JSON_TYPES = ("integer", "number", "boolean", "null")
_MAX_DEPTH = 8  # schemas that contain themselves are followed to this depth


class ToolCallGrammar:
    """Collects the rules of one grammar.

    Args:
        tokens: texts that are tokens of their own, where the tokenizer has them.

    Attributes:
        token_ids: the ids of those that it has.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
        ids = {token: tokenizer.added_token_id(token) for token in tokens}
        self.token_ids = {token: token_id for token, token_id in ids.items() if token_id is not None}
        self._pattern = re.compile("|".join(map(re.escape, sorted(self.token_ids, key=len, reverse=True))) or "(?!)")
        self._rules: list[str] = []

    def rule(self, body: str, *, suffix: str | None = None) -> str:
        """Add a rule; returns its name.

        Args:
            suffix: a text that ends what the rule matches, where it comes first.
        """
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{'' if suffix is None else f'[suffix={_quoted(suffix)}]'}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Return a grammar of exactly `text`."""
        parts, at = [], 0
        for found in self._pattern.finditer(text):
            parts += [_quoted(text[at : found.start()])] if found.start() > at else []
            parts.append(f"<[{self.token_ids[found[0]]}]>")
            at = found.end()
        if at < len(text) or not parts:
            parts.append(_quoted(text[at:]))
        return " ".join(parts)

    def until(self, end: str) -> str:
        """Return a grammar of any text without `end`, followed by `end`."""
        begins_with_token = any(end.startswith(token) for token in self.token_ids)
        return f"{ANYTHING} {self.literal(end)}" if begins_with_token else self.rule(ANYTHING, suffix=end)

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return a grammar of JSON on one line that matches a schema."""
        return self.rule(f"%json {json.dumps({'x-guidance': JSON_WHITESPACE, **enforceable_schema(schema)})}")

    def call(self, head: str, tool: Tool, tail: str = "") -> str:
        """Return a grammar of the JSON object of a tool's arguments between two texts."""
        parts = [self.literal(head), self.json(arguments_schema(tool)), *([self.literal(tail)] if tail else [])]
        return " ".join(parts)

    def one_of(self, bodies: Sequence[str]) -> str:
        """Return a grammar of any one of `bodies`."""
        return bodies[0] if len(bodies) == 1 else self.rule(" | ".join(bodies))

    def listed(self, bodies: Sequence[str], between: str, *, several: bool) -> str:
        """Return a grammar of one of `bodies`, or of several with `between` in between."""
        one = self.rule(" | ".join(bodies))
        if not several:
            return one
        return self.rule(f"{one} ({self.literal(between)} {one})*" if between else f"{one}+")

    def lark(self, start: str) -> str:
        """Return the text of the grammar that begins with `start`."""
        return "\n".join([f"start: {start}", *self._rules])


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which forbids properties that it does not name unless it allows them explicitly."""
    parameters = _NO_ARGUMENTS if tool.parameters is None else tool.parameters
    closed: dict[str, Any] = _forbid_extra_properties({"type": "object", **parameters})
    return closed


def _forbid_extra_properties(schema: Any) -> Any:
    """Return a schema whose objects allow only the properties that it names, unless it has `patternProperties` or `allOf`."""
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(name), Mapping):
            closed[name] = {key: _forbid_extra_properties(value) for key, value in schema[name].items()}
    if "items" in schema:
        closed["items"] = _forbid_extra_properties(schema["items"])
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            closed[name] = [_forbid_extra_properties(option) for option in schema[name]]
    if "properties" in schema and not {"patternProperties", "allOf"} & schema.keys():
        closed.setdefault("additionalProperties", False)
    return closed


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


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
