"""What a processor can do is read from the flags the system lists."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline import machine as processor
from paceline.runtimes.native import library

X86 = "processor\t: 0\nmodel name\t: A Processor\nflags\t\t: fpu sse avx2 {}\n\nprocessor\t: 1\nflags\t\t: amx_bf16\n"
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd {}\nCPU part\t: 0xd40\n"


def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text, encoding="ascii")
    monkeypatch.setattr(processor, "CPU_INFO", path)


@pytest.mark.parametrize("text", [X86, ARM])
def test_processor_flags_are_those_of_the_first_processor_listed(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, tmp_path, text.format("avx512_bf16 bf16"))
    assert {"avx512_bf16", "bf16"} <= processor.processor_flags()
    assert "amx_bf16" not in processor.processor_flags()


def test_processor_flags_without_cpuinfo_are_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, tmp_path, None)
    assert processor.processor_flags() == frozenset()
    assert isinstance(processor.processor_name(), str)


def test_processor_flags_on_macos_come_from_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(processor.platform, "machine", lambda: "arm64")
    assert library._REQUIRED_FLAGS["armv8_dotprod"] <= processor.processor_flags()
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    said = "FPU FMA MOVBE AVX1.0 F16C\nBMI1 AVX2 BMI2 SGX\n"
    monkeypatch.setattr(processor.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, said))
    assert library._REQUIRED_FLAGS["x86_64_v3"] <= processor.processor_flags()

    def run(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(processor.subprocess, "run", run)
    assert processor.processor_flags() == frozenset()


@pytest.mark.parametrize(("features", "level"), [({40}, "x86_64_v3"), ({40, 41}, "x86_64_v4"), (set(), None)])
def test_processor_flags_on_windows_come_from_the_system_call(
    features: set[int], level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel32 = SimpleNamespace(IsProcessorFeaturePresent=lambda number: int(number in features))
    monkeypatch.setattr(processor.ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    monkeypatch.setattr(processor.platform, "system", lambda: "Windows")
    monkeypatch.setattr(library.Path, "is_file", lambda path: True)
    path = library.kernels_path()
    assert path is None if level is None else path is not None and path.name == f"kernels.{level}.dll"


def test_processor_name_depends_on_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for text in (X86.format("avx512f"), X86.format("avx512_bf16"), ARM.format("bf16")):
        pretend(monkeypatch, tmp_path, text)
        names.add(processor.processor_name())
    assert len(names) == 3
