"""`paceline doctor`: check a model and its drafters from their files, and list drafters to try."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import ADAPTERS, MEMORY, MODEL, OUTPUT, SPECULATION, Settings, with_settings
from paceline.cli.reporting import EXIT_FAILURE, print_notice
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.proof.doctor import Diagnosis
    from paceline.proof.fetch_drafter import Fetched

MEMORY_HELP = "Judge by this much memory, in gigabytes. Default: what is free here."
FETCH_HELP = "Download the recommended drafter, or that of --drafter, and check it; auto uses it from then on."
PROBE_HELP = "Load everything, time passes, and measure the speedup on sample texts or --prompts."
PROMPTS_HELP = "Your own prompts for --probe: lines of text, or JSON lines."
PANELS = (
    MODEL.part("model", "gguf_file", "quantization", "threads", "merge_adapter", "device"),
    ADAPTERS,
    MEMORY.part("max_model_len", "kv_cache_dtype"),
    SPECULATION.part("drafter", "draft_quantization", "draft_adapter", "drafter_options"),
)


@partial(with_settings, panels=PANELS)
def doctor(
    *,
    memory_gb: Annotated[float | None, typer.Option("--memory-gb", help=MEMORY_HELP)] = None,
    probe: Annotated[bool, typer.Option("--probe", help=PROBE_HELP)] = False,
    prompts: Annotated[Path | None, typer.Option("--prompts", help=PROMPTS_HELP)] = None,
    fetch: Annotated[bool, typer.Option("--fetch", help=FETCH_HELP)] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else on stdout.", rich_help_panel=OUTPUT)
    ] = False,
    settings: Settings,
) -> None:
    """Report the memory of a model, whether its drafter fits, and why (not).

    It lists drafters published for the model. Only --fetch downloads, and only --probe loads weights. Exit code 1: it cannot work.
    """
    for line in [] if as_json else settings.start_lines:
        print_notice(line)
    if memory_gb is not None and not 0 < memory_gb <= 100_000:
        raise ConfigError(f"memory_gb is {memory_gb}: use a size in gigabytes above 0 and at most 100000, such as 16 or 7.5")
    if prompts is not None and not probe:
        raise ConfigError("--prompts is for --probe, which measures the speedup on them: add --probe")
    from paceline.prompt_file import read_prompts
    from paceline.proof.doctor import DoctorOptions, diagnose

    question = DoctorOptions(
        engine=settings.engine,
        speculation=settings.speculation,
        memory_bytes=None if memory_gb is None else int(memory_gb * 1e9),
        probe_prompts=() if prompts is None else read_prompts(prompts),
        probe_arguments={**settings.llm_arguments(), "adapters": {}, "offline": True} if probe else None,
    )
    if not fetch:
        return _print(diagnose(question), as_json=as_json)
    from paceline.proof.fetch_drafter import fetch_drafter

    _print(*fetch_drafter(question, print_notice), as_json=as_json)


def _print(found: "Diagnosis", fetched: "Fetched | None" = None, *, as_json: bool) -> None:
    from rich.console import Console

    from paceline.proof.doctor_text import report

    if as_json:
        print(json.dumps(found.as_dict() | ({} if fetched is None else {"fetched": fetched.as_dict()})))
    else:
        Console(file=sys.stdout, highlight=False).print(report(found), soft_wrap=False, crop=False)
        if fetched is not None:
            print_notice(
                f"{fetched.drafter} is in {fetched.path}; " + ("auto uses it from now on" if fetched.is_used else "auto does not use it")
            )
    if not found.works:
        raise typer.Exit(EXIT_FAILURE)
