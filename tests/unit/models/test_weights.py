"""Weights are mapped from safetensors files whose every number is checked first."""

import json
import struct
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.model_configs import make_config
from paceline.errors import CheckpointError
from paceline.models.checkpoint import open_weights
from paceline.models.config import ModelConfig, WeightType
from paceline.models.layers import NormOrder, QKNorm
from paceline.models.storage.safetensors_file import most_common_dtype, read_header
from paceline.models.tensor_names import checkpoint_names, tensor_shapes
from paceline.models.weights import Tensor, as_float32

SIZES: dict[str, Any] = {
    "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_size": 4,
    "max_positions": 64,
}  # fmt: skip
CONFIG = make_config(**SIZES)
NUMPY_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64}


def changed(**changes: Any) -> ModelConfig:
    return make_config(**{**SIZES, **changes})


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtype: str = "F32") -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(array.tobytes() for array in tensors.values()))
    return path


def random_tensors(config: ModelConfig = CONFIG, dtype: str = "F32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    names = checkpoint_names(config)
    return {names[name]: rng.integers(1, 100, shape).astype(NUMPY_TYPES[dtype]) for name, shape in tensor_shapes(config).items()}


def test_internal_tensor_names_map_to_checkpoint_names(tmp_path: Path) -> None:
    tensors = random_tensors()
    write_safetensors(tmp_path / "model.safetensors", tensors)
    weights = open_weights(tmp_path, CONFIG)
    assert list(weights) == list(tensor_shapes(CONFIG))
    assert np.array_equal(weights["layers.1.q_proj.weight"].array, tensors["model.layers.1.self_attn.q_proj.weight"])
    assert np.array_equal(weights["final_norm.weight"].array, tensors["model.norm.weight"])
    assert weights["embedding.weight"].shape == (11, 8)
    assert weights.has_tensor("lm_head.weight")
    assert not weights.has_tensor("layers.0.q_proj.bias")
    assert weights.nbytes == sum(array.nbytes for array in tensors.values())


def test_config_switches_add_their_expected_tensors() -> None:
    plain = tensor_shapes(CONFIG)
    full = tensor_shapes(changed(attention={"bias": True, "output_bias": True, "qk_norm": QKNorm.HEAD}, mlp={"bias": True}))
    added = {name.removeprefix("layers.0.") for name in set(full) - set(plain) if name.startswith("layers.0.")}
    biases = {f"{name}_proj.bias" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert added == biases | {"q_norm.weight", "k_norm.weight"}
    names = checkpoint_names(changed(num_layers=13, attention={"qk_norm": QKNorm.HEAD}))
    assert names["layers.12.k_norm.weight"] == "model.layers.12.self_attn.k_norm.weight"
    assert names["layers.3.mlp_norm.weight"] == "model.layers.3.post_attention_layernorm.weight"


def test_weight_arrays_are_read_only_views_of_the_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", random_tensors())
    array = open_weights(tmp_path, CONFIG)["embedding.weight"].array
    assert not array.flags.owndata
    assert not array.flags.writeable


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_weights_are_widened_to_float32_exactly(tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    values = torch.linspace(-3, 3, 88).reshape(11, 8).to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype])
    tensors = random_tensors(dtype=dtype)
    tensors["model.embed_tokens.weight"] = values.view(torch.uint16).numpy() if dtype == "BF16" else values.numpy()
    write_safetensors(tmp_path / "model.safetensors", tensors, dtype)
    tensor = open_weights(tmp_path, CONFIG)["embedding.weight"]
    assert tensor.weight_type is WeightType(dtype.lower())
    assert as_float32(tensor).dtype == np.float32
    assert np.array_equal(as_float32(tensor), values.float().numpy())
    rows = np.array([7, 2, 7], np.int32)
    assert np.array_equal(as_float32(tensor, rows), values.float().numpy()[rows])


def test_sharded_checkpoint_is_read_and_missing_shards_are_named(tmp_path: Path) -> None:
    tensors = random_tensors()
    names = list(tensors)
    for part, own in enumerate((names[:5], names[5:]), 1):
        write_safetensors(tmp_path / f"model-{part}.safetensors", {name: tensors[name] for name in own})
    shard_of = {name: f"model-{1 if name in names[:5] else 2}.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    weights = open_weights(tmp_path, CONFIG)
    assert all(np.array_equal(weights[name].array, tensors[theirs]) for name, theirs in checkpoint_names(CONFIG).items())
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 shards: model-2\.safetensors"):
        open_weights(tmp_path, CONFIG)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/elsewhere/a.safetensors", "model.bin", 3])
def test_shard_index_with_paths_outside_its_folder_is_refused(tmp_path: Path, name: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="expected the name of"):
        open_weights(tmp_path, CONFIG)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": []}}'])
def test_damaged_shard_index_is_a_checkpoint_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="index"):
        open_weights(tmp_path, CONFIG)


def test_missing_checkpoint_tensors_are_listed(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"lacks 2 tensors: model\.norm\.weight, lm_head\.weight"):
        open_weights(tmp_path, CONFIG)


def test_unknown_checkpoint_tensors_are_listed_up_to_twenty(tmp_path: Path) -> None:
    extra = {f"model.extra.{index}": np.zeros(1, np.float32) for index in range(25)}
    write_safetensors(tmp_path / "model.safetensors", random_tensors() | extra)
    with pytest.raises(CheckpointError, match=r"25 tensors: model\.extra\.0, .*model\.extra\.19 and 5 more"):
        open_weights(tmp_path, CONFIG)


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)}
    write_safetensors(tmp_path / "model.safetensors", random_tensors() | extra)
    assert len(open_weights(tmp_path, CONFIG)) == len(tensor_shapes(CONFIG))


