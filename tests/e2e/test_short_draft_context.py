"""A draft model whose context is shorter than the text drafts from the text's last tokens; the text is that of plain decoding."""

from pathlib import Path

import pytest

from harness.always_drafts import draft_always
from harness.checkpoints import write_checkpoint
from harness.exact_targets import skip_without_kernels
from paceline import LLM, SamplingParams

CONTEXT = 64
PROMPTS = ([5, 6, 7], [8, 9, 10, 11] * 30)  # the second one is longer than the draft model's context
SAMPLINGS = (SamplingParams(max_tokens=120, ignore_eos=True), SamplingParams(max_tokens=120, ignore_eos=True, temperature=1.0, seed=3))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("short")
    shape = {"num_hidden_layers": 2, "seed": 8}
    return write_checkpoint(root / "target", "llama", **shape), write_checkpoint(
        root / "draft", "llama", **shape, max_position_embeddings=CONTEXT
    )


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("params", SAMPLINGS, ids=["greedy", "sampled"])
def test_drafts_go_on_after_the_draft_models_context(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, params: SamplingParams, batch: int
) -> None:
    skip_without_kernels()
    draft_always(monkeypatch)
    target, draft = models
    with LLM(str(target), drafter=str(draft), num_speculative_tokens=4, draft_quantization="none", kv_cache_gb=0.05) as llm:
        assert "of texts longer than its context of 64" in llm.drafter.traits.description  # type: ignore[union-attr]
        for prompts in [PROMPTS] if batch == 2 else [[prompt] for prompt in PROMPTS]:
            plain = llm.generate(list(prompts), params, speculation={"enabled": False})
            found = llm.generate(list(prompts), params, speculation={"trees": True})
            for one, other in zip(found, plain, strict=True):
                assert one.token_ids == other.token_ids
                assert one.steps is not None
                late = [step for step in one.steps if step.start > CONTEXT]
                assert sum(bool(step.draft_token_ids) for step in late) >= len(late) - 2  # the last step has no room
                assert one.speculation.num_accepted_tokens > 0
        llm.drafter.cache.check()  # type: ignore[union-attr]
        llm.engine.cache.check()
