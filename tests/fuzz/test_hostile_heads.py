"""Untrusted heads: bad names, shapes and configs are refused in one line, at once and with little memory."""

import json
import time
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.eagle_checkpoints import (
    DRAFT_IDS,
    EAGLE1,
    EAGLE3,
    VOCAB_SIZE,
    Tensors,
    eagle1_tensors,
    eagle3_tensors,
    write_gguf_head,
    write_head,
)
from harness.model_configs import make_config
from paceline.drafters import open_head_files
from paceline.drafters.eagle.checkpoint import open_eagle_checkpoint
from paceline.drafters.eagle.config import ambiguous_options, read_eagle_config
from paceline.drafters.head_files import strip_prefixes
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.medusa.checkpoint import load_medusa
from paceline.drafters.mtp import load_mtp
from paceline.errors import CheckpointError, PacelineError
from paceline.models.config import WeightType
from paceline.models.rope_config import RopeConfig
from paceline.models.weights import Tensor, Weights

TARGET = make_config(
    family="llama", vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_layers=32, num_heads=4, num_kv_heads=2, head_size=8,
    norm_eps=1e-5, max_positions=512, rope=RopeConfig(theta=5e5), weight_type=WeightType.F32,
)  # fmt: skip
LM_HEAD = Tensor(np.zeros((VOCAB_SIZE, 32), np.float32), WeightType.F32, (VOCAB_SIZE, 32))
MOST_BYTES, MOST_SECONDS = 50_000_000, 5.0


def load(path: Path) -> None:
    """All that is done with a head before its weights are read."""
    files = open_head_files(path, HeadKind.MTP if "mtp" in path.name else None)
    if files is None:
        raise CheckpointError("no head at all")
    if files.kind is HeadKind.MEDUSA:
        load_medusa(files, TARGET, LM_HEAD)
    elif files.kind is HeadKind.MTP:
        load_mtp(files, TARGET, Weights({"embedding.weight": LM_HEAD, "lm_head.weight": LM_HEAD}))
    else:
        config = read_eagle_config(files, TARGET)
        open_eagle_checkpoint(files, config, TARGET)
        ambiguous_options(files, config, TARGET)


def load_named(path: Path, name: str) -> None:
    load(path)
    pytest.fail(f"{name} was taken")


def heads(number: str) -> dict[str, tuple[Mapping[str, Any], Tensors]]:
    """Heads, one of whose tensors has this number in its name."""
    block = {"0.0.linear.weight": torch.zeros(32, 32)}
    mtp = {"mtp.fc.weight": torch.zeros(32, 64), f"mtp.layers.{number}.mlp.up_proj.weight": torch.zeros(2, 2)}
    return {
        "medusa heads": ({}, {**block, f"{number}.0.linear.weight": torch.zeros(32, 32)}),
        "medusa blocks": ({}, {**block, f"0.{number}.linear.weight": torch.zeros(32, 32)}),
        "medusa matrices": ({}, {**block, f"{number}.1.weight": torch.zeros(VOCAB_SIZE, 32)}),
        "medusa, vLLM's": ({}, {f"blocks.{number}.layers.0.weight": torch.zeros(32, 32), "lm_head.weight": torch.zeros(VOCAB_SIZE, 32)}),
        "eagle": (EAGLE1, eagle1_tensors() | {f"layers.{number}.mlp.up_proj.weight": torch.zeros(2, 2)}),
        "eagle3": (EAGLE3, eagle3_tensors() | {f"layers.{number}.input_layernorm.weight": torch.zeros(2)}),
        "eagle3 chunks": (EAGLE3, eagle3_tensors() | {f"fc_norm.{number}.weight": torch.zeros(2)}),
        "mtp": ({"num_hidden_layers": 32}, mtp),
    }


@pytest.mark.parametrize("name", list(heads("1")))
@pytest.mark.parametrize(
    "number", ["99999999", "999999", "9" * 5000, "x", "-1", "٣"], ids=["many", "fewer", "long", "none", "minus", "arabic"]
)
def test_huge_layer_numbers_in_tensor_names_are_refused_fast(name: str, number: str, tmp_path: Path) -> None:
    config, tensors = heads(number)[name]
    directory = write_head(tmp_path / name, config, tensors)
    began = time.perf_counter()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            load(directory)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES
    assert time.perf_counter() - began < MOST_SECONDS


