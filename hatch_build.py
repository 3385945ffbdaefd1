"""Compiles the native runtime's kernels while the package is built: one library per instruction set of this machine's kind.

The compiler comes as a build dependency (the `ziglang` package holds clang), so none has to be installed. Where it cannot compile,
the package is built without kernels and the other runtimes serve.
"""

import platform
import subprocess
import sys
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
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {"x86_64": X86_64, "AMD64": X86_64, "aarch64": ARM_64, "arm64": ARM_64}
FLAGS = ("-std=c17", "-O3", "-g0", "-shared", "-fPIC", "-ffp-contract=off", "-mprefer-vector-width=512", "-lpthread", "-lm")


class KernelBuild(BuildHookInterface):  # type: ignore[type-arg]
    """Puts `kernels.<level>.so` beside the runtime that loads it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if sys.platform == "win32" or self.target_name != "wheel":
            return
        root = Path(self.root)
        sources = sorted(str(file) for file in (root / NATIVE / "kernels").glob("*.c"))
        for level, machine in LEVELS.get(platform.machine(), {}).items():
            library = root / NATIVE / f"kernels.{level}.so"
            unfinished = library.with_suffix(".part")
            command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, *machine, *sources, "-o", str(unfinished)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                self.app.display_warning(f"no native kernels for {level}: {done.stderr.strip()}")
                continue
            unfinished.replace(library)
            build_data["artifacts"].append(str(NATIVE / library.name))
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
