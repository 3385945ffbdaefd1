"""From validated settings to a loaded model, the only place of the command line where heavy libraries are imported."""

import os
import sys
import warnings
from typing import TYPE_CHECKING

from paceline.cli.options import Settings
from paceline.cli.reporting import say

if TYPE_CHECKING:
    from paceline.llm import LLM


def load(settings: Settings) -> "LLM":
    """The model, with what loading had to say printed to stderr.

    Raises:
        PacelineError: it cannot be loaded.
    """
    if not settings.debug:
        quieten_libraries()
    if sys.stderr.isatty() and not settings.quiet:
        say(f"loading {settings.engine.model}")
    from paceline.llm import LLM

    llm = LLM(**settings.llm_arguments())
    for notice in llm.notices:
        say(notice)
    if not settings.quiet:
        say(llm.banner)
    return llm


def quieten_libraries() -> None:
    """Silence libraries' messages, unless the user's settings ask for them. Download progress is for terminals only."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
