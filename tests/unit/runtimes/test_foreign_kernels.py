"""Kernels compiled for Windows (under Wine) and Arm (under qemu) compute the bits they compute here.

A small program runs a recorded pass again.
"""

import ctypes
import gc
import importlib.util
import os
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

from harness.checkpoints import write_checkpoint
from harness.gguf_checkpoints import with_random_blocks, write_gguf
from harness.native_network import BUILT
from paceline.config import QuantOptions
from paceline.models.config import WeightType
from paceline.models.gguf.blocks import QUANTIZED_BLOCK_TYPES
from paceline.runtimes.base import assemble_pass
from paceline.runtimes.decoder import TOKEN_IDS
from paceline.runtimes.load import RuntimeOptions, load_network
from paceline.runtimes.native.library import supported_levels
from paceline.runtimes.native.network import NativeNetwork

REPOSITORY = Path(__file__).parents[3]
KERNELS = REPOSITORY / "src/paceline/runtimes/native/kernels"
PROGRAM = REPOSITORY / "tests/harness/run_recorded.c"
WINE = shutil.which("wine64") or shutil.which("wine64", path="/usr/lib/wine") or shutil.which("wine")
QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
NEEDS_QEMU = pytest.mark.skipif(QEMU is None, reason="needs qemu (apt install qemu-user)")

pytestmark = [
    pytest.mark.skipif(not BUILT or platform.machine() != "x86_64", reason="no native kernels for x86-64 here"),
    pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs the compiler that builds wheels (pip install ziglang)"),
]
NEEDS_WINE = pytest.mark.skipif(WINE is None, reason="needs Wine (apt install wine64)")


def windows_kernels(level: str) -> Any:
    """The kernels for Windows of an instruction set; Wine runs them on this processor."""
    marks = [NEEDS_WINE, pytest.mark.skipif(level not in supported_levels(), reason=f"this processor is not {level}")]
    return pytest.param(("windows", level), id=f"windows_{level}", marks=marks if level == "x86_64_v3" else [*marks, pytest.mark.long])


SYSTEMS = [
    *map(windows_kernels, ["x86_64_v3", "x86_64_v3_vnni", "x86_64_v4", "x86_64_v4_vnni", "x86_64_v4_bf16"]),
    # a C library for Arm is compiled, too: a minute
    pytest.param(("cortex-a72", "armv8"), id="arm", marks=[NEEDS_QEMU, pytest.mark.long]),
    pytest.param(("max", "armv8_dotprod"), id="arm_dotprod", marks=[NEEDS_QEMU, pytest.mark.long]),
    pytest.param(("max", "armv8_i8mm"), id="arm_i8mm", marks=[NEEDS_QEMU, pytest.mark.long]),
]


