"""What a built wheel is called and holds: one for each platform, for every Python."""

import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draw_imports import PACKAGE, REPOSITORY

pytest.importorskip("hatchling")
NATIVE = "paceline/runtimes/native"
PAGE = PACKAGE / "server" / "page"
ARM_64 = {"armv8", "armv8_dotprod", "armv8_i8mm"}
X86_64 = {"x86_64_v3", "x86_64_v3_vnni", "x86_64_v4", "x86_64_v4_vnni", "x86_64_v4_bf16"}
Build = Callable[..., Path]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Builds a copy of this project without its models; the compiler is replaced by one that writes down how it was called."""
    root = tmp_path / "paceline"
    shutil.copytree(REPOSITORY / "src", root / "src", ignore=shutil.ignore_patterns("mini", "*.so", "*.dylib", "*.dll", "__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(REPOSITORY / name, root / name)
    monkeypatch.chdir(root)

    def build(system: str, machine: str, libc: str = "", *, is_sdist: bool = False, compiles: bool = True) -> Path:
        def compile_one(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
            if compiles:
                Path(command[command.index("-o") + 1]).write_text(" ".join(command))
            return subprocess.CompletedProcess(command, 0 if compiles else 1, "", "no such target")

        from hatchling.builders.sdist import SdistBuilder
        from hatchling.builders.wheel import WheelBuilder

        monkeypatch.setattr("subprocess.run", compile_one)
        monkeypatch.setattr("platform.machine", lambda: machine)
        monkeypatch.setattr("platform.libc_ver", lambda: (libc, "2.36"))
        monkeypatch.setattr("sys.platform", system)
        builder = SdistBuilder(str(root)) if is_sdist else WheelBuilder(str(root))
        (artifact,) = builder.build(directory=str(tmp_path / "dist"), versions=["standard"])
        return Path(artifact)

    return build


def kernels_of(wheel: Path) -> dict[str, str]:
    """How each library was compiled, by the level of instructions it is for."""
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name).decode() for name in archive.namelist() if name.endswith((".so", ".dylib", ".dll"))}
    assert all(name.startswith(f"{NATIVE}/kernels.") for name in found)
    return {name.removeprefix(f"{NATIVE}/kernels.").rpartition(".")[0]: command for name, command in found.items()}


def tags_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        return sorted(line.removeprefix("Tag: ") for line in archive.read(name).decode().splitlines() if line.startswith("Tag: "))


PLATFORMS = {
    "Linux on x86-64": (("linux", "x86_64", "glibc"), ["manylinux2014_x86_64", "manylinux_2_17_x86_64"], "x86_64-linux-gnu.2.17", X86_64),
    "Linux on Arm": (
        ("linux", "aarch64", "glibc"),
        ["manylinux2014_aarch64", "manylinux_2_17_aarch64"],
        "aarch64-linux-gnu.2.17",
        ARM_64,
    ),
    "macOS on Arm": (("darwin", "arm64"), ["macosx_11_0_arm64"], "aarch64-macos.11.0", {"armv8_i8mm", "armv8_dotprod"}),
    "macOS on x86-64": (
        ("darwin", "x86_64"),
        ["macosx_11_0_x86_64"],
        "x86_64-macos.11.0",
        {"x86_64_v3", "x86_64_v4", "x86_64_v4_vnni"},
    ),
    "Windows on x86-64": (("win32", "AMD64"), ["win_amd64"], "x86_64-windows-gnu", X86_64),
    "Windows on Arm": (("win32", "ARM64"), ["win_arm64"], "aarch64-windows-gnu", ARM_64),
}


@pytest.mark.parametrize("name", PLATFORMS)
def test_wheel_is_tagged_for_one_platform_and_any_python_3(build: Build, name: str) -> None:
    built_on, platforms, target, levels = PLATFORMS[name]
    wheel = build(*built_on)
    assert tags_of(wheel) == [f"py3-none-{platform}" for platform in platforms]
    assert all(platform in wheel.name for platform in platforms)
    kernels = kernels_of(wheel)
    assert set(kernels) == levels
    assert all(f" -target {target} " in command for command in kernels.values())


def test_wheel_contains_the_package_and_no_temporary_files(build: Build) -> None:
    with zipfile.ZipFile(build("linux", "x86_64", "glibc")) as archive:
        names = set(archive.namelist())
    sources = {path.relative_to(REPOSITORY / "src").as_posix() for path in (REPOSITORY / "src").rglob("*.py") if "mini" not in path.parts}
    assert sources <= names
    assert {"paceline/py.typed", f"{NATIVE}/kernels/linear.c"} <= names
    page = {path.relative_to(REPOSITORY / "src").as_posix() for path in PAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert (
        {f"{PAGE.relative_to(REPOSITORY / 'src').as_posix()}/{name}" for name in ("web/index.html", "vendor/preact.mjs")} <= page <= names
    )
    assert not any(name.endswith(".part") or name.startswith(("tests", "tools")) for name in names)


def test_wheel_without_glibc_has_a_native_tag(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_platform", lambda: "linux-x86_64")
    wheel = build("linux", "x86_64", "")
    assert tags_of(wheel) == ["py3-none-linux_x86_64"]
    assert not any("-target" in command for command in kernels_of(wheel).values())


def test_wheel_without_kernels_is_for_any_platform(build: Build) -> None:
    wheel = build("linux", "riscv64", "glibc")
    assert (tags_of(wheel), kernels_of(wheel)) == (["py3-none-any"], {})


def test_wheel_is_built_without_kernels_if_the_compiler_fails(build: Build) -> None:
    wheel = build("linux", "x86_64", "glibc", compiles=False)
    assert (tags_of(wheel), kernels_of(wheel)) == (["py3-none-any"], {})


def test_wheel_for_another_platform_has_all_libraries_or_fails(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_BUILD_PLATFORM", "darwin-aarch64")
    wheel = build("linux", "x86_64", "glibc")
    assert (tags_of(wheel), set(kernels_of(wheel))) == (["py3-none-macosx_11_0_arm64"], {"armv8_i8mm", "armv8_dotprod"})
    with pytest.raises(RuntimeError, match=r"kernels\.armv8_i8mm\.dylib cannot be compiled for darwin-aarch64: no such target"):
        build("linux", "x86_64", "glibc", compiles=False)


def test_source_distribution_contains_what_a_wheel_build_needs(build: Build) -> None:
    import tarfile

    with tarfile.open(build("linux", "x86_64", "glibc", is_sdist=True)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"hatch_build.py", "pyproject.toml", f"src/{NATIVE}/kernels/linear.c", "src/paceline/cli/__init__.py"} <= names
    assert not any(name.endswith(".so") for name in names)


def test_wheel_licence_names_the_licences_of_all_bundled_libraries(build: Build) -> None:
    with zipfile.ZipFile(build("linux", "x86_64", "glibc")) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
        held = {name.rpartition("/")[2] for name in archive.namelist() if "/licenses/" in name}
    (expression,) = (line.removeprefix("License-Expression: ") for line in lines if line.startswith("License-Expression: "))
    told = (PAGE / "vendor" / "README.md").read_text(encoding="utf-8")
    chosen = told.replace("MPL-2.0 OR Apache-2.0", "Apache-2.0")
    named = set(re.findall(r"\b(?:MIT|BSD-\d-Clause|Apache-2\.0|ISC|MPL-2\.0)\b", chosen))
    assert set(expression.split(" AND ")) == named | {"Apache-2.0"}
    assert held == {"LICENSE", *(path.name for path in (PAGE / "vendor").glob("*.LICENSE"))}
