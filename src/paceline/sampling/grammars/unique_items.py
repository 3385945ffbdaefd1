"""Enforces `uniqueItems` while a JSON array is generated: finds items that repeat an earlier item.

A grammar cannot express that two items differ, so the output is parsed byte by byte. The items of an array must differ if any schema
that may apply to the array has the keyword. With `anyOf`, this can forbid a repetition that another branch allows.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from paceline.sampling.grammars.json_schema import unenforceable_error
from paceline.sampling.grammars.schema_document import Schema, SchemaDocument, canonical_json, objects_of

STRING_END_BYTES = b'"'
ITEM_END_BYTES = b'",]} \t\n\r0tfn'
"""A token that ends an item contains one of these bytes. So does the first token of `0`, `true`, `false` and `null`, whose first byte
determines the whole item."""

_REFERENCE_KEYWORDS = ("$ref", "$dynamicRef", "$recursiveRef")
_SCALAR_END_BYTES = frozenset(b",]} \t\n\r")
_WHITESPACE_BYTES = frozenset(b" \t\n\r")
_LITERAL_BY_FIRST_BYTE = {b"t": "true", b"f": "false", b"n": "null"}
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_OPEN_LIST, _CLOSE_LIST, _OPEN_OBJECT, _CLOSE_OBJECT = b"[]{}"

Schemas = tuple[Schema, ...]


class _ParserState(Enum):
    BEFORE_VALUE = 1
    BEFORE_KEY = 2
    IN_STRING = 3
    IN_ESCAPE = 4
    IN_SCALAR = 5  # a number, true, false or null
    AFTER_VALUE = 6  # also after a key


@dataclass(frozen=True, slots=True)
class _ArrayOrObject:
    schemas: Schemas  # schemas that may apply to the array or object
    is_array: bool
    index: int = 0  # index of an array's current item
    key: str | None = None  # key of an object's current property
    item_start: int = 0  # where the current item of an array begins in the text
    items: frozenset[str] | None = None  # canonical JSON of an array's finished items; None if items may repeat
    item_literals: tuple[str, ...] = ()  # JSON of every item that the schemas allow in an array; empty if they do not list the items


class UniqueItemsSchema:
    """Finds the schemas that may apply to each array of a JSON value.

    Raises:
        RequestError: by the constructor and by methods, if a reference cannot be resolved.
    """

    def __init__(self, schema: Schema) -> None:
        self._document = SchemaDocument(schema)
        self._root = self._same_value_schemas([schema])
        self._children: dict[tuple[tuple[int, ...], str | int], Schemas] = {}

    def open_array_or_object(self, parent: _ArrayOrObject | None, *, is_array: bool) -> _ArrayOrObject:
        """Return a new array or object. It is the current item or property of `parent`; if `parent` is None, the whole value."""
        schemas = self._root
        if parent is not None:
            key_or_index = parent.index if parent.is_array else parent.key
            schemas = () if key_or_index is None else self.child_schemas(parent.schemas, key_or_index)
        if not is_array or not any(schema.get("uniqueItems") is True for schema in schemas):
            return _ArrayOrObject(schemas, is_array)
        return _ArrayOrObject(schemas, is_array, items=frozenset(), item_literals=self._item_literals(schemas))

    def child_schemas(self, schemas: Schemas, key_or_index: str | int) -> Schemas:
        """Return the schemas that may apply to a property (by key) or an item (by index) of a value to which `schemas` apply."""
        key = (tuple(map(id, schemas)), key_or_index)
        if key not in self._children:
            self._children[key] = self._same_value_schemas(child for schema in schemas for child in _child_schemas(schema, key_or_index))
        return self._children[key]

    def _item_literals(self, schemas: Schemas) -> tuple[str, ...]:
        parts = [part for schema in schemas for part in _item_schemas(schema, 0) if part is not None]
        literals = [self._document.literals(part) for part in parts]
        if None in literals:
            return ()
        return tuple(json.dumps(value, ensure_ascii=False) for values in literals if values for value in values)

    def _same_value_schemas(self, schemas: Iterable[Any]) -> Schemas:
        """Return `schemas` and all schemas in them that may apply to the same value, such as those of `allOf` and `$ref`."""
        pending, schemas_by_id = list(schemas), dict[int, Schema]()
        while pending:
            schema = pending.pop()
            if not isinstance(schema, dict) or id(schema) in schemas_by_id:
                continue
            schemas_by_id[id(schema)] = schema
            for name in _REFERENCE_KEYWORDS:
                if name in schema:
                    target = self._document.resolve(schema[name])
                    if target is None:
                        raise unenforceable_error("uniqueItems", f"a schema with {name!r}")
                    pending.append(target)
            for name in ("allOf", "anyOf", "oneOf"):
                pending += schema[name] if isinstance(schema.get(name), list) else []
            for name in ("dependentSchemas", "dependencies"):
                pending += schema[name].values() if isinstance(schema.get(name), dict) else []
            pending += [schema.get("then"), schema.get("else")]
        return tuple(schemas_by_id.values())


def unique_items_schema(schema: Schema) -> UniqueItemsSchema | None:
    """Return `schema` in the form that `UniqueItemsState` reads; None if it does not use `uniqueItems`."""
    is_used = any(node.get("uniqueItems") is True and node.get("maxItems") not in (0, 1) for _, node in objects_of(schema))
    return UniqueItemsSchema(schema) if is_used else None


class UniqueItemsState:
    """Parses JSON as it is generated, to find duplicate items. The grammar ensures that the JSON is valid.

    Attributes:
        has_duplicate: whether an item of an array with `uniqueItems` repeats an earlier item, or can only be completed to a repetition.
    """

    def __init__(self, schema: UniqueItemsSchema) -> None:
        self._schema = schema
        self._text = b""
        self._open: tuple[_ArrayOrObject, ...] = ()  # innermost last
        self._state = _ParserState.BEFORE_VALUE
        self._string_start = 0
        self._is_key = False
        self.has_duplicate = False

    @property
    def ending_bytes(self) -> bytes | None:
        """A token can complete a duplicate item only if it contains one of these bytes. Empty = any token can; None = no token can."""
        if all(unfinished.items is None for unfinished in self._open):
            return None
        if self._open[-1].item_literals:
            return b""
        return STRING_END_BYTES if self._state in (_ParserState.IN_STRING, _ParserState.IN_ESCAPE) else ITEM_END_BYTES

    def copy(self) -> "UniqueItemsState":
        """Return an independent copy. A shallow copy suffices, because no attribute is changed in place."""
        other = UniqueItemsState.__new__(UniqueItemsState)
        other.__dict__.update(self.__dict__)
        return other

    def feed(self, text: bytes) -> None:
        """Parse the next bytes."""
        start = len(self._text)
        self._text += text
        for position, byte in enumerate(text, start):
            self._parse_byte(position, byte)
        if self._open and not self.has_duplicate:
            self.has_duplicate = self._must_repeat()

    def _parse_byte(self, position: int, byte: int) -> None:
        if self._state is _ParserState.IN_ESCAPE:
            self._state = _ParserState.IN_STRING
        elif self._state is _ParserState.IN_STRING:
            if byte == _BACKSLASH:
                self._state = _ParserState.IN_ESCAPE
            elif byte == _QUOTE:
                self._end_string(position + 1)
        else:
            if self._state is _ParserState.IN_SCALAR:
                if byte not in _SCALAR_END_BYTES:
                    return
                self._end_value(position)
            if byte not in _WHITESPACE_BYTES:
                self._parse_structure(position, byte)

    def _parse_structure(self, position: int, byte: int) -> None:
        """Parse a byte outside of strings and scalars."""
        if byte == _COMMA:
            is_array = self._open[-1].is_array
            self._change_innermost_array_or_object(index=self._open[-1].index + is_array)
            self._state = _ParserState.BEFORE_VALUE if is_array else _ParserState.BEFORE_KEY
        elif byte == _COLON:
            self._state = _ParserState.BEFORE_VALUE
        elif byte in (_CLOSE_LIST, _CLOSE_OBJECT):
            self._open = self._open[:-1]
            self._end_value(position + 1)
        elif self._state is _ParserState.BEFORE_KEY:
            self._string_start, self._is_key, self._state = position, True, _ParserState.IN_STRING
        else:
            self._begin_value(position, byte)

    def _begin_value(self, position: int, byte: int) -> None:
        if self._open and self._open[-1].is_array:
            self._change_innermost_array_or_object(item_start=position)
        if byte in (_OPEN_LIST, _OPEN_OBJECT):
            is_array = byte == _OPEN_LIST
            self._open = (*self._open, self._schema.open_array_or_object(self._open[-1] if self._open else None, is_array=is_array))
            self._state = _ParserState.BEFORE_VALUE if is_array else _ParserState.BEFORE_KEY
        elif byte == _QUOTE:
            self._string_start, self._is_key, self._state = position, False, _ParserState.IN_STRING
        else:
            self._state = _ParserState.IN_SCALAR

    def _end_string(self, end_position: int) -> None:
        if self._is_key:
            self._change_innermost_array_or_object(key=str(json.loads(self._text[self._string_start : end_position])))
            self._state = _ParserState.AFTER_VALUE
        else:
            self._end_value(end_position)

    def _end_value(self, end_position: int) -> None:
        self._state = _ParserState.AFTER_VALUE
        top = self._open[-1] if self._open else None
        if top is None or top.items is None:
            return
        item = canonical_json(json.loads(self._text[top.item_start : end_position]))
        self.has_duplicate |= item in top.items
        self._change_innermost_array_or_object(items=top.items | {item})

    def _change_innermost_array_or_object(self, **changes: Any) -> None:  # `changes`: new values of attributes
        self._open = (*self._open[:-1], replace(self._open[-1], **changes))

    def _must_repeat(self) -> bool:
        """Return whether every completion of the unfinished item repeats an earlier item. Only items of a finite set can."""
        top = self._open[-1]
        if not top.items or self._state is _ParserState.AFTER_VALUE:
            return False
        text = b"" if self._state is _ParserState.BEFORE_VALUE else self._text[top.item_start :]
        if top.item_literals:
            return not any(one.encode().startswith(text) and canonical_json(json.loads(one)) not in top.items for one in top.item_literals)
        if self._state is not _ParserState.IN_SCALAR:
            return False
        if text[:1] in _LITERAL_BY_FIRST_BYTE:
            return _LITERAL_BY_FIRST_BYTE[text[:1]] in top.items
        if text not in (b"0", b"-0") or "0" not in top.items:
            return False
        # After "0" or "-0" an integer is complete, but a number may continue with a fraction.
        types = [schema["type"] for schema in self._schema.child_schemas(top.schemas, top.index) if "type" in schema]
        return bool(types) and not any("number" in ([one] if isinstance(one, str) else one) for one in types)


def _child_schemas(schema: Schema, key_or_index: str | int) -> list[Any]:
    if isinstance(key_or_index, int):
        return _item_schemas(schema, key_or_index)
    properties = schema.get("properties")
    if isinstance(properties, dict) and key_or_index in properties:
        schemas = [properties[key_or_index]]
    else:
        schemas = [schema.get("additionalProperties"), schema.get("unevaluatedProperties")]
    # The keys are not matched with the patterns, because matching a client's regular expression may take too long.
    patterns = schema.get("patternProperties")
    return [*schemas, *(patterns.values() if isinstance(patterns, dict) else ())]


def _item_schemas(schema: Schema, index: int) -> list[Any]:
    for name in ("prefixItems", "items"):
        listed = schema.get(name)
        if isinstance(listed, list) and index < len(listed):
            return [listed[index]]
    return [schema.get("items"), schema.get("additionalItems"), schema.get("unevaluatedItems")]
