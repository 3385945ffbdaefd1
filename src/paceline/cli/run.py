"""`paceline run`: complete a text, or answer one message."""

import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline import __version__
from paceline.cli.options import OUTPUT, Settings, checked_text, with_settings
from paceline.cli.reporting import EXIT_INTERRUPTED, print_notice
from paceline.errors import CheckpointError, ConfigError, RequestError
from paceline.hub import MINI
from paceline.small_files import open_regular_file

if TYPE_CHECKING:
    from paceline.llm import LLM

MAX_PREDICTION_BYTES = 64_000_000
SHOW_DRAFTS_HELP = (
    "Show where each token came from: accepted drafts green, bonus tokens bold, plain tokens yellow and underlined. "
    "Without a terminal or with NO_COLOR, accepted runs are in square brackets and plain ones in curly brackets. A legend goes to stderr."
)
ShowDrafts = Annotated[bool, typer.Option("--show-drafts", help=SHOW_DRAFTS_HELP, rich_help_panel=OUTPUT)]
System = Annotated[str | None, typer.Option("--system", help="A system message; implies --chat.", rich_help_panel="Prompt")]
Explain = Annotated[
    bool,
    typer.Option(
        "--explain",
        help="Print details at the end: acceptance, seed, expected and measured tokens of the steps, and the costs of passes.",
        rich_help_panel=OUTPUT,
    ),
]
TEXT_HELP = 'The text; absent or "-": standard input, every byte of it, a final newline included.'
PROMPT_HELP = "The text; then a single argument is MODEL."
CHAT_HELP = "Apply the model's chat template: the text is a message."
PREDICTION_HELP = (
    "A text the output will resemble, such as the file that is to be edited; it is drafted from first. It changes the speed, never a token."
)
_ONE_WORD = re.compile(r"[\w./:-]+")  # Ollama's users begin with: run NAME
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def names_model(word: str) -> bool:
    """Return whether a single argument is MODEL and not TEXT: "mini", a directory, a *.gguf file or a Hugging Face id."""
    return word == MINI or word.lower().endswith(".gguf") or bool(_HUB_ID.fullmatch(word)) or _is_directory(word)


def _is_directory(word: str) -> bool:
    try:
        return Path(word).is_dir()
    except (OSError, ValueError):  # too long, or with a null character: a text
        return False


def sort_words(values: dict[str, Any]) -> None:
    """Make a single positional argument TEXT, unless it names a model and no other option does, or --prompt gives the text."""
    word = values["model_argument"]
    is_model = values["model"] is None and word is not None and (values["prompt_option"] is not None or names_model(word))
    if values["prompt"] is None and not is_model:
        values["model_argument"], values["prompt"] = None, word


