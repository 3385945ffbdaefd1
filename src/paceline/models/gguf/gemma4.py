"""What the metadata of a Gemma 4 file, or of an assistant's, says of its layers, in the terms of its config.json."""

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from paceline.errors import CheckpointError, shortened
from paceline.models.gguf.file import GgufFile

ASSISTANTS = ("gemma4-assistant", "gemma4_assistant")
"""Architectures of assistants: llama.cpp's name, and that of older converters."""

_PATTERN = 6  # every how many-th layer does not slide, where a file does not say
_NEVER = 1e20  # divisors from here on mean that a pair does not turn


def gemma4_values(file: GgufFile, num_layers: int) -> dict[str, Any]:
    """The values that are particular to Gemma 4.

    Raises:
        CheckpointError: a value is absurd, or stands for something that is not computed.
    """
    reader = _Reader(file, "gemma4")
    reader.num_layers, shared = num_layers, reader.get("attention.shared_kv_layers", 0)
    if not isinstance(shared, int) or isinstance(shared, bool) or not 0 <= shared < num_layers:
        reader.refuse("attention.shared_kv_layers", shared, f"fewer than {num_layers} layers")
    reader.num_shared = shared
    return reader.values()


def assistant_values(file: GgufFile) -> dict[str, Any]:
    """The values of an assistant's layers, all of which share the keys of the target.

    Raises:
        CheckpointError: a value is missing or absurd, or stands for something that is not computed.
    """
    reader = _Reader(file, file.metadata["general.architecture"])
    reader.num_layers = count = reader.size("block_count")
    if count > len(file.tensors):
        reader.refuse("block_count", count, f"at most as many as the file has tensors, {len(file.tensors)}")
    for key in ("attention.shared_kv_layers", "nextn_predict_layers"):
        if (found := reader.get(key)) not in (None, 0, count):
            reader.refuse(key, found, f"all {count} layers")
    reader.num_shared = count
    table, hidden_size = file.tensors.get("token_embd.weight"), reader.size("embedding_length")
    if table is None or len(table.shape) != 2 or table.shape[1] != hidden_size:
        found = "is missing" if table is None else f"has shape {list(table.shape)}"
        raise CheckpointError(f"{file.path}: token_embd.weight {found}, expected [vocabulary, {hidden_size}]; download the file again")
    return {
        "vocab_size": table.shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": count,
        "num_attention_heads": reader.size("attention.head_count"),
        "num_key_value_heads": reader.of_layers("attention.head_count_kv")[0],
        "max_position_embeddings": reader.size("context_length"),
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon", 1e-6),
        **reader.values(),
    }


