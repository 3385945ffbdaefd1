"""The C structures of kernels/native.h, field by field, for ctypes."""

from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p, sizeof
from enum import IntEnum
from typing import Any, ClassVar

from paceline.runtimes.ranking import DRAW

MatrixKind = IntEnum(
    "MatrixKind",
    "F32 F16 BF16 U8 U8_MINIMUM "
    "PANELS_8_BITS PANELS_8_BITS_MINIMUM PANELS_4_BITS PANELS_4_BITS_MINIMUM PANELS_4_BITS_TABLE "
    "PANELS_4_BITS_FLOAT16 PANELS_4_BITS_TABLE_FLOAT16 "
    "PANELS_Q4_K PANELS_Q5_K PANELS_Q6_K PANELS_Q2_K PANELS_Q3_K PANELS_IQ4_XS",
    start=0,
)
"""How a matrix is stored: row by row as floats or 8-bit codes, or in panels (kernels/panels.h)."""

PANEL_KINDS = frozenset(kind for kind in MatrixKind if kind.name.startswith("PANELS"))


Code = IntEnum(
    "Code",
    "LINEAR NORM ROPE ATTENTION GATED ADD GATHER SOFT_CAP CONCAT SILU_RESIDUAL RANK SCALE COLUMNS ROUTE EXPERTS COMBINE SIGMOID_GATE "
    "CONVOLUTION STATE",
    start=0,
)
"""The kind of an operation."""


class Packing(IntEnum):
    """How the input rows of a product are stored for the kernels."""

    FLOATS = 0
    BF16 = 1
    BYTES = 2  # 8-bit codes with one scale per group


