"""What a processor can do is read from the flags the system lists."""

import io
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline import machine as processor
from paceline.runtimes.native import library

X86 = "processor\t: 0\nmodel name\t: A Processor\nflags\t\t: fpu sse avx2 {}\n\nprocessor\t: 1\nflags\t\t: amx_bf16\n"
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd {}\nCPU part\t: 0xd40\n"


def pretend(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    def opened(path: str, **options: str) -> io.StringIO:
        assert Path(path) == Path("/proc/cpuinfo")
        if text is None:
            raise FileNotFoundError(path)
        return io.StringIO(text)

    monkeypatch.setattr(processor, "open", opened, raising=False)


@pytest.mark.parametrize("text", [X86, ARM])
def test_flags_are_those_of_the_first_processor_listed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, text.format("avx512_bf16 bf16"))
    assert {"avx512_bf16", "bf16"} <= processor.processor_flags()
    assert "amx_bf16" not in processor.processor_flags()


def test_without_a_list_nothing_is_taken_for_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    assert processor.processor_flags() == frozenset()
    assert isinstance(processor.processor_name(), str)


def test_on_macos_the_system_is_asked_and_apples_own_processors_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_on_windows_the_system_is_asked(features: set[int], level: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel32 = SimpleNamespace(IsProcessorFeaturePresent=lambda number: int(number in features))
    monkeypatch.setattr(processor.ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    monkeypatch.setattr(processor.platform, "system", lambda: "Windows")
    monkeypatch.setattr(library.Path, "is_file", lambda path: True)
    path = library.kernels_path()
    assert path is None if level is None else path is not None and path.name == f"kernels.{level}.dll"


def test_processors_that_differ_in_a_flag_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for text in (X86.format("avx512f"), X86.format("avx512_bf16"), ARM.format("bf16")):
        pretend(monkeypatch, text)
        names.add(processor.processor_name())
    assert len(names) == 3
