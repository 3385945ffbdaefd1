"""Where our tensors are in a GGUF file, and how they are made of what is stored there."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.config import WeightType
from paceline.models.gguf.blocks import StoredBlocks, group_blocks, grouped_size
from paceline.models.gguf.header import GgufTensor
from paceline.models.grouped import RUN, block_of
from paceline.models.quantize import Scheme, fitting_group, quantize_tensor
from paceline.models.weights import AnyTensor, GroupedTensor, Tensor, TensorFacts

VIEWED = {"F32": (WeightType.F32, "<f4"), "F16": (WeightType.F16, "<f2"), "BF16": (WeightType.BF16, "<u2")}
"""Types that are used as they are stored, and how numpy reads them."""
_REGROUPED_COLUMNS = 128

IndexMap = Callable[[], NDArray[np.int64]]
"""Makes a list of which stored row, or column, each of ours is."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where one of our tensors is stored: rows of a tensor of the file.

    Attributes:
        expert: of a stack whose tensors it is among; `first_row` counts within it.
        rows: which of all stored rows ours are; None = those from `first_row` on, as they are.
        columns: in which order their values are stored; None = in ours.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    expert: int | None = None
    first_row: int = 0
    rows: IndexMap | None = None
    columns: IndexMap | None = None


def check_shape(source: TensorSource, *shapes: tuple[int, ...]) -> None:
    """Compare the stored tensor with the shape that the metadata makes it, or with several that mean the same.

    Raises:
        CheckpointError: it has another, or a type that cannot be read.
    """
    tensor = source.tensor
    if tensor.shape not in shapes and (1, *tensor.shape) not in shapes:  # a matrix of one row may be a vector
        raise CheckpointError(
            f"{tensor} has shape {list(tensor.shape)}, but the metadata makes it {list(shapes[0])}; the file is damaged, download it again"
        )
    if tensor.block_type.name in VIEWED:
        return
    if len(source.shape) != 2:
        raise CheckpointError(f"{tensor} is of type {tensor.block_type.name}; for one row {', '.join(VIEWED)} are supported")
    tensor_facts(source, regroup=False)  # refuses a type that cannot be read


def tensor_facts(source: TensorSource, *, regroup: bool) -> TensorFacts:
    """What is known of a tensor without making it; `regroup` as in `GgufWeights`."""
    block_type, num_items = source.tensor.block_type, math.prod(source.shape)
    if block_type.name in VIEWED:
        return TensorFacts(source.shape, VIEWED[block_type.name][0], None, num_items * block_type.num_bytes)
    runs = None if source.columns is None else _runs(source.columns())
    if source.columns is not None and runs is None:
        return TensorFacts(source.shape, WeightType.F32, None, num_items * 4)
    scheme = _scheme(source) if regroup else None
    if scheme is not None:
        return TensorFacts(source.shape, WeightType.F32, scheme.bits, scheme.nbytes(source.shape))
    return TensorFacts(source.shape, WeightType.F32, *grouped_size(source.shape, block_type, str(source.tensor), block_of(runs)))


def stored_rows(source: TensorSource) -> NDArray[np.uint8]:
    """The rows that a tensor is made of, in the order of the file: [rows, bytes]; of a vector each value is one."""
    data, shape = source.tensor.data, source.tensor.shape
    if source.expert is not None:
        data, shape = data.reshape(shape[0], -1)[source.expert], shape[1:]
    rows = data.reshape(math.prod(shape) if len(source.shape) == 1 else math.prod(shape[:-1]), -1)
    return rows if source.rows is not None else rows[source.first_row : source.first_row + source.shape[0]]


def stored_blocks(source: TensorSource) -> StoredBlocks | None:
    """The rows of a matrix that is stored in blocks; None where it is not, or an order of columns tears them apart."""
    if source.tensor.block_type.name in VIEWED:
        return None
    runs = None if source.columns is None else _runs(source.columns())
    if source.columns is not None and runs is None:
        return None
    order = None if source.rows is None else source.rows()
    return StoredBlocks(stored_rows(source), source.tensor.block_type, str(source.tensor), order, runs)


def decoding_key(source: TensorSource) -> NDArray[np.uint8]:
    """What decides which values the same bytes are, [1, bytes]."""
    orders = [order().tobytes() for order in (source.rows, source.columns) if order is not None]
    how = repr((source.tensor.block_type.name, source.rows is not None, source.columns is not None)).encode()
    return np.frombuffer(b"".join((how, *orders)), np.uint8)[None]


def read_tensor(name: str, source: TensorSource, *, regroup: bool, num_threads: int) -> AnyTensor:
    """The tensor, by our `name`: a view of the file where no order is undone; what is quantised becomes groups.

    Args:
        regroup: as in `GgufWeights`.
        num_threads: to convert with.
    """
    tensor, stored = source.tensor, stored_rows(source)
    order = None if source.rows is None else source.rows()
    columns = None if source.columns is None else source.columns()
    if tensor.block_type.name in VIEWED:
        weight_type, item_type = VIEWED[tensor.block_type.name]
        array = (stored if order is None else stored[order]).view(item_type).reshape(source.shape)
        array = array if columns is None else array.take(columns, 1)
        return Tensor(array if array.flags.aligned else array.copy(), weight_type, source.shape)
    blocks = stored_blocks(source)
    if blocks is None:
        assert columns is not None  # else they are blocks
        matrix = group_blocks(stored, tensor.block_type, str(tensor), order, num_threads=num_threads)
        return Tensor(matrix.values().take(columns, 1), WeightType.F32, source.shape)
    grouped = GroupedTensor(blocks.groups(num_threads=num_threads))
    scheme = _scheme(source) if regroup else None
    return grouped if scheme is None else quantize_tensor(name, grouped, scheme, num_threads=num_threads)


def _scheme(source: TensorSource) -> Scheme | None:
    """How a matrix is regrouped: types of up to 4 bits to 4, others to 8; None where no group divides its width."""
    has_four_bits = source.tensor.block_type.name.startswith(("Q4", "IQ4", "Q2", "Q3"))
    group = fitting_group(source.shape[1], _REGROUPED_COLUMNS)
    return None if group is None else Scheme(4 if has_four_bits else 8, group, symmetric=True)


def _runs(columns: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The order of runs of columns that groups and packed codes do not reach across; None where runs are torn apart."""
    if len(columns) % RUN:
        return None
    runs = columns.reshape(-1, RUN)
    is_whole = (runs == runs[:, :1] + np.arange(RUN)).all() and not (runs[:, 0] % RUN).any()
    return runs[:, 0] // RUN if is_whole else None