class KVKind(IntEnum):
    """Data type of cached keys and values in the kernels."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8 = 3


PHASES = 3
"""Phases of an operation; each counts its pieces of work separately."""

CHECKPOINT_INTERVAL = 8
"""Recurrent states are stored after a multiple of so many rows of their text."""


class Rows(IntEnum):
    """Which rows of a pass an operation works on."""

    ALL = 0
    LOGITS = 1  # only the rows whose logits are computed


_TYPES: dict[str, Any] = {
    "int32": c_int32, "int64": c_int64, "uint64": c_uint64, "float": c_float, "double": c_double, "pointer": c_void_p,
    "int32*": POINTER(c_int32), "int32[2]": c_int32 * 2,
}  # fmt: skip


def _fields(declarations: str) -> tuple[tuple[str, Any], ...]:
    """Return ctypes fields from declarations as in C, `type name name; type name`."""
    return tuple((name, _TYPES[kind]) for kind, *names in map(str.split, declarations.split(";")) for name in names)


class Matrix(Structure):
    """A weight matrix [outputs, columns]."""

    _fields_ = _fields("int32 kind outputs columns group zero_point out block; int64 row_bytes; pointer codes scales minimums bias table")


_TYPES["Matrix*"] = POINTER(Matrix)


class SuperBlocksRecord(Structure):
    """A K-quant matrix as in models/grouped.py, which is converted to panels."""

    _fields_ = _fields(
        "int32 kind outputs columns block zero_point; int64 row_bytes; pointer codes scales minimums factors minimum_factors"
    )


class BlocksRecord(Structure):
    """Rows of GGUF blocks, which are converted to panels."""

    _fields_ = _fields("int32 type kind outputs columns zero_point block flipped; int64 row_bytes; pointer rows order places")


class Operation(Structure):
    """The common head of all operations.

    Attributes:
        CODE: the kind of operation.
        INPUTS: fields that name a value that is read. They hold value numbers while a network is recorded, then buffer numbers.
        OUTS: fields that name a value that is written; scratch values are in both.
    """

    CODE: ClassVar[Code]
    INPUTS: ClassVar[tuple[str, ...]]
    OUTS: ClassVar[tuple[str, ...]] = ("out",)
    _fields_: ClassVar[tuple[tuple[str, Any], ...]] = _fields("int32 code out rows")

    def __init__(self, **fields: object) -> None:
        """Set the fields of the subclass; `out` and `rows` are set when it is recorded.

        Raises:
            TypeError: a field is missing or unknown.
        """
        names = {name for name, _ in self._fields_}
        if names != fields.keys():
            raise TypeError(f"{type(self).__name__} has the fields {sorted(names)}, not {sorted(fields)}")
        super().__init__(code=self.CODE, **fields)


class LinearOperation(Operation):
    """Products with matrices of the same columns and packing.

    `site`: its index among the operations that adapters can change; -1 = none does. `block_max`: buffer for the maximum of each
    BLOCK_COLUMNS results of a row, if there is one matrix; -1 = not kept.
    """

    CODE, INPUTS, OUTS = Code.LINEAR, ("x",), ("out", "block_max")
    _fields_ = _fields("int32 x num_matrices packing site block_max; Matrix* matrices")


class NormOperation(Operation):
    """RMS norm of every head; one head is the whole row. `weight` may be null."""

    CODE, INPUTS = Code.NORM, ("x",)
    _fields_ = _fields("int32 x heads head_size; float epsilon; int32 weighted_heads; pointer weight")


class RopeOperation(Operation):
    """Rotate `rotary_half` pairs of each head by the angles of a table."""

    CODE, INPUTS = Code.ROPE, ("x",)
    _fields_ = _fields("int32 x heads head_size rotary_half table")


class AttentionOperation(Operation):
    """Attention over a layer of the cache. Window and soft cap 0 = none; `tables`: block table set of the pass; k = v = -1: read only.

    q = -1: keys and values are only written. `is_causal`: masks of ranges are ignored.
    """

    CODE, INPUTS = Code.ATTENTION, ("q", "k", "v")
    _fields_ = _fields("int32 q k v heads kv_heads head_size layer tables window is_causal; float scale soft_cap; pointer sinks")


class GatedOperation(Operation):
    """activation(x) * up; activation 0 = SiLU, 1 = GELU by tanh, 2 = clamped SwiGLU (slope, limit), 3 = sigmoid, 4 = none, 5 = ReLU."""

    CODE, INPUTS = Code.GATED, ("x", "up")
    _fields_ = _fields("int32 x up width activation; float slope limit")


class AddOperation(Operation):
    """x + y."""

    CODE, INPUTS = Code.ADD, ("x", "y")
    _fields_ = _fields("int32 x y width")


class SiluResidualOperation(Operation):
    """x + silu(y)."""

    CODE, INPUTS = Code.SILU_RESIDUAL, ("x", "y")
    _fields_ = _fields("int32 x y width")


class GatherOperation(Operation):
    """Copy the rows whose logits are computed."""

    CODE, INPUTS = Code.GATHER, ("x",)
    _fields_ = _fields("int32 x width")


class SoftCapOperation(Operation):
    """cap * tanh(x / cap)."""

    CODE, INPUTS = Code.SOFT_CAP, ("x",)
    _fields_ = _fields("int32 x width; float cap")


class ScaleOperation(Operation):
    """x * factor."""

    CODE, INPUTS = Code.SCALE, ("x",)
    _fields_ = _fields("int32 x width; float factor")


class ConcatOperation(Operation):
    """[x, y] along columns."""

    CODE, INPUTS = Code.CONCAT, ("x", "y")
    _fields_ = _fields("int32 x y x_width y_width")


class RouteOperation(Operation):
    """Choose experts by the router's logits x; scoring 0 = softmax, 1 = sigmoid. See kernels/experts.c."""

    CODE, INPUTS = Code.ROUTE, ("x",)
    _fields_ = _fields("int32 x experts chosen scoring groups chosen_groups is_normalized; float epsilon factor; pointer correction scales")


class ExpertsOperation(Operation):
    """Products of rows with matrices of their experts; the results have a row for each pair of a row and an expert."""

    CODE, INPUTS = Code.EXPERTS, ("x", "routes")
    _fields_ = _fields("int32 x routes chosen experts num_matrices packing of_pairs site; Matrix* matrices")


class CombineOperation(Operation):
    """The weighted sum of each row's experts."""

    CODE, INPUTS = Code.COMBINE, ("x", "routes")
    _fields_ = _fields("int32 x routes chosen width")


class SigmoidGateOperation(Operation):
    """x * sigmoid(y), y one number a row."""

    CODE, INPUTS = Code.SIGMOID_GATE, ("x", "y")
    _fields_ = _fields("int32 x y width")


class ConvolutionOperation(Operation):
    """A causal convolution of each channel over time; `conv_at`, `record_at`: the layer's offsets in a state and in a record."""

    CODE, INPUTS = Code.CONVOLUTION, ("x",)
    _fields_ = _fields("int32 x channels kernel_size is_activated conv_at record_at; pointer weight bias")


class StateOperation(Operation):
    """Recurrent matrices: gated delta rule or Mamba-2. See kernels/state_blocks.c."""

    CODE, INPUTS, OUTS = Code.STATE, ("x", "a", "b", "work"), ("out", "work")
    _fields_ = _fields(
        "int32 x a b work channels heads key_heads rows_of_state columns block is_delta matrices_at keys_at work_floats;"
        "float min_step max_step; pointer decay bias skip"
    )


