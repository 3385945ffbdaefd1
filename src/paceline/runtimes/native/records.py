"""The records that the kernels are given: those of kernels/native.h, field by field."""

from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p, sizeof
from enum import IntEnum
from typing import Any, ClassVar


class Code(IntEnum):
    """What an operation does."""

    LINEAR = 0
    NORM = 1
    ROPE = 2
    ATTENTION = 3
    GATED = 4
    ADD = 5
    GATHER = 6
    SOFT_CAP = 7
    CONCAT = 8
    SILU_RESIDUAL = 9
    RANK = 10
    SCALE = 11
    COLUMNS = 12
    ROUTE = 13
    EXPERTS = 14
    COMBINE = 15
    SIGMOID_GATE = 16
    CONVOLUTION = 17
    STATE = 18


class Packing(IntEnum):
    """How a product takes its rows."""

    FLOATS = 0
    BF16 = 1  # rounded to bfloat16
    BYTES = 2  # rounded to 8-bit codes in groups


class KVKind(IntEnum):
    """How numbers of keys and values are stored."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8 = 3


PHASES = 3
"""Of an operation, whose pieces count apart."""


class Rows(IntEnum):
    """Which rows an operation works on."""

    ALL = 0  # of the pass
    WANTED = 1  # those whose logits are wanted


class Matrix(Structure):
    """W [outputs, columns] as stored."""

    _fields_ = (
        ("kind", c_int32), ("outputs", c_int32), ("columns", c_int32), ("group", c_int32), ("zero_point", c_int32), ("out", c_int32),
        ("block", c_int32), ("row_bytes", c_int64), ("codes", c_void_p), ("scales", c_void_p), ("minimums", c_void_p),
        ("bias", c_void_p), ("table", c_void_p),
    )  # fmt: skip


class SuperBlocksRecord(Structure):
    """What panels of K-quants are filled from."""

    _fields_ = (
        ("kind", c_int32), ("outputs", c_int32), ("columns", c_int32), ("block", c_int32), ("zero_point", c_int32),
        ("row_bytes", c_int64), ("codes", c_void_p), ("scales", c_void_p), ("minimums", c_void_p), ("factors", c_void_p),
        ("minimum_factors", c_void_p),
    )  # fmt: skip


class BlocksRecord(Structure):
    """Rows of GGUF's blocks that become panels."""

    _fields_ = (
        ("type", c_int32), ("kind", c_int32), ("outputs", c_int32), ("columns", c_int32), ("zero_point", c_int32), ("block", c_int32),
        ("flipped", c_int32), ("row_bytes", c_int64), ("rows", c_void_p), ("order", c_void_p), ("places", c_void_p),
    )  # fmt: skip


class Operation(Structure):
    """What every operation begins with.

    Attributes:
        CODE: of the kind of operation.
        INPUTS: the fields that name a value; they are numbers of values while a network is recorded, then of buffers.
        OUTS: those that name what is written; what is only worked in is among both.
    """

    CODE: ClassVar[Code]
    INPUTS: ClassVar[tuple[str, ...]]
    OUTS: ClassVar[tuple[str, ...]] = ("out",)
    _fields_: ClassVar[tuple[tuple[str, Any], ...]] = (("code", c_int32), ("out", c_int32), ("rows", c_int32))

    def __init__(self, **fields: object) -> None:
        """Set what is its own; the rest is set when it is recorded.

        Raises:
            TypeError: a field is missing, or there is none of the name.
        """
        names = {name for name, _ in self._fields_}
        if names != fields.keys():
            raise TypeError(f"{type(self).__name__} has the fields {sorted(names)}, not {sorted(fields)}")
        super().__init__(code=self.CODE, **fields)


class LinearOperation(Operation):
    """Products with matrices of the same columns, whose rows are packed alike; `site`: which of those that adapters add to, -1 = none.

    `block_max`: gets the largest of each BLOCK_COLUMNS results of a row, where there is one matrix; -1 = nothing does.
    """

    CODE, INPUTS, OUTS = Code.LINEAR, ("x",), ("out", "block_max")
    _fields_ = (
        ("x", c_int32), ("num_matrices", c_int32), ("packing", c_int32), ("site", c_int32), ("block_max", c_int32),
        ("matrices", POINTER(Matrix)),
    )  # fmt: skip