def test_repeated_tensor_name_prefixes_are_stripped_in_linear_time() -> None:
    began = time.perf_counter()
    assert strip_prefixes("model." * 1_000_000 + "norm.weight") == "norm.weight"
    assert time.perf_counter() - began < MOST_SECONDS


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa"])
def test_head_tensor_of_the_wrong_rank_is_refused(method: str, tmp_path: Path) -> None:
    """Numbers and vectors in place of matrices, one after the other."""
    config, tensors = {
        "eagle": (EAGLE1, eagle1_tensors() | {"lm_head.weight": torch.zeros(VOCAB_SIZE, 32)}),
        "eagle3": (EAGLE3, eagle3_tensors(has_own_embedding=True)),
        "medusa": ({}, {"0.0.linear.weight": torch.zeros(32, 32), "0.1.weight": torch.zeros(VOCAB_SIZE, 32)}),
    }[method]
    load(write_head(tmp_path / "whole", config, tensors))
    for number, (name, values) in enumerate(tensors.items()):
        for kind, other in (("number", values.flatten()[:1].reshape(())), ("empty", values[:0]), ("vector", values.flatten()[:7])):
            with pytest.raises(PacelineError):
                load_named(write_head(tmp_path / f"{number}-{kind}", config, tensors | {name: other}), f"{name} as {kind}")


JUNK: tuple[object, ...] = (
    None, True, 0, -1, 1, 2**40, 10**400, 1.5, "", "x", [], ["x"], [[1]], [None], {}, {"x": 1}, {"rope_type": ["yarn"]}, {"type": {}},
    {"rope_type": 7, "factor": "x"}, {"type": "linear", "factor": [2]},
)  # fmt: skip
KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size", "draft_vocab_size",
    "hidden_act", "rms_norm_eps", "max_position_embeddings", "max_sequence_length", "head_dim", "rope_theta", "rope_scaling",
    "rope_parameters", "partial_rotary_factor", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "model_type",
    "architectures", "eagle_config", "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
    "target_hidden_size", "bias", "logit_scale", "mask_token_id", "parallel_drafting", "dflash_config", "model", "add_para_norm",
    "transformer_layer_config", "layernorms", "speculators_model_type",
)  # fmt: skip


@pytest.mark.parametrize("method", ["eagle", "eagle3", "peagle", "speculators", "nested"])
def test_fuzzed_head_config_is_read_or_refused(method: str, tmp_path: Path) -> None:
    """Every field with everything JSON can hold; with a window and rotations, so that their fields are looked at."""
    more = {"rope_scaling": {"type": "linear", "factor": 2.0}, "layer_types": ["sliding_attention"], "sliding_window": 9}
    mask = {"mask_hidden": torch.zeros(1, 96)}
    config, tensors = {
        "eagle": ({**EAGLE1, **more}, eagle1_tensors()),
        "eagle3": ({**EAGLE3, **more}, eagle3_tensors()),
        "peagle": ({**EAGLE3, **more, "mask_token_id": 3}, eagle3_tensors() | mask),
        "speculators": ({"speculators_model_type": "eagle3", "transformer_layer_config": {**EAGLE3, **more}}, eagle3_tensors()),
        "nested": ({"model_type": "eagle", "model": {**EAGLE1, **more, "model_type": "llama"}}, eagle1_tensors(bias=False)),
    }[method]
    directory = write_head(tmp_path / "head", config, tensors)
    load(directory)
    refused = 0
    for key in KEYS:
        for value in JUNK:
            (directory / "config.json").write_text(json.dumps({**config, key: value}), encoding="utf-8")
            try:
                load(directory)
            except PacelineError:
                refused += 1
    assert refused > 150


@pytest.mark.parametrize(
    "scaling", [{"rope_theta": 1e-300}, {"rope_scaling": {"type": "linear", "factor": 1e-45}}], ids=["theta", "factor"]
)
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_head_rope_settings_with_infinite_frequencies_are_refused(method: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    config, tensors = {"eagle": (EAGLE1, eagle1_tensors()), "eagle3": (EAGLE3, eagle3_tensors())}[method]
    with pytest.raises(CheckpointError, match="give frequencies that are not finite"):
        load(write_head(tmp_path, {**config, **scaling}, tensors))


@pytest.mark.parametrize("name", ["blk.99999999.attn_q.weight", "blk.0", "blk.x.y.weight", "blk.", "blk.0.attn_q"])
def test_invalid_tensor_names_of_a_gguf_head_are_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    spec = {**EAGLE3, "intermediate_size": 64}
    path = tmp_path / "head.gguf"
    write_gguf_head(path, spec, eagle3_tensors(spec) | {f"raw {name}": torch.zeros(32)}, boundaries=[2, 4, 6])
    with pytest.raises(CheckpointError):
        load(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count", 0),
        ("extract_layers", 7),
        ("attention.head_count_kv", "two"),
        ("rope.freq_base", [1.0]),
        ("vocab_size", "x"),
    ],
)
def test_invalid_metadata_of_a_gguf_head_is_refused(key: str, value: object, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    spec = {**EAGLE3, "intermediate_size": 64}
    path = tmp_path / "head.gguf"
    write_gguf_head(path, spec, eagle3_tensors(spec), boundaries=[2, 4, 6], metadata={key: value})
    with pytest.raises(PacelineError):
        load(path)


def test_draft_vocabulary_ids_out_of_range_are_refused(tmp_path: Path) -> None:
    tensors = eagle3_tensors() | {"d2t": torch.full((len(DRAFT_IDS),), 2**62)}
    with pytest.raises(PacelineError):
        load(write_head(tmp_path, EAGLE3, tensors))
