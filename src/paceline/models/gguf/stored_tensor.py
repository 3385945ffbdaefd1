"""Find the tensors of the network of a GGUF file, and read them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.config import WeightType
from paceline.models.gguf.blocks import StoredBlocks, convert_blocks_to_groups, grouped_matrix_size
from paceline.models.gguf.header import GgufTensor
from paceline.models.grouped import RUN, columns_per_float16_scale
from paceline.models.quantize import Scheme, largest_group_size, quantize_tensor
from paceline.models.weights import AnyTensor, GroupedTensor, Tensor, TensorInfo

UNQUANTIZED_TYPES = {"F32": (WeightType.F32, "<f4"), "F16": (WeightType.F16, "<f2"), "BF16": (WeightType.BF16, "<u2")}
"""Types that are used as stored, with their numpy types."""
_REGROUPED_GROUP_SIZE = 128

IndexMap = Callable[[], NDArray[np.int64]]
"""Returns the index of the stored row, or column, for each one of the network's tensor."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The rows of a stored tensor that make one tensor of the network.

    Attributes:
        expert: index in a stack of experts; `first_row` counts within it.
        rows: stored row of each row; None = consecutive from `first_row` on.
        columns: stored column of each column; None = the same.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    expert: int | None = None
    first_row: int = 0
    rows: IndexMap | None = None
    columns: IndexMap | None = None


def check_shape(source: TensorSource, *shapes: tuple[int, ...]) -> None:
    """Compare the stored tensor with one or several shapes of the same meaning.

    Raises:
        CheckpointError: It has another shape, or a type that is not supported.
    """
    tensor = source.tensor
    if tensor.shape not in shapes and (1, *tensor.shape) not in shapes:  # a matrix of one row may be stored as a vector
        raise CheckpointError(
            f"{tensor} has shape {list(tensor.shape)}, but the metadata requires {list(shapes[0])}; the file is damaged, download it again"
        )
    if tensor.block_type.name in UNQUANTIZED_TYPES:
        return
    if len(source.shape) != 2:
        raise CheckpointError(f"{tensor} is of type {tensor.block_type.name}; for one row {', '.join(UNQUANTIZED_TYPES)} are supported")
    tensor_info(source, regroup=False)  # raises for an unsupported type


def tensor_info(source: TensorSource, *, regroup: bool) -> TensorInfo:
    """Return shape, type and size of a tensor without reading it; `regroup` as in `GgufWeights`."""
    block_type, num_items = source.tensor.block_type, math.prod(source.shape)
    if block_type.name in UNQUANTIZED_TYPES:
        return TensorInfo(source.shape, UNQUANTIZED_TYPES[block_type.name][0], None, num_items * block_type.num_bytes)
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
    """Return the stored rows of a tensor, [rows, bytes]; each element of a vector is a row."""
    data, shape = source.tensor.data, source.tensor.shape
    if source.expert is not None:
        data, shape = data.reshape(shape[0], -1)[source.expert], shape[1:]
    rows = data.reshape(math.prod(shape) if len(source.shape) == 1 else math.prod(shape[:-1]), -1)
    return rows if source.rows is not None else rows[source.first_row : source.first_row + source.shape[0]]


def stored_blocks(source: TensorSource) -> StoredBlocks | None:
    """Return a matrix as stored quantised blocks; None if it is not stored in blocks, or if its column order splits runs of 32."""
    if source.tensor.block_type.name in UNQUANTIZED_TYPES:
        return None
    runs = None if source.columns is None else _column_run_order(source.columns())
    if source.columns is not None and runs is None:
        return None
    order = None if source.rows is None else source.rows()
    return StoredBlocks(stored_rows(source), source.tensor.block_type, str(source.tensor), order, runs)


def decoding_key(source: TensorSource) -> NDArray[np.uint8]:
    """Return a digest input [1, bytes] of settings that change the values decoded from the same stored bytes."""
    orders = [order().tobytes() for order in (source.rows, source.columns) if order is not None]
    how = repr((source.tensor.block_type.name, source.rows is not None, source.columns is not None)).encode()
    return np.frombuffer(b"".join((how, *orders)), np.uint8)[None]


def read_tensor(name: str, source: TensorSource, *, regroup: bool, num_threads: int) -> AnyTensor:
    """Read the tensor: a view of the file unless rows or columns are reordered; quantised blocks become groups.

    Args:
        name: internal name of the tensor.
        regroup: as in `GgufWeights`.
        num_threads: for the conversion.
    """
    tensor, stored = source.tensor, stored_rows(source)
    order = None if source.rows is None else source.rows()
    columns = None if source.columns is None else source.columns()
    if tensor.block_type.name in UNQUANTIZED_TYPES:
        weight_type, item_type = UNQUANTIZED_TYPES[tensor.block_type.name]
        array = (stored if order is None else stored[order]).view(item_type).reshape(source.shape)
        array = array if columns is None else array.take(columns, 1)
        return Tensor(array if array.flags.aligned else array.copy(), weight_type, source.shape)
    blocks = stored_blocks(source)
    if blocks is None:
        assert columns is not None  # with reordered columns only; otherwise `stored_blocks` returns blocks
        matrix = convert_blocks_to_groups(stored, tensor.block_type, str(tensor), order, num_threads=num_threads)
        return Tensor(matrix.values().take(columns, 1), WeightType.F32, source.shape)
    grouped = GroupedTensor(blocks.groups(num_threads=num_threads))
    scheme = _requantization_scheme(source) if regroup else None
    return grouped if scheme is None else quantize_tensor(name, grouped, scheme, num_threads=num_threads)


def _requantization_scheme(source: TensorSource) -> Scheme | None:
    """Return how a matrix is requantised: types of up to 4 bits to 4, others to 8; None if no group size divides its width."""
    has_four_bits = source.tensor.block_type.name.startswith(("Q4", "IQ4", "Q2", "Q3"))
    group_size = largest_group_size(source.shape[1], _REGROUPED_GROUP_SIZE)
    return None if group_size is None else Scheme(4 if has_four_bits else 8, group_size, symmetric=True)


def _column_run_order(columns: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return a column order as an order of runs of 32 columns; None if it splits a run, because codes are packed by run."""
    if len(columns) % RUN:
        return None
    runs = columns.reshape(-1, RUN)
    is_whole = (runs == runs[:, :1] + np.arange(RUN)).all() and not (runs[:, 0] % RUN).any()
    return runs[:, 0] // RUN if is_whole else None