class NormOperation(Operation):
    """RMS norm of every head; one head is the whole row. Without a weight nothing is multiplied behind it."""

    CODE, INPUTS = Code.NORM, ("x",)
    _fields_ = (
        ("x", c_int32), ("heads", c_int32), ("head_size", c_int32), ("epsilon", c_float), ("weighted_heads", c_int32), ("weight", c_void_p),
    )  # fmt: skip


class RopeOperation(Operation):
    """Heads of which `rotary_half` pairs are turned by the angles of a table."""

    CODE, INPUTS = Code.ROPE, ("x",)
    _fields_ = (("x", c_int32), ("heads", c_int32), ("head_size", c_int32), ("rotary_half", c_int32), ("table", c_int32))


class AttentionOperation(Operation):
    """Attention over a layer of the cache; window and soft cap 0 = none; `tables`: which of a pass's block tables name its blocks.

    k and v -1: nothing is written, another operation has. q -1: keys and values are only written.
    """

    CODE, INPUTS = Code.ATTENTION, ("q", "k", "v")
    _fields_ = (
        ("q", c_int32), ("k", c_int32), ("v", c_int32), ("heads", c_int32), ("kv_heads", c_int32), ("head_size", c_int32),
        ("layer", c_int32), ("tables", c_int32), ("window", c_int32), ("is_causal", c_int32),
        ("scale", c_float), ("soft_cap", c_float), ("sinks", c_void_p),
    )  # fmt: skip


class GatedOperation(Operation):
    """activation(x) * up; activation 0 = SiLU, 1 = GELU by tanh, 2 = clamped SwiGLU (slope, limit), 3 = sigmoid, 4 = none, 5 = ReLU."""

    CODE, INPUTS = Code.GATED, ("x", "up")
    _fields_ = (
        ("x", c_int32), ("up", c_int32), ("width", c_int32), ("activation", c_int32), ("slope", c_float), ("limit", c_float),
    )  # fmt: skip


class AddOperation(Operation):
    """x + y."""

    CODE, INPUTS = Code.ADD, ("x", "y")
    _fields_ = (("x", c_int32), ("y", c_int32), ("width", c_int32))


class SiluResidualOperation(Operation):
    """x + silu(y)."""

    CODE, INPUTS = Code.SILU_RESIDUAL, ("x", "y")
    _fields_ = (("x", c_int32), ("y", c_int32), ("width", c_int32))


class GatherOperation(Operation):
    """The wanted rows of x one behind another."""

    CODE, INPUTS = Code.GATHER, ("x",)
    _fields_ = (("x", c_int32), ("width", c_int32))


class SoftCapOperation(Operation):
    """cap * tanh(x / cap)."""

    CODE, INPUTS = Code.SOFT_CAP, ("x",)
    _fields_ = (("x", c_int32), ("width", c_int32), ("cap", c_float))


class ScaleOperation(Operation):
    """x * factor."""

    CODE, INPUTS = Code.SCALE, ("x",)
    _fields_ = (("x", c_int32), ("width", c_int32), ("factor", c_float))


class ConcatOperation(Operation):
    """x and y side by side."""

    CODE, INPUTS = Code.CONCAT, ("x", "y")
    _fields_ = (("x", c_int32), ("y", c_int32), ("x_width", c_int32), ("y_width", c_int32))


class RouteOperation(Operation):
    """The `chosen` experts of every row by the scores of its logits x; scoring 0 = softmax, 1 = sigmoid. See kernels/experts.c."""

    CODE, INPUTS = Code.ROUTE, ("x",)
    _fields_ = (
        ("x", c_int32), ("experts", c_int32), ("chosen", c_int32), ("scoring", c_int32), ("groups", c_int32), ("chosen_groups", c_int32),
        ("is_normalized", c_int32), ("least", c_float), ("factor", c_float), ("correction", c_void_p), ("scales", c_void_p),
    )  # fmt: skip


class ExpertsOperation(Operation):
    """Products of rows with matrices of the experts they have chosen, packed alike; results have a row for each pair of the two."""

    CODE, INPUTS = Code.EXPERTS, ("x", "routes")
    _fields_ = (
        ("x", c_int32), ("routes", c_int32), ("chosen", c_int32), ("experts", c_int32), ("num_matrices", c_int32), ("packing", c_int32),
        ("of_pairs", c_int32), ("site", c_int32), ("matrices", POINTER(Matrix)),
    )  # fmt: skip


