"""`paceline prove`: compare speculative with plain decoding of a model on this machine, in many settings."""

import json
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import MEMORY, MODEL, OUTPUT, SPECULATION, Settings, with_settings
from paceline.cli.report_files import check_report_files, write_report, write_reports
from paceline.cli.reporting import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_WRONG_INPUT, print_error, print_notice
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.proof.exactness.prove import Proof, ProofOptions
    from paceline.proof.exactness.run_case import Tally

_DRAFTER_HELP = (
    "The drafter, as for `run`; may be given several times. auto: ngram, suffix, prediction and what comes with the model. "
    "Two adversaries are always added."
)
_DRAFTER_SETTINGS = SPECULATION.part("draft_quantization", "draft_adapter", "drafter_options").options
BATCH_HELP = "Requests at a time, at most 8. Default: 1, 4 and 8."
CASE_HELP = "Run this case alone: its number, or a JSON file that --json-file wrote, whose differing cases run again."
TRANSFORMERS_HELP = "Compare logits with transformers too, where it can load the model."
PROMPTS_HELP = "Your own prompts: lines of text, or JSON lines. Default: cuts of a sample text."
PROVE_OPTIONS = (
    MODEL,
    MEMORY.part("max_model_len", "kv_cache_dtype", "kv_cache_gb"),
    replace(SPECULATION, options={"drafter": _DRAFTER_HELP, **_DRAFTER_SETTINGS}),
)


@partial(with_settings, panels=PROVE_OPTIONS)
def prove(
    *,
    prompts: Annotated[Path | None, typer.Option("--prompts", help=PROMPTS_HELP)] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Output tokens to compare. Default: 40000.", show_default=False)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="10000 tokens, or as many as half a minute allows.")] = False,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same cases. Default: a fresh one, printed.")] = None,
    details: Annotated[bool, typer.Option("--details", help="Print the table of counts too.", rich_help_panel=OUTPUT)] = False,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help=BATCH_HELP, show_default=False)] = None,
    case: Annotated[str | None, typer.Option("--case", help=CASE_HELP)] = None,
    transformers: Annotated[bool, typer.Option("--transformers/--no-transformers", help=TRANSFORMERS_HELP)] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.", rich_help_panel=OUTPUT)] = False,
    json_file: Annotated[Path | None, typer.Option("--json-file", help="Write it to this file as JSON.", rich_help_panel=OUTPUT)] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write it as one page to look at.", rich_help_panel=OUTPUT)] = None,
    settings: Settings,
) -> None:
    """Compare plain and speculative decoding of this model, over drafters, draft lengths, trees, batches, cache events and samplings.

    The answer is one line; --details adds the counts. Exit codes: 0 all is equal (near-ties are no bugs), 1 a BUG was found, 2 wrong use.
    """
    from paceline.proof.exactness import prove as proving
    from paceline.proof.exactness.cases import read_cases

    check_report_files(json_file, html_file)
    given = read_cases(case)
    question = proving.ProofOptions(
        engine=settings.engine,
        speculation=settings.speculation,
        prompts=prompts,
        num_tokens=(proving.QUICK_TOKENS if quick else proving.DEFAULT_TOKENS) if tokens is None else tokens,
        seed=next(one for one in (seed, given.seed, secrets.randbits(31)) if one is not None),
        batch_size=batch_size,
        seconds=proving.QUICK_S if quick else None,
        cases=given.cases,
        only=given.only,
        compares_transformers=transformers,
        command=["paceline", *sys.argv[1:]],
    )
    for line in settings.start_lines:
        print_notice(line)
    proof, was_interrupted = _run(question, quiet=settings.quiet)
    failures = _write_reports(proof.as_dict(), json_file, html_file)
    _print(proof, as_json=as_json, details=details)
    for failure in failures:
        print_error(failure)
    if was_interrupted or proof.bugs:
        raise typer.Exit(EXIT_INTERRUPTED if was_interrupted else EXIT_FAILURE)
    if failures:
        raise typer.Exit(EXIT_WRONG_INPUT)


def _run(question: "ProofOptions", *, quiet: bool) -> "tuple[Proof, bool]":
    """Run the comparison; an interrupt ends it and keeps what was compared so far."""
    from paceline.proof.exactness.prove import Prover

    if not quiet:
        print_notice(f"comparing plain and speculative decoding, seed {question.seed}")
    prover = Prover(question)
    if not quiet:
        for notice in prover.proof.notices:
            print_notice(notice)
    try:
        with _progress(question.num_tokens, quiet=quiet) as show:
            for tally in prover.run():
                show(tally)
    except KeyboardInterrupt:
        print_notice("interrupted: the report holds what was compared so far")
        return prover.proof, True
    if question.seconds is not None and not prover.proof.is_whole and not quiet:
        print_notice(f"--quick ended after {question.seconds:g} s: leave it out to compare everything planned; --tokens sets how much")
    return prover.proof, False


@contextmanager
def _progress(num_tokens: int, *, quiet: bool) -> "Iterator[Callable[[Tally], None]]":
    """Show progress: a bar on a terminal, else a line for each quarter."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    shown = 0

    def show_line(tally: "Tally") -> None:
        nonlocal shown
        quarters = 4 * tally.all.tokens // num_tokens
        if not quiet and shown < quarters < 4:
            shown = quarters
            print_notice(f"{_progress_text(tally)} of {num_tokens:,}")

    if quiet or not console.is_terminal:
        yield show_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=num_tokens)
        yield lambda tally: bar.update(task, completed=min(tally.all.tokens, num_tokens), description=_progress_text(tally))


def _progress_text(tally: "Tally") -> str:
    return f"{tally.all.tokens:,} tokens compared, {tally.all.bugs} bugs, {tally.all.near_ties} near-ties"


def _write_reports(facts: dict[str, Any], json_file: Path | None, html_file: Path | None) -> list[ConfigError]:
    from paceline.proof.exactness.report import page

    written = write_reports(
        (json_file, lambda path: write_report(path, json.dumps(facts, indent=1, allow_nan=False) + "\n")),
        (html_file, lambda path: write_report(path, page(facts) + "\n")),
    )
    return [one for one in written if isinstance(one, ConfigError)]


def _print(proof: "Proof", *, as_json: bool, details: bool) -> None:
    from rich.console import Console

    from paceline.proof.exactness.text import report

    if as_json:
        print(json.dumps(proof.as_dict(), allow_nan=False))
    else:
        Console(file=sys.stdout, highlight=False).print(report(proof, details=details), soft_wrap=not details)
