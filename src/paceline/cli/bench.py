"""`paceline bench`: measure plain decoding, speculation and other programs on this machine."""

import inspect
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.options import DEBUG, MODEL, MODEL_ARGUMENT, NO_MODEL, OUTPUT, flags_of, named_model, numbers, option, with_parameters
from paceline.cli.report_files import check_report_files, write_report, write_reports
from paceline.cli.reporting import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_WRONG_INPUT, print_error, print_notice, reported_errors
from paceline.config import QUANTIZATIONS
from paceline.errors import ConfigError, printable

if TYPE_CHECKING:
    from paceline.benchmarking.benchmark import BenchResult
    from paceline.benchmarking.plan import BenchPlan
    from paceline.benchmarking.run import RunProgress

FORMS = ("text", "md", "json")
WHAT, HOW, OTHERS = "What is measured", "How much", "Other programs"
DRAFTER_HELP = (
    "A mode for each: ngram, suffix, prediction, draft_model, medusa, mtp, auto, or the directory or id of a draft model or of heads; "
    "a+b draft together. Several times. Default: all that are there."
)
WORKLOAD_HELP = (
    "chat, code, arithmetic, json, copying (with edits), rewriting, random (tokens); several times or with commas. Default: all."
)


def _option(*flags: str, text: str, hint: Any = str | None, panel: str = WHAT, **more: Any) -> inspect.Parameter:
    return option(*flags, hint=hint, text=text, panel=panel, **more)


_OPTIONS = (
    MODEL_ARGUMENT,
    option(*flags_of("model"), hint=str | None, text=MODEL.options["model"], panel=None, show_default=False),
    _option("--gguf-file", text=MODEL.options["gguf_file"]),
    _option("--quantization", hint=str, text=MODEL.options["quantization"], metavar="|".join(QUANTIZATIONS), default="none"),
    _option("-md", "--draft-model", text="A draft model's directory, file or id, for us and peers."),
    _option("--drafter", hint=list[str] | None, text=DRAFTER_HELP, metavar="<str>"),
    _option("--num-speculative-tokens", hint=int | None, text="Draft tokens a step. Default: as many as pay."),
    _option("--workload", hint=list[str] | None, text=WORKLOAD_HELP, metavar="<str>"),
    _option("--prompts", hint=Path | None, text="Your own prompts: lines of text, or JSON lines."),
    _option("--spec-bench", hint=Path | None, text="Questions as in Spec-Bench's question.jsonl."),
    _option(*flags_of("temperature"), hint=str, text="One or several, such as 0,0.7,1.", metavar="<float,...>", default="0"),
    _option("--batch-size", hint=int, text="Requests at once, of our own modes.", default=1),
    _option("--offline", hint=bool, text=MODEL.options["offline"], default=False),
    _option("--rounds", hint=int | None, text="Counted rounds, after one of warm-up. Default: 5.", panel=HOW),
    _option(*flags_of("max_tokens"), hint=int | None, text="Tokens of each output. Default: 96.", panel=HOW),
    _option("--num-prompts", hint=int | None, text="Prompts of each workload. Default: 4.", panel=HOW),
    _option("--minutes", hint=float, text="Time it may take; defaults become smaller to fit, then it ends.", panel=HOW, default=5.0),
    _option(*flags_of("threads"), hint=int | None, text=MODEL.options["threads"], panel=HOW),
    _option("--seed", hint=int, text="Of random prompts, edits, sampled texts and intervals.", panel=HOW, default=7),
    _option("--peer", hint=list[str] | None, text="Measure this program too; several times.", panel=OTHERS, metavar="<str>"),
    _option(
        "--install-peers",
        hint=list[str] | None,
        text="Download this program into an environment of its own.",
        panel=OTHERS,
        metavar="<str>",
    ),
    _option(
        *("-o", "--output"),
        hint=str,
        text="How to print the result; md: a Markdown table.",
        panel=OUTPUT,
        metavar="|".join(FORMS),
        default="text",
    ),
    _option("--json", hint=bool, text="The same as --output json.", panel=OUTPUT, name="as_json", default=False),
    _option("--json-file", hint=Path | None, text="Write everything here, raw samples too.", panel=OUTPUT),
    _option("--html", hint=Path | None, text="Write one page with charts here.", panel=OUTPUT, name="html_file"),
    _option("--plots", hint=Path | None, text="Write the charts into this folder as SVG files.", panel=OUTPUT),
    _option("-q", "--quiet", hint=bool, text="Print nothing but the tables.", panel=OUTPUT, default=False),
    DEBUG,
)