class CombineOperation(Operation):
    """Of every row the sum of its pairs' rows of x times their weights."""

    CODE, INPUTS = Code.COMBINE, ("x", "routes")
    _fields_ = (("x", c_int32), ("routes", c_int32), ("chosen", c_int32), ("width", c_int32))


class SigmoidGateOperation(Operation):
    """x * sigmoid(y), y one number a row."""

    CODE, INPUTS = Code.SIGMOID_GATE, ("x", "y")
    _fields_ = (("x", c_int32), ("y", c_int32), ("width", c_int32))


class ConvolutionOperation(Operation):
    """A causal convolution of each channel over the rows of a text; `conv_at`, `record_at`: floats of states and records before it."""

    CODE, INPUTS = Code.CONVOLUTION, ("x",)
    _fields_ = (
        ("x", c_int32), ("channels", c_int32), ("kernel_size", c_int32), ("is_activated", c_int32), ("conv_at", c_int32),
        ("record_at", c_int32), ("weight", c_void_p), ("bias", c_void_p),
    )  # fmt: skip


class StateOperation(Operation):
    """Recurrent matrices: a gated delta rule, or Mamba-2. See kernels/state_blocks.c."""

    CODE, INPUTS, OUTS = Code.STATE, ("x", "a", "b", "work"), ("out", "work")
    _fields_ = (
        ("x", c_int32), ("a", c_int32), ("b", c_int32), ("work", c_int32), ("channels", c_int32), ("heads", c_int32),
        ("key_heads", c_int32), ("rows_of_state", c_int32), ("columns", c_int32), ("block", c_int32), ("is_delta", c_int32),
        ("matrices_at", c_int32), ("keys_at", c_int32), ("work_floats", c_int32), ("least", c_float), ("most", c_float),
        ("decay", c_void_p), ("bias", c_void_p), ("skip", c_void_p),
    )  # fmt: skip


class AdapterProduct(Structure):
    """What an adapter adds to one product: `up` of the `rank` numbers from `first` on, a bias; or a matrix in its place."""

    _fields_ = (
        ("kind", c_int32), ("first", c_int32), ("rank", c_int32), ("unused", c_int32), ("up", c_void_p), ("bias", c_void_p),
        ("whole", POINTER(Matrix)),
    )  # fmt: skip


class AdapterSite(Structure):
    """What an adapter does to the products of one operation; `columns`: of each rank, of X-LoRA."""

    _fields_ = (("down", POINTER(Matrix)), ("products", POINTER(AdapterProduct)), ("columns", c_void_p))


class PassAdapter(Structure):
    """An adapter with rows in a pass: of all of them, and of those whose logits are wanted; X-LoRA's with scalings of all."""

    _fields_ = (
        ("sites", POINTER(AdapterSite)), ("first", c_int32 * 2), ("count", c_int32 * 2), ("scalings", c_void_p), ("num_scalings", c_int64),
    )  # fmt: skip


class ColumnsOperation(Operation):
    """Columns [begin, begin + width) of x."""

    CODE, INPUTS = Code.COLUMNS, ("x",)
    _fields_ = (("x", c_int32), ("x_width", c_int32), ("begin", c_int32), ("width", c_int32))


class RankOperation(Operation):
    """What guessing needs of rows of logits, see `runtimes.ranking.Ranking`; `number`: which ranking of the network it is."""

    CODE, INPUTS = Code.RANK, ("x",)
    _fields_ = (
        ("x", c_int32), ("width", c_int32), ("number", c_int32), ("columns", c_int32), ("count", c_int32), ("target_ids", POINTER(c_int32)),
    )  # fmt: skip


class Range(Structure):
    """Rows of a pass that continue one sequence; the offsets are those of its block table and its mask, -1 = none."""

    _fields_ = (
        ("start", c_int32), ("rows", c_int32), ("cached_len", c_int32), ("table", c_int32), ("mask", c_int32), ("first_slot", c_int32),
    )  # fmt: skip


class Draw(Structure):
    """How the token of a row is drawn: the key of its noise, and what logits are divided by; 0 = it is not drawn."""

    _fields_ = (("key", c_uint64), ("temperature", c_float), ("unused", c_int32))


