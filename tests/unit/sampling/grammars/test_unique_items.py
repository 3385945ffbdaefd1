"""An array with `uniqueItems` never repeats an item, whatever else its grammar allows."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from paceline.errors import RequestError
from paceline.sampling.grammars.compiler import GrammarCompiler
from paceline.sampling.grammars.grammar import Grammar
from paceline.sampling.grammars.unique_items import UniqueItemsState, unique_items_schema
from paceline.tokenizer.tokenizer import Tokenizer

MINI = Path(__file__).resolve().parents[4] / "src" / "paceline" / "assets" / "mini" / "target"
EOS_ID = 2
V = 4096
SET = {"type": "array", "uniqueItems": True}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.open(MINI)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), [EOS_ID])


def has_duplicate(schema: dict[str, Any], text: str) -> bool:
    arrays = unique_items_schema(schema)
    assert arrays is not None
    state = UniqueItemsState(arrays)
    for byte in text.encode():  # one byte at a time, and all at once
        state.feed(bytes([byte]))
    whole = UniqueItemsState(arrays)
    whole.feed(text.encode())
    assert state.has_duplicate == whole.has_duplicate
    return state.has_duplicate


@pytest.mark.parametrize(
    ("schema", "unique", "repeated"),
    [
        (SET, '["a", "b", ["a"], {"a": "a"}, 1, true]', '["a", "b", "a"]'),
        (SET, '["a\\"", "a"]', '["a", "\\u0061"]'),
        (SET, "[1, 10, 100]", "[1, 10, 1.0]"),
        (SET, '[{"a": 1, "b": 2}, {"a": 1}]', '[{"a": 1, "b": 2}, {"b": 2, "a": 1}]'),
        ({"items": SET}, "[[1, 2], [1, 2]]", "[[1, 2], [1, 1]]"),
        ({"properties": {"x": SET}, "additionalProperties": {"type": "array"}}, '{"y": [1, 1], "x": [1]}', '{"y": [], "x": [1, 1]}'),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/s"}], "$defs": {"s": SET}}, "[1, 2]", "[1, 1]"),
        ({"prefixItems": [SET], "items": {"type": "array"}}, "[[1], [1, 1]]", "[[1, 1]]"),
        ({"items": [SET], "additionalItems": {"type": "array"}}, "[[1], [1, 1]]", "[[1, 1]]"),
        ({"patternProperties": {"x": SET}}, '{"x": [1]}', '{"x": [1, 1]}'),
        ({"additionalProperties": SET}, '{"x": [1 , 2 ]}', '{"x": [1 , 1 ]}'),
    ],
)
def test_duplicate_items_are_found_wherever_unique_items_applies(schema: dict[str, Any], unique: str, repeated: str) -> None:
    assert (has_duplicate(schema, unique), has_duplicate(schema, repeated)) == (False, True)
    version = jsonschema.Draft7Validator if isinstance(schema.get("items"), list) else jsonschema.Draft202012Validator
    assert [version(schema).is_valid(json.loads(text)) for text in (unique, repeated)] == [True, False]


def test_schema_without_unique_items_needs_no_tracking() -> None:
    assert unique_items_schema({"type": "array", "uniqueItems": False}) is None
    assert unique_items_schema({"type": "array", "uniqueItems": True, "maxItems": 1}) is None


def written(schema: dict[str, Any], generator: np.random.Generator) -> str:
    """A random text that the masks allow."""
    matcher, token_ids = compiler().new_matcher(Grammar.json_schema(schema)), list[int]()
    while len(token_ids) < 80:
        ahead = token_ids[-1:] if generator.random() < 0.5 else []  # the last token is a path, or committed
        scores = np.zeros(V, np.float32)
        if token_ids and not ahead:
            matcher.commit(token_ids[-1])
        matcher.mask(scores, ahead)
        if ahead:
            matcher.commit(ahead[0])
        token_ids.append(int(generator.choice(np.flatnonzero(scores == 0))))
        if token_ids[-1] == EOS_ID:
            return tokenizer().decode(token_ids[:-1])
    return ""


@pytest.mark.parametrize(
    "schema",
    [
        {**SET, "items": {"enum": ["a", "ab", "b", "é"]}, "minItems": 3},
        {**SET, "items": {"type": "integer", "minimum": 1, "maximum": 12}, "minItems": 6},
        {**SET, "items": {"type": "string", "pattern": "^[a-z]{0,3}$"}, "minItems": 3, "maxItems": 5},
        {"type": "object", "properties": {"x": {**SET, "items": {"type": "boolean"}}}, "required": ["x"], "additionalProperties": False},
        {
            **SET,
            "items": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"type": "integer", "maximum": 99, "minimum": -9}]},
            "minItems": 5,
        },
        {**SET, "items": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 99999}]}, "minItems": 4, "maxItems": 8},
    ],
    ids=["enum", "integers", "texts", "booleans", "few integers and words", "integers and words"],
)
def test_unique_items_masks_allow_no_duplicate_items(schema: dict[str, Any], seed: int) -> None:
    generator, num_complete = np.random.default_rng(seed), 0
    for _ in range(25):
        text = written(schema, generator)
        if text:
            jsonschema.validate(json.loads(text), schema)
            num_complete += 1
    assert num_complete > 10


def test_unique_items_forbids_completing_a_duplicate_item() -> None:
    matcher = compiler().new_matcher(
        Grammar.json_schema({**SET, "items": {"type": "string", "pattern": "^a$"}, "minItems": 2, "maxItems": 2})
    )
    for token_id in tokenizer().encode('["a", "a', add_special_tokens=False):
        matcher.commit(token_id)
    scores = np.zeros(V, np.float32)
    matcher.mask(scores, ())
    assert {tokenizer().decode([token_id]) for token_id in np.flatnonzero(scores == 0).tolist()} <= {'"', '"]'}
    assert (scores == 0).any()


@pytest.mark.parametrize(
    "items",
    [
        {"type": "string", "maxLength": 1},
        {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
        {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "boolean"}], "minItems": 2, "items": False},
    ],
    ids=["short texts", "short texts or null", "objects", "tuples"],
)
def test_array_of_unique_items_with_few_values_can_be_completed(items: dict[str, Any], seed: int) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(20):
        written({**SET, "items": items, "minItems": 2, "maxItems": 4}, generator)  # raises nothing


def test_unique_items_after_an_unknown_reference_are_refused() -> None:
    with pytest.raises(RequestError, match="`uniqueItems` at a schema with"):
        unique_items_schema({**SET, "$ref": "http://other/schema"})