def test_tied_embedding_may_be_stored_under_either_name_or_both(tmp_path: Path) -> None:
    tied = replace(CONFIG, tied_embeddings=True)
    tensors = random_tensors(tied)
    table = tensors.pop("model.embed_tokens.weight")
    for names in (["model.embed_tokens.weight"], ["lm_head.weight"], ["model.embed_tokens.weight", "lm_head.weight"]):
        write_safetensors(tmp_path / "model.safetensors", tensors | dict.fromkeys(names, table))
        weights = open_weights(tmp_path, tied)
        assert np.array_equal(weights["embedding.weight"].array, table)
        assert not weights.has_tensor("lm_head.weight")


def test_tied_checkpoint_with_a_different_lm_head_is_refused(tmp_path: Path) -> None:
    tied = replace(CONFIG, tied_embeddings=True)
    tensors = random_tensors(tied)
    write_safetensors(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    with pytest.raises(CheckpointError, match="tie_word_embeddings is true: set it to false"):
        open_weights(tmp_path, tied)


def test_tensor_shape_error_shows_stored_and_expected_shape(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", random_tensors())
    with pytest.raises(CheckpointError, match=r"\[11, 8\].*\[12, 8\]"):
        open_weights(tmp_path, replace(CONFIG, vocab_size=12))


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", random_tensors(dtype="I64"), "I64")
    with pytest.raises(CheckpointError, match="type I64"):
        open_weights(tmp_path, CONFIG)


def test_unaligned_checkpoint_tensors_are_copied(tmp_path: Path) -> None:
    tensors = random_tensors()
    path = write_safetensors(tmp_path / "model.safetensors", tensors)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    path.write_bytes(struct.pack("<Q", length + 1) + content[8 : 8 + length] + b" " + content[8 + length :])
    tensor = open_weights(tmp_path, CONFIG)["embedding.weight"]
    assert tensor.array.flags.aligned
    assert np.array_equal(tensor.array, tensors["model.embed_tokens.weight"])


def test_pytorch_weight_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(CheckpointError, match="convert"):
        open_weights(tmp_path, CONFIG)


def test_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_weights(tmp_path, CONFIG)


def test_truncated_safetensors_file_is_refused(tmp_path: Path) -> None:
    content = write_safetensors(tmp_path / "whole.safetensors", random_tensors()).read_bytes()
    for length in (0, 4, 8, 9, 50, len(content) // 2, len(content) - 1):
        (tmp_path / "model.safetensors").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_weights(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
            "overlap",
        ),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 2**62]}}, "truncated"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, "at bytes"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, "lacks a dtype"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, "needs 12 bytes but has 8"),
        ({"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}, "lacks a dtype"),
        ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, "lacks a dtype"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 9]}}, "lacks a dtype"),
        ({"a": {"shape": [2], "data_offsets": [0, 8]}}, "lacks a dtype"),
        ({"a": 3}, "expected an object"),
        ([], "expected an object"),
    ],
)
def test_inconsistent_safetensors_header_is_refused(tmp_path: Path, entries: object, text: str) -> None:
    encoded = json.dumps(entries).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(16))
    with pytest.raises(CheckpointError, match=text):
        read_header(path)


