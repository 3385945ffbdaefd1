"""`paceline train`: train a drafter for a target on this machine."""

import inspect
import shlex
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import DEBUG, MODEL, OUTPUT, numbers, option, with_parameters
from paceline.cli.reporting import EXIT_INTERRUPTED, print_notice, reported_errors
from paceline.errors import BackendUnavailableError, ConfigError
from paceline.installation import install_command

WHAT, DATA, HOW = "What is trained", "Data", "How"


def _option(flag: str, hint: Any, text: str, panel: str, **more: Any) -> inspect.Parameter:
    return option(flag, hint=hint | None, text=text, panel=panel, show_default=False, **more)


_METHOD = typer.Argument(help="What to train: eagle3, dspark, dflash, medusa or draft-model.", metavar="DRAFTER")
_OPTIONS = (
    inspect.Parameter("drafter", inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[str, _METHOD]),
    option(
        "--output",
        hint=Path,
        text="Directory of the data, the checkpoint and the drafter.",
        panel=OUTPUT,
        default=inspect.Parameter.empty,
        show_default=False,
    ),
    _option("--model", str, MODEL.options["model"], WHAT, metavar="<str>"),
    _option("--gguf-file", str, MODEL.options["gguf_file"], WHAT, metavar="<str>"),
    _option(
        "--boundaries",
        str,
        "Layer boundaries to record, such as 2,15,27. Default: 2, L / 2, L - 3; draft-model: none.",
        WHAT,
        metavar="<ids>",
    ),
    _option("--draft-vocab-size", int, "Ids that can be drafted. Default: 16384, from E = 1536 on 32768.", WHAT),
    _option("--num-layers", int, "Layers of dspark, dflash (default: 2) and draft-model (4, at most L / 2).", WHAT),
    _option("--block-size", int, "Rows of a block of dspark and dflash. Default: 7.", WHAT),
    _option("--markov-rank", int, "Rank of the bias of dspark. Default: 96.", WHAT),
    _option("--num-heads", int, "Heads of medusa. Default: 4.", WHAT),
    _option(
        "--data",
        list[Path],
        "A file of prompts, conversations (JSON, JSON lines) or text; several times. Default: the target writes user turns.",
        DATA,
    ),
    _option("--eval-data", list[Path], "A file of held-out prompts; several times. Default: 5 % of the prompts, at most 64.", DATA),
    _option("--answers", str, "target (default): it answers the prompts. keep: those in the files.", DATA),
    _option("--num-prompts", int, "Training prompts at most. Default: 4000.", DATA),
    _option("--self-prompts", int, "User turns that the target writes. Default: all without --data, else 0.", DATA),
    _option("--num-eval-prompts", int, "Held-out prompts of each file. Default: 16.", DATA),
    _option("--max-prompt-tokens", int, "Longer prompts are left out. Default: 256.", DATA),
    _option("--max-answer-tokens", int, "Tokens of an answer. Default: 192.", DATA),
    _option("--temperatures", str, "Of the target's answers, in turns. Default: 0,0,0.7.", DATA, metavar="<numbers>"),
    _option("--minutes", float, "Of training, without recording the data. Default: 30.", HOW),
    _option("--steps", int, "Train for so many steps instead.", HOW),
    _option("--ttt-steps", int, "Steps of training-time test (eagle3). Default: 3.", HOW),
    _option("--loss", str, "soft (default): the target's distribution. hard: the tokens of the text.", HOW),
    _option("--learning-rate", float, "Highest. Default: 1.2e-3, from E = 1536 on 3e-4.", HOW),
    _option("--batch-tokens", int, "Answer positions of a step. Default: 1536.", HOW),
    _option("--seed", int, "Of prompts, answers, start values and order. Default: 0.", HOW),
    _option("--threads", int, MODEL.options["threads"], HOW),
    _option("--device", str, "Where the drafter is trained: auto, cpu or cuda.", HOW, metavar="<str>"),
    _option("--tree-width", int, "Of the drafter in the evaluation. Default: 1.", HOW),
    option("--resume", hint=bool, text="Continue the run in --output, with its settings.", panel=OUTPUT, default=False),
    option("-q", "--quiet", hint=bool, text="Print nothing but errors.", panel=OUTPUT, default=False),
    DEBUG,
)


@partial(with_parameters, parameters=_OPTIONS)
def train(**given: Any) -> None:
    """Train a drafter for a model on this machine, and measure its speedup.

    The target answers the prompts itself; its answers and hidden states stay in the directory. Ctrl-C saves, --resume continues.
    """
    with reported_errors(debug=given["debug"]):
        _train(given, given["output"], resume=given["resume"], quiet=given["quiet"])


def _train(given: dict[str, Any], output: Path, *, resume: bool, quiet: bool) -> None:
    try:
        import torch  # noqa: F401

        from paceline.training.run import train as run_training
        from paceline.training.settings import SETTINGS_FILE, TrainSettings
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        raise BackendUnavailableError(f"training needs {error.name}: {install_command('train')}") from error
    names = {one.name for one in fields(TrainSettings)}
    values = {name: value for name, value in given.items() if name in names and value is not None}
    if resume and (others := sorted(set(values) - {"drafter"})):
        flags = ", ".join("--" + one.replace("_", "-") for one in others)
        raise ConfigError(f"--resume uses the settings of {output}: leave out {flags}")
    for name in ("data", "eval_data"):
        values[name] = tuple(str(path.absolute()) for path in given[name] or ())
    if model := values.get("model"):  # --resume may run elsewhere
        values["model"] = str(Path(model).absolute()) if Path(model).exists() else model
    for name, kind in (("boundaries", int), ("temperatures", float)):
        if name in values:
            values[name] = numbers(name, values[name], kind)
    settings = TrainSettings(**values, command=shlex.join(["paceline", *sys.argv[1:]]))
    try:
        is_finished = run_training(settings, output, (lambda text: None) if quiet else print_notice, is_resumed=resume)
    except KeyboardInterrupt:
        if not (output / SETTINGS_FILE).is_file():
            raise
        print_notice(f"interrupted: paceline train {settings.drafter} --output {output} --resume goes on")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if not is_finished:
        raise typer.Exit(EXIT_INTERRUPTED)
