"""`paceline prove`: compare speculative with plain decoding of a model on this machine, in many settings."""

import json
import secrets
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.cli.options import MEMORY, MODEL, OUTPUT, SPECULATION, Panel, Settings, with_settings
from paceline.cli.reporting import EXIT_FAILURE, EXIT_INTERRUPTED, check_distinct, print_notice
from paceline.config import EngineConfig, SpeculationConfig
from paceline.errors import ConfigError, printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.proof.exactness.compare import Finding
    from paceline.proof.exactness.prove import Proof, ProofOptions
    from paceline.proof.exactness.run_case import Counts, Tally

_ROOM = Panel("Memory", EngineConfig, {name: MEMORY.options[name] for name in ("max_model_len", "kv_cache_dtype", "kv_cache_gb")})
_DRAFTERS = Panel(
    "Speculation",
    SpeculationConfig,
    {
        "drafter": "The drafter, as for `run`; may be given several times. auto: ngram, suffix, prediction and what comes with the model. "
        "Two adversaries are always added.",
        "draft_quantization": SPECULATION.options["draft_quantization"],
        "draft_adapter": SPECULATION.options["draft_adapter"],
        "drafter_options": SPECULATION.options["drafter_options"],
    },
)
PROVING = (MODEL, _ROOM, _DRAFTERS)
_MOST_SHOWN = 5
_COLUMNS = ("answers", "tokens", "accepted", "near-ties", "bugs")
_SHORT = {"num_speculative_tokens": "draft tokens"}


@partial(with_settings, panels=PROVING)
def prove(
    *,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="File with a prompt a line. Default: cuts of a sample text.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Output tokens to compare. Default: 40000.", show_default=False)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="10000 tokens, or as many as half a minute allows.")] = False,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same cases. Default: a fresh one, printed.")] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", help="Requests at a time, at most 8. Default: 1, 4 and 8.", show_default=False),
    ] = None,
    case: Annotated[
        str | None,
        typer.Option("--case", help="Run this case alone: its number, or a JSON file that --json wrote, whose differing cases run again."),
    ] = None,
    transformers: Annotated[
        bool, typer.Option("--transformers/--no-transformers", help="Compare logits with transformers too, where it can load the model.")
    ] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file as JSON.", rich_help_panel=OUTPUT)] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write it as one page to look at.", rich_help_panel=OUTPUT)] = None,
    settings: Settings,
) -> None:
    """Compare plain and speculative decoding of this model, over drafters, draft lengths, trees, batches, cache events and samplings.

    Without --model the embedded mini is compared. Exit codes: 0 all is equal (near-ties are no bugs), 1 a BUG was found, 2 wrong use.
    """
    from paceline.proof.exactness import prove as proving
    from paceline.proof.exactness.cases import read_cases

    _make_ready(json_file, html_file, debug=settings.debug)
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
        asks_transformers=transformers,
        command=["paceline", *sys.argv[1:]],
    )
    proof, was_interrupted = _run(question, quiet=settings.quiet)
    _report(proof, json_file, html_file)
    if was_interrupted or proof.bugs:
        raise typer.Exit(EXIT_INTERRUPTED if was_interrupted else EXIT_FAILURE)


def _run(question: "ProofOptions", *, quiet: bool) -> "tuple[Proof, bool]":
    """Run the comparison; an interrupt ends it and keeps what was compared so far."""
    from paceline.proof.exactness.prove import Prover

    if not quiet:
        print_notice(f"seed {question.seed}")
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
            print_notice(f"{_so_far(tally)} of {num_tokens:,}")

    if quiet or not console.is_terminal:
        yield show_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=num_tokens)
        yield lambda tally: bar.update(task, completed=min(tally.all.tokens, num_tokens), description=_so_far(tally))


def _so_far(tally: "Tally") -> str:
    return f"{tally.all.tokens:,} tokens compared, {tally.all.bugs} bugs, {tally.all.near_ties} near-ties"


def _make_ready(*paths: Path | None, debug: bool) -> None:
    """Quieten libraries, and check that reports can be written, before anything is loaded.

    Raises:
        ConfigError: a folder is missing, or a path is none of a file.
    """
    from paceline.cli.loading import quieten_libraries

    if not debug:
        quieten_libraries()
    check_distinct(*paths)
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ConfigError(f"{path} cannot be written: give a file in a folder that is there")


def _report(proof: "Proof", json_file: Path | None, html_file: Path | None) -> None:
    """Write the report to files and print it.

    Raises:
        ConfigError: one cannot be written.
    """
    from rich.console import Console

    from paceline.cli.prove import report
    from paceline.proof.exactness.report import page

    facts: dict[str, Any] = proof.as_dict()
    texts = [(json_file, json.dumps(facts, indent=1, allow_nan=False)), (html_file, page(facts))]
    for path, text in texts:
        if path is None:
            continue
        try:
            path.write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error}): give another file") from error
    Console(file=sys.stdout, highlight=False).print(report(proof))


