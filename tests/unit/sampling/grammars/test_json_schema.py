"""Texts of a rewritten schema satisfy the one that was sent; a keyword that nothing enforces is refused with its place."""

import json
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import jsonschema
import llguidance
import numpy as np
import pytest
from pydantic import AnyUrl, BaseModel, Field, Json, SecretStr, StringConstraints, create_model

from paceline.errors import RequestError
from paceline.sampling.grammars.json_schema import ENFORCED_FORMATS, enforceable_schema
from paceline.sampling.grammars.unique_items import unique_items_schema

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
TEXT, INTEGER = {"type": "string"}, {"type": "integer"}
AB = {"a": INTEGER, "b": INTEGER}


@cache
def byte_tokens() -> Any:
    return llguidance.LLTokenizer("byte")


def accepts(schema: dict[str, Any], value: object) -> bool:
    """Whether the grammar of the rewritten schema allows a value."""
    text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(enforceable_schema(schema)), defaults=ONE_LINE)
    matcher = llguidance.LLMatcher(byte_tokens(), text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    written = list(json.dumps(value, ensure_ascii=False).encode())
    return bool(matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting())


SERVED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "an unknown format": ({"type": "string", "format": "path"}, ["/a", ""], [1]),
    "a format that is no text": ({"type": "string", "format": 3}, ["/a"], [1]),
    "a known format": ({"type": "string", "format": "date"}, ["2024-02-29"], ["x"]),
    "a property that is named format": (
        {"type": "object", "properties": {"format": TEXT}, "additionalProperties": False}, [{"format": "x"}], [{"format": 1}],
    ),
    "a format inside a reference": (
        {"type": "array", "items": {"$ref": "#/components/x"}, "components": {"x": {"type": "string", "format": "binary"}}}, [["a"]], [[1]],
    ),
    "no unique items": ({"type": "array", "items": INTEGER, "uniqueItems": False}, [[1, 1]], [["a"]]),
    "unique values of a list": ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, [[1, 2]], [[1, 2, 1]]),
    "not a type": ({"not": {"type": ["string", "null"]}}, [1, [], {}], ["a", None]),
    "not required": ({"type": "object", "not": {"required": ["a"]}}, [{"b": 1}, {}], [{"a": 1}]),
    "not a value of a list": ({"enum": [1, 2, 3], "not": {"const": 2}}, [1, 3], [2]),
    "not a value of several types": ({"enum": [1, True, "1"], "not": {"const": 1}}, [True, "1"], [1]),
    "if on a listed value": (
        {
            "type": "object",
            "properties": {"k": {"enum": ["x", "y"]}, "n": {"type": ["integer", "null"]}},
            "required": ["k"],
            "additionalProperties": False,
            "if": {"properties": {"k": {"const": "x"}}},
            "then": {"required": ["n"]},
            "else": {"properties": {"n": False}},
        },
        [{"k": "x", "n": 1}, {"k": "y"}],
        [{"k": "x"}, {"k": "y", "n": 1}],
    ),
    "then without if": ({"type": "integer", "then": {"minimum": 5}}, [1], ["a"]),
    "if without then": ({"type": "integer", "if": {"minimum": 5}}, [1, 9], ["a"]),
    "dependent names": (
        {"type": "object", "properties": AB, "dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 2}], [{"a": 1}],
    ),
    "dependent schemas": (
        {"type": "object", "properties": AB, "dependentSchemas": {"a": {"properties": {"b": {"minimum": 5}}}}},
        [{"a": 1, "b": 5}, {"b": 1}], [{"a": 1, "b": 2}],
    ),
    "dependencies of draft 7": ({"type": "object", "properties": AB, "dependencies": {"a": ["b"]}}, [{"a": 1, "b": 2}], [{"a": 1}]),
    "names from a list": (
        {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": INTEGER}, [{"x": 1, "y": 2}, {}], [{"z": 1}],
    ),
    "names by a reference": (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"enum": ["x"]}}, "additionalProperties": INTEGER},
        [{"x": 1}], [{"z": 1}, {"x": "a"}],
    ),
    "names by a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": INTEGER}, [{"xy": 1}], [{"y": 1}],
    ),
    "names by their length": ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"xy": 1}], [{"xyz": 1}]),
    "names by a format": (
        {"type": "object", "propertyNames": {"format": "date"}, "additionalProperties": INTEGER}, [{"2024-01-31": 1}], [{"2024-02-31": 1}],
    ),
    "unevaluated properties": ({"type": "object", "properties": AB, "unevaluatedProperties": False}, [{"a": 1}], [{"c": 1}]),
    "unevaluated items": ({"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, [[1]], [[1, 2]]),
    "unevaluated properties of a base": (
        {"$ref": "#/$defs/b", "properties": {"c": INTEGER}, "unevaluatedProperties": False, "$defs": {"b": {"properties": AB}}},
        [{"a": 1, "c": 1}, {}], [{"d": 1}],
    ),
    "not any of": ({"enum": [1, 2, 3], "not": {"anyOf": [{"const": 2}, {"const": 3}]}}, [1], [2, 3]),
    "not not": ({"type": "integer", "not": {"not": {"enum": [1, 2]}}}, [1], [3]),
    "one of two names": (
        {"type": "object", "properties": AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}],
    ),
    "one of two types": ({"oneOf": [{"type": "string"}, {"type": "object", "required": ["a"]}]}, ["x", {"a": 1}], [1, {}]),
    "an anchor of draft 7": ({"definitions": {"a": {"$id": "#foo", **INTEGER}}, "$ref": "#foo"}, [1], ["a"]),
    "a dynamic reference": (
        {"$dynamicAnchor": "n", "type": "object", "properties": {"c": {"$dynamicRef": "#n"}}, "additionalProperties": False},
        [{"c": {"c": {}}}], [{"c": 1}],
    ),
    "a recursive reference": (
        {"type": "object", "properties": {"c": {"$recursiveRef": "#"}}, "additionalProperties": False}, [{"c": {}}], [{"c": 1}],
    ),
    "contains nothing": ({"type": "array", "contains": TEXT, "minContains": 0}, [[], [1]], [1]),
    "one property at least": ({"type": "object", "properties": AB, "minProperties": 1}, [{"a": 1}, {"b": 1}], [{}]),
    "one property more than required": (
        {"type": "object", "properties": AB, "required": ["a", "b"], "minProperties": 3}, [{"a": 1, "b": 2, "c": 3}], [{"a": 1, "b": 2}],
    ),
    "one property at most": (
        {"type": "object", "properties": AB, "additionalProperties": False, "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}],
    ),
    "far bounds": ({"type": "integer", "minimum": -(2**63), "maximum": 2**64}, [0, -5, 10**17], ["a"]),
    "far bounds of numbers": ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, [0.5], ["a"]),
    "counts with a fraction of zero": ({"type": "array", "maxItems": 2.0}, [[1, 2]], [[1, 2, 3]]),
    "an identified root": ({"$id": "http://x/y", "$defs": {"a": INTEGER}, "$ref": "http://x/y#/$defs/a"}, [1], ["a"]),
    "draft 4": ({"definitions": {"a": {"minimum": 3, "exclusiveMinimum": True, "type": "integer"}}, "$ref": "#/definitions/a"}, [4], [3]),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_rewritten_json_schema_accepts_valid_values_only(name: str) -> None:
    schema, right, wrong = SERVED[name]
    assert [value for value in right if not accepts(schema, value)] == []
    assert [value for value in wrong if accepts(schema, value)] == []


@pytest.mark.parametrize("name", [name for name in SERVED if "draft" not in name])
def test_expected_values_of_schema_tests_agree_with_jsonschema(name: str) -> None:
    schema, right, wrong = SERVED[name]
    schema = {key: value for key, value in schema.items() if (key, value) != ("format", 3)}
    version = jsonschema.Draft201909Validator if "recursive" in name else jsonschema.Draft202012Validator
    validator = version(schema, format_checker=version.FORMAT_CHECKER)
    assert [validator.is_valid(value) for value in [*right, *wrong]] == [True] * len(right) + [False] * len(wrong)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "array", "contains": TEXT}, "`contains` at #"),
        ({"properties": {"a/b": {"not": {"pattern": "x"}}}}, "`not` at #/properties/a~1b"),
        ({"items": {"$ref": "#/$defs/s"}, "$defs": {"s": {"if": {"minLength": 2}, "then": {"maxLength": 3}}}}, "`if` at #/$defs/s"),
        ({"anyOf": [{}, {"propertyNames": {"not": {}}}]}, "`propertyNames` at #/anyOf/1"),
        ({"anyOf": [{"properties": AB}], "unevaluatedProperties": False}, "`unevaluatedProperties` at #"),
        ({"items": {"$ref": "https://other.org/schema"}}, "`$ref` at #/items"),
        ({"$dynamicRef": "#x"}, "`$dynamicRef` at #"),
        ({"type": "object", "minProperties": 2}, "`minProperties` at #"),
    ],
)
def test_unsupported_json_schema_keyword_is_refused_with_its_pointer(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(RequestError) as refusal:
        enforceable_schema(schema)
    assert (place in str(refusal.value), refusal.value.parameter) == (True, "grammar")
    assert "or leave it out" in str(refusal.value)


def test_unused_json_schema_definition_is_not_checked() -> None:
    assert accepts({**INTEGER, "$defs": {"unused": {"not": {"pattern": "x"}}}}, 1)


def test_enforced_json_schema_formats_are_supported_by_llguidance() -> None:
    for name in ENFORCED_FORMATS:
        text = json.dumps({"type": "string", "format": name})
        matcher = llguidance.LLMatcher(byte_tokens(), llguidance.LLMatcher.grammar_from_json_schema(text), log_level=0)
        assert not matcher.is_error(), name


def test_json_schema_with_invalid_values_compiles_or_is_refused(seed: int) -> None:
    """Whatever a keyword holds: no other exception, which would be the server's fault."""
    generator, num_refused = np.random.default_rng(seed), 0
    keywords = sorted({key for schema, _, _ in SERVED.values() for key in schema} | {"contains", "minContains", "anyOf", "dependencies"})
    values: list[Any] = [
        None,
        0,
        -1.5,
        "x",
        "#",
        "http://[",
        [],
        [3],
        ["a"],
        {},
        {"a": 3},
        {"a": []},
        True,
        False,
        {"enum": 3},
        [{}],
        "#/x",
    ]
    for _ in range(3000):
        chosen = generator.choice(len(keywords), 4)
        schema = {keywords[index]: values[int(generator.integers(len(values)))] for index in chosen}
        try:
            unique_items_schema(enforceable_schema({"items": schema, "properties": {"p": schema}}))
        except RequestError:
            num_refused += 1
    assert 0 < num_refused < 3000


def test_rewriting_does_not_modify_the_given_json_schema() -> None:
    schema = {"type": "string", "format": "path"}
    enforceable_schema(schema)
    assert schema == {"type": "string", "format": "path"}


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]
    tags: frozenset[Colour] = frozenset()


