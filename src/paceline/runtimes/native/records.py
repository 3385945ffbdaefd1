"""The C structures of kernels/native.h, field by field, for ctypes."""

from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p, sizeof
from enum import IntEnum
from typing import Any, ClassVar

from paceline.runtimes.logits_summary import SAMPLING_DTYPE

MatrixKind = IntEnum(
    "MatrixKind",
    "F32 F16 BF16 U8 U8_MINIMUM "
    "PANELS_8_BITS PANELS_8_BITS_MINIMUM PANELS_4_BITS PANELS_4_BITS_MINIMUM PANELS_4_BITS_TABLE "
    "PANELS_4_BITS_FLOAT16 PANELS_4_BITS_TABLE_FLOAT16 "
    "PANELS_Q4_K PANELS_Q5_K PANELS_Q6_K PANELS_Q2_K PANELS_Q3_K PANELS_IQ4_XS",
    start=0,
)
"""How a matrix is stored: row by row (floats or 8-bit codes), or in panels; see kernels/native.h."""

PANEL_KINDS = frozenset(kind for kind in MatrixKind if kind.name.startswith("PANELS"))


OperationCode = IntEnum(
    "OperationCode",
    "LINEAR NORM ROPE ATTENTION GATED ADD GATHER SOFT_CAP CONCAT SUMMARIZE SCALE COLUMNS ROUTE EXPERTS COMBINE "
    "CONVOLUTION STATE BLOCK_CONVOLUTION HEADS MIX GAUSSIAN_TOP_K MATCH_RMS",
    start=0,
)
"""Numbers of the operations in kernels/native.h."""


class Packing(IntEnum):
    """How the input rows of a product are packed."""

    FLOATS = 0
    BF16 = 1
    BYTES = 2  # 8-bit codes with a scale for each group


class KVKind(IntEnum):
    """Data type of cached keys and values in the kernels."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8 = 3


MAX_OPERATION_PHASES = 3
"""An operation has up to this many phases. Threads claim pieces of work in each, see kernels/work.h."""

CHECKPOINT_INTERVAL = 8
"""Recurrent states are stored only after a multiple of this number of rows of a sequence."""


class RowSelection(IntEnum):
    """The rows of a pass on which an operation works."""

    ALL = 0
    LOGITS = 1  # only the rows whose logits are computed


_TYPES: dict[str, Any] = {
    "int32": c_int32, "int64": c_int64, "uint64": c_uint64, "float": c_float, "double": c_double, "pointer": c_void_p,
    "int32*": POINTER(c_int32), "int32[2]": c_int32 * 2,
}  # fmt: skip


def _fields(declarations: str) -> tuple[tuple[str, Any], ...]:
    """Return ctypes fields from a string like `type name name; type name`."""
    return tuple((name, _TYPES[kind]) for kind, *names in map(str.split, declarations.split(";")) for name in names)


class Matrix(Structure):
    """A weight matrix [outputs, columns], see kernels/native.h."""

    _fields_ = _fields(
        "int32 kind outputs columns group zero_point out scale_columns; int64 row_bytes; pointer codes scales minimums bias table"
    )


_TYPES["Matrix*"] = POINTER(Matrix)


class SuperBlocksRecord(Structure):
    """A K-quant matrix from which panels are filled, with the arrays of `models/grouped.py`."""

    _fields_ = _fields(
        "int32 kind outputs columns scale_columns zero_point; int64 row_bytes; pointer codes scales minimums factors minimum_factors"
    )


class GgufBlocksRecord(Structure):
    """A matrix in GGUF blocks from which panels are filled."""

    _fields_ = _fields(
        "int32 type kind outputs columns zero_point scale_columns sign_mask; int64 row_bytes; pointer rows row_order run_positions"
    )


class Operation(Structure):
    """The first fields of all operations, and their base class.

    Attributes:
        CODE: the kind of operation.
        INPUTS: names of the fields that contain numbers of values to read (after `assign_buffers`, numbers of buffers).
        OUTPUTS: names of the fields that contain numbers of values to write. A scratch value is in INPUTS and OUTPUTS.
    """

    CODE: ClassVar[OperationCode]
    INPUTS: ClassVar[Sequence[str]]
    OUTPUTS: ClassVar[Sequence[str]]
    _fields_: ClassVar[tuple[tuple[str, Any], ...]] = _fields("int32 code out rows")

    def __init__(self, **fields: object) -> None:
        """Set the fields that the subclass adds. `out` and `rows` are set when the operation is recorded.

        Raises:
            TypeError: a field is missing or unknown.
        """
        names = {name for name, _ in self._fields_}
        if names != fields.keys():
            raise TypeError(f"the operation {self.CODE.name} has the fields {sorted(names)}, not {sorted(fields)}")
        super().__init__(code=self.CODE, **fields)


def _operation(code: str, fields: str, *, inputs: str, outputs: str = "out") -> type[Operation]:
    """Return a subclass of `Operation`. `code` is a name of `OperationCode`, the other strings are lists of field names."""
    own = {"CODE": OperationCode[code], "INPUTS": inputs.split(), "OUTPUTS": outputs.split(), "_fields_": _fields(fields)}
    return type(code, (Operation,), own)


LinearOperation = _operation(
    "LINEAR", "int32 x num_matrices packing adapter_site block_max; Matrix* matrices", inputs="x", outputs="out block_max"
)
"""Products of the rows x with matrices that have the same number of columns and the same packing.

