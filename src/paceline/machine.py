"""Reads the number of processors, their instruction sets and the memory of the machine. Limits of a container (cgroup) apply."""

import ctypes
import os
import platform
import subprocess
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")  # directory of all cgroups
MEMBERSHIP = Path("/proc/self/cgroup")  # file that lists the cgroups of this process
CPU_INFO = Path("/proc/cpuinfo")
CPU_DEVICES = Path("/sys/devices/system/cpu")
DEFAULT_MEMORY_BYTES = 8 << 30  # default if the system does not report its memory


def usable_processors() -> int:
    """Return the number of processors that this process may use, by its CPU affinity and the CPU quotas of its cgroups."""
    count, quota = len(_affinity()) or os.cpu_count() or 1, processor_quota()
    return count if quota is None else max(1, min(count, int(quota)))


def _affinity() -> Collection[int]:
    """Return the numbers of the processors on which this process may run; empty if the system does not report them."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()


def performance_processors() -> int:
    """Return how many of the usable processors are not slow ones, where the system reports that: the default number of threads.

    All threads wait for the last piece of an operation, even if it is on a slow processor. Slow are those with less than half of the
    highest capacity (Linux on Arm), and the efficiency cores of a Mac.

    Source: the kernel's Documentation/devicetree/bindings/arm/cpu-capacity.txt; sysctl(3) of macOS, hw.perflevel0.
    """
    if platform.system() == "Darwin":
        fast = _sysctl("hw.perflevel0.physicalcpu")
        return min(usable_processors(), int(fast)) if fast.isdigit() and int(fast) else usable_processors()
    words = [_words(CPU_DEVICES / f"cpu{number}" / "cpu_capacity") for number in _affinity()]
    capacities = [int(word[0]) if word and word[0].isdigit() else 0 for word in words]
    num_fast = sum(2 * capacity >= max(capacities) for capacity in capacities)
    return min(usable_processors(), num_fast) if num_fast else usable_processors()


def available_memory_bytes() -> int:
    """Return the memory that can be allocated without swapping and within the limits of this process's cgroups."""
    _, free = _system_memory_bytes()
    left = memory_left_bytes()
    return min(amount for amount in (free, left) if amount is not None)


def total_memory_bytes(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the memory of the machine, or the limit of a cgroup of this process if that is less."""
    total, _ = _system_memory_bytes()
    return min([total, *(limit for limit, _, _ in _memory_limits(cgroups, membership))])


def peak_memory_bytes() -> int:
    """Return the most memory that this process has held; 0 on Windows."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def private_memory_bytes() -> int:
    """Return the memory of this process without mapped files, which the system can take back; elsewhere than on Linux the most it held."""
    found = [int(line.split()[1]) * 1024 for line in _lines(Path("/proc/self/status")) if line.startswith("RssAnon:")]
    return found[0] if found else peak_memory_bytes()


def return_free_memory() -> None:
    """Return to the system the free memory that glibc keeps in heaps; elsewhere nothing happens."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _system_memory_bytes() -> tuple[int, int]:
    """Return the memory of the machine and what of it is free or can be freed without swapping.

    Source: macOS's memory_pressure(1), which prints kern.memorystatus_level, a percentage; sysinfoapi.h, GlobalMemoryStatusEx.
    """
    if platform.system() == "Darwin":
        total, level = _sysctl("hw.memsize"), _sysctl("kern.memorystatus_level")
        if total.isdigit() and level.isdigit():
            return int(total), int(total) * int(level) // 100
    elif platform.system() == "Windows":
        status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: its size and the load in the first 64 bits, then seven sizes
        if vars(ctypes)["windll"].kernel32.GlobalMemoryStatusEx(status):
            return status[1], status[2]
    amounts = [_read_number(Path("/proc/meminfo"), name, 1024) for name in ("MemTotal:", "MemAvailable:")]
    total_on_linux, free = (DEFAULT_MEMORY_BYTES if amount is None else amount for amount in amounts)
    return total_on_linux, free


def processor_quota(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Return the CPU quota of this process's cgroups in processors, such as 1.5; None = no quota.

    Source: the kernel's Documentation/admin-guide/cgroup-v2.rst (cpu.max) and scheduler/sched-bwc.rst (version 1).
    """
    shares = []
    for directory in _cgroup_directories("cpu", cgroups, membership):
        words = [*_words(directory / "cpu.max"), *_words(directory / "cpu.cfs_quota_us"), *_words(directory / "cpu.cfs_period_us")]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:  # "max" or -1 = no quota
            shares.append(int(words[0]) / int(words[1]))
    return min(shares, default=None)


def memory_left_bytes(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Return how many bytes can be allocated within the limits of this process's cgroups, cached files not counted; None = no limit."""
    left = [limit - usage + cached for limit, usage, cached in _memory_limits(cgroups, membership)]
    return max(0, min(left)) if left else None


def _memory_limits(cgroups: Path, membership: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (limit, usage, cached file pages) in bytes for each cgroup of this process that limits memory."""
    for directory in _cgroup_directories("memory", cgroups, membership):
        for limit_name, usage_name, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _words(directory / limit_name), _words(directory / usage_name)
            if limit and usage and limit[0].isdigit() and usage[0].isdigit() and int(limit[0]) < 1 << 60:
                yield int(limit[0]), int(usage[0]), _read_number(directory / "memory.stat", cached, 1) or 0


def _cgroup_directories(controller: str, cgroups: Path, membership: Path) -> Iterator[Path]:
    """Yield the directories of this process's cgroups that may contain limits of a controller ("cpu" or "memory"), up to the root."""
    for line in _lines(membership):
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "/")
        if controllers == "":  # cgroup version 2
            bases = [cgroups, cgroups / "unified"]
        elif controller in controllers.split(","):
            bases = [cgroups / controllers, cgroups / controller]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for base in bases:
            for count in range(len(parts), -1, -1):
                yield base.joinpath(*parts[:count])


def _read_number(path: Path, name: str, unit: int) -> int | None:
    """Return the number after `name` at the beginning of a line, times `unit`; None = there is no such line."""
    for line in _lines(path):
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1]) * unit
    return None


