"""Other programs that can be measured beside ours: one file each, and one line of the table here."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Peer:
    """A program that generates text.

    Attributes:
        name: what users call it.
        packages: pinned requirements for pip, in the order in which they are installed.
        formats: of model files that it reads: safetensors, gguf, openvino.
        modes: words of plain, ngram, draft_model, mtp.
        worker: the script that its own Python runs; it imports nothing of paceline.
    """

    name: str
    packages: tuple[str, ...]
    formats: frozenset[str]
    modes: tuple[str, ...]
    worker: Path


PEERS: dict[str, Peer] = {}
"""By name."""
