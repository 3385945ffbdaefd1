"""Build the source distribution and the wheels of all platforms on one machine, check them and print a table (`make wheels`).

    python tools/build_wheels.py DIRECTORY [--only darwin-aarch64 …] [--compare]

Wheels are built from the source distribution, so it is complete. Each library is checked for its processor, the oldest system that can load
it, the system libraries that it needs and, for macOS on Arm, its signature. With --compare everything is built a second time with an empty
compiler cache: the files must be equal. Needs build, hatchling, ziglang, lief, auditwheel and twine.
"""

import argparse
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lief

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from hatch_build import NATIVE, PLATFORM_VARIABLE, SUFFIXES, levels  # noqa: E402

PLATFORMS = [f"{system}-{machine}" for system in ("linux", "darwin", "win32") for machine in ("x86_64", "aarch64")]
TAGS = {
    "linux": "manylinux2014_{machine}.manylinux_2_17_{machine}",
    "darwin": "macosx_11_0_{machine}",
    "win32": "win_{machine}",
}  # as in file names
MACHINE_TAGS = {("darwin", "aarch64"): "arm64", ("win32", "aarch64"): "arm64", ("win32", "x86_64"): "amd64"}
GLIBC = (2, 17)
EXPORTS = {"paceline_layout", "paceline_run", "paceline_sample_paths"}
# what a library may load: parts of the system itself
SYSTEM_LIBRARIES = {
    "linux": r"lib(c|m|pthread)\.so\.\d|ld-linux-(x86-64|aarch64)\.so\.\d",
    "darwin": r"/usr/lib/libSystem\.B\.dylib",
    "win32": r"KERNEL32\.dll|api-ms-win-crt-[a-z]+-l1-1-0\.dll",
}


def build(arguments: Sequence[str], folder: Path, environment: dict[str, str]) -> Path:
    """Run `python -m build` without an environment of its own, and return the file that it wrote to `folder`."""
    before = set(folder.iterdir())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    (built,) = set(folder.iterdir()) - before
    return built