def _words(path: Path) -> Sequence[str]:
    return [word for line in _lines(path) for word in line.split()]


def _lines(path: Path) -> Sequence[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ()


def processor_flags() -> frozenset[str]:
    """Return the names of the processor's instruction sets as in Linux's /proc/cpuinfo; empty if they are unknown."""
    if platform.system() == "Darwin":
        return _flags_on_macos()
    if platform.system() == "Windows":
        return _flags_on_windows()
    if platform.machine() == "aarch64":
        return _flags_of_linux_on_arm()
    line = next((line for line in _lines(CPU_INFO) if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def _flags_of_linux_on_arm() -> frozenset[str]:
    """Return those flags that kernels are compiled for. Emulators set them, while /proc/cpuinfo may be that of the emulating machine.

    Source: the kernel's arch/arm64/include/uapi/asm/hwcap.h and include/uapi/linux/auxvec.h (AT_HWCAP, AT_HWCAP2).
    """
    try:
        auxiliary_value = ctypes.CDLL(None).getauxval
    except (OSError, AttributeError):
        return frozenset()
    auxiliary_value.restype, auxiliary_value.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    known = (("asimd", 16, 1), ("asimddp", 16, 20), ("i8mm", 26, 13))
    return frozenset(name for name, word, bit in known if auxiliary_value(word) >> bit & 1)


def _flags_on_macos() -> frozenset[str]:
    if platform.machine() == "arm64":
        flags = {"asimd", "asimddp"}  # all Macs with an ARM processor have these; macOS 11 does not report them
        return frozenset(flags | {"i8mm"} if _sysctl("hw.optional.arm.FEAT_I8MM") == "1" else flags)
    words = f"{_sysctl('machdep.cpu.features')} {_sysctl('machdep.cpu.leaf7_features')}".lower().split()
    return frozenset("avx512_vnni" if word == "avx512vnni" else word for word in words)


def _sysctl(name: str) -> str:
    """Return a value of the system on macOS as text; empty if there is none of this name."""
    try:
        return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _flags_on_windows() -> frozenset[str]:
    """Return the instruction sets that Windows reports, of those the kernels use: AVX2, AVX-512 and what comes with them, or Arm's.

    Windows reports neither VNNI nor bfloat16. `native/library.py` reads these from the processor.

    Source: winnt.h, PF_AVX2_INSTRUCTIONS_AVAILABLE, PF_AVX512F_INSTRUCTIONS_AVAILABLE, PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE and
    PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE.
    """
    is_present = vars(ctypes)["windll"].kernel32.IsProcessorFeaturePresent
    if platform.machine() == "ARM64":
        return frozenset({"asimd"} | {name for name, number in (("asimddp", 43), ("i8mm", 66)) if is_present(number)})
    flags = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"} if is_present(40) else set()
    return frozenset(flags | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"} if is_present(41) else flags)


def processor_model() -> str:
    """Return the name of the processor for reports."""
    names = [line.partition(":")[2].strip() for line in _lines(CPU_INFO) if line.startswith("model name")]
    return next(filter(None, names), "") or platform.processor() or platform.machine()


def processor_name() -> str:
    """Return a text that identifies the processor model and its instruction sets."""
    prefixes = ("model name", "flags", "Features", "CPU part")
    lines = {f"{line}\n" for line in _lines(CPU_INFO) if line.startswith(prefixes)}
    return "".join(sorted(lines)) or platform.processor()
