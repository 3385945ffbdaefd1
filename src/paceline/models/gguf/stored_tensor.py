"""Read tensors of a network from a GGUF file, which may store their rows and columns in another order than the network's."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.config import FLOAT_TYPES, WeightType
from paceline.models.gguf.blocks import StoredBlocks, convert_to_grouped_matrix, grouped_matrix_size
from paceline.models.gguf.header import GgufTensor
from paceline.models.grouped import RUN_COLUMNS, columns_per_float16_scale
from paceline.models.quantize import QuantizationScheme, largest_group_size, quantize_tensor
from paceline.models.weights import AnyTensor, GroupedTensor, Tensor, TensorInfo

_REGROUPED_GROUP_SIZE = 128

StoredIndexFunction = Callable[[], NDArray[np.int64]]
"""A function that returns the index of the stored row (or column) for each row (or column) of the network's tensor."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The part of a stored tensor that holds a tensor of the network.

    Attributes:
        tensor: the stored tensor.
        shape: shape of the network's tensor.
        stack_index: index of the matrix if `tensor` stacks several, such as those of all experts. Rows are then counted within the matrix.
        first_row: first row if `row_order` is None; the other rows follow it.
        row_order: indices of the stored rows; None = consecutive rows.
        column_order: indices of the stored columns; None = the stored order.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    stack_index: int | None = None
    first_row: int = 0
    row_order: StoredIndexFunction | None = None
    column_order: StoredIndexFunction | None = None


def check_stored_shape(source: TensorSource, *allowed_shapes: tuple[int, ...]) -> None:
    """Check that the stored tensor has one of the allowed shapes and a supported type.

    Raises:
        CheckpointError: The stored tensor has none of these shapes, or a type that is not supported.
    """
    tensor = source.tensor
    if tensor.shape not in allowed_shapes and (1, *tensor.shape) not in allowed_shapes:  # converters store a matrix of one row as a vector
        found = f"{tensor} has shape {list(tensor.shape)}, but the metadata requires {list(allowed_shapes[0])}"
        raise CheckpointError(f"{found}; the file is damaged, download it again")
    if tensor.block_type.name in FLOAT_TYPES:
        return
    if len(source.shape) != 2:
        raise CheckpointError(f"{tensor} is of type {tensor.block_type.name}; for one row {', '.join(FLOAT_TYPES)} are supported")
    tensor_info(source, regroup=False)  # raises an error if the type is not supported


def tensor_info(source: TensorSource, *, regroup: bool) -> TensorInfo:
    """Return shape, type and size of a tensor without reading it; `regroup` as in `GgufWeights`."""
    block_type, num_items = source.tensor.block_type, math.prod(source.shape)
    if block_type.name in FLOAT_TYPES:
        return TensorInfo(source.shape, FLOAT_TYPES[block_type.name], None, num_items * block_type.num_bytes)
    runs = None if source.column_order is None else _column_run_order(source.column_order())
    if source.column_order is not None and runs is None:
        return TensorInfo(source.shape, WeightType.F32, None, num_items * 4)
    scheme = _requantization_scheme(source) if regroup else None
    if scheme is not None:
        return TensorInfo(source.shape, WeightType.F32, scheme.bits, scheme.nbytes(source.shape))
    return TensorInfo(
        source.shape, WeightType.F32, *grouped_matrix_size(source.shape, block_type, str(source.tensor), columns_per_float16_scale(runs))
    )


def stored_rows(source: TensorSource) -> NDArray[np.uint8]:
    """Return the stored bytes of a tensor in the file's row order, [rows, bytes]. A vector has a row for each element."""
    data, shape = source.tensor.data, source.tensor.shape
    if source.stack_index is not None:
        data, shape = data.reshape(shape[0], -1)[source.stack_index], shape[1:]
    rows = data.reshape(math.prod(shape) if len(source.shape) == 1 else math.prod(shape[:-1]), -1)
    return rows if source.row_order is not None else rows[source.first_row : source.first_row + source.shape[0]]


def stored_blocks(source: TensorSource) -> StoredBlocks | None:
    """Return a matrix in its stored quantised blocks; None if it is stored as floats, or its column order splits runs of 32 columns."""
    if source.tensor.block_type.name in FLOAT_TYPES:
        return None
    runs = None if source.column_order is None else _column_run_order(source.column_order())
    if source.column_order is not None and runs is None:
        return None
    order = None if source.row_order is None else source.row_order()
    return StoredBlocks(stored_rows(source), source.tensor.block_type, str(source.tensor), order, runs)


def order_digest_bytes(source: TensorSource) -> NDArray[np.uint8]:
    """Return, as bytes [1, n], all that determines a tensor's values except the stored bytes: its type, row order and column order."""
    orders = [order().tobytes() for order in (source.row_order, source.column_order) if order is not None]
    settings = repr((source.tensor.block_type.name, source.row_order is not None, source.column_order is not None)).encode()
    return np.frombuffer(b"".join((settings, *orders)), np.uint8)[None]


def read_tensor(name: str, source: TensorSource, *, regroup: bool, num_threads: int) -> AnyTensor:
    """Read a tensor. Floats are a view of the file unless rows or columns are reordered; quantised blocks become a `GroupedMatrix`.

    Args:
        regroup: as in `GgufWeights`.
        num_threads: number of threads that convert blocks.
    """
    tensor, stored = source.tensor, stored_rows(source)
    order = None if source.row_order is None else source.row_order()
    columns = None if source.column_order is None else source.column_order()
    if tensor.block_type.name in FLOAT_TYPES:
        weight_type = FLOAT_TYPES[tensor.block_type.name]
        array = (stored if order is None else stored[order]).view(weight_type.numpy_dtype).reshape(source.shape)
        array = array if columns is None else array.take(columns, 1)
        return Tensor(array if array.flags.aligned else array.copy(), weight_type, source.shape)
    blocks = stored_blocks(source)
    if blocks is None:
        assert columns is not None  # `stored_blocks` returns None only for reordered columns
        matrix = convert_to_grouped_matrix(stored, tensor.block_type, str(tensor), order, num_threads=num_threads)
        return Tensor(matrix.values().take(columns, 1), WeightType.F32, source.shape)
    grouped = GroupedTensor(blocks.to_grouped_matrix(num_threads=num_threads))
    scheme = _requantization_scheme(source) if regroup else None
    return grouped if scheme is None else quantize_tensor(name, grouped, scheme, num_threads=num_threads)


def _requantization_scheme(source: TensorSource) -> QuantizationScheme | None:
    """Return the scheme to requantise a matrix with: 4 bits for block types of at most 4 bits, else 8. None if no group size fits."""
    has_four_bits = source.tensor.block_type.name.startswith(("Q4", "IQ4", "Q2", "Q3"))
    group_size = largest_group_size(source.shape[1], _REGROUPED_GROUP_SIZE)
    return None if group_size is None else QuantizationScheme(4 if has_four_bits else 8, group_size)


def _column_run_order(columns: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the order of runs of 32 columns that reorders columns in this way; None if the order splits a run. Codes are packed by run."""
    if len(columns) % RUN_COLUMNS:
        return None
    runs = columns.reshape(-1, RUN_COLUMNS)
    is_whole = (runs == runs[:, :1] + np.arange(RUN_COLUMNS)).all() and not (runs[:, 0] % RUN_COLUMNS).any()
    return runs[:, 0] // RUN_COLUMNS if is_whole else None
