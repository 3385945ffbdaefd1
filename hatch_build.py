"""Compiles the native runtime's kernels while the package is built: one library per instruction set of this machine's kind.

The compiler comes as a build dependency (the `ziglang` package holds clang), so none has to be installed. Where it cannot compile,
the package is built without kernels and the other runtimes serve.

The libraries are loaded with ctypes and know nothing of Python, so one wheel serves every version of it. They are compiled for an old
system, whatever this one is: glibc 2.17 (manylinux2014), macOS 11 or Windows 10.
"""

import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("src/paceline/runtimes/native")
X86_64 = {
    "x86_64_v4_bf16": ("-march=x86_64_v4", "-mavx512vnni", "-mavx512bf16"),
    "x86_64_v4_vnni": ("-march=x86_64_v4", "-mavx512vnni"),
    "x86_64_v4": ("-march=x86_64_v4",),
    "x86_64_v3_vnni": ("-march=x86_64_v3", "-mavxvnni"),
    "x86_64_v3": ("-march=x86_64_v3",),
}
ARM_64 = {"armv8_dotprod": ("-mcpu=generic+dotprod",), "armv8": ("-mcpu=generic",)}
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {"x86_64": X86_64, "aarch64": ARM_64}
FLAGS = ("-std=c17", "-O3", "-g0", "-shared", "-ffp-contract=off", "-mprefer-vector-width=512")
POSIX_FLAGS = ("-fPIC", "-lpthread", "-lm")
WINDOWS_FLAGS = ("-s",)  # the compiler brings pthreads for Windows and links them into the library


class KernelBuild(BuildHookInterface):  # type: ignore[type-arg]
    """Puts `kernels.<level>.so` (on Windows `.dll`) beside the runtime that loads it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        sources = sorted(str(file) for file in (root / NATIVE / "kernels").glob("*.c"))
        machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
        is_windows = sys.platform == "win32"
        target, tag = _oldest_system(machine)
        flags = (*target, *FLAGS, *(WINDOWS_FLAGS if is_windows else POSIX_FLAGS))
        for level, instructions in LEVELS.get(machine, {}).items():
            library = root / NATIVE / f"kernels.{level}.{'dll' if is_windows else 'so'}"
            unfinished = library.with_suffix(".part")
            with tempfile.TemporaryDirectory() as folder:  # on Windows the linker leaves more than the library
                built = Path(folder, library.name)
                command = [sys.executable, "-m", "ziglang", "cc", *flags, *instructions, *sources, "-o", str(built)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    self.app.display_warning(f"no native kernels for {level}: {done.stderr.strip()}")
                    continue
                shutil.copyfile(built, unfinished)
            unfinished.replace(library)
            build_data["artifacts"].append(str(NATIVE / library.name))
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{tag}"


def _oldest_system(machine: str) -> tuple[tuple[str, ...], str]:
    """The compiler's flags that name the oldest system the libraries shall run on, and the wheel's tag for it."""
    if sys.platform == "win32":
        return ("-target", f"{machine}-windows-gnu"), "win_amd64"
    if sys.platform == "darwin":
        return ("-target", f"{machine}-macos.11.0"), f"macosx_11_0_{'arm64' if machine == 'aarch64' else machine}"
    if platform.libc_ver()[0] == "glibc":
        return ("-target", f"{machine}-linux-gnu.2.17"), f"manylinux2014_{machine}.manylinux_2_17_{machine}"
    return (), sysconfig.get_platform().replace("-", "_").replace(".", "_")  # systems like this one
