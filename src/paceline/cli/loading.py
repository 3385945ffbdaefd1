"""Load the model of validated settings. Only this module of the command line imports heavy libraries."""

import os
import sys
import warnings
from typing import TYPE_CHECKING

from paceline.cli.options import Settings
from paceline.cli.reporting import print_notice

if TYPE_CHECKING:
    from paceline.llm import LLM


def load(settings: Settings) -> "LLM":
    """Load the model; print notices of loading to stderr.

    Raises:
        PacelineError: it cannot be loaded.
    """
    if not settings.debug:
        quieten_libraries()
    if sys.stderr.isatty() and not settings.quiet:
        print_notice(f"loading {settings.engine.model}")
    from paceline.llm import LLM

    llm = LLM(**settings.llm_arguments())
    for notice in llm.notices:
        print_notice(notice)
    if not settings.quiet:
        print_notice(llm.banner)
    return llm


def quieten_libraries() -> None:
    """Silence libraries' messages, unless the user's settings ask for them. Download progress is for terminals only."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
