"""Reports agree in all formats, contain the provenance of numbers, and escape untrusted text."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from harness.bench_runs import fake_mode, measured
from paceline.benchmarking.benchmark import BenchResult, as_dict, json_text
from paceline.benchmarking.plan import BenchPlan
from paceline.benchmarking.provenance import ModelFacts, machine_facts
from paceline.benchmarking.report.page import Bar, bars, lines, page, write_charts
from paceline.benchmarking.report.text import report
from paceline.benchmarking.results import make_cells, summaries
from paceline.benchmarking.run import WorkerFailure
from paceline.cli.bench import _write_reports

HOSTILE = '<script>alert("x")</script>'


@pytest.fixture(scope="module")
def result() -> BenchResult:
    """Results of a mode with drafts, one without, one with other tokens, and one that died."""
    modes = [
        fake_mode("plain"),
        fake_mode("fast", "drafts=3"),
        fake_mode("idle"),
        fake_mode("liar", "text=other"),
        fake_mode("dead", "dies=3"),
    ]
    found = measured(modes)
    cells = make_cells(found)
    return BenchResult(
        plan=BenchPlan(rounds=3, max_tokens=33, num_prompts=2), command="paceline bench", date="2026-01-01T00:00:00Z", seconds=12.3,
        model=ModelFacts("made-up", Path("made-up"), "bf16", False, ({"name": "a", "bytes": 1, "sha256_of_first_mib": "00"},)),
        draft_model=None, num_threads=2, machine=machine_facts(), bandwidth=12.5e9, load_before=(0.1, 0.2, 0.3), load_after=None,
        measured=found, cells=cells, summaries=summaries(cells, modes),
    )  # fmt: skip


def shown(result: BenchResult) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(report(result))
    return console.export_text()


def keys_of(value: Any, path: str = "") -> Iterator[str]:
    """Every field's place; items of lists have one."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield f"{path}.{name}"
            yield from keys_of(item, f"{path}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from keys_of(item, f"{path}[]")


# --- JSON ---

TOP = ["schema", "command", "date", "seconds", "ended", "model", "draft_model", "settings", "machine", "modes", "cells", "summaries"]
TOP += ["failures", "notices", "samples"]
SPREAD = ["lower_quartile", "median", "upper_quartile"]
RATIO = ["median", "low", "high", "pairs"]
CELL = [
    "workload", "temperature", "mode", "num_rounds", "tokens_per_s", "request_tokens_per_s", "first_token_s", "gap_s", "gap_p95_s",
    "acceptance_length", "acceptance_rate", "num_draft_tokens", "passes", "host_share", "bytes_per_s", "peak_rss_bytes", "repeat_share",
    "differing", "ratio", "request_ratio", "refusal", "is_looping", "speedup",
]  # fmt: skip
SAMPLE = [
    "mode", "workload", "temperature", "prompt", "round", "outputs", "seconds", "num_prompt_tokens", "num_draft_tokens",
    "num_accepted_tokens", "steps", "passes", "decoding_passes", "host_s", "rss_bytes", "peak_rss_bytes",
]  # fmt: skip
MACHINE = ["cpu", "flags", "cores", "memory_bytes", "available_memory_bytes", "system", "python", "versions", "commit", "threads"]
MACHINE += ["read_bandwidth_bytes_per_s", "load_average_before", "load_average_after"]


def test_bench_json_has_the_documented_fields(result: BenchResult) -> None:
    """Files of other versions stay readable: a change here needs a new number in `schema`."""
    found = as_dict(result)
    assert found["schema"] == "paceline-bench/1"
    assert list(found) == TOP
    assert list(found["cells"][1]) == CELL
    assert list(found["samples"][0]) == SAMPLE
    assert list(found["samples"][0]["outputs"][0]) == ["token_ids", "times_s"]
    assert list(found["machine"]) == MACHINE
    assert list(found["model"]) == ["name", "path", "precision", "grown", "files"]
    assert list(found["modes"][0]) == ["name", "program", "baseline", "order", "facts"]
    assert list(found["summaries"][0]) == ["mode", "temperature", "speedup", "lowest", "highest", "num_counted", "num_cells"]
    assert list(found["failures"][0]) == ["mode", "message", "workload", "temperature", "round"]
    fast = found["cells"][1]
    assert (list(fast["tokens_per_s"]), list(fast["speedup"])) == (SPREAD, RATIO)
    settings = ["rounds", "tokens", "prompts_per_workload", "batch_size", "temperatures", "minutes", "seed", "bootstrap", "looping"]
    assert list(found["settings"]) == settings


def test_bench_json_round_trip_keeps_every_sample(result: BenchResult) -> None:
    found = json.loads(json_text(result))
    assert set(keys_of(found)) == set(keys_of(json.loads(json.dumps(as_dict(result)))))
    assert len(found["samples"]) == len(result.measured.samples) == 4 * 2 * 4 + 1
    assert {one["refusal"] for one in found["cells"]} >= {"", "nothing was drafted"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
def test_bench_writes_the_page_although_the_json_file_has_no_room(result: BenchResult, tmp_path: Path) -> None:
    (error,) = _write_reports(result, Path("/dev/full"), tmp_path / "page.html", None, quiet=True)
    advice = "make room or give a place on another disk"
    assert str(error) == f"/dev/full cannot be written: No space left on device; {advice}"
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_bench_report_contains_provenance(result: BenchResult) -> None:
    machine = as_dict(result)["machine"]
    assert machine["versions"]["paceline"]
    assert machine["cores"] >= 1
    text = shown(result)
    for word in ("2026-01-01T00:00:00Z", "paceline bench", "12.5 GB/s", "0.10 0.20 0.30 before", "bf16", "seed 7", machine["cpu"]):
        assert word in text


# --- the same in the terminal and on the page ---


@pytest.mark.parametrize("written", [shown, page], ids=["terminal", "page"])
def test_report_shows_a_dash_and_the_reason_for_a_refused_speedup(result: BenchResult, written: Any) -> None:
    text = re.sub(r"\s+", " ", written(result))
    assert "- nothing was drafted" in text
    assert "- 8 of 8 outputs differ from plain" in text
    assert "4.00 (4.00 to 4.00)" in text
    assert "dead ended with exit code 3: out of luck" in text


@pytest.mark.parametrize("written", [shown, page], ids=["terminal", "page"])
def test_report_marks_a_grown_model(result: BenchResult, written: Any) -> None:
    assert "grown" not in written(result)
    assert "made-up (grown)" in written(replace(result, model=replace(result.model, is_grown=True)))


@pytest.mark.parametrize("written", [shown, page], ids=["terminal", "page"])
def test_report_marks_repetitive_outputs(result: BenchResult, written: Any) -> None:
    looping = [replace(cell, repeat_share=0.5, refusal="looping: 50% of the output repeats itself") for cell in result.cells]
    assert "50% looping" in re.sub(r"\s+", " ", written(replace(result, cells=looping)))


def test_report_without_results_shows_the_failures(result: BenchResult) -> None:
    empty = replace(result, cells=[], summaries=[])
    assert "failed: made up, temperature 0: dead ended" in shown(empty)
    assert "failed: made up, temperature 0: dead ended" in page(empty)


# --- the page ---


class Tags(HTMLParser):
    """What a browser would see."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "rect", "line", "circle", "polyline", "path") or tag in ("title",):
            self.open.append(tag)
        self.outside += [str(value) for name, value in attrs if name in ("src", "href", "action") or "url(" in str(value)]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_report_is_well_formed_and_loads_nothing(result: BenchResult) -> None:
    tags, text = Tags(), page(result)
    tags.feed(text)
    assert tags.open == []
    assert tags.outside == []
    assert "script" not in tags.tags
    assert "@import" not in text
    assert "url(" not in text
    assert tags.tags.count("svg") >= 3
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_html_report_escapes_names_and_messages(result: BenchResult) -> None:
    cells = [replace(cell, workload=HOSTILE, refusal=HOSTILE if cell.refusal else "") for cell in result.cells]
    failures = replace(result.measured, failures=[WorkerFailure(HOSTILE, HOSTILE, HOSTILE, 0.0, 1)], notices=[HOSTILE])
    hostile = replace(
        result, cells=cells, measured=failures, command=HOSTILE, model=replace(result.model, name=HOSTILE, precision=HOSTILE)
    )  # fmt: skip
    text = page(hostile)
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 5
    assert "\x1b" not in page(replace(result, command="\x1b[31m"))


def test_report_charts_leave_out_refused_speedups(result: BenchResult) -> None:
    """Of five modes one has a speedup: one line goes from round to round."""
    assert sum(cell.ratio is not None for cell in result.cells) == 3
    assert page(result).count("<polyline") == 1


def test_chart_labels_are_escaped() -> None:
    for drawn in (
        bars(HOSTILE, [Bar(HOSTILE, 1.0, note=HOSTILE), Bar("b", None, note=HOSTILE)]),
        lines(HOSTILE, [(HOSTILE, "mode-0", [1.0])]),
    ):
        assert "<script" not in drawn


def test_chart_bar_length_is_proportional_to_its_value() -> None:
    drawn = bars("title", [Bar("one", 1.0), Bar("two", 2.0), Bar("none", None, note="why")])
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', drawn)]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)
    assert "why" in drawn
    assert bars("title", []) == bars("title", [])


def test_charts_are_written_as_svg_files(result: BenchResult, tmp_path: Path) -> None:
    written = write_charts(replace(result, model=replace(result.model, name="<b>&")), tmp_path / "plots")
    assert [path.name for path in written] == ["speedup-t0.svg", "tokens_per_s-t0.svg"]
    assert all(ElementTree.parse(path).getroot().tag.endswith("svg") for path in written)
