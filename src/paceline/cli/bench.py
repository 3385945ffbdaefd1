"""`paceline bench`: measure plain decoding, speculation and other programs on this machine."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import MODEL, ModelArgument, ModelOption, flags_of, model_or_mini
from paceline.cli.report_files import check_report_files, write_errors, write_report
from paceline.cli.reporting import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_WRONG_INPUT, print_error, print_notice, reported_errors
from paceline.config import QUANT
from paceline.errors import ConfigError, printable

if TYPE_CHECKING:
    from paceline.benchmarking.benchmark import BenchResult
    from paceline.benchmarking.plan import BenchPlan
    from paceline.benchmarking.run import RunProgress

FORMS = ("text", "md", "json")
WHAT, HOW, OTHERS, OUT = "What is measured", "How much", "Other programs", "Output"
DRAFTER_HELP = (
    "A mode for each: ngram, suffix, prediction, draft_model, medusa, mtp, auto, or the directory or id of a draft model or of heads; "
    "a+b draft together. Several times. Default: all that are there."
)
WORKLOAD_HELP = (
    "chat, code, arithmetic, json, copying (with edits), rewriting, random (tokens); several times or with commas. Default: all."
)


def _option(*names: str, help_text: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, metavar=metavar)


GgufFile = Annotated[str | None, _option("--gguf-file", help_text=MODEL.options["gguf_file"], panel=WHAT)]
Quant = Annotated[str, _option("--quantization", help_text=MODEL.options["quantization"], panel=WHAT, metavar="|".join(QUANT))]
DraftModel = Annotated[
    str | None, _option("-md", "--draft-model", help_text="A draft model's directory, file or id, for us and peers.", panel=WHAT)
]
Drafter = Annotated[list[str] | None, _option("--drafter", help_text=DRAFTER_HELP, panel=WHAT, metavar="<str>")]
NumSpeculativeTokens = Annotated[
    int | None, _option("--num-speculative-tokens", help_text="Draft tokens a step. Default: as many as pay.", panel=WHAT)
]
Workload = Annotated[list[str] | None, _option("--workload", help_text=WORKLOAD_HELP, panel=WHAT, metavar="<str>")]
Prompts = Annotated[Path | None, _option("--prompts", help_text="Your own prompts: lines of text, or JSON lines.", panel=WHAT)]
SpecBench = Annotated[Path | None, _option("--spec-bench", help_text="Questions as in Spec-Bench's question.jsonl.", panel=WHAT)]
Temperature = Annotated[
    str, _option(*flags_of("temperature"), help_text="One or several, such as 0,0.7,1.", panel=WHAT, metavar="<float,...>")
]
BatchSize = Annotated[int, _option("--batch-size", help_text="Requests at once, of our own modes.", panel=WHAT)]
Offline = Annotated[bool, _option("--offline", help_text=MODEL.options["offline"], panel=WHAT)]
Rounds = Annotated[int | None, _option("--rounds", help_text="Counted rounds, after one of warm-up. Default: 5.", panel=HOW)]
MaxTokens = Annotated[int | None, _option(*flags_of("max_tokens"), help_text="Tokens of each output. Default: 96.", panel=HOW)]
NumPrompts = Annotated[int | None, _option("--num-prompts", help_text="Prompts of each workload. Default: 4.", panel=HOW)]
Minutes = Annotated[float, _option("--minutes", help_text="Time it may take; defaults become smaller to fit, then it ends.", panel=HOW)]
Threads = Annotated[int | None, _option(*flags_of("threads"), help_text=MODEL.options["threads"], panel=HOW)]
Seed = Annotated[int, _option("--seed", help_text="Of random prompts, edits, sampled texts and intervals.", panel=HOW)]
Peer = Annotated[list[str] | None, _option("--peer", help_text="Measure this program too; several times.", panel=OTHERS, metavar="<str>")]
InstallPeers = Annotated[
    list[str] | None,
    _option("--install-peers", help_text="Download this program into an environment of its own.", panel=OTHERS, metavar="<str>"),
]
Output = Annotated[
    str, _option("-o", "--output", help_text="How to print the result; md: a Markdown table.", panel=OUT, metavar="text|md|json")
]
AsJson = Annotated[bool, _option("--json", help_text="The same as --output json.", panel=OUT)]
JsonFile = Annotated[Path | None, _option("--json-file", help_text="Write everything here, raw samples too.", panel=OUT)]
HtmlFile = Annotated[Path | None, _option("--html", help_text="Write one page with charts here.", panel=OUT)]
Plots = Annotated[Path | None, _option("--plots", help_text="Write the charts into this folder as SVG files.", panel=OUT)]
Quiet = Annotated[bool, _option("-q", "--quiet", help_text="Print nothing but the tables.", panel=OUT)]
Debug = Annotated[bool, _option("--debug", help_text="Print tracebacks and what libraries warn about.", panel=OUT)]


def bench(
    *,
    model_argument: ModelArgument = None,
    model: ModelOption = None,
    gguf_file: GgufFile = None,
    quantization: Quant = "none",
    draft_model: DraftModel = None,
    drafter: Drafter = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    workload: Workload = None,
    prompts: Prompts = None,
    spec_bench: SpecBench = None,
    temperature: Temperature = "0",
    batch_size: BatchSize = 1,
    offline: Offline = False,
    rounds: Rounds = None,
    max_tokens: MaxTokens = None,
    num_prompts: NumPrompts = None,
    minutes: Minutes = 5.0,
    threads: Threads = None,
    seed: Seed = 7,
    peer: Peer = None,
    install_peers: InstallPeers = None,
    output: Output = "text",
    as_json: AsJson = False,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    plots: Plots = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure generation in turns: plain, with each drafter, and other programs.

    It takes a few minutes. Ctrl-C ends it with what was measured so far. Exit code 1: a mode failed.
    """
    given = dict(locals())
    with reported_errors(debug=debug):
        if install_peers:
            _install(_words(install_peers))
            if not peer:
                return
        chosen = model_or_mini(model_argument, model, prints=not quiet)
        form = "json" if as_json else output
        if form not in FORMS:
            raise ConfigError(f"output is {output!r}: use one of {', '.join(FORMS)}")
        plan = _plan(given | {"model": chosen, "tokens": max_tokens})
        _bench(plan, form, json_file, html_file, plots, quiet=quiet, debug=debug)


