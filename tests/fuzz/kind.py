"""A kind of untrusted file: the files around it, how one is made from a seed, and how it is opened.

A file follows from the seed, its kind and its index alone, so a worker and a developer who repeats a failure make the same one.
"""

import json
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.damage import BYTES, NUMBERS, VALUES, Rng, damaged_json, damaged_json_text, pick, truncate, write_number
from harness.checkpoints import write_tokenizer

VOCAB, HIDDEN, INNER, LAYERS = 120, 32, 48, 6
LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "dtype": "float16", "bos_token_id": 0, "eos_token_id": [0, 2], "rope_theta": 10000.0,
}  # fmt: skip


class Kind(ABC):
    """One kind of file.

    Attributes:
        name: as failures and counts call it.
        share: how many of a thousand files are of this kind.
        folder: what surrounds the file; written when the kind is made.
        valid: a file that opens.
    """

    name: str
    share: int
    valid: bytes

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.prepare()

    @property
    def path(self) -> Path:
        """Of the file itself."""
        return self.folder / self.name

    def content(self, seed: int, index: int) -> bytes:
        """The file with this number."""
        rng = np.random.default_rng([seed, zlib.crc32(type(self).__name__.encode()), index])
        return self.make(rng)

    @abstractmethod
    def prepare(self) -> None:
        """Write what surrounds the file, and keep what it is made from."""

    def undamaged(self) -> bytes:
        """A file that opens."""
        return self.valid

    @abstractmethod
    def make(self, rng: Rng) -> bytes: ...

    @abstractmethod
    def use(self, index: int) -> None:
        """Open the file as paceline does.

        Raises:
            PacelineError: it is refused; anything else is a failure.
        """


class JsonKind(Kind):
    """A JSON file, made from the values of one that opens."""

    values: Any

    def undamaged(self) -> bytes:
        return json.dumps(self.values).encode()

    def make(self, rng: Rng) -> bytes:
        return damaged_json_text(self.values, rng)


class SafetensorsKind(Kind):
    """A safetensors file."""

    def make(self, rng: Rng) -> bytes:
        return damaged_safetensors(self.valid, rng)


class GgufKind(Kind):
    """A GGUF file."""

    def keep_file(self, path: Path, *, prefix: str = "") -> None:
        """Keep a file that opens, the keys of its metadata and the names of tensors with a prefix."""
        self.valid = path.read_bytes()
        self.tensors, self.keys = names_in_gguf(path, prefix)

    def make(self, rng: Rng) -> bytes:
        return damaged_gguf(self.valid, self.tensors, self.keys, rng)


def names_in_gguf(path: Path, prefix: str = "") -> tuple[list[str], list[str]]:
    """Names of the tensors of a GGUF file, and the keys of its metadata after the header's own."""
    import gguf

    reader = gguf.GGUFReader(path)
    return [tensor.name for tensor in reader.tensors if tensor.name.startswith(prefix)], list(reader.fields)[3:]


def random_tensors(values: dict[str, Any]) -> dict[str, np.ndarray]:
    """All of a model, by the names of its checkpoint."""
    from paceline.models.config import config_from_values
    from paceline.models.tensor_names import checkpoint_names, tensor_shapes

    rng = np.random.default_rng(0)
    config = config_from_values(values, Path("config.json"))
    names = checkpoint_names(config)
    return {names[name]: rng.normal(0, 0.1, shape).astype(np.float16) for name, shape in tensor_shapes(config).items()}


def write_model(folder: Path) -> None:
    """A whole model: config, weights, tokenizer."""
    from safetensors.numpy import save_file

    (folder / "config.json").write_text(json.dumps(LLAMA))
    save_file(random_tensors(LLAMA), folder / "model.safetensors")
    write_tokenizer(folder, VOCAB)


def damaged_safetensors(data: bytes, rng: Rng) -> bytes:
    """Its JSON header or its bytes."""
    (length,) = struct.unpack_from("<Q", data)
    how = int(rng.integers(6))
    if how == 0:
        return pick(rng, BYTES)(data, rng)
    if how == 1:
        return write_number(data[: 8 + length], rng) + data[8 + length :]
    header = json.loads(data[8 : 8 + length])
    if how == 2:
        header = damaged_json(header, rng)
    else:  # one entry at a time: all others are right
        entry = header[pick(rng, list(header))]
        field = pick(rng, ("dtype", "shape", "data_offsets"))
        if rng.integers(2) and isinstance(entry.get(field), list) and entry[field]:
            entry[field][int(rng.integers(len(entry[field])))] = deepcopy(pick(rng, (*VALUES, length, len(data))))
        else:
            entry[field] = deepcopy(pick(rng, VALUES))
    text = json.dumps(header, ensure_ascii=bool(rng.integers(2))).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def damaged_gguf(data: bytes, tensors: Sequence[str], keys: Sequence[str], rng: Rng) -> bytes:
    """Its header, one entry of it, or the values of its tensors.

    Args:
        tensors, keys: names in the file.
    """
    how, header_bytes = int(rng.integers(5)), max(_behind(data, name) for name in tensors) + 60
    if how == 0:
        return _with_another_entry(data, pick(rng, tensors), rng)
    if how == 1:
        return _with_another_value(data, pick(rng, keys), rng)
    if how == 2:
        damaged = bytearray(data)
        for position in rng.integers(header_bytes, len(data), 40):
            damaged[position] = int(rng.integers(256))
        return bytes(damaged)
    damaged_header = pick(rng, BYTES)(data[:header_bytes], rng) + data[header_bytes:]
    return damaged_header if rng.integers(8) else truncate(damaged_header, rng)


def _behind(data: bytes, name: str) -> int:
    """Where a name of the header ends."""
    text = name.encode()
    return data.index(struct.pack("<Q", len(text)) + text) + 8 + len(text)


def _with_another_entry(data: bytes, name: str, rng: Rng) -> bytes:
    """A dimension, the type or the offset of a tensor becomes absurd or another tensor's."""
    damaged, at = bytearray(data), _behind(data, name)
    (num_dimensions,) = struct.unpack_from("<I", data, at)
    fields = [(at, "<I"), *((at + 4 + 8 * index, "<Q") for index in range(num_dimensions))]
    fields += [(at + 4 + 8 * num_dimensions, "<I"), (at + 8 + 8 * num_dimensions, "<Q")]
    for _ in range(int(rng.integers(1, 3))):
        start, layout = pick(rng, fields)
        number = int(pick(rng, [32 * int(rng.integers(0, len(data) // 32)), *NUMBERS]))
        struct.pack_into(layout, damaged, start, number & (2 ** (8 * struct.calcsize(layout)) - 1))
    return bytes(damaged)


def _with_another_value(data: bytes, key: str, rng: Rng) -> bytes:
    """The type of a value, or its first bytes, become others."""
    damaged, at = bytearray(data), _behind(data, key)
    if not rng.integers(4):
        struct.pack_into("<I", damaged, at, int(rng.integers(14)))
    else:
        struct.pack_into("<I", damaged, at + 4, int(pick(rng, (*NUMBERS, *range(1, 9)))) & (2**32 - 1))
    return bytes(damaged)
