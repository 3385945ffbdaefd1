"""The pages' text is at most 120 columns wide, and wrapping it changes nothing but line ends."""

import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from wrap_pages import COLUMNS, pages, wrapped

MARKDOWN = MarkdownIt("commonmark").enable("table")


def words(page: str) -> str:
    """What a reader is shown, with one kind of space."""
    return re.sub(r"\s+", " ", MARKDOWN.render(page))


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.name)
def test_wrap_pages_changes_line_breaks_only(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    again = wrapped(text)
    assert words(again) == words(text)
    assert wrapped(again) == again


def test_wrap_pages_starts_no_line_with_markdown_markup() -> None:
    for sign in ("-", "*", "+", ">", "#", "##", "3."):
        text = f"- {'x' * (COLUMNS - 4)} {sign} and on\n"
        assert not any(line.strip().startswith(sign + " ") for line in wrapped(text).splitlines()[1:])
        assert words(wrapped(text)) == words(text)


def test_documentation_pages_are_wrapped() -> None:
    assert [page.name for page in pages() if wrapped(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")] == []