TYPES = [
    Path, bytes, SecretStr, set[str], set[int], frozenset[Colour], set[Literal["a", "b"]], dict[UUID, int], dict[Colour, int],
    dict[Literal["x", "y"], list[int]], dict[str, Any], dict[int, str], dict[date, int], datetime, date, timedelta, Decimal, UUID,
    IPv4Address, Json[list[int]], AnyUrl, tuple[int, str], tuple[int, ...], list[Cat | Dog],
    Annotated[Cat | Dog, Field(discriminator="kind")], Annotated[list[int], Field(min_length=1, max_length=3)],
    Annotated[str, StringConstraints(pattern="^[a-z]+$", max_length=5)], Annotated[int, Field(gt=0, le=2**63)],
    dict[Annotated[str, StringConstraints(pattern="^k_")], int], dict[Annotated[str, StringConstraints(max_length=5)], int],
    int | None, set[tuple[int, int]],
]  # fmt: skip


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_json_schema_of_a_pydantic_type_compiles(kind: Any) -> None:
    model = create_model("Answer", value=(kind, ...))
    text = json.dumps(enforceable_schema(model.model_json_schema()))
    matcher = llguidance.LLMatcher(byte_tokens(), llguidance.LLMatcher.grammar_from_json_schema(text), log_level=0)
    matcher.compute_bitmask()
    assert not matcher.is_error(), matcher.get_error()
