"""A diagnosis as text: facts as one table, drafters to try, notes, problems and the verdict."""

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.errors import printable
from paceline.proof.doctor import Diagnosis
from paceline.proof.measured_speedup import COPYING, GIVEN_PROMPTS
from paceline.repeats import MAX_REPEAT_SHARE

_COLUMN_GAP = 2


def report(found: Diagnosis) -> Group:
    """Return the facts as one table, then notes, problems and the verdict."""
    facts = found.as_dict()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    merged, target = facts["merged_adapter"], facts["target"]
    rows = [("model", facts["model"])] if target is None else [("model", target["path"]), ("", _network(target))]
    rows += _drafter_rows(facts["drafters"])
    rows += [] if merged is None else [("merged", _adapter(merged))]
    rows += [("adapter", _adapter(adapter)) for adapter in facts["adapters"]]
    rows += [*_memory_rows(facts), *_probe_rows(facts["probe"])]
    for name, text in rows:
        table.add_row(name, Text(printable(text)))  # file names are untrusted
    notes = [Text.assemble(("note: ", "yellow"), printable(note)) for note in _notes(facts)]
    problems = [Text.assemble(("problem: ", "bold red"), printable(problem)) for problem in facts["problems"]]
    verdict = Text("works", style="bold green") if facts["works"] else Text("does not work", style="bold red")
    summary = [Text(printable(_summary(facts)))] if facts["probe"] and facts["probe"]["measured"] else []
    return Group(
        *([table] if rows else []),
        *_suggestions(facts["suggested_drafters"], was_probed=bool(facts["probe"])),
        *notes,
        *problems,
        *summary,
        verdict,
    )


def _summary(facts: dict[str, Any]) -> str:
    """Return one sentence on what the loaded drafters bring, and what the best published one may."""
    measured = facts["probe"]["measured"]
    speedups = [(one["kind"], one["speedup"] if one["draft_share"] else 1.0) for one in measured]
    parts = [f"{kind}: {'up to' if kind == COPYING else 'about'} {speedup:.1f}x" for kind, speedup in speedups]
    given = [one for one in measured if one["kind"] == GIVEN_PROMPTS]
    text = ", ".join(parts) + ("" if given else "; measured here on short texts, so yours may differ: --prompts FILE measures yours")
    published = [one for one in facts["suggested_drafters"] if one["slowest"] is not None]
    if not published:
        return text
    best = published[0]  # ordered by speedup
    slowest, fastest = best["slowest"]["speedup"], best["fastest"]["speedup"]
    return f"{text}. With {best['drafter']} ({best['parameters'] / 1e9:.2g} B): {slowest:.1f} to {fastest:.1f}x, predicted"


