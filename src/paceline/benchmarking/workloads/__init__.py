"""Workloads: a table of prompts that come with the package, and prompts from a user's files."""

from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, shortened
from paceline.prompt_file import PromptLine, json_objects, read_prompts

COPYING = "copying"
REWRITING = "rewriting"
RANDOM = "random"
_FILES = {name: f"{name}.jsonl" for name in ("chat", "code", "arithmetic", "json", COPYING)} | {REWRITING: f"{COPYING}.jsonl"}
"""Files of prompts in this directory, by workload."""
NAMES = (*_FILES, RANDOM)


def read_spec_bench(path: Path) -> dict[str, list[PromptLine]]:
    """Prompts by category: of each question the first turn, as a message; later turns would depend on the answers.

    Raises:
        ConfigError: there is no such file, a line is no question, or there is no line.

    Source: Spec-Bench (Xia et al. 2024, arXiv:2401.07851), its file question.jsonl: question_id, category, turns.
    """
    categories: dict[str, list[PromptLine]] = {}
    for number, fields in json_objects(path):
        category, turns = fields.get("category"), fields.get("turns")
        where = f"line {number} of {path}"
        if "question_id" not in fields:
            raise ConfigError(f"{where} has no question_id: give lines with question_id, category and turns, as Spec-Bench does")
        if not isinstance(category, str) or not category:
            raise ConfigError(f"{where}: category is {shortened(category)}: give a text that is not empty")
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ConfigError(f"{where}: turns is {shortened(turns)}: give a list of texts, at least one")
        categories.setdefault(category, []).append(PromptLine(messages=({"role": "user", "content": turns[0]},)))
    if not categories:
        raise ConfigError(f"{path} holds no question: give lines with question_id, category and turns, as Spec-Bench does")
    return categories


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one kind.

    Attributes:
        prompts: texts, messages or token ids; of the kind `RANDOM` there are none, they are drawn.
        makes_copies: the target's own answers, with edits, are its predictions; in "rewriting" the prompts contain them too.
    """

    name: str
    prompts: tuple[PromptLine, ...] = ()
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