@partial(with_parameters, parameters=_OPTIONS)
def bench(**given: Any) -> None:
    """Measure generation in turns: plain, with each drafter, and other programs.

    It takes a few minutes. Ctrl-C ends it with what was measured so far. Exit code 1: a mode failed.
    """
    with reported_errors(debug=given["debug"]):
        if given["install_peers"]:
            from paceline.benchmarking.modes import install_peer

            for name in _split(given["install_peers"]):
                install_peer(name, print_notice)
            if not given["peer"]:
                return
        model = named_model(given["model_argument"], given["model"])
        if model is None and not given["quiet"]:
            print_notice(NO_MODEL)
        form = "json" if given["as_json"] else given["output"]
        if form not in FORMS:
            raise ConfigError(f"output is {form!r}: use one of {', '.join(FORMS)}")
        plan = _plan(given | {"model": model or "mini"})
        files = given["json_file"], given["html_file"], given["plots"]
        _bench(plan, form, *files, quiet=given["quiet"])


def _plan(given: Mapping[str, Any]) -> "BenchPlan":
    from paceline.benchmarking.plan import BenchPlan

    same = "model gguf_file quantization draft_model num_speculative_tokens prompts spec_bench batch_size offline rounds max_tokens"
    return BenchPlan(
        **{name: given[name] for name in (*same.split(), "num_prompts", "minutes", "threads", "seed")},
        drafters=tuple(given["drafter"] or ()),
        workloads=_split(given["workload"]),
        temperatures=tuple(dict.fromkeys(numbers("temperature", given["temperature"], float))),
        peers=_split(given["peer"]),
    )


def _split(values: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(word.strip() for value in values or () for word in value.split(",") if word.strip())


def _bench(plan: "BenchPlan", form: str, json_file: Path | None, html_file: Path | None, plots: Path | None, *, quiet: bool) -> None:
    from paceline.benchmarking.benchmark import benchmark

    check_report_files(json_file, html_file)
    if plots is not None and plots.exists() and not plots.is_dir():
        raise ConfigError(f"{plots} is no folder: give a folder")
    with _watcher(quiet=quiet) as watcher:
        result = benchmark(plan, watcher, shlex.join(["paceline", *sys.argv[1:]]))
    failures = list(_write_reports(result, json_file, html_file, plots, quiet=quiet))  # first: stdout may fail too
    _print(result, form)
    for failure in failures:
        print_error(failure)
    if result.measured.ended == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)
    if result.measured.failures or not result.cells:
        raise typer.Exit(EXIT_FAILURE)
    if failures:
        raise typer.Exit(EXIT_WRONG_INPUT)


def _write_reports(
    result: "BenchResult", json_file: Path | None, html_file: Path | None, plots: Path | None, *, quiet: bool
) -> Iterator[ConfigError]:
    """Write the report to files; yield the error of each that cannot be written."""
    from paceline.benchmarking.benchmark import json_text
    from paceline.benchmarking.report.page import page, write_charts

    for written in write_reports(
        (json_file, lambda path: write_report(path, json_text(result) + "\n")),
        (html_file, lambda path: write_report(path, page(result))),
        (plots, lambda path: write_charts(result, path)),
    ):
        if isinstance(written, ConfigError):
            yield written
        elif not quiet:
            print_notice(f"written: {written}")


def _print(result: "BenchResult", form: str) -> None:
    from rich.console import Console

    from paceline.benchmarking.benchmark import json_text
    from paceline.benchmarking.report.text import markdown, report

    if form != "text":
        print(json_text(result) if form == "json" else markdown(result))
        return
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 160)  # a file folds no columns
    console.print(report(result), soft_wrap=False)


@contextmanager
def _watcher(*, quiet: bool) -> "Iterator[RunProgress]":
    """Show progress: on a terminal a bar with the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from paceline.benchmarking.run import RunProgress

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield RunProgress((lambda text: None) if quiet else print_notice)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("getting ready", total=None, start=False)

        def begin(total: int) -> None:
            progress.update(task, total=total, description="measuring")
            progress.start_task(task)

        yield RunProgress(lambda text: progress.update(task, description=printable(text)), begin, lambda: progress.advance(task))
