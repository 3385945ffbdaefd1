"""Enforces `uniqueItems` while a JSON array is generated: finds repeated items.

A grammar cannot express that two items differ, so the text is parsed byte by byte. The items of an array must differ if any schema that
may apply to the array has the keyword. Under `anyOf`, this can refuse a repetition that another branch allows.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from paceline.sampling.json_schema import refusal
from paceline.sampling.schema_document import Schema, SchemaDocument, canonical

ENDS_STRING = b'"'
ENDS_ITEM = b'",]} \t\n\r0tfn'
"""A token that ends an item, or begins `0`, `true`, `false` or `null` (the first byte decides the item), contains one of these."""

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_SCALAR_ENDS = frozenset(b",]} \t\n\r")
_SPACES = frozenset(b" \t\n\r")
_WORDS = {b"t": "true", b"f": "false", b"n": "null"}
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_OPEN_LIST, _CLOSE_LIST, _OPEN_OBJECT, _CLOSE_OBJECT = b"[]{}"

Schemas = tuple[Schema, ...]


class _Mode(Enum):
    VALUE = 1  # a value may begin
    KEY = 2  # a name of a property may begin
    IN_STRING = 3
    IN_ESCAPE = 4
    IN_SCALAR = 5  # a number or a word
    AFTER = 6  # after a value or a name


@dataclass(frozen=True, slots=True)
class _Container:
    """State of an unfinished array or object. `items`: canonical forms of an array's items; None if they may repeat."""

    schemas: Schemas
    is_array: bool
    index: int = 0
    key: str | None = None
    item_start: int = 0
    items: frozenset[str] | None = None
    literals: tuple[str, ...] = ()  # JSON of all items that there can be; empty = not listed


class UniqueItemsSchema:
    """Finds the schemas that apply to each array of a value.

    Raises:
        RequestError: a reference cannot be resolved. Methods raise it as well, while a value is generated.
    """

    def __init__(self, schema: Schema) -> None:
        self._document = SchemaDocument(schema)
        self.root = self._closure([schema])
        self._children: dict[tuple[tuple[int, ...], str | int], Schemas] = {}

    def child(self, schemas: Schemas, place: str | int) -> Schemas:
        """Return the schemas that may apply to a property or an item of a value to which `schemas` may apply."""
        key = (tuple(map(id, schemas)), place)
        if key not in self._children:
            parts = [part for schema in schemas for part in _parts(schema, place)]
            self._children[key] = self._closure(parts)
        return self._children[key]

    def listed_items(self, schemas: Schemas) -> tuple[str, ...]:
        """Return the JSON of all items that arrays of `schemas` may have; empty if one of the schemas does not list its items."""
        parts = [part for schema in schemas for part in _item_schemas(schema, 0) if part is not None]
        listed = [self._document.literals(part) for part in parts]
        if None in listed:
            return ()
        return tuple(json.dumps(value, ensure_ascii=False) for values in listed if values for value in values)

    def _closure(self, schemas: Iterable[Any]) -> Schemas:
        """Return `schemas` with all schemas that they apply to the same value, such as those of `allOf` and `$ref`."""
        pending, found = list(schemas), dict[int, Schema]()
        while pending:
            schema = pending.pop()
            if not isinstance(schema, dict) or id(schema) in found:
                continue
            found[id(schema)] = schema
            for name in _REFERENCES:
                if name in schema:
                    target = self._document.target(schema[name])
                    if target is None:
                        raise refusal("uniqueItems", f"a schema with {name!r}")
                    pending.append(target)
            for name in ("allOf", "anyOf", "oneOf"):
                pending += schema[name] if isinstance(schema.get(name), list) else []
            for name in ("dependentSchemas", "dependencies"):
                pending += schema[name].values() if isinstance(schema.get(name), dict) else []
            pending += [schema.get("then"), schema.get("else")]
        return tuple(found.values())


def unique_items(schema: Schema) -> UniqueItemsSchema | None:
    """Return what `UniqueItemsState` needs to enforce `uniqueItems`; None if the schema does not use the keyword."""
    pending: list[Any] = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if node.get("uniqueItems") is True and node.get("maxItems") not in (0, 1):
                return UniqueItemsSchema(schema)
            pending += node.values()
        elif isinstance(node, list):
            pending += node
    return None


