"""A PARD-2 draft model's logits are those of a plain computation with transformers, over the whole text at once."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.always_drafts import draft_always
from harness.checkpoints import write_checkpoint
from harness.exact_targets import skip_without_kernels
from harness.pard2_checkpoints import LAYERS, MASK, write_pard2
from paceline import LLM, SamplingParams
from paceline.drafters.pard2 import PROJECTION_FILE
from paceline.drafters.recurrent_heads.drafter import ParallelDrafter
from paceline.runtimes import load as load_module
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.request import Request

DEPTH, SCALE, NUM_COMPARED = 4, 0.3, 5
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0, seed=3)
VARIANTS: dict[str, dict[str, Any]] = {
    "layers and final state": {"layers": LAYERS},
    "final state only, with a bias, in torch": {"layers": (-1,), "has_bias": True},
    "qwen3, tied, without final state": {"family": "qwen3", "layers": (2, 0), "sizes": {"tie_word_embeddings": True}},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("pard2") / "target", "llama", num_hidden_layers=4, seed=8)


def reference(target: Path, draft: Path, layers: Sequence[int]) -> Callable[[Sequence[int]], np.ndarray]:
    """Return a function of a text: the logits [DEPTH, V] of the drafted positions after it, without any cache."""
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (target, draft)]
    projection = torch.load(draft / PROJECTION_FILE, weights_only=True)

    @torch.no_grad()
    def logits(text: Sequence[int]) -> np.ndarray:
        states = models[0](torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer][0] for layer in layers], dim=-1)
        features = torch.cat([torch.zeros_like(features[:1]), features])
        features = torch.cat([features, features[-1:].expand(DEPTH - 1, -1)])
        added = features @ projection["target_proj.weight"].T + projection.get("target_proj.bias", torch.zeros(()))
        embedded = models[1].get_input_embeddings()(torch.tensor([*text, *[MASK] * (DEPTH - 1)]))
        return models[1](inputs_embeds=(embedded + SCALE * added)[None]).logits[0, -DEPTH:].numpy()

    return logits


def recorded_drafts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], np.ndarray]]:
    """Return a list that receives the text and the logits of every later draft of one request."""
    assert isinstance(llm.drafter, ParallelDrafter)
    head, propose, run = llm.drafter.head, llm.drafter.propose, llm.drafter.head.run_target_feature_pairs
    drafts: list[tuple[list[int], np.ndarray]] = []
    seen: list[np.ndarray] = []

    def remembered(*args: Any, **options: Any) -> Any:
        outputs = run(*args, **options)
        seen.append(outputs.logits.copy())
        return outputs

    def recorded(requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> object:
        seen.clear()
        trees = propose(requests, budgets)
        if len(requests) == 1 and trees[0] is not None and len(seen[-1]) == DEPTH:
            drafts.append((list(requests[0].token_ids), seen[-1]))
        return trees

    monkeypatch.setattr(head, "run_target_feature_pairs", remembered)
    monkeypatch.setattr(llm.drafter, "propose", recorded)
    return drafts


@pytest.mark.parametrize("name", VARIANTS)
def test_pard2_logits_equal_transformers(name: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first token, after a prompt in chunks, after a prefix hit, and after drafts that were accepted or rejected."""
    skip_without_kernels()
    draft_always(monkeypatch)
    torch.set_num_threads(1)  # tiny products
    if name.endswith("in torch"):
        monkeypatch.setattr(load_module, "kernels_path", lambda: None)
    draft, layers = write_pard2(tmp_path / "draft", scale=SCALE, **VARIANTS[name]), VARIANTS[name]["layers"]
    expected = reference(target, draft, layers)
    options: dict[str, Any] = {"kv_cache_gb": 0.05, "prefill_chunk_size": 16, "draft_quantization": "none"}
    with LLM(str(target), drafter=str(draft), num_speculative_tokens=DEPTH, **options) as llm:
        drafts = recorded_drafts(llm, monkeypatch)
        long = np.random.default_rng(1).integers(1, 90, 70).tolist()
        for prompt, params in (([5], GREEDY), (long, GREEDY), ([*long[:66], 3], SAMPLED)):
            drafts.clear()
            output = llm.generate([prompt], params)[0]
            assert (output.usage.num_cached_tokens > 0) == (len(prompt) == 67)
            assert len(drafts) >= NUM_COMPARED
            for text, found in drafts[:NUM_COMPARED]:
                np.testing.assert_allclose(found, expected(text), atol=1e-4)
        assert llm.stats().drafter_failures == 0
