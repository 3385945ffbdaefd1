"""Only one place defines the supported Python versions: `requires-python` in pyproject.toml."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from draw_imports import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
PAGES = ["README.md", "CONTRIBUTING.md", "Makefile", *(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").glob("*.md"))]
CLASSIFIER = "Programming Language :: Python :: 3."


def min_minor() -> int:
    found = re.fullmatch(r">=3\.(\d+)", PROJECT["project"]["requires-python"])
    assert found is not None
    return int(found[1])


def promised_minors(page: str) -> set[int]:
    """Of phrases such as "Python 3.11 or later" and "Python from 3.11 on"."""
    text = " ".join((REPOSITORY / page).read_text(encoding="utf-8").split())
    return {int(minor) for minor in re.findall(r"Python (?:from )?3\.(\d+) (?:or later|on|and later|or newer)\b", text)}


def test_pages_name_the_oldest_supported_python_version() -> None:
    assert {page: found for page in PAGES if not (found := promised_minors(page)) <= {min_minor()}} == {}
    assert promised_minors("README.md") == {min_minor()}


def test_python_classifiers_begin_with_the_oldest_supported_version() -> None:
    minors = [int(one.removeprefix(CLASSIFIER)) for one in PROJECT["project"]["classifiers"] if one.startswith(CLASSIFIER)]
    assert minors == list(range(min_minor(), min_minor() + len(minors)))


def test_ruff_targets_the_oldest_supported_python_version() -> None:
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py3{min_minor()}"


@pytest.mark.parametrize(("version", "is_refused"), [((2, 7), True), ((3, 9), True), ((3, -1), True), ((3, 0), False), ((3, 1), False)])
def test_make_refuses_unsupported_python_versions(version: tuple[int, int], is_refused: bool, tmp_path: Path) -> None:
    """A second number of -1 to 1 is counted from the oldest minor version."""
    major, minor = version
    minor = minor if minor > 1 else min_minor() + minor
    program = f"import sys; sys.version_info = ({major}, {minor}, 0); exec(sys.argv[1])"
    check = subprocess.run(
        ["make", "--just-print", "--always-make", "PYTHON=PYTHON", "all"], cwd=REPOSITORY, capture_output=True, text=True
    )
    command = next(line for line in check.stdout.splitlines() if line.startswith("PYTHON -c 'import sys; sys.exit"))
    done = subprocess.run([sys.executable, "-c", program, command.split("'")[1]], capture_output=True, text=True, check=False)
    assert (done.returncode != 0, f"needs Python 3.{min_minor()} or later" in done.stderr) == (is_refused, is_refused)
