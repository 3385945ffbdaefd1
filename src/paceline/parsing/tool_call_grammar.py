"""Builds a grammar for answers that call tools, in llguidance's dialect of Lark.

Added tokens of a tokenizer are referenced by id. Spelled out in other tokens they would give the same text, but not the token sequence
that the model was trained on.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.parsing.tools import Tool
from paceline.sampling.grammars.json_schema import enforceable_schema
from paceline.tokenizer.tokenizer import Tokenizer

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
ANYTHING = "/(?s:.*)/"


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
        return self.rule(f"%json {json.dumps({'x-guidance': ONE_LINE, **enforceable_schema(schema)})}")

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
