"""The machine's processors, their instruction sets and its memory, within the limits of a container (cgroup)."""

import ctypes
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
UNKNOWN_MEMORY = 8 << 30


def usable_processors() -> int:
    """Processors this process may keep busy: those it may run on, and no more than its cgroups' quotas allow."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = processor_quota()
    return count if quota is None else max(1, min(count, int(quota)))


def available_memory_bytes() -> int:
    """Memory that can be had without swapping, and without passing a cgroup's limit; 8 GiB where the system does not tell."""
    free = _field(Path("/proc/meminfo"), "MemAvailable:", 1024)
    left = memory_left_bytes()
    return min(amount for amount in (UNKNOWN_MEMORY if free is None else free, left) if amount is not None)


def total_memory_bytes(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Memory of the machine, or the limit of a cgroup of this process where that is less; 8 GiB where the system does not tell."""
    installed = _field(Path("/proc/meminfo"), "MemTotal:", 1024)
    limits = [limit for limit, _, _ in _memory_limits(cgroups, membership)]
    return min([UNKNOWN_MEMORY if installed is None else installed, *limits])


def processor_quota(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Processors' worth of time that the cgroups of this process allow, 1.5 say; None without a quota.

    Source: the kernel's Documentation/admin-guide/cgroup-v2.rst (cpu.max) and scheduler/sched-bwc.rst (version 1).
    """
    shares = []
    for directory in _directories("cpu", cgroups, membership):
        words = [*_words(directory / "cpu.max"), *_words(directory / "cpu.cfs_quota_us"), *_words(directory / "cpu.cfs_period_us")]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:  # "max" and -1 are no quota
            shares.append(int(words[0]) / int(words[1]))
    return min(shares, default=None)


def memory_left_bytes(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes until the first of this process's cgroups meets its limit, file pages that can be dropped not counted; None without one."""
    left = [limit - usage + cached for limit, usage, cached in _memory_limits(cgroups, membership)]
    return max(0, min(left)) if left else None


def _memory_limits(cgroups: Path, membership: Path) -> Iterator[tuple[int, int, int]]:
    """Limit, usage and file pages that can be dropped, in bytes, of each cgroup of this process that limits memory."""
    for directory in _directories("memory", cgroups, membership):
        for limit_name, usage_name, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _words(directory / limit_name), _words(directory / usage_name)
            if limit and usage and limit[0].isdigit() and usage[0].isdigit() and int(limit[0]) < 1 << 60:
                yield int(limit[0]), int(usage[0]), _field(directory / "memory.stat", cached, 1) or 0


def _directories(controller: str, cgroups: Path, membership: Path) -> Iterator[Path]:
    """The directories of this process's cgroups that a controller may limit, up to the root; a container sees its own as the root."""
    for line in _lines(membership):
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "/")
        if controllers == "":  # version 2
            bases = [cgroups, cgroups / "unified"]
        elif controller in controllers.split(","):
            bases = [cgroups / controllers, cgroups / controller]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for base in bases:
            for count in range(len(parts), -1, -1):
                yield base.joinpath(*parts[:count])


def _field(path: Path, name: str, unit: int) -> int | None:
    """The number behind a name at the beginning of a line."""
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
    """Return the instruction sets of the processor by Linux's names; empty if the system does not list them."""
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
        return frozenset({"asimd", "asimddp"})  # all of Apple's processors have them
    command = ["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return frozenset()
    return frozenset(done.stdout.lower().split())


def _flags_on_windows() -> frozenset[str]:
    """Return the flags of AVX2 and AVX-512 and those that come with them. Windows does not report VNNI and bfloat16.

    Source: winnt.h, PF_AVX2_INSTRUCTIONS_AVAILABLE and PF_AVX512F_INSTRUCTIONS_AVAILABLE.
    """
    is_present = vars(ctypes)["windll"].kernel32.IsProcessorFeaturePresent
    flags = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"} if is_present(40) else set()
    return frozenset(flags | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"} if is_present(41) else flags)


def processor_name() -> str:
    """Return a text that differs between processors that may compute differently."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            prefixes = ("model name", "flags", "Features", "CPU part")
            return "".join(sorted({line for line in lines if line.startswith(prefixes)}))
    except OSError:
        return platform.processor()
