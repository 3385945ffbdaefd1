"""The tools, which no other test runs, find what they are made of."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from draw_imports import REPOSITORY

TOOLS = sorted((REPOSITORY / "tools").glob("*.py"))
OURS = ("paceline", "harness", "hatch_build", *(tool.stem for tool in TOOLS))


@pytest.fixture(autouse=True)
def modules_of_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY)


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_modules_imported_by_tools_exist(tool: Path) -> None:
    """Of ours: what foreign programs and torch bring is imported where it is used."""
    source = tool.read_text(encoding="utf-8")
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module]
    wanted = {(str(node.module), alias.name) for node in statements for alias in node.names}
    wanted |= {(name, "__name__") for name in re.findall(r'import_module\("([\w.]+)"\)', source)}
    ours = [(module, name) for module, name in sorted(wanted) if module.split(".")[0] in OURS]
    assert [(module, name) for module, name in ours if not is_there(module, name)] == []


def is_there(module: str, name: str) -> bool:
    return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None


def test_sanitized_kernels_use_the_compiler_flags_of_wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("sanitizers run on Linux only")
    import sanitize_kernels

    build: ModuleType = importlib.import_module("hatch_build")
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    sanitize_kernels.build("clang", "thread", tmp_path)
    assert {*build.FLAGS, *build.POSIX_FLAGS} <= {*commands[0]}


def test_package_audit_without_network_prints_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import audit_packages

    def unreachable(*_: object, **__: object) -> None:
        raise OSError(None, "no route")

    monkeypatch.setattr(audit_packages.socket, "create_connection", unreachable)
    assert audit_packages.main() == 0
    assert capsys.readouterr().out.count("\n") == 1
    monkeypatch.setattr(audit_packages, "why_not", lambda: None)
    monkeypatch.setattr(audit_packages, "COMMAND", [sys.executable, "-c", "raise SystemExit(1)"])
    assert audit_packages.main() == 1, "a vulnerability fails the check"
