"""The report of a proof: its provenance, and one HTML page that loads nothing and escapes all text of models and files."""

import json
import platform
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig, SpeculationConfig
from paceline.errors import printable
from paceline.installation import package_versions
from paceline.machine import processor_model, usable_processors
from paceline.models.checkpoint import weight_files
from paceline.proof.exactness.engine_under_test import EngineUnderTest
from paceline.runtimes.native.library import kernels_path

_PACKAGES = ("paceline", "numpy", "tokenizers", "transformers", "torch")
_SECRET_SETTINGS = ("hf_token",)  # settings that reports must not contain
_COUNTS = ("tokens", "bugs", "near_ties", "accepted", "drafted", "cached_tokens", "requests")
_HEADS = ("tokens", "bugs", "near-ties", "accepted", "drafted", "cached", "answers")
_CLASSES = {"bug": "bug", "equal": "equal"}
_MOST_SHOWN = 50
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def provenance(
    engine_under_test: EngineUnderTest, directory: Path, engine: EngineConfig, speculation: SpeculationConfig, command: Sequence[str]
) -> dict[str, Any]:
    """Return what is needed to repeat a report.

    Args:
        directory: the target's, or its GGUF file.
        command: the arguments of this process.
    """
    runtime = engine_under_test.opened.engine.runtime
    kernels = kernels_path()
    settings = {name: value for name, value in asdict(engine).items() if name not in _SECRET_SETTINGS}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _without_token(command),
        "model": engine.model,
        "files": {path.name: path.stat().st_size for path in weight_files(directory)},
        "family": runtime.config.family,
        "weights": runtime.capabilities.weight_type.value,
        "numerics": engine_under_test.opened.numerics,
        "device": runtime.capabilities.device,
        "kernels": runtime.execution_key or f"torch on {runtime.capabilities.device}",
        "kernel_library": None if kernels is None or not runtime.execution_key else kernels.name,
        "drafters": list(engine_under_test.drafter_names),
        "processor": processor_model(),
        "processors_used": usable_processors(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": dict.fromkeys(_PACKAGES) | package_versions(*_PACKAGES),
        "engine": settings,
        "speculation": asdict(speculation),
    }


def _without_token(command: Sequence[str]) -> list[str]:
    """Return the arguments without the Hub's access token, because reports are shared."""
    return [
        "--hf-token=…" if one.startswith("--hf-token=") else "…" if before == "--hf-token" else one
        for before, one in zip(["", *command], command, strict=False)
    ]


def page(facts: Mapping[str, Any]) -> str:
    """Return the HTML page of `Proof.as_dict`."""
    style = files("paceline.proof.exactness").joinpath("report.css").read_text(encoding="utf-8")
    title = f"paceline prove: {_plain(facts['provenance']['model'])}"
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{title}</title><style>{style}</style></head><body><main>",
            f"<h1>{title}</h1>",
            f'<p class="verdict {_CLASSES.get(facts["verdict"], "near-ties")}">{_verdict(facts)}</p>',
            _summary(facts),
            *_findings(facts["findings"]),
            "<h2>What was compared</h2>",
            *(_table(name, levels) for name, levels in facts["compared"]["by"].items()),
            "<h2>Comparison with transformers</h2>",
            _transformers_section(facts["transformers"]),
            "<h2>Where these numbers come from</h2>",
            _definitions((name.replace("_", " "), _flat(name, value)) for name, value in facts["provenance"].items()),
            "</main></body></html>",
        )
    )


def _plain(value: object) -> str:
    """Escape untrusted text."""
    return escape(printable(str(value)))


def _verdict(facts: Mapping[str, Any]) -> str:
    compared = facts["compared"]
    match facts["verdict"]:
        case "bug":
            return f"{compared['bugs']} BUG{'S' if compared['bugs'] > 1 else ''}: speculation changed the output of this model"
        case "near-ties":
            return f"No bug: rounding decided {compared['near_ties']} near-ties, nothing else differs"
        case "equal":
            return "Equal: speculation changed no token"
        case _:
            return "Nothing was compared"


def _summary(facts: Mapping[str, Any]) -> str:
    compared = facts["compared"]
    rows = [
        ("tokens compared", f"{compared['tokens']:,}" + ("" if facts["is_whole"] else f" of {facts['tokens_wanted']:,}")),
        ("rows of logits compared", f"{compared['rows']:,}"),
        ("answers, cases", f"{compared['requests']:,} in {compared['cases']:,} cases, compared with {facts['references']:,} plain ones"),
        ("draft tokens accepted", f"{compared['accepted']:,} of {compared['drafted']:,}"),
        ("prompt tokens from the cache", f"{compared['cached_tokens']:,}"),
        ("preemptions", f"{compared['preemptions']:,}"),
        ("numerics", f"{facts['numerics']}: {_bound(facts)}"),
        ("near-ties", f"{compared['near_ties']:,}"),
        ("seed", facts["seed"]),
        ("time", f"{facts['seconds']:.0f} s"),
    ]
    return _definitions(rows)


