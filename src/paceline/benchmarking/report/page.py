"""A result as one HTML page with SVG charts, without scripts or other files; light or dark as the reader's system is."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from pathlib import Path

from paceline.benchmarking.benchmark import BenchResult
from paceline.benchmarking.modes import PLAIN
from paceline.benchmarking.report import text
from paceline.benchmarking.results import Cell
from paceline.errors import printable

WIDTH = 470
LEFT, RIGHT = 126, 84
ROW = 22
NUM_TONES = 8
COLUMNS = (*text.COLUMNS[:3], "× plain, whole requests", *text.COLUMNS[3:6], "passes", *text.COLUMNS[6:])
Tones = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a chart.

    Attributes:
        value: None = there is none, and `note` has the reason.
        low, high: of its interval.
        tone: CSS class of its colour.
    """

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""
    tone: str = "mode-0"


def bars(title: str, rows: Sequence[Bar], *, mark: float | None = None) -> str:
    """Draw horizontal bars from zero.

    Args:
        title: for screen readers.
        mark: value of a reference line.
    """
    most = max([bar.high or bar.value or 0.0 for bar in rows] + [mark or 0.0, 1e-9]) * 1.05
    height = ROW * len(rows) + 24
    scale = (WIDTH - LEFT - RIGHT) / most
    parts = [_opening(title, height)]
    for step in _ticks(most):
        x = LEFT + scale * step
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 20}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height - 6}" text-anchor="middle">{step:g}</text>')
    if mark is not None:
        x = LEFT + scale * mark
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 20}"/>')
    for index, bar in enumerate(rows):
        parts.append(_bar(bar, ROW * index, scale))
    return "".join([*parts, "</svg>"])


def _bar(bar: Bar, top: float, scale: float) -> str:
    middle = top + ROW / 2
    label = f'<text class="label" x="{LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(_short(bar.label))}</text>'
    if bar.value is None:
        return label + f'<text class="note" x="{LEFT + 6}" y="{middle + 4:.1f}">{escape(_short(bar.note, 60))}</text>'
    width = scale * bar.value
    shape = f'<rect class="{escape(bar.tone)}" x="{LEFT}" y="{top + 4:.1f}" width="{width:.1f}" height="{ROW - 8}" rx="2"/>'
    end = LEFT + width
    if bar.low is not None and bar.high is not None:
        low, high = LEFT + scale * bar.low, LEFT + scale * bar.high
        shape += (
            f'<path class="whisker" d="M{low:.1f} {middle:.1f}H{high:.1f}M{low:.1f} {middle - 4:.1f}v8M{high:.1f} {middle - 4:.1f}v8"/>'
        )
        end = max(end, high)
    return label + shape + f'<text class="value" x="{end + 6:.1f}" y="{middle + 4:.1f}">{escape(bar.note)}</text>'


