"""Compile the native runtime's kernels while the package is built: one library for each instruction set of a platform.

The compiler is a build dependency (the package `ziglang` contains clang), so none has to be installed. If it cannot compile, the package
is built without kernels, and other runtimes are used.

The libraries are loaded with ctypes and do not use Python's C interface, so one wheel works with every Python. They are compiled for the
oldest supported system: glibc 2.17 (manylinux2014), macOS 11 or Windows 10.

PACELINE_BUILD_PLATFORM names another platform to build a wheel for, such as `darwin-aarch64` (tools/build_wheels.py sets it). A library
that cannot be compiled is an error then.
"""

import os
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
ARM_64 = {
    "armv8_i8mm": ("-mcpu=generic+dotprod+i8mm",),
    "armv8_dotprod": ("-mcpu=generic+dotprod",),
    "armv8": ("-mcpu=generic",),
}
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {"x86_64": X86_64, "aarch64": ARM_64}
LEFT_OUT = {"darwin": ("x86_64_v4_bf16", "x86_64_v3_vnni", "armv8")}  # no Mac has these and not a faster one
FLAGS = ("-std=c17", "-O3", "-g0", "-shared", "-ffp-contract=off", "-mprefer-vector-width=512")
POSIX_FLAGS = ("-fPIC", "-lpthread", "-lm")
LINUX_FLAGS = (*POSIX_FLAGS, "-s")  # else the library contains debug information of the C library, with paths of the machine that built it
WINDOWS_FLAGS = ("-s",)  # the compiler brings pthreads for Windows and links them into the library
SUFFIXES = {"win32": "dll", "darwin": "dylib"}  # others: so
PLATFORM_VARIABLE = "PACELINE_BUILD_PLATFORM"


class KernelBuild(BuildHookInterface):  # type: ignore[type-arg]
    """Put `kernels.<level>.so` (macOS: `.dylib`, Windows: `.dll`) next to the runtime that loads it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        sources = sorted(str(file) for file in (root / NATIVE / "kernels").glob("*.c"))
        requested = os.environ.get(PLATFORM_VARIABLE)
        system, machine = requested.split("-") if requested else this_platform()
        target, tag = _oldest_system(system, machine, is_this=not requested)
        flags = (*target, *FLAGS, *{"win32": WINDOWS_FLAGS, "darwin": POSIX_FLAGS}.get(system, LINUX_FLAGS))
        for level, instructions in levels(system, machine).items():
            library = root / NATIVE / f"kernels.{level}.{SUFFIXES.get(system, 'so')}"
            unfinished = library.with_suffix(".part")
            with tempfile.TemporaryDirectory() as folder:  # on Windows the linker leaves more than the library
                built = Path(folder, library.name)
                command = [sys.executable, "-m", "ziglang", "cc", *flags, *instructions, *sources, "-o", str(built)]
                if system == "darwin":  # else the library contains the temporary path
                    command.append(f"-Wl,-install_name,@rpath/{library.name}")
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode and requested:
                    raise RuntimeError(f"{library.name} cannot be compiled for {requested}: {done.stderr.strip()}")
                if done.returncode:
                    self.app.display_warning(f"no native kernels for {level}: {done.stderr.strip()}")
                    continue
                shutil.copyfile(built, unfinished)
            unfinished.replace(library)
            build_data["artifacts"].append(str(NATIVE / library.name))
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{tag}"


def this_platform() -> tuple[str, str]:
    """Return `sys.platform` and the machine's name in the compiler's words."""
    return sys.platform, {"AMD64": "x86_64", "arm64": "aarch64", "ARM64": "aarch64"}.get(platform.machine(), platform.machine())


def levels(system: str, machine: str) -> dict[str, tuple[str, ...]]:
    """Return the compiler's flags for each instruction set that gets a library, fastest first."""
    return {level: flags for level, flags in LEVELS.get(machine, {}).items() if level not in LEFT_OUT.get(system, ())}


def _oldest_system(system: str, machine: str, *, is_this: bool) -> tuple[tuple[str, ...], str]:
    """Return the compiler's flags that name the oldest system the libraries run on, and the wheel's tag for it."""
    if system == "win32":
        return ("-target", f"{machine}-windows-gnu"), {"x86_64": "win_amd64", "aarch64": "win_arm64"}.get(machine, "")
    if system == "darwin":
        return ("-target", f"{machine}-macos.11.0"), f"macosx_11_0_{'arm64' if machine == 'aarch64' else machine}"
    if not is_this or platform.libc_ver()[0] == "glibc":
        return ("-target", f"{machine}-linux-gnu.2.17"), f"manylinux2014_{machine}.manylinux_2_17_{machine}"
    return (), sysconfig.get_platform().replace("-", "_").replace(".", "_")  # systems like this one
