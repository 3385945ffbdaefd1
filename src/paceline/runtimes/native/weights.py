"""Weights as the kernels read them: views of the memory-mapped checkpoint, so that nothing is copied unless it must be converted."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.models.config import WeightType
from paceline.models.grouped import GroupedMatrix, unpack_nibbles
from paceline.models.weights import AnyTensor, GroupedTensor, Tensor, Weights, as_float32, to_bf16
from paceline.runtimes.embedding import round_to_type
from paceline.runtimes.native.aligned import Arena
from paceline.runtimes.native.packed_weights import MAX_GROUP_SIZE, PackedWeights, pack_gguf_blocks, pack_weights
from paceline.runtimes.native.records import Matrix, MatrixKind

FLOAT_KINDS = {WeightType.F32: MatrixKind.F32, WeightType.F16: MatrixKind.F16, WeightType.BF16: MatrixKind.BF16}


class NativeWeights:
    """Returns addresses and records of weights for the kernels, and keeps the arrays in memory.

    Args:
        weights: weights of the checkpoint.
        compute_type: float tensors of another type are converted to this type, except when it is float32.
        packed: cache of quantised matrices in panels, by name; filled when a matrix is first used. None = matrices are not packed.
        num_threads: threads that pack matrices.

    Attributes:
        arrays: all arrays whose addresses the kernels may use.
    """

    def __init__(
        self, weights: Weights, compute_type: WeightType, *, packed: dict[str, PackedWeights] | None = None, num_threads: int = 1
    ) -> None:
        self._weights = weights
        self.compute_type = compute_type
        self._packed = packed
        self._num_threads = num_threads
        self._arena = Arena()
        self.arrays: list[NDArray[Any]] = []
        self._float_matrices: dict[str, tuple[NDArray[Any], MatrixKind]] = {}

    def vector_address(self, name: str, *, exact: bool = False) -> int:
        """Return the address of a float32 vector, rounded to `compute_type` unless `exact`."""
        values = as_float32(self._weights[name])
        # copied, because a view would keep megabytes of the mapped file in memory
        values = np.array(values if exact else round_to_type(values, self.compute_type))
        self._weights.free_tensor(name)
        return self._address(values)

    def transposed_address(self, name: str) -> int:
        """Return the address of a column-major float32 copy of a matrix."""
        return self._address(round_to_type(as_float32(self._weights[name]), self.compute_type).T)

    def scalar(self, name: str) -> float:
        """Return the value of a weight with one element."""
        return float(round_to_type(as_float32(self._weights[name]), self.compute_type)[0])

    def has_tensor(self, name: str) -> bool:
        return self._weights.has_tensor(name)

    def lookup_table(self, name: str) -> AnyTensor | PackedWeights:
        """Return the matrix `name.weight` for row lookups, in panels if it is packed for products or if panels are smaller."""
        if self._packed is not None and name not in self._packed and self._weights.stored_blocks(name + ".weight") is None:
            tensor = self._weights[name + ".weight"]
            if not isinstance(tensor, GroupedTensor) or tensor.matrix.super_blocks is None:
                return tensor
        return self._pack(name, self._num_threads) or self._weights[name + ".weight"]

    def matrix_record(self, name: str, out: int) -> Matrix:
        """Return the record of the matrix `name.weight` and its bias for the kernels. `out`: number of the value that receives products."""
        bias = self.vector_address(name + ".bias") if self.has_tensor(name + ".bias") else None
        if (packed := self._pack(name, self._num_threads)) is not None:
            return packed.matrix_record(out, bias)
        tensor = self._weights[name + ".weight"]
        if isinstance(tensor, GroupedTensor):
            return self._row_major_matrix(tensor.matrix, out, bias)
        if name not in self._float_matrices:
            self._float_matrices[name] = self._convert_to_compute_type(tensor)
        values, kind = self._float_matrices[name]
        outputs, columns = values.shape
        address, row_bytes = self._address_and_stride(values)
        return Matrix(kind, outputs, columns, 0, 0, out, 0, row_bytes, address, None, None, bias, None)

    def _pack(self, name: str, num_threads: int = 1) -> PackedWeights | None:
        """Return a matrix in panels; the first call packs it. None = the matrix is not packed."""
        if self._packed is None:
            return None
        if name not in self._packed:
            blocks = self._weights.stored_blocks(name + ".weight")
            if blocks is not None:
                self._packed[name] = pack_gguf_blocks(blocks, num_threads, self._arena)
            else:
                tensor = self._weights[name + ".weight"]
                if not isinstance(tensor, GroupedTensor) or tensor.matrix.group_size > MAX_GROUP_SIZE:
                    return None
                self._packed[name] = pack_weights(tensor.matrix, num_threads, self._arena)
            self._weights.free_tensor(f"{name}.weight")
        return self._packed[name]

    def matrix_records(self, names: Sequence[str], out: int) -> list[Matrix]:
        """Return `matrix_record` of several matrices, which are packed in parallel threads."""
        with ThreadPoolExecutor(self._num_threads) as pool:
            list(pool.map(self._pack, names))
        return [self.matrix_record(name, out) for name in names]

    def _convert_to_compute_type(self, tensor: Tensor) -> tuple[NDArray[Any], MatrixKind]:
        if tensor.weight_type is self.compute_type or self.compute_type is WeightType.F32:
            return tensor.array, FLOAT_KINDS[tensor.weight_type]
        values = as_float32(tensor)
        if self.compute_type is WeightType.BF16:
            return to_bf16(values), FLOAT_KINDS[WeightType.BF16]
        return values.astype(np.float16), FLOAT_KINDS[WeightType.F16]

    def _row_major_matrix(self, matrix: GroupedMatrix, out: int, bias: int | None) -> Matrix:
        """Return the record of a quantised matrix that is stored row by row, not in panels, with codes as unsigned bytes."""
        zero_point, codes = matrix.zero_point, matrix.codes
        if matrix.bits == 4:
            unpacked = unpack_nibbles(codes.view(np.uint8))
            codes = unpacked if matrix.code_values is None else matrix.code_values[unpacked]
        if codes.dtype == np.int8:
            codes, zero_point = codes.view(np.uint8) ^ np.uint8(128), zero_point + 128
        kind = MatrixKind.U8 if matrix.minimums is None else MatrixKind.U8_MINIMUM
        minimums = None if matrix.minimums is None else self._address(matrix.minimums)
        outputs, columns = matrix.shape
        address, row_bytes = self._address_and_stride(codes)
        return Matrix(
            kind, outputs, columns, matrix.group_size, zero_point, out, 0, row_bytes, address, self._address(matrix.scales), minimums, bias
        )

    def _address_and_stride(self, array: NDArray[Any]) -> tuple[int, int]:
        """Return address and bytes between rows of the array, or of a contiguous copy if the rows are not contiguous."""
        array = array if array.strides[1] == array.itemsize else np.ascontiguousarray(array)
        self.arrays.append(array)
        return array.ctypes.data, array.strides[0]

    def _address(self, array: NDArray[Any]) -> int:
        """Return the address of the array, or of a contiguous copy if needed."""
        array = np.ascontiguousarray(array)
        self.arrays.append(array)
        return array.ctypes.data
