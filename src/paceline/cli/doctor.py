"""`paceline doctor`: check a model and its drafters from their files, and list drafters to try."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.cli.options import MEMORY, METAVARS, MODEL, SPECULATION, DraftQuant, KVCacheDtypeName, named_directories, named_values
from paceline.cli.reporting import EXIT_FAILURE, reported_errors
from paceline.config import DEVICES, QUANT, EngineConfig, SpeculationConfig, quant_options
from paceline.errors import ConfigError, printable

if TYPE_CHECKING:
    from paceline.proof.doctor import Diagnosis, DoctorOptions

MEMORY_HELP = "Judge by this much memory, in gigabytes. Default: what is free here."
PROBE_HELP = "Load everything, time passes, draft for a few short texts, and predict the speedup."
Drafters = Annotated[list[str] | None, typer.Option("--drafter", help=SPECULATION.options["drafter"], metavar="<str>", show_default="auto")]
DrafterOptions = Annotated[
    list[str] | None,
    typer.Option("--drafter-options", help=SPECULATION.options["drafter_options"], metavar=METAVARS["drafter_options"]),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option("--adapter", help="A LoRA adapter for it: a name and its directory; may be given several times.", metavar="NAME=DIR"),
]
LOCATIONS = {"built_in": "built in", "checkpoint": "in the model's own files", "hub": "on the Hugging Face hub"}


def doctor(
    *,
    model: Annotated[str, typer.Option("--model", help=MODEL.options["model"])] = "mini",
    gguf_file: Annotated[str | None, typer.Option("--gguf-file", help=MODEL.options["gguf_file"])] = None,
    drafter: Drafters = None,
    quantization: Annotated[str, typer.Option("--quantization", help=MODEL.options["quantization"], metavar="|".join(QUANT))] = "none",
    draft_quantization: DraftQuant = "auto",
    draft_adapter: Annotated[str | None, typer.Option("--draft-adapter", help=SPECULATION.options["draft_adapter"])] = None,
    drafter_options: DrafterOptions = None,
    kv_cache_dtype: KVCacheDtypeName = "auto",
    adapter: Adapters = None,
    merge_adapter: Annotated[str | None, typer.Option("--merge-adapter", help=MODEL.options["merge_adapter"])] = None,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", help=MEMORY.options["max_model_len"])] = None,
    device: Annotated[str, typer.Option("--device", help=MODEL.options["device"], metavar="|".join(DEVICES))] = "auto",
    threads: Annotated[int | None, typer.Option("--threads", help=MODEL.options["threads"])] = None,
    memory_gb: Annotated[float | None, typer.Option("--memory-gb", help=MEMORY_HELP)] = None,
    probe: Annotated[bool, typer.Option("--probe", help=PROBE_HELP)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks and what libraries warn about.")] = False,
) -> None:
    """Report the memory of a model, whether its drafter fits, and why (not).

    It lists drafters published for the model. Nothing is downloaded; --probe loads weights. Exit code 1: it cannot work.
    """
    with reported_errors(debug=debug):
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
        found = diagnose(question)
        _print(found, question, as_json=as_json)
    if not found.works:
        raise typer.Exit(EXIT_FAILURE)


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


def _print(found: "Diagnosis", question: "DoctorOptions", *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.as_dict()))
        return
    from rich.console import Console

    from paceline.cli.doctor import report

    Console(file=sys.stdout, highlight=False).print(report(found), soft_wrap=False)


def report(found: "Diagnosis") -> Group:
    """Return the facts as one table, then notes, problems and the verdict."""
    facts = found.as_dict()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    rows = [*_target_rows(facts), *_drafter_rows(facts), *_adapter_rows(facts), *_memory_rows(facts), *_probe_rows(facts["probe"])]
    for name, text in rows:
        table.add_row(name, Text(printable(text)))  # file names are untrusted
    notes = [Text.assemble(("note: ", "yellow"), printable(note)) for note in _notes(facts)]
    problems = [Text.assemble(("problem: ", "bold red"), printable(problem)) for problem in facts["problems"]]
    verdict = Text("works", style="bold green") if facts["works"] else Text("does not work", style="bold red")
    return Group(*([table] if rows else []), *_suggestions(facts["suggested_drafters"]), *notes, *problems, verdict)


def _suggestions(suggested: list[dict[str, Any]]) -> list[Table | Text]:
    """Return a table of drafters to try, and a line on its assumptions."""
    if not suggested:
        return []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    names = ("--drafter", "method", "where", "parameters", "assumed acceptance", "speedup")
    for name in names:
        table.add_column(name, header_style="bold", overflow="fold")
    for one in suggested:
        acceptance, slowest, fastest = one["acceptance"], one["slowest"], one["fastest"]
        speedup = "not measured" if slowest is None else f"{slowest['speedup']:.2f} to {fastest['speedup']:.2f}x"
        parameters = "" if one["parameters"] is None else f"{one['parameters'] / 1e9:.2g} B"
        rates = f"{acceptance['low']:.0%} to {acceptance['high']:.0%}"
        table.add_row(one["drafter"], one["method"], LOCATIONS[one["location"]], parameters, rates, speedup)
    text = "Drafters to try. Acceptance rates are published ones; --probe predicts speedups from them for one request at a time."
    return [Text(), Text(text, style="dim"), table, Text()]


def _notes(facts: dict[str, Any]) -> list[str]:
    of_pairs = [note for drafter in facts["drafters"] if drafter["pair"] for note in drafter["pair"]["notes"]]
    of_probe = facts["probe"]["notices"] if facts["probe"] else []
    return [*facts["notes"], *of_pairs, *of_probe]


def _target_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if facts["target"] is None:
        return [("model", facts["model"])]
    return [("model", facts["target"]["path"]), ("", _network(facts["target"]))]


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count > 1 else ''}"


def _network(model: dict[str, Any]) -> str:
    return (
        f"{model['family']}, {model['parameters'] / 1e6:,.4g} million parameters, {_layers(model['layers'])}, hidden size "
        f"{model['hidden_size']}, {model['stored_as']} ({_size(model['stored_bytes'])}), context {model['max_model_len']} tokens, "
        f"vocabulary {model['vocabulary_rows']} rows"
        + ("" if model["vocabulary_ids"] is None else f" of which the tokenizer has {model['vocabulary_ids']}")
    )


def _drafter_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for drafter in facts["drafters"]:
        if drafter["head"] is not None:
            head = drafter["head"]
            size = f"{head['parameters'] / 1e6:,.4g} million parameters ({_size(head['stored_bytes'])})"
            rows += [("drafter", head["path"]), ("", f"{drafter['name']}, {size}"), ("pair", drafter["pair"]["summary"])]
            continue
        if drafter["model"] is None:
            rows.append(("drafter", drafter["name"]))
            continue
        rows += [("drafter", drafter["model"]["path"]), ("", _network(drafter["model"]))]
        if drafter["adapter"] is not None:
            rows.append(("", f"with the adapter {_adapter(drafter['adapter'])}"))
        rows.append(("pair", drafter["pair"]["summary"]))
    return rows


def _adapter_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    merged = facts["merged_adapter"]
    rows = [] if merged is None else [("merged", _adapter(merged))]
    return rows + [("adapter", _adapter(adapter)) for adapter in facts["adapters"]]


def _adapter(adapter: dict[str, Any]) -> str:
    more = "".join(f", {adapter[key]} {what}" for key, what in (("num_biases", "biases"), ("num_saved", "whole matrices")) if adapter[key])
    mixed = f"X-LoRA of {adapter['num_mixed']} adapters, " if adapter["num_mixed"] else ""
    size = f"{mixed}{adapter['num_products']} products of rank {adapter['largest_rank']} at most{more} ({_size(adapter['nbytes'])})"
    return f"{adapter['name']}: fits; {size}"


def _memory_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    memory = facts["memory"]
    if memory is None:
        return []
    sliding = "".join(f"; layers with a window keep at most {rows} tokens" for rows in memory["target_windows"][:1])
    state = f"; recurrent layers keep {_size(memory['target_state_bytes'])} a text" if memory["target_state_bytes"] else ""
    rows = [
        (
            "memory",
            f"target {_size(memory['target_weights_bytes'])}, {_size(memory['target_cache_bytes_per_1k_tokens'])} for every 1000 tokens"
            f"{sliding}{state}; runtime {memory['target_backend']}",
        )
    ]
    if memory["draft_weights_bytes"] is not None:
        rows.append(
            (
                "",
                f"drafter {_size(memory['draft_weights_bytes'])}, {_size(memory['draft_cache_bytes_per_1k_tokens'])} for every "
                f"1000 tokens; runtime {memory['draft_backend']}",
            )
        )
    full, available = _size(memory["full_context_bytes"]), _size(memory["available_bytes"])
    rows.append(("", f"{full} with one text of {memory['context']} tokens; {available} are free"))
    return [*rows, ("numerics", f"{facts['numerics']}: {facts['numerics_reason']}")]


def _probe_rows(probe: dict[str, Any] | None) -> list[tuple[str, str]]:
    if probe is None:
        return []
    passes = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in probe["pass_ms_by_rows"].items())
    rows = [
        ("loaded", f"in {probe['load_s']:.1f} s, numerics {probe['numerics']}, at most {_size(probe['peak_bytes'])} in use"),
        ("pass", f"milliseconds by rows: {passes}; {probe['draft_ms_per_token']:.2f} to draft a token"),
    ]
    steps, kept = probe["drafting_steps"], probe["drafting_steps_with_accepted"]
    if steps:
        rows.append(("drafts", f"accepted in {kept / steps:.0%} of {steps} steps on a few short texts; yours may differ"))
    for one in probe["predictions"]:
        best = (
            f"{one['speedup']:.2f}x with {one['num_draft_tokens']} draft tokens a step"
            if one["num_draft_tokens"]
            else "drafting does not pay: plain steps"
        )
        rows.append((f"at {one['acceptance_rate']:.0%}", f"{best} (if that share of draft tokens is accepted)"))
    return rows


def _size(num_bytes: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} bytes"