def report(proof: "Proof") -> Group:
    """Return the table of counts, the findings, the comparison with transformers, and the verdict."""
    parts: list[RenderableType] = [_table(proof)]
    bugs = proof.bugs
    near_ties = [one for one in proof.findings if one not in bugs]
    parts += [line for finding in [*bugs[:_MOST_SHOWN], *near_ties[:1]] for line in _finding_lines(proof, finding)]
    parts += [Text(printable(_witness_line(proof))), _verdict(proof)]
    return Group(*parts)


def _table(proof: "Proof") -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for dimension, levels in proof.tally.by.items():
        for number, (level, counts) in enumerate(levels.items()):
            table.add_row(
                Text(_SHORT.get(dimension, dimension) if number == 0 else "", style="bold"), Text(printable(level)), *_cells(counts)
            )
    table.add_row(Text("all", style="bold"), f"{proof.tally.cases} cases", *_cells(proof.tally.all))
    return table


def _cells(counts: "Counts") -> list[Text]:
    numbers = (counts.requests, counts.tokens, counts.accepted, counts.near_ties, counts.bugs)
    styles = ("", "", "", "yellow" if counts.near_ties else "", "bold red" if counts.bugs else "")
    return [Text(f"{number:,}", style=style) for number, style in zip(numbers, styles, strict=True)]


def _finding_lines(proof: "Proof", finding: "Finding") -> list[Text]:
    is_bug = finding in proof.bugs
    title = Text("BUG" if is_bug else "near-tie", style="bold red" if is_bug else "yellow")
    lines = [Text.assemble(title, " ", printable(headline(finding)))]
    case = proof.cases.get(finding.case) if finding.case is not None else None
    if case is not None:
        setting = case.setting
        lines.append(
            Text(
                f"  {setting.num_speculative_tokens} draft tokens, {setting.shape}, batch of {setting.batch}, {setting.event}"
                + ("" if finding.request is None else f"; {printable(_request(proof, finding))}")
            )
        )
        lines.append(Text(f"  repeat: {printable(shlex.join(proof.repeat(finding)))}"))
    return lines


def headline(finding: "Finding") -> str:
    """Return one line about a difference."""
    parts = [finding.kind.value]
    if finding.case is not None:
        parts.append(f"case {finding.case}" + ("" if finding.request is None else f", request {finding.request}"))
    if finding.position is not None:
        parts.append(f"position {finding.position}")
    if finding.plain_token is not None and finding.plain_token != finding.token:
        parts.append(f"plain {_token(finding.plain_token, finding.plain_logprob)}, here {_token(finding.token, finding.logprob)}")
    if finding.rows_differ_by is not None:
        parts.append(f"logits differ by {finding.rows_differ_by:.3g}, bound {finding.bound:.3g}")
    return f"{'; '.join(parts)}: {finding.details}"


def _token(token: int | None, logprob: float | None) -> str:
    return f"{token}" if logprob is None else f"{token} (logprob {logprob:.4f})"


def _request(proof: "Proof", finding: "Finding") -> str:
    if finding.case is None or finding.request is None:
        return ""
    request = proof.cases[finding.case].requests[finding.request]
    return f"{request.sampling}, drafter {request.drafter}, {request.prompt} ({len(request.prompt_token_ids)} tokens)"


def _witness_line(proof: "Proof") -> str:
    found = proof.transformers
    if found.status == "not_compared":
        return f"transformers: not compared ({found.reason})"
    return (
        f"transformers: {found.status}; {found.argmax_equal} of {found.positions} most probable tokens are the same, "
        f"{found.near_ties} differ at near-ties, {found.differing} elsewhere; logits differ by at most {found.max_abs_difference:.3g}"
    )


def _verdict(proof: "Proof") -> Text:
    counts = proof.tally.all
    what = f"{counts.tokens:,} tokens and {counts.rows:,} rows of logits compared in {proof.seconds:.0f} s, numerics {proof.numerics}"
    if proof.bugs:
        return Text.assemble((f"{len(proof.bugs)} BUG{'S' if len(proof.bugs) > 1 else ''}", "bold red"), f": {what}; seed {proof.seed}")
    early = "" if proof.is_whole else f" (of {proof.num_tokens:,} wanted)"
    if proof.verdict == "near-ties":
        near = f"no bug, {counts.near_ties} near-ties"
        return Text.assemble((near, "bold yellow"), f": {what}{early}; less than {proof.noise_bound:.3g} is noise; seed {proof.seed}")
    return Text.assemble((proof.verdict, "bold green" if proof.verdict == "equal" else "bold"), f": {what}{early}; seed {proof.seed}")
