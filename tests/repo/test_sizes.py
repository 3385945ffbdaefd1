"""A file is one concept, a function is short, and their names say what they do.

No file is longer than 600 lines. One below 60 lines that a single other file imports is part of that file, unless it is an interface or
stands for a line of a table.
"""

import ast
import re
from itertools import chain
from pathlib import Path

from draw_imports import PACKAGE, REPOSITORY, imports, modules

MAX_LINES = 600
LEAST_LINES = 60
MAX_FUNCTION_LINES = 50
SAYS_NOTHING = re.compile(r"^(utils?|helpers?|common|core|misc)$|_(utils?|helpers?|new|old|legacy|v\d+)$")

TABLES = {
    "benchmarking.peers": "benchmarking.peers.__init__",
    "cli": "cli.__init__",
    "models.containers": "models.containers.table",
    "models.families": "models.families.table",
    "parsing.tool_calls": "parsing.registry",
    "training": "training.run",
}
"""Folders with a file for each line of a table, and where the table is: a file that nothing else imports may be as short as its format."""

STANDS_ALONE = {
    "speculation.draft_length.explain": "one of the four parts of its folder, beside what it prints; its importer is the public LLM",
}
"""Other short files with a single importer, and why they are not part of it."""


def _lines_of_files() -> dict[str, int]:
    """By dotted names below the package."""
    return {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()}


def _is_interface(path: Path) -> bool:
    """Whether a file defines protocols or abstract classes, and nothing else."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    defined = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, kinds)]
    bases = [{ast.unparse(base).split("[")[0] for base in getattr(node, "bases", ())} for node in defined]
    return bool(bases) and all(names & {"Protocol", "ABC"} for names in bases)


def _python_files() -> list[Path]:
    return sorted(chain.from_iterable((REPOSITORY / folder).rglob("*.py") for folder in ("src", "tests", "tools")))


def test_no_file_is_longer_than_600_lines() -> None:
    assert {name: count for name, count in _lines_of_files().items() if count > MAX_LINES} == {}


def test_a_short_file_with_a_single_importer_is_part_of_it() -> None:
    importers: dict[str, set[str]] = {}
    for one in imports():
        if one.internal and one.source != one.target:
            importers.setdefault(one.target, set()).add(one.source)
    short = {}
    for name, count in _lines_of_files().items():
        folder, _, own = name.rpartition(".")
        if own != "__init__" and count < LEAST_LINES and len(importers.get(name, ())) == 1 and not _is_interface(modules()[name]):
            (importer,) = importers[name]
            if TABLES.get(folder) != importer:
                short[name] = f"{count} lines, imported by {importer} alone: merge them, or say in STANDS_ALONE why it is a concept"
    assert {name: why for name, why in short.items() if name not in STANDS_ALONE} == {}
    assert sorted(STANDS_ALONE.keys() - short.keys()) == [], "no exception is needed here any more"


def test_no_function_is_longer_than_50_lines() -> None:
    long = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}: {num_lines} lines")
    assert long == []


def test_names_say_what_is_inside() -> None:
    names = {part for path in _python_files() for part in path.relative_to(REPOSITORY).with_suffix("").parts}
    assert sorted(name for name in names if SAYS_NOTHING.search(name)) == []


def test_nothing_is_left_open() -> None:
    marks = re.compile("|".join(["TO" + "DO", "FIX" + "ME", r"\bX" + r"XX\b", "Not" + "ImplementedError"]))
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}"
        for path in _python_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if marks.search(line)
    ]
    assert found == []
