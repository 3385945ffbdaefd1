"""Paths, machine facts and Markdown tables that the tools print."""

from collections.abc import Sequence
from typing import Any

from paceline.benchmarking.provenance import load_average, machine_facts
from page_blocks import REPOSITORY as REPOSITORY


def describe_machine() -> dict[str, Any]:
    """Return processor, usable cores, load, library versions and the commit."""
    return {**machine_facts(), "load_average": load_average()}


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return the rows under `head`, columns aligned."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def dict_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of dictionaries with the same keys."""
    return markdown_table(list(rows[0]), [list(row.values()) for row in rows])
