"""Read a user's file of prompts: a text a line, or JSON lines with texts, conversations or token ids."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, shortened
from paceline.small_files import prompt_lines

_FORMS = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt of such a file. One of: a text as it is, a conversation, token ids of the target.

    Attributes:
        prediction: what the output will resemble, as text or token ids; None = nothing is expected.
    """

    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()
    prediction: str | tuple[int, ...] | None = None


def read_prompts(path: Path) -> list[PromptLine]:
    """Read one prompt a line: a text, or in a .jsonl or .json file a JSON object.

    An object has one of "prompt", "messages" and "prompt_token_ids", and maybe a "prediction".

    Raises:
        ConfigError: there is no such file, a line is none of these, or there is no line.
    """
    if path.suffix.lower() not in (".jsonl", ".json"):
        prompts = [PromptLine(text=line) for _, line in prompt_lines(path)]
    else:
        prompts = [_prompt(fields, f"line {number} of {path}") for number, fields in json_objects(path)]
    if not prompts:
        raise ConfigError(f"{path} holds no prompt: give a text a line, or JSON objects with one of {', '.join(_FORMS)}")
    return prompts


def _prompt(fields: Mapping[str, Any], where: str) -> PromptLine:
    given = [name for name in _FORMS if name in fields]
    if len(given) != 1:
        raise ConfigError(f"{where} has {' and '.join(given) or 'no prompt'}: give one of {', '.join(_FORMS)}")
    (name,) = given
    value, prediction = fields[name], fields.get("prediction")
    if isinstance(prediction, list) and _is_token_id_list(prediction):
        prediction = tuple(prediction)
    elif not isinstance(prediction, str | None):
        raise ConfigError(f"{where}: prediction is {shortened(prediction)}: give a text or a list of token ids")
    if name == "prompt" and isinstance(value, str) and value:
        return PromptLine(text=value, prediction=prediction)
    if name == "prompt_token_ids" and _is_token_id_list(value):
        return PromptLine(token_ids=tuple(value), prediction=prediction)
    if name == "messages" and isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return PromptLine(messages=tuple(value), prediction=prediction)
    forms = {
        "prompt": "a text that is not empty",
        "prompt_token_ids": "a list of token ids",
        "messages": "a list of objects with role and content",
    }
    raise ConfigError(f"{where}: {name} is {shortened(value)}: give {forms[name]}")


def _is_token_id_list(value: object) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return is_list and all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value)  # type: ignore[attr-defined]


def json_objects(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the objects of a JSON lines file, with their line numbers from 1.

    Raises:
        ConfigError: there is no such file, or a line is no object.
    """
    for number, line in prompt_lines(path):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"line {number} of {path} is no JSON ({error}): give an object a line") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"line {number} of {path} is {shortened(fields)}: give an object a line")
        yield number, fields
