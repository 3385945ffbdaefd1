"""Typed access to a GGUF file's metadata, with errors that name the file, the key and the value."""

from typing import Any, NoReturn

import numpy as np

from paceline.errors import CheckpointError, shortened
from paceline.models.gguf.file import GgufFile

LACK_PARTS = ("lfm2", "lfm2moe", "granitehybrid", "nemotron_h", "nemotron_h_moe")
"""Architectures of which some layers have no attention or no MLP, and 0 where metadata gives its sizes layer by layer."""
_DIFFER_BY_LAYER = ("gemma4",)  # what their sizes are is read elsewhere


class GgufFields:
    """The metadata of one file.

    Attributes:
        architecture: what it names itself.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = self.plain("general.architecture")

    def plain(self, key: str) -> Any:
        """A value by its whole key; None if absent."""
        value = self.file.metadata.get(key)
        # Metadata has float32 only: the shortest number that rounds to it is the one that was meant (1e-05, not 9.99999975e-06).
        with np.errstate(over="ignore"):  # one that float32 has no room for becomes infinite, and is refused as such
            return float(str(np.float32(value))) if isinstance(value, float) else value

    def of_model(self, key: str) -> Any:
        """A value of the architecture's own; None if absent."""
        return self.plain(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> Any:
        """A number above 0; 0 counts as absent.

        Raises:
            CheckpointError: it is absent and has no default, or is no such number.
        """
        value = self.of_model(key)
        value = default if value is None or (value == 0 and default is not None) else value
        if value is None:
            raise CheckpointError(f"{self.file.path} has no metadata {self.architecture}.{key}: get a newer conversion of the model")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 2**31:
            self.refuse(key, value, "a number above 0 and below 2**31")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0, as `number`."""
        value = self.number(key, default)
        if not isinstance(value, int):
            self.refuse(key, value, "a whole number")
        return value

    def refuse(self, key: str, value: object, expected: str) -> NoReturn:
        raise CheckpointError(
            f"{self.file.path}: {self.architecture}.{key} = {shortened(value)}, expected {expected}; download the file again"
        )

    def of_all_layers(self, key: str, default: int | None = None) -> int:
        """A size that may be given for every layer; ours are the same in all, or in all that have such a part where others have 0."""
        value = self.of_model(key)
        if not isinstance(value, list):
            return self.count(key, default)
        sizes = [size for size in value if size != 0] if self.architecture in LACK_PARTS else value
        first = sizes[0] if sizes else None
        differs = self.architecture not in _DIFFER_BY_LAYER and any(other != first for other in sizes)
        if not isinstance(first, int) or isinstance(first, bool) or first < 1 or differs:
            self.refuse(key, value, "the same whole number above 0 for every layer")
        return first

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self.file.tensors

    def rows_of(self, name: str) -> int:
        """Rows of a tensor, 0 where there is none."""
        tensor = self.file.tensors.get(name)
        return tensor.shape[0] if tensor is not None and tensor.shape else 0

    def without_modules(self, num_blocks: int, least: int = 0) -> int:
        """Layers, where blocks count the modules for multi-token prediction behind them.

        Args:
            least: modules that there are, whatever the metadata says.
        """
        key = "nextn_predict_layers"
        num_modules = max(self.count(key) if self.of_model(key) else 0, least)
        if num_modules >= num_blocks:
            self.refuse(key, num_modules, f"fewer than block_count, {num_blocks}")
        return num_blocks - num_modules
