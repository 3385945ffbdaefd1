"""The GGUF container: what a file holds is found as the format's own library wrote it, and damage is named."""

import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM
from paceline.errors import CheckpointError
from paceline.models.checkpoint import is_gguf, open_weights, read_model_config, weight_files
from paceline.models.gguf.file import open_gguf
from paceline.models.gguf.header import MAX_ARRAY_ITEMS, MAX_TEXT_BYTES

gguf = pytest.importorskip("gguf")

VALUES: dict[str, tuple[str, Any]] = {
    "u8": ("uint8", 255),
    "i8": ("int8", -128),
    "u16": ("uint16", 65535),
    "i16": ("int16", -32768),
    "u32": ("uint32", 2**32 - 1),
    "i32": ("int32", -(2**31)),
    "u64": ("uint64", 2**64 - 1),
    "i64": ("int64", -(2**63)),
    "f32": ("float32", 0.25),
    "f64": ("float64", 0.1),
    "bool": ("bool", True),
    "string": ("string", "Grüße 你好"),
    "texts": ("array", ["a", "", "é", "<0x0A>"]),
    "numbers": ("array", [1, -2, 3]),
    "floats": ("array", [0.5, -1.0]),
    "bools": ("array", [True, False]),
    "nested": ("array", [[1, 2], [3]]),
}


def write(path: Path, tensors: dict[str, np.ndarray] | None = None, *, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, (kind, value) in VALUES.items():
        getattr(writer, f"add_{kind}")(f"test.{key}", value)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_metadata_values_of_every_type_are_read(tmp_path: Path) -> None:
    metadata = open_gguf(write(tmp_path / "model.gguf")).metadata
    assert {key: metadata[f"test.{key}"] for key in VALUES} == {key: value for key, (_, value) in VALUES.items()}
    assert set(metadata) == {"general.architecture", *(f"test.{key}" for key in VALUES)}
    assert "test.absent" not in metadata
    assert metadata.get("test.absent") is None


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_gguf_tensors_are_views_of_the_file_with_rows_first(tmp_path: Path, alignment: int | None) -> None:
    arrays = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.arange(5, dtype=np.float16), "c": np.ones((2, 3, 4), np.float32)}
    tensors = open_gguf(write(tmp_path / "model.gguf", arrays, alignment=alignment)).tensors
    assert list(tensors) == list(arrays)
    for name, array in arrays.items():
        assert tensors[name].shape == array.shape
        assert np.array_equal(tensors[name].data.view(array.dtype).reshape(array.shape), array)
        assert tensors[name].data.base is not None


def test_gguf_vocabulary_files_of_llama_cpp_open(shared_dir: Path, large_counts: bool) -> None:
    paths = sorted((shared_dir / "data" / "tokenizers" / "ggml-vocab").glob("*.gguf"))
    if not paths:
        pytest.skip("no GGUF files in ../shared")
    found = {path: open_gguf(path).metadata for path in paths}
    assert all(len(metadata["tokenizer.ggml.tokens"]) > 30_000 for metadata in found.values())
    smallest = min(paths, key=lambda path: path.stat().st_size)
    for path in [smallest] if large_counts else []:  # the format's own library takes minutes to read all of them
        fields = gguf.GGUFReader(path).fields
        assert dict(found[path]) == {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}


DAMAGE: dict[str, tuple[int, str, int, str]] = {
    "another format": (0, "<I", 0x04034B50, r"begins with b'PK\\x03\\x04' instead of b'GGUF'"),
    "an old version": (4, "<I", 1, "GGUF version 1, supported are 2 and 3, little-endian"),
    "a big-endian file": (4, "<I", 3 << 24, "GGUF version 50331648, supported are 2 and 3, little-endian"),
    "too many tensors": (8, "<Q", 2**40, r"1099511627776 tensors in a file of \d+ bytes, at most \d+ are possible"),
    "too many keys": (16, "<Q", 2**63, r"metadata keys in a file of \d+ bytes, at most \d+ are possible"),
    "a huge key": (24, "<Q", 2**40, "'a metadata key' at byte 32 has 1099511627776 bytes, at most 1024 are possible"),
    "an unknown type of value": (24 + 8 + len("general.architecture"), "<I", 13, "has a value of type 13, expected 0 to 12"),
    "a text beyond the end": (24 + 8 + len("general.architecture") + 4, "<Q", 2**20, r"needs 1048576 bytes of a file of \d+"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_gguf_header_is_named(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "model.gguf", {"a": np.ones((3, 4), np.float32)})
    position, layout, number, text = DAMAGE[kind]
    data = bytearray(path.read_bytes())
    struct.pack_into(layout, data, position, number)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=text) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)


