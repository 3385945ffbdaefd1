"""`paceline batch`: answer a file of requests."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import BATCHING, Settings, with_settings
from paceline.cli.reporting import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_WRONG_INPUT, print_notice
from paceline.errors import BackendUnavailableError, printable
from paceline.installation import install_command
from paceline.server.settings import ServerSettings

if TYPE_CHECKING:
    from paceline.server.batch.run import BatchResult, Watcher


@partial(with_settings, panels=BATCHING, has_model_argument=False)
def batch(
    *,
    source: Annotated[Path, typer.Argument(metavar="INPUT.jsonl", help="Requests as in OpenAI's batch files, one a line.")],
    target: Annotated[Path, typer.Argument(metavar="OUTPUT.jsonl", help="Where answers go, one a line; what is there is kept.")],
    settings: Settings,
) -> None:
    """Answer a file of requests as the server would: paceline batch -m MODEL INPUT.jsonl OUTPUT.jsonl.

    After Ctrl-C, SIGTERM or a crash the same command continues. Exit codes: 0 all requests are answered, 2 some lines are not requests or
    were refused, 1 a request failed or was not answered.
    """
    server = ServerSettings(**settings.server)
    for line in settings.start_lines:
        print_notice(line)
    try:
        from paceline.server.batch.run import run_batch
        from paceline.server.replicas.ray_batch import run_batch_on_replicas
    except ImportError as error:
        raise BackendUnavailableError(f"a batch needs {error.name}: {install_command('serve')}") from error
    progress = _Progress()
    signal.signal(signal.SIGTERM, progress.terminate)
    try:
        with _watcher(progress, quiet=settings.quiet) as watcher:
            if settings.cluster.replicas:
                run_batch = partial(run_batch_on_replicas, cluster=settings.cluster, debug=settings.debug)
            result = run_batch(settings.llm_arguments(), server, source=source, target=target, watcher=watcher)
    except KeyboardInterrupt:
        cause = "terminated" if progress.is_terminated else "interrupted"
        print_notice(
            f"{cause}: {progress.num_done} of {progress.num_requests} requests are answered in {target}; run the same command to continue"
        )
        raise typer.Exit(EXIT_TERMINATED if progress.is_terminated else EXIT_INTERRUPTED) from None
    _report(result, target, quiet=settings.quiet)


@dataclass(slots=True)
class _Progress:
    """Number of answered requests, and whether SIGTERM ended the command."""

    num_done: int = 0
    num_requests: int = 0
    is_terminated: bool = False

    def begin(self, num_done: int, num_requests: int) -> None:
        self.num_done, self.num_requests = num_done, num_requests

    def advance(self) -> None:
        self.num_done += 1

    def terminate(self, number: int, frame: FrameType | None) -> None:
        """End as Ctrl-C does: what is answered is written, and the engine closed."""
        self.is_terminated = True
        raise KeyboardInterrupt


@contextmanager
def _watcher(counts: _Progress, *, quiet: bool) -> "Iterator[Watcher]":
    """Count answered requests; on a terminal also show a bar with the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from paceline.server.batch.run import Watcher

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield Watcher((lambda text: None) if quiet else print_notice, print_notice, counts.begin, counts.advance)
        return
    columns = (TextColumn("answered"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=None, start=False)

        def begin(num_done: int, num_requests: int) -> None:
            counts.begin(num_done, num_requests)
            progress.update(task, total=num_requests, completed=num_done)

        def advance() -> None:
            counts.advance()
            progress.start_task(task)  # the model is loaded by now; nothing happens the second time
            progress.advance(task)

        def show(text: str) -> None:  # above the bar
            console.print(printable(text), style="dim", highlight=False, markup=False)

        yield Watcher(show, show, begin, advance)


def _report(result: "BatchResult", target: Path, *, quiet: bool) -> None:
    """Print the last line and set the exit code."""
    counts = [(len(result.bad), "left out"), (result.num_refused, "refused"), (result.num_failed, "failed")]
    if not quiet:
        wrong = "".join(f", {count} {what}" for count, what in counts if count)
        print_notice(f"{result.num_answered} of {result.num_requests} requests are answered in {target}{wrong}")
    if result.num_failed:
        raise typer.Exit(EXIT_FAILURE)
    if result.bad or result.num_refused:
        raise typer.Exit(EXIT_WRONG_INPUT)