def _plan(given: Mapping[str, Any]) -> "BenchPlan":
    from paceline.benchmarking.plan import BenchPlan

    same = "model gguf_file quantization draft_model num_speculative_tokens prompts spec_bench batch_size offline rounds tokens num_prompts"
    return BenchPlan(
        **{name: given[name] for name in (*same.split(), "minutes", "threads", "seed")},
        drafters=tuple(given["drafter"] or ()),
        workloads=_words(given["workload"]),
        temperatures=_temperatures(given["temperature"]),
        peers=_words(given["peer"]),
    )


def _words(values: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(word.strip() for value in values or () for word in value.split(",") if word.strip())


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(word) for word in _words([text])))
    except ValueError:
        raise ConfigError(f"temperature is {text!r}: use numbers with commas between them, such as 0,0.7,1") from None


def _install(names: Sequence[str]) -> None:
    from paceline.benchmarking.modes import install_peer

    for name in names:
        install_peer(name, print_notice)


def _bench(
    plan: "BenchPlan", form: str, json_file: Path | None, html_file: Path | None, plots: Path | None, *, quiet: bool, debug: bool
) -> None:
    from paceline.benchmarking.benchmark import benchmark
    from paceline.cli.loading import quieten_libraries

    if not debug:
        quieten_libraries()
    check_report_files(json_file, html_file)
    if plots is not None and plots.exists() and not plots.is_dir():
        raise ConfigError(f"{plots} is no folder: give a folder")
    with _watcher(quiet=quiet) as watcher:
        result = benchmark(plan, watcher, command())
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


def command() -> str:
    """Return the command line."""
    from paceline.benchmarking.provenance import shown_command

    return shown_command(sys.argv[1:])


def _write_reports(
    result: "BenchResult", json_file: Path | None, html_file: Path | None, plots: Path | None, *, quiet: bool
) -> Iterator[ConfigError]:
    """Write the report to files; yield the error of each that cannot be written."""
    from paceline.benchmarking.benchmark import json_text
    from paceline.benchmarking.report.page import page, write_charts

    for path, write in (
        (json_file, lambda path: write_report(path, json_text(result) + "\n")),
        (html_file, lambda path: write_report(path, page(result))),
        (plots, lambda path: write_charts(result, path)),
    ):
        if path is None:
            continue
        try:
            with write_errors(path):
                write(path)
        except ConfigError as error:
            yield error
        else:
            if not quiet:
                print_notice(f"written: {path}")


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
