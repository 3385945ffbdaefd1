"""The command line: one file a command. Heavy modules are imported after a command has checked its options."""

import sys
from typing import Annotated

import typer

from paceline import __version__
from paceline.cli.batch import batch
from paceline.cli.bench import bench
from paceline.cli.chat import chat
from paceline.cli.command import HELP_NAMES, Command, Commands
from paceline.cli.doctor import doctor
from paceline.cli.prove import prove
from paceline.cli.reporting import EXIT_FAILURE, print_error
from paceline.cli.run import run
from paceline.cli.serve import serve
from paceline.cli.standard_streams import StdoutError, flushed_stdout, prepare_streams
from paceline.cli.train import train

app = typer.Typer(
    name="paceline",
    cls=Commands,
    help="Faster generation with local language models by speculative decoding, without changing a token.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": list(HELP_NAMES)},
)
for _command in (chat, run, serve, batch, doctor, prove, bench, train):
    app.command(cls=Command)(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _paceline(
    version: Annotated[
        bool, typer.Option("-V", "--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Run the command line and exit with its code: 0, 2 for errors the caller can fix, 130 for Ctrl-C, 1 for the rest."""
    prepare_streams()
    try:
        with flushed_stdout():
            app()
    except StdoutError as error:
        print_error(str(error))
        sys.exit(EXIT_FAILURE)
    except BrokenPipeError:
        sys.exit(EXIT_FAILURE)
