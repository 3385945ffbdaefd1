"""Run the kernels' tests with sanitizers: once for addresses and undefined behaviour, once for data races between threads.

    python tools/sanitize_kernels.py [--compiler clang] [--only thread] [-- PYTEST_ARGUMENTS]

Needs a clang of the system (16 or later; Debian: clang-19 libclang-rt-19-dev), and is skipped without one. The sanitizer is preloaded into
an ordinary Python; a copy of the package holds the instrumented kernels.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "src"))
from hatch_build import FLAGS, LEVELS, NATIVE, POSIX_FLAGS  # noqa: E402

from paceline.runtimes.native.library import supported_levels  # noqa: E402

COMPILERS = ("clang", *(f"clang-{version}" for version in range(30, 15, -1)))
LEFT_OUT = {"test_native_aligned.py", "test_native_block_max.py", "test_native_threads.py"}  # no kernels of their own
TESTS = [*sorted({path.name for path in (ROOT / "tests/unit/runtimes").glob("test_native*.py")} - LEFT_OUT), "test_ranking.py"]
NOT_HERE = ("fork", "callers_of_one_runtime")  # in tests' names: what a sanitizer cannot follow, and what races by intention
FLAGS_OF = {"address,undefined": (), "thread": ("-fno-builtin-memcpy",)}  # as vectors, loads and stores are not looked at for races
RUNTIMES = {"address,undefined": "asan", "thread": "tsan"}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0 allow_addr2line=1",  # leaks are Python's own
    "UBSAN_OPTIONS": "print_stacktrace=1 allow_addr2line=1",
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1 halt_on_error=1 allow_addr2line=1",
}


def find_compiler(given: str | None) -> str | None:
    """A clang that knows the vector functions the kernels are written with and has the sanitizers' libraries."""
    for name in (given,) if given else COMPILERS:
        path = shutil.which(name)
        if path and all(runtime_of(path, sanitizer).is_file() for sanitizer in RUNTIMES):
            source = "typedef float v __attribute__((vector_size(64))); v f(v x) { return __builtin_elementwise_fma(x, x, x); }"
            if not subprocess.run(
                [path, "-xc", "-", "-fsyntax-only"], input=source, text=True, capture_output=True, check=False
            ).returncode:
                return path
    return None


def runtime_of(compiler: str, sanitizer: str) -> Path:
    """Return the library to preload."""
    name = f"libclang_rt.{RUNTIMES[sanitizer]}-{platform.machine()}.so"
    return Path(subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip())


def build(compiler: str, sanitizer: str, folder: Path) -> None:
    """A copy of the package in `folder`, with instrumented kernels for this processor alone."""
    shutil.copytree(ROOT / "src/paceline", folder / "paceline", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    level = supported_levels()[0]
    instructions = [flag.replace("x86_64_v", "x86-64-v") for flag in LEVELS[platform.machine()][level]]
    sources = map(str, sorted((ROOT / NATIVE / "kernels").glob("*.c")))
    command = [compiler, "-w", *FLAGS, *POSIX_FLAGS, *instructions, "-O1", "-g", "-fno-omit-frame-pointer", "-shared-libsan"]
    command += [f"-fsanitize={sanitizer}", *FLAGS_OF[sanitizer]]
    library = folder / NATIVE.relative_to("src") / f"kernels.{level}.so"
    subprocess.run([*command, "-fno-sanitize-recover=all", *sources, "-o", str(library)], check=True)


def run_tests(compiler: str, sanitizer: str, arguments: Sequence[str]) -> int:
    """pytest's exit status; a finding ends the process with another one."""
    with tempfile.TemporaryDirectory() as folder:
        build(compiler, sanitizer, Path(folder))
        environment = {**os.environ, **OPTIONS, "LD_PRELOAD": str(runtime_of(compiler, sanitizer)), "PYTHONPATH": folder}
        tests = [str(ROOT / "tests/unit/runtimes" / name) for name in TESTS]
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-k", " and ".join(f"not {name}" for name in NOT_HERE), *tests, *arguments]
        if sanitizer == "thread" and (setarch := shutil.which("setarch")):
            command = [setarch, "-R", *command]  # it needs addresses where it expects them
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", help="instead of the newest clang there is")
    parser.add_argument("--only", choices=RUNTIMES, help="leave the other sanitizer out")
    parser.add_argument("arguments", nargs="*", help="for pytest")
    options = parser.parse_args()
    compiler = find_compiler(options.compiler)
    if compiler is None:
        print("SKIPPED sanitizers: no clang 16 or later with its sanitizers (Debian: clang-19 libclang-rt-19-dev)")
        return 0
    failed = [name for name in RUNTIMES if options.only in (None, name) and run_tests(compiler, name, options.arguments)]
    print(f"sanitizers: {', '.join(f'{name} FAILED' for name in failed) or 'nothing found'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
