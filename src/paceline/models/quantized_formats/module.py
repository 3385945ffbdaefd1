"""Access to the tensors of one packed matrix, and `QuantizedFormat`, which describes how quantised matrices are stored."""

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
_NUMPY_TYPES = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<u4", "U32": "<u4", "I64": "<i8", "U8": "u1", "I8": "i1", "F8_E4M3": "u1",
    "F8_E8M0": "u1",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedModule:
    """The tensors that store one packed matrix. Reading a tensor removes it from `unread_tensors`.

    Attributes:
        name: name of the module, such as `model.layers.0.self_attn.q_proj`.
        unread_tensors: tensors of the whole checkpoint that are not read yet, by name.
        files: mapped files, by path.
    """

    name: str
    unread_tensors: dict[str, StoredWeight]
    files: Mapping[Path, NDArray[np.uint8]]

    def has_tensor(self, suffix: str) -> bool:
        return f"{self.name}.{suffix}" in self.unread_tensors

    def tensor_type(self, suffix: str) -> str | None:
        """Return a tensor's type as the file names it; None = there is no such tensor."""
        found = self.unread_tensors.get(f"{self.name}.{suffix}")
        return found.dtype if isinstance(found, StoredTensor) else None

    def describe_tensor(self, suffix: str) -> str:
        """Return the path and the name of a tensor, for error messages."""
        found = self.unread_tensors.get(f"{self.name}.{suffix}")
        return f"{found.path}: tensor {self.name}.{suffix}" if isinstance(found, StoredTensor) else f"{self.name}.{suffix}"

    def read_tensor(self, suffix: str, *types: str, ndim: int | None = 2) -> NDArray[Any]:
        """Return a view of the module's tensor with this suffix. bfloat16, FP8 and int32 are read as unsigned integers of the same bits.

        Args:
            types: allowed types, as safetensors names them.
            ndim: number of dimensions; None = any.

        Raises:
            CheckpointError: The tensor is missing, or has another type or number of dimensions.
        """
        found = self.unread_tensors.get(f"{self.name}.{suffix}")
        if not isinstance(found, StoredTensor):
            paths = ", ".join(map(str, sorted(self.files)))
            raise CheckpointError(f"{paths}: {self.name} is packed, but lacks its tensor {self.name}.{suffix}; download the model again")
        if found.dtype not in types or (ndim is not None and len(found.shape) != ndim):
            shape = "" if ndim is None else f" with {ndim} dimensions"
            raise CheckpointError(
                f"{self.describe_tensor(suffix)} is of type {found.dtype} and shape {list(found.shape)}, expected {' or '.join(types)}"
                f"{shape}; download the model again"
            )
        del self.unread_tensors[f"{self.name}.{suffix}"]
        return view_tensor(found, self.files[found.path], np.dtype(_NUMPY_TYPES[found.dtype]))

    def read_floats(self, suffix: str, *types: str, ndim: int | None = 2) -> NDArray[Any]:
        """Return a float tensor, bfloat16 converted to float32. Arguments as in `read_tensor`."""
        is_bf16 = self.tensor_type(suffix) == "BF16"
        array = self.read_tensor(suffix, *(types or ("F32", "F16", "BF16")), ndim=ndim)
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32) if is_bf16 else array

    def drop_tensors(self, *suffixes: str) -> None:
        """Remove the tensors with these suffixes, which do not affect the weights, from `unread_tensors`."""
        for suffix in suffixes:
            self.unread_tensors.pop(f"{self.name}.{suffix}", None)


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """A format in which a checkpoint stores quantised matrices.

    Attributes:
        name: name of the format in the output of `paceline doctor`.
        packed_suffixes: suffixes of tensor names that identify a packed matrix.
        read_matrix: function that returns the matrix of a module.
        ignored_suffixes: suffixes of tensors that do not affect the weights, such as scales of activations and caches.
        notices: messages for users.
    """

    name: str
    packed_suffixes: tuple[str, ...]
    read_matrix: Callable[[PackedModule], PackedMatrix]
    ignored_suffixes: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