class UniqueItemsState:
    """Parses JSON as it is generated. It assumes valid JSON, which the grammar enforces.

    Attributes:
        has_duplicate: whether an item of an array that `uniqueItems` applies to repeats an earlier one, or can only become one that does.
    """

    def __init__(self, schema: UniqueItemsSchema) -> None:
        self._schema = schema
        self._text = b""
        self._open: tuple[_Container, ...] = ()
        self._mode = _Mode.VALUE
        self._string_start = 0
        self._is_key = False
        self.has_duplicate = False

    @property
    def ending_bytes(self) -> bytes | None:
        """A token can repeat an earlier item only if it contains one of these bytes. Empty: any token can; None: none can."""
        if not any(container.items is not None for container in self._open):
            return None
        if self._open[-1].literals:
            return b""
        return ENDS_STRING if self._mode in (_Mode.IN_STRING, _Mode.IN_ESCAPE) else ENDS_ITEM

    def copy(self) -> "UniqueItemsState":
        other = UniqueItemsState.__new__(UniqueItemsState)
        other.__dict__.update(self.__dict__)
        return other

    def feed(self, text: bytes) -> None:
        """Parse the next bytes."""
        start = len(self._text)
        self._text += text
        for position, byte in enumerate(text, start):
            self._step(position, byte)
        if self._open and not self.has_duplicate:
            self.has_duplicate = self._is_dead_end()

    def _step(self, position: int, byte: int) -> None:
        if self._mode is _Mode.IN_ESCAPE:
            self._mode = _Mode.IN_STRING
        elif self._mode is _Mode.IN_STRING:
            if byte == _BACKSLASH:
                self._mode = _Mode.IN_ESCAPE
            elif byte == _QUOTE:
                self._end_string(position + 1)
        else:
            if self._mode is _Mode.IN_SCALAR:
                if byte not in _SCALAR_ENDS:
                    return
                self._end_value(position)
            if byte not in _SPACES:
                self._begin(position, byte)

    def _begin(self, position: int, byte: int) -> None:
        """Parse a byte outside of strings, numbers and words."""
        if byte == _COMMA:
            self._next_place()
        elif byte == _COLON:
            self._mode = _Mode.VALUE
        elif byte in (_CLOSE_LIST, _CLOSE_OBJECT):
            self._open = self._open[:-1]
            self._end_value(position + 1)
        elif self._mode is _Mode.KEY:
            self._string_start, self._is_key, self._mode = position, True, _Mode.IN_STRING
        else:
            self._begin_value(position, byte)

    def _begin_value(self, position: int, byte: int) -> None:
        if self._open and self._open[-1].is_array:
            self._replace_top(item_start=position)
        if byte in (_OPEN_LIST, _OPEN_OBJECT):
            schemas = self._inner_schemas()
            self._open = (*self._open, self._container(schemas, is_array=byte == _OPEN_LIST))
            self._mode = _Mode.VALUE if byte == _OPEN_LIST else _Mode.KEY
        elif byte == _QUOTE:
            self._string_start, self._is_key, self._mode = position, False, _Mode.IN_STRING
        else:
            self._mode = _Mode.IN_SCALAR

    def _inner_schemas(self) -> Schemas:
        """Return the schemas of the value that begins."""
        if not self._open:
            return self._schema.root
        top = self._open[-1]
        place = top.index if top.is_array else top.key
        return () if place is None else self._schema.child(top.schemas, place)

    def _container(self, schemas: Schemas, *, is_array: bool) -> _Container:
        if not is_array or not any(schema.get("uniqueItems") is True for schema in schemas):
            return _Container(schemas, is_array)
        return _Container(schemas, is_array, items=frozenset(), literals=self._schema.listed_items(schemas))

    def _end_string(self, end: int) -> None:
        if self._is_key:
            self._replace_top(key=str(json.loads(self._text[self._string_start : end])))
            self._mode = _Mode.AFTER
        else:
            self._end_value(end)

    def _end_value(self, end: int) -> None:
        self._mode = _Mode.AFTER
        top = self._open[-1] if self._open else None
        if top is None or top.items is None:
            return
        item = canonical(json.loads(self._text[top.item_start : end]))
        self.has_duplicate |= item in top.items
        self._replace_top(items=top.items | {item})

    def _next_place(self) -> None:
        if self._open[-1].is_array:
            self._replace_top(index=self._open[-1].index + 1)
            self._mode = _Mode.VALUE
        else:
            self._mode = _Mode.KEY

    def _replace_top(self, **changes: Any) -> None:
        self._open = (*self._open[:-1], replace(self._open[-1], **changes))

    def _is_dead_end(self) -> bool:
        """Return whether the unfinished item can only become an earlier item. Checks listed values, words and zeros."""
        top = self._open[-1]
        if not top.items or self._mode is _Mode.AFTER:
            return False
        if not top.literals:
            return self._mode is _Mode.IN_SCALAR and self._is_repeated_scalar(top, self._text[top.item_start :])
        begun = b"" if self._mode is _Mode.VALUE else self._text[top.item_start :]
        return not any(one.encode().startswith(begun) and canonical(json.loads(one)) not in top.items for one in top.literals)

    def _is_repeated_scalar(self, top: _Container, begun: bytes) -> bool:
        """Return whether a number or word can only become an earlier item. No digit may follow the zero of an integer."""
        assert top.items is not None
        if begun[:1] in _WORDS:
            return _WORDS[begun[:1]] in top.items
        if begun not in (b"0", b"-0") or "0" not in top.items:
            return False
        types = [schema["type"] for schema in self._schema.child(top.schemas, top.index) if "type" in schema]
        return bool(types) and not any("number" in ([one] if isinstance(one, str) else one) for one in types)


def _parts(schema: Schema, place: str | int) -> list[Any]:
    return _property_schemas(schema, place) if isinstance(place, str) else _item_schemas(schema, place)


def _property_schemas(schema: Schema, name: str) -> list[Any]:
    """Return the schemas that may apply to a property, including those of all patterns.

    Patterns are not matched with the name, because a client's regular expression may take too long.
    """
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        parts = [properties[name]]
    else:
        parts = [schema.get("additionalProperties"), schema.get("unevaluatedProperties")]
    patterns = schema.get("patternProperties")
    return [*parts, *(patterns.values() if isinstance(patterns, dict) else ())]


def _item_schemas(schema: Schema, index: int) -> list[Any]:
    for name in ("prefixItems", "items"):
        listed = schema.get(name)
        if isinstance(listed, list) and index < len(listed):
            return [listed[index]]
    return [schema.get("items"), schema.get("additionalItems"), schema.get("unevaluatedItems")]