def lines(title: str, series: Sequence[tuple[str, str, Sequence[float]]], *, mark: float | None = None) -> str:
    """Values by round, a line for each name.

    Args:
        series: name, CSS class and values of each.
        mark: value of a reference line.
    """
    height = 180
    most = max([value for _, _, values in series for value in values] + [mark or 0.0, 1e-9]) * 1.08
    longest = max((len(values) for _, _, values in series), default=1)
    scale, step = (height - 30) / most, (WIDTH - 70) / max(1, longest - 1)
    parts = [_opening(title, height)]
    for tick in _ticks(most):
        y = height - 20 - scale * tick
        parts.append(f'<line class="grid" x1="40" x2="{WIDTH - 24}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="34" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    if mark is not None:
        y = height - 20 - scale * mark
        parts.append(f'<line class="mark" x1="40" x2="{WIDTH - 24}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for number in range(longest):
        parts.append(f'<text class="tick" x="{40 + step * number:.1f}" y="{height - 4}" text-anchor="middle">{number + 1}</text>')
    for _, tone, values in series:
        points = [(40 + step * index, height - 20 - scale * value) for index, value in enumerate(values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="line {escape(tone)}" points="{path}"/>')
        parts += [f'<circle class="{escape(tone)}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]
    return "".join([*parts, "</svg>"])


def _opening(title: str, height: float) -> str:
    shown = escape(title)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{shown}" xmlns="http://www.w3.org/2000/svg"><title>{shown}</title>'
    )


def _ticks(most: float) -> list[float]:
    """Return at most seven round numbers from zero on."""
    unit = 10.0 ** math.floor(math.log10(most))
    step = next(unit * part for part in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if most / (unit * part) <= 6)
    return [step * index for index in range(int(most / step) + 1)]


def _short(text: str, most: int = 21) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def write_charts(result: BenchResult, directory: Path) -> list[Path]:
    """Write two SVG files for each temperature, speedups and tokens a second; create the directory.

    Raises:
        OSError: a file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tones, written = _tones(result), []
    for temperature in dict.fromkeys(cell.temperature for cell in result.cells):
        cells = [cell for cell in result.cells if cell.temperature == temperature]
        speeds = [replace(_speed_bar(cell, tones), label=f"{cell.workload} {cell.mode}") for cell in cells]
        ratios = [_speedup_bar(cell, tones) for cell in cells if cell.mode != PLAIN]
        for name, title, rows, mark in (("speedup", "× plain", ratios, 1.0), ("tokens_per_s", "tokens a second", speeds, None)):
            path = directory / f"{name}-t{temperature:g}.svg"
            chart = bars(f"{printable(result.model.shown)}: {title}, temperature {temperature:g}", rows, mark=mark)
            path.write_text(chart.replace("</title>", f"</title><style>{_styles()}</style>", 1), encoding="utf-8")
            written.append(path)
    return written


def _tones(result: BenchResult) -> Tones:
    return {mode.name: f"mode-{index % NUM_TONES}" for index, mode in enumerate(result.measured.modes)}


def _styles() -> str:
    colours = "".join(
        f".mode-{index}{{fill:var(--tone-{index});stroke:var(--tone-{index})}}.tone-{index}{{background:var(--tone-{index})}}"
        for index in range(NUM_TONES)
    )
    return f"{Path(__file__).with_name('page.css').read_text(encoding='utf-8')}{colours}svg .line{{fill:none}}"


def page(result: BenchResult) -> str:
    tones = _tones(result)
    name = _text(result.model.shown)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>paceline bench: {name}</title><style>{_styles()}</style></head><body><main>",
        f"<h1>{name}: plain decoding and speculation</h1>",
        *_failures(result),
        *_overview(result, tones),
    ]
    for (workload, temperature), cells in groupby(result.cells, key=lambda cell: (cell.workload, cell.temperature)):
        parts.append(_cells(text.cell_title(workload, temperature), list(cells), tones))
    parts.append("<section><h2>Circumstances</h2><dl>")
    parts += [f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in text.measurement_conditions(result)]
    parts.append("</dl></section><section><h2>What the columns are</h2>")
    parts += [f'<p class="muted">{_text(note)}</p>' for note in text.NOTES]
    return "".join([*parts, "</section></main></body></html>\n"])


def _failures(result: BenchResult) -> Iterator[str]:
    found = [f'<p class="fault">failed: {_text(line)}</p>' for line in text.failures(result)]
    found += [f'<p class="muted">{_text(notice)}</p>' for notice in result.measured.notices]
    if result.measured.ended != "complete":
        found.append(f'<p class="fault">{_text(result.measured.ended)}: these are the numbers until then.</p>')
    if found:
        yield f"<section>{''.join(found)}</section>"


def _overview(result: BenchResult, tones: Tones) -> Iterator[str]:
    for temperature, own in groupby(result.summaries, key=lambda summary: summary.temperature):
        rows = [
            Bar(
                summary.mode,
                summary.speedup,
                summary.lowest,
                summary.highest,
                text.summary_line(summary)
                if summary.speedup is None
                else f"{summary.speedup:.2f} ({summary.num_counted} of {summary.num_cells})",
                tones[summary.mode],
            )
            for summary in own
        ]
        title = f"All workloads, temperature {temperature:g}: × plain"
        yield (
            f'<section><h2>{title}</h2><div class="chart">{bars(title, rows, mark=1.0)}</div>'
            '<p class="muted">Geometric mean over those workloads that count (how many of all); the whisker goes from the lowest to the '
            "highest.</p></section>"
        )


def _cells(title: str, cells: Sequence[Cell], tones: Tones) -> str:
    speeds = [_speed_bar(cell, tones) for cell in cells]
    rounds = [(cell.mode, tones[cell.mode], cell.speedup.pairs) for cell in cells if cell.speedup is not None]
    parts = [f'<section><h2>{_text(title)}</h2><div class="chart">{bars(f"{title}: tokens a second", speeds)}</div>']
    if any(len(pairs) > 1 for _, _, pairs in rounds):
        legend = "".join(f'<li><i class="{tone.replace("mode", "tone")}"></i>{_text(name)}</li>' for name, tone, _ in rounds)
        chart = lines(f"{title}: times plain, round by round", rounds, mark=1.0)
        parts.append(f'<p class="muted">× plain, round by round</p><ul class="legend">{legend}</ul><div class="chart">{chart}</div>')
    parts.append(f'<div class="scroll"><table><thead><tr>{"".join(f"<th>{name}</th>" for name in COLUMNS)}</tr></thead><tbody>')
    parts += [_row(cell) for cell in cells]
    return "".join([*parts, "</tbody></table></div></section>"])


def _speed_bar(cell: Cell, tones: Tones) -> Bar:
    spread = cell.tokens_per_s
    if spread is None:
        return Bar(cell.mode, None, note=cell.refusal or "no whole round was measured", tone=tones[cell.mode])
    note = f"{spread.median:.1f}" if spread.median < 100 else f"{spread.median:.0f}"
    note += " looping" if cell.is_looping else ""
    return Bar(cell.mode, spread.median, spread.lower_quartile, spread.upper_quartile, note, tones[cell.mode])


def _speedup_bar(cell: Cell, tones: Tones) -> Bar:
    label, found = f"{cell.workload} {cell.mode}", cell.speedup
    if found is None:
        return Bar(label, None, note=cell.refusal, tone=tones[cell.mode])
    return Bar(label, found.median, found.low, found.high, f"{found.median:.2f}", tones[cell.mode])


def _row(cell: Cell) -> str:
    whole = "1" if cell.mode == PLAIN else text.NO_SPEEDUP if cell.refusal else text.ratio(cell.request_ratio)
    passes = text.UNKNOWN if cell.passes is None else str(cell.passes)
    mode, *shared = text.cell_values(cell)
    values = [*shared[:2], whole, *shared[2:5], passes, *shared[5:]]
    refused = ' class="refused"' if cell.refusal else ""
    numbers = "".join(
        f'<td class="{"reason" if index == 1 and cell.refusal else "number"}">{_text(value)}</td>' for index, value in enumerate(values)
    )
    return f"<tr{refused}><td>{_text(mode)}</td>{numbers}</tr>"


def _text(value: object) -> str:
    """Escape a value for HTML, because names come from files and users."""
    return escape(printable(str(value)))