def damaged_tensor(path: Path, field: int, number: int) -> Path:
    """A file of tensors `aaaa` [3, 4] and `bbbb` [8] in which a field of the second entry is changed."""
    write(path, {"aaaa": np.ones((3, 4), np.float32), "bbbb": np.ones(8, np.float32)})
    data = bytearray(path.read_bytes())
    start = data.index(b"bbbb") + 4
    layout = "<I" if field in (0, 12) else "<Q"
    struct.pack_into(layout, data, start + field, number)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("field", "number", "text"),
    [
        (0, 5, "tensor 'bbbb' has 5 dimensions, expected 1 to 4"),
        (0, 0, "tensor 'bbbb' has 0 dimensions, expected 1 to 4"),
        (4, 0, r"tensor 'bbbb' has shape \[0\]; every size must be at least 1"),
        (4, 2**62, r"tensor 'bbbb' of type F32 and shape \[4611686018427387904\] is at bytes \d+ to \d+ of \d+"),
        (12, 4, "tensor 'bbbb' is of unknown type 4"),
        (12, 8, r"tensor 'bbbb' has shape \[8\]; .* rows of type Q8_0 a multiple of 32"),
        (16, 8, "tensor 'bbbb' is at offset 8, which is no multiple of the alignment 32"),
        (16, 0, "tensors 'aaaa' and 'bbbb' overlap|tensors 'bbbb' and 'aaaa' overlap"),
        (16, 2**63, r"tensor 'bbbb' of type F32 and shape \[8\] is at bytes \d+ to \d+ of \d+"),
    ],
)
def test_damaged_gguf_tensor_entry_is_named(tmp_path: Path, field: int, number: int, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        open_gguf(damaged_tensor(tmp_path / "model.gguf", field, number))


def test_duplicate_gguf_tensor_names_and_metadata_keys_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", {"aaaa": np.ones(8, np.float32), "aaab": np.ones(8, np.float32)})
    path.write_bytes(path.read_bytes().replace(b"aaab", b"aaaa"))
    with pytest.raises(CheckpointError, match="tensor 'aaaa' appears twice"):
        open_gguf(path)
    path.write_bytes(path.read_bytes().replace(b"test.u8", b"test.i8"))
    with pytest.raises(CheckpointError, match=r"metadata key 'test\.i8' appears twice"):
        open_gguf(path)


def test_gguf_metadata_text_that_is_not_utf8_is_refused_on_access(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace("Grüße".encode(), b"Gr\xff\xff\xc3\x9fe"))
    metadata = open_gguf(path).metadata
    with pytest.raises(CheckpointError, match=r"'test.string' at byte \d+ is not UTF-8 text"):
        metadata["test.string"]


def test_gguf_metadata_arrays_nested_too_deep_are_refused(tmp_path: Path) -> None:
    """A few bytes could otherwise cause any depth of recursion."""
    depth = 10_000
    key = b"deep"
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<I", 9)
    data += struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 0, 0)
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="'deep' nests arrays more than 4 deep"):
        open_gguf(path)


@pytest.mark.parametrize("size", [0, 3, 23])
def test_gguf_file_too_short_for_its_header_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF".ljust(size, b"\0")[:size])
    with pytest.raises(CheckpointError, match=f"has {size} bytes, a GGUF file has at least 24"):
        open_gguf(path)


