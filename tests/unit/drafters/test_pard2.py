"""PARD-2 files: layers counted from either end, older names of fields, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.always_drafts import draft_always
from harness.checkpoints import write_checkpoint
from harness.doctor_options import doctor_options
from harness.exact_targets import skip_without_kernels
from harness.pard2_checkpoints import MASK, set_config, write_pard2
from paceline import LLM, SamplingParams
from paceline.drafters import pard2, prepare_drafter
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.pard2 import PROJECTION_FILE, Pard2Config, open_pard2_weights, read_pard2_config
from paceline.drafters.recurrent_heads.drafter import ParallelDrafter
from paceline.errors import CheckpointError, ConfigError, IncompatibleDrafterError
from paceline.models.checkpoint import read_model_config
from paceline.models.config import ModelConfig
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.models.weights import Weights
from paceline.proof.doctor import diagnose

NUM_LAYERS = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("pard2") / "target", "llama", num_hidden_layers=NUM_LAYERS, seed=8)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_pard2(tmp_path / "draft")


@pytest.fixture(scope="module")
def sizes(target: Path) -> ModelConfig:
    return read_model_config(target)


def config_of(draft: Path, sizes: ModelConfig) -> Pard2Config:
    return read_pard2_config(HeadFiles.open(draft), sizes)


def test_pard2_config_of_the_published_form(target: Path, draft: Path, sizes: ModelConfig) -> None:
    prepared = prepare_drafter(str(draft), target)
    assert prepared is not None
    assert prepared.head is not None
    assert prepared.head.kind is HeadKind.PARD2
    config = read_pard2_config(prepared.head, sizes)
    assert (config.layer_boundaries, config.feature_ends_with_final_state, config.hidden_state_order) == ((1, 3), True, (2, 1, 0))
    assert (config.mask_token_id, config.scale, config.has_projection_bias, config.feature_size) == (MASK, 0.3, False, 3 * 64)
    assert open_pard2_weights(prepared.head, config)["target_proj.weight"].shape == (64, 3 * 64)


@pytest.mark.parametrize(
    ("layers", "boundaries", "has_final_state", "order"),
    [([-1], (), True, (0,)), ([4, 0, 0], (0,), True, (1, 0, 0)), ([-5, 2], (0, 2), False, (0, 1)), ([3], (3,), False, (0,))],
)
def test_pard2_layers_count_hidden_states_from_either_end(
    layers: list[int], boundaries: tuple[int, ...], has_final_state: bool, order: tuple[int, ...], tmp_path: Path, sizes: ModelConfig
) -> None:
    config = config_of(write_pard2(tmp_path / "draft", layers=layers), sizes)
    assert (config.layer_boundaries, config.has_final_state, config.hidden_state_order) == (boundaries, has_final_state, order)


def test_pard2_older_field_names_and_defaults_are_read(draft: Path, sizes: ModelConfig) -> None:
    set_config(draft, pard2=None, pard2_scale=None, pard2_target_dim=None, pard2_proj_bias=None)
    config = config_of(draft, sizes)
    assert (config.kind, config.scale, config.has_projection_bias) == (HeadKind.PARD2, 0.02, False)
    set_config(draft, feat_scale=0.01, pard_target_dim=192, proj_bias=True)
    config = config_of(draft, sizes)
    assert (config.scale, config.has_projection_bias) == (0.01, True)


def test_pard2_switched_off_is_a_pard_model(target: Path, draft: Path) -> None:
    """As in AMD's code: the same language model also drafts without the target's hidden states."""
    set_config(draft, pard2=False, spd_type=None)
    prepared = prepare_drafter(str(draft), target)
    assert prepared is not None
    assert (prepared.name, prepared.head) == ("draft_model", None)


MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no layers": ({"pard2_target_layers": None}, CheckpointError, "pard2_target_layers = None, expected a list of layers"),
    "layers of text": ({"pard2_target_layers": ["1"]}, CheckpointError, "expected a list of layers of the target"),
    "a layer too far": ({"pard2_target_layers": [-1, 5, 1]}, IncompatibleDrafterError, "and the target has 4 layers"),
    "a layer too far back": ({"pard2_target_layers": [-6, 1, 1]}, IncompatibleDrafterError, "and the target has 4 layers"),
    "another target": (
        {"pard2_target_dim": 4096},
        IncompatibleDrafterError,
        "is 4096; 3 hidden states of the target have 192",
    ),
    "a scale of text": ({"pard2_scale": "x"}, CheckpointError, "pard2_scale = 'x', expected a number"),
    "no mask token": ({"pard_token": None}, CheckpointError, "has no 'pard_token'"),
    "a mask token out of range": ({"pard_token": -1}, CheckpointError, "pard_token = -1, expected an integer from 0 to"),
    "another family": (MISTRAL, IncompatibleDrafterError, "PARD-2 draft models of llama, qwen2, qwen3 can be used"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_pard2_configs_are_refused(name: str, draft: Path, sizes: ModelConfig) -> None:
    values, error, message = REFUSED[name]
    set_config(draft, **values)
    with pytest.raises(error, match=message):
        config_of(draft, sizes)


PROJECTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "narrow": ({"target_proj.weight": torch.zeros(64, 64)}, r"target_proj.weight \[64, 64\] instead of \[64, 192\]"),
    "named differently": ({"proj.weight": torch.zeros(64, 192)}, r"lacks 1 tensor: target_proj.weight \[64, 192\]"),
    "more": (
        {"target_proj.weight": torch.zeros(64, 192), "target_proj.bias": torch.zeros(64)},
        "holds 1 tensor: target_proj.bias that",
    ),
    "whole numbers": ({"target_proj.weight": torch.zeros(64, 192, dtype=torch.int8)}, "is of type I8, supported are"),
    "sparse": ({"target_proj.weight": torch.zeros(64, 192).to_sparse()}, "tensor 'target_proj.weight' is not a dense tensor with values"),
    "without values": ({"target_proj.weight": torch.zeros(64, 192, device="meta")}, "is not a dense tensor with values"),
    "code": ({"target_proj.weight": Path("/etc/passwd")}, "cannot be read as a file of tensors"),
}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_surprising_projection_files_are_refused(name: str, draft: Path, sizes: ModelConfig) -> None:
    tensors, message = PROJECTIONS[name]
    torch.save(tensors, draft / PROJECTION_FILE)
    files = HeadFiles.open(draft)
    with pytest.raises(CheckpointError, match=message):
        open_pard2_weights(files, read_pard2_config(files, sizes))


def test_missing_projection_file_or_bias_is_refused(draft: Path, sizes: ModelConfig) -> None:
    files = HeadFiles.open(draft)
    config = read_pard2_config(files, sizes)
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor: target_proj.bias \[64\]"):
        open_pard2_weights(files, replace(config, has_projection_bias=True))
    (draft / PROJECTION_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"has no {PROJECTION_FILE}, a part of every PARD-2 draft model"):
        open_pard2_weights(files, config)


def test_packed_matrices_of_a_pard2_draft_model_are_refused(draft: Path, sizes: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Weights({})
    packed.packed_matrices, packed.quantized_format = {"layers.0.q_proj.weight": None}, "gptq"  # type: ignore[dict-item]
    monkeypatch.setattr(pard2, "open_weights", lambda *_: packed)
    files = HeadFiles.open(draft)
    with pytest.raises(IncompatibleDrafterError, match="its matrices are packed as gptq, which is not supported"):
        open_pard2_weights(files, read_pard2_config(files, sizes))


def test_doctor_describes_a_pard2_draft_model(target: Path, draft: Path) -> None:
    (found,) = diagnose(doctor_options(model=str(target), drafters=(str(draft),))).drafters
    assert found.head is not None
    assert found.pair is not None
    assert found.pair.works
    assert found.pair.summary.startswith(
        "PARD-2 draft model that reads layer boundaries 1, 3 and the final hidden states and drafts all tokens in one pass"
    )


def test_pard2_with_another_tokenizer_is_refused(target: Path, draft: Path) -> None:
    path = draft / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    assert 'w90"' in text
    path.write_text(text.replace('w90"', 'another"'), encoding="utf-8")
    problems = diagnose(doctor_options(model=str(target), drafters=(str(draft),))).problems
    assert any("has another tokenizer than the target" in problem for problem in problems)
    with pytest.raises(IncompatibleDrafterError, match="has another tokenizer than the target"):
        LLM(str(target), drafter=str(draft), kv_cache_gb=0.02)


def test_pard2_works_quantised_without_tokenizer_files_or_options(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values have the type of the weights, unlike those of heads: a draft model has many layers."""
    skip_without_kernels()
    draft_always(monkeypatch)
    draft = write_pard2(tmp_path / "draft", sizes={"dtype": "bfloat16"})
    for file in draft.glob("tokenizer*"):
        file.unlink()
    with LLM(str(target), drafter=str(draft), kv_cache_gb=0.02, draft_quantization="int8") as llm:
        assert isinstance(llm.drafter, ParallelDrafter)
        assert llm.drafter.name == "pard2"
        assert "features of layers 1, 3, final" in llm.drafter.traits.description
        assert llm.drafter.head.runtime.capabilities.kv_cache_dtype is KVCacheDtype.BF16
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=16, ignore_eos=True))
        assert output.speculation.num_draft_tokens > 16
        assert llm.stats().drafter_failures == 0
    with pytest.raises(ConfigError, match="'boundaries' is for eagle3 and peagle heads, and the drafter is pard2"):
        LLM(str(target), drafter=str(draft), drafter_options={"boundaries": "1,2"})
