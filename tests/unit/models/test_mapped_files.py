"""Mapped files that become shorter are noticed before anything behind their new end is read."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline.errors import CheckpointError
from paceline.models.mapped_files import MappedFiles
from paceline.models.safetensors_file import map_file, read_header, view_tensor


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.bin"
    path.write_bytes(bytes(20_000))
    return path


def test_a_file_is_known_through_any_views_of_it_and_once(path: Path) -> None:
    whole = map_file(path)
    views = [whole, whole[100:200], whole[8:8008].view("<f4").reshape(2, 1000)[1:], whole[:4000].view("<u2")[::2].T]
    assert len(MappedFiles(views)) == 1
    assert len(MappedFiles([np.zeros(3), whole[:40].copy(), whole[1:41].view("<f8").astype(np.float32), np.empty(0)])) == 0


@pytest.mark.parametrize("left", [0, 1, 4096, 19_999])
def test_a_file_that_was_cut_short_is_named(path: Path, left: int) -> None:
    files = MappedFiles([map_file(path)[50:90]])
    files.check()
    os.truncate(path, left)
    with pytest.raises(CheckpointError, match=rf"model\.bin has {left} bytes and had 20000 when it was opened"):
        files.check()


def test_a_file_that_grows_is_replaced_or_removed_is_still_there(path: Path) -> None:
    files = MappedFiles([map_file(path)])
    with path.open("ab") as file:
        file.write(b"more")
    files.check()
    other = path.with_name("other")
    other.write_bytes(b"short")
    other.replace(path)  # as downloads do
    files.check()
    path.unlink()
    files.check()


def test_looking_takes_microseconds(path: Path) -> None:
    files = MappedFiles([map_file(path)])
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            files.check()
        times.append((time.perf_counter() - start) / 100)
    assert min(times) < 20e-6


def test_a_file_that_shrinks_between_header_and_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(1000, np.float32)}, path)
    stored = read_header(path)["a"]
    os.truncate(path, 2000)
    with pytest.raises(CheckpointError, match="less than when it was opened"):
        view_tensor(stored, map_file(path), np.dtype("<f4"))
