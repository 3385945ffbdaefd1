"""Weights as the kernels read them: views of the mapped checkpoint wherever nothing is converted, so loading copies nothing."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.models.config import WeightType
from paceline.models.grouped import GroupedMatrix
from paceline.models.weights import AnyTensor, GroupedTensor, Tensor, Weights, as_float32, to_bf16
from paceline.runtimes.native.aligned import Arena
from paceline.runtimes.native.block_panels import blocks_in_panels
from paceline.runtimes.native.panels import MAX_GROUP, Panels, in_panels
from paceline.runtimes.native.records import Matrix
from paceline.runtimes.rounding import rounded

PLAIN_KINDS = {WeightType.F32: 0, WeightType.F16: 1, WeightType.BF16: 2}
BF16_KIND = PLAIN_KINDS[WeightType.BF16]
_SIGNED, _UNSIGNED, _UNSIGNED_MINIMUM, _NIBBLES, _NIBBLES_MINIMUM, _NIBBLES_TABLE = range(3, 9)


class NativeWeights:
    """Keeps every array alive whose address a program holds.

    Args:
        weights: the checkpoint's.
        round_to: type that values stored otherwise are rounded to; they are kept in it.
        panels: matrices in groups laid out for rows that are rounded to bytes, by name; those that are missing are added. None = groups
            stay as they are stored, for rows that are not rounded.
        num_threads: to lay them out with.
    """

    def __init__(self, weights: Weights, round_to: WeightType, *, panels: dict[str, Panels] | None = None, num_threads: int = 1) -> None:
        self._weights = weights
        self._round_to = round_to
        self._panels = panels
        self._num_threads = num_threads
        self._arena = Arena()
        self._arrays: list[NDArray[Any]] = []
        self._plain: dict[str, tuple[NDArray[Any], int]] = {}  # what networks beside one another read as well

    @property
    def arrays(self) -> Sequence[NDArray[Any]]:
        """All whose addresses were handed out so far."""
        return self._arrays

    @property
    def rounds_to_bf16(self) -> bool:
        """Whether bfloat16 is the type of computation."""
        return self._round_to is WeightType.BF16

    def vector(self, name: str, *, exact: bool = False) -> int:
        """Address of a norm weight, a bias or another vector as float32; `exact` = not rounded."""
        values = as_float32(self._weights[name])
        values = np.array(values if exact else rounded(values, self._round_to))  # of a file, each would keep megabytes around it in memory
        self._weights.forget(name)
        return self._address(values)

    def columns(self, name: str) -> int:
        """Address of a matrix as float32, column after column."""
        return self._address(rounded(as_float32(self._weights[name]), self._round_to).T)

    def number(self, name: str) -> float:
        """A weight of one value."""
        return float(rounded(as_float32(self._weights[name]), self._round_to)[0])

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def table(self, name: str) -> AnyTensor | Panels:
        """The matrix `name.weight` to look rows up in: in panels where products read it so, or where that takes less room."""
        if self._panels is not None and name not in self._panels and self._weights.blocks(name + ".weight") is None:
            tensor = self._weights[name + ".weight"]
            if not isinstance(tensor, GroupedTensor) or tensor.matrix.super_blocks is None:
                return tensor
        return self._lay_out(name, self._num_threads) or self._weights[name + ".weight"]

    def matrix(self, name: str, out: int) -> Matrix:
        """The matrix `name.weight` with its bias, whose products go to buffer `out`."""
        bias = self.vector(name + ".bias") if self.has(name + ".bias") else None
        if (panels := self._lay_out(name, self._num_threads)) is not None:
            return panels.matrix(out, bias)
        tensor = self._weights[name + ".weight"]
        if isinstance(tensor, GroupedTensor):
            return self._grouped(tensor.matrix, out, bias)
        if name not in self._plain:
            self._plain[name] = self._rounded(tensor)
        values, kind = self._plain[name]
        outputs, columns = values.shape
        address, row_bytes = self._rows(values)
        return Matrix(kind, outputs, columns, 0, 0, out, 0, row_bytes, address, None, None, bias, None)

    def _lay_out(self, name: str, num_threads: int = 1) -> Panels | None:
        """A matrix in panels, made when it is first asked for; None = it stays as it is stored."""
        if self._panels is None:
            return None
        if name not in self._panels:
            blocks = self._weights.blocks(name + ".weight")
            if blocks is not None:
                self._panels[name] = blocks_in_panels(blocks, num_threads, self._arena)
                self._weights.forget(f"{name}.weight")
                return self._panels[name]
            tensor = self._weights[name + ".weight"]
            if not isinstance(tensor, GroupedTensor) or tensor.matrix.group > MAX_GROUP:
                return None
            self._panels[name] = in_panels(tensor.matrix, num_threads, self._arena)
            self._weights.forget(f"{name}.weight")
        return self._panels[name]

    def matrices(self, names: Sequence[str], out: int) -> list[Matrix]:
        """As `matrix`, of many at once."""
        with ThreadPoolExecutor(self._num_threads) as pool:
            list(pool.map(self._lay_out, names))
        return [self.matrix(name, out) for name in names]

    def _rounded(self, tensor: Tensor) -> tuple[NDArray[Any], int]:
        if tensor.weight_type is self._round_to or self._round_to is WeightType.F32:
            return tensor.array, PLAIN_KINDS[tensor.weight_type]
        values = as_float32(tensor)
        if self._round_to is WeightType.BF16:
            return to_bf16(values), PLAIN_KINDS[WeightType.BF16]
        return values.astype(np.float16), PLAIN_KINDS[WeightType.F16]

    def _grouped(self, matrix: GroupedMatrix, out: int, bias: int | None) -> Matrix:
        has_minimums = matrix.minimums is not None
        if matrix.table is not None:
            codes, zero_point, kind = matrix.codes, 0, _NIBBLES_TABLE
        elif matrix.bits == 4:
            codes, zero_point = matrix.codes, matrix.zero_point
            kind = _NIBBLES_MINIMUM if has_minimums else _NIBBLES
        elif matrix.codes.dtype == np.int8 and not has_minimums and matrix.zero_point == 0:
            codes, zero_point, kind = matrix.codes, 0, _SIGNED
        else:
            # Signed codes as unsigned ones: 128 more, and so is the zero point.
            is_signed = matrix.codes.dtype == np.int8
            codes = matrix.codes.view(np.uint8) ^ np.uint8(128) if is_signed else matrix.codes
            zero_point = matrix.zero_point + (128 if is_signed else 0)
            kind = _UNSIGNED_MINIMUM if has_minimums else _UNSIGNED
        minimums = None if matrix.minimums is None else self._address(matrix.minimums)
        outputs, columns = matrix.shape
        address, row_bytes = self._rows(codes)
        scales = self._address(matrix.scales)
        table = None if matrix.table is None else self._address(matrix.table)
        return Matrix(kind, outputs, columns, matrix.group, zero_point, out, 0, row_bytes, address, scales, minimums, bias, table)

    def _rows(self, array: NDArray[Any]) -> tuple[int, int]:
        """Address and bytes from row to row of an array whose rows may lie apart, but not the columns of a row."""
        array = array if array.strides[1] == array.itemsize else np.ascontiguousarray(array)
        self._arrays.append(array)
        return array.ctypes.data, array.strides[0]

    def _address(self, array: NDArray[Any]) -> int:
        """Address of values without gaps."""
        array = np.ascontiguousarray(array)
        self._arrays.append(array)
        return array.ctypes.data
