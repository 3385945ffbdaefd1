"""Builds a grammar for answers that call tools, in llguidance's dialect of Lark.

Tokens that a tokenizer was given besides its vocabulary are named by their ids: spelled out in other tokens they would be the same text,
but not what the model has learnt.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.parsing.tools import Tool
from paceline.sampling.json_schema import servable_schema
from paceline.tokenizer.tokenizer import Tokenizer

_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
ANYTHING = "/(?s:.*)/"


class ToolCallGrammar:
    """Rules of one grammar.

    Args:
        tokens: texts that are tokens of their own, where the tokenizer has them.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
        ids = {token: tokenizer.added_token_id(token) for token in tokens}
        self._ids = {token: token_id for token, token_id in ids.items() if token_id is not None}
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._ids, key=len, reverse=True))) or "(?!)")
        self._rules: list[str] = []

    def rule(self, body: str, *, suffix: str | None = None) -> str:
        """Add a rule; returns its name.

        Args:
            suffix: a text that ends what the rule matches, where it comes first.
        """
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{'' if suffix is None else f'[suffix={_quoted(suffix)}]'}: {body}")
        return name

    def text(self, written: str) -> str:
        """Return what matches exactly this text."""
        parts, at = [], 0
        for found in self._pattern.finditer(written):
            parts += [_quoted(written[at : found.start()])] if found.start() > at else []
            parts.append(f"<[{self._ids[found[0]]}]>")
            at = found.end()
        if at < len(written) or not parts:
            parts.append(_quoted(written[at:]))
        return " ".join(parts)

    def until(self, end: str) -> str:
        """Return what matches any text without `end`, and then `end`."""
        begins_with_token = any(end.startswith(token) for token in self._ids)
        return f"{ANYTHING} {self.text(end)}" if begins_with_token else self.rule(ANYTHING, suffix=end)

    def token_id(self, token: str) -> int | None:
        """Return the id of one of `tokens`; None if the tokenizer has none."""
        return self._ids.get(token)

    def has(self, token: str) -> bool:
        """Return whether the tokenizer has a token of its own for a text."""
        return token in self._ids

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return what matches JSON of a schema on one line."""
        return self.rule(f"%json {json.dumps({'x-guidance': _ONE_LINE, **servable_schema(schema)})}")

    def json_text(self, schema: str) -> str:
        """Return what matches JSON of a schema that is given as text."""
        return self.json(json.loads(schema))

    def call(self, head: str, tool: Tool, tail: str = "") -> str:
        """Return what matches the JSON object of a tool's arguments between two texts."""
        parts = [self.text(head), self.json(arguments_schema(tool)), *([self.text(tail)] if tail else [])]
        return " ".join(parts)

    def one_of(self, bodies: Sequence[str]) -> str:
        """Return what matches any of these."""
        return bodies[0] if len(bodies) == 1 else self.rule(" | ".join(bodies))

    def listed(self, bodies: Sequence[str], between: str, *, several: bool) -> str:
        """Return what matches one of these, or several with `between` in between."""
        one = self.rule(" | ".join(bodies))
        if not several:
            return one
        return self.rule(f"{one} ({self.text(between)} {one})*" if between else f"{one}+")

    def lark(self, start: str) -> str:
        """Return the text of the grammar that begins with `start`."""
        return "\n".join([f"start: {start}", *self._rules])


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments. Properties that an object does not name are not allowed unless the schema allows them."""
    closed: dict[str, Any] = _closed({"type": "object", **(_NO_ARGUMENTS if tool.parameters is None else tool.parameters)})
    return closed


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(name), Mapping):
            closed[name] = {key: _closed(value) for key, value in schema[name].items()}
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            closed[name] = [_closed(option) for option in schema[name]]
    if "properties" in schema and not {"patternProperties", "allOf"} & schema.keys():
        closed.setdefault("additionalProperties", False)
    return closed


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
