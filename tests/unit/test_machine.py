"""What a process may use: the system's own answer, and the limits of its cgroups, of either version, its own or an ancestor's."""

import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paceline import machine
from paceline.machine import (
    available_memory_bytes,
    memory_left_bytes,
    performance_processors,
    private_memory_bytes,
    processor_quota,
    total_memory_bytes,
    usable_processors,
)

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("membership", "files", "wanted"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "200000 100000\n"}, 0.5),
        ("0::/docker/of/the/host\n", {"cpu.max": "300000 100000\n"}, 3.0),
        ("4:cpu,cpuacct:/x\n", {"cpu,cpuacct/x/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/x/cpu.cfs_period_us": "100000\n"}, 2.5),
        ("2:cpuacct:/\n1:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("0::/../..\n", {"cpu.max": "100000 0\n"}, None),
        ("0::/\n", {"cpu.max": "nonsense\n"}, None),
        ("", {}, None),
        ("no colons here\n", {}, None),
    ],
)
def test_processor_quota_is_the_tightest_of_the_cgroups(tmp_path: Path, membership: str, files: dict[str, str], wanted: float) -> None:
    root = write(tmp_path / "cgroup", files)
    write(tmp_path, {"self": membership})
    assert processor_quota(root, tmp_path / "self") == wanted


def test_missing_cgroup_files_mean_no_limit(tmp_path: Path) -> None:
    assert processor_quota(tmp_path / "absent", tmp_path / "none") is None
    assert memory_left_bytes(tmp_path / "absent", tmp_path / "none") is None


@pytest.mark.parametrize(
    ("membership", "files", "wanted"),
    [
        (
            "0::/\n",
            {"memory.max": f"{4 * GIB}\n", "memory.current": f"{3 * GIB}\n", "memory.stat": f"anon 5\ninactive_file {GIB}\n"},
            2 * GIB,
        ),
        ("0::/\n", {"memory.max": "max\n", "memory.current": f"{GIB}\n"}, None),
        ("0::/\n", {"memory.max": f"{GIB}\n", "memory.current": f"{2 * GIB}\n"}, 0),
        (
            "4:memory:/a\n",
            {
                "memory/a/memory.limit_in_bytes": f"{6 * GIB}\n",
                "memory/a/memory.usage_in_bytes": f"{GIB}\n",
                "memory/a/memory.stat": "total_inactive_file 0\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": f"{9 * GIB}\n",
            },
            5 * GIB,
        ),
    ],
)
def test_memory_left_is_that_of_the_tightest_cgroup_limit(
    tmp_path: Path, membership: str, files: dict[str, str], wanted: int | None
) -> None:
    root = write(tmp_path / "cgroup", files)
    write(tmp_path, {"self": membership})
    assert memory_left_bytes(root, tmp_path / "self") == wanted


@pytest.mark.parametrize(("quota", "wanted"), [(None, 8), (0.3, 1), (1.9, 1), (2.0, 2), (99.0, 8)])
def test_cgroup_quota_caps_the_usable_processors(quota: float | None, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "processor_quota", lambda: quota)
    assert usable_processors() == wanted


def test_cgroup_limit_caps_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 << 24 < available_memory_bytes() < 1 << 50
    monkeypatch.setattr(machine, "memory_left_bytes", lambda: 12_345)
    assert available_memory_bytes() == 12_345


@pytest.mark.parametrize(
    ("capacities", "wanted"),
    [([1024] * 4, 4), ([250] * 4 + [768] * 3 + [1024], 4), ([], 8), ([512, 1024], 2), ([0] * 8, 8)],
)
def test_linux_performance_processors_have_half_the_capacity(
    tmp_path: Path, capacities: list[int], wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {f"cpu{number}/cpu_capacity": f"{capacity}\n" for number, capacity in enumerate(capacities)})
    monkeypatch.setattr(machine, "CPU_DEVICES", tmp_path)
    monkeypatch.setattr(machine, "processor_quota", lambda: None)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(len(capacities) or 8)), raising=False)
    assert performance_processors() == wanted


def sysctl(values: dict[str, str]) -> Callable[..., SimpleNamespace]:
    """A command that prints the values of a Mac, and nothing for other names."""
    return lambda command, **_: SimpleNamespace(stdout=values.get(command[-1], "") + "\n")


def test_macos_performance_cores_and_memory_come_from_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(machine, "usable_processors", lambda: 10)
    values = {"hw.perflevel0.physicalcpu": "4", "hw.memsize": str(24 * GIB), "kern.memorystatus_level": "75"}
    monkeypatch.setattr(machine.subprocess, "run", sysctl(values))
    monkeypatch.setattr(machine, "_memory_limits", lambda *_: iter(()))
    assert (performance_processors(), total_memory_bytes(), available_memory_bytes()) == (4, 24 * GIB, 18 * GIB)
    monkeypatch.setattr(machine.subprocess, "run", sysctl({}))
    assert performance_processors() == 10


def test_windows_memory_comes_from_the_system_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(status: list[int]) -> int:
        status[1], status[2] = 24 * GIB, 18 * GIB
        return 1

    monkeypatch.setattr(machine.platform, "system", lambda: "Windows")
    kernel32 = SimpleNamespace(GlobalMemoryStatusEx=fill)
    monkeypatch.setattr(machine.ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    monkeypatch.setattr(machine, "_memory_limits", lambda *_: iter(()))
    assert (total_memory_bytes(), available_memory_bytes()) == (24 * GIB, 18 * GIB)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell mapped pages apart")
def test_private_memory_counts_arrays_and_no_mapped_files(tmp_path: Path) -> None:
    size = 64_000_000
    np.full(size, 1, np.uint8).tofile(tmp_path / "file")
    before = private_memory_bytes()
    mapped = np.memmap(tmp_path / "file", np.uint8, "r")
    assert mapped.sum() == size
    assert private_memory_bytes() - before < size / 2
    before = private_memory_bytes()
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:  # an array could take memory that earlier tests freed
        held.write(bytes(size))
        assert private_memory_bytes() - before > size / 2
