"""A recommendation as a person reads it."""

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.errors import printable
from paceline.proof.recommendation.advice import Advice

_PLACES = {"own": "comes with the model", "here": "already here", "built in": "built in", "hub": "on the Hub"}


def report(found: Advice) -> Group:
    """The table, best first; then the reasons and the command of each, and what is not recommended."""
    facts = found.as_dict()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "drafter", "method", "where", "size", "speedup"):
        table.add_column(name, justify="right" if name in ("", "size") else "left", header_style="bold")
    reasons = Table.grid(padding=(0, 2))
    reasons.add_column(justify="right")
    reasons.add_column(overflow="fold")
    for rank, one in enumerate(facts["recommendations"], 1):
        drafter = Text(printable(one["drafter"]), overflow="fold")  # file names are untrusted
        table.add_row(str(rank), drafter, one["method"], _PLACES[one["place"]], _size(one["parameters"]), _speedup(one["forecast"]))
        for index, line in enumerate(_reasons(one)):
            reasons.add_row("" if index else str(rank), line)
    notes = [Text.assemble(("note: ", "yellow"), printable(note)) for note in facts["notes"]]
    rejected = [
        Text.assemble(("not recommended: ", "red"), printable(f"{one['drafter']}: {one['why']}")) for one in facts["not_recommended"]
    ]
    return Group(Text(_heading(facts)), *notes, Text(), table, Text(), reasons, *rejected, Text(_assumptions(facts), style="dim"))


def _heading(facts: dict[str, Any]) -> str:
    target, passes = facts["target"], facts["pass_ms_by_rows"]
    if target is None:
        return printable(facts["model"])
    text = f"{target['path']}: {target['family']}, {target['parameters'] / 1e6:,.4g} million parameters"
    if passes is not None:
        times = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in passes.items())
        text += f"; milliseconds of a pass by rows: {times}; memory is read at {facts['read_gb_per_s']:.1f} GB/s"
    return printable(text)


def _reasons(one: dict[str, Any]) -> list[Text]:
    assumed, expected = one["assumed_acceptance"], one["forecast"]
    lines = [Text(one["command"], style="bold"), Text(printable(one["verdict"]))]
    text = f"assumed: {assumed['low']:.0%} to {assumed['high']:.0%} of guesses are kept, given those before them ({assumed['source']})"
    lines.append(Text(text))
    if expected is not None:
        cost = f"a draft takes {expected['per_draft_ms']:.2f} ms and {expected['per_guess_ms']:.2f} ms a guess"
        ends = " to ".join(f"{end['tokens_per_step']:.1f}" for end in (expected["low"], expected["high"]))
        best = expected["high"]["num_draft_tokens"]
        lines.append(Text(f"{cost}; {ends} tokens a step" + (f", with {best} guesses at best" if best else ": drafting does not pay")))
    losses = [*([f"memory: {_bytes(one['memory_bytes'])}"] if one["memory_bytes"] else []), *one["losses"]]
    if losses:
        lines.append(Text(printable("you lose: " + "; ".join(losses))))
    return lines


def _assumptions(facts: dict[str, Any]) -> str:
    if facts["pass_ms_by_rows"] is None:
        return "Order: by what is assumed of each method, nothing was measured. Tokens are the same with every drafter."
    return (
        "Speedups are predictions for one request, from measured passes and assumed acceptance; where drafting does not pay, steps are "
        "plain. Tokens are the same with every drafter. paceline doctor --probe measures a pair."
    )


def _speedup(expected: dict[str, Any] | None) -> str:
    if expected is None:
        return "not predicted"
    return f"{expected['low']['speedup']:.2f} to {expected['high']['speedup']:.2f}x"


def _size(parameters: float | None) -> str:
    if parameters is None:
        return "–"
    return f"{parameters / 1e9:.2g} B" if parameters >= 1e8 else f"{parameters / 1e6:.3g} M"


def _bytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g} MB"
