"""The tools, which no other test runs, find what they are made of."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from draw_imports import REPOSITORY

TOOLS = sorted((REPOSITORY / "tools").glob("*.py"))
IMPORT_ALL = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"


def test_every_tool_imports_names_that_are_there() -> None:
    """Those that only foreign programs or torch bring are imported by the tools when they are used."""
    folders = [str(REPOSITORY / folder) for folder in ("tools", "tests", "src")]
    program = f"import sys; sys.path[:0] = {folders}; {IMPORT_ALL}"
    done = subprocess.run([sys.executable, "-c", program, *(path.stem for path in TOOLS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_modules_of_the_tests_that_a_tool_loads_by_name_are_there(tool: Path) -> None:
    names = re.findall(r'import_module\("([\w.]+)"\)', tool.read_text(encoding="utf-8"))
    foreign = {"gguf", "llama_cpp", "numpy", "torch", "transformers"}
    assert [name for name in names if name.split(".")[0] not in foreign and importlib.util.find_spec(name) is None] == []


def test_sanitized_kernels_are_compiled_as_those_of_a_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("sanitizers run on Linux only")
    import sanitize_kernels

    build: ModuleType = sys.modules["hatch_build"]
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    sanitize_kernels.build("clang", "thread", tmp_path)
    assert {*build.FLAGS, *build.POSIX_FLAGS} <= {*commands[0]}
