"""`paceline recommend`: who should guess for a model on this machine, and with which command."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import MODEL, DraftQuant
from paceline.cli.reporting import EXIT_FAILURE, reported_errors, say_error
from paceline.config import QUANT, EngineConfig, SpeculationConfig, quant_options
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.proof.recommendation.advice import Advice

LOOK_IN_HELP = "A further directory to look for drafters in; may be given several times."
DOWNLOAD_HELP = "Fetch this drafter from the Hugging Face Hub first. Nothing else is ever downloaded."
LOAD_HELP = "Load the model and time its passes; without it no speed is predicted."
JSON_HELP = "Write everything to this file as well."


def recommend(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL.options["model"])] = "mini",
    gguf_file: Annotated[str | None, typer.Option("--gguf-file", help=MODEL.options["gguf_file"])] = None,
    quantization: Annotated[str, typer.Option("--quantization", help=MODEL.options["quantization"], metavar="|".join(QUANT))] = "none",
    draft_quantization: DraftQuant = "auto",
    threads: Annotated[int | None, typer.Option("--threads", help=MODEL.options["threads"])] = None,
    look_in: Annotated[list[Path] | None, typer.Option("--look-in", help=LOOK_IN_HELP, metavar="<dir>")] = None,
    download: Annotated[str | None, typer.Option("--download", help=DOWNLOAD_HELP, metavar="<id>")] = None,
    load: Annotated[bool, typer.Option("--load/--no-load", help=LOAD_HELP)] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help=JSON_HELP, metavar="FILE")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks and what libraries warn about.")] = False,
) -> None:
    """Say which drafters there are for a model, what each would bring on this machine, and the command that uses it.

    Exit code 1: the model itself cannot be run here.
    """
    with reported_errors(debug=debug):
        EngineConfig(model=model, gguf_file=gguf_file, quantization=quantization, threads=threads)
        SpeculationConfig(draft_quantization=draft_quantization)
        if json_file is not None and not json_file.parent.is_dir():
            raise ConfigError(f"--json is {json_file}: there is no directory {json_file.parent}; create it, or name another file")
        from paceline.proof.recommendation.recommend import RecommendQuestion
        from paceline.proof.recommendation.recommend import recommend as advise

        if not debug:
            from paceline.cli.loading import quieten_libraries

            quieten_libraries()
        for directory in look_in or ():
            if not os.path.isdir(directory):
                raise ConfigError(f"--look-in {directory}: there is no such directory that can be read; name one that holds drafters")
        question = RecommendQuestion(
            model=model,
            gguf_file=gguf_file,
            quantization=(quantization, quant_options("quantization", quantization)),
            draft_quantization=draft_quantization,
            threads=threads,
            look_in=tuple(look_in or ()),
            download=download,
            measures=load,
        )
        found = advise(question)
        _print(found)
        if json_file is not None:
            _write(found, json_file)
    if found.problems:
        raise typer.Exit(EXIT_FAILURE)


def _print(found: "Advice") -> None:
    from rich.console import Console

    from paceline.cli.recommend_report import report

    for problem in found.problems:
        say_error(problem)
    if not found.problems:
        Console(file=sys.stdout, highlight=False).print(report(found), soft_wrap=False)


def _write(found: "Advice", path: Path) -> None:
    try:
        path.write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json is {path}, which cannot be written ({error.strerror}): name another file") from error
