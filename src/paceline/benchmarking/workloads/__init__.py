"""Workloads: a table of prompts that come with the package, and prompts from a user's files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, shortened
from paceline.small_files import prompt_lines

_FORMS = ("prompt", "messages", "prompt_ids")

COPYING = "copying"
REWRITING = "rewriting"
RANDOM = "random"
_FILES = {name: f"{name}.jsonl" for name in ("chat", "code", "arithmetic", "json", COPYING)} | {REWRITING: f"{COPYING}.jsonl"}
"""Files of prompts in this directory, by workload."""
NAMES = (*_FILES, RANDOM)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of: a text as it is, a conversation, token ids of the target.

    Attributes:
        prediction: what the output will resemble, as text or token ids; None = nothing is expected.
    """

    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()
    prediction: str | tuple[int, ...] | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """A prompt a line: JSON objects with one of "prompt", "messages" and "prompt_ids", and maybe a "prediction"; of a file whose name
    does not end in .jsonl, the lines are texts.

    Raises:
        ConfigError: there is no such file, a line is none of these, or there is no line.
    """
    if path.suffix.lower() != ".jsonl":
        prompts = [Prompt(text=line) for _, line in prompt_lines(path)]
    else:
        prompts = [_prompt(fields, f"line {number} of {path}") for number, fields in _objects(path)]
    if not prompts:
        raise ConfigError(f"{path} holds no prompt: give a text a line, or JSON objects with one of {', '.join(_FORMS)}")
    return prompts


def read_spec_bench(path: Path) -> dict[str, list[Prompt]]:
    """Prompts by category: of each question the first turn, as a message; later turns would depend on the answers.

    Raises:
        ConfigError: there is no such file, a line is no question, or there is no line.

    Source: Spec-Bench (Xia et al. 2024, arXiv:2401.07851), its file question.jsonl: question_id, category, turns.
    """
    categories: dict[str, list[Prompt]] = {}
    for number, fields in _objects(path):
        category, turns = fields.get("category"), fields.get("turns")
        where = f"line {number} of {path}"
        if "question_id" not in fields:
            raise ConfigError(f"{where} has no question_id: give lines with question_id, category and turns, as Spec-Bench does")
        if not isinstance(category, str) or not category:
            raise ConfigError(f"{where}: category is {shortened(category)}: give a text that is not empty")
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ConfigError(f"{where}: turns is {shortened(turns)}: give a list of texts, at least one")
        categories.setdefault(category, []).append(Prompt(messages=({"role": "user", "content": turns[0]},)))
    if not categories:
        raise ConfigError(f"{path} holds no question: give lines with question_id, category and turns, as Spec-Bench does")
    return categories


def _prompt(fields: Mapping[str, Any], where: str) -> Prompt:
    given = [name for name in _FORMS if name in fields]
    if len(given) != 1:
        raise ConfigError(f"{where} has {' and '.join(given) or 'no prompt'}: give one of {', '.join(_FORMS)}")
    (name,) = given
    value, prediction = fields[name], fields.get("prediction")
    if isinstance(prediction, list) and _are_ids(prediction):
        prediction = tuple(prediction)
    elif not isinstance(prediction, str | None):
        raise ConfigError(f"{where}: prediction is {shortened(prediction)}: give a text or a list of token ids")
    if name == "prompt" and isinstance(value, str) and value:
        return Prompt(text=value, prediction=prediction)
    if name == "prompt_ids" and _are_ids(value):
        return Prompt(token_ids=tuple(value), prediction=prediction)
    if name == "messages" and isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return Prompt(messages=tuple(value), prediction=prediction)
    forms = {
        "prompt": "a text that is not empty",
        "prompt_ids": "a list of token ids",
        "messages": "a list of objects with role and content",
    }
    raise ConfigError(f"{where}: {name} is {shortened(value)}: give {forms[name]}")


def _are_ids(value: object) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return is_list and all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value)  # type: ignore[attr-defined]


def _objects(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in prompt_lines(path):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"line {number} of {path} is no JSON ({error}): give an object a line") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"line {number} of {path} is {shortened(fields)}: give an object a line")
        yield number, fields


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one kind.

    Attributes:
        prompts: texts, messages or token ids; of the kind `RANDOM` there are none, they are drawn.
        makes_copies: the target's own answers, with edits, are its predictions; in "rewriting" the prompts contain them too.
    """

    name: str
    prompts: tuple[Prompt, ...] = ()
    makes_copies: bool = False


def builtin_workload(name: str) -> Workload:
    """Return a workload of the table.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in NAMES:
        raise ConfigError(f"workload is {name!r}: use one of {', '.join(NAMES)}, or name a file with --prompts or --spec-bench")
    if name == RANDOM:
        return Workload(name)
    return Workload(name, tuple(read_prompts(Path(__file__).with_name(_FILES[name]))), makes_copies=name in (COPYING, REWRITING))
