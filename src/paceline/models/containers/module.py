"""Access to the tensors of one packed matrix, and `Container`, which describes a quantised format."""

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
    """The tensors that store one packed matrix. Reading a tensor removes it from `stored`, so that unread tensors can be detected.

    Attributes:
        name: name of the module, such as `model.layers.0.self_attn.q_proj`.
        stored: tensors of the whole checkpoint that are not read yet, by name.
        files: mapped files, by path.
    """

    name: str
    stored: dict[str, StoredWeight]
    files: Mapping[Path, NDArray[np.uint8]]

    def has_tensor(self, part: str) -> bool:
        return f"{self.name}.{part}" in self.stored

    def tensor_type(self, part: str) -> str | None:
        """Return a tensor's type as the file names it; None = there is no such tensor."""
        found = self.stored.get(f"{self.name}.{part}")
        return found.dtype if isinstance(found, StoredTensor) else None

    def describe_tensor(self, part: str) -> str:
        """Return the path and the name of a tensor, for error messages."""
        found = self.stored.get(f"{self.name}.{part}")
        return f"{found.path}: tensor {self.name}.{part}" if isinstance(found, StoredTensor) else f"{self.name}.{part}"

    def read_tensor(self, part: str, *types: str, ndim: int | None = 2) -> NDArray[Any]:
        """Return a view of a tensor in the file. 32-bit integers are uint32, bfloat16 and FP8 unsigned integers of their bits.

        Args:
            types: allowed types, as safetensors names them.
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
                f"{self.describe_tensor(part)} is of type {found.dtype} and shape {list(found.shape)}, expected {' or '.join(types)}"
                f"{shape}; download the model again"
            )
        del self.stored[f"{self.name}.{part}"]
        return view_tensor(found, self.files[found.path], np.dtype(_TYPES[found.dtype]))

    def read_floats(self, part: str, *types: str, ndim: int | None = 2) -> NDArray[Any]:
        """Return a float tensor, bfloat16 converted to float32. Arguments as in `read_tensor`."""
        is_bf16 = self.tensor_type(part) == "BF16"
        array = self.read_tensor(part, *(types or ("F32", "F16", "BF16")), ndim=ndim)
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32) if is_bf16 else array

    def drop_tensors(self, *parts: str) -> None:
        """Remove tensors that do not affect the weights from `stored`."""
        for part in parts:
            self.stored.pop(f"{self.name}.{part}", None)


@dataclass(frozen=True, slots=True)
class Container:
    """A format in which a checkpoint stores quantised matrices.

    Attributes:
        name: as `paceline doctor` prints it.
        packed_suffixes: suffixes of tensor names that show a packed matrix.
        read: function that returns the matrix of a module.
        ignored_suffixes: suffixes of tensors that do not affect the weights, such as scales of activations and caches.
        notices: messages for users.
    """

    name: str
    packed_suffixes: tuple[str, ...]
    read: Callable[[PackedModule], PackedMatrix]
    ignored_suffixes: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