class _Reader:
    """The values of one file. The numbers of its layers, and of the last ones that share the keys of others, are set by who makes it."""

    num_layers = num_shared = 0

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file, self._architecture = file, architecture

    @property
    def _num_owners(self) -> int:
        return self.num_layers - self.num_shared

    def values(self) -> dict[str, Any]:
        slides, sizes = self._slides(), (self.size("attention.key_length"), self.size("attention.key_length_swa", "attention.key_length"))
        for key, of_keys in (("value_length", sizes[0]), ("value_length_swa", sizes[1])):
            if (size := self.get(f"attention.{key}", of_keys)) != of_keys:
                self.refuse(f"attention.{key}", size, f"the size of keys, {of_keys}")
        table = self._file.tensors.get("per_layer_token_embd.weight")
        global_layers = [layer for layer in range(self._num_owners) if not slides[layer]]
        values = {
            "layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in slides],
            "num_kv_shared_layers": self.num_shared,
            "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in self._file.tensors for layer in global_layers),
            "hidden_size_per_layer_input": self.get("embedding_length_per_layer_input", 0),
            "vocab_size_per_layer_input": None if table is None else table.shape[0],
            "enable_moe_block": bool(self.get("expert_count", 0)),
            "final_logit_softcapping": self.number("final_logit_softcapping", None),
            "per_layer_config": self._kv_sizes(slides, *sizes),
            "head_dim": sizes[1],
            "rope_parameters": self._ropes(*sizes),
            **self._widths(),
            **self._experts(),
        }
        return {**values, "sliding_window": self.size("attention.sliding_window")} if any(slides) else values

    def get(self, key: str, default: Any = None) -> Any:
        value = self._file.metadata.get(f"{self._architecture}.{key}")
        return default if value is None else value

    def refuse(self, key: str, value: object, expected: str) -> NoReturn:
        raise CheckpointError(
            f"{self._file.path}: {self._architecture}.{key} = {shortened(value)}, expected {expected}; download the file again"
        )

    def size(self, key: str, otherwise: str | None = None) -> int:
        value = self.get(key, None if otherwise is None else self.get(otherwise))
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            self.refuse(key, value, "a whole number above 0")
        return value

    def number(self, key: str, default: float | None) -> float | None:
        value = self.get(key, default)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0):
            return None if value is None else float(str(np.float32(value)))
        self.refuse(key, value, "a number above 0")

    def _slides(self) -> list[bool]:
        pattern = self.get("attention.sliding_window_pattern", _PATTERN)
        if isinstance(pattern, list) and len(pattern) == self.num_layers and all(one in (0, 1) for one in pattern):
            slides = [bool(one) for one in pattern]
        elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
            slides = [layer % pattern < pattern - 1 for layer in range(self.num_layers)]
        else:
            self.refuse("attention.sliding_window_pattern", pattern, f"whether each of {self.num_layers} layers slides")
        return slides

    def of_layers(self, key: str) -> Sequence[int]:
        """A size that may be given for all layers at once."""
        value = self.get(key)
        sizes = value if isinstance(value, list) else [value] * self.num_layers
        if len(sizes) != self.num_layers or not all(isinstance(one, int) and not isinstance(one, bool) for one in sizes):
            self.refuse(key, value, f"a whole number, or one for each of {self.num_layers} layers")
        return sizes

    def _kv_sizes(self, slides: Sequence[bool], of_global: int, of_local: int) -> dict[str, dict[str, int]]:
        """Layers that share keys are of the size of those that have some."""
        counts, sizes = self.of_layers("attention.head_count_kv"), dict[str, dict[str, int]]()
        own = dict(zip(slides[: self._num_owners], counts, strict=False))
        for layer, is_local in enumerate(slides):
            count = counts[layer] if layer < self._num_owners else own.get(is_local, counts[layer])
            sizes[str(layer)] = {"head_dim": of_local if is_local else of_global, "num_key_value_heads": count}
        return sizes

    def _widths(self) -> dict[str, Any]:
        """The width of MLPs: those of the layers that share keys may be twice as wide."""
        widths = self.of_layers("feed_forward_length")
        is_double = self.num_shared > 0 and widths[-1] == 2 * widths[0]
        expected = [widths[0]] * self._num_owners + [widths[0] * (1 + is_double)] * self.num_shared
        if list(widths) != expected:
            self.refuse("feed_forward_length", list(widths), "the same for every layer, or twice as much for those that share keys")
        return {"intermediate_size": widths[0], "use_double_wide_mlp": is_double}

    def _experts(self) -> dict[str, Any]:
        if not self.get("expert_count", 0):
            return {}
        names = {"num_experts": "expert_count", "top_k_experts": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"}
        return {name: self.size(key) for name, key in names.items()}

    def _ropes(self, of_global: int, of_local: int) -> dict[str, Any]:
        for key, size in (("dimension_count", of_global), ("dimension_count_swa", of_local)):
            if (rotated := self.get(f"rope.{key}", size)) != size:
                self.refuse(f"rope.{key}", rotated, f"the whole head, {size}")
        if (kind := self.get("rope.scaling.type", "none")) != "none":
            self.refuse("rope.scaling.type", kind, "none")
        return {
            "sliding_attention": {"rope_type": "default", "rope_theta": self.number("rope.freq_base_swa", 1e4)},
            "full_attention": {"rope_type": "proportional", "rope_theta": self.number("rope.freq_base", 1e6), **self._turned(of_global)},
        }

    def _turned(self, head_size: int) -> dict[str, float]:
        """How many pairs of a global head turn, and how much slower: the others have huge divisors."""
        tensor, num_pairs = self._file.tensors.get("rope_freqs.weight"), head_size // 2
        if tensor is None:
            return {"partial_rotary_factor": 1.0}
        divisors = tensor.data.view("<f4") if tensor.block_type.name == "F32" and tensor.shape == (num_pairs,) else np.zeros(1, np.float32)
        count = int(np.count_nonzero(divisors < _NEVER))
        if not count or not np.isfinite(divisors).all() or divisors[0] <= 0 or not (divisors[:count] == divisors[0]).all():
            raise CheckpointError(
                f"{self._file.path}: rope_freqs.weight of type {tensor.block_type.name} and shape {list(tensor.shape)} is not "
                f"one number above 0 for the first of {num_pairs} pairs and a huge one for the others; download the file again"
            )
        fraction = 2 * count / head_size
        if int(fraction * head_size // 2) < count:  # rounded down
            fraction = math.nextafter(fraction, 1.0)
        return {"partial_rotary_factor": fraction, "factor": float(divisors[0])}
