"""Converts values that a model wrote without JSON's quotes to JSON, by the types of the tool's schema."""

import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.parsing.lenient_json import NUMBER, escape_json, json_word, parse_json

_INTEGER = re.compile(r"(-?(?:0|[1-9][0-9]*))(?:\.0*)?")
_MAX_REFERENCES = 8
_MAX_OPTIONS = 64  # limits the expansion of schemas that contain themselves
_ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_PYTHON_TYPES = {
    **dict.fromkeys(("str", "text", "char", "varchar", "enum", "date", "datetime", "time", "uuid", "bytes"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "long", "short"), "integer"),
    **dict.fromkeys(("float", "double", "decimal"), "number"),
    **dict.fromkeys(("bool",), "boolean"),
    **dict.fromkeys(("none", "nonetype"), "null"),
    **dict.fromkeys(("dict", "map", "mapping", "struct"), "object"),
    **dict.fromkeys(("list", "tuple", "set", "sequence"), "array"),
}


def parameter_schema(schema: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    """Return the schema of one argument, with references resolved within the tool's schema; None if there is none."""
    properties = (schema or {}).get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return _resolve_options(found, schema or {}, [_MAX_OPTIONS]) if isinstance(found, Mapping) else None


def is_text(schema: Mapping[str, Any] | None) -> bool:
    """Return whether a schema allows only strings. Without a schema an argument is a string."""
    return schema is None or _types(schema) == {"string"}


def enum_values(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that `enum` or `const` lists; an empty list if the schema has neither."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) else []


def admits_text(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema allows strings."""
    return "string" in _types(schema)


def coerce_argument(written: str, schema: Mapping[str, Any] | None) -> str:
    """Return the JSON of a written value; a value that fits no type of the schema becomes a string."""
    types, text = {"string"} if schema is None else _types(schema), written.strip()
    word = json_word(text)
    if "null" in types and word == "null":
        return "null"
    if "boolean" in types and text.lower() in ("true", "false"):
        return text.lower()
    if "integer" in types and (integer := _INTEGER.fullmatch(text)):
        return integer[1]
    if "number" in types and word is not None and NUMBER.fullmatch(word):
        return word
    if types & {"object", "array"} or types == _ALL_TYPES:
        value = _container(text, types)
        if value is not None:
            return value
    return f'"{escape_json(written)}"'


def _container(text: str, types: frozenset[str] | set[str]) -> str | None:
    """Return the JSON of an object or a list, or of a string where all types are allowed; None if the text is none of these.

    Models also write objects and lists within a JSON string, or with a backslash before each quote.
    """
    if text[:1] not in ("{", "[", '"', "\\"):
        return None
    kinds = {"object": dict, "array": list, "string": str}
    found = parse_json(text)
    if found is None and '\\"' in text:
        found = parse_json(text.replace('\\"', '"'))
    for _ in range(2):
        try:
            value = None if found is None else json.loads(found)
        except (ValueError, RecursionError):
            return None
        if any(isinstance(value, kind) for name, kind in kinds.items() if name in types):
            return json.dumps(value, ensure_ascii=False)
        found = parse_json(value) if isinstance(value, str) else None
    return None


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a value may have: all of them if the schema names none."""
    if values := enum_values(schema):
        return frozenset(map(_type_of, values))
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({_json_type(named)})
    if isinstance(named, list):
        return frozenset(_json_type(name) for name in named if isinstance(name, str)) or _ALL_TYPES
    for keyword in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(keyword), list) and options:
            return frozenset().union(*(_types(option) for option in options if isinstance(option, Mapping)))
    if isinstance(parts := schema.get("allOf"), list) and parts:
        return _ALL_TYPES.intersection(*(_types(part) for part in parts if isinstance(part, Mapping))) or _ALL_TYPES
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else _ALL_TYPES


def _json_type(name: str) -> str:
    """Return the JSON type of a type name; an unknown name becomes "string"."""
    base = re.split(r"[\[<(]", name.strip().lower())[0]
    return base if base in _ALL_TYPES else _PYTHON_TYPES.get(base, "string")


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    for name, kinds in (("string", str), ("integer", int), ("number", float), ("object", Mapping), ("array", list)):
        if isinstance(value, kinds):
            return name
    return "null"


def _resolve_options(schema: Mapping[str, Any], root: Mapping[str, Any], num_left: list[int]) -> Mapping[str, Any]:
    """Resolve the references of a schema and of its anyOf, oneOf and allOf, for at most `num_left` options."""
    schema = resolve_ref(schema, root)
    resolved: dict[str, Any] = {}
    for keyword in ("anyOf", "oneOf", "allOf"):
        options = schema.get(keyword)
        if not isinstance(options, list) or len(options) > num_left[0]:
            continue
        num_left[0] -= len(options)
        resolved[keyword] = [_resolve_options(option, root, num_left) if isinstance(option, Mapping) else option for option in options]
    return {**schema, **resolved}


def resolve_ref(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that a reference within `root` leads to; an empty one if it leads nowhere."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found: Any = root
        for part in reference[2:].split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            return {}
        schema = found
    return {}
