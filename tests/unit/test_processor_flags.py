"""What a processor can do is read from the flags the system lists."""

import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline import machine as processor
from paceline.runtimes.native import library

X86 = "processor\t: 0\nmodel name\t: A Processor\nflags\t\t: fpu sse avx2 {}\n\nprocessor\t: 1\nflags\t\t: amx_bf16\n"
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd {}\nCPU part\t: 0xd40\n"


@pytest.fixture
def cpu_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is read instead of /proc/cpuinfo, on a simulated Linux machine with x86-64."""
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(processor, "CPU_INFO", path)
    monkeypatch.setattr(processor.platform, "system", lambda: "Linux")
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    return path


def test_processor_flags_are_those_of_the_first_processor_listed(cpu_info: Path) -> None:
    cpu_info.write_text(X86.format("avx512_bf16 bf16"))
    assert processor.processor_flags() == {"fpu", "sse", "avx2", "avx512_bf16", "bf16"}


@pytest.mark.parametrize(
    ("capabilities", "others", "level"),
    [
        (0b11, 0, "armv8"),
        (1 << 20 | 0b11, 0, "armv8_dotprod"),
        (1 << 20 | 0b11, 1 << 13, "armv8_i8mm"),
        (0b11, 1 << 13, "armv8"),
        (1, 1 << 13, None),
    ],
)
def test_processor_flags_on_arm_come_from_getauxval(
    capabilities: int, others: int, level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor.platform, "system", lambda: "Linux")
    monkeypatch.setattr(processor.platform, "machine", lambda: "aarch64")
    values = {16: capabilities, 26: others}
    monkeypatch.setattr(processor.ctypes, "CDLL", lambda name: SimpleNamespace(getauxval=Getauxval(values)))
    assert library.supported_levels()[:1] == ([] if level is None else [level])
    monkeypatch.setattr(processor.ctypes, "CDLL", lambda name: object())  # a C library without getauxval
    assert processor.processor_flags() == frozenset()


class Getauxval:
    """A function of ctypes that returns fixed values."""

    def __init__(self, values: dict[int, int]) -> None:
        self._values = values

    def __call__(self, kind: int) -> int:
        return self._values[kind]


def test_processor_flags_without_cpuinfo_are_empty(cpu_info: Path) -> None:
    assert processor.processor_flags() == frozenset()
    assert isinstance(processor.processor_name(), str)


def test_processor_flags_on_macos_come_from_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(processor.platform, "machine", lambda: "arm64")
    values = {"hw.optional.arm.FEAT_I8MM": ""}
    monkeypatch.setattr(
        processor.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, f"{values[command[-1]]}\n")
    )
    assert library.supported_levels() == ["armv8_dotprod", "armv8"]
    values["hw.optional.arm.FEAT_I8MM"] = "1"
    assert library.supported_levels() == ["armv8_i8mm", "armv8_dotprod", "armv8"]
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    values |= {
        "machdep.cpu.features": "FPU FMA MOVBE AVX1.0 F16C",
        "machdep.cpu.leaf7_features": "BMI1 AVX2 BMI2 AVX512F AVX512DQ AVX512CD AVX512BW AVX512VL AVX512VNNI",
    }
    assert library.supported_levels() == ["x86_64_v4_vnni", "x86_64_v4", "x86_64_v3"]

    def run(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(processor.subprocess, "run", run)
    assert processor.processor_flags() == frozenset()


@pytest.mark.parametrize(
    ("machine", "features", "level"),
    [
        ("AMD64", {40}, "x86_64_v3"),
        ("AMD64", {40, 41}, "x86_64_v4"),
        ("AMD64", set(), None),
        ("ARM64", set(), "armv8"),
        ("ARM64", {43}, "armv8_dotprod"),
        ("ARM64", {43, 66}, "armv8_i8mm"),
    ],
)
def test_processor_flags_on_windows_come_from_the_system_call(
    machine: str, features: set[int], level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel32 = SimpleNamespace(IsProcessorFeaturePresent=lambda number: int(number in features))
    monkeypatch.setattr(processor.ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    monkeypatch.setattr(processor.platform, "system", lambda: "Windows")
    monkeypatch.setattr(processor.platform, "machine", lambda: machine)
    monkeypatch.setattr(library, "_read_cpuid_flags", lambda path: frozenset())
    monkeypatch.setattr(library.Path, "is_file", lambda path: True)
    path = library.kernels_path()
    assert path is None if level is None else path is not None and path.name == f"kernels.{level}.dll"


def test_flags_read_by_cpuid_are_those_of_cpuinfo() -> None:
    path = library.kernels_path()
    if path is None or platform.machine() != "x86_64" or platform.system() != "Linux":
        pytest.skip("needs kernels and /proc/cpuinfo of an x86-64 processor")
    names = {name for name, *_ in library._CPUID_FLAGS}
    assert library._read_cpuid_flags(path) == processor.processor_flags() & names


def test_processor_name_depends_on_the_flags(cpu_info: Path) -> None:
    names = set()
    for text in (X86.format("avx512f"), X86.format("avx512_bf16"), ARM.format("bf16")):
        cpu_info.write_text(text)
        names.add(processor.processor_name())
    assert len(names) == 3
