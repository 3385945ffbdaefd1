"""Load the model of validated settings. Only this module of the command line imports heavy libraries."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.cli.options import Settings
from paceline.cli.reporting import print_notice
from paceline.errors import ConfigError
from paceline.sampling.params import MAX_INT, SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM


def load(settings: Settings) -> "LLM":
    """Load the model; print notices of loading to stderr.

    Raises:
        PacelineError: it cannot be loaded.
    """
    if sys.stderr.isatty() and not settings.quiet:
        print_notice(f"loading {settings.engine.model}")
    from paceline.llm import LLM

    llm = LLM(**settings.llm_arguments())
    for notice in llm.notices:
        print_notice(notice)
    if not settings.quiet:
        for line in (*settings.start_lines, llm.banner):
            print_notice(line)
    return llm


def chat_sampling(llm: "LLM", settings: Settings) -> SamplingParams:
    """Return the sampling parameters of conversations: those that were given, else the model's own; print them.

    Unless a limit was given, an answer may use the rest of the context, as in other programs for conversations.
    """
    params = settings.sampling if "max_tokens" in settings.given_sampling else replace(settings.sampling, max_tokens=MAX_INT)
    params = llm.sampling_defaults.apply_chat_defaults(params, settings.given_sampling)
    if not settings.quiet:
        print_notice(llm.sampling_defaults.describe(params))
    return params


def check_takes_messages(settings: Settings) -> None:
    """Check that the model's files hold a chat template, before weights are loaded.

    Raises:
        CheckpointError: there is no such model.
        ConfigError: it has no chat template.
    """
    from paceline.hub import resolve_model
    from paceline.tokenizer.tokenizer import has_chat_template

    engine = settings.engine
    path = resolve_model(engine.model, gguf_file=engine.gguf_file, revision=engine.revision, token=engine.hf_token, offline=engine.offline)
    if not has_chat_template(path):
        raise ConfigError(
            f"{engine.model} has no chat template, so it takes no messages: use a model trained for conversations (many are "
            f'named -Instruct or -Chat), or complete texts: paceline run {engine.model} "TEXT"'
        )