def test_missing_parts_of_a_split_gguf_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "model-00002-of-00003.gguf")
    with pytest.raises(CheckpointError, match=r"lacks 2 of 3 parts: model-00001-of-00003\.gguf, model-00003-of-00003\.gguf"):
        open_gguf(path)
    with pytest.raises(CheckpointError, match="names part 00004 of 00003"):
        open_gguf(write(tmp_path / "model-00004-of-00003.gguf"))


def test_split_gguf_parts_of_different_models_are_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / f"model-0000{number}-of-00002.gguf", {"a": np.ones(8, np.float32)})
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.gguf holds tensor 'a' a second time"):
        open_gguf(tmp_path / "model-00001-of-00002.gguf")
    assert len(weight_files(tmp_path / "model-00001-of-00002.gguf")) == 2


def test_checkpoint_must_be_a_directory_or_a_gguf_file(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    assert is_gguf(path)
    assert not is_gguf(tmp_path)
    other = tmp_path / "model.safetensors"
    other.touch()
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: give a directory .* or a \*\.gguf file"):
        read_model_config(other)


LLAMA: dict[str, int | float | list[int]] = {
    "context_length": 128,
    "embedding_length": 64,
    "block_count": 1,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def write_llama(
    path: Path, *, architecture: str = "llama", without: str = "", extra: dict[str, np.ndarray] | None = None, **changes: Any
) -> Path:
    """A file with the metadata of a one-layer llama and zeros for weights."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**LLAMA, **{key.replace("__", "."): value for key, value in changes.items()}}.items():
        kind = (
            "float32"
            if isinstance(value, float)
            else "string"
            if isinstance(value, str)
            else "array"
            if isinstance(value, list)
            else "int64"
        )
        if key != without:
            getattr(writer, f"add_{kind}")(f"{architecture}.{key}", value)
    shapes = {"token_embd": (50, 64), "output_norm": (64,), "blk.0.attn_norm": (64,), "blk.0.ffn_norm": (64,)}
    shapes |= {"blk.0.attn_q": (64, 64), "blk.0.attn_k": (32, 64), "blk.0.attn_v": (32, 64), "blk.0.attn_output": (64, 64)}
    shapes |= {"blk.0.ffn_gate": (96, 64), "blk.0.ffn_up": (96, 64), "blk.0.ffn_down": (64, 96)}
    arrays = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for name, array in {**arrays, **(extra or {})}.items():
        if name != without:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def open_both(path: Path) -> None:
    open_weights(path, read_model_config(path))


def test_llama_gguf_file_opens_with_scalar_and_array_metadata(tmp_path: Path) -> None:
    open_both(write_llama(tmp_path / "model.gguf"))
    open_both(write_llama(tmp_path / "arrays.gguf", feed_forward_length=[96], attention__head_count_kv=[2]))
    open_both(write_llama(tmp_path / "neutral.gguf", logit_scale=1.0, expert_group_count=1, attn_logit_softcapping=0.0))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architecture": "mamba"}, "holds architecture 'mamba', which is not supported; supported are .*llama.*qwen2"),
        ({"without": "context_length"}, "has no metadata llama.context_length: get a newer conversion"),
        ({"embedding_length": 0}, "llama.embedding_length = 0, expected a number above 0"),
        ({"embedding_length": "64"}, "llama.embedding_length = '64', expected a number above 0"),
        ({"embedding_length": 32}, r"token_embd.weight has shape \[50, 64\], expected \[vocabulary, 32\]"),
        ({"block_count": 2**30}, "llama.block_count = 1073741824, expected at most the number of tensors, 11"),
        ({"attention__head_count_kv": [2, 1]}, r"llama.attention.head_count_kv = \[2, 1\], expected the same whole number"),
        ({"attention__head_count_kv": 3}, "llama.attention.head_count = 4 must be a multiple of llama.attention.head_count_kv = 3"),
        ({"attention__value_length": 8}, "llama.attention.value_length = 8, expected the size of keys, 16"),
        ({"rope__dimension_count": 32}, "llama.rope.dimension_count = 32, expected at most the head size, 16"),
        ({"rope__scaling__type": "odd"}, "rope.scaling.type = 'odd' is not supported, only none, linear, yarn and longrope are"),
        ({"attention__temperature_scale": 0.1}, "llama.attention.temperature_scale = 0.1 is not supported for llama, only 0.0 is"),
        ({"final_logit_softcapping": 30.0}, "llama.final_logit_softcapping = 30.0 is not supported for llama, only 0.0 is"),
        ({"embedding_scale": 12.0}, "llama.embedding_scale = 12.0 is not supported for llama, only 0.0 and 1.0 are"),
        ({"rope__freq_base": float("nan")}, "llama.rope.freq_base = nan, expected a number above 0"),
        ({"extra": {"rope_freqs.weight": np.zeros(8, np.float32)}}, "rope_freqs.weight holds a value that is not finite and above 0"),
        (
            {"extra": {"rope_freqs.weight": np.ones(4, np.float32)}},
            r"rope_freqs.weight is of type F32 and shape \[4\], expected F32 .*\[8\]",
        ),
        (
            {"extra": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}},
            "holds 1 tensor: blk.0.attn_sinks.weight that a llama model does not",
        ),
        ({"without": "blk.0.ffn_up.weight"}, "lacks 1 tensor: blk.0.ffn_up.weight that its metadata requires"),
        ({"feed_forward_length": 48}, r"tensor 'blk.0.ffn_gate.weight' has shape \[96, 64\], but the metadata requires \[48, 64\]"),
    ],
)
def test_gguf_tensors_unlike_the_metadata_are_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    path = write_llama(tmp_path / "model.gguf", **changes)
    with pytest.raises(CheckpointError, match=text) as caught:
        open_both(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("architecture", "text"), [("mamba", "holds architecture 'mamba'"), ("llama", "has no tokenizer.ggml.model")])
def test_unsupported_network_is_reported_before_its_tokenizer(tmp_path: Path, architecture: str, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        LLM(str(write_llama(tmp_path / "model.gguf", architecture=architecture)))


def test_unsupported_gguf_block_type_is_refused_before_conversion(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf", extra={"token_embd.weight": np.zeros((50, 64), np.int32)})
    with pytest.raises(CheckpointError, match=r"tensor 'token_embd\.weight' is of type I32; supported are F32, F16, BF16, Q4_0"):
        open_both(path)


def header_of(path: Path, kind: int, value: bytes, *, size: int) -> Path:
    """A file with one metadata value; the rest is a hole."""
    key = b"test.value"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<I", kind) + value)
    os.truncate(path, size)
    return path


def test_gguf_metadata_values_are_bounded_for_files_of_gigabytes(tmp_path: Path) -> None:
    """Files of gigabytes that take no room on a disk."""
    string, array, byte = 8, 9, 0
    large, path = 1 << 31, tmp_path / "model.gguf"
    start = time.perf_counter()
    tracemalloc.start()
    numbers = open_gguf(header_of(path, array, struct.pack("<IQ", byte, MAX_ARRAY_ITEMS + 1), size=large)).metadata
    with pytest.raises(CheckpointError, match=f"an array of {MAX_ARRAY_ITEMS + 1} numbers, at most {MAX_ARRAY_ITEMS} are possible"):
        numbers["test.value"]
    text = open_gguf(header_of(path, string, struct.pack("<Q", MAX_TEXT_BYTES + 1), size=large)).metadata
    with pytest.raises(CheckpointError, match=f"has {MAX_TEXT_BYTES + 1} bytes, at most {MAX_TEXT_BYTES} are possible"):
        text["test.value"]
    for texts in (struct.pack("<IQ", string, MAX_ARRAY_ITEMS + 1), struct.pack("<IQQ", string, 2, 1 << 30)):
        with pytest.raises(CheckpointError, match=r"entries, \d+ in all metadata|all of them may have"):
            open_gguf(header_of(path, array, texts, size=large))
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert time.perf_counter() - start < 2.0