adapter_site: index of the adapter site (see adapters.py), -1 = LoRA adapters cannot change it. block_max: buffer for the maximum of each
BLOCK_COLUMNS results of a row, -1 = not computed."""

NormOperation = _operation(
    "NORM", "int32 x heads head_size; float epsilon; int32 weighted_heads is_centered; pointer weight bias", inputs="x"
)
"""RMS norm or, if `is_centered`, layer norm of each head of a row; with one head, of the whole row. None = no weight, no bias."""

RopeOperation = _operation("ROPE", "int32 x heads head_size rotary_half angle_table", inputs="x")
"""Rotary embedding of `rotary_half` pairs of each head, with the angles of a table."""

AttentionOperation = _operation(
    "ATTENTION",
    "int32 q k v heads kv_heads head_size layer block_table_set window is_causal latent_size; float scale soft_cap; pointer sinks",
    inputs="q k v",
)
"""Write keys and values of a layer to the cache, then compute attention to the cache.

k = v = -1: nothing is written; q = -1: no attention is computed. window, soft_cap: 0 = none. block_table_set: index of the layer's set
of block tables. is_causal: masks of ranges are ignored. latent_size: leading columns of a key that are its value (v = k); 0 = none."""

GatedOperation = _operation(
    "GATED", "int32 x up width activation group; float slope limit alpha_p alpha_n beta eps; pointer weight", inputs="x up"
)
"""activation(x) * up, where each value of x multiplies `group` adjacent columns of `up`. up -1: activation(x) * weight; None = ones.

activation: 0 SiLU, 1 GELU by tanh, 2 clamped SwiGLU (slope, limit), 3 sigmoid, 4 none, 5 ReLU, 6 xIELU (alpha_p, alpha_n, beta, eps)."""

AddOperation = _operation("ADD", "int32 x y width", inputs="x y")
"""x + y."""

MatchRmsOperation = _operation("MATCH_RMS", "int32 x y width", inputs="x y")
"""x * rms(y) / rms(x), where mean(x^2) counts as at least 1e-5."""

GatherOperation = _operation("GATHER", "int32 x width", inputs="x")
"""Copy the rows whose logits are computed."""

SoftCapOperation = _operation("SOFT_CAP", "int32 x width; float cap", inputs="x")
"""cap * tanh(x / cap)."""

ScaleOperation = _operation("SCALE", "int32 x width; float factor", inputs="x")
"""x * factor."""

GaussianTopKOperation = _operation("GAUSSIAN_TOP_K", "int32 x width; float factor", inputs="x")
"""max(x - mean(x) - factor * std(x), 0)."""

ConcatOperation = _operation("CONCAT", "int32 x y x_width width", inputs="x y")
"""[x, y]: the columns of x, then those of y. width: that of the result."""

MixOperation = _operation("MIX", "int32 x y weights width inputs outputs first_mixed; float offset", inputs="x y weights")
"""Streams y_i plus the sum of (weights_ij + offset) x_j over j; only y_i if i < first_mixed. Streams are adjacent and have `width` columns.

inputs, outputs: number of streams of x, and of y and the result. weights: [outputs][inputs] in each row; -1 = zeros."""

RouteOperation = _operation(
    "ROUTE",
    "int32 x num_experts experts_per_row scoring groups chosen_groups scores_per_group is_normalized;"
    "float epsilon factor; pointer correction scales",
    inputs="x",
)
"""Choose the experts of each row by the router's logits x. scoring: 0 softmax, 1 sigmoid. See kernels/experts.c."""

ExpertsOperation = _operation(
    "EXPERTS",
    "int32 x routes experts_per_row num_experts num_matrices packing is_per_pair adapter_site; Matrix* matrices",
    inputs="x routes",
)
"""Products of rows with the matrices of their experts. The results have a row for each pair of a row and an expert."""

CombineOperation = _operation("COMBINE", "int32 x routes experts_per_row width", inputs="x routes")
"""The sum of the outputs of each row's experts, times their weights."""

ConvolutionOperation = _operation(
    "CONVOLUTION", "int32 x channels kernel_size is_activated conv_offset record_offset; pointer weight bias", inputs="x"
)
"""A causal convolution of each channel. conv_offset, record_offset: the layer's offset in a recurrent state, and in a replay record."""

StateOperation = _operation(
    "STATE",
    "int32 x a b prepared channels heads key_heads rows_of_state columns block_columns is_delta"
    " matrices_offset keys_offset prepared_floats; float min_step max_step beta_scale; pointer decay bias skip",
    inputs="x a b prepared",
    outputs="out prepared",
)
"""Update of recurrent state matrices by a gated delta rule or by Mamba-2, see kernels/state_blocks.c."""

