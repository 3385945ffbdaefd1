"""A result as a person reads it in the terminal."""

from itertools import groupby
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.benchmarking.benchmark import BenchResult
from paceline.benchmarking.modes import PLAIN
from paceline.benchmarking.report import wording
from paceline.benchmarking.results import Cell
from paceline.errors import printable

COLUMNS = ("mode", "tokens/s", "× plain", "tokens a step", "first token ms", "between tokens ms", "host", "GB/s", "repeats", "memory GB")


def report(result: BenchResult) -> Group:
    """A table for each workload and temperature, what failed, a summary, and the circumstances."""
    parts: list[Any] = []
    for (workload, temperature), cells in groupby(result.cells, key=lambda cell: (cell.workload, cell.temperature)):
        parts += [Text(printable(wording.cell_title(workload, temperature)), style="bold"), _table(list(cells)), Text()]
    parts += [Text.assemble(("failed: ", "bold red"), printable(line)) for line in wording.failures(result)]
    parts += [Text.assemble(("note: ", "yellow"), printable(notice)) for notice in result.measured.notices]
    if result.summaries:
        parts += [_summary(result), Text()]
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for name, value in wording.circumstances(result):
        facts.add_row(name, Text(printable(value)))
    return Group(*parts, facts, Text(), *(Text(note, style="dim") for note in wording.NOTES))


def _table(cells: list[Cell]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in COLUMNS:
        table.add_column(name, overflow="fold")
    for cell in cells:
        spread = cell.first_token_s
        values = (
            cell.mode,
            wording.speed(cell.tokens_per_s),
            wording.speedup(cell),
            wording.acceptance(cell),
            wording.milliseconds(None if spread is None else spread.median),
            wording.gaps(cell),
            wording.share(cell.host_share),
            wording.gigabytes(cell.bytes_per_s),
            wording.repeats(cell),
            wording.gigabytes(cell.peak_rss_bytes),
        )
        table.add_row(*(Text(printable(value)) for value in values), style=_style(cell))
    return table


def _style(cell: Cell) -> str:
    if cell.mode == PLAIN:
        return ""
    return "dim" if cell.speedup is None else "green" if cell.speedup.low is not None and cell.speedup.low > 1 else ""


def _summary(result: BenchResult) -> Table:
    table = Table(
        box=None, padding=(0, 2, 0, 0), header_style="dim", title="all workloads, geometric mean of × plain", title_justify="left"
    )
    table.title_style = "bold"
    for name in ("mode", "temperature", "× plain (lowest to highest)"):
        table.add_column(name)
    for summary in result.summaries:
        table.add_row(Text(printable(summary.mode)), f"{summary.temperature:g}", wording.summary_line(summary))
    return table