class AdapterProduct(Structure):
    """What an adapter adds to one product: `up` times `rank` numbers from `first` on, a bias, or a replacement of the matrix."""

    _fields_ = _fields("int32 kind first rank unused; pointer up bias; Matrix* replacement")


_TYPES["AdapterProduct*"] = POINTER(AdapterProduct)


class AdapterSite(Structure):
    """What an adapter does to the products of one operation; `scaling_columns`: which of a row's scalings multiplies each rank."""

    _fields_ = _fields("Matrix* down; AdapterProduct* products; pointer scaling_columns")


_TYPES["AdapterSite*"] = POINTER(AdapterSite)


class PassAdapter(Structure):
    """An adapter of some rows of a pass: its rows among all, and among those whose logits are computed, and their scalings if any."""

    _fields_ = _fields("AdapterSite* sites; int32[2] first count; pointer scalings; int64 num_scalings")


class ColumnsOperation(Operation):
    """Columns [begin, begin + width) of x."""

    CODE, INPUTS = Code.COLUMNS, ("x",)
    _fields_ = _fields("int32 x x_width begin width")


class RankOperation(Operation):
    """Find the top ids and the log-sum of rows of logits, see `runtimes.ranking.Ranking`; `number`: index of the network's ranking."""

    CODE, INPUTS = Code.RANK, ("x",)
    _fields_ = _fields("int32 x width number columns count; int32* target_ids")


class Range(Structure):
    """Rows of one path; `table` and `mask` are offsets of its block table and mask, mask -1 = causal."""

    _fields_ = _fields("int32 start rows cached_len table mask first_slot")


class SampleOptions(Structure):
    """The sampling parameters of a request; temperature 0 is greedy."""

    _fields_ = _fields("double top_p min_p; float temperature; int32 top_k columns unused")


class SamplePath(Structure):
    """A path of a draft tree along which target tokens are sampled, see kernels/native.h."""

    _fields_ = _fields(
        "pointer logits block_max; int64 stride block_max_stride; pointer options tree; uint64 seed sample_index position;"
        "pointer result; int32 num_nodes num_tokens"
    )


class Step(Structure):
    """One step of updating a recurrent state, see kernels/native.h."""

    _fields_ = _fields("int32 from to path first_row num_rows first_save num_saves")


class Save(Structure):
    """A request to write the recurrent state after the first `count` pending and new rows to memory."""

    _fields_ = _fields("pointer state; int64 count")


class StateRange(Structure):
    """What the rows of a range do to the recurrent state of their sequence."""

    _fields_ = _fields(
        "pointer state records pending rows parents order ancestors paths steps saves has_run; int64 record_floats;"
        "int32 num_pending num_folded num_steps num_saves"
    )


class Pass(Structure):
    """The rows of one pass. Block tables come in sets, one for each pool of blocks, `blocks_per_table_set` apart."""

    _fields_ = _fields(
        "int32 rows num_logits_rows num_ranges blocks_per_table_set;"
        "pointer ranges range_of_row block_tables masks logits_rows cos sin draws states"
        " adapters adapter_rows row_order adapter_of_row low_rank; int32 num_adapters low_rank_floats"
    )


class Program(Structure):
    """A recorded network with its buffers and its cache."""

    _fields_ = _fields(
        "pointer operations; int32 num_operations num_threads; pointer buffers packed packed_rows scratch kv_storage split_results;"
        "int64 split_results_floats; int32 kv_kind max_columns; pointer tickets claims; int64 claims_per_thread;"
        "pointer state_scratch; int64 state_floats"
    )


VERSION = 20
"""KERNELS_VERSION of kernels/native.h."""

_RECORDS: tuple[type[Structure], ...] = (
    Matrix, SuperBlocksRecord, BlocksRecord, LinearOperation, NormOperation, RopeOperation, AttentionOperation, GatedOperation,
    AddOperation, SiluResidualOperation, GatherOperation, SoftCapOperation, ConcatOperation, RankOperation, ScaleOperation,
    ColumnsOperation, RouteOperation, ExpertsOperation, CombineOperation, SigmoidGateOperation, ConvolutionOperation,
    StateOperation, AdapterProduct, AdapterSite, PassAdapter, Range, SampleOptions, SamplePath, Step, Save, StateRange, Pass, Program,
)  # fmt: skip
LAYOUT = (VERSION, *map(sizeof, _RECORDS), DRAW.itemsize, -1)
"""What `paceline_layout` of the kernels returns for 0, 1, ..."""
