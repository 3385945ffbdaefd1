"""The command line: one file a command. Heavy modules are imported after a command has checked its options."""

import io
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
from paceline.cli.run import run
from paceline.cli.serve import serve
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character must not end the program
            stream.reconfigure(errors="backslashreplace" if stream is sys.stderr else "replace")
    app()
