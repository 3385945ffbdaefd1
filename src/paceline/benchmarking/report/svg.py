"""Charts as SVG text: bars with intervals, and how a mode went from round to round. Colours are the page's own (CSS variables)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 470
LEFT, RIGHT = 126, 84
ROW = 22


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Attributes:
        value: None = there is none, and `note` says why.
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
    """Horizontal bars from zero.

    Args:
        title: read out where the picture is not seen.
        mark: a value at which a line stands.
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
        mark: a value at which a line stands.
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
    """At most seven round numbers from zero on."""
    unit = 10.0 ** math.floor(math.log10(most))
    step = next(unit * part for part in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if most / (unit * part) <= 6)
    return [step * index for index in range(int(most / step) + 1)]


def _short(text: str, most: int = 21) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
