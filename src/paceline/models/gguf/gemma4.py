"""What the metadata of a Gemma 4 file says of its layers, in the terms of its config.json."""

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from paceline.errors import CheckpointError, shortened
from paceline.models.gguf.file import GgufFile

_PATTERN = 6  # every how many-th layer does not slide, where a file does not say
_NEVER = 1e20  # divisors from here on mean that a pair does not turn


def gemma4_values(file: GgufFile, num_layers: int) -> dict[str, Any]:
    """The values that are particular to Gemma 4.

    Raises:
        CheckpointError: a value is absurd, or stands for something that is not computed.
    """
    return _Reader(file, num_layers).values()


class _Reader:
    def __init__(self, file: GgufFile, num_layers: int) -> None:
        self._file, self._num_layers = file, num_layers
        shared = self._get("attention.shared_kv_layers", 0)
        if not isinstance(shared, int) or isinstance(shared, bool) or not 0 <= shared < num_layers:
            self._refuse("attention.shared_kv_layers", shared, f"fewer than {num_layers} layers")
        self._num_shared, self._num_owners = shared, num_layers - shared

    def values(self) -> dict[str, Any]:
        slides, sizes = self._slides(), (self._size("attention.key_length"), self._size("attention.key_length_swa", "attention.key_length"))
        for key, of_keys in (("value_length", sizes[0]), ("value_length_swa", sizes[1])):
            if (size := self._get(f"attention.{key}", of_keys)) != of_keys:
                self._refuse(f"attention.{key}", size, f"the size of keys, {of_keys}")
        table = self._file.tensors.get("per_layer_token_embd.weight")
        global_layers = [layer for layer in range(self._num_owners) if not slides[layer]]
        values = {
            "layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in slides],
            "num_kv_shared_layers": self._num_shared,
            "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in self._file.tensors for layer in global_layers),
            "hidden_size_per_layer_input": self._get("embedding_length_per_layer_input", 0),
            "vocab_size_per_layer_input": None if table is None else table.shape[0],
            "enable_moe_block": bool(self._get("expert_count", 0)),
            "final_logit_softcapping": self._number("final_logit_softcapping", None),
            "per_layer_config": self._kv_sizes(slides, *sizes),
            "head_dim": sizes[1],
            "rope_parameters": self._ropes(*sizes),
            **self._widths(),
            **self._experts(),
        }
        return {**values, "sliding_window": self._size("attention.sliding_window")} if any(slides) else values

    def _get(self, key: str, default: Any = None) -> Any:
        value = self._file.metadata.get(f"gemma4.{key}")
        return default if value is None else value

    def _refuse(self, key: str, value: object, expected: str) -> NoReturn:
        raise CheckpointError(f"{self._file.path}: gemma4.{key} = {shortened(value)}, expected {expected}; download the file again")

    def _size(self, key: str, otherwise: str | None = None) -> int:
        value = self._get(key, None if otherwise is None else self._get(otherwise))
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            self._refuse(key, value, "a whole number above 0")
        return value

    def _number(self, key: str, default: float | None) -> float | None:
        value = self._get(key, default)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0):
            return None if value is None else float(str(np.float32(value)))
        self._refuse(key, value, "a number above 0")

    def _slides(self) -> list[bool]:
        pattern = self._get("attention.sliding_window_pattern", _PATTERN)
        if isinstance(pattern, list) and len(pattern) == self._num_layers and all(one in (0, 1) for one in pattern):
            slides = [bool(one) for one in pattern]
        elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
            slides = [layer % pattern < pattern - 1 for layer in range(self._num_layers)]
        else:
            self._refuse("attention.sliding_window_pattern", pattern, f"whether each of {self._num_layers} layers slides")
        return slides

    def _of_layers(self, key: str) -> Sequence[int]:
        """A size that may be given for all layers at once."""
        value = self._get(key)
        sizes = value if isinstance(value, list) else [value] * self._num_layers
        if len(sizes) != self._num_layers or not all(isinstance(one, int) and not isinstance(one, bool) for one in sizes):
            self._refuse(key, value, f"a whole number, or one for each of {self._num_layers} layers")
        return sizes

    def _kv_sizes(self, slides: Sequence[bool], of_global: int, of_local: int) -> dict[str, dict[str, int]]:
        """Layers that share keys are of the size of those that have some."""
        counts, sizes = self._of_layers("attention.head_count_kv"), dict[str, dict[str, int]]()
        own = dict(zip(slides[: self._num_owners], counts, strict=False))
        for layer, is_local in enumerate(slides):
            count = counts[layer] if layer < self._num_owners else own.get(is_local, counts[layer])
            sizes[str(layer)] = {"head_dim": of_local if is_local else of_global, "num_key_value_heads": count}
        return sizes

    def _widths(self) -> dict[str, Any]:
        """The width of MLPs: those of the layers that share keys may be twice as wide."""
        widths = self._of_layers("feed_forward_length")
        is_double = self._num_shared > 0 and widths[-1] == 2 * widths[0]
        expected = [widths[0]] * self._num_owners + [widths[0] * (1 + is_double)] * self._num_shared
        if list(widths) != expected:
            self._refuse("feed_forward_length", list(widths), "the same for every layer, or twice as much for those that share keys")
        return {"intermediate_size": widths[0], "use_double_wide_mlp": is_double}

    def _experts(self) -> dict[str, Any]:
        if not self._get("expert_count", 0):
            return {}
        names = {"num_experts": "expert_count", "top_k_experts": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"}
        return {name: self._size(key) for name, key in names.items()}

    def _ropes(self, of_global: int, of_local: int) -> dict[str, Any]:
        for key, size in (("dimension_count", of_global), ("dimension_count_swa", of_local)):
            if (rotated := self._get(f"rope.{key}", size)) != size:
                self._refuse(f"rope.{key}", rotated, f"the whole head, {size}")
        if (kind := self._get("rope.scaling.type", "none")) != "none":
            self._refuse("rope.scaling.type", kind, "none")
        return {
            "sliding_attention": {"rope_type": "default", "rope_theta": self._number("rope.freq_base_swa", 1e4)},
            "full_attention": {"rope_type": "proportional", "rope_theta": self._number("rope.freq_base", 1e6), **self._turned(of_global)},
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