BlockConvolutionOperation = _operation(
    "BLOCK_CONVOLUTION", "int32 x added width added_width added_offset kernel_size group; pointer base", inputs="x added"
)
"""A causal convolution over the rows of a range, in which each row has another kernel; see `Ops.block_convolution`."""

HeadsOperation = _operation("HEADS", "int32 x tails heads tail_columns packing; Matrix* matrices", inputs="x tails")
"""Products of each head of a row with its own matrix, each followed by the head's `tail_columns` values in `tails`; 0: tails = -1."""


class AdapterProduct(Structure):
    """The LoRA update of one product, see kernels/native.h."""

    _fields_ = _fields("int32 kind first_rank rank unused; pointer up bias; Matrix* replacement")


_TYPES["AdapterProduct*"] = POINTER(AdapterProduct)


class AdapterSite(Structure):
    """The LoRA updates of the products of one operation, see kernels/native.h."""

    _fields_ = _fields("Matrix* down; AdapterProduct* products; pointer scaling_columns")


_TYPES["AdapterSite*"] = POINTER(AdapterSite)


class PassAdapter(Structure):
    """A LoRA adapter and the rows of the pass that use it, see kernels/native.h."""

    _fields_ = _fields("AdapterSite* sites; int32[2] first count; pointer scalings; int64 num_scalings")


ColumnsOperation = _operation("COLUMNS", "int32 x x_width begin width", inputs="x")
"""Columns [begin, begin + width) of x."""

SummarizeOperation = _operation("SUMMARIZE", "int32 x width summary_index columns count; int32* target_ids", inputs="x")
"""Summarise rows of logits, see `SummaryOptions`. summary_index: index among the summaries of the network."""


class Range(Structure):
    """A `RowRange` for the kernels. table_offset: index in `Pass.block_tables`. mask_offset: index in `Pass.masks`; -1 = causal."""

    _fields_ = _fields("int32 start rows cached_len table_offset mask_offset first_slot")


class SampleOptions(Structure):
    """The sampling parameters of a request. temperature 0 = greedy."""

    _fields_ = _fields("double top_p min_p; float temperature; int32 top_k columns unused")


class SamplePath(Structure):
    """A draft tree along which target tokens are sampled, see kernels/native.h."""

    _fields_ = _fields(
        "pointer logits block_max; int64 logits_stride block_max_stride; pointer options tree; uint64 seed sample_index position;"
        "pointer result; int32 num_nodes num_tokens"
    )


class StateStep(Structure):
    """A step that computes a recurrent state and the rows that start from it, see kernels/native.h."""

    _fields_ = _fields("int32 from_state to_state path first_row num_rows first_save num_saves")


class StateSave(Structure):
    """Where a recurrent state is copied to, and after how many rows; see kernels/native.h."""

    _fields_ = _fields("pointer state; int64 count")


class StateRange(Structure):
    """How the rows of a range update the recurrent state of their sequence, see kernels/native.h."""

    _fields_ = _fields(
        "pointer state records pending row_records parents order ancestors paths steps saves has_run; int64 record_floats;"
        "int32 num_pending num_applied num_steps num_saves"
    )


class Pass(Structure):
    """The rows of one pass, see kernels/native.h."""

    _fields_ = _fields(
        "int32 rows num_logits_rows num_ranges blocks_per_table_set;"
        "pointer ranges range_of_row block_tables masks logits_rows cos sin sampling states"
        " adapters adapter_rows row_order adapter_of_row low_rank; int32 num_adapters low_rank_floats"
    )


class Program(Structure):
    """A recorded network with its buffers and its cache, see kernels/native.h."""

    _fields_ = _fields(
        "pointer operations; int32 num_operations num_threads; pointer buffers packed_inputs packed_rows scratch kv_storage split_results;"
        "int64 split_results_floats; int32 kv_kind max_columns; pointer tickets claims; int64 claims_per_thread;"
        "pointer state_scratch; int64 state_floats"
    )


VERSION = 28
"""KERNELS_VERSION in kernels/native.h."""

_RECORDS: tuple[type[Structure], ...] = (
    Matrix, SuperBlocksRecord, GgufBlocksRecord, LinearOperation, NormOperation, RopeOperation, AttentionOperation, GatedOperation,
    AddOperation, GatherOperation, SoftCapOperation, ConcatOperation, SummarizeOperation, ScaleOperation, ColumnsOperation,
    RouteOperation, ExpertsOperation, CombineOperation, ConvolutionOperation, StateOperation, BlockConvolutionOperation, HeadsOperation,
    MixOperation, GaussianTopKOperation, MatchRmsOperation, AdapterProduct, AdapterSite, PassAdapter, Range, SampleOptions, SamplePath,
    StateStep, StateSave, StateRange, Pass, Program,
)  # fmt: skip
LAYOUT = (VERSION, *map(sizeof, _RECORDS), SAMPLING_DTYPE.itemsize, -1)
"""What the kernels' function `paceline_layout` must return for 0, 1, 2, ..."""