def _suggestions(suggested: list[dict[str, Any]], *, was_probed: bool) -> list[Table | Text]:
    """Return a table of drafters to try, and a line on its assumptions. An id is never broken, so that it can be copied."""
    if not suggested:
        return []
    is_predicted = any(one["slowest"] is not None for one in suggested)
    rows = [["--drafter", "method", "size", "acceptance", "speedup"], *map(_suggestion, suggested)]
    rows = [row if is_predicted else row[:-1] for row in rows]
    width = sum(max(map(len, column)) + _COLUMN_GAP for column in zip(*rows, strict=True))
    table = Table(box=None, pad_edge=False, padding=(0, _COLUMN_GAP, 0, 0), width=width)  # wider than the terminal if it must be
    for name in rows[0]:
        table.add_column(name, header_style="bold", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    text = "Drafters to try. Acceptance rates are assumptions from papers and model cards. "
    text += "" if is_predicted or was_probed else "--probe predicts speedups from them. "
    if any(one["location"] == "hub" for one in suggested):
        text += "Names with a / are on the Hugging Face Hub; --fetch downloads one."
    return [Text(), Text(text, style="dim"), table, Text()]


def _suggestion(one: dict[str, Any]) -> list[str]:
    acceptance, slowest, fastest = one["acceptance"], one["slowest"], one["fastest"]
    unknown = "by the text" if one["location"] == "built_in" else "unknown"
    speedup = unknown if slowest is None else f"{slowest['speedup']:.2f} to {fastest['speedup']:.2f}x"
    size = "" if one["parameters"] is None else f"{one['parameters'] / 1e9:.2g} B"
    return [one["drafter"], one["method"], size, f"{100 * acceptance['low']:.0f} to {acceptance['high']:.0%}", speedup]


def _notes(facts: dict[str, Any]) -> list[str]:
    of_pairs = [note for drafter in facts["drafters"] if drafter["pair"] for note in drafter["pair"]["notes"]]
    of_probe = facts["probe"]["notices"] if facts["probe"] else []
    return [*facts["notes"], *of_pairs, *of_probe]


def _network(model: dict[str, Any]) -> str:
    layers = f"{model['layers']} layer{'s' if model['layers'] > 1 else ''}"
    return (
        f"{model['family']}, {model['parameters'] / 1e6:,.4g} million parameters, {layers}, hidden size "
        f"{model['hidden_size']}, {model['stored_as']} ({format_bytes(model['stored_bytes'])}), context {model['max_model_len']} tokens, "
        f"vocabulary {model['vocabulary_rows']} rows"
        + ("" if model["vocabulary_ids"] is None else f" of which the tokenizer has {model['vocabulary_ids']}")
    )


def _drafter_rows(drafters: list[dict[str, Any]]) -> list[tuple[str, str]]:
    rows = []
    for drafter in drafters:
        head, model = drafter["head"], drafter["model"]
        if head is not None:
            size = f"{head['parameters'] / 1e6:,.4g} million parameters ({format_bytes(head['stored_bytes'])})"
            rows += [("drafter", head["path"]), ("", f"{drafter['name']}, {size}")]
        elif model is not None:
            rows += [("drafter", model["path"]), ("", _network(model))]
        else:
            rows.append(("drafter", drafter["name"]))
        if drafter["adapter"] is not None:
            rows.append(("", f"with the adapter {_adapter(drafter['adapter'])}"))
        if drafter["pair"] is not None:
            rows.append(("pair", drafter["pair"]["summary"]))
    return rows


def _adapter(adapter: dict[str, Any]) -> str:
    more = "".join(f", {adapter[key]} {what}" for key, what in (("num_biases", "biases"), ("num_saved", "whole matrices")) if adapter[key])
    mixed = f"X-LoRA of {adapter['num_mixed']} adapters, " if adapter["num_mixed"] else ""
    size = f"{mixed}{adapter['num_products']} products of rank {adapter['largest_rank']} at most{more} ({format_bytes(adapter['nbytes'])})"
    return f"{adapter['name']}: fits; {size}"


def _memory_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    memory = facts["memory"]
    if memory is None:
        return []
    sliding = "".join(f"; layers with a window keep at most {rows} tokens" for rows in memory["target_windows"][:1])
    state = f"; recurrent layers keep {format_bytes(memory['target_state_bytes'])} a text" if memory["target_state_bytes"] else ""
    rows = [
        (
            "memory",
            f"target {format_bytes(memory['target_weights_bytes'])}, {format_bytes(memory['target_cache_bytes_per_1k_tokens'])} for every "
            f"1000 tokens{sliding}{state}; runtime {memory['target_backend']}",
        )
    ]
    if memory["draft_weights_bytes"] is not None:
        rows.append(
            (
                "",
                f"drafter {format_bytes(memory['draft_weights_bytes'])}, {format_bytes(memory['draft_cache_bytes_per_1k_tokens'])} for "
                f"every 1000 tokens; runtime {memory['draft_backend']}",
            )
        )
    full, available = format_bytes(memory["full_context_bytes"]), format_bytes(memory["available_bytes"])
    rows.append(("", f"{full} with one text of {memory['context']} tokens; {available} are free"))
    return [*rows, ("numerics", f"{facts['numerics']}: {facts['numerics_reason']}")]


def _probe_rows(probe: dict[str, Any] | None) -> list[tuple[str, str]]:
    if probe is None:
        return []
    passes = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in probe["pass_ms_by_rows"].items())
    rows = [
        ("loaded", f"in {probe['load_s']:.1f} s, numerics {probe['numerics']}, at most {format_bytes(probe['peak_bytes'])} in use"),
        ("pass", f"milliseconds by rows: {passes}"),
    ]
    steps, kept = probe["drafting_steps"], probe["drafting_steps_with_accepted"]
    if steps:
        rows.append(("drafts", f"when always tried: accepted in {kept / steps:.0%} of {steps} steps on a few short texts"))
    for one in probe["measured"]:
        interval = "" if one["interval"] is None else " ({:.2f} to {:.2f})".format(*one["interval"])
        drafts = f"{one['draft_share']:.0%} of steps used a draft, and {one['acceptance_rate']:.0%} of draft tokens were accepted"
        looping = f"; {one['repeats']:.0%} of the output repeats itself, easy to draft" if one["repeats"] > MAX_REPEAT_SHARE else ""
        texts = f"{one['num_texts']} text{'s' * (one['num_texts'] != 1)} of up to {one['num_tokens']} tokens"
        speedup = f"{one['speedup']:.2f}x measured{interval}" if one["draft_share"] else "nothing was drafted"
        rows.append((one["kind"], f"{speedup}; {drafts} ({texts}){looping}"))
    return rows


def format_bytes(num_bytes: int) -> str:
    """Return a size in the largest decimal unit it reaches."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} bytes"
