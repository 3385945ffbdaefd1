"""What models are asked: a table of workloads, and prompts as token ids of the target."""

from dataclasses import dataclass
from pathlib import Path

from paceline.benchmarking.workloads.prompt_files import Prompt, read_prompts, read_spec_bench
from paceline.errors import ConfigError

__all__ = ["NAMES", "RANDOM", "REWRITING", "Prompt", "Workload", "of_file", "of_spec_bench", "own_workloads"]

COPYING = "copying"
REWRITING = "rewriting"
RANDOM = "random"
_FILES = {name: f"{name}.jsonl" for name in ("chat", "code", "arithmetic", "json", COPYING)} | {REWRITING: f"{COPYING}.jsonl"}
"""Prompts that lie beside this file, by workload."""
NAMES = (*_FILES, RANDOM)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one kind.

    Attributes:
        prompts: texts, messages or token ids; of the kind `RANDOM` there are none, they are drawn.
        makes_copies: the target's own answers, with edits, are its predictions; in "rewriting" they stand in the prompts too.
    """

    name: str
    prompts: tuple[Prompt, ...] = ()
    makes_copies: bool = False


def own_workloads(names: tuple[str, ...]) -> list[Workload]:
    """Those of the table, by name.

    Raises:
        ConfigError: one is unknown.
    """
    return [_own_workload(name) for name in dict.fromkeys(names)]


def of_file(path: Path) -> Workload:
    """The prompts of a user's file, as one workload with the file's name.

    Raises:
        ConfigError: it cannot be read, or a line is no prompt.
    """
    return Workload(path.stem, tuple(read_prompts(path)))


def of_spec_bench(path: Path) -> list[Workload]:
    """A file of questions in the form of Spec-Bench, one workload a category.

    Raises:
        ConfigError: it cannot be read, or a line is no question.
    """
    return [Workload(category, tuple(prompts)) for category, prompts in read_spec_bench(path).items()]


def _own_workload(name: str) -> Workload:
    if name not in NAMES:
        raise ConfigError(f"workload is {name!r}: use one of {', '.join(NAMES)}, or name a file with --prompts or --spec-bench")
    if name == RANDOM:
        return Workload(name)
    return Workload(name, tuple(read_prompts(Path(__file__).with_name(_FILES[name]))), makes_copies=name in (COPYING, REWRITING))
