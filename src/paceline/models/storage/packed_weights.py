"""Convert packed (quantised) matrices to groups or floats."""

from collections.abc import Iterable

from paceline.models.config import WeightType
from paceline.models.storage.packed_matrix import PackedMatrix
from paceline.models.weights import AnyTensor, GroupedTensor, LazyTensor, Tensor, TensorInfo, round_to_type


def lazy_matrix(packed: PackedMatrix, weight_type: WeightType, num_threads: int = 1) -> LazyTensor:
    """Return a packed matrix that is converted on first use, as `unpack_matrix` does."""
    info = packed_tensor_info(packed, weight_type)
    return LazyTensor(info, packed.source_arrays, lambda: unpack_matrix(packed, weight_type, num_threads))


def unpack_matrix(packed: PackedMatrix, weight_type: WeightType, num_threads: int = 1) -> AnyTensor:
    """Return a packed matrix converted to groups, or to floats of `weight_type` if groups cannot hold its values.

    Raises:
        CheckpointError: A scale or a value is not finite.
    """
    if packed.bits is not None:
        return GroupedTensor(packed.to_grouped_matrix(num_threads))
    return Tensor(packed.to_array(lambda values: round_to_type(values, weight_type), num_threads), weight_type, packed.shape)


def packed_tensor_info(packed: PackedMatrix, weight_type: WeightType) -> TensorInfo:
    """Return shape, type and size of a packed matrix before it is converted."""
    if packed.bits is not None:
        return TensorInfo(packed.shape, WeightType.F32, packed.bits, packed.shape[0] * packed.row_bytes)
    return TensorInfo(packed.shape, weight_type, None, packed.shape[0] * packed.shape[1] * weight_type.item_type.itemsize)


def dequantized_bytes(packed: Iterable[PackedMatrix], weight_type: WeightType) -> int:
    """Return the bytes in memory of those matrices that are converted to floats."""
    return sum(packed_tensor_info(matrix, weight_type).nbytes for matrix in packed if matrix.bits is None)


def dequantized_notice(packed: Iterable[PackedMatrix], weight_type: WeightType) -> tuple[str, ...]:
    """Return a notice about the memory of matrices that are converted to floats; no notice if there are none."""
    floats = [matrix for matrix in packed if matrix.bits is None]
    if not floats:
        return ()
    size, stored = dequantized_bytes(floats, weight_type), sum(array.nbytes for matrix in floats for array in matrix.source_arrays)
    return (
        f"{len(floats)} matrices become {weight_type.value}, rounded to nearest even, since no groups hold their values: "
        f"{size / 1e9:.2g} GB in memory for {stored / 1e9:.2g} GB of the files; quantization='int8' or 'int4' makes them smaller",
    )
