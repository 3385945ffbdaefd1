"""Commands in the pages work as written, and no file in the tree is specific to one machine."""

import re
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draw_imports import PACKAGE, REPOSITORY
from paceline.cli import app

FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
# in two halves, so that this file does not hold what it looks for
MACHINE_PATHS = ["/wo" + "rk/", "/tm" + "p/", "/ro" + "ot/", "/ho" + "me/"]
REGISTRIES = ["pypi" + ".org", "download." + "pytorch", "index" + "-url", "find" + "-links"]
VOCABULARY_FILES = {"tokenizer.json"}  # a vocabulary holds any words
MAX_CORPUS_BYTES = 4_000_000


def _page(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def _pages() -> list[str]:
    return [str(path.relative_to(REPOSITORY)) for path in [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]]


def _code_blocks(page: str) -> str:
    return "\n".join(FENCED.findall(page))


@cache
def _help(*command: str) -> str:
    done = CliRunner().invoke(app, [*command, "--help-all"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == 0, f"paceline {' '.join(command)} --help-all: {done.output}"
    return done.stdout


def _project_files() -> list[Path]:
    """Tracked files, and those that would be with `git add`."""
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("not a git checkout: the project's files cannot be told from others")
    return [path for name in done.stdout.split("\0") if name and (path := REPOSITORY / name).is_file()]


def test_readme_names_make_demo_and_make_test() -> None:
    commands = _code_blocks(_page("README.md"))
    assert re.search(r"^\s*make demo\b", commands, re.MULTILINE)
    assert re.search(r"^\s*make test\b", commands, re.MULTILINE)


@pytest.mark.parametrize("page", _pages())
def test_make_targets_named_by_pages_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", _page("Makefile"), re.MULTILINE))
    text = _page(page)
    code = _code_blocks(text) + "\n" + "\n".join(re.findall(r"`(make [^`\n]*)`", text))
    assert set(re.findall(r"^\s*make ([a-z][a-z-]*)", code, re.MULTILINE)) - targets == set()


@pytest.mark.parametrize("page", _pages())
def test_commands_and_options_named_by_pages_exist(page: str) -> None:
    for command, rest in re.findall(r"^\s*(?:\.venv/bin/)?paceline ([a-z]+)((?:[^\n\\]|\\\n)*)", _code_blocks(_page(page)), re.MULTILINE):
        assert re.search(rf"\b{command}\b", _help()), f"paceline {command}"
        options = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", re.sub(r"\"[^\"]*\"|'[^']*'|#.*", "", rest)))
        unknown = {option for option in options if not re.search(rf"{option}(?![a-z-])", _help(command))}
        assert unknown == set(), f"paceline {command}"


@pytest.mark.parametrize("page", _pages())
def test_extras_named_by_pages_exist(page: str) -> None:
    declared = set(metadata.metadata("paceline").get_all("Provides-Extra") or [])
    assert set(re.findall(r"'(?:\.|paceline)\[(\w+)\]'", _page(page))) <= declared


@pytest.mark.parametrize("page", _pages())
def test_links_between_pages_lead_to_files(page: str) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", _page(page))
    assert [link for link in links if not (REPOSITORY / page).parent.joinpath(link).exists()] == []


def test_code_map_of_the_architecture_page_lists_the_package() -> None:
    """The map is the code block that starts with `src/paceline/`: one entry a line, then two spaces and what it is."""
    blocks = [block.splitlines() for block in FENCED.findall(_page("ARCHITECTURE.md"))]
    maps = [lines[1:] for lines in blocks if lines and lines[0].split("  ")[0].strip() == "src/paceline/"]
    assert len(maps) == 1, "ARCHITECTURE.md needs one code block that starts with src/paceline/"
    indent = min(len(line) - len(line.lstrip()) for line in maps[0] if line.strip())
    listed = {re.split(r"\s{2,}", line.strip())[0] for line in maps[0] if line.strip() and len(line) - len(line.lstrip()) == indent}
    real = {f"{path.name}/" if path.is_dir() else path.name for path in PACKAGE.iterdir()}
    assert listed == {name for name in real if not name.startswith(("_", ".", "py.typed"))}


@pytest.mark.parametrize("word", MACHINE_PATHS + REGISTRIES)
def test_repository_files_contain_no_machine_path_or_private_registry(word: str) -> None:
    found = []
    for path in _project_files():
        if path.name in VOCABULARY_FILES or path.stat().st_size > MAX_CORPUS_BYTES:
            continue
        content = path.read_bytes()
        if b"\0" not in content[:8192] and word.encode() in content:
            found.append(str(path.relative_to(REPOSITORY)))
    assert found == []