class SampleOptions(Structure):
    """The sampling parameters of a request; temperature 0 is greedy."""

    _fields_ = (
        ("top_p", c_double), ("min_p", c_double), ("temperature", c_float), ("top_k", c_int32), ("columns", c_int32), ("unused", c_int32),
    )  # fmt: skip


class SamplePath(Structure):
    """A path to sample, see kernels/native.h."""

    _fields_ = (
        ("logits", c_void_p), ("block_max", c_void_p), ("stride", c_int64), ("block_max_stride", c_int64), ("options", c_void_p),
        ("tree", c_void_p), ("seed", c_uint64), ("sample_index", c_uint64), ("position", c_uint64), ("found", c_void_p),
        ("num_nodes", c_int32), ("num_tokens", c_int32),
    )  # fmt: skip


GRID = 8
"""Rows that states take in at a time: a state is that behind a multiple of so many rows of its text."""


class Step(Structure):
    """What is done with a state, see kernels/native.h."""

    _fields_ = (
        ("from", c_int32), ("to", c_int32), ("path", c_int32), ("first_row", c_int32), ("num_rows", c_int32), ("first_save", c_int32),
        ("num_saves", c_int32),
    )  # fmt: skip


class Save(Structure):
    """Where the state behind the first `count` pending and known rows is written."""

    _fields_ = (("state", c_void_p), ("count", c_int64))


class StateRange(Structure):
    """What the rows of a range do to the state of their sequence; what is numbered lies in arrays of the pass."""

    _fields_ = (
        ("state", c_void_p), ("records", c_void_p), ("pending", c_void_p), ("rows", c_void_p), ("parents", c_void_p), ("order", c_void_p),
        ("ancestors", c_void_p), ("paths", c_void_p), ("steps", c_void_p), ("saves", c_void_p), ("has_run", c_void_p),
        ("record_floats", c_int64), ("num_pending", c_int32), ("num_folded", c_int32), ("num_steps", c_int32), ("num_saves", c_int32),
    )  # fmt: skip


class Pass(Structure):
    """The rows of one pass. Each of several memories has a table for every range, `blocks_of_tables` behind that of the one before."""

    _fields_ = (
        ("rows", c_int32), ("selected_rows", c_int32), ("num_ranges", c_int32), ("blocks_of_tables", c_int32),
        ("ranges", c_void_p), ("range_of_row", c_void_p), ("block_tables", c_void_p), ("masks", c_void_p), ("selected", c_void_p),
        ("cos", c_void_p), ("sin", c_void_p), ("draws", c_void_p), ("states", c_void_p),
        ("adapters", c_void_p), ("adapter_rows", c_void_p), ("row_order", c_void_p), ("adapter_of_row", c_void_p), ("low_rank", c_void_p),
        ("num_adapters", c_int32), ("low_rank_floats", c_int32),
    )  # fmt: skip


class Program(Structure):
    """A network with its buffers and its cache."""

    _fields_ = (
        ("operations", c_void_p), ("num_operations", c_int32), ("num_threads", c_int32),
        ("buffers", c_void_p), ("packed", c_void_p), ("packed_rows", c_void_p), ("scratch", c_void_p), ("planes", c_void_p),
        ("parts", c_void_p), ("parts_floats", c_int64), ("kv_kind", c_int32), ("most_columns", c_int32), ("tickets", c_void_p),
        ("taken", c_void_p), ("taken_a_thread", c_int64), ("state_scratch", c_void_p), ("state_floats", c_int64),
    )  # fmt: skip


VERSION = 18
"""KERNELS_VERSION of kernels/native.h."""

_RECORDS: tuple[type[Structure], ...] = (
    Matrix, SuperBlocksRecord, BlocksRecord, LinearOperation, NormOperation, RopeOperation, AttentionOperation, GatedOperation,
    AddOperation, SiluResidualOperation, GatherOperation, SoftCapOperation, ConcatOperation, RankOperation, ScaleOperation,
    ColumnsOperation, RouteOperation, ExpertsOperation, CombineOperation, SigmoidGateOperation, ConvolutionOperation,
    StateOperation, AdapterProduct, AdapterSite, PassAdapter, Range, Draw, SampleOptions, SamplePath, Step, Save, StateRange, Pass, Program,
)  # fmt: skip
LAYOUT = (VERSION, *map(sizeof, _RECORDS), -1)
"""What `paceline_layout` of the kernels answers for 0, 1, …"""
