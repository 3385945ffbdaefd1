"""Rewrites a JSON schema so that it uses only keywords that llguidance implements. A keyword that cannot be rewritten is an error.

Every value that matches the new schema matches the old one, but some rewrites allow fewer values. An unknown `format` is removed.
`uniqueItems` is removed, too, and enforced during generation (`unique_items.py`).

Source: JSON Schema drafts 4 to 2020-12.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from paceline.errors import RequestError
from paceline.sampling.grammars.schema_document import Schema, SchemaDocument, canonical_json, escape_key

ENFORCED_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Values of `format` that llguidance enforces."""

_MAX_INTEGER_BOUND = 2**63 - 1
_MAX_NUMBER_BOUND = 10**18
_MAX_ONE_OF_CASES = 8  # the rewritten schema grows with the square of the number of cases, because each case excludes all others
_JSON_TYPES = ("string", "number", "boolean", "null", "array", "object")
_COUNT_KEYWORDS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
# Keywords whose schemas apply to the same value as the schema that contains them (in JSON Schema: in-place applicators). All but the first
# two are conditional or dynamic.
_APPLICATORS = ("$ref", "allOf", "$dynamicRef", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies")
_FORMAT_PATTERNS = {
    "uuid": "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$",
    "date": "^[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))$",
}
_ADVICE_BY_KEYWORD = {
    "contains": "give all items one schema with `items`",
    "if": "write its cases as `anyOf`",
    "not": "describe what is allowed instead",
    "propertyNames": "use `patternProperties` with `additionalProperties: false`",
    "unevaluatedItems": "use `items` in the schema that lists the items",
    "unevaluatedProperties": "use `additionalProperties: false` in the schema that lists the properties",
    "$ref": "put the schema that it refers to into `$defs`",
    "$dynamicRef": "use `$ref`",
    "uniqueItems": "leave `$id` out of its subschemas",
    "dependencies": "write its cases as `anyOf`",
    "minProperties": "list the properties in `required`",
}


def enforceable_schema(schema: Mapping[str, Any]) -> Schema:
    """Return a copy of a schema that llguidance can enforce, without `uniqueItems`.

    Raises:
        RequestError: a keyword cannot be enforced; the error text contains the keyword and its JSON pointer.
    """
    try:
        root: Schema = json.loads(json.dumps(schema))
        _rewrite(root)
        json.dumps(root)
    except RecursionError as error:
        raise RequestError("grammar: the schema is nested too deeply: send a flatter one", parameter="grammar") from error
    except (TypeError, ValueError, AttributeError) as error:
        text = f"grammar: a keyword of the schema has a value of the wrong type ({error}): send a valid JSON schema"
        raise RequestError(text, parameter="grammar") from error
    return root


def _rewrite(root: Schema) -> None:
    """Rewrite the root and all subschemas that are used, in place; llguidance does not compile unused definitions."""
    document = SchemaDocument(root)
    pending: list[tuple[str, Any]] = [("#", root)]
    seen = set[int]()
    while pending:
        pointer, node = pending.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        for rule in _REWRITE_RULES:
            rule(node, pointer, document)
        for name in ("$dynamicAnchor", "$recursiveAnchor"):
            node.pop(name, None)
        pending += _subschemas(node, pointer)
        for name in ("$defs", "definitions") if document.has_embedded_ids else ():
            if isinstance(node.get(name), dict):
                pending += [(f"{pointer}/{name}/{escape_key(key)}", one) for key, one in node[name].items()]
        if "$ref" in node:
            pending.append((str(node["$ref"]), document.resolve(node["$ref"])))


def _subschemas(node: Schema, pointer: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas in `node` that apply to its values or to parts of them, with their JSON pointers."""
    for name in ("additionalProperties", "additionalItems", "items"):
        if isinstance(node.get(name), dict):
            yield f"{pointer}/{name}", node[name]
    for name in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
        if isinstance(node.get(name), list):
            yield from ((f"{pointer}/{name}/{index}", one) for index, one in enumerate(node[name]))
    for name in ("properties", "patternProperties"):
        if isinstance(node.get(name), dict):
            yield from ((f"{pointer}/{name}/{escape_key(key)}", one) for key, one in node[name].items())


def unenforceable_error(keyword: str, pointer: str) -> RequestError:
    """Return the error for a keyword that cannot be enforced."""
    text = f"grammar: `{keyword}` at {pointer} cannot be enforced: {_ADVICE_BY_KEYWORD[keyword]}, or leave it out"
    return RequestError(text, parameter="grammar")


# Each rule rewrites one keyword of the schema `node`, in place. `pointer` is the JSON pointer of `node`, `document` the whole schema.


def _drop_unknown_format(node: Schema, pointer: str, document: SchemaDocument) -> None:
    if "format" in node and (not isinstance(node["format"], str) or node["format"] not in ENFORCED_FORMATS):
        del node["format"]


def _limit_unique_array_length(node: Schema, pointer: str, document: SchemaDocument) -> None:
    if node.pop("uniqueItems", False) is True and "prefixItems" not in node:
        literals = document.literals(node.get("items"))
        if literals is not None:  # the number of allowed values limits the number of distinct items
            node["maxItems"] = min(len(literals), node.get("maxItems", len(literals)))


def _resolve_references(node: Schema, pointer: str, document: SchemaDocument) -> None:
    if node.pop("$recursiveRef", None) is not None:
        _require_also(node, {"$ref": "#"})
    if "$ref" in node and not document.has_embedded_ids:
        target = document.target_pointer(node["$ref"])
        if target is None:
            raise unenforceable_error("$ref", pointer)
        if not str(node["$ref"]).startswith("#/"):
            node["$ref"] = quote(target, safe="/#~")
    if "$dynamicRef" in node:
        target = document.target_pointer(node.pop("$dynamicRef"))
        if target is None:
            raise unenforceable_error("$dynamicRef", pointer)
        _require_also(node, {"$ref": target})


def _rewrite_if(node: Schema, pointer: str, document: SchemaDocument) -> None:
    has_condition = "if" in node
    condition, then, otherwise = (node.pop(name, True) for name in ("if", "then", "else"))
    if not has_condition or (then in (True, {}) and otherwise in (True, {})):
        return
    if condition in (True, {}):
        _require_also(node, then)
    elif condition is False:
        _require_also(node, otherwise)
    else:
        negated = _negated(condition, node, document)
        if negated is None:
            raise unenforceable_error("if", pointer)
        _require_also(node, {"anyOf": [{"allOf": [condition, then]}, {"allOf": [negated, otherwise]}]})


def _rewrite_not(node: Schema, pointer: str, document: SchemaDocument) -> None:
    if "not" in node:
        negated = _negated(node.pop("not"), node, document)
        if negated is None:
            raise unenforceable_error("not", pointer)
        _require_also(node, negated)


def _rewrite_dependencies(node: Schema, pointer: str, document: SchemaDocument) -> None:
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        dependencies = node.pop(keyword, {})
        if not isinstance(dependencies, dict):
            raise unenforceable_error("dependencies", f"{pointer}/{keyword}")
        for name, needed in dependencies.items():
            absent, present = {"properties": {name: False}}, {"required": [name]}
            then = {"required": needed} if isinstance(needed, list) else needed
            if then not in (True, {}, {"required": []}):
                _require_also(node, {"anyOf": [absent, {"allOf": [present, then]}]})


def _drop_contains(node: Schema, pointer: str, document: SchemaDocument) -> None:
    min_count, max_count = node.pop("minContains", 1), node.pop("maxContains", None)
    if "contains" in node and (min_count != 0 or max_count is not None):
        raise unenforceable_error("contains", pointer)
    node.pop("contains", None)


def _rewrite_property_names(node: Schema, pointer: str, document: SchemaDocument) -> None:
    names = node.pop("propertyNames", True)
    if isinstance(names, dict) and "$ref" in names:
        names = document.resolve(names["$ref"])
    if names in (True, {}) or _is_only_annotation(names):
        return
    values, literals = node.get("additionalProperties", True), document.literals(names)
    properties, patterns = node.get("properties", {}), node.get("patternProperties", {})
    if literals is not None and not patterns:
        allowed = {name: properties.get(name, values) for name in literals if isinstance(name, str)}
        node["properties"] = {**{name: False for name in properties if name not in allowed}, **allowed}
        node["additionalProperties"] = False
        return
    pattern = _name_pattern(names)
    if pattern is None or properties or patterns:
        raise unenforceable_error("propertyNames", pointer)
    node["patternProperties"], node["additionalProperties"] = {pattern: values}, False


def _rewrite_unevaluated(node: Schema, pointer: str, document: SchemaDocument) -> None:
    for keyword, replacement in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        subschema = node.pop(keyword, True)
        if subschema in (True, {}):
            continue
        if replacement == "additionalProperties" and subschema is False:
            names, properties = _evaluated_names(node, document), node.get("properties", {})
            if names is not None:
                node["properties"] = {**properties, **{name: True for name in names if name not in properties}}
                node.setdefault(replacement, False)
                continue
        if any(name in node for name in _APPLICATORS) or "contains" in node:
            raise unenforceable_error(keyword, pointer)
        if replacement == "items" and isinstance(node.get("items"), list):
            replacement = "additionalItems"
        node.setdefault(replacement, subschema)


def _evaluated_names(schema: object, document: SchemaDocument, depth: int = 8) -> set[str] | None:
    """Return the names of the properties that a schema with its `$ref` and `allOf` evaluates; None if they depend on the value."""
    if schema in (True, {}):
        return set()
    if not isinstance(schema, dict) or depth == 0 or any(name in schema for name in ("patternProperties", *_APPLICATORS[2:])):
        return None
    if depth < 8 and "additionalProperties" in schema:
        return None
    parts = [*schema.get("allOf", []), *([document.resolve(schema["$ref"])] if "$ref" in schema else [])]
    inner = [_evaluated_names(part, document, depth - 1) for part in parts]
    names = set[str]().union(*(one for one in inner if one is not None))
    return None if None in inner else names | set(schema.get("properties", {}))


def _rewrite_one_of(node: Schema, pointer: str, document: SchemaDocument) -> None:
    """Rewrite `oneOf` of up to `_MAX_ONE_OF_CASES` cases as `anyOf`. Each case then also requires that no other case matches."""
    cases = node.get("oneOf")
    if not isinstance(cases, list) or len(cases) > _MAX_ONE_OF_CASES:
        return
    if not any(isinstance(case, dict) and "required" in case for case in cases):
        return  # llguidance itself enforces a `oneOf` of cases with different JSON types, and refuses others
    negated = [_negated(case, node, document) for case in cases]
    if None not in negated:
        del node["oneOf"]
        _require_also(node, {"anyOf": [{"allOf": [case, *negated[:index], *negated[index + 1 :]]} for index, case in enumerate(cases)]})


def _rewrite_property_counts(node: Schema, pointer: str, document: SchemaDocument) -> None:
    """Rewrite `minProperties` and `maxProperties`, which llguidance enforces only if all properties are required."""
    names = list(node["properties"]) if isinstance(node.get("properties"), dict) else []
    required = node["required"] if isinstance(node.get("required"), list) else []
    min_count = node.get("minProperties", 0)
    if set(names) <= set(required):
        # llguidance counts keys in the text, where a key that is not in `properties` may occur twice. The parsed object has it once.
        if min_count > len(set(required)) + 1:
            raise unenforceable_error("minProperties", pointer)
        return
    if min_count <= max(1, len(required)):
        node.pop("minProperties", None)
    if len(required) < min_count == 1:
        _require_also(node, {"anyOf": [{"required": [name]} for name in names]})
    is_closed = node.get("additionalProperties") is False and "patternProperties" not in node
    if "maxProperties" in node and is_closed and node["maxProperties"] >= len(names):
        del node["maxProperties"]
    elif node.get("maxProperties") == 1 and is_closed:
        del node["maxProperties"]
        _require_also(node, {"anyOf": [{"properties": {other: False for other in names if other != name}} for name in names]})


def _shrink_bounds(node: Schema, pointer: str, document: SchemaDocument) -> None:
    """Replace numeric bounds that are too large for llguidance by `_MAX_NUMBER_BOUND`, and counts such as 2.0 by integers."""
    for name in _COUNT_KEYWORDS:
        if isinstance(node.get(name), float) and node[name].is_integer():
            node[name] = int(node[name])
    limit = _MAX_INTEGER_BOUND if node.get("type") == "integer" else _MAX_NUMBER_BOUND
    for name, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
        value = node.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value * sign > limit:
            node[name] = _MAX_NUMBER_BOUND * sign


_RewriteRule = Callable[[Schema, str, SchemaDocument], None]
_REWRITE_RULES: tuple[_RewriteRule, ...] = (
    _shrink_bounds, _rewrite_unevaluated, _drop_unknown_format, _limit_unique_array_length, _resolve_references, _rewrite_if, _rewrite_not,
    _rewrite_dependencies, _drop_contains, _rewrite_property_names, _rewrite_property_counts, _rewrite_one_of,
)  # fmt: skip


def _require_also(node: Schema, other: object) -> None:
    """Require that values of `node` also match `other`."""
    if other not in (True, {}):
        parts = node.get("allOf")
        node["allOf"] = [*(parts if isinstance(parts, list) else []), other]


def _is_only_annotation(schema: object) -> bool:
    return isinstance(schema, dict) and all(
        name in ("type", "title", "description") or (name == "format" and value not in ENFORCED_FORMATS) for name, value in schema.items()
    )


def _name_pattern(schema: object) -> str | None:
    """Return a regular expression that matches the strings that a schema allows; None if it cannot be derived."""
    if not isinstance(schema, dict):
        return None
    keywords = {name: value for name, value in schema.items() if name not in ("type", "title", "description")}
    if set(keywords) == {"pattern"}:
        return str(keywords["pattern"])
    if set(keywords) == {"format"}:
        return _FORMAT_PATTERNS.get(keywords["format"])
    if keywords and set(keywords) <= {"minLength", "maxLength"}:
        return f"^[\\s\\S]{{{keywords.get('minLength', 0)},{keywords.get('maxLength', '')}}}$"
    return None


def _negated(schema: object, context: object, document: SchemaDocument) -> Any:
    """Return a schema that matches the values of `context` that `schema` does not match; None if it cannot be derived.

    Args:
        context: a schema. If it lists its values, the result lists those of them that do not match `schema`.
    """
    if schema in (True, {}) or schema is False:
        return schema is False
    if not isinstance(schema, dict):
        return None
    keywords = {name for name in schema if name not in ("title", "description", "$comment")}
    if keywords == {"not"}:
        return schema["not"]
    for keyword, negated_keyword in (("anyOf", "allOf"), ("allOf", "anyOf")):
        if keywords == {keyword} and isinstance(schema[keyword], list):
            parts = [_negated(part, context, document) for part in schema[keyword]]
            return None if None in parts else {negated_keyword: parts}
    if keywords == {"type"}:
        return _other_types(schema["type"])
    if keywords in ({"const"}, {"enum"}):
        allowed_values = document.literals(context)
        excluded = {canonical_json(value) for value in (schema["enum"] if "enum" in schema else [schema["const"]])}
        return None if allowed_values is None else {"enum": [value for value in allowed_values if canonical_json(value) not in excluded]}
    if not keywords <= {"type", "properties", "required"} or schema.get("type", "object") != "object":
        return None
    cases: list[Any] = [{"properties": {name: False}} for name in schema.get("required", [])]
    properties = context.get("properties", {}) if isinstance(context, dict) else {}
    for name, one in schema.get("properties", {}).items():
        other = _negated(one, properties.get(name), document)
        if other is None:
            return None
        cases.append({"properties": {name: other}, "required": [name]})
    if "type" in schema:
        cases.append(_other_types("object"))
        return {"anyOf": cases}
    return {"type": "object", "anyOf": cases} if cases else None


def _other_types(excluded: object) -> Any:
    types = [excluded] if isinstance(excluded, str) else excluded
    if not isinstance(types, list) or ("integer" in types and "number" not in types):  # JSON schema has no type for non-integer numbers
        return None
    return {"type": [name for name in _JSON_TYPES if name not in types]} if len(set(types) & set(_JSON_TYPES)) < len(_JSON_TYPES) else False
