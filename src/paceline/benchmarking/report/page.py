"""A result as one page of HTML that needs nothing else: no script, no file beside it, light and dark as the reader's system is."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from paceline.benchmarking.benchmark import BenchResult, shown_modes
from paceline.benchmarking.modes import PLAIN
from paceline.benchmarking.report import wording
from paceline.benchmarking.report.svg import Bar, bars, lines
from paceline.benchmarking.results import Cell
from paceline.errors import printable

NUM_TONES = 8
COLUMNS = [
    *("mode", "tokens/s", "× plain", "× plain, whole requests", "tokens a step", "first token ms", "between tokens ms", "passes"),
    *("host", "GB/s", "repeats", "memory GB"),
]
Tones = Mapping[str, str]


def write_page(result: BenchResult, path: Path) -> None:
    """Write it.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(page(result), encoding="utf-8")


def page(result: BenchResult) -> str:
    """The page's text."""
    tones = {name: f"mode-{index % NUM_TONES}" for index, name in enumerate(shown_modes(result))}
    styles = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    colours = "".join(
        f".mode-{index}{{fill:var(--tone-{index});stroke:var(--tone-{index})}}.tone-{index}{{background:var(--tone-{index})}}"
        for index in range(NUM_TONES)
    )
    name = _text(result.model.shown)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>paceline bench: {name}</title><style>{styles}{colours}svg .line{{fill:none}}</style></head><body><main>",
        f"<h1>{name}: plain decoding and speculation</h1>",
        *_troubles(result),
        *_overview(result, tones),
    ]
    for (workload, temperature), cells in groupby(result.cells, key=lambda cell: (cell.workload, cell.temperature)):
        parts.append(_cells(wording.cell_title(workload, temperature), list(cells), tones))
    parts.append("<section><h2>Circumstances</h2><dl>")
    parts += [f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in wording.circumstances(result)]
    parts.append("</dl></section><section><h2>What the columns are</h2>")
    parts += [f'<p class="muted">{_text(note)}</p>' for note in wording.NOTES]
    return "".join([*parts, "</section></main></body></html>\n"])


def _troubles(result: BenchResult) -> Iterator[str]:
    found = [f'<p class="fault">failed: {_text(line)}</p>' for line in wording.failures(result)]
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
                wording.summary_line(summary)
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
    return Bar(cell.mode, spread.median, spread.low, spread.high, note, tones[cell.mode])


def _row(cell: Cell) -> str:
    whole = "1" if cell.mode == PLAIN else wording.NO_SPEEDUP if cell.refusal else wording.ratio(cell.request_ratio)
    values = [
        wording.speed(cell.tokens_per_s),
        wording.speedup(cell),
        whole,
        wording.acceptance(cell),
        wording.milliseconds(None if cell.first_token_s is None else cell.first_token_s.median),
        wording.gaps(cell),
        wording.UNKNOWN if cell.passes is None else str(cell.passes),
        wording.share(cell.host_share),
        wording.gigabytes(cell.bytes_per_s),
        wording.repeats(cell),
        wording.gigabytes(cell.peak_rss_bytes),
    ]
    refused = ' class="refused"' if cell.refusal else ""
    numbers = "".join(
        f'<td class="{"reason" if index == 1 and cell.refusal else "number"}">{_text(value)}</td>' for index, value in enumerate(values)
    )
    return f"<tr{refused}><td>{_text(cell.mode)}</td>{numbers}</tr>"


def _text(value: object) -> str:
    """As text of the page: names come from files and from users."""
    return escape(printable(str(value)))
