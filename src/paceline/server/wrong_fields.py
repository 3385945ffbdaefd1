"""What is wrong with the fields of a request, in our own words: the field, its value, and what is wanted instead of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import printable

_UNION_TAGS = ("str", "int", "float", "bool")
_MAX_PARAMETER = 200
_MAX_VALUE = 40  # characters of a value that an error repeats
_WANTED = {
    "string_type": "a string",
    "string_unicode": "a string without half characters",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of 64 bits",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}
"""Kinds of pydantic's errors, and what it would have taken."""


@dataclass(frozen=True, slots=True)
class WrongField:
    """A field that is wrong.

    Attributes:
        name: its place in the request; None = it is the whole body.
        code: the mistake in a word.
    """

    name: str | None
    text: str
    code: str


def wrong_field(errors: Sequence[Any], within: str = "") -> WrongField:
    """The first field that is wrong.

    Args:
        errors: pydantic's.
        within: the object of the request that they are about; empty = all of it.
    """
    first = errors[0]
    kind = first["type"]
    if kind == "json_invalid":
        return WrongField(None, "the body is no JSON: send one JSON object", "invalid_json")
    name = spelled(within, _place(first))
    if kind == "missing":
        what = f"{name} is missing" if name else "the body is empty"
        return WrongField(name, f"{what}: send it", "missing_required_parameter")
    same = _closest(errors)
    name = spelled(within, _place(same[0]))
    if same[0]["type"] == "extra_forbidden":
        return WrongField(name, f"{name} is no parameter of this request: leave it out", "unknown_parameter")
    if same[0]["type"] == "missing":
        return WrongField(name, f"{name} is missing: send it", "missing_required_parameter")
    wanted = " or ".join(dict.fromkeys(map(_wanted, same)))
    return WrongField(name, f"{name or 'the body'} is {shown(same[0]['input'])}: send {wanted}", "invalid_value")


def spelled(within: str, place: Sequence[str | int]) -> str | None:
    """The name of a place in a request, such as "messages[0].content"; None = the request itself."""
    text = within + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return printable(text.removeprefix("."))[:_MAX_PARAMETER] or None


def shown(value: object) -> str:
    """A JSON value in a few words: it may be long."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        text = json.dumps(value[: _MAX_VALUE + 1], ensure_ascii=False)
        return f'{text[:_MAX_VALUE]}…"' if len(text) > _MAX_VALUE + 2 else text
    text = json.dumps(value) if value is None or isinstance(value, bool | int | float) else type(value).__name__
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}…"


def _closest(errors: Sequence[Any]) -> list[Any]:
    """Those about the same place, of the form that was meant: where a field has several forms, each of them says what it misses."""
    first = _place(errors[0])
    about = [one for one in errors if _place(one)[: len(first)] == first]
    branches: dict[tuple[Any, ...], list[Any]] = {}
    for one in about:
        branches.setdefault(tuple(part for part in one["loc"] if _is_union_tag(part)), []).append(one)
    deepest = max(len(_place(one)) for one in about)
    if deepest == len(first):
        return about
    fitting = [found for found in branches.values() if any(len(_place(one)) > len(first) for one in found)]
    return min(fitting, key=len)[:1]


def _wanted(error: Any) -> str:
    if error["type"] == "literal_error":
        expected: str = error["ctx"]["expected"]
        return f"one of {expected}".replace("'", '"') if " or " in expected else expected.replace("'", '"')
    return _WANTED.get(error["type"], str(error["msg"]))


def _place(error: Any) -> list[str | int]:
    return [part for part in error["loc"] if part != "body" and not _is_union_tag(part)]


def _is_union_tag(part: object) -> bool:
    """Names that pydantic gives to the branches of a union; no field of ours is called so."""
    return isinstance(part, str) and (part in _UNION_TAGS or "[" in part or part[:1].isupper())
