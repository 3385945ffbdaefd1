"""A result as PNG pictures, drawn by matplotlib, which is an extra."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from paceline.benchmarking.benchmark import BenchResult, shown_modes
from paceline.benchmarking.modes import PLAIN
from paceline.benchmarking.results import Cell
from paceline.errors import BackendUnavailableError, printable
from paceline.installation import install_extra


def check_plots() -> None:
    """Check that pictures can be drawn.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BackendUnavailableError(f"--plots needs matplotlib: {install_extra('bench')}") from error


def write_plots(result: BenchResult, directory: Path) -> list[Path]:
    """Two pictures for each temperature, speedups and tokens a second; the folder is made.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
        OSError: they cannot be written.
    """
    check_plots()
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    by_temperature = sorted(result.cells, key=lambda cell: cell.temperature)
    for temperature, cells in groupby(by_temperature, key=lambda cell: cell.temperature):
        own = list(cells)
        for name, kind in (("speedup", "× plain (95 % interval)"), ("tokens_per_s", "tokens/s (quartiles)")):
            path = directory / f"{name}-t{temperature:g}.png"
            _draw(result, own, name, f"{kind}, temperature {temperature:g}", path)
            written.append(path)
    return written


def _draw(result: BenchResult, cells: Sequence[Cell], name: str, title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window system is asked for
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(cell.workload for cell in cells))
    modes = [mode for mode in shown_modes(result) if (mode != PLAIN or name != "speedup") and any(cell.mode == mode for cell in cells)]
    figure = Figure(figsize=(max(6.0, 1.5 * len(workloads)), 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.8 / max(1, len(modes))
    for index, mode in enumerate(modes):
        _bars(axes, [cell for cell in cells if cell.mode == mode], workloads, index, width, name)
    if name == "speedup":
        axes.axhline(1.0, color="grey", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(workloads)), [printable(workload) for workload in workloads], rotation=20 if len(workloads) > 6 else 0)
    axes.set_title(_plain(f"{result.model.shown}: {title}"), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if modes:
        axes.legend(fontsize=8, frameon=False, ncols=min(4, len(modes)))
    figure.savefig(path)


def _bars(axes: Any, cells: Sequence[Cell], workloads: Sequence[str], index: int, width: float, name: str) -> None:
    """One mode's bar of each workload in which it has a value."""
    places, values, below, above = [], [], [], []
    for cell in cells:
        found = cell.speedup if name == "speedup" else cell.tokens_per_s
        if found is None:
            continue
        low, high = found.low, found.high
        places.append(workloads.index(cell.workload) - 0.4 + width * (index + 0.5))
        values.append(found.median)
        below.append(found.median - (found.median if low is None else low))
        above.append((found.median if high is None else high) - found.median)
    label = _plain(cells[0].mode) if cells else ""
    axes.bar(places, values, width * 0.92, yerr=[below, above], capsize=2, label=label, error_kw={"linewidth": 0.8}, color=f"C{index}")


def _plain(text: str) -> str:
    """Without what matplotlib would read as mathematics."""
    return printable(text).replace("$", r"\$")
