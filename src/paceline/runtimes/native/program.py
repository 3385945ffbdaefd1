"""The blocks of `runtimes/decoder.py` as a list of operations over buffers, which kernels/program.c runs."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from paceline.models.config import ModelConfig
from paceline.models.layers import Activation, AttentionConfig
from paceline.runtimes.decoder import decoder
from paceline.runtimes.head import Ranking
from paceline.runtimes.native import library
from paceline.runtimes.native.library import Matrix, Operation
from paceline.runtimes.native.strips import STRIP_KINDS
from paceline.runtimes.native.weights import BF16_KIND, NativeWeights


class Code(IntEnum):
    """What an operation does, as in kernels/native.h."""

    LINEAR = 0
    NORM = 1
    ROPE = 2
    ATTENTION = 3
    GATED = 4
    ADD = 5
    SELECT = 6
    SOFT_CAP = 7
    CONCAT = 8
    SILU_RESIDUAL = 9
    RANK = 10


class Packing(IntEnum):
    """How a product takes its rows, as in kernels/native.h."""

    FLOATS = 0
    PAIRS = 1  # rounded to bfloat16
    BYTES = 2  # rounded to 8-bit codes in groups


@dataclass(frozen=True, slots=True)
class Value:
    """Rows of `width` floats, the result of one operation; `selected`: of the rows whose logits are wanted alone."""

    index: int
    width: int
    selected: bool = False


class NativeBlocks:
    """Records operations; every value has a number, and `record` lets values share memory."""

    def __init__(self, config: ModelConfig, weights: NativeWeights) -> None:
        self._config = config
        self._weights = weights
        self.values: list[Value] = []
        self.inputs: dict[str, Value] = {}  # values that the runtime fills
        self.operations: list[Operation] = []
        self.matrices: list[ctypes.Array[Matrix]] = []  # kept alive: operations hold their addresses
        self.rankings: list[tuple[library.Ranking, Any]] = []  # so are these
        self._shown: dict[int, int] = {}  # floats of values that are wider than what they hold in the end

    def result_width(self, value: Value) -> int:
        """Floats of a row that are the result; the rest is memory its operation works in."""
        return self._shown.get(value.index, value.width)

    def value(self, width: int, *, selected: bool = False) -> Value:
        self.values.append(Value(len(self.values), width, selected))
        return self.values[-1]

    def embedding(self, name: str) -> Value:
        """Value 0: the runtime fills it."""
        return self.input(name, self._config.hidden_size)

    def input(self, name: str, width: int) -> Value:
        if name not in self.inputs:
            self.inputs[name] = self.value(width)
        return self.inputs[name]

    def concat(self, *values: Value) -> Value:
        joined = values[0]
        for value in values[1:]:
            out = self.value(joined.width + value.width, selected=joined.selected)
            joined = self._add(Code.CONCAT, joined, value, out=out, count=joined.width)
        return joined

    def silu_residual(self, x: Value, y: Value) -> Value:
        return self._add(Code.SILU_RESIDUAL, x, y, out=self.value(x.width, selected=x.selected))

    def rank(self, logits: Value, ranking: Ranking) -> Value:
        columns = min(ranking.columns, logits.width)
        ids = None
        if ranking.target_ids is not None:
            ids = np.zeros(columns + library.LANES, np.int32)
            ids[:columns] = ranking.target_ids[:columns]
        wanted = library.Ranking(columns, ranking.count, None if ids is None else ids.ctypes.data)
        self.rankings.append((wanted, ids))
        out = self.value(library.kernels().paceline_ranking_floats(columns, ranking.count), selected=logits.selected)
        self._shown[out.index] = 2 + 2 * ranking.count
        number = len(self.rankings) - 1
        return self._add(Code.RANK, logits, out=out, width=logits.width, choice=number, data=ctypes.addressof(wanted))

    def linear(self, x: Value, *names: str) -> tuple[Value, ...]:
        outs = []
        alike: dict[tuple[int, ...], list[Matrix]] = {}
        for name in names:
            matrix = self._weights.matrix(name, len(self.values))
            outs.append(self.value(matrix.outputs, selected=x.selected))
            alike.setdefault(self._packing(matrix), []).append(matrix)
        for (packing, *_), matrices in alike.items():
            array = (Matrix * len(matrices))(*matrices)
            self.matrices.append(array)
            self._add(Code.LINEAR, x, out=self.values[array[0].out], count=len(matrices), choice=packing, data=ctypes.addressof(array))
        return tuple(outs)

    def rms_norm(self, x: Value, name: str) -> Value:
        return self._norm(x, name, 1)

    def head_norm(self, x: Value, name: str, num_heads: int) -> Value:
        return self._norm(x, name, num_heads)

    def rope(self, x: Value, num_heads: int, attention: AttentionConfig) -> Value:
        out = self.value(x.width)
        table = self._config.ropes.index(attention.rope)
        return self._add(Code.ROPE, x, out=out, count=num_heads, width=x.width // num_heads, choice=table)

    def attention(self, q: Value, k: Value, v: Value, attention: AttentionConfig, layer: int) -> Value:
        cap, window = attention.soft_cap or 0.0, attention.window or 0
        out = self.value(q.width)
        return self._add(Code.ATTENTION, q, k, v, out=out, count=window, choice=layer, number=attention.scale, limit=cap)

    def gated(self, gate: Value, up: Value, activation: Activation) -> Value:
        choice = (Activation.SILU, Activation.GELU_TANH).index(activation)
        return self._add(Code.GATED, gate, up, out=self.value(gate.width), choice=choice)

    def add(self, x: Value, y: Value) -> Value:
        return self._add(Code.ADD, x, y, out=self.value(x.width))

    def logits_rows(self, x: Value) -> Value:
        return self._add(Code.SELECT, x, out=self.value(x.width, selected=True))

    def lm_head(self, x: Value, name: str) -> Value:
        return self.linear(x, name)[0]

    def soft_cap(self, x: Value, cap: float) -> Value:
        return self._add(Code.SOFT_CAP, x, out=self.value(x.width, selected=x.selected), limit=cap)

    def _packing(self, matrix: Matrix) -> tuple[int, ...]:
        """How its rows are packed: what is the same for two matrices can serve both.

        Rows are rounded to bfloat16 where that is the type of computation, for products with bfloat16 weights alone, and to bytes for
        those with strips.
        """
        if matrix.kind in STRIP_KINDS:
            return Packing.BYTES, matrix.group, matrix.zero_point
        return (Packing.PAIRS if self._weights.rounds_to_bf16 and matrix.kind == BF16_KIND else Packing.FLOATS,)

    def _norm(self, x: Value, name: str, num_heads: int) -> Value:
        weight = self._weights.vector(name + ".weight", exact=self._config.norm_offset)
        out = self.value(x.width, selected=x.selected)
        width = x.width // num_heads
        return self._add(Code.NORM, x, out=out, count=num_heads, width=width, number=self._config.norm_eps, data=weight)

    def _add(
        self, code: Code, x: Value, y: Value | None = None, z: Value | None = None, *, out: Value, count: int = 0,
        width: int | None = None, choice: int = 0, number: float = 0.0, limit: float = 0.0, data: int | None = None,
    ) -> Value:  # fmt: skip
        numbers = [-1 if value is None else value.index for value in (x, y, z)]
        self.operations.append(
            Operation(code, *numbers, out.index, count, out.width if width is None else width, choice, out.selected, number, limit, data)
        )
        return out


@dataclass(frozen=True, slots=True)
class Recorded:
    """A network as operations.

    Attributes:
        operations: they and the matrices name buffers, not values.
        matrices: alive as long as the operations.
        widths: floats a row of each buffer.
        logits, hidden, collected: the buffers of the results.
        most_columns: of the widest product's input.
    """

    operations: list[Operation]
    matrices: list[ctypes.Array[Matrix]]
    widths: list[int]
    logits: int
    hidden: int
    collected: list[int]
    most_columns: int


def record(config: ModelConfig, weights: NativeWeights, collect_layers: Sequence[int]) -> Recorded:
    """The operations of a decoder, in order, with as few buffers as its values need."""
    blocks = NativeBlocks(config, weights)
    logits, hidden, collected = decoder(blocks, config, collect_layers)
    buffers, widths = share_memory(blocks, {logits.index, hidden.index, *(value.index for value in collected)})
    results = [buffers[value.index] for value in collected]
    most = most_columns(blocks)
    return Recorded(blocks.operations, blocks.matrices, widths, buffers[logits.index], buffers[hidden.index], results, most)


def most_columns(blocks: NativeBlocks) -> int:
    """Of the widest product's input."""
    return max([matrices[0].columns for matrices in blocks.matrices], default=0)