def build_all(folder: Path, platforms: Sequence[str], environment: dict[str, str]) -> list[Path]:
    """Return the source distribution, then the wheel of each platform."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [build(["--sdist", str(ROOT)], folder, environment)]
    for platform in platforms:
        with tempfile.TemporaryDirectory() as temporary:
            with tarfile.open(files[0]) as archive:
                archive.extractall(temporary, filter="data")
            (source,) = Path(temporary).iterdir()
            files.append(build(["--wheel", str(source)], folder, {**environment, PLATFORM_VARIABLE: platform}))
    return files


def check_wheel(wheel: Path, platform: str) -> tuple[dict[str, int], list[str]]:
    """Return the size of each library by its instruction set, and what is wrong with the wheel."""
    system, machine = platform.split("-")
    tag = TAGS[system].format(machine=MACHINE_TAGS.get((system, machine), machine))
    faults = [] if wheel.name.endswith(f"-py3-none-{tag}.whl") else [f"its tag is not {tag}"]
    prefix, suffix = f"{NATIVE.relative_to('src').as_posix()}/kernels.", f".{SUFFIXES.get(system, 'so')}"
    with zipfile.ZipFile(wheel) as archive:
        held = [name for name in archive.namelist() if re.search(r"\.(so|dylib|dll|part|pyd)$", name)]
        libraries = {name.removeprefix(prefix).removesuffix(suffix): archive.read(name) for name in held}
    if list(libraries) != sorted(levels(system, machine)):
        faults.append(f"it holds {held}")
    faults += [f"{level}: {fault}" for level, content in libraries.items() for fault in check_library(content, system, machine)]
    return {level: len(content) for level, content in libraries.items()}, faults


def check_library(content: bytes, system: str, machine: str) -> list[str]:
    """Return what is wrong with a library."""
    binary: Any = lief.parse(content)
    if isinstance(binary, lief.ELF.Binary):
        found = ("linux", {"X86_64": "x86_64", "AARCH64": "aarch64"}.get(binary.header.machine_type.name))
        needed, exported = binary.libraries, {symbol.name for symbol in binary.exported_symbols}
        versions = [version.name for requirement in binary.symbols_version_requirement for version in requirement.get_auxiliary_symbols()]
        faults = [f"it needs {one}" for one in versions if tuple(map(int, one.removeprefix("GLIBC_").split("."))) > GLIBC]
    elif isinstance(binary, lief.MachO.Binary):
        found = ("darwin", {"X86_64": "x86_64", "ARM64": "aarch64"}.get(binary.header.cpu_type.name))
        needed = [one.name for one in binary.libraries if not one.name.startswith("@rpath/")]  # its own name
        exported = {symbol.name.removeprefix("_") for symbol in binary.exported_symbols}
        faults = [] if tuple(binary.build_version.minos)[:2] == (11, 0) else [f"it needs macOS {binary.build_version.minos}"]
        if machine == "aarch64":  # processors of Apple load signed code only
            faults += check_signature(content, binary.code_signature)
    else:
        found = ("win32", {"AMD64": "x86_64", "ARM64": "aarch64"}.get(binary.header.machine.name))
        needed, exported = [one.name for one in binary.imports], {entry.name for entry in binary.get_export().entries}
        faults = []
    faults += [f"it contains the path {path}" for path in (ROOT, tempfile.gettempdir()) if f"{path}{os.sep}".encode() in content]
    if found != (system, machine):
        faults.append(f"it is for {found}")
    faults += [f"it loads {one}" for one in needed if not re.fullmatch(SYSTEM_LIBRARIES[system], one, re.IGNORECASE)]
    return faults + [f"it does not export {name}" for name in sorted(EXPORTS - exported)]


def check_signature(content: bytes, command: Any) -> list[str]:
    """Return what is wrong with an ad hoc signature: it has the SHA-256 of each page of the file up to the signature itself.

    Source: xnu's osfmk/kern/cs_blobs.h (CS_SuperBlob, CS_CodeDirectory).
    """
    if command is None:
        return ["it is not signed"]
    blob = content[command.data_offset : command.data_offset + command.data_size]
    (count,) = struct.unpack_from(">I", blob, 8)
    (at,) = (offset for kind, offset in (struct.unpack_from(">II", blob, 12 + 8 * i) for i in range(count)) if kind == 0)
    magic, _, _, flags, first, _, _, num_pages, signed_bytes = struct.unpack_from(">9I", blob, at)
    hash_size, hash_type, _, page_bits = struct.unpack_from(">4B", blob, at + 36)
    if (magic, flags & 2, hash_size, hash_type, signed_bytes) != (0xFADE0C02, 2, 32, 2, command.data_offset):
        return ["its signature is not an ad hoc one with SHA-256 of the whole file"]
    pages = [content[begin : min(begin + (1 << page_bits), signed_bytes)] for begin in range(0, signed_bytes, 1 << page_bits)]
    stored = [blob[at + first + 32 * i : at + first + 32 * (i + 1)] for i in range(num_pages)]
    return [] if [hashlib.sha256(page).digest() for page in pages] == stored else ["its signature is of another content"]


def run_checkers(files: Sequence[Path]) -> list[str]:
    """Run twine on all files and auditwheel on the wheels for Linux; return what they object to."""
    commands = [[sys.executable, "-m", "twine", "check", "--strict", *map(str, files)]]
    commands += [[sys.executable, "-m", "auditwheel", "show", str(file)] for file in files if "manylinux" in file.name]
    faults = []
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        output = " ".join((done.stdout + done.stderr).split())
        if done.returncode or ("auditwheel" in command and "manylinux_2_17" not in output):
            faults.append(f"{command[2]} {command[-1]}: {output}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="for the files; may hold others")
    parser.add_argument("--only", nargs="+", choices=PLATFORMS, default=PLATFORMS, help="leave other platforms out")
    parser.add_argument("--compare", action="store_true", help="build everything a second time and compare")
    options = parser.parse_args()
    committed = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    environment = {"SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or subprocess.check_output(committed, text=True).strip()}
    with tempfile.TemporaryDirectory() as temporary:
        built = build_all(Path(temporary, "first"), options.only, environment)
        faults = run_checkers(built)
        print(f"{built[0].name}  {built[0].stat().st_size / 1e6:.1f} MB")
        for wheel, platform in zip(built[1:], options.only, strict=True):
            sizes, wrong = check_wheel(wheel, platform)
            faults += [f"{wheel.name}: {fault}" for fault in wrong]
            libraries = ", ".join(f"{level} {size / 1e3:.0f} kB" for level, size in sizes.items())
            print(f"{wheel.name}  {wheel.stat().st_size / 1e6:.1f} MB  {libraries}")
        if options.compare:
            caches = {name: str(Path(temporary, "cache")) for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
            again = build_all(Path(temporary, "second"), options.only, {**environment, **caches})
            pairs = zip(built, again, strict=True)
            faults += [f"{one.name}: a second build differs" for one, other in pairs if one.read_bytes() != other.read_bytes()]
        if not faults:
            options.directory.mkdir(parents=True, exist_ok=True)
            for file in built:
                shutil.move(file, options.directory / file.name)
    print("\n".join(faults) or f"{len(built)} files{', equal in two builds' if options.compare else ''}: {options.directory}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
