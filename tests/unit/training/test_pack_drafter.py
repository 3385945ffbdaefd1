"""`tools/pack_drafter.py`: a trained head in a GGUF file is read with the values that the gguf package gives it."""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import pack_drafter
from harness.eagle_checkpoints import DRAFT_IDS, EAGLE3, eagle3_tensors
from paceline.drafters import open_head_files
from paceline.models.weights import GroupedTensor, as_float32

SPEC = {**EAGLE3, "intermediate_size": 64}  # blocks of Q8_0 and Q4_0 hold 32 numbers


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A head as `paceline train` writes it, with recorded answers that hold the last draft ids most often."""
    directory = tmp_path / "trained"
    (directory / "data").mkdir(parents=True)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")
    layer = {name: SPEC[name] for name in names} | {"rope_theta": 5000.0, "vocab_size": SPEC["vocab_size"]}
    config = {"transformer_layer_config": layer, "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "target_hidden_size": 32}
    (directory / "config.json").write_text(json.dumps(config | {"norm_before_residual": False}), encoding="utf-8")
    save_file(eagle3_tensors(SPEC, first_layer="layers.0."), directory / "model.safetensors")
    ids = torch.tensor(sorted(DRAFT_IDS)[-6:] * 2 + sorted(DRAFT_IDS)[:6], dtype=torch.int32)
    save_file({"token_ids": ids, "is_answer": torch.ones(len(ids), dtype=torch.uint8)}, directory / "data" / "train-0000.safetensors")
    return directory


def pack(monkeypatch: pytest.MonkeyPatch, directory: Path, *arguments: str) -> Path:
    file = directory.parent / "head.gguf"
    monkeypatch.setattr(sys, "argv", ["pack_drafter.py", str(directory), str(file), *arguments])
    pack_drafter.main()
    return file


@pytest.mark.parametrize("matrix_type", ["BF16", "Q8_0", "Q4_0"])
def test_packed_head_has_the_values_of_the_gguf_package(matrix_type: str, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = open_head_files(pack(monkeypatch, trained, "--type", matrix_type))
    assert head is not None
    kind = gguf.GGMLQuantizationType[matrix_type]
    for name, values in pack_drafter.read_head(trained).items():
        if name == "d2t":
            np.testing.assert_array_equal(head.tensors[name].read_values() + np.arange(len(values)), values)
            continue
        found, expected = head.matrix(name), values
        if values.ndim == 2:
            assert isinstance(found, GroupedTensor) == (matrix_type != "BF16")
            expected = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        own = found.matrix.values() if isinstance(found, GroupedTensor) else as_float32(found)
        np.testing.assert_array_equal(own, expected, err_msg=name)


def test_packed_head_keeps_the_most_frequent_ids(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = open_head_files(pack(monkeypatch, trained, "--type", "BF16", "--draft-vocab-size", "6"))
    whole: dict[str, Any] = pack_drafter.read_head(trained)
    assert head is not None
    assert (head.tensors["d2t"].read_values() + np.arange(6)).tolist() == sorted(DRAFT_IDS)[-6:]
    rows = [whole["d2t"].tolist().index(one) for one in sorted(DRAFT_IDS)[-6:]]
    kind = gguf.GGMLQuantizationType.BF16
    expected = gguf.quants.dequantize(gguf.quants.quantize(whole["lm_head.weight"][rows], kind), kind)
    np.testing.assert_array_equal(as_float32(head.weight("lm_head.weight")), expected)
