"""What this machine's processor can compute, read from the system without importing a library that computes."""

import platform


def processor_flags() -> frozenset[str]:
    """Instruction sets as Linux names them; elsewhere only those that all of Apple's own processors have."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return frozenset({"asimd", "asimddp"} if (platform.system(), platform.machine()) == ("Darwin", "arm64") else ())
    return frozenset(line.partition(":")[2].split())


def processor_name() -> str:
    """A line that differs between processors that compute differently."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            wanted = ("model name", "flags", "Features", "CPU part")
            return "".join(sorted({line for line in lines if line.startswith(wanted)}))
    except OSError:
        return platform.processor()


def multiplies_bf16() -> bool:
    """Whether bf16 products are native."""
    return not processor_flags().isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})
