"""Read tensors of the network from their rows in a GGUF file."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.config import FLOAT_TYPES, WeightType
from paceline.models.gguf.blocks import StoredBlocks, convert_blocks_to_groups, grouped_matrix_size
from paceline.models.gguf.header import GgufTensor
from paceline.models.grouped import RUN, columns_per_float16_scale
from paceline.models.quantize import QuantizationScheme, largest_group_size, quantize_tensor
from paceline.models.weights import AnyTensor, GroupedTensor, Tensor, TensorInfo

_REGROUPED_GROUP_SIZE = 128

IndexMap = Callable[[], NDArray[np.int64]]
"""A function that returns for each row (or column) of the network's tensor the index of the stored one."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where a tensor of the network is stored.

    Attributes:
        tensor: stored tensor with its rows.
        shape: shape of the network's tensor.
        expert: index in the stack if `tensor` stacks the matrices of experts (or of streams). Rows are then counted within the matrix.
        rows: row order; None = consecutive rows from `first_row` on.
        columns: column order; None = the stored order.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    expert: int | None = None
    first_row: int = 0
    rows: IndexMap | None = None
    columns: IndexMap | None = None


def check_stored_shape(source: TensorSource, *shapes: tuple[int, ...]) -> None:
    """Check that the stored tensor has one of `shapes` and a supported type.

    Raises:
        CheckpointError: It has another shape, or a type that is not supported.
    """
    tensor = source.tensor
    if tensor.shape not in shapes and (1, *tensor.shape) not in shapes:  # converters store a matrix of one row as a vector
        raise CheckpointError(
            f"{tensor} has shape {list(tensor.shape)}, but the metadata requires {list(shapes[0])}; the file is damaged, download it again"
        )
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
    runs = None if source.columns is None else _column_run_order(source.columns())
    if source.columns is not None and runs is None:
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
    if source.expert is not None:
        data, shape = data.reshape(shape[0], -1)[source.expert], shape[1:]
    rows = data.reshape(math.prod(shape) if len(source.shape) == 1 else math.prod(shape[:-1]), -1)
    return rows if source.rows is not None else rows[source.first_row : source.first_row + source.shape[0]]


def stored_blocks(source: TensorSource) -> StoredBlocks | None:
    """Return a matrix as stored quantised blocks; None if it is stored as floats, or its column order splits runs of 32."""
    if source.tensor.block_type.name in FLOAT_TYPES:
        return None
    runs = None if source.columns is None else _column_run_order(source.columns())
    if source.columns is not None and runs is None:
        return None
    order = None if source.rows is None else source.rows()
    return StoredBlocks(stored_rows(source), source.tensor.block_type, str(source.tensor), order, runs)


def order_digest_input(source: TensorSource) -> NDArray[np.uint8]:
    """Return bytes [1, n] of the type and the row and column orders, which with the stored bytes determine a tensor's values."""
    orders = [order().tobytes() for order in (source.rows, source.columns) if order is not None]
    settings = repr((source.tensor.block_type.name, source.rows is not None, source.columns is not None)).encode()
    return np.frombuffer(b"".join((settings, *orders)), np.uint8)[None]


def read_tensor(name: str, source: TensorSource, *, regroup: bool, num_threads: int) -> AnyTensor:
    """Read a tensor. Floats are a view of the file unless rows or columns are reordered; quantised blocks become groups.

    Args:
        name: internal name of the tensor.
        regroup: as in `GgufWeights`.
        num_threads: number of threads that convert blocks.
    """
    tensor, stored = source.tensor, stored_rows(source)
    order = None if source.rows is None else source.rows()
    columns = None if source.columns is None else source.columns()
    if tensor.block_type.name in FLOAT_TYPES:
        weight_type = FLOAT_TYPES[tensor.block_type.name]
        array = (stored if order is None else stored[order]).view(weight_type.item_type).reshape(source.shape)
        array = array if columns is None else array.take(columns, 1)
        return Tensor(array if array.flags.aligned else array.copy(), weight_type, source.shape)
    blocks = stored_blocks(source)
    if blocks is None:
        assert columns is not None  # `stored_blocks` returns None only for reordered columns
        matrix = convert_blocks_to_groups(stored, tensor.block_type, str(tensor), order, num_threads=num_threads)
        return Tensor(matrix.values().take(columns, 1), WeightType.F32, source.shape)
    grouped = GroupedTensor(blocks.to_grouped_matrix(num_threads=num_threads))
    scheme = _requantization_scheme(source) if regroup else None
    return grouped if scheme is None else quantize_tensor(name, grouped, scheme, num_threads=num_threads)


def _requantization_scheme(source: TensorSource) -> QuantizationScheme | None:
    """Return how to requantise a matrix: block types of at most 4 bits to 4 bits, others to 8. None = no group size fits its width."""
    has_four_bits = source.tensor.block_type.name.startswith(("Q4", "IQ4", "Q2", "Q3"))
    group_size = largest_group_size(source.shape[1], _REGROUPED_GROUP_SIZE)
    return None if group_size is None else QuantizationScheme(4 if has_four_bits else 8, group_size)


def _column_run_order(columns: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return a column order as an order of runs of 32 columns, in which codes are packed; None if the order splits a run."""
    if len(columns) % RUN:
        return None
    runs = columns.reshape(-1, RUN)
    is_whole = (runs == runs[:, :1] + np.arange(RUN)).all() and not (runs[:, 0] % RUN).any()
    return runs[:, 0] // RUN if is_whole else None
