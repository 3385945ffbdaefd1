"""Files and functions are small, and their names say what they do."""

import ast
import re
from itertools import chain
from pathlib import Path
from statistics import median, quantiles

from draw_imports import PACKAGE, REPOSITORY

MAX_LINES = 600
MAX_LINES_P90 = 300
MAX_LINES_MEDIAN = 150
MAX_FUNCTION_LINES = 50
SAYS_NOTHING = re.compile(r"^(utils?|helpers?|common|core|misc)$|_(utils?|helpers?|new|old|legacy|v\d+)$")


def _lines_of_files() -> dict[str, int]:
    counts = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    return {name: count for name, count in counts.items() if count > 0}


def _python_files() -> list[Path]:
    return sorted(chain.from_iterable((REPOSITORY / folder).rglob("*.py") for folder in ("src", "tests", "tools")))


def test_no_file_is_longer_than_600_lines() -> None:
    assert {name: count for name, count in _lines_of_files().items() if count > MAX_LINES} == {}


def test_nine_files_in_ten_have_at_most_300_lines() -> None:
    assert quantiles(_lines_of_files().values(), n=10, method="inclusive")[-1] <= MAX_LINES_P90


def test_half_of_the_files_have_at_most_150_lines() -> None:
    assert median(_lines_of_files().values()) <= MAX_LINES_MEDIAN


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
