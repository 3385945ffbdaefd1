"""The compiled kernels of this folder: found, loaded once, and described to ctypes.

The records are those of kernels/native.h, field by field.
"""

import ctypes
import platform
import struct
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from paceline.errors import BackendUnavailableError
from paceline.runtimes.native.records import Matrix, Pass, Program
from paceline.runtimes.processor import processor_flags

# What a processor must have for each of the levels, best first.
_V4 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
_V3 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"}
_LEVELS = {
    "x86_64_v4_bf16": {*_V4, "avx512_bf16", "avx512_vnni"},
    "x86_64_v4_vnni": {*_V4, "avx512_vnni"},
    "x86_64_v4": _V4,
    "x86_64_v3_vnni": {*_V3, "avx_vnni"},
    "x86_64_v3": _V3,
    "armv8_dotprod": {"asimd", "asimddp"},
    "armv8": {"asimd"},
}

LANES = 16
"""Floats of a vector, as in kernels/vectors.h."""


class Choice(Structure):
    """What a tree is chosen from."""

    _fields_ = (
        ("first", c_void_p), ("end", c_void_p), ("tokens", c_void_p), ("behind", c_void_p), ("probs", c_void_p), ("queue", c_void_p),
        ("nodes", c_void_p), ("found", c_void_p),
    )  # fmt: skip


class Wanted(Structure):
    """What every proposal brings."""

    _fields_ = (
        ("seed", c_uint64), ("sample_index", c_uint64), ("temperature", c_float), ("layout", c_int32), ("row_budget", c_int32),
        ("most_depth", c_int32), ("base", c_int32), ("begin", c_int32), ("first_slot", c_int32), ("ranks", c_int32),
    )  # fmt: skip


WANTED = struct.Struct("=QQf7i")
"""Writes a `Wanted` at once."""

MOST_INPUTS = 16
"""Of a network of pairs, besides the embedding."""


class Growing(Structure):
    """A draft of pairs that grows."""

    _fields_ = (
        ("wanted", Wanted), ("true_program", POINTER(Program)), ("program", POINTER(Program)), ("one_pass", POINTER(Pass)),
        ("range", c_void_p), ("token_ids", c_void_p), ("features", c_void_p), ("table", c_void_p), ("tables", c_void_p * 4),
        ("angles", c_void_p * 4), ("draws", c_void_p), ("masks", c_void_p), ("selected", c_void_p), ("frontier", c_void_p),
        ("feature_rows", c_void_p), ("row_of", c_void_p), ("tokens", c_void_p), ("parents", c_void_p), ("first", c_void_p),
        ("end", c_void_p), ("probs", c_void_p), ("reached", c_void_p), ("choice", Choice), ("row_bytes", c_int64), ("kind", c_int32),
        ("num_embedded", c_int32), ("embedding_width", c_int32), ("feature_width", c_int32), ("num_ropes", c_int32), ("half", c_int32),
        ("embedding", c_int32), ("feature", c_int32), ("feature_out", c_int32), ("ranked", c_int32), ("record_floats", c_int32),
        ("count", c_int32), ("true_embedding", c_int32), ("true_feature", c_int32 * MOST_INPUTS), ("true_inputs", c_int32),
        ("true_width", c_int32), ("true_feature_out", c_int32), ("true_ranked", c_int32), ("width", c_int32), ("depth", c_int32),
        ("num_nodes", c_int32), ("num_rows", c_int32), ("num_passes", c_int32),
    )  # fmt: skip


class Heads(Structure):
    """Heads that guess several positions from one feature."""

    _fields_ = (
        ("wanted", Wanted), ("program", POINTER(Program)), ("lm_head", POINTER(Program)), ("one_pass", POINTER(Pass)),
        ("draws", c_void_p), ("feature", c_void_p), ("least", c_void_p), ("outs", c_void_p), ("first", c_void_p), ("end", c_void_p),
        ("tokens", c_void_p), ("probs", c_void_p), ("choice", Choice), ("heads", c_int32), ("width", c_int32), ("feature_in", c_int32),
        ("hidden", c_int32), ("ranked", c_int32), ("record_floats", c_int32), ("count", c_int32), ("num_asked", c_int32),
    )  # fmt: skip


@cache
def kernels() -> ctypes.CDLL:
    """The library for this processor.

    Raises:
        BackendUnavailableError: it was not built, or the processor is none we build for.
    """
    path = kernels_path()
    if path is None:
        raise BackendUnavailableError(
            f"there are no native kernels for this machine ({platform.system()} on {platform.machine()}): use --backend openvino or torch"
        )
    library = ctypes.CDLL(str(path))
    library.paceline_run.argtypes = [POINTER(Program), POINTER(Pass)]
    library.paceline_run.restype = None
    library.paceline_packed_floats.argtypes = [c_int32, c_int32]
    library.paceline_packed_floats.restype = c_int64
    library.paceline_strip_bytes.argtypes = [c_int32, c_int32, c_int32]
    library.paceline_strip_bytes.restype = c_int64
    library.paceline_fill_strips.argtypes = [POINTER(Matrix), c_int32, c_int32, c_int32, c_int32, c_void_p]
    library.paceline_fill_strips.restype = None
    library.paceline_page_sums.argtypes = [c_void_p, c_int64, c_void_p, c_void_p]
    library.paceline_page_sums.restype = None
    library.paceline_ranking_floats.argtypes = [c_int32, c_int32]
    library.paceline_ranking_floats.restype = c_int32
    library.paceline_grow.argtypes = [POINTER(Growing)]
    library.paceline_grow.restype = None
    library.paceline_grow_heads.argtypes = [POINTER(Heads)]
    library.paceline_grow_heads.restype = None
    return library


def kernels_path() -> Path | None:
    """The best library that was built and that this processor runs."""
    flags = processor_flags()
    paths = (Path(__file__).with_name(f"kernels.{level}.so") for level, needed in _LEVELS.items() if needed <= flags)
    return next((path for path in paths if path.is_file()), None)
