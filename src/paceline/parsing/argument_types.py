"""Values that a model wrote as plain text, as the JSON that the tool's schema calls for."""

import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.parsing.lenient_json import NUMBER, escape_json

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_MAX_REFERENCES = 8
_ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})


def parameter_schema(schema: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    """The schema of one argument, references within the tool's schema resolve_ref; None where nothing is said of it."""
    properties = (schema or {}).get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return resolve_ref(found, schema or {}) if isinstance(found, Mapping) else None


def is_text(schema: Mapping[str, Any] | None) -> bool:
    """Whether a value can only be a text: so it is where nothing is said of it."""
    return schema is None or _types(schema) == {"string"}


def coerce_argument(written: str, schema: Mapping[str, Any] | None) -> str:
    """The JSON text of a value; what fits no type that the schema allows is a text."""
    types, text = {"string"} if schema is None else _types(schema), written.strip()
    if "null" in types and text in ("null", "None"):
        return "null"
    if "boolean" in types and text.lower() in ("true", "false"):
        return text.lower()
    if "integer" in types and _INTEGER.fullmatch(text):
        return text
    if "number" in types and NUMBER.fullmatch(text):
        return text
    if types & {"object", "array"} or types == _ALL_TYPES:
        try:
            value = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            value = None
        kinds = {"object": dict, "array": list, "string": str}
        if any(isinstance(value, kind) for name, kind in kinds.items() if name in types):
            return json.dumps(value, ensure_ascii=False)
    return f'"{escape_json(written)}"'


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a value may have; all of them where none is named."""
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(filter(_is_string, named))
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        return frozenset().union(*(_types(option) for option in options if isinstance(option, Mapping)))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and all(map(_is_string, values)):
        return frozenset({"string"})
    return _ALL_TYPES


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def resolve_ref(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a schema means that may be a reference within `root`; nothing where that leads nowhere."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found: Any = root
        for part in reference[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            return {}
        schema = found
    return {}
