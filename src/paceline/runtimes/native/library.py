"""Find, load and check the compiled kernels, and declare their functions for ctypes."""

import ctypes
import platform
from ctypes import POINTER, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from paceline.errors import BackendUnavailableError
from paceline.machine import processor_flags
from paceline.runtimes.native.records import LAYOUT, GgufBlocksRecord, Matrix, Pass, Program, SuperBlocksRecord

_X86_64_V4 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
_X86_64_V3 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"}
_REQUIRED_FLAGS = {
    "x86_64_v4_bf16": {*_X86_64_V4, "avx512_bf16", "avx512_vnni"},
    "x86_64_v4_vnni": {*_X86_64_V4, "avx512_vnni"},
    "x86_64_v4": _X86_64_V4,
    "x86_64_v3_vnni": {*_X86_64_V3, "avx_vnni"},
    "x86_64_v3": _X86_64_V3,
    "armv8_i8mm": {"asimd", "asimddp", "i8mm"},
    "armv8_dotprod": {"asimd", "asimddp"},
    "armv8": {"asimd"},
}
"""The processor flags that each library needs, by instruction set, fastest first."""

_CPUID_FLAGS = (("avx512_vnni", 0, 2, 11), ("avx_vnni", 1, 0, 4), ("avx512_bf16", 1, 0, 5))
"""Processor flags that Windows does not report: name, then subleaf of leaf 7 of the instruction cpuid, register index, bit."""

LANES = 16
"""Floats of a vector in the kernels, whatever the width of registers; see kernels/vectors.h."""

BLOCK_COLUMNS = 192
"""The kernels store the maximum of each block of this many logits; see kernels/block_max.h."""

_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "run": (None, [POINTER(Program), POINTER(Pass)]),
    "packed_floats": (c_int64, [c_int32, c_int32]),
    "attention_floats": (c_int64, [c_int32, c_int32, c_int32]),
    "head_block_bytes": (c_int64, [c_int32, c_int32]),
    "panel_bytes": (c_int64, [c_int32, c_int32, c_int32]),
    "fill_panels": (None, [POINTER(Matrix), c_int32, c_int32, c_int32, c_int32, c_void_p]),
    "super_block_bytes": (c_int64, [c_int32, c_int32, c_int32]),
    "fill_super_blocks": (None, [POINTER(SuperBlocksRecord), c_int32, c_int32, c_void_p]),
    "super_block_rows": (None, [POINTER(Matrix), c_void_p, c_int32, c_void_p]),
    "pack_gguf_blocks": (c_int32, [POINTER(GgufBlocksRecord), c_int32, c_int32, c_int64, c_void_p]),
    "summary_floats": (c_int32, [c_int32, c_int32]),
    "sample_paths": (None, [c_void_p, c_int32, c_int32, c_void_p, c_int64]),
}
"""Result and argument types of the exported functions, by name without `paceline_`."""


@cache
def kernels() -> ctypes.CDLL:
    """Return the compiled kernels for this processor.

    Raises:
        BackendUnavailableError: no kernels were built for this processor, or their version differs from this package.
    """
    path = kernels_path()
    if path is None:
        raise BackendUnavailableError(
            f"there are no native kernels for this machine ({platform.system()} on {platform.machine()}): use --backend torch"
        )
    return open_kernels(path)


def open_kernels(path: Path) -> ctypes.CDLL:
    """Load a library of compiled kernels.

    Raises:
        BackendUnavailableError: its version or its records differ from those in records.py.
    """
    library = ctypes.CDLL(str(path))
    layout = getattr(library, "paceline_layout", None)
    if layout is None or any(layout(index) != expected for index, expected in enumerate(LAYOUT)):
        raise BackendUnavailableError(f"the native kernels {path} are of another build than this package: install paceline again")
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"paceline_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def kernels_path() -> Path | None:
    """Return the fastest library that was built and that this processor can run; None = no such library."""
    return next((path for path in map(library_path, supported_levels()) if path.is_file()), None)


def library_path(level: str) -> Path:
    """Return the path of the library for an instruction set; the file need not exist."""
    suffix = {"Windows": "dll", "Darwin": "dylib"}.get(platform.system(), "so")
    return Path(__file__).with_name(f"kernels.{level}.{suffix}")


def supported_levels() -> list[str]:
    """Return the instruction sets of libraries that this processor can run, fastest first."""
    flags = processor_flags()
    if platform.system() == "Windows" and _REQUIRED_FLAGS["x86_64_v3"] <= flags:
        flags |= _read_cpuid_flags(library_path("x86_64_v3"))
    return [level for level, required in _REQUIRED_FLAGS.items() if required <= flags]


@cache
def _read_cpuid_flags(path: Path) -> frozenset[str]:
    """Return the `_CPUID_FLAGS` of the processor, which the library at `path` reads with cpuid; empty if there is no such file."""
    if not path.is_file():
        return frozenset()
    library, registers = ctypes.CDLL(str(path)), (ctypes.c_uint32 * 4)()
    flags = set()
    for name, subleaf, register, bit in _CPUID_FLAGS:
        library.paceline_cpuid(7, subleaf, registers)
        if registers[register] >> bit & 1:
            flags.add(name)
    return frozenset(flags)
