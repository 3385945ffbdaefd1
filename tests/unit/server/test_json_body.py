"""Large JSON bodies: the same values as `json.loads`, and counted."""

import json
import random
from typing import Any

import pytest

from paceline.server.errors import HttpError
from paceline.server.fields import MAX_CONTAINERS, MAX_ITEMS, MAX_MEMBERS, parse_json

CHARACTERS = ["a", '"', "\\", "\n", "é", "😀", "\ud83d", "\udc00", "\u2028", " "]


def result(parse: Any, body: bytes) -> Any:
    try:
        return parse(body)
    except ValueError as error:
        return type(error)


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_json_parsed_by_the_python_scanner_equals_json_loads(ensure_ascii: bool, seed: int) -> None:
    """Whole and cut anywhere, also within escapes and surrogate pairs."""
    generator = random.Random(seed)
    for _ in range(300):
        text = "".join(generator.choices(CHARACTERS, k=generator.randrange(80)))
        body = json.dumps({text: [text, 1.5, None, {"a": True}]}, ensure_ascii=ensure_ascii).encode("utf-8", "replace")
        assert parse_json(body) == json.loads(body)
        cut = body[: generator.randrange(len(body))]
        assert result(parse_json, cut) == result(json.loads, cut)


def test_raw_line_break_in_a_json_string_is_refused() -> None:
    with pytest.raises(json.JSONDecodeError):
        parse_json(b'{"a": "' + b"x" * 200_000 + b'\n"}')


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"[]," * MAX_CONTAINERS + b"1]",
        b"[" + b"{}," * MAX_CONTAINERS + b"1]",
        b"{" + b",".join(b'"%d":1' % index for index in range(MAX_MEMBERS + 1)) + b"}",
        b"[[" + b"1," * MAX_ITEMS + b"1]]",
    ],
    ids=["lists", "objects", "members", "items"],
)
def test_json_body_with_too_many_containers_is_refused(body: bytes) -> None:
    with pytest.raises(HttpError, match="send "):
        parse_json(body)


def test_deeply_nested_json_raises_recursion_error() -> None:
    with pytest.raises(RecursionError):
        parse_json(b"[" * 1_000_000)
