"""GGUF files of models that are partly recurrent, written as llama.cpp's converters write them, compute what the directories compute."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import hybrid_checkpoints
from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from harness.hybrid_gguf import write_hybrid_gguf
from harness.parity import open_backend, prompt_logits
from paceline.errors import CheckpointError
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.weights import GroupedTensor, as_float32
from paceline.runtimes.base import FloatArray
from paceline.runtimes.native.library import kernels_path

gguf = pytest.importorskip("gguf")
pytest.importorskip("torch")

TOKEN_IDS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 24).tolist()
DELTA = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
WIDE = {**DELTA, "linear_num_value_heads": 6, "linear_value_head_dim": 32}
"""Three value heads a key head, each of them one run of columns."""
NARROW = {**DELTA, "linear_num_value_heads": 4, "linear_value_head_dim": 24}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
NEMOTRON = hybrid_checkpoints.NEMOTRON
MAMBA = {**hybrid_checkpoints.MAMBA, "shared_intermediate_size": 64}  # runs of 32 columns
OF_CONVERTERS = ("qwen3_5", "qwen3_5-moe", "lfm2", "lfm2-biased", "lfm2-moe", "granite", "granite-moe", "nemotron_h", "nemotron_h-moe")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: hybrid_checkpoints.CASES[name] for name in (*OF_CONVERTERS, "falcon_h1-normed-last")},
    "qwen35": ("qwen3_5_text", WIDE),
    "qwen35-narrow": ("qwen3_5_text", {**NARROW, "tie_word_embeddings": True}),
    "qwen35-plain": ("qwen3_5_text", {**NARROW, "linear_num_value_heads": 2}),
    "qwen35moe": ("qwen3_5_moe_text", {**WIDE, **EXPERTS}),
    "qwen3next": ("qwen3_next", {**WIDE, **EXPERTS}),
    "lfm2-adjusted": ("lfm2", {**hybrid_checkpoints.SHORT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "granitehybrid": ("granitemoehybrid", MAMBA),
    "granitehybrid-rope": ("granitemoehybrid", {**MAMBA, "position_embedding_type": "rope", "tie_word_embeddings": True}),
    "nemotron_h_moe": (
        "nemotron_h",
        {**hybrid_checkpoints.CASES["nemotron_h-moe"][1], "moe_shared_expert_intermediate_size": 64, "moe_latent_size": 32, "n_group": 1},
    ),
}
QWEN = [case for case in CASES if case.startswith("qwen3")]
BY_CASE = pytest.mark.parametrize("case", CASES)
BACKENDS = ("torch", "native") if kernels_path() is not None else ("torch",)
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(case: str) -> Path:
        family, overrides = CASES[case]
        return write_checkpoint(tmp_path_factory.mktemp(case), family, **overrides)

    return make


def logits(path: Path, backend: str = "torch") -> FloatArray:
    """Of one prompt, computed in float32."""
    found = prompt_logits(open_backend(path, backend), TOKEN_IDS)
    assert np.isfinite(found).all()
    return found


def differ(found: FloatArray, expected: FloatArray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@BY_CASE
def test_hybrid_gguf_has_the_config_tensors_and_logits_of_its_directory(checkpoint: Make, tmp_path: Path, case: str) -> None:
    directory = checkpoint(case)
    path = write_hybrid_gguf(directory, tmp_path / "model.gguf")
    config, expected_config = read_model_config(path), read_model_config(directory)
    assert config == expected_config
    found, expected = open_weights(path, config), open_weights(directory, expected_config)
    assert list(found) == list(expected)
    for name in found:
        facts = found.tensor_info(name)
        assert (facts.shape, facts.nbytes) == (found[name].shape, found[name].nbytes), name
        tolerance = 1e-6 if name.endswith("decay.weight") else 0.0  # an exponential that two libraries computed
        assert np.allclose(as_float32(found[name]), as_float32(expected[name]), rtol=tolerance, atol=0.0), name
    assert differ(logits(path, BACKENDS[-1]), logits(directory, BACKENDS[-1])) <= 1e-5


def test_falcon_h1_gguf_with_factors_in_its_weights_has_equal_logits(tmp_path: Path) -> None:
    family, values = hybrid_checkpoints.CASES["falcon_h1"]
    directory = write_checkpoint(tmp_path / "model", family, **values)
    path = write_hybrid_gguf(directory, tmp_path / "model.gguf")
    assert differ(logits(path, BACKENDS[-1]), logits(directory, BACKENDS[-1])) <= 1e-5


def test_early_qwen3_next_gguf_with_fused_ssm_inputs_is_read(checkpoint: Make, tmp_path: Path) -> None:
    directory = checkpoint("qwen3next")
    path = write_hybrid_gguf(directory, tmp_path / "model.gguf", fuses_inputs=True)
    found, expected = (open_weights(one, read_model_config(one)) for one in (path, directory))
    for name in ("conv_proj", "z_proj", "b_proj", "a_proj"):
        assert np.array_equal(as_float32(found[f"layers.1.{name}.weight"]), as_float32(expected[f"layers.1.{name}.weight"])), name
    assert differ(logits(path), logits(directory)) <= 1e-5


@pytest.mark.spread(0.3)
@BY_CASE
@pytest.mark.parametrize("block_type", ["F16", "Q4_0", "Q8_0"])
def test_quantised_hybrid_gguf_values_equal_those_of_the_gguf_package(checkpoint: Make, tmp_path: Path, case: str, block_type: str) -> None:
    """A directory with the rounded values has the same tensors; columns move by runs where these hold whole heads."""
    directory = checkpoint(case)
    plain = write_hybrid_gguf(directory, tmp_path / "plain.gguf")
    widths = {tensor.name: int(tensor.shape[0]) for tensor in gguf.GGUFReader(plain).tensors}
    path = write_hybrid_gguf(directory, tmp_path / "model.gguf", lambda name: block_type if widths[name] % 32 == 0 else "F32")
    rounded = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    dequantised = write_hybrid_gguf(directory, tmp_path / "rounded.gguf", instead=rounded)
    found, expected = (open_weights(one, read_model_config(one)) for one in (path, dequantised))
    for name in found:
        facts = found.tensor_info(name)
        assert np.array_equal(as_float32(found[name]), as_float32(expected[name])), name
        assert (facts.shape, facts.nbytes) == (found[name].shape, found[name].nbytes), name
    if block_type != "F16" and case in QWEN:
        is_moved_by_runs = CASES[case][1]["linear_value_head_dim"] == 32
        assert isinstance(found["layers.0.out_proj.weight"], GroupedTensor) is is_moved_by_runs
        assert isinstance(found["layers.0.conv_proj.weight"], GroupedTensor)
        assert isinstance(found["layers.3.attention_gate.weight"], GroupedTensor)
    for backend in BACKENDS if case in ("qwen35", "lfm2-moe", "granitehybrid") else ("torch",):
        assert differ(logits(path, backend=backend), logits(dequantised, backend=backend)) <= 1e-5, backend
    assert differ(logits(path), logits(directory)) > 1e-5


@pytest.mark.parametrize("case", ["qwen35moe", "granite-moe"])
def test_gguf_experts_with_fused_gate_and_up_are_read(checkpoint: Make, tmp_path: Path, case: str) -> None:
    directory = checkpoint(case)
    path = write_hybrid_gguf(directory, tmp_path / "model.gguf", fuses_experts=True)
    assert any(tensor.name.endswith("ffn_gate_up_exps.weight") for tensor in gguf.GGUFReader(path).tensors)
    found, expected = (open_weights(one, read_model_config(one)) for one in (path, directory))
    for name in (f"layers.2.experts.4.{part}_proj.weight" for part in ("gate", "up", "down")):
        assert np.array_equal(as_float32(found[name]), as_float32(expected[name])), name


def test_gguf_without_layer_marks_has_attention_in_every_fourth_layer(checkpoint: Make, tmp_path: Path) -> None:
    directory, key = checkpoint("qwen35"), "{a}.full_attention_interval"
    expected = read_model_config(directory)
    marks = {"{a}.attention.recurrent_layers": [True, True, True, False]}
    for number, metadata in enumerate(({key: None}, {key: 2, **marks}, {key: None, **marks})):
        assert read_model_config(write_hybrid_gguf(directory, tmp_path / f"{number}.gguf", metadata=metadata)) == expected


@pytest.mark.parametrize(
    ("case", "metadata", "text"),
    [
        ("qwen35", {"{a}.ssm.inner_size": 190}, "ssm.inner_size = 190, expected a multiple of ssm.time_step_rank, 6"),
        ("qwen35", {"{a}.ssm.group_count": 4}, "qwen35.ssm.time_step_rank = 6 must be a multiple of qwen35.ssm.group_count = 4"),
        ("qwen35", {"{a}.ssm.state_size": None}, "has no metadata qwen35.ssm.state_size"),
        ("qwen35", {"{a}.attention.recurrent_layers": [True, False]}, "recurrent_layers = .*, expected whether each of 4 layers"),
        ("lfm2", {"{a}.attention.head_count_kv": 2}, "lfm2.attention.head_count_kv = 2, expected a number for each of 4 layers"),
        ("lfm2", {"{a}.attention.head_count_kv": [0, 2, 0, 1]}, "head_count_kv = .*, expected the same whole number above 0"),
        ("lfm2", {"{a}.attention.head_count_kv": [0, 2]}, "head_count_kv = .*, expected a number for each of 4 layers"),
        ("lfm2", {"{a}.attention.sliding_window": 64}, "lfm2.attention.sliding_window = 64, expected none"),
        ("lfm2", {"{a}.shortconv.l_cache": None}, "has no metadata lfm2.shortconv.l_cache"),
        ("lfm2-moe", {"{a}.expert_gating_func": 1}, "lfm2moe.expert_gating_func = 1, expected 2"),
        ("granitehybrid", {"{a}.ssm.time_step_rank": 7}, "ssm.inner_size = 128, expected a multiple of ssm.time_step_rank, 7"),
        ("granitehybrid", {"{a}.ssm.inner_size": 96}, "ssm.inner_size = 96, expected a multiple of embedding_length, 64"),
        ("nemotron_h", {"{a}.feed_forward_length": 96}, "nemotron_h.feed_forward_length = 96, expected a number for each of 6 layers"),
        ("nemotron_h", {"{a}.feed_forward_length": [0, 96, 0, 0, 0, 64]}, "feed_forward_length = .*, expected the same whole number"),
        ("nemotron_h_moe", {"{a}.expert_group_count": 2}, "has no metadata nemotron_h_moe.expert_group_used_count"),
        ("granitehybrid", {"{a}.ssm.group_count": 3}, "granitehybrid.ssm.time_step_rank = 8 must be a multiple"),
        ("lfm2-moe", {"{a}.expert_weights_norm": 0}, "lfm2moe.expert_weights_norm = 0, expected true or false"),
        ("qwen35moe", {"{a}.expert_gating_func": 2}, "qwen35moe.expert_gating_func = 2, expected 1"),
    ],
)
def test_unsupported_hybrid_gguf_metadata_is_refused_by_its_key(
    checkpoint: Make, tmp_path: Path, case: str, metadata: dict[str, Any], text: str
) -> None:
    path = write_hybrid_gguf(checkpoint(case), tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=text):
        read_model_config(path)


@pytest.mark.parametrize(
    ("case", "leaves_out", "text"),
    [
        ("qwen35", "blk.1.ssm_a", r"lacks 1 tensor: blk\.1\.ssm_a that its metadata"),
        ("qwen35", "blk.1.attn_qkv.weight", r"lacks 1 tensor: blk\.1\.attn_qkv\.weight"),
        ("qwen3next", "blk.2.ssm_ba.weight", r"lacks 2 tensors: blk\.2\.ssm_beta\.weight, blk\.2\.ssm_alpha\.weight"),
        ("lfm2", "blk.0.shortconv.in_proj.weight", r"lacks 1 tensor: blk\.0\.shortconv\.in_proj\.weight"),
        ("lfm2", "token_embd_norm.weight", r"lacks 1 tensor: token_embd_norm\.weight"),
        ("granitehybrid", "blk.2.ssm_in.weight", r"lacks 1 tensor: blk\.2\.ssm_in\.weight"),
        ("granitehybrid", "blk.2.ssm_d", r"lacks 1 tensor: blk\.2\.ssm_d that"),
        ("qwen35", "blk.3.attn_q.weight", r"lacks 1 tensor: blk\.3\.attn_q\.weight"),
    ],
)
def test_missing_tensor_of_a_hybrid_gguf_is_named(checkpoint: Make, tmp_path: Path, case: str, leaves_out: str, text: str) -> None:
    path = write_hybrid_gguf(checkpoint(case), tmp_path / "model.gguf", leaves_out=(leaves_out,))
    with pytest.raises(CheckpointError, match=text):
        open_weights(path, read_model_config(path))


def test_hybrid_gguf_tensors_unlike_its_layer_kinds_are_refused(checkpoint: Make, tmp_path: Path) -> None:
    marks = {"{a}.attention.recurrent_layers": [True, True, False, True]}
    path = write_hybrid_gguf(checkpoint("qwen35"), tmp_path / "model.gguf", metadata=marks)
    with pytest.raises(CheckpointError, match=r"lacks .*blk\.2\.attn_q\.weight"):
        open_weights(path, read_model_config(path))
