"""What a pass works in, known from a network's composition and the shapes of its weights: nothing is loaded."""

from collections.abc import Collection, Sequence

from paceline.models.config import ModelConfig, WeightType
from paceline.models.weights import Weights
from paceline.runtimes.decoder import decoder
from paceline.runtimes.native.program import NativeBlocks, matrices_of, share_memory
from paceline.runtimes.native.records import Matrix, Rows
from paceline.runtimes.native.weights import NativeWeights

_FLOAT_BYTES = 4


def pass_bytes(
    config: ModelConfig, weights: Weights, quantised: Collection[str], *, num_rows: int, num_wanted: int, num_positions: int
) -> int:
    """Bytes of the buffers of a pass, of its rows packed for products, and of rotary angles.

    Args:
        weights: asked for names, shapes and types alone.
        quantised: names of those that will be in groups while they are not yet.
        num_rows: of the pass.
        num_wanted: of them those whose logits are made.
        num_positions: of the longest text.
    """
    blocks = NativeBlocks(config, _Shapes(weights, quantised))
    results = decoder(config)(blocks)
    buffers, widths = share_memory(blocks, {value.index for value in results.values()})
    whole = {buffers[value.index] for value in blocks.values if value.rows is Rows.ALL}
    floats = sum(width * (num_rows if number in whole else num_wanted) for number, width in enumerate(widths))
    packed = max((matrix.row_bytes for operation in blocks.operations for matrix in matrices_of(operation)), default=0)
    angles = sum(rope.rotary_size(head_size) for rope, head_size in config.rotations)
    return _FLOAT_BYTES * (floats + angles * num_positions) + num_rows * packed


class _Shapes(NativeWeights):
    """Shapes for weights that are not there; `row_bytes` of a matrix are those of a row that is packed for it."""

    def __init__(self, weights: Weights, quantised: Collection[str]) -> None:
        super().__init__(weights, WeightType.F32)
        self._info = {name: weights.info(name) for name in weights}
        self._quantised = quantised

    def has(self, name: str) -> bool:
        return name in self._info

    def vector(self, name: str, *, exact: bool = False) -> int:
        return 0

    def columns(self, name: str) -> int:
        return 0

    def number(self, name: str) -> float:
        return 1.0

    def matrix(self, name: str, out: int) -> Matrix:
        facts = self._info[name + ".weight"]
        outputs, columns = facts.shape
        is_grouped = facts.bits is not None or name + ".weight" in self._quantised
        row_bytes = columns * 3 // 2 if is_grouped else columns * (2 if facts.weight_type is WeightType.BF16 else _FLOAT_BYTES)
        return Matrix(0, outputs, columns, 0, 0, out, 0, row_bytes)

    def matrices(self, names: Sequence[str], out: int) -> list[Matrix]:
        return [self.matrix(name, out) for name in names]
