"""A checkpoint's small files: read within limits, and a CheckpointError whatever they are and hold."""

import errno
import json
import os
import socket
import time
import tracemalloc
from pathlib import Path

import pytest

from paceline.errors import CheckpointError
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.storage.safetensors_file import read_header
from paceline.small_files import CONFIG_BYTES, MAX_VALUES, json_object, open_regular_file, read_json, read_small, write_atomically

MAX_SECONDS = 3.0
MAX_BYTES = 300_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.json"


def test_reading_a_missing_small_file_returns_none(path: Path) -> None:
    assert read_small(path, 10) is None
    assert read_json(path) is None
    assert read_json(path / "below" / "it") is None
    path.symlink_to(path.with_name("nowhere"))
    assert read_json(path) is None


def test_reading_a_small_file_follows_links(path: Path) -> None:
    path.with_name("blob").write_text('{"a": 1}')
    path.symlink_to("blob")
    assert read_json(path) == {"a": 1}


@pytest.mark.parametrize("kind", ["pipe", "linked pipe", "zeros", "terminal", "socket", "directory"])
def test_reading_a_pipe_or_device_as_a_small_file_is_refused_at_once(kind: str, path: Path) -> None:
    own = path.with_name("it")
    if "pipe" in kind:
        os.mkfifo(own)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            os.chdir(own.parent)
            listening.bind(own.name)
    elif kind == "directory":
        own.mkdir()
    else:
        own = Path("/dev/zero" if kind == "zeros" else "/dev/tty")
    path.symlink_to(own)
    start = time.perf_counter()
    for read in (read_json, open_regular_file, lambda it: read_small(it, 100)):
        with pytest.raises(CheckpointError, match=r"config\.json is a (pipe|device|socket|directory), expected a regular file"):
            read(path)
    assert time.perf_counter() - start < 1.0


def test_pipe_in_place_of_any_checkpoint_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"config\.json is a pipe"):
        read_model_config(tmp_path)
    os.unlink(tmp_path / "config.json")
    values = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**values, "num_attention_heads": 2, "dtype": "float32"}))
    os.mkfifo(tmp_path / "generation_config.json")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is a pipe"):
        read_model_config(tmp_path)
    os.unlink(tmp_path / "generation_config.json")
    config = read_model_config(tmp_path)
    os.unlink(tmp_path / "model.safetensors")
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match=r"index\.json is a pipe, expected a regular file"):
        open_weights(tmp_path, config)
    with pytest.raises(CheckpointError, match="is a pipe"):
        read_header(tmp_path / "model.safetensors.index.json")


def test_small_file_over_its_size_limit_is_refused_unread(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # no disk holds it
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=f"more than the {CONFIG_BYTES} bytes"):
        read_json(path)
    assert tracemalloc.get_traced_memory()[1] < 3 * CONFIG_BYTES
    tracemalloc.stop()


HOSTILE = {
    "nothing": b"",
    "an array": b"[1]",
    "not UTF-8": b'{"a": "\xff"}',
    "not JSON": b"{'a': 1}",
    "deep arrays": b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep enough to fail later": b'{"a":' + b"[" * 900 + b"]" * 900 + b"}",
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "unclosed": b'{"a":' * 100_000,
    "many values": b'{"a":[' + b"[]," * (MAX_VALUES + 1) + b"1]}",
    "many objects": b'{"a":[' + b'{"b":0},' * (MAX_VALUES // 2 + 1) + b"1]}",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_json_file_is_refused_in_bounded_time_and_memory(content: bytes) -> None:
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"^the file"):
        json_object(content, "the file")
    assert time.perf_counter() - start < MAX_SECONDS
    assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    tracemalloc.stop()


@pytest.mark.long
def test_largest_allowed_json_file_is_parsed_in_bounded_memory() -> None:
    for content in (b'{"a":[' + b"{}," * (MAX_VALUES // 2 - 3) + b"1]}", b'{"a":[' + b"9" * 19 + b",1" * (MAX_VALUES - 3) + b"]}"):
        tracemalloc.start()
        json_object(content, "the file")
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
        tracemalloc.stop()


def test_huge_json_integers_become_floats_fast() -> None:
    start = time.perf_counter()
    values = json_object(b'{"a": ' + b"9" * 3_000_000 + b', "b": -123456789012345678901234567890, "c": 18446744073709551615}', "it")
    assert time.perf_counter() - start < 1.0
    assert values == {"a": float("inf"), "b": -123456789012345678901234567890.0, "c": 2**64 - 1}
    assert isinstance(values["c"], int)


def header_file(path: Path, header: bytes) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    return path


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":{"dtype":"F32","shape":[' + b"9," * 400_000 + b'9],"data_offsets":[0,64]}}',
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 800_000 + b'],"data_offsets":[0,64]}}',
        b'{"a":{"dtype":"F32","shape":[' + b",".join([b"9" * 4000] * 200) + b'],"data_offsets":[0,64]}}',
        b'{"a":{"dtype":"F32","shape":[' + b",".join([b"9" * 18] * 8) + b'],"data_offsets":[0,64]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,' + b"9" * 800_000 + b"]}}",
        b'{"a":' + b"[" * 800_000 + b"]" * 800_000 + b"}",
        b"{" + b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % index for index in range(300_000)) + b"}",
    ],
    ids=["many dimensions", "a long size", "long sizes", "sizes", "a long offset", "depth", "many tensors"],
)
def test_hostile_safetensors_header_is_refused_in_bounded_time(header: bytes, tmp_path: Path) -> None:
    path = header_file(tmp_path / "model.safetensors", header)
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        read_header(path)
    assert time.perf_counter() - start < MAX_SECONDS
    assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    assert len(str(caught.value)) < 4100
    tracemalloc.stop()


def test_safetensors_header_of_20000_tensors_is_accepted(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.mlp.experts.{index}.gate_proj.weight" for layer in range(200) for index in range(100)]
    entries = {name: {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]} for name in names}
    assert len(read_header(header_file(tmp_path / "model.safetensors", json.dumps(entries).encode()))) == 20_000


def test_failed_atomic_write_leaves_the_old_content_and_no_part(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_part(file: Path, content: str, encoding: str) -> None:
        file.write_bytes(content[:1].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    path.write_bytes(b"old")
    monkeypatch.setattr(Path, "write_text", write_part)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert [(file.name, file.read_bytes()) for file in path.parent.iterdir()] == [(path.name, b"old")]
