"""The compiled kernels of this folder: found, loaded once, checked, and described to ctypes."""

import ctypes
import platform
from ctypes import POINTER, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from paceline.errors import BackendUnavailableError
from paceline.runtimes.native.records import LAYOUT, BlocksRecord, Matrix, Pass, Program, SuperBlocksRecord
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

BLOCK_COLUMNS = 192
"""Logits of a row of which the largest is kept, as in kernels/block_max.h."""


@cache
def kernels() -> ctypes.CDLL:
    """The library for this processor.

    Raises:
        BackendUnavailableError: it was not built, the processor is none we build for, or its records are not those of this package.
    """
    path = kernels_path()
    if path is None:
        raise BackendUnavailableError(
            f"there are no native kernels for this machine ({platform.system()} on {platform.machine()}): use --backend torch"
        )
    return open_kernels(path)


def open_kernels(path: Path) -> ctypes.CDLL:
    """A library that this processor runs.

    Raises:
        BackendUnavailableError: its records are not those of this package.
    """
    library = ctypes.CDLL(str(path))
    layout = getattr(library, "paceline_layout", None)
    if layout is None or any(layout(index) != expected for index, expected in enumerate(LAYOUT)):
        raise BackendUnavailableError(f"the native kernels {path} are of another build than this package: install paceline again")
    library.paceline_run.argtypes = [POINTER(Program), POINTER(Pass)]
    library.paceline_run.restype = None
    library.paceline_packed_floats.argtypes = [c_int32, c_int32]
    library.paceline_packed_floats.restype = c_int64
    library.paceline_attention_floats.argtypes = [c_int32, c_int32, c_int32]
    library.paceline_attention_floats.restype = c_int64
    library.paceline_kv_unit_bytes.argtypes = [c_int32, c_int32]
    library.paceline_kv_unit_bytes.restype = c_int64
    library.paceline_panel_bytes.argtypes = [c_int32, c_int32, c_int32]
    library.paceline_panel_bytes.restype = c_int64
    library.paceline_fill_panels.argtypes = [POINTER(Matrix), c_int32, c_int32, c_int32, c_int32, c_void_p]
    library.paceline_fill_panels.restype = None
    library.paceline_super_block_bytes.argtypes = [c_int32, c_int32, c_int32]
    library.paceline_super_block_bytes.restype = c_int64
    library.paceline_fill_super_blocks.argtypes = [POINTER(SuperBlocksRecord), c_int32, c_int32, c_void_p]
    library.paceline_fill_super_blocks.restype = None
    library.paceline_super_block_rows.argtypes = [POINTER(Matrix), c_void_p, c_int32, c_void_p]
    library.paceline_super_block_rows.restype = None
    library.paceline_lay_out_blocks.argtypes = [POINTER(BlocksRecord), c_int32, c_int32, c_int64, c_void_p]
    library.paceline_lay_out_blocks.restype = c_int32
    library.paceline_page_sums.argtypes = [c_void_p, c_int64, c_void_p, c_void_p]
    library.paceline_page_sums.restype = None
    library.paceline_ranking_floats.argtypes = [c_int32, c_int32]
    library.paceline_ranking_floats.restype = c_int32
    library.paceline_sample_paths.argtypes = [c_void_p, c_int32, c_int32, c_void_p, c_int64]
    library.paceline_sample_paths.restype = None
    return library


def kernels_path() -> Path | None:
    """The best library that was built and that this processor runs."""
    suffix = "dll" if platform.system() == "Windows" else "so"
    paths = (Path(__file__).with_name(f"kernels.{level}.{suffix}") for level in levels())
    return next((path for path in paths if path.is_file()), None)


def levels() -> list[str]:
    """What this processor runs of what we build for, best first."""
    flags = processor_flags()
    return [level for level, needed in _LEVELS.items() if needed <= flags]
