"""What this machine's processor can compute, read from the system without importing a library that computes."""

import platform
import subprocess


def processor_flags() -> frozenset[str]:
    """Instruction sets as Linux names them; none where neither it nor macOS runs."""
    if platform.system() == "Darwin":
        return _flags_on_macos()
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


def processor_name() -> str:
    """A line that differs between processors that compute differently."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            wanted = ("model name", "flags", "Features", "CPU part")
            return "".join(sorted({line for line in lines if line.startswith(wanted)}))
    except OSError:
        return platform.processor()
