"""Reads the number of processors, their instruction sets and the memory of the machine. Limits of a container (cgroup) apply."""

import ctypes
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")  # directory of all cgroups
MEMBERSHIP = Path("/proc/self/cgroup")  # file that lists the cgroups of this process
CPU_INFO = Path("/proc/cpuinfo")
DEFAULT_MEMORY_BYTES = 8 << 30  # default if the system does not report its memory


def usable_processors() -> int:
    """Return the number of processors that this process may use, by its CPU affinity and the CPU quotas of its cgroups."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = processor_quota()
    return count if quota is None else max(1, min(count, int(quota)))


def available_memory_bytes() -> int:
    """Return the memory that can be allocated without swapping and within the limits of this process's cgroups."""
    free = _read_number(Path("/proc/meminfo"), "MemAvailable:", 1024)
    left = memory_left_bytes()
    return min(amount for amount in (DEFAULT_MEMORY_BYTES if free is None else free, left) if amount is not None)


def total_memory_bytes(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the memory of the machine, or the limit of a cgroup of this process if that is less."""
    installed = _read_number(Path("/proc/meminfo"), "MemTotal:", 1024)
    limits = [limit for limit, _, _ in _memory_limits(cgroups, membership)]
    return min([DEFAULT_MEMORY_BYTES if installed is None else installed, *limits])


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
    line = next((line for line in _lines(CPU_INFO) if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())


def _flags_on_macos() -> frozenset[str]:
    if platform.machine() == "arm64":
        return frozenset({"asimd", "asimddp"})  # all ARM processors of Apple have these
    command = ["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return frozenset()
    return frozenset(done.stdout.lower().split())


def _flags_on_windows() -> frozenset[str]:
    """Return AVX2, AVX-512 and the instruction sets that come with them. Windows does not report VNNI and bfloat16.

    Source: winnt.h, PF_AVX2_INSTRUCTIONS_AVAILABLE and PF_AVX512F_INSTRUCTIONS_AVAILABLE.
    """
    is_present = vars(ctypes)["windll"].kernel32.IsProcessorFeaturePresent
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
