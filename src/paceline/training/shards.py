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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.errors import CheckpointError, ConfigError, shortened
from paceline.small_files import read_json
from paceline.training.saving import save_text, saved_file, write_errors

MANIFEST = "manifest.json"
_LARGEST_FILE = 2**30  # bytes of a manifest
_SHARD_KEYS = ("file", "prompts", "sequences", "tokens", "answer_tokens", "left_out", "bytes", "sha256", "sources")


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
        CheckpointError: its manifest is damaged.
    """

    def __init__(self, directory: Path, part: str, facts: Mapping[str, Any]) -> None:
        self.directory, self.part, self._facts = directory, part, facts
        path = directory / f"{part}-{MANIFEST}"
        try:
            manifest = read_json(path, _LARGEST_FILE)
            self.shards: list[dict[str, Any]] = (
                [] if manifest is None else [{key: one[key] for key in _SHARD_KEYS} for one in manifest["shards"]]
            )
            recorded = facts if manifest is None else dict(manifest["facts"])
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            raise damaged_data(path, error) from error
        if recorded != facts:
            changed = [name for name in facts if recorded.get(name) != facts[name]]
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
        with write_errors(self.directory):
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
        with saved_file(path) as unfinished:
            save_file(tensors, unfinished)
        self.shards.append(
            {
                "file": name, "prompts": num_prompts, "sequences": len(sequences), "tokens": len(ids), "answer_tokens": int(mask.sum()),
                "left_out": num_left_out, "bytes": path.stat().st_size, "sha256": _digest(ids, mask),
                "sources": [one.source for one in sequences],
            }
        )  # fmt: skip
        manifest = {"facts": self._facts, "shards": self.shards}
        save_text(self.directory / f"{self.part}-{MANIFEST}", json.dumps(manifest, indent=1) + "\n")

    def open(self) -> "SequenceData":
        """Return the recorded sequences.

        Raises:
            CheckpointError: a shard is missing, damaged or not the one that was recorded.
        """
        return SequenceData(self.directory, self.shards)


class SequenceData:
    """All sequences of some shards. Tokens are in memory, features are read when they are used.

    Args:
        directory: of the shards.
        shards: their entries in the manifest.

    Attributes:
        token_ids, is_answer: arrays of each sequence.
    """

    def __init__(self, directory: Path, shards: Sequence[Mapping[str, Any]]) -> None:
        self.sources = [source for shard in shards for source in shard["sources"]]
        self.token_ids: list[NDArray[np.int32]] = []
        self.is_answer: list[NDArray[np.uint8]] = []
        self._places: list[tuple[int, int]] = []
        self._files: list[Any] = []
        for number, shard in enumerate(shards):
            path = directory / shard["file"]
            try:
                file: Any = safe_open(path, framework="pt")
                lengths, ids, mask = (file.get_tensor(name).numpy() for name in ("lengths", "token_ids", "is_answer"))
            except (OSError, SafetensorError) as error:
                raise damaged_data(path, error) from error
            if _digest(ids, mask) != shard["sha256"] or len(lengths) != shard["sequences"]:
                raise damaged_data(path, "it holds other sequences than were recorded")
            ends = np.cumsum(lengths)
            self._files.append(file)
            self.token_ids += np.split(ids, ends)[:-1]
            self.is_answer += np.split(mask, ends)[:-1]
            self._places += [(number, int(end - length)) for end, length in zip(ends, lengths, strict=True)]

    def __len__(self) -> int:
        return len(self.token_ids)

    def features(self, index: int) -> torch.Tensor:
        """Return the features [n, width] bfloat16 of a sequence."""
        file, start = self._places[index]
        found: torch.Tensor = self._files[file].get_slice("features")[start : start + len(self.token_ids[index])]
        return found


def damaged_data(path: Path, reason: object) -> CheckpointError:
    """Return the error for a damaged file of a data directory."""
    return CheckpointError(f"{path} is damaged ({shortened(str(reason))}): delete {path.parent} to record the data again")


def _digest(token_ids: NDArray[np.int32], is_answer: NDArray[np.uint8]) -> str:
    return hashlib.sha256(token_ids.tobytes() + is_answer.tobytes()).hexdigest()