@partial(with_settings, sort_words=sort_words)
def run(
    *,
    prompt: Annotated[str | None, typer.Argument(metavar="TEXT", help=TEXT_HELP, show_default=False)] = None,
    prompt_option: Annotated[str | None, typer.Option("-p", "--prompt", help=PROMPT_HELP, rich_help_panel="Prompt")] = None,
    chat: Annotated[bool, typer.Option("--chat", help=CHAT_HELP, rich_help_panel="Prompt")] = False,
    system: System = None,
    prediction_file: Annotated[Path | None, typer.Option(help=PREDICTION_HELP, rich_help_panel="Prompt")] = None,
    show_drafts: ShowDrafts = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else on stdout.", rich_help_panel=OUTPUT)
    ] = False,
    explain: Explain = False,
    settings: Settings,
) -> None:
    """Complete a text as it is, or with --chat answer it: paceline run MODEL "TEXT".

    One argument alone is MODEL if it is "mini", a directory, a *.gguf file or of the form owner/name, and else TEXT for the mini.

    The output goes to stdout as it comes, with a newline at its end; everything else goes to stderr.
    """
    if prompt is not None and prompt_option is not None:
        raise ConfigError("the text is given twice, as an argument and with --prompt: give one of them")
    prompt = prompt_option if prompt is None else prompt
    if as_json and show_drafts:
        raise ConfigError("--json prints no stream for --show-drafts to colour: give one of them")
    text = checked_text("prompt", prompt) if prompt is not None and prompt != "-" else _read_stdin()
    if not text:
        raise RequestError("the prompt is empty: give a text, as an argument or on standard input", parameter="prompt")
    messages = None
    if chat or system is not None:
        first = [] if system is None else [{"role": "system", "content": checked_text("system", system)}]
        messages = [*first, {"role": "user", "content": text}]
    hints: dict[str, Any] = {"speculation": {"trees": True}} if explain else {}
    if settings.adapter is not None:
        hints["adapter"] = settings.adapter
    if prediction_file is not None:
        hints["prediction"], settings = _read_prediction(prediction_file), _with_prediction(settings)
    from paceline.cli.loading import chat_sampling, check_takes_messages, load

    if messages is not None:
        check_takes_messages(settings)
    llm = load(settings)
    if not settings.names_model and not settings.quiet and _ONE_WORD.fullmatch(text):
        print_notice(f'{text!r} is taken as the text and not as a model: paceline run MODEL "TEXT" gives both')
    if messages is not None:
        settings = replace(settings, sampling=chat_sampling(llm, settings))
    if as_json:
        _print_json(llm, text, messages, settings, hints)
    else:
        _print_stream(llm, text, messages, settings, hints, show_drafts=show_drafts, explain=explain)


def _with_prediction(settings: Settings) -> Settings:
    """Return the settings with the drafter "prediction" before the chosen ones."""
    given = settings.speculation.drafter
    names = (given,) if isinstance(given, str) else given
    if "prediction" in names:
        return settings
    return replace(settings, speculation=replace(settings.speculation, drafter=("prediction", *names)))


def _read_prediction(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # a pipe may never end, nor a device
            text = f"{path} is no regular file, and --prediction-file takes no other: write the text to a file and give that"
            raise RequestError(text, parameter="prediction")
        with open_regular_file(path) as file:
            content = file.read(MAX_PREDICTION_BYTES + 1)
        if len(content) > MAX_PREDICTION_BYTES:
            text = f"{path} has more than the {MAX_PREDICTION_BYTES} bytes that a prediction may have: give the part that matters"
            raise RequestError(text, parameter="prediction")
        return content.decode("utf-8")
    except CheckpointError as error:
        raise RequestError(str(error), parameter="prediction") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text at byte {error.start}; convert it first", parameter="prediction") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}; give a text file", parameter="prediction") from None


def _print_json(llm: "LLM", text: str, messages: list[dict[str, str]] | None, settings: Settings, hints: dict[str, Any]) -> None:
    if messages is None:
        (output,) = llm.generate(text, settings.sampling, **hints)
    else:
        output = llm.chat(messages, settings.sampling, **hints)
    print(json.dumps(output.as_dict(model=settings.engine.model, version=__version__)))


def _print_stream(
    llm: "LLM",
    text: str,
    messages: list[dict[str, str]] | None,
    settings: Settings,
    hints: dict[str, Any],
    *,
    show_drafts: bool,
    explain: bool,
) -> None:
    from paceline.cli.rendering import legend, print_statistics, write_stream, writer_for

    if show_drafts:
        print_notice(legend())
    params = settings.sampling
    stream = llm.stream(text, params, **hints) if messages is None else llm.stream_chat(messages, params, **hints)
    answer = write_stream(stream, writer_for(llm, show_drafts=show_drafts, wraps=messages is not None))
    print_statistics(llm, answer, params, is_short=not settings.quiet, is_detailed=explain)
    if answer.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _read_stdin() -> str:
    if sys.stdin.isatty():
        print_notice("reading the prompt from the terminal; Ctrl-D on an empty line ends it (paceline chat MODEL is for conversations)")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text at byte {error.start}; convert it first", parameter="prompt") from None
    except OSError as error:
        raise RequestError(f"standard input cannot be read: {error.strerror}; give a text file", parameter="prompt") from None
