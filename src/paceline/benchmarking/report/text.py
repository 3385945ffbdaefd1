"""A result as text: numbers and measurement conditions as text, and tables for the terminal."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.benchmarking.benchmark import BenchResult
from paceline.benchmarking.intervals import Quartiles, Ratio
from paceline.benchmarking.modes import PLAIN
from paceline.benchmarking.results import Cell, Summary
from paceline.errors import printable

UNKNOWN = "–"
NO_SPEEDUP = "-"
COLUMNS = ("mode", "tokens/s", "× plain", "tokens a step", "first token ms", "between tokens ms", "host", "GB/s", "repeats", "memory GB")


def speed(spread: Quartiles | None) -> str:
    """Format median and quartiles of tokens a second."""
    if spread is None:
        return UNKNOWN
    digits = 0 if spread.median >= 100 else 1
    return f"{spread.median:.{digits}f} ({spread.lower_quartile:.{digits}f} to {spread.upper_quartile:.{digits}f})"


def ratio(found: Ratio | None) -> str:
    """Format median and interval."""
    if found is None:
        return NO_SPEEDUP
    interval = "" if found.low is None or found.high is None else f" ({found.low:.2f} to {found.high:.2f})"
    return f"{found.median:.2f}{interval}"


def speedup(cell: Cell) -> str:
    """Format a cell's speedup, or `-` and the reason why there is none."""
    if cell.mode == PLAIN:
        return "1"
    return ratio(cell.speedup) if not cell.refusal else f"{NO_SPEEDUP} {cell.refusal}"


def milliseconds(seconds: float | None) -> str:
    """Format with three significant digits."""
    return UNKNOWN if seconds is None else f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


def gigabytes(value: float | None) -> str:
    """Format with three significant digits."""
    return UNKNOWN if value is None else f"{value / 1e9:.3g}"


def gaps(cell: Cell) -> str:
    """Format median and 95th percentile of the time between tokens, in milliseconds."""
    if cell.gap_s is None:
        return UNKNOWN
    return f"{milliseconds(cell.gap_s.median)} ({milliseconds(cell.gap_p95_s)})"


def cell_title(workload: str, temperature: float) -> str:
    """Return the title of a group of modes."""
    return f"{workload}, temperature {temperature:g}"


def summary_line(summary: Summary) -> str:
    """Format the summary of a mode over all workloads."""
    if summary.speedup is None:
        return f"{NO_SPEEDUP} (none of {summary.num_cells} workloads counts)"
    counted = f"{summary.num_counted} of {summary.num_cells} workloads count"
    return f"{summary.speedup:.2f} ({summary.lowest:.2f} to {summary.highest:.2f}; {counted})"


def measurement_conditions(result: BenchResult) -> Iterator[tuple[str, str]]:
    """Names and values of what numbers depend on."""
    size, machine, plan = result.measured.size, result.machine, result.plan
    yield "model", f"{result.model.shown}, {result.model.precision}"
    if result.draft_model is not None:
        yield "draft model", f"{result.draft_model.shown}, {result.draft_model.precision}"
    batch = "" if plan.batch_size == 1 else f", {plan.batch_size} requests at once"
    how_much = f"{size.rounds} rounds after one of warm-up; prompts a workload: {size.prompts}; tokens each: {size.tokens}"
    yield "measured", f"{how_much}{batch}; seed {plan.seed}"
    memory = machine["memory_bytes"]
    yield (
        "machine",
        f"{machine['cpu']}, {machine['cores']} cores ({' '.join(machine['flags'])}), {gigabytes(memory)} GB of memory, {machine['system']}",
    )
    library = next((str(facts["library"]) for facts in result.measured.facts.values() if "library" in facts), UNKNOWN)
    yield "library", f"{library}, {result.num_threads} threads"
    yield "read bandwidth", f"{gigabytes(result.bandwidth)} GB/s"
    yield "load average", f"{_load(result.load_before)} before, {_load(result.load_after)} after"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    others = [
        f"{facts.get('name')} {facts.get('version')}"
        for mode in result.measured.modes
        if not mode.is_own and mode.is_plain and (facts := result.measured.facts.get(mode.name))
    ]
    yield "versions", ", ".join([versions, *others])
    yield "commit", machine["commit"] or "not a checkout"
    yield "date", f"{result.date}, {result.seconds:.0f} s, {result.measured.ended}"
    yield "command", result.command


