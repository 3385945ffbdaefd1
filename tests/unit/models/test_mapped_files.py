"""Truncation of mapped files is detected before anything after their new end is read."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline.errors import CheckpointError
from paceline.models.storage.mapped_files import MappedFiles, drop_pages, map_file
from paceline.models.storage.safetensors_file import read_header, view_tensor


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.bin"
    path.write_bytes(bytes(20_000))
    return path


def test_mapped_files_are_found_once_through_any_views(path: Path) -> None:
    whole = map_file(path)
    views = [whole, whole[100:200], whole[8:8008].view("<f4").reshape(2, 1000)[1:], whole[:4000].view("<u2")[::2].T]
    assert len(MappedFiles(views)) == 1
    assert len(MappedFiles([np.zeros(3), whole[:40].copy(), whole[1:41].view("<f8").astype(np.float32), np.empty(0)])) == 0


@pytest.mark.parametrize("left", [0, 1, 4096, 19_999])
def test_truncated_mapped_file_is_named(path: Path, left: int) -> None:
    files = MappedFiles([map_file(path)[50:90]])
    files.check_not_truncated()
    os.truncate(path, left)
    with pytest.raises(CheckpointError, match=rf"model\.bin has {left} bytes and had 20000 when it was opened"):
        files.check_not_truncated()


def test_mapped_file_that_grows_or_is_replaced_passes_the_check(path: Path) -> None:
    files = MappedFiles([map_file(path)])
    with path.open("ab") as file:
        file.write(b"more")
    files.check_not_truncated()
    other = path.with_name("other")
    other.write_bytes(b"short")
    other.replace(path)  # as downloads do
    files.check_not_truncated()
    path.unlink()
    files.check_not_truncated()


def test_checking_mapped_files_takes_microseconds(path: Path) -> None:
    files = MappedFiles([map_file(path)])
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            files.check_not_truncated()
        times.append((time.perf_counter() - start) / 100)
    assert min(times) < 20e-6


def test_file_truncated_between_header_and_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(1000, np.float32)}, path)
    stored = read_header(path)["a"]
    os.truncate(path, 2000)
    with pytest.raises(CheckpointError, match="less than when it was opened"):
        view_tensor(stored, map_file(path), np.dtype("<f4"))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell which pages of a file are in memory")
def test_released_pages_of_a_mapped_file_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    values = np.random.default_rng(0).integers(0, 256, 8 << 20, np.uint8)
    path.write_bytes(values.tobytes())
    mapped = map_file(path)
    first, second = mapped[: 4 << 20].reshape(1024, -1), mapped[4 << 20 :].view("<f4").reshape(512, -1)
    assert np.array_equal(mapped, values)
    assert resident_bytes(path) == 8 << 20
    drop_pages([first[:, :100]])
    assert 1 << 20 <= resident_bytes(path) < 5 << 20  # the system may take more at once
    drop_pages([second[::2], np.zeros(3), np.empty(0), first[:0]])
    assert resident_bytes(path) < 1 << 18
    assert np.array_equal(mapped, values)


def resident_bytes(path: Path) -> int:
    """Of a mapped file, in this process."""
    found, is_own = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split()[0]:
            is_own = line.endswith(str(path))
        elif is_own and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found
