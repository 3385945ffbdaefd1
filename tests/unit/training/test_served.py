"""Exported drafters are opened by our own loaders, tensor for tensor, and accept in the engine what was estimated."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.quick_profiles import quick_profiles
from harness.training_runs import TinyRun, record_tiny
from paceline import LLM, SamplingParams
from paceline.drafters import open_head_files
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.tokenizer.tokenizer import Tokenizer
from paceline.training.draft_model import TrainableDraftModel
from paceline.training.run import WEIGHTS_FILE, export
from paceline.training.settings import DRAFT_MODEL, METHODS


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> TinyRun:
    return record_tiny(tmp_path_factory.mktemp("served"), request.param)


@pytest.mark.spread(0.5)
@pytest.mark.parametrize("method", METHODS)
def test_acceptance_when_served_equals_the_training_estimate(run: TinyRun, method: str, tmp_path: Path) -> None:
    trainer = run.make_trainer(method, steps=40)
    trainer.run()
    drafter = trainer.drafter
    is_model = isinstance(drafter, TrainableDraftModel)
    with torch.no_grad():  # as they are stored
        for values in (*drafter.parameters(), *([drafter.embedding, drafter.lm_head] if is_model else [])):
            values.copy_(values.bfloat16().float())
    export(drafter, tmp_path, "target")
    if is_model:
        Tokenizer.open(Path(run.settings.model)).save(tmp_path)
    head = open_head_files(tmp_path)
    assert (DRAFT_MODEL if head is None else head.kind.value) == method
    stored = load_file(tmp_path / WEIGHTS_FILE)
    for name, values in drafter.export("target")[1].items():
        assert torch.equal(stored[name].to(values.dtype), values.detach()), name
    found = trainer.estimates()["all"]
    prompts = [one.token_ids for one in run.data.heldout_prompts]
    options = {"threads": 1, "device": "cpu", "draft_quantization": "none", "num_speculative_tokens": drafter.depth}
    params = SamplingParams(max_tokens=run.settings.max_answer_tokens)
    with quick_profiles(), LLM(run.settings.model, drafter="none", threads=1, device="cpu") as llm:
        plain = [one.token_ids for one in llm.generate(prompts, params)]
    with quick_profiles(), LLM(run.settings.model, drafter=str(tmp_path), **options) as llm:  # type: ignore[arg-type]
        llm.engine.speculator.policy = FixedDraftLength(drafter.depth)
        outputs = llm.generate(prompts, params)
    assert [one.token_ids for one in outputs] == plain
    steps = sum(one.speculation.steps for one in outputs)
    served = sum(one.speculation.num_emitted_tokens for one in outputs) / steps
    assert served == pytest.approx(found.mean_acceptance_length, rel=0.05)
    assert served > 1.1