def _bound(facts: Mapping[str, Any]) -> str:
    if facts["numerics"] == "exact":
        return "every difference is a bug"
    apart, bound = _number(facts["max_abs_difference"]), _number(facts["noise_bound"])
    return f"logits of passes of 1 and of 8 rows differ by up to {apart}; what is below {bound} is noise"


def _number(value: float | None) -> str:
    return "infinity" if value is None else f"{value:.3g}"


def _definitions(rows: Iterable[tuple[str, object]]) -> str:
    return "<dl>" + "".join(f"<div><dt>{_plain(name)}</dt><dd>{_plain(value)}</dd></div>" for name, value in rows) + "</dl>"


def _table(name: str, levels: Mapping[str, Mapping[str, int]]) -> str:
    most = max((counts["tokens"] for counts in levels.values()), default=0) or 1
    head = "".join(f"<th>{head}</th>" for head in _HEADS)
    rows = "".join(_row(level, counts, most) for level, counts in levels.items())
    first = f"<th>{_plain(name.replace('_', ' '))}</th>"
    return f'<div class="wide"><table><thead><tr>{first}{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _row(level: str, counts: Mapping[str, int], most: int) -> str:
    cells = []
    for name in _COUNTS:
        kind = f' class="{name}"' if name in ("near_ties", "bugs") and counts[name] else ""
        bar = f'<i style="width:{100 * counts[name] / most:.1f}%"></i>' if name == "tokens" else ""
        cells.append(f"<td{kind}>{counts[name]:,}{bar}</td>")
    return f"<tr><th>{_plain(level)}</th>{''.join(cells)}</tr>"


def _findings(findings: list[Mapping[str, Any]]) -> Iterable[str]:
    if not findings:
        return
    yield "<h2>What differs</h2>"
    ordered = sorted(findings, key=lambda one: one["status"] != "bug")
    yield from map(_card, ordered[:_MOST_SHOWN])
    if len(ordered) > _MOST_SHOWN:
        yield f"<p>{len(ordered) - _MOST_SHOWN} more are in the JSON report.</p>"


def _card(finding: Mapping[str, Any]) -> str:
    replay = finding["replay"] or {"setting": {}, "requests": []}
    rows: list[tuple[str, object]] = [("what", finding["details"])]
    rows += [(name.replace("_", " "), value) for name, value in replay["setting"].items()]
    shown = ("position", "plain_token", "plain_piece", "plain_logprob", "token", "piece", "logprob", "rows_differ_by", "margin", "bound")
    rows += [(name.replace("_", " "), _short(finding[name])) for name in shown if finding[name] is not None]
    if finding["request"] is not None:
        request = replay["requests"][finding["request"]]
        rows += [("sampling", f"{request['sampling']} {json.dumps(request['params'])}"), ("drafter", request["drafter"])]
        rows += [("prompt ids", " ".join(map(str, request["prompt_token_ids"])))]
    if finding["step"] is not None:
        rows += [("the step", json.dumps(finding["step"]))]
    where = "" if finding["case"] is None else f", case {finding['case']}"
    kind = "BUG" if finding["status"] == "bug" else "near-tie"
    repeat = f"<pre>{escape(shlex.join(map(printable, finding['repeat'])))}</pre>"
    return f'<section class="{finding["status"]}"><h3>{kind}: {_plain(finding["kind"])}{where}</h3>{_definitions(rows)}{repeat}</section>'


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _transformers_section(found: Mapping[str, Any]) -> str:
    if found["status"] == "not_compared":
        return f"<p>Not compared: {_plain(found['reason'])}.</p>"
    says = "It agrees." if found["status"] == "agrees" else "This model differs from transformers. Speculation is not the cause."
    rows = [
        ("positions", f"{found['positions']:,}, teacher-forced, transformers in float32"),
        ("same most probable token", f"{found['argmax_equal']:,}"),
        ("another one at a near-tie", f"{found['near_ties']:,}"),
        ("another one, no near-tie", f"{found['differing']:,}"),
        ("largest difference of a logit", _number(found["max_abs_difference"])),
        ("largest margin where another one", _number(found["largest_margin"])),
    ]
    return f"<p>{says}</p>{_definitions(rows)}"


def _flat(name: str, value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {inner}" for name, inner in value.items())
    if isinstance(value, list):
        return shlex.join(value) if name == "command" else ", ".join(map(str, value))
    return str(value)
