"""The pictures of ARCHITECTURE.md show calls that are there, and its pages name files that are there."""

import re

import pytest

from draw_imports import PACKAGE, REPOSITORY

PAGE = (REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8")
NODE = r'(\w+)(?:\["([^"]+)"\])?'
ARROW = re.compile(rf'^    {NODE} -->\|"(?:\d )?(\w+)"\| {NODE}$')


def _arrows(name: str) -> list[tuple[str, str, str]]:
    """(calling file, function, file that has it) of a picture."""
    block = PAGE.split(f"<!-- {name}:begin -->", 1)[1].split(f"<!-- {name}:end -->", 1)[0]
    files: dict[str, str] = {}
    arrows = []
    for line in block.strip().splitlines()[2:-1]:
        found = ARROW.match(line)
        assert found, line
        source, source_file, function, target, target_file = found.groups()
        files |= {node: file for node, file in ((source, source_file), (target, target_file)) if file}
        arrows.append((files[source], function, files[target]))
    return arrows


ARROWS = [*_arrows("data"), *_arrows("opening")]


@pytest.mark.parametrize(("source", "function", "target"), ARROWS, ids=[" ".join(arrow) for arrow in ARROWS])
def test_each_call_in_the_architecture_figure_exists_in_the_code(source: str, function: str, target: str) -> None:
    assert re.search(rf"\b{function}\(", (PACKAGE / source).read_text(encoding="utf-8")), f"{source} calls no {function}"
    places = sorted(PACKAGE.glob(target)) + sorted(PACKAGE.glob(f"{target}/*.py"))
    defined = re.compile(rf"^(?:\s*(?:async )?def|void) {function}\(", re.MULTILINE)
    assert any(defined.search(place.read_text(encoding="utf-8")) for place in places if place.is_file()), f"{target} has no {function}"


def test_architecture_figure_contains_more_than_25_calls() -> None:
    assert len(ARROWS) > 25


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/dev/decisions.md", "docs/dev/kernels.md"])
def test_files_named_by_a_developer_page_exist(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([\w/*{},.]+\.(?:py|c|h|md))`", text) if "{" not in name and "*" not in name}
    known = [str(path) for folder in ("src", "tests", "tools", "docs") for path in (REPOSITORY / folder).rglob("*")]
    known += [str(path) for path in REPOSITORY.glob("*.*")]
    assert sorted(name for name in named if not any(one.endswith(f"/{name}") for one in known)) == []
