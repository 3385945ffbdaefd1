"""Read typed metadata values of a GGUF file, and config.json fields that follow from them."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, shortened
from paceline.models.gguf.file import GgufFile

MTP_TENSOR_NAME = "nextn.eh_proj.weight"
"""Name, after the block's prefix, of a tensor that only modules for multi-token prediction (MTP) have."""


class GatingFunction(IntEnum):
    """llama.cpp's enum `llama_expert_gating_func_type`: the functions that turn router logits into expert weights."""

    SOFTMAX = 1
    SIGMOID = 2
    SOFTMAX_OF_SELECTED = 3


class GgufFields:
    """Reads typed values from the metadata of one GGUF file.

    Attributes:
        architecture: value of `general.architecture`, the prefix of most keys.
        keys_read: keys that were read, without this prefix.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = self.metadata_value("general.architecture")
        self.keys_read = set[str]()

    def metadata_value(self, key: str) -> Any:
        """Return the metadata value of a full key such as `general.name`; None if the key is absent."""
        value = self.file.metadata.get(key)
        # Metadata floats are rounded to float32. The shortest decimal of the float32, such as 1e-05, is the original number in config.json.
        with np.errstate(over="ignore"):  # a number outside float32 becomes infinite, which callers refuse
            return float(str(np.float32(value))) if isinstance(value, float) else value

    def architecture_value(self, key: str) -> Any:
        """Return the metadata value of `{architecture}.{key}`; None if the key is absent."""
        self.keys_read.add(key)
        return self.metadata_value(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> Any:
        """Return the value of `{architecture}.{key}`, a number above 0. If a default is given, 0 counts as absent.

        Raises:
            CheckpointError: The key is absent without a default, or its value is not a number above 0.
        """
        value = self.architecture_value(key)
        value = default if value is None or (value == 0 and default is not None) else value
        if value is None:
            raise CheckpointError(f"{self.file.path} has no metadata {self.architecture}.{key}: get a newer conversion of the model")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 2**31:
            self.raise_invalid(key, value, "a number above 0 and below 2**31")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return the value of `{architecture}.{key}`, an integer above 0. Arguments and errors as in `number`."""
        value = self.number(key, default)
        if not isinstance(value, int):
            self.raise_invalid(key, value, "a whole number")
        return value

    def raise_invalid(self, key: str, value: object, expected: str) -> NoReturn:
        """Raise a CheckpointError with the key, its value and what is allowed."""
        raise CheckpointError(
            f"{self.file.path}: {self.architecture}.{key} = {shortened(value)}, expected {expected}; download the file again"
        )

    def uniform_layer_size(self, key: str, default: int | None = None, *, allows_zero: bool = False, allows_mixed: bool = False) -> int:
        """Return a size that is equal in all layers. The metadata value may be one number, or a list with a number for each layer.

        Args:
            allows_zero: ignore zeros in the list, which mark layers without attention or without an MLP.
            allows_mixed: sizes may differ; return the first one.
        """
        value = self.architecture_value(key)
        if not isinstance(value, list):
            return self.count(key, default)
        sizes = [size for size in value if size != 0] if allows_zero else value
        first = sizes[0] if sizes else None
        differs = not allows_mixed and any(other != first for other in sizes)
        if not isinstance(first, int) or isinstance(first, bool) or first < 1 or differs:
            self.raise_invalid(key, value, "the same whole number above 0 for every layer")
        return first

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def has_in_any_block(self, name: str, num_blocks: int) -> bool:
        """Return whether any block has the tensor `blk.{number}.{name}`, such as `attn_q.bias`."""
        return any(self.has_tensor(f"blk.{block}.{name}") for block in range(num_blocks))

    def constant_vector(self, name: str, size: int) -> float:
        """Return the common value of all elements of a float32 vector.

        Raises:
            CheckpointError: The file lacks the tensor, or the tensor is not a float32 vector of `size` equal elements above 0.
        """
        values = self.float32_vector(name, size)
        if not 0 < values.min() == values.max() < np.inf:
            raise CheckpointError(
                f"{self.file.path}: {name} holds numbers from {values.min()} to {values.max()}, expected one number above 0; "
                "download the file again"
            )
        return float(str(values[0]))  # shortest decimal, as in `metadata_value`

    def num_blocks(self) -> int:
        """Return `block_count`. It must not exceed the number of tensors, so that a damaged file cannot cause huge allocations."""
        count = self.count("block_count")
        if count > len(self.file.tensors):
            self.raise_invalid("block_count", count, f"at most the number of tensors, {len(self.file.tensors)}")
        return count

    def vocab_size(self, hidden_size: int) -> int:
        """Return the number of rows of the token embedding.

        Raises:
            CheckpointError: The file lacks the tensor, or its rows do not have `hidden_size` elements.
        """
        table = self.file.tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2 or table.shape[1] != hidden_size:
            found = "is missing" if table is None else f"has shape {list(table.shape)}"
            raise CheckpointError(
                f"{self.file.path}: token_embd.weight {found}, expected [vocabulary, {hidden_size}]; is this a language model's file?"
            )
        return table.shape[0]

    def float32_vector(self, name: str, size: int) -> NDArray[np.float32]:
        """Return a vector that must be stored in float32.

        Raises:
            CheckpointError: The file lacks the tensor, or the tensor is not a float32 vector of `size` elements.
        """
        tensor = self.file.tensors.get(name)
        if tensor is None or tensor.block_type.name != "F32" or tensor.shape != (size,):
            found = "is missing" if tensor is None else f"is of type {tensor.block_type.name} and shape {list(tensor.shape)}"
            raise CheckpointError(f"{self.file.path}: {name} {found}, expected F32 of shape [{size}]; download the file again")
        return tensor.data.view("<f4")

    def num_tensor_rows(self, name: str) -> int:
        """Return the number of rows of a tensor; 0 if the file does not have it."""
        tensor = self.file.tensors.get(name)
        return tensor.shape[0] if tensor is not None and tensor.shape else 0

    def num_layers_without_mtp(self, num_blocks: int, min_mtp_modules: int = 0) -> int:
        """Return the number of layers: `num_blocks` minus the modules for multi-token prediction (MTP) after the last layer.

        Args:
            min_mtp_modules: number of MTP modules if the metadata contain a smaller number or none.
        """
        key = "nextn_predict_layers"
        num_modules = max(self.count(key) if self.architecture_value(key) else 0, min_mtp_modules)
        if num_modules >= num_blocks:
            self.raise_invalid(key, num_modules, f"fewer than block_count, {num_blocks}")
        return num_blocks - num_modules

    def read_layer_types(self, num_layers: int) -> dict[str, Any]:
        """Return the config.json field `layer_types` from `attention.sliding_window_pattern`; no field if this key is absent."""
        pattern = self.architecture_value("attention.sliding_window_pattern")
        if type(pattern) is int and pattern >= 0:  # an interval: every `pattern`-th layer has full attention; 0 = no layer
            pattern = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(num_layers)]
        if pattern is None:
            return {}
        if not isinstance(pattern, list):
            self.raise_invalid("attention.sliding_window_pattern", pattern, "for each layer whether it has a sliding window")
        return {"layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern]}

    def read_sliding_window(self, num_layers: int) -> dict[str, Any]:
        """Return the config.json fields `sliding_window` (null if there is no window) and `layer_types`."""
        window, types = self.architecture_value("attention.sliding_window") or None, self.read_layer_types(num_layers)  # 0 means no window
        if window is not None:
            return {"sliding_window": window, **types}
        if "sliding_attention" in types.get("layer_types", ()):
            self.raise_invalid("attention.sliding_window", window, "the window of the layers that attention.sliding_window_pattern names")
        return {"sliding_window": None}

    def read_experts(
        self, *, width: int | None = None, is_normalized: bool = False, gating: Sequence[GatingFunction] = (GatingFunction.SOFTMAX,)
    ) -> dict[str, Any]:
        """Return the config.json fields for experts.

        Args:
            width: `moe_intermediate_size` if metadata has no `expert_feed_forward_length`.
            is_normalized: `norm_topk_prob` if metadata has no `expert_weights_norm`.
            gating: supported values of `expert_gating_func`. The error for another value names the first one.
        """
        if (found := self.architecture_value("expert_gating_func")) not in (None, 0, *gating):
            self.raise_invalid("expert_gating_func", found, str(int(gating[0])))
        stated = self.architecture_value("expert_weights_norm")
        return {
            "num_experts": self.count("expert_count"),
            "num_experts_per_tok": self.count("expert_used_count"),
            "moe_intermediate_size": self.count("expert_feed_forward_length", width),
            "norm_topk_prob": is_normalized if stated is None else stated,
        }
