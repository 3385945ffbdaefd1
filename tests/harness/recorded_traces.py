"""Outputs of real models, and what real drafters drafted at every position of them; `harness/record_drafts.py` records them.

A file is gzipped JSON: {"traces": {name: [{"temperature", "token_ids", "drafts"}]}}. A draft is null, or [tokens, probs, parents]: probs in
thousandths, null where the drafter gives none; parents null for a chain. Names are "target/drafter/temperature/kind of text".
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.replay import Trace
from paceline.speculation.tree import DraftTree

FOLDER = Path(__file__).resolve().parents[1] / "unit" / "speculation" / "traces"


def load_traces(folder: Path = FOLDER) -> dict[str, list[Trace]]:
    """Return all recorded traces by name."""
    found: dict[str, list[Trace]] = {}
    for path in sorted(folder.glob("*.json.gz")):
        content = json.loads(gzip.decompress(path.read_bytes()))
        for name, traces in content["traces"].items():
            found[name] = [_trace(fields, name.split("/")[1]) for fields in traces]
    return found


def write_traces(path: Path, traces: Mapping[str, Sequence[Trace]]) -> None:
    """Write traces to one file, the same bytes for the same traces."""
    content = {"traces": {name: [_fields(trace) for trace in own] for name, own in traces.items()}}
    text = json.dumps(content, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


def _trace(fields: Mapping[str, Any], source: str) -> Trace:
    token_ids = fields["token_ids"]
    drafts: list[DraftTree | None] = []
    for position, draft in enumerate(fields["drafts"]):
        if draft is None:
            drafts.append(None)
            continue
        tokens, thousandths, parents = draft
        root = token_ids[position - 1] if position else 0
        probs = None if thousandths is None else [one / 1000 for one in thousandths]
        if parents is None:
            drafts.append(DraftTree.chain(root, tokens, source, probs))
        else:
            drafts.append(DraftTree.from_nodes(root, tokens, parents, source, confidences=probs))
    return Trace(token_ids, drafts, fields["temperature"])


def _fields(trace: Trace) -> dict[str, Any]:
    return {
        "temperature": trace.temperature,
        "token_ids": list(trace.token_ids),
        "drafts": [None if tree is None or tree.num_draft_tokens == 0 else _draft(tree) for tree in trace.guesses],
    }


def _draft(tree: DraftTree) -> list[Any]:
    parents = list(tree.parents[1:])
    thousandths = None if tree.confidences is None else [round(1000 * prob) for prob in tree.confidences[1:]]
    return [list(tree.token_ids[1:]), thousandths, None if parents == list(range(len(parents))) else parents]