def share_memory(blocks: NativeBlocks, kept: set[int]) -> tuple[list[int], list[int]]:
    """Let operations and matrices name buffers, not values.

    Args:
        kept: the values that are results.

    Returns:
        the buffer of every value, and each buffer's width.
    """
    buffers, widths = _assign_buffers(blocks, kept | {value.index for value in blocks.inputs.values()})
    for operation in blocks.operations:
        for field in ("x", "y", "z", "out"):
            value = getattr(operation, field)
            setattr(operation, field, buffers[value] if value >= 0 else -1)
    for matrices in blocks.matrices:
        for matrix in matrices:
            matrix.out = buffers[matrix.out]
    return buffers, widths


def _assign_buffers(blocks: NativeBlocks, kept: set[int]) -> tuple[list[int], list[int]]:
    """One is free again once the last reader of its value has run."""
    outs = [[operation.out] for operation in blocks.operations]
    products = iter(blocks.matrices)
    for index, operation in enumerate(blocks.operations):
        if operation.code == Code.LINEAR:
            outs[index] = [matrix.out for matrix in next(products)]
    last_read = {}
    for index, operation in enumerate(blocks.operations):
        last_read.update({value: index for value in (operation.x, operation.y, operation.z) if value >= 0})
    buffers = [0] * len(blocks.values)
    widths = [value.width for value in blocks.inputs.values()]
    for index, value in enumerate(blocks.inputs.values()):
        buffers[value.index] = index
    free: dict[int, list[int]] = {}
    for index, operation in enumerate(blocks.operations):
        for out in outs[index]:
            width = blocks.values[out].width
            if not free.get(width):
                free.setdefault(width, []).append(len(widths))
                widths.append(width)
            buffers[out] = free[width].pop()
        for value in {operation.x, operation.y, operation.z} - {-1}:
            if last_read[value] == index and value not in kept:
                free.setdefault(blocks.values[value].width, []).append(buffers[value])
    return buffers, widths
