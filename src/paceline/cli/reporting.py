"""Print notices and errors to stderr; errors are one line and an exit code."""

import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from paceline.cli.standard_streams import StdoutError, drop_stdout
from paceline.errors import ConfigError, IncompatibleDrafterError, PacelineError, RequestError, printable

EXIT_FAILURE = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
EXIT_TERMINATED = 143  # 128 + SIGTERM
_ADVICE = re.compile(r"\b(raise|lower) ([a-z]+(?:_[a-z]+)+)\b")  # a setting by its name in Python
CALLER_CAN_FIX = (RequestError, ConfigError, IncompatibleDrafterError)


def print_notice(text: str | Text) -> None:
    """Print to stderr, dim unless the text has styles of its own; a terminal gets lines that are folded between words.

    Names in a text come from files: their control characters must not reach the terminal.
    """
    shown = text if isinstance(text, Text) else Text("\n".join(map(printable, _with_options(text).split("\n"))), style="dim")
    console = Console(stderr=True, highlight=False)  # one of its own each time: tests and shells replace sys.stderr
    console.print(shown, soft_wrap=not console.is_terminal)


def print_error(error: PacelineError | str) -> None:
    """Print one line `error: …` to stderr."""
    line = Text.assemble(("error: ", "bold red"), printable(_with_options(" ".join(str(error).split()))))
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


def _with_options(text: str) -> str:
    """Return a message whose advice names command-line options instead of arguments of the Python API."""
    return _ADVICE.sub(lambda match: f"{match[1]} --{match[2].replace('_', '-')}", text)


def exit_code(error: PacelineError) -> int:
    """Return 2 for errors the caller can fix, else 1."""
    return EXIT_WRONG_INPUT if isinstance(error, CALLER_CAN_FIX) else EXIT_FAILURE


@contextmanager
def reported_errors(*, debug: bool) -> Iterator[None]:
    """Silence libraries, and turn what a command raises into a line on stderr and an exit code.

    Args:
        debug: whether to show what libraries print, and tracebacks.

    Raises:
        typer.Exit: 2 for errors the caller can fix, 130 for Ctrl-C, 1 for everything else; a closed pipe prints nothing.
        StdoutError: stdout cannot be written.
    """
    if not debug:
        _quieten_libraries()
    try:
        yield
        sys.stdout.flush()
    except PacelineError as error:
        if debug:
            traceback.print_exc()
        print_error(error)
        raise typer.Exit(exit_code(error)) from None
    except KeyboardInterrupt:
        print_notice("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        drop_stdout()
        raise typer.Exit(EXIT_FAILURE) from None
    except Exception as error:
        if isinstance(error, (typer.Exit, StdoutError)):  # `main` reports the second for all commands
            raise
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 wraps one that comes while an import creates a class
            print_notice("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        if debug:
            traceback.print_exc()
        print_error(f"{type(error).__name__}: {error} (unexpected; --debug prints where)")
        raise typer.Exit(EXIT_FAILURE) from None


def _quieten_libraries() -> None:
    """Silence libraries' messages, unless the user's settings ask for them. Download progress is for terminals only."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