def base_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array that has the memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def memory_of(roots: Iterable[object]) -> dict[int, int]:
    """Addresses and sizes of all arrays and records that can be reached."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        one: Any = waiting.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        if isinstance(one, np.ndarray):
            one = base_of(one)
            found[one.ctypes.data] = one.nbytes
        elif isinstance(one, ctypes.Structure | ctypes.Array):
            found[ctypes.addressof(one)] = ctypes.sizeof(one)
        waiting += gc.get_referents(one)
    return found


def record_pass(network: NativeNetwork, record: Path) -> tuple[dict[int, int], dict[int, bytes]]:
    """Record a pass with a tree after a prompt and another prompt, and run it.

    Returns:
        sizes of the regions by address, in the order of the record; the bytes of the cache and of all buffers after the pass.
    """
    cache = network.new_cache(8)
    one, other = cache.new_sequence(), cache.new_sequence()
    token_ids = np.random.default_rng(1).integers(1, 90, 40).tolist()
    network.forward(*assemble_pass([cache.reserve_rows(one, range(-1, 39))], [token_ids], [range(40)]))
    cache.keep_path(one, 39)
    plans = [cache.reserve_rows(one, [-1, 0, 0, 1]), cache.reserve_rows(other, range(-1, 19))]
    inputs, batch, wanted = assemble_pass(plans, [token_ids[:4], token_ids[:20]], [range(4), range(20)])
    program = network._programs[None]
    execution, num_rows = program.execution, len(batch.positions)
    for buffer in execution._buffers:
        base_of(buffer)[...] = 0  # the whole allocation: old contents may look like a pointer and be relocated
    assert network._shared._cache is not None
    storage = network._shared._cache[0]
    execution.buffer_rows(program.inputs[TOKEN_IDS], num_rows)[...] = network.embed(inputs[TOKEN_IDS])
    execution.pass_record.fill(batch, wanted)
    regions = dict(sorted(memory_of([execution, program, network._shared, storage]).items()))
    head = struct.pack("=QQQ", len(regions), ctypes.addressof(execution._program), ctypes.addressof(execution.pass_record.record))
    parts = [struct.pack("=QQ", address, size) + ctypes.string_at(address, size) for address, size in regions.items()]
    record.write_bytes(head + b"".join(parts))
    execution.kernels.paceline_run(*execution._arguments)
    results = map(base_of, [*storage, *execution._buffers])
    return regions, {array.ctypes.data: array.tobytes() for array in results}


def compile_for(target: str, output: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, *arguments, "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def run_with(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sequence[str]]:
    """A folder with kernels as in a wheel and a program that runs `record` there, and the command that starts it."""
    pytest.importorskip("hatchling")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPOSITORY)
        from hatch_build import ARM_64, FLAGS, POSIX_FLAGS, WINDOWS_FLAGS, X86_64
    system, level = request.param
    folder = tmp_path_factory.mktemp(system)
    sources = [str(path) for path in sorted(KERNELS.glob("*.c"))]
    if system == "windows":
        compile_for("x86_64-windows-gnu", folder / "kernels.dll", *FLAGS, *WINDOWS_FLAGS, *X86_64[level], *sources)
        options = ("-O1", "-g0", "-s", "-nostdlib", "-fno-builtin", "-fno-stack-protector")
        compile_for("x86_64-windows-gnu", folder / "run.exe", *options, str(PROGRAM), "-lkernel32")
        return folder, (str(WINE), "run.exe")
    flags = [flag for flag in (*FLAGS, *POSIX_FLAGS) if flag != "-shared"]
    compile_for("aarch64-linux-musl", folder / "run", *flags, *ARM_64[level], "-static", *sources, str(PROGRAM))
    return folder, (str(QEMU), "-cpu", system, "./run")


def load_with_weights(weights: str, folder: Path) -> NativeNetwork:
    """A small network with floats, with 8-bit codes, or with the matrices of a GGUF file, whose block types take turns."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    target = write_checkpoint(folder / "target", "llama", num_hidden_layers=4 if weights == "gguf" else 2, **sizes)
    options = RuntimeOptions(backend="native", num_threads=4)
    if weights == "int8":
        options = replace(options, quantization=QuantOptions(bits=8, group=32))
    elif weights == "gguf":
        types, plain, target = cycle(sorted(QUANTIZED_BLOCK_TYPES)), write_gguf(target, folder / "plain.gguf"), folder / "model.gguf"
        with_random_blocks(plain, target, lambda _: next(types), np.random.default_rng(1))
    else:
        options = replace(options, dtype=WeightType(weights))
    network = load_network(target, options).network
    assert isinstance(network, NativeNetwork)
    return network


@pytest.mark.parametrize("run_with", SYSTEMS, indirect=True)
@pytest.mark.parametrize("weights", ["f32", "bf16", "int8", "gguf"])
def test_recorded_pass_is_bit_equal_with_kernels_of_another_system(
    weights: str, run_with: tuple[Path, Sequence[str]], tmp_path: Path
) -> None:
    built, command = run_with
    network = load_with_weights(weights, tmp_path)
    record, result = built / "record", built / "result"
    regions, expected = record_pass(network, record)
    environment = {**os.environ, "WINEPREFIX": str(built / "wine"), "WINEDEBUG": "-all"}
    subprocess.run(command, check=True, env=environment, cwd=built)
    content, at, compared = result.read_bytes(), 0, 0
    for address, size in regions.items():
        if address in expected:
            own = expected[address]
            assert content[at : at + len(own)] == own
            compared += len(own)
        at += size
    assert compared > 100_000
