"""Typed access to the metadata of a GGUF file, as the config.json fields that it stands for."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NoReturn

import numpy as np

from paceline.errors import CheckpointError, shortened
from paceline.models.gguf.file import GgufFile

MTP_TENSOR = "nextn.eh_proj.weight"
"""A tensor that only blocks with a module for multi-token prediction have."""


class GatingFunction(IntEnum):
    """llama.cpp's numbers for how router logits become expert weights."""

    SOFTMAX = 1
    SIGMOID = 2
    SOFTMAX_OF_CHOSEN = 3


class GgufFields:
    """The metadata of one file.

    Attributes:
        architecture: The value of `general.architecture`.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = self.metadata_value("general.architecture")

    def metadata_value(self, key: str) -> Any:
        """Return the metadata value of a complete key; None if the key is absent."""
        value = self.file.metadata.get(key)
        # Metadata is float32. The shortest decimal that rounds to it is what the converter was given: 1e-05, not 9.99999975e-06.
        with np.errstate(over="ignore"):  # a number outside float32 becomes infinite, which is refused later
            return float(str(np.float32(value))) if isinstance(value, float) else value

    def architecture_value(self, key: str) -> Any:
        """Return the metadata value of `{architecture}.{key}`; None if the key is absent."""
        return self.metadata_value(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number above 0; 0 counts as absent.

        Raises:
            CheckpointError: The key is absent and there is no default, or its value is not such a number.
        """
        value = self.architecture_value(key)
        value = default if value is None or (value == 0 and default is not None) else value
        if value is None:
            raise CheckpointError(f"{self.file.path} has no metadata {self.architecture}.{key}: get a newer conversion of the model")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 2**31:
            self.refuse(key, value, "a number above 0 and below 2**31")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return a metadata integer above 0; default and errors as for `number`."""
        value = self.number(key, default)
        if not isinstance(value, int):
            self.refuse(key, value, "a whole number")
        return value

    def refuse(self, key: str, value: object, expected: str) -> NoReturn:
        """Raise a CheckpointError with the key, its value and what is allowed."""
        raise CheckpointError(
            f"{self.file.path}: {self.architecture}.{key} = {shortened(value)}, expected {expected}; download the file again"
        )

    def size_of_all_layers(self, key: str, default: int | None = None, *, allows_zero: bool = False, allows_mixed: bool = False) -> int:
        """Return the size that all layers share, where metadata may give one for each layer.

        Args:
            allows_zero: Skip layers of size 0, which do not have the part.
            allows_mixed: Return the size of the first layer if they differ.
        """
        value = self.architecture_value(key)
        if not isinstance(value, list):
            return self.count(key, default)
        sizes = [size for size in value if size != 0] if allows_zero else value
        first = sizes[0] if sizes else None
        differs = not allows_mixed and any(other != first for other in sizes)
        if not isinstance(first, int) or isinstance(first, bool) or first < 1 or differs:
            self.refuse(key, value, "the same whole number above 0 for every layer")
        return first

    def has(self, name: str) -> bool:
        """Return whether the file has a tensor of this name."""
        return name in self.file.tensors

    def has_in_any_block(self, name: str, num_blocks: int) -> bool:
        """Return whether any block has a tensor of this name, such as `attn_q.bias`."""
        return any(self.has(f"blk.{block}.{name}") for block in range(num_blocks))

    def num_rows_of(self, name: str) -> int:
        """Return the number of rows of a tensor; 0 if the file does not have it."""
        tensor = self.file.tensors.get(name)
        return tensor.shape[0] if tensor is not None and tensor.shape else 0

    def num_layers_without_mtp(self, num_blocks: int, least: int = 0) -> int:
        """Return the number of layers, without the modules for multi-token prediction that `block_count` includes.

        Args:
            least: Modules that the tensors show, whatever the metadata says.
        """
        key = "nextn_predict_layers"
        num_modules = max(self.count(key) if self.architecture_value(key) else 0, least)
        if num_modules >= num_blocks:
            self.refuse(key, num_modules, f"fewer than block_count, {num_blocks}")
        return num_blocks - num_modules

    def read_layer_types(self, num_layers: int) -> dict[str, Any]:
        """Return `layer_types`, from the metadata's list or its interval between full-attention layers; empty if it has neither."""
        pattern = self.architecture_value("attention.sliding_window_pattern")
        if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 0:  # an interval of 0: all layers have a window
            pattern = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(num_layers)]
        if pattern is None:
            return {}
        if not isinstance(pattern, list):
            self.refuse("attention.sliding_window_pattern", pattern, "for each layer whether it has a sliding window")
        return {"layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern]}

    def read_windows(self, num_layers: int) -> dict[str, Any]:
        """Return `sliding_window` and `layer_types` of an architecture that may have no window."""
        window, types = self.architecture_value("attention.sliding_window") or None, self.read_layer_types(num_layers)  # 0 = none
        if window is not None:
            return {"sliding_window": window, **types}
        if "sliding_attention" in types.get("layer_types", ()):
            self.refuse("attention.sliding_window", window, "the window of the layers that attention.sliding_window_pattern names")
        return {"sliding_window": None}

    def read_experts(
        self,
        *,
        width: int | None = None,
        normalizes: bool = False,
        gating: Sequence[GatingFunction] = (GatingFunction.SOFTMAX,),
    ) -> dict[str, Any]:
        """Return the config.json fields of experts.

        Args:
            width: `moe_intermediate_size` if the file has no `expert_feed_forward_length`.
            normalizes: `norm_topk_prob` if the file does not say: llama.cpp's code has it for each architecture.
            gating: The functions that the architecture may name; the first is the one it has.
        """
        if (found := self.architecture_value("expert_gating_func")) not in (None, 0, *gating):
            self.refuse("expert_gating_func", found, str(int(gating[0])))
        is_normalized = self.architecture_value("expert_weights_norm")
        return {
            "num_experts": self.count("expert_count"),
            "num_experts_per_tok": self.count("expert_used_count"),
            "moe_intermediate_size": self.count("expert_feed_forward_length", width),
            "norm_topk_prob": normalizes if is_normalized is None else is_normalized,
        }
