"""A PARD draft model's drafts are transformers' most probable tokens after the text and mask tokens, in one pass."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.always_drafts import draft_always
from harness.checkpoint_files import change_config
from harness.checkpoints import write_checkpoint
from harness.doctor_options import doctor_options
from harness.exact_targets import skip_without_kernels
from paceline import LLM, SamplingParams
from paceline.errors import CheckpointError
from paceline.proof.doctor import diagnose

MASK, DEPTH = 5, 4
SAMPLINGS = (SamplingParams(max_tokens=40, ignore_eos=True), SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=3))


def write_pard(directory: Path, **more: object) -> Path:
    write_checkpoint(directory, "llama", num_hidden_layers=2, seed=9)
    return change_config(directory, **{"pard_token": MASK, **more})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pard")
    return write_checkpoint(root / "target", "llama", num_hidden_layers=2, seed=8), write_pard(root / "draft")


def test_pard_drafts_equal_transformers_in_one_forward_pass(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_kernels()
    draft_always(monkeypatch)
    target, draft = models
    reference = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)

    def expected(text: Sequence[int], count: int) -> list[int]:
        with torch.no_grad():
            logits = reference(torch.tensor([[*text, *[MASK] * (count - 1)]])).logits[0]
        return logits[-count:].argmax(-1).tolist()

    with LLM(str(target), drafter=str(draft), num_speculative_tokens=DEPTH, draft_quantization="none", kv_cache_gb=0.05) as llm:
        assert "PARD: all tokens in one pass" in llm.drafter.traits.description  # type: ignore[union-attr]
        output = llm.generate([[5, 6, 7]], SAMPLINGS[0], speculation={"trees": True})[0]
        text, compared = [5, 6, 7], 0
        passes = llm.drafter.runtime.num_passes  # type: ignore[union-attr]
    assert output.steps is not None
    for step in output.steps:
        drafted = list(step.draft_token_ids)
        if drafted:
            assert drafted == expected(text, DEPTH)[: len(drafted)]
            compared += len(drafted)
        text += step.token_ids
    assert compared > 50
    assert passes <= len(output.steps) + 3  # with those that measure it


def test_pard_mask_token_out_of_range_is_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = models
    with pytest.raises(CheckpointError, match="pard_token = 100000, expected an id below"):
        LLM(str(target), drafter=str(write_pard(tmp_path / "id", pard_token=100_000)))


def test_doctor_reports_a_pard_model(models: tuple[Path, Path]) -> None:
    target, draft = models
    (found,) = diagnose(doctor_options(model=str(target), drafters=(str(draft),))).drafters
    assert found.pair is not None
    assert "it is a PARD model: one pass drafts all tokens" in found.pair.notes
