"""Wrap paragraphs and list items of the pages at 120 columns: `python tools/wrap_pages.py [--write]`."""

import argparse
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
COLUMNS = 120
_ITEM = re.compile(r"(\s*)((?:[-*]|\d+\.) )")
_VERBATIM = re.compile(r"\s*(\||#|>|<!--|$)|    ")  # tables, headings, quotes, comments, empty lines, indented code
_MARKER = re.compile(r" (?=(?:[-*+>#]+|\d+[.)])(?: |$))")  # at the beginning of a line it would mean something


def pages() -> list[Path]:
    """Every page of the repository."""
    return [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]


def wrapped(text: str) -> str:
    """The same page with lines of at most 120 columns, where words allow it."""
    return "".join(f"{line}\n" for line in _lines(text.splitlines()))


def _lines(lines: Sequence[str]) -> Iterator[str]:
    paragraph: list[str] = []
    is_code = False
    for line in lines:
        is_fence = line.lstrip().startswith("```")
        if is_code or is_fence or (_VERBATIM.match(line) and not (paragraph and line.strip() and line.startswith("    "))):
            yield from _refilled(paragraph)
            paragraph = []
            yield line
            is_code ^= is_fence
            continue
        if _ITEM.match(line):
            yield from _refilled(paragraph)
            paragraph = []
        paragraph.append(line)
    yield from _refilled(paragraph)


def _refilled(paragraph: Sequence[str]) -> list[str]:
    """Lines of a paragraph or list item; one that fits already stays as it is."""
    if not paragraph or max(map(len, paragraph)) <= COLUMNS:
        return list(paragraph)
    item = _ITEM.match(paragraph[0])
    first = item[0] if item else re.match(r"\s*", paragraph[0])[0]  # type: ignore[index]
    text = " ".join(line.strip() for line in paragraph)[len(first.lstrip()) :]
    glued = _MARKER.sub("\0", text)
    options = {"break_long_words": False, "break_on_hyphens": False}
    filled = textwrap.wrap(glued, COLUMNS, initial_indent=first, subsequent_indent=" " * len(first), **options)  # type: ignore[arg-type]
    return [line.replace("\0", " ") for line in filled]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the pages; without it they are only named")
    write = parser.parse_args().write
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if wrapped(text) != text:
            print(page.relative_to(REPOSITORY))
            if write:
                page.write_text(wrapped(text), encoding="utf-8")


if __name__ == "__main__":
    main()
