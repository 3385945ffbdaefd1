"""What this machine's processor can compute, read from the system without importing a library that computes."""

import ctypes
import platform
import subprocess


def processor_flags() -> frozenset[str]:
    """Instruction sets as Linux names them; none where the system does not tell."""
    if platform.system() == "Darwin":
        return _flags_on_macos()
    if platform.system() == "Windows":
        return _flags_on_windows()
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return frozenset()
    return frozenset(line.partition(":")[2].split())


def _flags_on_macos() -> frozenset[str]:
    if platform.machine() == "arm64":
        return frozenset({"asimd", "asimddp"})  # every processor of Apple's has them
    command = ["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return frozenset()
    return frozenset(done.stdout.lower().split())


def _flags_on_windows() -> frozenset[str]:
    """Those of AVX2 and of AVX-512, with what every processor has that has these. Of VNNI and bfloat16 Windows says nothing.

    Source: winnt.h, PF_AVX2_INSTRUCTIONS_AVAILABLE and PF_AVX512F_INSTRUCTIONS_AVAILABLE.
    """
    is_present = vars(ctypes)["windll"].kernel32.IsProcessorFeaturePresent
    flags = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"} if is_present(40) else set()
    return frozenset(flags | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"} if is_present(41) else flags)


def processor_name() -> str:
    """A line that differs between processors that compute differently."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            wanted = ("model name", "flags", "Features", "CPU part")
            return "".join(sorted({line for line in lines if line.startswith(wanted)}))
    except OSError:
        return platform.processor()