def _load(averages: tuple[float, float, float] | None) -> str:
    return UNKNOWN if averages is None else " ".join(f"{one:.2f}" for one in averages)


def failures(result: BenchResult) -> list[str]:
    return [
        failure.message if failure.workload is None else f"{failure.workload}, temperature {failure.temperature:g}: {failure.message}"
        for failure in result.measured.failures
    ]


NOTES = (
    "tokens/s: tokens after the first one over their time, medians over rounds (lower to upper quartile).",
    "× plain: our plain decoding in the same round; median over rounds (95 % bootstrap interval).",
    "tokens a step: emitted by steps of the target; plain decoding = 1.",
    "between tokens: moments at which tokens arrive, median (95th percentile); tokens that arrive together have one gap.",
    "host: share of the time outside of the kernels. GB/s: weights and cached rows the target's passes read.",
    "repeats: share of 8-token pieces that occurred before in the same output; above 30 % a cell is looping and has no speedup.",
)


def report(result: BenchResult) -> Group:
    """Return a table for each workload and temperature, failures, a summary, and the provenance."""
    parts: list[Any] = []
    for (workload, temperature), cells in groupby(result.cells, key=lambda cell: (cell.workload, cell.temperature)):
        parts += [Text(printable(cell_title(workload, temperature)), style="bold"), _table(list(cells)), Text()]
    parts += [Text.assemble(("failed: ", "bold red"), printable(line)) for line in failures(result)]
    parts += [Text.assemble(("note: ", "yellow"), printable(notice)) for notice in result.measured.notices]
    if result.summaries:
        parts += [_summary(result), Text()]
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for name, value in measurement_conditions(result):
        facts.add_row(name, Text(printable(value)))
    return Group(*parts, facts, Text(), *(Text(note, style="dim") for note in NOTES))


def markdown(result: BenchResult) -> str:
    """Return one Markdown table of all workloads, with failures and notices after it."""
    rows = [("model", "threads", "workload", *COLUMNS), ("---",) * (3 + len(COLUMNS))]
    model = f"{result.model.shown} {result.model.precision}"
    for cell in result.cells:
        rows.append((model, str(result.num_threads), cell_title(cell.workload, cell.temperature), *cell_values(cell)))
    lines = ["| " + " | ".join(printable(value).replace("|", "\\|") for value in row) + " |" for row in rows]
    return "\n".join([*lines, *(f"\n{printable(line)}" for line in (*failures(result), *result.measured.notices))])


def _table(cells: list[Cell]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in COLUMNS:
        table.add_column(name, overflow="fold")
    for cell in cells:
        table.add_row(*(Text(printable(value)) for value in cell_values(cell)), style=_style(cell))
    return table


def cell_values(cell: Cell) -> tuple[str, ...]:
    """Return the texts of `COLUMNS`."""
    spread = cell.first_token_s
    return (
        cell.mode,
        speed(cell.tokens_per_s),
        speedup(cell),
        UNKNOWN if cell.acceptance_length is None else f"{cell.acceptance_length:.2f}",
        milliseconds(None if spread is None else spread.median),
        gaps(cell),
        UNKNOWN if cell.host_share is None else f"{cell.host_share:.0%}",
        gigabytes(cell.bytes_per_s),
        f"{cell.repeat_share:.0%}{' looping' if cell.is_looping else ''}",
        gigabytes(cell.peak_rss_bytes),
    )


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
        table.add_row(Text(printable(summary.mode)), f"{summary.temperature:g}", summary_line(summary))
    return table
