"""Draw in ARCHITECTURE.md which part of paceline imports which: `python tools/draw_imports.py [--write]`."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from page_blocks import REPOSITORY, run

PAGE = REPOSITORY / "ARCHITECTURE.md"
PACKAGE = REPOSITORY / "src" / "paceline"
EVERYWHERE = "errors"  # imported by all: its arrows would hide the others


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement's one name.

    Attributes:
        source: dotted name of the importing file below `paceline`; a package's own file is `<package>.__init__`.
        target: the same for a file of paceline; for another library its full dotted name.
        internal: the target is a file of paceline.
        at_import: runs when the file is imported (not inside a function, not under TYPE_CHECKING).
        line: where it stands.
    """

    source: str
    target: str
    internal: bool
    at_import: bool
    line: int

    @property
    def source_part(self) -> str:
        return self.source.split(".")[0]

    @property
    def target_part(self) -> str:
        return self.target.split(".")[0]


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Dotted name below the package of every file in it."""
    return {".".join(path.relative_to(package).with_suffix("").parts): path for path in sorted(package.rglob("*.py"))}


@cache
def imports(package: Path = PACKAGE) -> list[Import]:
    """Every import of every file, those inside functions included."""
    files = modules(package)
    found = []
    for source, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for node, at_import in _import_statements(tree, at_import=True):
            for name in _imported_names(node):
                internal = name.split(".")[0] == package.name
                target = _file_of(name.split(".")[1:], files) if internal else name
                found.append(Import(source, target, internal, at_import, node.lineno))
    return found


def graph(package: Path = PACKAGE) -> str:
    """The mermaid block: one node per file or folder directly in the package, one arrow per real import."""
    parts = {name.split(".")[0] for name in modules(package)} - {"__init__", EVERYWHERE}
    arrows = {
        (found.source_part, found.target_part)
        for found in imports(package)
        if found.internal and found.source_part != found.target_part and {found.source_part, found.target_part} <= parts
    }
    alone = parts - {end for arrow in arrows for end in arrow}
    lines = [f"    {part}" for part in sorted(alone)] + [f"    {source} --> {target}" for source, target in sorted(arrows)]
    return "\n".join(["```mermaid", "graph TD", *lines, "```"])


BLOCKS = {"imports": graph}


def _import_statements(tree: ast.AST, *, at_import: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, at_import
        elif not isinstance(node, ast.expr):  # which contain none, and are most nodes
            deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(node)
            yield from _import_statements(node, at_import=at_import and not deferred)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def _imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.level:
        raise ValueError(f"line {node.lineno}: a relative import; write it from `paceline` on")
    return [f"{node.module}.{alias.name}" for alias in node.names]


def _file_of(parts: list[str], files: dict[str, Path]) -> str:
    """The file that defines a dotted name: the longest prefix that is one."""
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in files:
            return name
        if f"{name}.__init__" in files:
            return f"{name}.__init__"
    return "__init__"


if __name__ == "__main__":
    run(PAGE, BLOCKS, __doc__ or "")
