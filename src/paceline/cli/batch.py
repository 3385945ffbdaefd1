"""`paceline batch`: answer a file of requests."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import BATCHING, Settings, with_settings
from paceline.cli.reporting import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_WRONG_INPUT, say
from paceline.errors import BackendUnavailableError, printable
from paceline.installation import install_extra
from paceline.server.settings import ServerSettings

if TYPE_CHECKING:
    from paceline.server.batch.run import BatchResult, Watcher


@partial(with_settings, panels=BATCHING)
def batch(
    *,
    source: Annotated[Path, typer.Argument(metavar="INPUT.jsonl", help="Requests as in OpenAI's batch files, one a line.")],
    target: Annotated[Path, typer.Argument(metavar="OUTPUT.jsonl", help="Where answers go, one a line; what is there is kept.")],
    settings: Settings,
) -> None:
    """Answer a file of requests as the server would; without --model the embedded mini answers.

    The same command goes on where an earlier one was ended, by Ctrl-C or in any other way. Exit codes: 0 all were answered, 2 lines are no
    requests or were refused, 1 an answer failed or the rest was not answered.
    """
    server = ServerSettings(**settings.server)
    from paceline.cli.loading import quieten_libraries

    if not settings.debug:
        quieten_libraries()
    try:
        from paceline.server.batch.run import run_batch
        from paceline.server.replicas.ray_batch import run_batch_on_replicas
    except ImportError as error:
        raise BackendUnavailableError(f"a batch needs {error.name}: {install_extra('serve')}") from error
    try:
        with _watcher(quiet=settings.quiet) as watcher:
            if settings.cluster.replicas:
                run_batch = partial(run_batch_on_replicas, cluster=settings.cluster, debug=settings.debug)
            result = run_batch(settings.llm_arguments(), server, source=source, target=target, watcher=watcher)
    except KeyboardInterrupt:
        say("interrupted: the same command goes on from here")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _tell(result, target, quiet=settings.quiet)


@contextmanager
def _watcher(*, quiet: bool) -> "Iterator[Watcher]":
    """What shows how far a batch is: a bar with the time left, on a terminal alone."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from paceline.server.batch.run import Watcher

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield Watcher((lambda text: None) if quiet else say, say)
        return
    columns = (TextColumn("answered"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=None, start=False)

        def begin(num_done: int, num_requests: int) -> None:
            progress.update(task, total=num_requests, completed=num_done)

        def advance() -> None:
            progress.start_task(task)  # the model is loaded by now; nothing happens the second time
            progress.advance(task)

        def tell(text: str) -> None:  # above the bar
            console.print(printable(text), style="dim", highlight=False, markup=False)

        yield Watcher(tell, tell, begin, advance)


def _tell(result: "BatchResult", target: Path, *, quiet: bool) -> None:
    """The last line, and the exit code.

    Raises:
        typer.Exit: not everything is answered as asked.
    """
    counts = [(len(result.bad), "left out"), (result.num_refused, "refused"), (result.num_failed, "failed")]
    if not quiet:
        wrong = "".join(f", {count} {what}" for count, what in counts if count)
        say(f"{result.num_answered} of {result.num_requests} requests are answered in {target}{wrong}")
    if result.num_failed:
        raise typer.Exit(EXIT_FAILURE)
    if result.bad or result.num_refused:
        raise typer.Exit(EXIT_WRONG_INPUT)
