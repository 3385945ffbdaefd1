"""The card of a run: README.md to read, results.json to compute with, and a plot of loss and accuracy over time."""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.errors import printable
from paceline.training.recording import Data
from paceline.training.saving import save_text
from paceline.training.settings import TrainSettings
from paceline.training.trainer import Progress

RESULTS, CARD, PLOT = "results.json", "README.md", "training.svg"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 260, 48, 28
_TONES = ("#2f6fb5", "#c2571a", "#3b8f4a", "#8b5fbf", "#b03a5b", "#5f6b76")


def write_card(
    directory: Path, settings: TrainSettings, progress: Progress, data: Data, results: Mapping[str, Any], facts: Mapping[str, Any]
) -> None:
    """Write the three files.

    Args:
        results: of `serving.measure`.
        facts: sizes and counts of the run.
    """
    hashes = {
        part: _sha256("".join(shard["sha256"] for shard in store.shards).encode())
        for part, store in (("train", data.train), ("heldout", data.heldout))
    }
    files = {name: _sha256(Path(name).read_bytes()) for name in (*settings.data, *settings.eval_data) if Path(name).is_file()}
    versions = {"paceline": __version__, "torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    found = {
        "command": settings.command,
        "settings": asdict(settings),
        "facts": dict(facts),
        "data": {"train": data.train.counts, "heldout": data.heldout.counts, "sha256": hashes, "files": files},
        "versions": versions,
        "history": progress.history,
        "estimates": progress.estimates,
        "served": dict(results),
    }
    for name, content in ((RESULTS, json.dumps(found, indent=1) + "\n"), (CARD, card(found)), (PLOT, plot(progress.history))):
        save_text(directory / name, content)


def card(found: Mapping[str, Any]) -> str:
    """Return the text of README.md."""
    settings, facts, counts, served = found["settings"], found["facts"], found["data"]["train"], found["served"]
    last: Mapping[str, Any] = found["history"][-1] if found["history"] else {"loss": float("nan"), "accuracy": []}
    lines = [
        f"# {settings['drafter']} drafter for {printable(Path(settings['model']).name)}",
        "",
        "Trained by paceline. It changes the speed of this target, never its tokens.",
        "",
        "```sh",
        found["command"],
        "```",
        "",
        f"* {facts['num_parameters']:,} trained values, {facts['draft_ids']:,} draft ids; {facts['steps']:,} steps in "
        f"{facts['training_s'] / 60:.1f} minutes.",
        f"* Data: {counts['sequences']:,} sequences, {counts['tokens']:,} tokens, {counts['answer_tokens']:,} of answers "
        f"(sha256 {found['data']['sha256']['train'][:16]}…); {counts['left_out']} looping answers left out.",
        f"* At the end: loss {last['loss']}, accuracy by depth {', '.join(map(str, last['accuracy']))}.",
        f"* {', '.join(f'{name} {value}' for name, value in found['versions'].items())}.",
        "",
        "![loss and accuracy over time](training.svg)",
        "",
        *_acceptance_lines(found["estimates"], served["fixed"], facts["depth"]),
        *_speed_lines(served),
    ]
    return "\n".join(lines) + "\n"


def _acceptance_lines(estimates: Sequence[Mapping[str, Any]], fixed: Mapping[str, float], depth: int) -> list[str]:
    last = estimates[-1] if estimates else {}
    rows = [
        f"| {printable(name)} | {last[name]['mean_acceptance_length']:.3f} | {fixed.get(name, '-')} | {last[name]['accuracy']:.3f} |"
        for name in last
        if isinstance(last[name], Mapping)
    ]
    title = f"Tokens a step of chains of {depth}, held out, temperature 0:"
    return [title, "", "| prompts | estimate | served | first token right |", "|---|---|---|---|", *rows, ""] if rows else []


def _speed_lines(served: Mapping[str, Any]) -> list[str]:
    rows = [
        f"| {printable(row['source'])} | {row['temperature']:g} | {printable(row['drafter'])} | {row['tokens_per_s']:.0f} | "
        f"{row['speedup']:.2f} | {row['mean_acceptance_length']:.2f} |"
        for row in served["speeds"]
    ]
    if not rows:
        return []
    same = "equal those of plain decoding" if served["are_texts_equal"] else "DIFFER from plain decoding"
    head = ["| prompts | T | drafter | tokens/s | x plain | tokens a step |", "|---|---|---|---|---|---|"]
    note = f"Measured in turns on held-out prompts; all texts {same}; {served['num_looping']} looping answers left out."
    return [note, "", *head, *rows]


def plot(history: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG: the loss, scaled to its largest value, and the accuracy of each depth, over minutes."""
    minutes = [entry["elapsed_s"] / 60 for entry in history]
    losses = [entry["loss"] for entry in history]
    most = max([*losses, 1e-9])
    series = [(f"loss / {most:.2f}", [loss / most for loss in losses])]
    for depth in range(min((len(entry["accuracy"]) for entry in history), default=0)):
        series.append((f"accuracy {depth + 1}", [entry["accuracy"][depth] for entry in history]))
    width, height = _WIDTH - _LEFT - 110, _HEIGHT - _BOTTOM - 12
    last = max([*minutes, 1e-9])
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11">'
        "<title>loss and accuracy over time</title>"
    ]
    for tick in range(5):
        y = 12 + height * (1 - tick / 4)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ccc"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#666">{tick / 4:g}</text>')
        x = _LEFT + width * tick / 4
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle" fill="#666">{last * tick / 4:.1f} min</text>')
    for number, (name, values) in enumerate(series):
        tone = _TONES[number % len(_TONES)]
        points = " ".join(
            f"{_LEFT + width * at / last:.1f},{12 + height * (1 - value):.1f}" for at, value in zip(minutes, values, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{tone}" stroke-width="1.5"/>')
        parts.append(f'<text x="{_LEFT + width + 8}" y="{20 + 15 * number}" fill="{tone}">{escape(name)}</text>')
    return "".join([*parts, "</svg>\n"])


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
