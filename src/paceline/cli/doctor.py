"""`paceline doctor`: check a model and its drafters from their files, and list drafters to try."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import (
    MEMORY,
    METAVARS,
    MODEL,
    SPECULATION,
    DraftQuant,
    KVCacheDtypeName,
    ModelArgument,
    ModelOption,
    flags_of,
    model_or_mini,
    named_directories,
    named_values,
)
from paceline.cli.reporting import EXIT_FAILURE, print_notice, reported_errors
from paceline.config import DEVICES, QUANT, EngineConfig, SpeculationConfig, quant_options
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.proof.doctor import Diagnosis
    from paceline.proof.fetch_drafter import Fetched

MEMORY_HELP = "Judge by this much memory, in gigabytes. Default: what is free here."
FETCH_HELP = "Download the recommended drafter, or that of --drafter, and check it; auto uses it from then on."
PROBE_HELP = "Load everything, time passes, draft for a few short texts, and predict the speedup."
Drafters = Annotated[
    list[str] | None, typer.Option(*flags_of("drafter"), help=SPECULATION.options["drafter"], metavar="<str>", show_default="auto")
]
DrafterOptions = Annotated[
    list[str] | None,
    typer.Option("--drafter-options", help=SPECULATION.options["drafter_options"], metavar=METAVARS["drafter_options"]),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option("--adapter", help="A LoRA adapter for it: a name and its directory; may be given several times.", metavar="NAME=DIR"),
]


def doctor(
    *,
    model_argument: ModelArgument = None,
    model: ModelOption = None,
    gguf_file: Annotated[str | None, typer.Option("--gguf-file", help=MODEL.options["gguf_file"])] = None,
    drafter: Drafters = None,
    quantization: Annotated[str, typer.Option("--quantization", help=MODEL.options["quantization"], metavar="|".join(QUANT))] = "none",
    draft_quantization: DraftQuant = "auto",
    draft_adapter: Annotated[str | None, typer.Option("--draft-adapter", help=SPECULATION.options["draft_adapter"])] = None,
    drafter_options: DrafterOptions = None,
    kv_cache_dtype: KVCacheDtypeName = "auto",
    adapter: Adapters = None,
    merge_adapter: Annotated[str | None, typer.Option("--merge-adapter", help=MODEL.options["merge_adapter"])] = None,
    max_model_len: Annotated[int | None, typer.Option(*flags_of("max_model_len"), help=MEMORY.options["max_model_len"])] = None,
    device: Annotated[str, typer.Option("--device", help=MODEL.options["device"], metavar="|".join(DEVICES))] = "auto",
    threads: Annotated[int | None, typer.Option(*flags_of("threads"), help=MODEL.options["threads"])] = None,
    memory_gb: Annotated[float | None, typer.Option("--memory-gb", help=MEMORY_HELP)] = None,
    probe: Annotated[bool, typer.Option("--probe", help=PROBE_HELP)] = False,
    fetch: Annotated[bool, typer.Option("--fetch", help=FETCH_HELP)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks and what libraries warn about.")] = False,
) -> None:
    """Report the memory of a model, whether its drafter fits, and why (not).

    It lists drafters published for the model. Only --fetch downloads, and only --probe loads weights. Exit code 1: it cannot work.
    """
    with reported_errors(debug=debug):
        model = model_or_mini(model_argument, model, prints=not as_json)
        names = tuple(drafter or ("auto",))
        engine = EngineConfig(
            model=model, gguf_file=gguf_file, quantization=quantization, kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len, device=device, threads=threads, merge_adapter=merge_adapter, offline=True,
        )  # fmt: skip
        speculation = SpeculationConfig(
            drafter=names[0] if len(names) == 1 else names, draft_quantization=draft_quantization, draft_adapter=draft_adapter,
            drafter_options=named_values(drafter_options or ()),
        )  # fmt: skip
        from paceline.proof.doctor import DoctorOptions, diagnose

        question = DoctorOptions(
            model=model, gguf_file=gguf_file, drafters=names, drafter_options=speculation.drafter_options,
            adapters=named_directories(adapter or ()), merge_adapter=merge_adapter, draft_adapter=draft_adapter,
            quantization=quant_options("quantization", engine.quantization), draft_quantization=speculation.draft_quantization,
            kv_cache_dtype=kv_cache_dtype, max_model_len=max_model_len,
            device=device, memory_bytes=None if memory_gb is None else _bytes(memory_gb),
            probe_arguments=_probe_arguments(engine, speculation) if probe else None,
        )  # fmt: skip
        if probe and not debug:
            _quieten()
        if not fetch:
            return _print(diagnose(question), as_json=as_json)
        from paceline.proof.fetch_drafter import fetch_drafter

        _print(*fetch_drafter(question, print_notice), as_json=as_json)


def _quieten() -> None:
    from paceline.cli.loading import quieten_libraries

    quieten_libraries()


def _bytes(memory_gb: float) -> int:
    if not 0 < memory_gb <= 100_000:
        raise ConfigError(f"memory_gb is {memory_gb}: use a size in gigabytes above 0 and at most 100000, such as 16 or 7.5")
    return int(memory_gb * 1e9)


def _probe_arguments(engine: EngineConfig, speculation: SpeculationConfig) -> dict[str, object]:
    of_engine = ("model", "gguf_file", "quantization", "kv_cache_dtype", "max_model_len", "device", "threads", "merge_adapter", "offline")
    return {name: getattr(engine, name) for name in of_engine} | {
        "drafter": speculation.drafter,
        "draft_quantization": speculation.draft_quantization,
        "draft_adapter": speculation.draft_adapter,
        "drafter_options": speculation.drafter_options,
    }


def _print(found: "Diagnosis", fetched: "Fetched | None" = None, *, as_json: bool) -> None:
    """Print a diagnosis.

    Raises:
        typer.Exit: something cannot work.
    """
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