@pytest.mark.parametrize("length", [0, 1, 101, 2**32, 2**64 - 1])
def test_impossible_safetensors_header_length_allocates_nothing(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + bytes(100))
    with pytest.raises(CheckpointError, match=f"header of {length} bytes.*file of 108"):
        read_header(path)


def test_checkpoint_weight_type_is_that_of_most_bytes(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", random_tensors(dtype="F16"), "F16")
    assert most_common_dtype(tmp_path) == "F16"


def test_stacked_projections_are_views_of_row_ranges(tmp_path: Path) -> None:
    config = replace(CONFIG, family="phi3")
    tensors = random_tensors(config)
    stacked: dict[str, np.ndarray] = {}
    for stack, parts in (("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")), ("mlp.gate_up_proj", ("gate_proj", "up_proj"))):
        block = stack.split(".")[0]
        for layer in range(config.num_layers):
            rows = [tensors.pop(f"model.layers.{layer}.{block}.{part}.weight") for part in parts]
            stacked[f"model.layers.{layer}.{stack}.weight"] = np.concatenate(rows)
    write_safetensors(tmp_path / "model.safetensors", {**tensors, **stacked})
    weights = open_weights(tmp_path, config)
    assert list(weights) == list(tensor_shapes(config))
    qkv, gate_up = stacked["model.layers.1.self_attn.qkv_proj.weight"], stacked["model.layers.1.mlp.gate_up_proj.weight"]
    for name, rows in {
        "q_proj": qkv[:8],
        "k_proj": qkv[8:12],
        "v_proj": qkv[12:],
        "gate_proj": gate_up[:12],
        "up_proj": gate_up[12:],
    }.items():
        tensor = weights[f"layers.1.{name}.weight"]
        assert isinstance(tensor, Tensor)
        assert np.array_equal(tensor.array, rows)
        assert not tensor.array.flags.owndata
    with pytest.raises(CheckpointError, match="lacks 10 tensors"):
        open_weights(tmp_path, CONFIG)
    stacked["model.layers.0.self_attn.qkv_proj.weight"] = qkv[:-1]
    write_safetensors(tmp_path / "model.safetensors", {**tensors, **stacked})
    with pytest.raises(CheckpointError, match=r"qkv_proj.weight' has shape \[15, 8\], but config.json requires 16 rows"):
        open_weights(tmp_path, config)


def test_norm_weights_stored_minus_one_get_one_added_in_float32(tmp_path: Path) -> None:
    config = changed(norm_order=NormOrder.SANDWICH, has_norm_offset=True, attention={"qk_norm": QKNorm.HEAD})
    names = checkpoint_names(config)
    assert names["layers.0.mlp_norm.weight"] == "model.layers.0.pre_feedforward_layernorm.weight"
    assert names["layers.0.attention_output_norm.weight"] == "model.layers.0.post_attention_layernorm.weight"
    assert names["layers.0.mlp_output_norm.weight"] == "model.layers.0.post_feedforward_layernorm.weight"
    quarter = np.uint16(0x3E80)
    tensors = {names[name]: np.full(shape, quarter, np.uint16) for name, shape in tensor_shapes(config).items()}
    write_safetensors(tmp_path / "model.safetensors", tensors, "BF16")
    weights = open_weights(tmp_path, config)
    for name in weights:
        is_norm = "norm" in name
        assert np.all(as_float32(weights[name]) == (1.25 if is_norm else 0.25)), name
        assert weights[name].weight_type is (WeightType.F32 if is_norm else WeightType.BF16)


@pytest.mark.parametrize(
    "number", ["99999999", "9" * 10, "9" * 5000, "0" * 5000, "٣"], ids=["large", "larger", "digits", "zeros", "Arabic"]
)
def test_huge_layer_number_in_a_tensor_name_is_refused_fast(tmp_path: Path, number: str) -> None:
    name = f"model.layers.{number}.self_attn.q_proj.weight"
    write_safetensors(tmp_path / "model.safetensors", random_tensors() | {name: np.zeros((2, 2), np.float32)})
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"holds 1 tensor: model\.layers"):
        open_weights(tmp_path, CONFIG)
    assert time.perf_counter() - start < 1.0
