"""The tensors of a network by internal names. A tensor is read when it is first used."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.models.config import ModelConfig, WeightType
from paceline.models.gguf.blocks import StoredBlocks
from paceline.models.grouped import GroupedMatrix
from paceline.models.storage.mapped_files import drop_pages
from paceline.models.storage.packed_matrix import PackedMatrix

_BF16_SHIFT = np.uint32(16)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A float tensor, usually a read-only view of the mapped file. numpy has no bf16, so its bits are held as uint16."""

    array: NDArray[Any]
    weight_type: WeightType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)


@dataclass(frozen=True, slots=True)
class GroupedTensor:
    """A quantised matrix as a tensor. `weight_type` is the float type in which products with it are computed."""

    matrix: GroupedMatrix
    weight_type: WeightType = WeightType.F32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes


AnyTensor = Tensor | GroupedTensor


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape, type and size of a tensor, known before its values are read or computed.

    Attributes:
        bits: number of bits of a quantised code; None = the tensor is not quantised.
        nbytes: number of bytes in memory.
    """

    shape: tuple[int, ...]
    weight_type: WeightType
    bits: int | None
    nbytes: int


class Weights(Mapping[str, AnyTensor]):
    """The tensors of a network by internal names.

    Attributes:
        bundled_head: "medusa" or "mtp" if the files include such a drafting head.
        has_encoders: the files include image or audio encoders, which are not read.
        quantized_format: the format of quantised matrices in the files; None = there are none.
        notices: messages for users.
        packed_matrices: quantised matrices that are not converted yet, by internal names. Their tensors are converted on first use.
    """

    bundled_head: str | None = None
    has_encoders: bool = False
    quantized_format: str | None = None
    notices: tuple[str, ...] = ()
    packed_matrices: Mapping[str, PackedMatrix] = MappingProxyType({})

    def __init__(self, tensors: Mapping[str, AnyTensor]) -> None:
        self._tensors = dict(tensors)
        self._names: Collection[str] = self._tensors

    def __getitem__(self, name: str) -> AnyTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Return the internal names of all tensors, in the order in which a forward pass uses them."""
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def has_tensor(self, name: str) -> bool:
        """Return whether the network has this tensor, without computing it."""
        return name in self._names

    def read_rows(self, name: str, row_indices: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the matrix rows with these indices as exact float32, [len(row_indices), columns]. Other rows are not read."""
        return as_float32(self[name], row_indices)

    def free_tensor(self, name: str) -> None:
        """Free the memory of a tensor. Its next use reads or computes the tensor again."""
        if (found := self._tensors.get(name)) is not None:
            drop_pages(found.matrix.arrays if isinstance(found, GroupedTensor) else (found.array,))

    def tensor_info(self, name: str) -> TensorInfo:
        """Return shape, type and size of a tensor without computing it."""
        tensor = self[name]
        bits = tensor.matrix.bits if isinstance(tensor, GroupedTensor) else None
        return TensorInfo(tensor.shape, tensor.weight_type, bits, tensor.nbytes)

    def stored_blocks(self, name: str) -> StoredBlocks | None:
        """Return a matrix as the quantised blocks of a GGUF file; None if it is not stored in such blocks."""
        return None

    def source_arrays(self, name: str) -> tuple[NDArray[Any], ...]:
        """Return the stored arrays that determine the values of a tensor, to compute a digest from."""
        tensor = self[name]
        return tensor.matrix.arrays if isinstance(tensor, GroupedTensor) else (tensor.array,)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that all weights take in memory."""
        return sum(self.tensor_info(name).nbytes for name in self)


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor computed on first use by calling `compute`. `source_arrays` are the stored arrays that determine its values."""

    info: TensorInfo
    source_arrays: tuple[NDArray[Any], ...]
    compute: Callable[[], AnyTensor]


class LazyWeights(Weights):
    """`Weights` whose tensors are computed on first use, and kept until `free_tensor`.

    Args:
        names: names of all tensors, in the order in which a forward pass uses them.
        compute_tensor: function that returns the tensor with a given name.
    """

    def __init__(self, names: Iterable[str], compute_tensor: Callable[[str], AnyTensor]) -> None:
        super().__init__({})
        self._names = dict.fromkeys(names)
        self._compute_tensor = compute_tensor

    def __getitem__(self, name: str) -> AnyTensor:
        found = self._tensors.get(name)
        if found is None:
            found = self._tensors[name] = self._compute_tensor(name)
        return found

    def free_tensor(self, name: str) -> None:
        super().free_tensor(name)
        self._tensors.pop(name, None)


def as_float32(tensor: AnyTensor, rows: NDArray[np.int32] | slice | None = None) -> NDArray[np.float32]:
    """Return all rows, or the selected ones, as exact float32; a view if the tensor is stored in float32 and `rows` is a slice or None."""
    if isinstance(tensor, GroupedTensor):
        return tensor.matrix.values(slice(None) if rows is None else rows)
    stored = tensor.array if rows is None else tensor.array[rows] if isinstance(rows, slice) else tensor.array.take(rows, 0)
    if tensor.weight_type is WeightType.BF16:
        bits: NDArray[np.uint32] = np.left_shift(stored.astype(np.uint32), _BF16_SHIFT)
        return bits.view(np.float32)
    return np.asarray(stored, np.float32)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 values to the nearest bf16, ties to even, and return the bits of the results."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> _BF16_SHIFT) & np.uint32(1)))) >> _BF16_SHIFT).astype(np.uint16)


def to_weight_type(values: NDArray[np.float32], weight_type: WeightType) -> NDArray[Any]:
    """Round float32 values to the nearest value of a type, ties to even. Values out of its range become infinite."""
    if weight_type is WeightType.BF16:
        return to_bf16(values)
    with np.errstate(over="ignore"):
        return values.astype(weight_type.numpy_dtype)


def take_rows(tensor: AnyTensor, rows: NDArray[np.int64] | slice) -> AnyTensor:
    """Return a matrix with only the selected rows: a view for a slice, otherwise a copy."""
    if isinstance(tensor, GroupedTensor):
        return replace(tensor, matrix=tensor.matrix.take_rows(rows))
    array = tensor.array[rows]
    return Tensor(array, tensor.weight_type, array.shape)


def add_norm_offset(tensor: AnyTensor) -> Tensor:
    """Return a norm weight plus 1, in float32: the sum may need more bits than the stored type has."""
    return Tensor(np.float32(1.0) + as_float32(tensor), WeightType.F32, tensor.shape)


def half_split_order(num_rows: int, head_size: int, rotary_size: int) -> NDArray[np.int64]:
    """Return the indices that reorder q or k rows from interleaved rotary pairs (GPT-J style) to pairs (j, j + rotary_size / 2)."""
    heads = np.arange(num_rows).reshape(-1, head_size)
    rotated, unrotated = heads[:, :rotary_size], heads[:, rotary_size:]
    halves = rotated.reshape(len(heads), -1, 2).swapaxes(1, 2).reshape(len(heads), rotary_size)
    return np.concatenate((halves, unrotated), axis=1).reshape(num_rows)


def shares_kv(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer reads the keys and values of another layer, so that its own projections are unused."""
    return layer in config.attention_layers and config.attention_layers[layer].kv_source_layer is not None
