"""Random JSON schemas whose texts are short: every string, list and number has bounds."""

from collections.abc import Callable
from typing import Any

import numpy as np

Schema = dict[str, Any]

NAMES = ["name", "age", "id", "title", "is_open", "tags", "kind", "größe", "items", "x", "street address", "créé", 'a"b', "名"]
WORDS = ["red", "green", "greenish", "alpha", "beta", "alphabet", "no", "north", "north-east", "n/a", "é", "two words", 'say "hi"']
PATTERNS = ["^[a-z]{2,6}$", "^[A-Z][0-9]{1,3}$", "^(foo|bar|baz)(-[0-9])?$", "^20[0-9]{2}-[01][0-9]$", "^#[0-9a-f]{6}$"]
MAX_DEPTH = 2


def random_schema(generator: np.random.Generator) -> Schema:
    """An object or a list of bounded things; equal for equal generator states."""
    make = _object if generator.random() < 0.8 else _array
    return make(generator, 0)


def _any(generator: np.random.Generator, depth: int) -> Schema:
    makers: list[Callable[[np.random.Generator, int], Schema]] = [_string, _integer, _enum, _const, _literal]
    if depth < MAX_DEPTH:
        makers += [_object, _array, _union]
    return makers[int(generator.integers(len(makers)))](generator, depth)


def _object(generator: np.random.Generator, depth: int) -> Schema:
    count = int(generator.integers(1, 7 - 2 * depth))
    names = [NAMES[index] for index in generator.permutation(len(NAMES))[:count]]
    required = [name for name in names if generator.random() < 0.7]
    properties = {name: _any(generator, depth + 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(generator: np.random.Generator, depth: int) -> Schema:
    fewest = int(generator.integers(0, 2))
    return {"type": "array", "items": _any(generator, depth + 1), "minItems": fewest, "maxItems": fewest + int(generator.integers(1, 4))}


def _union(generator: np.random.Generator, depth: int) -> Schema:
    return {"anyOf": [_any(generator, depth + 1), {"type": "null"}]}


def _string(generator: np.random.Generator, depth: int) -> Schema:
    if generator.random() < 0.3:
        return {"type": "string", "pattern": PATTERNS[int(generator.integers(len(PATTERNS)))]}
    shortest = int(generator.integers(0, 3))
    return {"type": "string", "minLength": shortest, "maxLength": shortest + int(generator.integers(1, 9))}


def _integer(generator: np.random.Generator, depth: int) -> Schema:
    low = int(generator.integers(-200, 200))
    return {"type": "integer", "minimum": low, "maximum": low + int(generator.integers(0, 3000))}


def _enum(generator: np.random.Generator, depth: int) -> Schema:
    count = int(generator.integers(2, 5))
    return {"enum": [WORDS[index] for index in generator.permutation(len(WORDS))[:count]]}


def _const(generator: np.random.Generator, depth: int) -> Schema:
    return {"const": WORDS[int(generator.integers(len(WORDS)))]}


def _literal(generator: np.random.Generator, depth: int) -> Schema:
    return {"type": "boolean"} if generator.random() < 0.7 else {"type": "null"}
