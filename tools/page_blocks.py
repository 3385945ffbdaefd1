"""Generated parts of pages, each between the comments `<!-- NAME:begin -->` and `<!-- NAME:end -->`."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def with_block(page: str, name: str, block: str) -> str:
    """Return the page with `block` between its markers.

    Raises:
        ValueError: a marker is missing.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin not in page or end not in page:
        raise ValueError(f"the page has no {begin} … {end}: put both lines where the block belongs")
    before, rest = page.split(begin, 1)
    return f"{before}{begin}\n{block}\n{end}{rest.split(end, 1)[1]}"


def with_blocks(page: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """Return the page with all of its generated blocks."""
    for name, make in blocks.items():
        page = with_block(page, name, make())
    return page


def run(path: Path, blocks: Mapping[str, Callable[[], str]], description: str) -> None:
    """Print the blocks, or with --write put them into the page."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--write", action="store_true", help=f"put the blocks into {path.name}")
    if parser.parse_args().write:
        path.write_text(with_blocks(path.read_text(encoding="utf-8"), blocks), encoding="utf-8")
    else:
        print("\n\n".join(make() for make in blocks.values()))
