"""Assign buffers to the values of a recorded network, shared if not needed at the same time, and estimate the memory of a pass."""

from collections.abc import Collection, Sequence

from paceline.models.config import ModelConfig, WeightType
from paceline.models.weights import Weights
from paceline.runtimes.decoder import decoder
from paceline.runtimes.native.program import NativeOps, matrices_of
from paceline.runtimes.native.records import Matrix, RowSelection
from paceline.runtimes.native.weights import NativeWeights

_FLOAT_BYTES = 4


def assign_buffers(ops: NativeOps, results: set[int]) -> tuple[list[int], list[int]]:
    """Replace the value numbers in the recorded operations and matrices by buffer numbers.

    Args:
        results: numbers of the values that are needed after the pass.

    Returns:
        The buffer of each value, and the width of each buffer.
    """
    buffers, widths = _share_buffers(ops, results | {value.index for value in ops.inputs.values()})
    for operation in ops.operations:
        for field in dict.fromkeys((*operation.INPUTS, *operation.OUTPUTS)):
            if (value := getattr(operation, field)) >= 0:
                setattr(operation, field, buffers[value])
        for matrix in matrices_of(operation):
            matrix.out = buffers[matrix.out]
    return buffers, widths


def _share_buffers(ops: NativeOps, kept: set[int]) -> tuple[list[int], list[int]]:
    """Return the buffer of each value and the width of each buffer. A buffer is reused after the last read of its value, unless kept."""
    reads = [{getattr(operation, field) for field in operation.INPUTS} - {-1} for operation in ops.operations]
    last_read = {value: index for index, values in enumerate(reads) for value in values}
    buffers = [0] * len(ops.values)
    widths = [value.width for value in ops.inputs.values()]
    for index, value in enumerate(ops.inputs.values()):
        buffers[value.index] = index
    free: dict[int, list[int]] = {}
    for index, operation in enumerate(ops.operations):
        outs = [matrix.out for matrix in matrices_of(operation)] or [operation.out]
        outs += [out for field in operation.OUTPUTS if field != "out" and (out := getattr(operation, field)) >= 0]
        for out in dict.fromkeys(outs):
            width = ops.values[out].width
            if not free.get(width):
                free.setdefault(width, []).append(len(widths))
                widths.append(width)
            buffers[out] = free[width].pop()
        for read in reads[index]:
            if last_read[read] == index and read not in kept:
                free.setdefault(ops.values[read].width, []).append(buffers[read])
    return buffers, widths


def pass_bytes(
    config: ModelConfig, weights: Weights, quantised: Collection[str], *, num_rows: int, num_logits_rows: int, num_positions: int
) -> int:
    """Return the bytes that a pass needs for buffers, packed rows and rotary tables. No weight is loaded.

    Args:
        weights: the network's weights; only their names, shapes and types are read.
        quantised: names of weights that are stored as floats and will be quantised.
        num_rows: number of rows of the pass.
        num_logits_rows: number of rows whose logits are computed.
        num_positions: maximum length of a sequence.
    """
    ops = NativeOps(config, _WeightShapes(weights, quantised))
    results = decoder(config)(ops)
    buffers, widths = assign_buffers(ops, {value.index for value in results.values()})
    all_row_buffers = {buffers[value.index] for value in ops.values if value.rows is RowSelection.ALL}
    floats = sum(width * (num_rows if buffer in all_row_buffers else num_logits_rows) for buffer, width in enumerate(widths))
    packed = max((matrix.row_bytes for operation in ops.operations for matrix in matrices_of(operation)), default=0)
    angles = sum(rope.rotary_size(head_size) for rope, head_size in config.rope_variants)
    return _FLOAT_BYTES * (floats + angles * num_positions) + num_rows * packed


class _WeightShapes(NativeWeights):
    """Weights without data. `Matrix.row_bytes` is set to the bytes of an input row that is packed for the matrix."""

    def __init__(self, weights: Weights, quantised: Collection[str]) -> None:
        super().__init__(weights, WeightType.F32)
        self._infos = {name: weights.info(name) for name in weights}
        self._quantised = quantised

    def has_tensor(self, name: str) -> bool:
        return name in self._infos

    def vector(self, name: str, *, exact: bool = False) -> int:
        return 0

    def transposed(self, name: str) -> int:
        return 0

    def scalar(self, name: str) -> float:
        return 1.0

    def matrix(self, name: str, out: int) -> Matrix:
        info = self._infos[name + ".weight"]
        outputs, columns = info.shape
        is_grouped = info.bits is not None or name + ".weight" in self._quantised
        row_bytes = columns * 3 // 2 if is_grouped else columns * (2 if info.weight_type is WeightType.BF16 else _FLOAT_BYTES)
        return Matrix(0, outputs, columns, 0, 0, out, 0, row_bytes)

    def matrices(self, names: Sequence[str], out: int) -> list[Matrix]:
        return [self.matrix(name, out) for name in names]
