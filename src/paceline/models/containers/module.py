"""The tensors of one packed matrix, and the description of a container."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.storage.packed_matrix import PackedMatrix
from paceline.models.storage.safetensors_file import StoredTensor, view_tensor

StoredWeight = StoredTensor | PackedMatrix
_TYPES = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<u4", "U32": "<u4", "I64": "<i8", "U8": "u1", "I8": "i1", "F8_E4M3": "u1",
    "F8_E8M0": "u1",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedModule:
    """The tensors whose names begin with a module's name. Reading a tensor removes it from `source_arrays`.

    Attributes:
        name: such as `model.layers.0.self_attn.q_proj`.
        stored: all tensors of the checkpoint.
        files: their mapped files.
    """

    name: str
    stored: dict[str, StoredWeight]
    files: Mapping[Path, NDArray[np.uint8]]

    def has(self, part: str) -> bool:
        return f"{self.name}.{part}" in self.stored

    def type_of(self, part: str) -> str | None:
        """Return the type name of a tensor in the file; None = there is no such tensor."""
        found = self.stored.get(f"{self.name}.{part}")
        return found.dtype if isinstance(found, StoredTensor) else None

    def where(self, part: str) -> str:
        """Return the file and the name of a tensor, for error messages."""
        found = self.stored.get(f"{self.name}.{part}")
        return f"{found.path}: tensor {self.name}.{part}" if isinstance(found, StoredTensor) else f"{self.name}.{part}"

    def take(self, part: str, *types: str, ndim: int | None = 2) -> NDArray[Any]:
        """Return a view of a tensor in the file: 32-bit words as unsigned, bfloat16 and FP8 as their bits.

        Args:
            types: expected type names.
            ndim: number of dimensions; None = any.

        Raises:
            CheckpointError: The tensor is missing, or has another type or number of dimensions.
        """
        found = self.stored.get(f"{self.name}.{part}")
        if not isinstance(found, StoredTensor):
            paths = ", ".join(map(str, sorted(self.files)))
            raise CheckpointError(f"{paths}: {self.name} is packed, but lacks its tensor {self.name}.{part}; download the model again")
        if found.dtype not in types or (ndim is not None and len(found.shape) != ndim):
            shape = "" if ndim is None else f" with {ndim} dimensions"
            raise CheckpointError(
                f"{self.where(part)} is of type {found.dtype} and shape {list(found.shape)}, expected {' or '.join(types)}{shape}; "
                "download the model again"
            )
        del self.stored[f"{self.name}.{part}"]
        return view_tensor(found, self.files[found.path], np.dtype(_TYPES[found.dtype]))

    def floats(self, part: str, *types: str, ndim: int | None = 2) -> NDArray[Any]:
        """Return a float tensor: float32 and float16 as they are, bfloat16 as a float32 copy. Arguments as in `take`."""
        is_bf16 = self.type_of(part) == "BF16"
        array = self.take(part, *(types or ("F32", "F16", "BF16")), ndim=ndim)
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32) if is_bf16 else array

    def drop_tensors(self, *parts: str) -> None:
        """Drop tensors that do not affect the weights."""
        for part in parts:
            self.stored.pop(f"{self.name}.{part}", None)


@dataclass(frozen=True, slots=True)
class Container:
    """How packed matrices are stored in a checkpoint.

    Attributes:
        name: as `paceline doctor` prints it.
        packed_suffixes: suffixes of tensors that only packed matrices have.
        read: returns the matrix of a module.
        ignored_suffixes: suffixes of tensors that do not affect the weights, such as scales of activations and caches.
        notices: messages for users.
    """

    name: str
    packed_suffixes: tuple[str, ...]
    read: Callable[[PackedModule], PackedMatrix]
    ignored_suffixes: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
