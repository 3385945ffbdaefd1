"""`paceline train`: train a drafter for a target on this machine."""

import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import MODEL as MODEL_PANEL
from paceline.cli.options import OUTPUT
from paceline.cli.reporting import EXIT_INTERRUPTED, print_notice, reported_errors
from paceline.errors import BackendUnavailableError, ConfigError
from paceline.installation import install_command

WHAT, DATA, HOW = "What is trained", "Data", "How"


def _option(name: str, text: str, panel: str, **more: Any) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel, show_default=False, **more)


Method = Annotated[str, typer.Argument(help="What to train: eagle3, dspark, dflash, medusa or draft-model.", metavar="DRAFTER")]
Output = Annotated[Path, _option("--output", "Directory of the data, the checkpoint and the drafter.", OUTPUT)]
Model = Annotated[str | None, _option("--model", MODEL_PANEL.options["model"], WHAT, metavar="<str>")]
GgufFile = Annotated[str | None, _option("--gguf-file", MODEL_PANEL.options["gguf_file"], WHAT, metavar="<str>")]
Boundaries = Annotated[
    str | None,
    _option(
        "--boundaries", "Layer boundaries to record, such as 2,15,27. Default: 2, L / 2, L - 3; draft-model: none.", WHAT, metavar="<ids>"
    ),
]
DraftVocab = Annotated[int | None, _option("--draft-vocab-size", "Ids that can be drafted. Default: 16384, from E = 1536 on 32768.", WHAT)]
NumLayers = Annotated[
    int | None, _option("--num-layers", "Layers of dspark, dflash (default: 2) and draft-model (4, at most L / 2).", WHAT)
]
BlockSize = Annotated[int | None, _option("--block-size", "Rows of a block of dspark and dflash. Default: 7.", WHAT)]
MarkovRank = Annotated[int | None, _option("--markov-rank", "Rank of the bias of dspark. Default: 96.", WHAT)]
NumHeads = Annotated[int | None, _option("--num-heads", "Heads of medusa. Default: 4.", WHAT)]
Files = Annotated[
    list[Path] | None,
    _option(
        "--data", "A file of prompts, conversations (JSON, JSON lines) or text; several times. Default: the target writes user turns.", DATA
    ),
]
EvalFiles = Annotated[
    list[Path] | None, _option("--eval-data", "A file of held-out prompts; several times. Default: 5 % of the prompts, at most 64.", DATA)
]
Answers = Annotated[str | None, _option("--answers", "target (default): it answers the prompts. keep: those in the files.", DATA)]
NumPrompts = Annotated[int | None, _option("--num-prompts", "Training prompts at most. Default: 4000.", DATA)]
SelfPrompts = Annotated[
    int | None, _option("--self-prompts", "User turns that the target writes. Default: all without --data, else 0.", DATA)
]
NumEval = Annotated[int | None, _option("--num-eval-prompts", "Held-out prompts of each file. Default: 16.", DATA)]
PromptTokens = Annotated[int | None, _option("--max-prompt-tokens", "Longer prompts are left out. Default: 256.", DATA)]
AnswerTokens = Annotated[int | None, _option("--max-answer-tokens", "Tokens of an answer. Default: 192.", DATA)]
Temperatures = Annotated[
    str | None, _option("--temperatures", "Of the target's answers, in turns. Default: 0,0,0.7.", DATA, metavar="<numbers>")
]
Minutes = Annotated[float | None, _option("--minutes", "Of training, without recording the data. Default: 30.", HOW)]
Steps = Annotated[int | None, _option("--steps", "Train for so many steps instead.", HOW)]
TttSteps = Annotated[int | None, _option("--ttt-steps", "Steps of training-time test (eagle3). Default: 3.", HOW)]
Loss = Annotated[str | None, _option("--loss", "soft (default): the target's distribution. hard: the tokens of the text.", HOW)]
LearningRate = Annotated[float | None, _option("--learning-rate", "Highest. Default: 1.2e-3, from E = 1536 on 3e-4.", HOW)]
BatchTokens = Annotated[int | None, _option("--batch-tokens", "Answer positions of a step. Default: 1536.", HOW)]
Seed = Annotated[int | None, _option("--seed", "Of prompts, answers, start values and order. Default: 0.", HOW)]
Threads = Annotated[int | None, _option("--threads", MODEL_PANEL.options["threads"], HOW)]
Device = Annotated[str | None, _option("--device", "Where the drafter is trained: auto, cpu or cuda.", HOW, metavar="<str>")]
TreeWidth = Annotated[int | None, _option("--tree-width", "Of the drafter in the evaluation. Default: 1.", HOW)]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --output, with its settings.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print nothing but errors.", rich_help_panel=OUTPUT)]
Debug = Annotated[bool, typer.Option("--debug", help="Print tracebacks and what libraries warn about.", rich_help_panel=OUTPUT)]


def train(
    drafter: Method,
    *,
    output: Output,
    model: Model = None,
    gguf_file: GgufFile = None,
    boundaries: Boundaries = None,
    draft_vocab_size: DraftVocab = None,
    num_layers: NumLayers = None,
    block_size: BlockSize = None,
    markov_rank: MarkovRank = None,
    num_heads: NumHeads = None,
    data: Files = None,
    eval_data: EvalFiles = None,
    answers: Answers = None,
    num_prompts: NumPrompts = None,
    self_prompts: SelfPrompts = None,
    num_eval_prompts: NumEval = None,
    max_prompt_tokens: PromptTokens = None,
    max_answer_tokens: AnswerTokens = None,
    temperatures: Temperatures = None,
    minutes: Minutes = None,
    steps: Steps = None,
    ttt_steps: TttSteps = None,
    loss: Loss = None,
    learning_rate: LearningRate = None,
    batch_tokens: BatchTokens = None,
    seed: Seed = None,
    threads: Threads = None,
    device: Device = None,
    tree_width: TreeWidth = None,
    resume: Resume = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a drafter for a model on this machine, and measure what it brings.

    The target answers the prompts itself; its answers and hidden states stay in the directory. Ctrl-C saves, --resume continues.
    """
    given = dict(locals())
    with reported_errors(debug=debug):
        _train(given, output, resume=resume, quiet=quiet, debug=debug)


def _train(given: dict[str, Any], output: Path, *, resume: bool, quiet: bool, debug: bool) -> None:
    from paceline.cli.loading import quieten_libraries

    if not debug:
        quieten_libraries()
    try:
        import torch  # noqa: F401

        from paceline.training.run import train as run_training
        from paceline.training.settings import TrainSettings
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
            values[name] = _numbers(name, values[name], kind)
    settings = TrainSettings(**values, command=shlex.join(["paceline", *sys.argv[1:]]))
    is_finished = run_training(settings, output, (lambda text: None) if quiet else print_notice, is_resumed=resume)
    if not is_finished:
        raise typer.Exit(EXIT_INTERRUPTED)


def _numbers(name: str, text: str, kind: type[int] | type[float]) -> tuple[float, ...]:
    """Return the numbers of a list.

    Raises:
        ConfigError: it holds something else.
    """
    try:
        return tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"{name} is {text!r}: use numbers with commas between them") from None
