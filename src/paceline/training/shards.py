"""Recorded sequences on disk: shards of tokens and features, and a manifest.

A shard is a safetensors file: `token_ids` [T] int32, `is_answer` [T] uint8, `lengths` [n] int32 of its sequences one after another, and
`features` [T, (B + 1) * E] bfloat16; the last row of each sequence is zero, because no pass computed it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from paceline.errors import ConfigError
from paceline.small_files import read_json, write_atomically

MANIFEST = "manifest.json"
_LARGEST_FILE = 2**22


@dataclass(frozen=True, slots=True)
class Recorded:
    """One sequence.

    Attributes:
        token_ids: [n].
        is_answer: [n] whether each token is of an answer.
        features: [n - 1, width] bfloat16 bits.
        source: name of the file of its prompt.
    """

    token_ids: Sequence[int]
    is_answer: Sequence[bool]
    features: NDArray[np.uint16]
    source: str


class ShardStore:
    """The shards of one part ("train" or "heldout") of a data directory.

    Args:
        directory: of the data; created when a shard is written.
        facts: what the data depends on; data of other facts is refused.

    Raises:
        ConfigError: the directory holds data that depends on something else.
    """

    def __init__(self, directory: Path, part: str, facts: Mapping[str, Any]) -> None:
        self.directory, self.part, self._facts = directory, part, facts
        manifest = read_json(directory / f"{part}-{MANIFEST}", _LARGEST_FILE)
        self.shards: list[dict[str, Any]] = [] if manifest is None else list(manifest["shards"])
        if manifest is not None and manifest["facts"] != facts:
            changed = [name for name in facts if manifest["facts"].get(name) != facts[name]]
            raise ConfigError(
                f"{directory} holds data recorded with other settings ({', '.join(changed)}): give the same, or another --output"
            )

    @property
    def num_prompts(self) -> int:
        """Number of prompts whose answers are recorded, those left out included."""
        return sum(shard["prompts"] for shard in self.shards)

    @property
    def counts(self) -> dict[str, int]:
        """Sequences, tokens, answer tokens, left-out answers and bytes."""
        names = ("sequences", "tokens", "answer_tokens", "left_out", "bytes")
        return {name: sum(shard[name] for shard in self.shards) for name in names}

    def append(self, sequences: Sequence[Recorded], *, num_prompts: int, num_left_out: int) -> None:
        """Write a shard. It counts once the manifest names it, so that an interrupted write leaves nothing."""
        self.directory.mkdir(parents=True, exist_ok=True)
        name = f"{self.part}-{len(self.shards):04d}.safetensors"
        ids = np.concatenate([np.array(one.token_ids, np.int32) for one in sequences] or [np.empty(0, np.int32)])
        mask = np.concatenate([np.array(one.is_answer, np.uint8) for one in sequences] or [np.empty(0, np.uint8)])
        tensors = {
            "token_ids": torch.from_numpy(ids),
            "is_answer": torch.from_numpy(mask),
            "lengths": torch.tensor([len(one.token_ids) for one in sequences], dtype=torch.int32),
        }
        if sequences:
            rows = [part for one in sequences for part in (one.features, np.zeros((1, one.features.shape[1]), np.uint16))]
            tensors["features"] = torch.from_numpy(np.concatenate(rows).view(np.int16)).view(torch.bfloat16)
        path = self.directory / name
        save_file(tensors, path)
        digest = hashlib.sha256(ids.tobytes() + mask.tobytes()).hexdigest()
        self.shards.append(
            {
                "file": name, "prompts": num_prompts, "sequences": len(sequences), "tokens": len(ids), "answer_tokens": int(mask.sum()),
                "left_out": num_left_out, "bytes": path.stat().st_size, "sha256": digest, "sources": [one.source for one in sequences],
            }
        )  # fmt: skip
        manifest = {"facts": self._facts, "shards": self.shards}
        write_atomically(self.directory / f"{self.part}-{MANIFEST}", json.dumps(manifest, indent=1) + "\n")

    def open(self) -> "SequenceData":
        """Return the recorded sequences."""
        return SequenceData([self.directory / shard["file"] for shard in self.shards], [one for s in self.shards for one in s["sources"]])


class SequenceData:
    """All sequences of some shards. Tokens are in memory, features are read when they are used.

    Args:
        files: the shards.
        sources: of each sequence.

    Attributes:
        token_ids, is_answer: arrays of each sequence.
    """

    def __init__(self, files: Sequence[Path], sources: Sequence[str]) -> None:
        self.sources = list(sources)
        self.token_ids: list[NDArray[np.int32]] = []
        self.is_answer: list[NDArray[np.uint8]] = []
        self._places: list[tuple[int, int]] = []
        self._files = [safe_open(file, framework="pt") for file in files]
        for number, file in enumerate(self._files):
            lengths = file.get_tensor("lengths").numpy()  # type: ignore[no-untyped-call]
            ends = np.cumsum(lengths)
            self.token_ids += np.split(file.get_tensor("token_ids").numpy(), ends)[:-1]  # type: ignore[no-untyped-call]
            self.is_answer += np.split(file.get_tensor("is_answer").numpy(), ends)[:-1]  # type: ignore[no-untyped-call]
            self._places += [(number, int(end - length)) for end, length in zip(ends, lengths, strict=True)]

    def __len__(self) -> int:
        return len(self.token_ids)

    def features(self, index: int) -> torch.Tensor:
        """Return the features [n, width] bfloat16 of a sequence."""
        file, start = self._places[index]
        found: torch.Tensor = self._files[file].get_slice("features")[start : start + len(self.token_ids[index])]  # type: ignore[no-untyped-call]
        return found
