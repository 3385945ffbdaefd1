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

Order = Callable[[], NDArray[np.int64]]
"""Makes a list of which stored row, or column, each of ours is."""


@dataclass(frozen=True, slots=True)
class Place:
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
    rows: Order | None = None
    columns: Order | None = None


def check(place: Place, *shapes: tuple[int, ...]) -> None:
    """Compare the stored tensor with the shape that the metadata makes it, or with several that mean the same.

    Raises:
        CheckpointError: it has another, or a type that cannot be read.
    """
    tensor = place.tensor
    if tensor.shape not in shapes and (1, *tensor.shape) not in shapes:  # a matrix of one row may be a vector
        raise CheckpointError(
            f"{tensor} has shape {list(tensor.shape)}, but the metadata makes it {list(shapes[0])}; the file is damaged, download it again"
        )
    if tensor.block_type.name in VIEWED:
        return
    if len(place.shape) != 2:
        raise CheckpointError(f"{tensor} is of type {tensor.block_type.name}; for one row {', '.join(VIEWED)} are supported")
    facts_of(place, regroup=False)  # refuses a type that cannot be read


def facts_of(place: Place, *, regroup: bool) -> TensorFacts:
    """What is known of a tensor without making it; `regroup` as in `GgufWeights`."""
    block_type, num_items = place.tensor.block_type, math.prod(place.shape)
    if block_type.name in VIEWED:
        return TensorFacts(place.shape, VIEWED[block_type.name][0], None, num_items * block_type.num_bytes)
    runs = None if place.columns is None else _runs(place.columns())
    if place.columns is not None and runs is None:
        return TensorFacts(place.shape, WeightType.F32, None, num_items * 4)
    scheme = _scheme(place) if regroup else None
    if scheme is not None:
        return TensorFacts(place.shape, WeightType.F32, scheme.bits, scheme.nbytes(place.shape))
    return TensorFacts(place.shape, WeightType.F32, *grouped_size(place.shape, block_type, str(place.tensor), block_of(runs)))


def stored_rows(place: Place) -> NDArray[np.uint8]:
    """The rows that a tensor is made of, in the order of the file: [rows, bytes]; of a vector each value is one."""
    data, shape = place.tensor.data, place.tensor.shape
    if place.expert is not None:
        data, shape = data.reshape(shape[0], -1)[place.expert], shape[1:]
    rows = data.reshape(math.prod(shape) if len(place.shape) == 1 else math.prod(shape[:-1]), -1)
    return rows if place.rows is not None else rows[place.first_row : place.first_row + place.shape[0]]


def stored_blocks(place: Place) -> StoredBlocks | None:
    """The rows of a matrix that is stored in blocks; None where it is not, or an order of columns tears them apart."""
    if place.tensor.block_type.name in VIEWED:
        return None
    runs = None if place.columns is None else _runs(place.columns())
    if place.columns is not None and runs is None:
        return None
    order = None if place.rows is None else place.rows()
    return StoredBlocks(stored_rows(place), place.tensor.block_type, str(place.tensor), order, runs)


def how_read(place: Place) -> NDArray[np.uint8]:
    """What decides which values the same bytes are, [1, bytes]."""
    orders = [order().tobytes() for order in (place.rows, place.columns) if order is not None]
    how = repr((place.tensor.block_type.name, place.rows is not None, place.columns is not None)).encode()
    return np.frombuffer(b"".join((how, *orders)), np.uint8)[None]


def read_tensor(name: str, place: Place, *, regroup: bool, num_threads: int) -> AnyTensor:
    """The tensor, by our `name`: a view of the file where no order is undone; what is quantised becomes groups.

    Args:
        regroup: as in `GgufWeights`.
        num_threads: to convert with.
    """
    tensor, stored = place.tensor, stored_rows(place)
    order = None if place.rows is None else place.rows()
    columns = None if place.columns is None else place.columns()
    if tensor.block_type.name in VIEWED:
        weight_type, item_type = VIEWED[tensor.block_type.name]
        array = (stored if order is None else stored[order]).view(item_type).reshape(place.shape)
        array = array if columns is None else array.take(columns, 1)
        return Tensor(array if array.flags.aligned else array.copy(), weight_type, place.shape)
    blocks = stored_blocks(place)
    if blocks is None:
        assert columns is not None  # else they are blocks
        matrix = group_blocks(stored, tensor.block_type, str(tensor), order, num_threads=num_threads)
        return Tensor(matrix.values().take(columns, 1), WeightType.F32, place.shape)
    grouped = GroupedTensor(blocks.groups(num_threads=num_threads))
    scheme = _scheme(place) if regroup else None
    return grouped if scheme is None else quantize_tensor(name, grouped, scheme, num_threads=num_threads)


def _scheme(place: Place) -> Scheme | None:
    """How a matrix is regrouped: types of up to 4 bits to 4, others to 8; None where no group divides its width."""
    has_four_bits = place.tensor.block_type.name.startswith(("Q4", "IQ4", "Q2", "Q3"))
    group = fitting_group(place.shape[1], _REGROUPED_COLUMNS)
    return None if group is None else Scheme(4 if has_four_bits else 8, group, symmetric=True)


def _runs(columns: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The order of runs of columns that groups and packed codes do not reach across; None where runs are torn apart."""
    if len(columns) % RUN:
        return None
    runs = columns.reshape(-1, RUN)
    is_whole = (runs == runs[:, :1] + np.arange(RUN)).all() and not (runs[:, 0] % RUN).any()
    return runs[:, 0] // RUN if is_whole else None
