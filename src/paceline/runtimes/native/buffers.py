"""Assign buffers to the values of a recorded network, reusing buffers of values that are not needed any more; estimate memory."""

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


def _share_buffers(ops: NativeOps, kept_values: set[int]) -> tuple[list[int], list[int]]:
    """Return the buffer of each value and the width of each buffer. Buffers are reused, except those of `kept_values`."""
    reads = [{getattr(operation, field) for field in operation.INPUTS} - {-1} for operation in ops.operations]
    last_read = {value: index for index, values in enumerate(reads) for value in values}
    buffers = [0] * len(ops.values)
    widths = [value.width for value in ops.inputs.values()]
    for index, value in enumerate(ops.inputs.values()):
        buffers[value.index] = index
    free_by_width: dict[int, list[int]] = {}
    for index, operation in enumerate(ops.operations):
        outs = [matrix.out for matrix in matrices_of(operation)] or [operation.out]
        outs += [out for field in operation.OUTPUTS if field != "out" and (out := getattr(operation, field)) >= 0]
        for out in dict.fromkeys(outs):
            width = ops.values[out].width
            if not free_by_width.get(width):
                free_by_width.setdefault(width, []).append(len(widths))
                widths.append(width)
            buffers[out] = free_by_width[width].pop()
        for read in reads[index]:
            if last_read[read] == index and read not in kept_values:
                free_by_width.setdefault(ops.values[read].width, []).append(buffers[read])
    return buffers, widths


def estimate_pass_bytes(
    config: ModelConfig, weights: Weights, quantized_names: Collection[str], *, num_rows: int, num_logits_rows: int, num_positions: int
) -> int:
    """Return the bytes that a pass needs for buffers, packed rows and rotary tables, without loading weights.

    Args:
        weights: the network's weights; only their names, shapes and types are read.
        quantized_names: names of weights that are stored as floats and will be quantised.
        num_rows: number of rows of the pass.
        num_logits_rows: number of rows whose logits are computed.
        num_positions: maximum length of a sequence.
    """
    ops = NativeOps(config, _WeightShapes(weights, quantized_names))
    results = decoder(config)(ops)
    buffers, widths = assign_buffers(ops, {value.index for value in results.values()})
    all_row_buffers = {buffers[value.index] for value in ops.values if value.rows is RowSelection.ALL}
    floats = sum(width * (num_rows if buffer in all_row_buffers else num_logits_rows) for buffer, width in enumerate(widths))
    packed = max((matrix.row_bytes for operation in ops.operations for matrix in matrices_of(operation)), default=0)
    angles = sum(rope.rotary_size(head_size) for rope, head_size in config.rope_variants)
    return _FLOAT_BYTES * (floats + angles * num_positions) + num_rows * packed


class _WeightShapes(NativeWeights):
    """Weights without data, to record a network. Here `Matrix.row_bytes` is the size of a packed input row, not of a row of the matrix."""

    def __init__(self, weights: Weights, quantized_names: Collection[str]) -> None:
        super().__init__(weights, WeightType.F32)
        self._infos = {name: weights.tensor_info(name) for name in weights}
        self._quantized_names = quantized_names

    def has_tensor(self, name: str) -> bool:
        return name in self._infos

    def vector_address(self, name: str, *, exact: bool = False) -> int:
        return 0

    def transposed_address(self, name: str) -> int:
        return 0

    def scalar(self, name: str) -> float:
        return 1.0

    def matrix_record(self, name: str, out: int) -> Matrix:
        info = self._infos[name + ".weight"]
        outputs, columns = info.shape
        is_grouped = info.bits is not None or name + ".weight" in self._quantized_names
        row_bytes = columns * 3 // 2 if is_grouped else columns * (2 if info.weight_type is WeightType.BF16 else _FLOAT_BYTES)
        return Matrix(0, outputs, columns, 0, 0, out, 0, row_bytes)

    def matrix_records(self, names: Sequence[str], out: int) -> list[Matrix]:
        return [self.matrix_record(name, out) for name in names]
